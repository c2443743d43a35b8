"""What README and docs say is so: commands run, links lead somewhere, every key stands in the table, files exist."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from launch.cli import main
from launch.commands.schema import reference
from tests.unit.doc_pages import NAMES_OF_PAGES, PAGES, ROOT, blocks, commands, prose

PAGES_WITH_COMMANDS = [ROOT / "README.md", ROOT / "configs" / "README.md"]
PAGES_WITH_COMMANDS += [ROOT / "docs" / "install.md", ROOT / "docs" / "data.md"]

# Commands of the pages that no test here executes, and why.  Everything else in a bash or console block is executed.
NOT_RUN = {
    "make setup": "installs for minutes; this very test runs in what it made",
    "make demo": "minutes; CI runs it on its own",
    "make quick": "would run this test",
    "make test": "would run this test",
    "make test-all": "half an hour; before a release",
    "make check": "would run this test",
    "sudo apt-get install python3-venv make": "needs root",
    "python3 -m venv .venv": "installs; make setup does the same",
    ".venv/bin/pip install -c requirements/gpu-3.11.txt '.[gpu]'": "installs gigabytes, for a machine with a GPU",
    ".venv/bin/rlhpc check configs/gsm8k.toml": "needs the reader's model and data",
    "source .venv/bin/activate": "changes the shell",
    "rlhpc run RUN.toml": "starts engines for a minute; tests/ring starts whole runs",
    "rlhpc run RUN.toml model.path=stand-in model.dtype=float32 run.name=try run.num_steps=3 "
    "admission.active_sampling=false": "starts engines for a minute; tests/ring starts whole runs",
    "rlhpc run RUN.toml --resume": "needs a run; tests/ring resumes one",
    "rlhpc status runs/first": "needs a run",
    "rlhpc rollouts runs/first --verdict wrong --sample 5": "needs a run; tests/unit/launch/test_rollouts.py has some",
    "rlhpc report runs/first --html report.html": "needs a run; tests/unit/launch/test_report.py has one",
    "rlhpc stop runs/first": "needs a run that lives",
    "rlhpc export runs/first trained-model": "needs a checkpoint; training/test_checkpoint_tensors.py exports one",
    "rlhpc doctor site.toml --quick": "needs a cluster; tests/slurm/test_doctor.py has one",
    "rlhpc submit RUN.toml site.toml": "needs a cluster; tests/slurm has one, for this and the next two",
    "rlhpc logs runs/first trainer -f": "needs a run",
    "rlhpc scale runs/first --generators +2 --partition scavenge": "needs a run that lives",
    "rlhpc tensorboard runs": "serves until it is stopped",
}

# What stands in backticks and looks like a file of the repository, but is one of the reader's.
FILES_OF_THE_READER = {
    "trained-model/", "my_rewards.py", "RUN.toml", "site.toml", "train.jsonl", "slurm/site.toml"
}  # fmt: skip
PAGES_ON_OTHERS = {"docs/coming_from.md"}  # they name files of other projects
DIRECTORIES = {"rlhpc", "launch", "tests", "docs", "configs", "bench", "slurm", "requirements", "examples", ".ci"}


# ------------------------------------------------------------------------------------------------------ configs/README


def test_the_page_of_the_run_file_is_of_today() -> None:
    page = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n{reference()}"), "python -m launch.commands.schema configs/README.md"


def test_the_reference_tells_types_bounds_usual_values_defaults_and_conditions() -> None:
    rows = reference().splitlines()
    for row in (
        "| `token_budget` | integer above 0; usual 1 to 1e7 | **required** | Tokens of one ",
        '| `device` | `"auto"` or `"cpu"` or `"cuda"` | `"auto"` | ',
        "| `adam_beta2` | number from 0, below 1; usual 0.8 to 1 | `0.95` | ",
        "| `num_replicas` | integer above 0; usual 1 to 1024 | `1` | Reward services, one ",
        'Only with `data.task` = `"exact_match"` or `"token_f1"`.',
    ):
        assert [each for each in rows if each.startswith(row)], row
    ends = {each.split("`")[1]: each for each in rows if each.startswith("| `")}
    for key, condition in {
        "zero_stage": 'Only with `backend` = `"deepspeed"`.',
        "gpu_memory_utilization": "Only without `kv_cache_bytes`.",
        "scale_rate_by_age": "No effect with `admission.max_staleness` = `0` or `1` (no token is older).",
        "variance": "Only with `overlong_tokens` or `length_weight`.",
        "max_token_age": "Only with a loss of rlhpc.",
    }.items():
        assert ends[key].endswith(f" {condition} |"), ends[key]


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory such as README describes: model, data, RUN.toml."""
    from tests.tiny_models import make_tiny_checkpoint

    make_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(next(blocks(ROOT / "README.md", "json")))
    (tmp_path / "RUN.toml").write_text(next(blocks(ROOT / "README.md", "toml")))
    site = (ROOT / "slurm" / "sites" / "example.toml").read_text()
    (tmp_path / "site.toml").write_text(site.replace("/shared/project", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.starts
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_do_what_the_page_shows(
    page: Path, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, expected in commands(page):
        if command in NOT_RUN:
            assert expected is None, f"{command!r} is shown with output that nothing checks"
            continue
        program, *arguments = shlex.split(command)
        assert program == "rlhpc", f"{page.name}: {command!r} is neither executed nor in NOT_RUN with a reason"
        monkeypatch.setattr(sys, "argv", ["rlhpc", *arguments])
        try:
            status = main(arguments)
        except SystemExit as end:  # argparse, after --help
            status = int(end.code or 0)
        captured = capsys.readouterr()
        printed = (captured.out + captured.err).replace(str(workplace), "/home/me").rstrip("\n").splitlines()
        if expected is None:
            assert status == 0, f"{command!r}: {printed}"
        else:
            assert printed == expected, command


def test_no_reason_is_given_for_a_command_that_no_page_shows() -> None:
    shown = {command for page in PAGES_WITH_COMMANDS for command, _ in commands(page)}
    assert set(NOT_RUN) <= shown


# ------------------------------------------------------------------------------------------------------ links and names


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES_OF_PAGES)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), target


def test_every_page_that_is_named_anywhere_exists_with_its_heading() -> None:
    """In code, messages, settings and pages; a file that git does not know, such as a run's, is not read."""
    folders = [path for path in ROOT.iterdir() if path.name in DIRECTORIES]
    files = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in {"", ".md", ".toml", ".cff", ".yml"}]
    files += [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in {".py", ".pyi", ".toml", ".md", ".txt", ".html", ".sbatch", ".sh", ".def"}
    ]
    missing, found = [], 0
    for path in files:
        for name, anchor in re.findall(r"\bdocs/([\w/-]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8")):
            found += 1
            page = ROOT / "docs" / name
            of_others = {"lora", "recipes"} & {*path.parts} or str(path.relative_to(ROOT)) in PAGES_ON_OTHERS
            if of_others or name == "decisions/README.md":  # bench/site.py writes this one
                continue
            if not page.exists() or (anchor and anchor not in _anchors(page)):
                missing.append(f"{path.relative_to(ROOT)}: docs/{name}#{anchor}")
    assert missing == []
    assert found > 100


@pytest.mark.parametrize("page", PAGES, ids=NAMES_OF_PAGES)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    if str(page.relative_to(ROOT)) in PAGES_ON_OTHERS:
        return
    known_tests = text_of_tests()
    words = re.findall(r"`([^`\s]+)`", prose(page))
    missing = [word for word in words if not _exists(word, known_tests) and not (page.parent / word).exists()]
    assert not missing


@cache
def text_of_tests() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))


def _exists(word: str, known_tests: str) -> bool:
    """True for what names no file or test of the repository, or one that is there.  NAME stands for any name."""
    if word in FILES_OF_THE_READER or any(letter in word for letter in "*{}<>…=") or "NAME" in word:
        return True
    if re.fullmatch(r"test_\w+", word):
        return f"def {word}(" in known_tests
    if "/" in word and word.split("/")[0] in DIRECTORIES:
        return (ROOT / word.partition(":")[0]).exists()
    if word.endswith(".py"):
        return any((ROOT / root).exists() for root in (word, f"rlhpc/{word}")) or any(
            path.name == word for folder in ("rlhpc", "launch", "tests") for path in (ROOT / folder).rglob("*.py")
        )
    return True


def test_what_is_cited_is_the_version_that_is_installed() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_pages_stay_short_enough_to_be_read() -> None:
    lines = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    assert lines["README.md"] <= 180
    assert lines["docs/design.md"] <= 400
    docs = {page: number for page, number in lines.items() if re.fullmatch(r"docs/\w+\.md", page)}
    assert len(docs) <= 19
    assert sum(docs.values()) - docs["docs/log.md"] <= 4_800
