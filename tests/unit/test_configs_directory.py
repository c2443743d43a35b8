"""Every run file that we ship is accepted by the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.file import load_config
from rlhpc.config.tables import OWN_REWARD
from rlhpc.rewards.registry import validate_task

RUN_FILES = sorted((Path(__file__).parents[2] / "configs").rglob("*.toml"))


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_shipped_run_file_is_valid_and_names_a_reward_that_exists(path: Path) -> None:
    config = load_config(path)
    assert config.run.name in (path.stem, path.stem.replace("_", "-"))
    for task in config.judging_tasks:  # of a composite its parts
        if task != OWN_REWARD:
            validate_task(task)
