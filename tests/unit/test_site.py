"""The sources of the site: every page is in its navigation, and what programs and docstrings print is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlhpc
from bench.site import for_the_site, loaded_from_elsewhere, write_pages
from tests.unit.doc_pages import ROOT
from tests.unit.test_doc_commands import subparsers

NAVIGATION = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site") / "pages"
    write_pages(directory)
    return directory


def test_every_page_is_in_the_navigation(pages: Path) -> None:
    assert sorted(NAVIGATION) == sorted({*NAVIGATION})
    found = {str(path.relative_to(pages)) for path in pages.rglob("*.md")}
    assert {page for page in found if not re.match(r"docs/decisions/\d", page)} == {*NAVIGATION}


def test_the_reference_has_every_command_every_name_and_every_decision(pages: Path) -> None:
    commands = (pages / "reference" / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^## rlhpc (\w+)$", commands, re.MULTILINE) == [*subparsers()]
    assert "--lift-quarantine" in commands
    names = (pages / "reference" / "python.md").read_text(encoding="utf-8")
    assert re.findall(r"heading: rlhpc\.(\w+)", names) == rlhpc.__all__
    decisions = (pages / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert decisions.count("\n- [") == len([*(ROOT / "docs" / "decisions").glob("*.md")])


def test_a_bar_in_the_code_of_a_table_has_no_backslash_on_the_site() -> None:
    assert for_the_site("| `a \\| b` | \\| |\n`c \\| d`\n") == "| `a | b` | \\| |\n`c \\| d`\n"


@pytest.mark.parametrize(
    ("tag", "is_foreign"),
    [
        ('<script src="https://cdn.example/a.js">', True),
        ('<img alt="a" src="//cdn.example/a.png">', True),
        ('<link rel="stylesheet" href="https://fonts.example/css">', True),
        ('<link rel="stylesheet" href="../assets/a.css"><a href="https://arxiv.org/abs/1506.02438">', False),
    ],
)
def test_what_would_be_loaded_from_another_host_is_found(tag: str, is_foreign: bool, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<html>{tag}</html>")
    assert bool([*loaded_from_elsewhere(tmp_path)]) == is_foreign
