from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout, num_experts
from rlhpc.protocol.errors import ConfigError

DENSE = {
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
}
MIXTURE = DENSE | {"num_experts": 128}


def layout_of(**keys: Any) -> ParallelLayout:
    return ParallelLayout.of(TrainerConfig(token_budget=64, backend="megatron", **keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"num_ranks": 1},
        {"num_ranks": 8, "tensor_parallel": 2},
        {"num_ranks": 24, "tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 3},
        {"num_ranks": 16, "expert_parallel": 8},
    ],
)
def test_the_axes_multiply_to_the_ranks(keys: dict[str, int]) -> None:
    layout = layout_of(**keys)
    assert layout.num_ranks == keys["num_ranks"]
    assert layout.data * keys.get("tensor_parallel", 1) * keys.get("pipeline_parallel", 1) * keys.get(
        "context_parallel", 1
    ) == layout.num_ranks  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "multiple"),
    [
        ({}, 1),
        ({"tensor_parallel": 4}, 1),
        ({"tensor_parallel": 4, "sequence_parallel": True}, 4),
        ({"context_parallel": 2}, 4),
        ({"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}, 8),
    ],
)
def test_a_row_divides_into_early_and_late_parts_and_those_over_tensor_ranks(
    keys: dict[str, Any], multiple: int
) -> None:
    assert layout_of(num_ranks=8, **keys).row_multiple == multiple


@pytest.mark.parametrize("size", [1, 7, 203, 151_936])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_every_tensor_rank_holds_as_much_of_the_vocabulary_with_less_than_a_row_each_for_nothing(
    size: int, tensor: int
) -> None:
    padded = layout_of(num_ranks=tensor, tensor_parallel=tensor).padded_vocabulary(size)
    assert padded % tensor == 0
    assert 0 <= padded - size < tensor


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (DENSE, {}),
        (DENSE, {"tensor_parallel": 4, "sequence_parallel": True}),
        (DENSE, {"pipeline_parallel": 2, "chunks_per_stage": 2}),
        (MIXTURE, {"expert_parallel": 8}),
        (MIXTURE, {"expert_parallel": 8, "tensor_parallel": 2, "sequence_parallel": True}),
        ({key: value for key, value in DENSE.items() if key != "num_key_value_heads"}, {"tensor_parallel": 4}),
    ],
)
def test_a_model_that_divides_is_taken(model: dict[str, int], keys: dict[str, Any]) -> None:
    layout_of(num_ranks=8, **keys).refuse_unfit(model)


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        (DENSE, {"tensor_parallel": 8}, ["tensor_parallel = 8", "num_key_value_heads = 4", "legal: 1, 2, 4"]),
        (DENSE | {"num_key_value_heads": 28}, {"tensor_parallel": 8}, ["num_key_value_heads = 28"]),
        (DENSE | {"intermediate_size": 18945}, {"tensor_parallel": 2}, ["tensor_parallel = 2", "intermediate_size"]),
        (DENSE, {"pipeline_parallel": 8}, ["pipeline_parallel × chunks_per_stage = 8", "num_hidden_layers = 28"]),
        (DENSE, {"pipeline_parallel": 2, "chunks_per_stage": 4}, ["chunks_per_stage = 8", "legal: 1, 2, 4, 7"]),
        (DENSE, {"expert_parallel": 2}, ["expert_parallel=2", "no experts"]),
        (MIXTURE | {"num_experts": 60}, {"expert_parallel": 8}, ["expert_parallel = 8", "num_experts = 60"]),
        (MIXTURE, {"tensor_parallel": 2}, ["tensor_parallel=2", "sequence_parallel=true"]),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_key(
    model: dict[str, int], keys: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        layout_of(num_ranks=8, **keys).refuse_unfit(model)
    for word in words:
        assert word in str(refused.value)


def test_experts_are_found_under_either_name() -> None:
    assert num_experts({"num_experts": 8}) == num_experts({"num_local_experts": 8}) == 8
    assert num_experts({"num_experts": None}) == num_experts({}) == 0
