"""Benchmarks that put something of their own in the place of our parts still fit these parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
        "ladder --directory {scratch} --steps 3 --rungs 2",
        "transport --seconds 1 --repeats 1",
    ],
)
def test_a_small_measurement_is_taken_to_its_end(words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *f"bench.{words.format(scratch=tmp_path)}".split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(character.isdigit() for character in done.stdout)
