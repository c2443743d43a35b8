"""The demo of containers in short: a model that mostly guesses learns to look into files, through real processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.demo.lookup import CAT, SHELL, make_lookup_model, write_tasks
from rlhpc.base.run_directory import RunLayout
from tests.ring.rollouts_on_disk import assert_looking_is_learnt, assert_the_audit_is_clean
from tests.ring.run_kit import ROOT, Run
from tests.task_directories import reachable_directory

pytestmark = [pytest.mark.ring, pytest.mark.vllm, pytest.mark.long, pytest.mark.soak]
NUM_STEPS = 30


@pytest.fixture(scope="module")
def demo(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunLayout, Path]]:
    """A finished run, and its model."""
    root = tmp_path_factory.mktemp("container")
    layout = RunLayout(root / "run")
    words = {"run.directory": layout.root, "run.num_steps": NUM_STEPS, "model.path": root / "model"}
    with reachable_directory() as cache:
        make_lookup_model(root / "model", form=SHELL)
        write_tasks(root / "model", 400, seed=0)
        words |= {
            "data.path": root / "model" / "tasks",
            "container.images": root / "model" / "images",
            "container.root_cache": cache,
        }
        copy = Path(shutil.copy(ROOT / "configs" / "demo_container.toml", root))
        with Run(copy, layout, *(f"{key}={value}" for key, value in words.items())) as run:
            assert run.finish() == 0, run.story()
            run.assert_nothing_is_left()
        yield layout, root / "model"


def test_a_model_learns_to_look_into_a_file(demo: tuple[RunLayout, Path]) -> None:
    assert_looking_is_learnt(*demo, CAT)


def test_the_audit_of_a_run_of_containers_is_clean(demo: tuple[RunLayout, Path]) -> None:
    assert_the_audit_is_clean(demo[0])
