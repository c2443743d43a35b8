"""What many tests of launch need: one tiny model and dataset for all, and programs in the place of Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launch.slurm import commands as slurm_commands
from tests.unit.launch.site_kit import Commands

if TYPE_CHECKING:
    from tests.ring.run_kit import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    from tests.ring.run_kit import make_lab  # which imports torch

    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Programs before the system's own; whoever waits for Slurm looks again soon."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_commands, "PAUSE_S", 0.05)
    return Commands(tmp_path / "bin")
