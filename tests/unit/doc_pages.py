"""The pages of the repository as tests read them: fenced blocks, the commands in them, prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORIES_OF_PAGES = ("configs", "docs", "examples", "slurm", "tests", "bench", "launch", "rlhpc")
PAGES = sorted([*ROOT.glob("*.md"), *(path for name in DIRECTORIES_OF_PAGES for path in (ROOT / name).rglob("*.md"))])
NAMES_OF_PAGES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks_in(text: str) -> Iterator[tuple[str, str]]:
    """Language ("" where none is given) and content of every fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(page: Path, heading: str) -> str:
    """The part of a page below one of its headings, with all headings below it."""
    text = page.read_text(encoding="utf-8")
    (start,) = re.finditer(rf"^(#+) {re.escape(heading)}\n", text, re.MULTILINE)
    rest = text[start.end() :]
    following = re.search(
        rf"^#{{1,{len(start[1])}}} ", re.sub(r"^```.*?^```$", _blanked, rest, flags=re.S | re.M), re.M
    )
    return rest[: following.start()] if following else rest


def _blanked(block: re.Match[str]) -> str:
    return " " * len(block[0])


def blocks(page: Path, *languages: str, heading: str = "") -> Iterator[str]:
    """Content of the blocks in one of these languages, on the page or below one of its headings."""
    for language, block in blocks_in(section(page, heading) if heading else page.read_text(encoding="utf-8")):
        if language in languages:
            yield block


def commands(page: Path) -> Iterator[tuple[str, list[str] | None]]:
    """Commands with the output that is printed below them (console blocks), or None (bash blocks)."""
    for block in blocks(page, "bash"):
        yield from ((command, None) for command in commands_of_block("bash", block))
    for block in blocks(page, "console"):
        for part in block.split("$ ")[1:]:
            command, *output = part.splitlines()
            yield command.strip(), output


def commands_of_block(language: str, block: str) -> Iterator[str]:
    """Every command of a bash or console block; lines that end with a backslash are joined, comments left out."""
    joined = re.sub(r"\\\n\s*", "", block)
    for line in joined.splitlines():
        if language == "console" and not line.startswith("$ "):
            continue
        command = line.removeprefix("$ ").partition("  #")[0].strip()
        if command and not command.startswith("#"):
            yield command


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
