"""Benchmarks that put something of their own in the place of our parts still fit these parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.starts, pytest.mark.long, pytest.mark.timeout(4 * PATIENCE_S)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words",
    [
        "batch_path --ranks 2 --rollouts 32 --tokens 64 --steps 4 --step-s 0.1",
        "controller --tokens 64 --seconds 1",
        "granting --leases 50 --groups 500",
        "ladder --directory {scratch} --steps 3 --first 2",
        "transport --seconds 1 --repeats 1",
    ],
)
def test_a_small_measurement_is_taken_to_its_end(words: str, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", *f"bench.{words.format(scratch=tmp_path)}".split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, errors = program.communicate(timeout=3 * PATIENCE_S)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(program.pid).children(recursive=True):
            child.kill()
        program.kill()
        program.communicate()
        raise
    assert program.returncode == 0, errors[-2000:]
    assert any(character.isdigit() for character in said)
