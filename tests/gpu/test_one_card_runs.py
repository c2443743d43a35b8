"""Whole runs whose trainer ranks and engines are nodes to NCCL, on as many cards or on one (one_card.py)."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from tests.faults.test_exact_restart import NUM_STEPS, Course, run_killed_three_times, settings
from tests.gpu.one_card import place, several_nodes, why_not
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, make_lab, run_to_the_end

NUM_NODES = 3  # a trainer and two engines, or two ranks and an engine
NOT_HERE = why_not(NUM_NODES)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE), pytest.mark.timeout(600)]
LAYOUTS = {"dp2": {"num_ranks": 2}, "tp2": {"num_ranks": 2, "tensor_parallel": 2}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(autouse=True)
def nodes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card for each process, as far as `rlhpc run` sees."""
    for name, value in several_nodes(tmp_path_factory.mktemp("nodes"), NUM_NODES).items():
        monkeypatch.setenv(name, value)


def epochs(layout: RunLayout) -> str:
    return "".join(file.read_text() for file in sorted((layout.logs / "controller-0").glob("*.log")))


def test_a_trainer_and_two_engines_are_three_nodes(lab: Lab) -> None:
    is_on_gpu = place() == "cuda"
    engine = {"engine": "vllm", "kv_cache_bytes": 1 << 28, "enforce_eager": True} if is_on_gpu else {}
    transport = "nccl" if is_on_gpu else "gloo"
    sections: dict[str, Any] = {
        "model": {"dtype": "bfloat16" if is_on_gpu else "float32"},
        "generation": {"num_replicas": 2, **engine},
        "trainer": {"device": place(), "backend": "megatron"},
        "weights": {"transport": transport, "timeout_s": 60.0},
    }
    layout = run_to_the_end(lab, "three-nodes", **sections)
    assert_full_batches_trained_once(layout.rollouts, 6, 4, 4)
    assert f"by {transport}: generator-0, generator-1" in epochs(layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_that_are_killed_end_with_the_bits_of_two_that_were_not(lab: Lab, name: str) -> None:
    sections = settings(name, 1, backend="megatron", device=place(), **LAYOUTS[name])
    sections["model"] = {"dtype": "bfloat16"}
    sections["generation"] |= {"num_replicas": 1}
    whole = Course.of(run_to_the_end(lab, f"{name}-whole", **sections))
    layout = run_killed_three_times(lab, f"{name}-killed", 2, **sections)
    killed = Course.of(layout)
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
    assert [step for step in whole.steps if whole.steps[step] != killed.steps[step]] == []
    assert sorted(killed.steps) == list(range(NUM_STEPS))
    assert whole.rollouts == killed.rollouts
    assert whole.trainer == killed.trainer
