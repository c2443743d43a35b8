"""Where ZeRO keeps what, on three ranks: parameters span ranks, partitions have padding, and a rank may have none."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhpc.training.checkpoint_tensors import gather_stream
from rlhpc.training.deepspeed.backend import DeepSpeedBackend
from tests.contracts.trainer_cluster import Rank, RankProcesses
from tests.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.starts

WORLD_SIZE = 3


def everything(rank: Rank, *, model: Path) -> dict[str, Any]:
    """What one stage shows on one rank."""
    backend = rank.open(model)
    assert isinstance(backend, DeepSpeedBackend)
    state = backend._state
    facts: dict[str, Any] = {"fragments": state.fragments, "masters": whole(state, "weights")}
    facts["moments"] = [whole(state, kind) for kind in ("exp_avg", "exp_avg_sq")]
    optimizer = backend._engine.optimizer.optimizer
    facts["counters"] = [entry["step"].data_ptr() for entry in optimizer.state.values()]
    facts["num_elements"] = [flat.numel() for flat in state._flats]
    state.fill(ramp)
    state.num_steps_applied = 7
    state.publish()
    facts["filled"] = [whole(state, kind) for kind in ("weights", "exp_avg", "exp_avg_sq")]
    facts["published"] = {name: tensor.clone() for name, tensor in backend.weights()}
    facts["steps"] = [entry["step"].item() for entry in optimizer.state.values()]
    backend.close()
    return facts


def whole(state: Any, kind: str) -> dict[str, torch.Tensor]:
    stream = gather_stream(
        state.items(),
        lambda index: state.own(kind, index),
        to_rank=0,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return {name: tensor.clone() for name, tensor in stream}


def ramp(kind: str, spec: Any, start: int, stop: int) -> torch.Tensor:
    """Every number tells its place, its kind and, by its sum of letters, its parameter."""
    first = {"weights": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}[kind] + 10_000 * (sum(map(ord, spec.name)) % 97)
    return torch.arange(start, stop, dtype=torch.float32) + first


@pytest.fixture(scope="module")
def processes():
    processes = RankProcesses(WORLD_SIZE)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", hidden=32, layers=1, vocabulary=101)


@pytest.fixture(scope="module", params=[1, 2, 3])
def facts(request, processes, model, tmp_path_factory):
    layout = {"backend": "deepspeed", "num_ranks": WORLD_SIZE, "zero_stage": request.param}
    return processes.run(everything, layout, tmp_path_factory.mktemp("stage"), model=model)


@pytest.fixture(scope="module")
def checkpoint(model):
    return dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())


def test_every_rank_works_out_the_same_table(facts):
    assert all(other["fragments"] == facts[0]["fragments"] for other in facts)


def test_fragments_of_a_parameter_follow_one_another_and_cover_it(facts, checkpoint):
    table = facts[0]["fragments"]
    assert table.keys() == checkpoint.keys()
    for name, fragments in table.items():
        assert fragments[0].start == 0
        assert fragments[-1].stop == checkpoint[name].numel()
        assert all(left.stop == right.start and left.rank < right.rank for left, right in pairwise(fragments))
    assert any(len(fragments) > 1 for fragments in table.values())


def test_no_two_fragments_share_a_place_and_all_lie_inside(facts):
    every = [fragment for fragments in facts[0]["fragments"].values() for fragment in fragments]
    for rank in range(WORLD_SIZE):
        for flat, num_elements in enumerate(facts[rank]["num_elements"]):
            mine = sorted((f.offset, f.offset + f.num_elements) for f in every if (f.rank, f.flat) == (rank, flat))
            assert all(left[1] <= right[0] for left, right in pairwise(mine))
            assert mine[-1][1] <= num_elements


def test_masters_are_the_checkpoint_bit_for_bit_and_moments_are_zeros(facts, checkpoint):
    masters = facts[0]["masters"]
    assert masters.keys() == checkpoint.keys()
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in masters.items())
    for moments in facts[0]["moments"]:
        assert {name: tensor.shape for name, tensor in moments.items()} == {n: p.shape for n, p in checkpoint.items()}
        assert not any(tensor.any() for tensor in moments.values())


def test_what_is_filled_in_comes_out_and_reaches_the_parameters(facts):
    for kind, found in zip(("weights", "exp_avg", "exp_avg_sq"), facts[0]["filled"], strict=True):
        for name, tensor in found.items():
            spec = type("Named", (), {"name": name})
            assert torch.equal(tensor.view(-1), ramp(kind, spec, 0, tensor.numel())), name
    published = facts[0]["published"]
    assert published.keys() == facts[0]["filled"][0].keys()
    assert all(torch.equal(tensor, facts[0]["filled"][0][name]) for name, tensor in published.items())


def test_each_flat_tensor_counts_its_steps_with_a_counter_of_its_own(facts):
    for fact in facts:
        assert len(set(fact["counters"])) == len(fact["num_elements"])
        assert fact["steps"] == [7.0] * len(fact["num_elements"])
