"""What the trainer contract does not ask of every backend: main weights, refusals, short messages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhpc.config.rules import Config
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.contracts.trainer_cluster import Rank, RankProcesses
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import tiny_config
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts

TP2 = {"backend": "megatron", "num_ranks": 2, "tensor_parallel": 2}
DP2 = {"backend": "megatron", "num_ranks": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen2", hidden=32, layers=2, tied=True)


@pytest.fixture(scope="module")
def two_ranks():
    processes = RankProcesses(2)
    yield processes
    processes.close()


def save_at_once(rank: Rank, *, model: Path, directory: Path) -> Any:
    backend = rank.open(model, dtype="bfloat16")
    files = backend.save(directory).result()
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.close()
    return files, weights


@pytest.mark.parametrize("layout", [TP2, DP2, DP2 | {"distributed_optimizer": False}], ids=["tp2", "dp2", "replicated"])
def test_a_bfloat16_model_starts_from_the_checkpoint_in_float32(two_ranks, model, layout, tmp_path):
    answers = two_ranks.run(save_at_once, layout, tmp_path, model=model, directory=tmp_path / "ckpt")
    files, weights = answers[0]
    expected = load_file(model / "model.safetensors")
    found = {}
    for name in files:
        if name.startswith("weights-"):
            found |= load_file(tmp_path / "ckpt" / name)
        elif name.startswith("exp_avg"):
            assert not any(tensor.any() for tensor in load_file(tmp_path / "ckpt" / name).values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert found.keys() == weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in weights.items())


def refuse(rank: Rank, *, model: Path) -> str:
    """Refused after groups were opened; then opened with what is legal, in the same processes."""
    with pytest.raises(ConfigError) as refusal:
        rank.open(model, expert_parallel=2)
    config: Config = tiny_config(model, **rank.layout)
    address = f"file://{rank.scratch / 'second'}"
    open_backend(config, RankContext(rank.rank, rank.world_size, address)).close()
    return str(refusal.value)


def test_a_refused_model_leaves_the_processes_usable(two_ranks, model, tmp_path):
    messages = two_ranks.run(refuse, DP2, tmp_path, model=model)
    assert all("trainer.expert_parallel=2" in message for message in messages)


def test_offload_is_refused_without_a_gpu(two_ranks, model, tmp_path):
    messages = two_ranks.run(refuse_offload, DP2, tmp_path, model=model)
    assert all("trainer.optimizer_offload=true" in message and "legal" in message for message in messages)


def refuse_offload(rank: Rank, *, model: Path) -> str:
    with pytest.raises(ConfigError) as refusal:
        rank.open(model, optimizer_offload=True, dtype="bfloat16")
    return str(refusal.value)


def exchange(rank: int, world_size: int) -> Any:
    from rlhpc.training.ranks import Exchange

    messages = Exchange()
    heard = messages.from_rank(1, {"rank": rank, "tenth": 0.1, "odd": [math.inf, math.nan]})
    return heard, messages.of_all(["x" * 10 * rank, rank])


def test_messages_arrive_whole_on_every_rank(tmp_path):
    for heard, of_all in run_ranks(2, exchange, tmp_path):
        assert heard["rank"] == 1
        assert heard["tenth"] == 0.1
        assert heard["odd"][0] == math.inf
        assert math.isnan(heard["odd"][1])
        assert of_all == [["", 0], ["x" * 10, 1]]
