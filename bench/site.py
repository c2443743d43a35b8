"""The documentation as a site: the pages of the repository, and what is printed by the program and its docstrings.

Input: README.md and the other pages, rlhpc's parser, docstrings.  Output: build/site, whose links and anchors have been
checked, and which loads nothing from another host.  Needs requirements/docs.txt, which `make docs` installs.

    python -m bench.site            build/pages (what zensical reads, with mkdocs.yml) and build/site
    python -m bench.site pages      build/pages alone
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import rlhpc
from launch.commands.arguments import command_parser
from rlhpc.metrics.names import table_markdown

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
COPIED = ("*.md", "docs/*.md", "docs/decisions/*.md", "docs/pictures/*.svg", "docs/pictures/*.png", "bench/*.md",
          "configs/*.md", "examples/*.md", "slurm/*.md", "rlhpc/buffer/*.md", "launch/private_slurm/*.md",
          "launch/submitit_hetjob/*.md", "tests/*.md", "tests/golden/*.md")  # fmt: skip
# What users write, and what it is given.
CONTRACTS = ("rlhpc.protocol.contracts.RewardFunction", "rlhpc.protocol.contracts.RewardOutcome",
             "rlhpc.protocol.environment.Environment", "rlhpc.protocol.environment.Step",
             "rlhpc.protocol.contracts.AdvantageEstimator", "rlhpc.protocol.contracts.PolicyLoss",
             "rlhpc.protocol.contracts.TokenRow")  # fmt: skip
OTHER_HOST = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(?:https?:)?//[^>]*>|<link[^>]*stylesheet[^>]*=["']?(?:https?:)?//[^>]*>"""
)


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, and build the site of them unless only they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("site", "pages"), default="site")
    options = parser.parse_args(arguments)
    write_pages(PAGES)
    if options.what == "pages":
        return 0
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=ROOT, check=False)
    if built.returncode:  # it has said which link leads nowhere
        return 1
    foreign = list(loaded_from_elsewhere(SITE))
    print(*foreign or [f"docs        {sum(1 for _ in SITE.rglob('*.html'))} pages: {SITE / 'index.html'}"], sep="\n")
    return int(bool(foreign))


def write_pages(directory: Path) -> None:
    """Copy the pages of the repository to the same paths, and write those that are made from the code."""
    shutil.rmtree(directory, ignore_errors=True)
    for path in sorted({path for pattern in COPIED for path in ROOT.glob(pattern)}):
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(for_the_site(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copy(path, copy)
    (directory / "reference").mkdir()
    (directory / "reference" / "commands.md").write_text(page_of_commands(), encoding="utf-8")
    (directory / "reference" / "python.md").write_text(page_of_python(), encoding="utf-8")
    (directory / "reference" / "metrics.md").write_text(page_of_metrics(), encoding="utf-8")
    (directory / "docs" / "decisions" / "README.md").write_text(page_of_decisions(), encoding="utf-8")


def for_the_site(text: str) -> str:
    """The text of a page as Python-Markdown reads it: a | in code is written without a backslash also in tables."""
    lines = [
        re.sub(r"(`+).*?\1", lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in text.splitlines()
    ]
    return "\n".join(lines).replace("](docs/decisions/)", "](docs/decisions/README.md)") + "\n"


def page_of_commands() -> str:
    """Return the help of every command, as `rlhpc COMMAND --help` prints it."""
    os.environ["COLUMNS"] = "90"
    (below,) = (action for action in command_parser()._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["# Commands", "", "What `rlhpc COMMAND --help` prints."]
    for name, parser in below.choices.items():
        parts += ["", f"## rlhpc {name}", "", "```text", parser.format_help().rstrip(), "```"]
    return "\n".join(parts) + "\n"


def page_of_metrics() -> str:
    """Return the names of metrics, as `rlhpc schema metrics` prints them."""
    return for_the_site(f"# Names of metrics\n\n[Metrics](../docs/metrics.md) has the terms.\n\n{table_markdown()}\n")


def page_of_python() -> str:
    """Directives for mkdocstrings: what `import rlhpc` offers, and what own code implements."""
    parts = ["# Python", "", "What `import rlhpc` offers. [From Python](../docs/python.md) has examples."]
    for name in rlhpc.__all__:
        module = getattr(rlhpc, name).__module__
        parts += ["", f"::: {module}.{name}", "    options:", f"      heading: rlhpc.{name}"]
    parts += ["", "## Own rewards, environments, advantages and losses"]
    for name in CONTRACTS:
        parts += ["", f"::: {name}", "    options:", "      heading_level: 3"]
    return "\n".join(parts) + "\n"


def page_of_decisions() -> str:
    """The decisions with their titles, oldest number first."""
    parts = ["# Decisions", "", "What others might have decided differently: context, choice, what was rejected.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        parts.append(f"- [{title}]({path.name})")
    return "\n".join(parts) + "\n"


def loaded_from_elsewhere(site: Path) -> Iterator[str]:
    """Every tag by which a page of the site would load something from another host."""
    for page in sorted(site.rglob("*.html")):
        yield from (f"{page}: {tag}" for tag in OTHER_HOST.findall(page.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
