"""Every command in every page is one that exists: rlhpc's are read by its own parser, make's are targets.

What neither of them knows (nvidia-smi, sbatch, …) stands in a block that begins with a comment `# needs …`, which
tells the reader as well.  Pages whose commands are executed besides: tests/unit/test_docs.py.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.commands.arguments import command_parser
from rlhpc.config.file import sections
from tests.unit.doc_pages import NAMES_OF_PAGES, PAGES, ROOT, blocks, blocks_in, commands_of_block, prose

PROGRAMS = ("rlhpc", "make", "python", "python3", "pip", "sbatch", "srun", "scontrol", "tensorboard", "nvidia-smi")
# Commands of everybody's that the pages use.  Their own tests, or tests/unit/test_docs.py, say what becomes of them.
SHELL = {
    "source .venv/bin/activate",
    "tensorboard --logdir runs",
    "python3 -m venv .venv",
    "sudo apt-get install python3-venv make",
}
CALLED_BY_TESTS = {"launch/private_slurm/README.md"}  # tests/slurm/test_dev_cluster_page.py runs its first block
# Commands that are shown with their output, refusals among them: these tests compare every line of it.
SHOWN_WITH_OUTPUT = {
    "configs/README.md": "tests/unit/test_docs.py",
    "docs/training.md": "tests/unit/launch/test_memory_plan.py",
    "docs/slurm.md": "tests/unit/launch/test_job_plan.py",
    "docs/tutorial.md": "tests/unit/test_tutorial.py",
}
NOT_COMMANDS = {"rollouts", "journal"}  # `rlhpc rollouts` and `rlhpc journal` begin files
KEY = re.compile(r"([a-z]\w*)\.([a-z]\w*)=.*", re.DOTALL)


def fault_of(command: str) -> str | None:
    """What is wrong with a command as it is printed, or None."""
    if command in SHELL or re.fullmatch(r"export [A-Z_]+=\S+", command):
        return None
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # a variable for this command alone
        words = words[1:]
    if not words:
        return "no command"
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "rlhpc":
        return fault_of_arguments(arguments)
    if program == "make":
        return fault_of_targets(arguments)
    if program in {"python", "python3"}:
        return fault_of_program(arguments)
    if program == "pip" and arguments[:1] == ["install"]:
        return fault_of_files(arguments)
    return "not known here, and its block does not begin with `# needs …`"


@cache
def parser() -> argparse.ArgumentParser:
    return command_parser()


def fault_of_arguments(arguments: list[str]) -> str | None:
    """Of rlhpc's, read by the very parser of the command line; nothing is executed."""
    try:
        _, rest = parser().parse_known_args(arguments)
    except SystemExit as end:  # argparse: --help, or a fault that it has printed
        return None if end.code == 0 else "the parser of rlhpc refuses it"
    if strange := [word for word in rest if word.startswith("-")]:
        return f"no such option: {strange}"
    for word in arguments:
        if (match := KEY.fullmatch(word)) and match[2] not in keys_of(match[1]):
            return f"no such key: {match[1]}.{match[2]}"
    return None


def keys_of(section: str) -> set[str]:
    """Keys of a section of the run file; none where there is no such section."""
    return set(sections()[section].model_fields) if section in sections() else set()


def fault_of_targets(arguments: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    variables = set(re.findall(r"\$[({](?:if \$\()?([A-Z_]+)\b", text))
    for word in arguments:
        name, equals, _ = word.partition("=")
        if (name not in variables) if equals else (name not in targets):
            return f"Makefile has no {'variable' if equals else 'target'} {name}"
    return None


def fault_of_program(arguments: list[str]) -> str | None:
    """Of `python FILE` or `python -m MODULE`."""
    if arguments[:1] == ["-m"]:
        module = arguments[1].replace(".", "/")
        ours = (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists()
        return fault_of_files(arguments[2:]) if ours or arguments[1] in {"pytest", "venv"} else "no such module"
    return None if arguments and (ROOT / arguments[0]).is_file() else "no such program"


def fault_of_files(arguments: list[str]) -> str | None:
    """Files of the repository among the arguments must exist."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for word in arguments:
        if "/" in word and word.split("/")[0] in tops and not (ROOT / word).exists():
            return f"no such file: {word}"
    return None


def faults_of_page(text: str, page: str = "") -> Iterator[str]:
    """Every command of a page that is neither known nor marked, with what is wrong."""
    for language, block in blocks_in(text):
        if language == "console" and page in SHOWN_WITH_OUTPUT:
            continue
        if language not in {"bash", "console"}:
            yield from (
                f"{line!r} is a command in a block that is not marked bash or console"
                for line in block.splitlines()
                if language in {"", "text", "sh", "shell"} and looks_like_a_command(line)
            )
        elif not block.startswith("# needs "):
            faults = ((command, fault_of(command)) for command in commands_of_block(language, block))
            yield from (f"{command!r}: {fault}" for command, fault in faults if fault)


def looks_like_a_command(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and words[0].removeprefix(".venv/bin/") in PROGRAMS


# --------------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("page", PAGES, ids=NAMES_OF_PAGES)
def test_every_command_of_a_page_is_known_or_marked(page: Path) -> None:
    name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    if name in CALLED_BY_TESTS:
        text = text.replace(next(blocks(page, "bash")), "")
    assert list(faults_of_page(text, name)) == []


def test_output_that_a_page_shows_is_compared_by_the_test_that_is_named() -> None:
    for page, test in SHOWN_WITH_OUTPUT.items():
        assert any(language == "console" for language, _ in blocks_in((ROOT / page).read_text(encoding="utf-8")))
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=NAMES_OF_PAGES)
def test_options_of_commands_in_prose_and_tables_exist(page: Path) -> None:
    if page.name == "log.md":
        return  # it tells what was
    for span in re.findall(r"`(rlhpc [^`]*)`", prose(page)):
        command, *words = span.removeprefix("rlhpc ").split()
        if command in subparsers():
            options = {option for word in words for option in re.findall(r"--[a-z][a-z-]*", word)}
            assert options <= options_of(subparsers()[command]), span
        else:
            assert command in NOT_COMMANDS or not re.fullmatch(r"[a-z]+", command), f"{span}: no such command"


@cache
def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Options of a command and of the commands below it (`cluster up`)."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return set(parser._option_string_actions).union(
        *(options_of(child) for action in below for child in action.choices.values())
    )


# --------------------------------------------------------------------------------------------------- the check itself


@pytest.mark.parametrize(
    "block",
    [
        "```bash\nrlhpc rum RUN.toml\n```",
        "```bash\nrlhpc run RUN.toml --frsh\n```",
        "```bash\nrlhpc run RUN.toml admission.max_stalenes=2\n```",
        "```bash\nrlhpc run RUN.toml \\\n    trainr.num_ranks=2\n```",
        "```bash\nmake demoo\n```",
        "```bash\nmake test NO_SUCH_VARIABLE=1\n```",
        "```bash\nnvidia-smi\n```",
        "```bash\npython examples/no_such_program.py\n```",
        "```bash\n.venv/bin/python -m bench.no_such_module\n```",
        "```bash\n.venv/bin/pip install -c requirements/gpu-2.7.txt .\n```",
        "```console\n$ rlhpc stat runs/first\nsomething\n```",
        "```\nrlhpc run RUN.toml\n```",
    ],
)
def test_a_command_that_nobody_knows_is_found(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(faults_of_page(f"Text.\n\n{block}\n"))) == 1


@pytest.mark.parametrize(
    "block",
    [
        "```bash\nrlhpc run RUN.toml --resume --step 3 admission.max_staleness=2  # why\n# a comment\n```",
        '```bash\nmake setup TORCH_ARGS="--index-url URL"\n```',
        "```bash\n# needs a GPU\nnvidia-smi\n```",
        "```text\nstep 120/2000\n```",
    ],
)
def test_a_command_that_is_known_or_marked_passes(block: str) -> None:
    assert list(faults_of_page(f"Text.\n\n{block}\n")) == []
