"""`rlhpc completion`: shells complete commands, options and paths, without a Python."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import completion_script, main
from launch.commands.arguments import command_parser
from rlhpc.protocol.errors import EXIT_CONFIG

NO_SHTAB = "no shtab here: pip install 'rlhpc[completion]'"
ASK = """
source {script}
COMP_WORDS=({words}) COMP_CWORD={place}
_shtab_rlhpc
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab", reason=NO_SHTAB)
    path = tmp_path_factory.mktemp("completion") / "rlhpc.bash"
    path.write_text(completion_script(command_parser(), "bash"))
    return path


def completed(script: Path, directory: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    ask = ASK.format(script=script, words=" ".join(map(shlex.quote, words)), place=len(words) - 1)
    command = [shutil.which("bash") or "bash", "--norc", "--noprofile", "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=True, env={"PATH": ""})
    assert not done.stderr  # nothing is on the path: a shell that completes starts no program
    return sorted(filter(None, done.stdout.splitlines()))


def commands() -> list[str]:
    parser = command_parser()
    (subparsers,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return sorted(subparsers.choices)


@pytest.mark.starts
def test_bash_completes_commands_options_values_and_paths(script: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "RUN.toml").touch()
    assert completed(script, tmp_path, "rlhpc", "st") == ["status", "stop"]
    assert [word for word in completed(script, tmp_path, "rlhpc", "") if not word.startswith("-")] == commands()
    assert completed(script, tmp_path, "rlhpc", "status", "--j") == ["--json"]
    assert completed(script, tmp_path, "rlhpc", "tensorboard", "--bi") == ["--bind-all"]
    assert completed(script, tmp_path, "rlhpc", "run", "R") == ["RUN.toml"]
    assert completed(script, tmp_path, "rlhpc", "status", "") == ["runs"]  # a run is a directory
    assert completed(script, tmp_path, "rlhpc", "submit", "RUN.toml", "R") == ["RUN.toml"]
    assert completed(script, tmp_path, "rlhpc", "report", "runs", "--html", "R") == ["RUN.toml"]
    assert completed(script, tmp_path, "rlhpc", "data", "s") == ["stats"]


@pytest.mark.starts
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(shell: str, tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason=NO_SHTAB)
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here: apt-get install {shell}")
    path = tmp_path / "script"
    path.write_text(completion_script(command_parser(), shell))
    subprocess.run([shell, "-n", str(path)], check=True)
    if shell == "fish":
        ask = f"source {path}; complete -C 'rlhpc st'"
        done = subprocess.run([shell, "--no-config", "-c", ask], check=True, capture_output=True, text=True)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["status", "stop"]


def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == EXIT_CONFIG
    assert "pip install 'rlhpc[completion]'" in capsys.readouterr().err
