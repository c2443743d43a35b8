"""A command that we tell somebody to type can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launch.common.text import quoted
from launch.run_directory.owner import Holder, submits_alone
from rlhpc.protocol.errors import RunDirectoryError

LAUNCH = Path(__file__).parents[3] / "launch"
_COMMAND = re.compile(r"`(?:rlhpc|rm|wandb sync) [^`]*?\{([\w.]*(?:root|lock|written))\}[^`]*`")


def test_a_path_with_a_space_is_one_word_of_the_command(tmp_path: Path) -> None:
    lock = tmp_path / "my runs" / ".submission"
    lock.parent.mkdir()
    lock.write_text(Holder.of_this_process().to_json())
    with pytest.raises(RunDirectoryError) as refused, submits_alone(lock, print):
        raise AssertionError
    command = re.findall(r"`(.*?)`", str(refused.value))[-1]
    assert shlex.split(command) == ["rm", str(lock)]
    assert quoted(Path("/plain/run-1.2_b")) == "/plain/run-1.2_b", "as before where nothing needs it"


def test_no_command_is_told_with_a_run_directory_as_it_is() -> None:
    told = {
        path: _COMMAND.findall(path.read_text()) for path in LAUNCH.rglob("*.py") if "private_slurm" not in path.parts
    }
    # The values of status.py are filled in with what is quoted.
    assert {path.name: found for path, found in told.items() if found} == {"status.py": ["root", "root"]}
