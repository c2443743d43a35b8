"""What docs/tutorial.md shows of `rlhpc check` and `rlhpc data` is what they print.

What runs print (text blocks) is of one real run and not compared: it differs from machine to machine.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from launch.cli import main
from tests.unit.doc_pages import ROOT, commands

PAGE = ROOT / "docs" / "tutorial.md"
ELIDED = "…"  # a line of the page that stands for any number of lines


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's directory after `python examples/word_problems.py tutorial`, with an untaught model."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import word_problems

    (tmp_path / "tutorial").mkdir()
    word_problems.write_dataset(tmp_path / "tutorial" / "train.parquet", word_problems.NUM_PROBLEMS, seed=1)
    word_problems.make_model(tmp_path / "tutorial" / "model", clean_steps=1, careless_steps=1)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.starts
def test_what_the_tutorial_shows_of_check_and_of_data_is_what_they_print(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [(command, output) for command, output in commands(PAGE) if output is not None]
    assert len(shown) >= 3
    for command, expected in shown:
        program, *arguments = shlex.split(command)
        known = [("rlhpc", "check"), ("rlhpc", "data")]
        assert (program, arguments[0]) in known, f"{command!r} is shown with output that nothing checks"
        capsys.readouterr()
        main(arguments)
        captured = capsys.readouterr()
        printed = (captured.out + captured.err).replace(str(place), "/home/me/rlhpc")
        pattern = "".join(r"(?:.*\n)*?" if line == ELIDED else re.escape(line) + r"\n" for line in expected or [])
        assert re.fullmatch(pattern, printed), f"$ {command}\n{printed}"
