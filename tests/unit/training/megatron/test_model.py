"""The Megatron policy against transformers: the same log-probabilities and gradients, whatever is shared over ranks."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhpc.protocol.types import PackedMicrobatch
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.megatron.policy_ranks import Case, Seen, mixed_row, rank_results, unpacked_logprobs
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts

VOCABULARY = 101  # not a multiple of the tensor ranks
ROWS = [mixed_row(1, VOCABULARY, (5, 17, 1, 30)), mixed_row(2, VOCABULARY, (40, 2, 9))]
LLAMA3_ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TENSOR = {"tensor_parallel": 2}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}


def checkpoint(directory: Path, family: str, *, tied: bool = True, layers: int = 2, **changes: object) -> Path:
    """A tiny model; `changes` overwrite keys of its config.json, which no weight depends on."""
    path = make_tiny_checkpoint(directory, family, layers=layers, tied=tied, vocabulary=VOCABULARY)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return path


def assert_as_transformers(
    cases: dict[str, Case], seen: list[list[Seen]], rows: list[PackedMicrobatch] = ROWS, *, tolerance: float = 1e-5
) -> None:
    """Every row was seen, on every rank that saw it as transformers sees its segments, and all gradients agree."""
    for index, (name, case) in enumerate(cases.items()):
        reference = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=torch.float32)
        expected = [unpacked_logprobs(reference, row).detach() for row in rows]
        of_case = [of_rank[index] for of_rank in seen]
        assert {row for of_rank in of_case for row in of_rank.rows} == set(range(len(rows))), name
        for of_rank in of_case:
            for row, (logprobs, entropies) in of_rank.rows.items():
                assert (logprobs - expected[row]).abs().max() <= tolerance, name
                assert torch.equal(entropies > 0, torch.from_numpy(rows[row].loss_mask)), name
            assert of_rank.wrong_gradients == [], name


def run_cases(
    cases: dict[str, Case], num_ranks: int, scratch: Path, rows: list[PackedMicrobatch] = ROWS
) -> list[list[Seen]]:
    return run_ranks(num_ranks, rank_results, scratch, list(cases.values()), rows, timeout_s=240)


def test_one_rank_computes_what_transformers_computes_and_nearly_so_in_bfloat16(tmp_path):
    cases = {
        "qwen2": Case(checkpoint(tmp_path / "a", "qwen2")),
        "qwen3": Case(checkpoint(tmp_path / "b", "qwen3")),
        "llama": Case(checkpoint(tmp_path / "c", "llama", tied=False)),
        "llama3": Case(checkpoint(tmp_path / "d", "llama", rope_parameters=LLAMA3_ROTATION)),
        "experts": Case(checkpoint(tmp_path / "e", "qwen3_moe", tied=False)),
        "experts whose weights do not sum to 1": Case(checkpoint(tmp_path / "f", "qwen3_moe", norm_topk_prob=False)),
        "experts at once": Case(tmp_path / "e", groups_experts=True),
        "experts at once, recomputed": Case(tmp_path / "e", {"recompute_activations": "full"}, groups_experts=True),
        "layers recomputed": Case(tmp_path / "b", {"recompute_activations": "full"}),
        "attention recomputed": Case(tmp_path / "b", {"recompute_activations": "selective"}),
    }
    in_bfloat16 = Case(tmp_path / "b", dtype=torch.bfloat16)
    (seen,) = run_cases({**cases, "bfloat16": in_bfloat16}, 1, tmp_path)
    assert_as_transformers(cases, [seen[:-1]])
    assert_near_transformers_in_bfloat16(in_bfloat16, seen[-1])


def assert_near_transformers_in_bfloat16(case: Case, seen: Seen) -> None:
    reference = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=torch.bfloat16)
    for row, (logprobs, _) in seen.rows.items():
        difference = (logprobs - unpacked_logprobs(reference, ROWS[row]).detach()).abs()
        assert 0 < difference.max() < 0.1
        assert difference.mean() < 0.01


def test_two_ranks_share_matrices_layers_and_rows(tmp_path):
    qwen3 = checkpoint(tmp_path / "qwen3", "qwen3", layers=4)
    llama3 = checkpoint(tmp_path / "llama3", "llama", tied=False, rope_parameters=LLAMA3_ROTATION)
    qwen2 = checkpoint(tmp_path / "qwen2", "qwen2")
    cases = {
        "data": Case(qwen2),
        "tensor": Case(qwen2, TENSOR),
        "tensor, untied": Case(llama3, TENSOR),
        "tensor and sequence": Case(qwen3, SEQUENCE),
        "tensor and sequence, recomputed": Case(qwen3, {**SEQUENCE, "recompute_activations": "full"}),
        "pipeline": Case(qwen3, {"pipeline_parallel": 2}),
        "pipeline, untied": Case(llama3, {"pipeline_parallel": 2}),
        "interleaved pipeline": Case(qwen3, {"pipeline_parallel": 2, "chunks_per_stage": 2}),
        "context": Case(llama3, {"context_parallel": 2}),
        "context, recomputed": Case(qwen2, {"context_parallel": 2, "recompute_activations": "selective"}),
    }
    assert_as_transformers(cases, run_cases(cases, 2, tmp_path))


def test_two_ranks_share_experts(tmp_path):
    model = checkpoint(tmp_path / "model", "qwen3_moe")
    cases = {
        "experts over data": Case(model, {"expert_parallel": 2}),
        "experts over tensor": Case(model, {**SEQUENCE, "expert_parallel": 2}),
        "experts over context": Case(model, {"context_parallel": 2, "expert_parallel": 2}),
        "all experts on every tensor rank": Case(model, SEQUENCE),
        "pipeline": Case(model, {"pipeline_parallel": 2}),
        "experts at once, over tensor": Case(model, {**SEQUENCE, "expert_parallel": 2}, groups_experts=True),
        "all experts at once on every tensor rank": Case(model, SEQUENCE, groups_experts=True),
    }
    assert_as_transformers(cases, run_cases(cases, 2, tmp_path))


@pytest.mark.long
def test_three_stages_interleave(tmp_path):
    cases = {
        "interleaved pipeline": Case(
            checkpoint(tmp_path / "a", "qwen3", layers=6), {"pipeline_parallel": 3, "chunks_per_stage": 2}
        )
    }
    rows = ROWS * 3  # more than fill the pipeline: some go forward while others go backward
    assert_as_transformers(cases, run_cases(cases, 3, tmp_path, rows), rows)


@pytest.mark.long
def test_four_ranks_share_rows_and_matrices(tmp_path):
    cases = {
        "context, tensor and sequence": Case(checkpoint(tmp_path / "a", "qwen3"), {**SEQUENCE, "context_parallel": 2})
    }
    assert_as_transformers(cases, run_cases(cases, 4, tmp_path))
