"""The demo of containers in short: a model that mostly guesses learns to look into files, through real processes."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from launch.demo.lookup import CAT, SHELL, make_lookup_model, write_tasks
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.data.tokenizer import PromptTokenizer
from tests.ring.rollouts_on_disk import assert_the_audit_is_clean
from tests.ring.run_kit import ROOT, Run
from tests.task_directories import reachable_directory

pytestmark = [pytest.mark.ring, pytest.mark.vllm, pytest.mark.long, pytest.mark.soak]
NUM_STEPS = 30


@pytest.fixture(scope="module")
def demo(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunLayout, Path, str]]:
    """A finished run, its model, and the beginning of what a model does that looks."""
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
        _run(copy, layout, words)
        yield layout, root / "model", CAT


def _run(copy: Path, layout: RunLayout, words: dict[str, object]) -> None:
    with Run(copy, layout, *(f"{key}={value}" for key, value in words.items())) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()


def test_a_model_learns_to_look_into_a_file(demo: tuple[RunLayout, Path, str]) -> None:
    layout, model, look = demo
    tokenizer = PromptTokenizer(model)
    call = int(tokenizer.encode_rendered(look)[0])
    rewards, searches = defaultdict[int, list[float]](list), defaultdict[int, list[bool]](list)
    for resolved in read_rollouts_directory(layout.rollouts):
        for member in resolved.group.members:
            rollout = member.rollout
            rewards[resolved.group.admitted_version].append(member.reward)
            own = rollout.token_ids[rollout.loss_mask]
            searches[resolved.group.admitted_version].append(bool((own == call).any()))
            assert rollout.loss_mask[-1]
            assert (rollout.behaviour_logprobs[~rollout.loss_mask] == 0).all()
    versions = sorted(rewards)
    first, latest = (
        rewards[versions[0]],
        versions[-4:],
    )  # of the last one, the end of the run leaves a few that were short
    last = np.concatenate([rewards[version] for version in latest])
    assert np.mean(first) <= 0.3
    assert np.mean(last) >= 0.8
    assert np.mean(searches[versions[0]]) < np.mean(np.concatenate([searches[version] for version in latest]))


def test_the_audit_of_a_run_of_containers_is_clean(demo: tuple[RunLayout, Path, str]) -> None:
    assert_the_audit_is_clean(demo[0])
