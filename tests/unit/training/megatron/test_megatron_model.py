"""Which models Megatron trains here, from which config.json, and what its layers and attention compute."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GemmaConfig, LlamaConfig, MistralConfig, Olmo3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import FAMILIES, ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.megatron import attention
from rlhpc.training.megatron.attention import (
    LocalRow,
    PackedCoreAttention,
    RowPlan,
    chunk_attention,
    core_attention,
    held_tokens,
    row_order,
)
from rlhpc.training.megatron.hf_layout import critic_of, parameter_maps
from rlhpc.training.megatron.model_config import ModelFile, Rotations, read_model, transformer_config
from rlhpc.training.packed_attention import Scores
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.megatron.policy_ranks import (
    Case,
    Seen,
    mixed_row,
    rank_results,
    transformers_model,
    unpacked_logprobs,
)
from tests.unit.training.rank_processes import run_ranks

# ----------------------------------------------------------------------------- The Megatron policy against transformers

VOCABULARY = 101  # not a multiple of the tensor ranks
ROWS = [mixed_row(1, VOCABULARY, (5, 17, 1, 30)), mixed_row(2, VOCABULARY, (40, 2, 9))]
LLAMA3_ROTATION = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
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
        reference = transformers_model(case.checkpoint, torch.float32)
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


@pytest.mark.starts
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


def assert_near_transformers_in_bfloat16(case: Case, seen: Seen, times: int = 1) -> None:
    reference = transformers_model(case.checkpoint, torch.bfloat16)
    for row, (logprobs, _) in seen.rows.items():
        difference = (logprobs - unpacked_logprobs(reference, ROWS[row]).detach()).abs()
        assert 0 < difference.max() < 0.1 * times
        assert difference.mean() < 0.01 * times


@pytest.mark.starts
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


@pytest.mark.starts
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


# --------------------------------------------------- Families with windows, with other norms, with several rotations

WINDOWED = ("mistral", "olmo3", "gemma2", "gemma3_text", "gpt_oss")
WINDOW = 5  # shorter than most segments of ROWS
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None}


@pytest.mark.starts
@pytest.mark.parametrize("family", WINDOWED)
def test_one_rank_computes_every_family_as_transformers(tmp_path, family):
    model = checkpoint(tmp_path / family, family, tied="gemma" in family, layers=4, sliding_window=WINDOW)
    cases = {
        family: Case(model),
        "recomputed": Case(model, {"recompute_activations": "full"}),
        "attention recomputed": Case(model, {"recompute_activations": "selective"}),
    }
    in_bfloat16 = Case(model, dtype=torch.bfloat16)
    (seen,) = run_cases({**cases, "bfloat16": in_bfloat16}, 1, tmp_path)
    assert_as_transformers(cases, [seen[:-1]])
    # transformers chooses experts of gpt-oss in bfloat16, Megatron in float32: now and then others.
    assert_near_transformers_in_bfloat16(in_bfloat16, seen[-1], times=5 if family == "gpt_oss" else 1)


@pytest.mark.starts
def test_one_rank_computes_the_windows_and_yarn_of_other_families(tmp_path):
    cases = {
        "qwen2": Case(checkpoint(tmp_path / "a", "qwen2", **QWEN_WINDOWS)),
        "qwen3": Case(checkpoint(tmp_path / "b", "qwen3", rope_parameters=YARN, **QWEN_WINDOWS)),
        "mistral without": Case(checkpoint(tmp_path / "c", "mistral", tied=False, sliding_window=None)),
        "a window as wide as the longest segment": Case(
            checkpoint(tmp_path / "d", "mistral", tied=False, sliding_window=40)
        ),
    }
    assert_as_transformers(cases, run_cases(cases, 1, tmp_path))


@pytest.mark.starts
@pytest.mark.parametrize("family", WINDOWED)
def test_two_ranks_share_every_family(tmp_path, family):
    model = checkpoint(tmp_path / family, family, tied="gemma" in family, layers=4, sliding_window=WINDOW)
    cases = {
        "data": Case(model),
        "tensor": Case(model, TENSOR),
        "tensor and sequence": Case(model, {**SEQUENCE, "recompute_activations": "full"}),
        "pipeline": Case(model, {"pipeline_parallel": 2}),
        "interleaved pipeline": Case(model, {"pipeline_parallel": 2, "chunks_per_stage": 2}),
        "context": Case(model, {"context_parallel": 2}),
        "context, recomputed": Case(model, {"context_parallel": 2, "recompute_activations": "selective"}),
    }
    if family == "gpt_oss":
        del cases["tensor"]  # a mixture needs sequence parallelism
        cases["experts over data"] = Case(model, {"expert_parallel": 2})
        cases["experts over tensor"] = Case(model, {**SEQUENCE, "expert_parallel": 2})
        cases["experts over context"] = Case(model, {"context_parallel": 2, "expert_parallel": 2})
    assert_as_transformers(cases, run_cases(cases, 2, tmp_path))


@pytest.mark.starts
@pytest.mark.long
def test_three_stages_interleave(tmp_path):
    cases = {
        "interleaved pipeline": Case(
            checkpoint(tmp_path / "a", "qwen3", layers=6), {"pipeline_parallel": 3, "chunks_per_stage": 2}
        )
    }
    rows = ROWS * 3  # more than fill the pipeline: some go forward while others go backward
    assert_as_transformers(cases, run_cases(cases, 3, tmp_path, rows), rows)


@pytest.mark.starts
@pytest.mark.long
def test_four_ranks_share_rows_and_matrices(tmp_path):
    cases = {
        "context, tensor and sequence": Case(checkpoint(tmp_path / "a", "qwen3"), {**SEQUENCE, "context_parallel": 2})
    }
    assert_as_transformers(cases, run_cases(cases, 4, tmp_path))


# --------------------------------------------------- Which models Megatron trains here, and what is said of the others

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (GemmaConfig(**SIZES, head_dim=8), "model_type='gemma'"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias=True"),
        (LlamaConfig(**SIZES, attention_bias=True), "attention_bias=True"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act='gelu'"),
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), "rope_parameters.rope_type='dynamic'"),
        (
            Olmo3Config(**SIZES, rope_parameters={"full_attention": DYNAMIC}),
            "rope_parameters.full_attention.rope_type='dynamic'",
        ),
        (LlamaConfig(**SIZES, layer_types=["sliding_attention"] * 2), "layer_types=['sliding_attention']"),
        (
            MistralConfig(**SIZES, layer_types=["full_attention"] * 2),
            "layer_types=['full_attention', 'full_attention']",
        ),
        (MistralConfig(**SIZES, sliding_window=0), "sliding_window=0"),
        (Olmo3Config(**SIZES, sliding_window=None), "sliding_window=None"),
        (Qwen3MoeConfig(**SIZES, num_experts=4, use_sliding_window=True), "use_sliding_window=True"),
        (Qwen3MoeConfig(**SIZES, num_experts=4, mlp_only_layers=[0]), "mlp_only_layers=[0]"),
        (Qwen3MoeConfig(**SIZES, num_experts=4, decoder_sparse_step=2), "decoder_sparse_step=2"),
        (Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=1, norm_topk_prob=True), "num_experts_per_tok=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_would_be_computed_otherwise_is_refused_by_the_key_of_its_config(model, key):
    with pytest.raises(ConfigError) as caught:
        transformer_config(model, TrainerConfig(token_budget=64), torch.float32)
    assert "model.path" in str(caught.value)
    assert key in str(caught.value)


def test_a_layout_that_does_not_fit_is_refused():
    trainer = TrainerConfig(token_budget=64, num_ranks=3, tensor_parallel=3)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        transformer_config(LlamaConfig(**SIZES), trainer, torch.float32)


def test_rotation_is_that_of_transformers_bit_for_bit():
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    for parameters in ({"rope_type": "default", "rope_theta": 1e6}, scaled, YARN):
        model = LlamaConfig(**SIZES, rope_parameters=parameters)
        found, theirs = Rotations.of(model), LlamaRotaryEmbedding(model)
        assert torch.equal(found.frequencies[0], theirs.inv_freq)
        positions = torch.arange(100)
        cosines, sines = theirs(torch.zeros(1), positions[None])
        for mine, their in zip(found.turned(positions, torch.float32)[0], (cosines[0], sines[0]), strict=True):
            assert torch.equal(mine, their[:, : their.shape[1] // 2])


@pytest.mark.parametrize(
    ("stages", "chunks", "is_batched"),
    [(2, 1, True), (4, 1, True), (2, 2, False), (3, 2, True), (4, 2, True)],
)
def test_messages_of_stages_go_one_by_one_only_between_two_that_interleave(stages, chunks, is_batched):
    """Between two a batch would confuse directions; between more, NCCL connects pair by pair and may wait for ever."""
    trainer = TrainerConfig(token_budget=64, num_ranks=stages, pipeline_parallel=stages, chunks_per_stage=chunks)
    model = LlamaConfig(**{**SIZES, "num_hidden_layers": stages * chunks})
    config = transformer_config(model, trainer, torch.float32)
    assert (config.batch_p2p_comm, config.overlap_p2p_comm) == (is_batched, not is_batched)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU a stream orders sending before freeing")
def test_a_stage_keeps_its_outputs_where_gloo_may_still_be_sending_them():
    """Freed too early they arrive as something else, now and then: too rarely for a test of numbers to rely on."""
    trainer = TrainerConfig(token_budget=64, num_ranks=2, pipeline_parallel=2)
    assert not transformer_config(LlamaConfig(**SIZES), trainer, torch.float32).deallocate_pipeline_outputs


# --------------------------------------- A config.json that leaves nothing to defaults is read as transformers reads it

TRAINER = TrainerConfig(token_budget=64)
# As hubs have them: of transformers 4, whose rotation is two keys of the model's own.
PUBLISHED = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5632, "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen2": {
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_moe": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


def written(directory, document):
    """A directory with this config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def assert_alike(found, theirs):
    """Everything that the backend derives from a configuration is the same."""
    layout = ParallelLayout.of(TRAINER)
    # Some of its fields are functools.partial, which are equal only to themselves.
    assert repr(transformer_config(found, TRAINER, torch.float32)) == repr(
        transformer_config(theirs, TRAINER, torch.float32)
    )
    assert parameter_maps(found, layout) == parameter_maps(theirs, layout)
    assert parameter_maps(critic_of(found), layout) == parameter_maps(critic_of(theirs), layout)
    assert torch.equal(Rotations.of(found).frequencies, Rotations.of(theirs).frequencies)
    for key in ("max_position_embeddings", "tie_word_embeddings", "vocab_size", "pad_token_id"):
        assert getattr(found, key) == getattr(theirs, key), key


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_published_configuration_is_read_as_transformers_reads_it(tmp_path, family):
    path = written(tmp_path, PUBLISHED[family])
    found = read_model(path)
    assert isinstance(found, ModelFile)
    assert_alike(found, AutoConfig.from_pretrained(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_this_release_is_read_as_transformers_reads_it(tmp_path, family):
    make_tiny_checkpoint(tmp_path, family)
    assert_alike(read_model(tmp_path), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *((family, {key: ...}) for family in PUBLISHED for key in ("num_key_value_heads", "rms_norm_eps")),
        *((family, {"rope_theta": ...}) for family in PUBLISHED),
        ("llama", {"num_key_value_heads": None}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen2", {"use_sliding_window": ...}),
        ("qwen3", {"head_dim": ...}),
        ("qwen3_moe", {"norm_topk_prob": ...}),
        ("qwen3_moe", {"head_dim": ...}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_left_to_a_default_or_scaled_is_asked_of_transformers(tmp_path, family, change):
    document = {key: value for key, value in {**PUBLISHED[family], **change}.items() if value is not ...}
    path = written(tmp_path, document)
    found = read_model(path)
    assert not isinstance(found, ModelFile)
    assert_alike(found, AutoConfig.from_pretrained(path))


@pytest.mark.parametrize("key", ["partial_rotary_factor", "pad_token_id"])
def test_a_key_that_few_models_have_counts_as_it_does_in_transformers(tmp_path, key):
    path = written(tmp_path, {**PUBLISHED["llama"], key: 1})
    assert_alike(read_model(path), AutoConfig.from_pretrained(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model_type": "martian"}', '{"model_type": 3}', '{"hidden_size": 8}']
)
def test_a_file_that_is_none_is_refused_by_its_key(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.path="):
        read_model(tmp_path)


@pytest.mark.starts
def test_a_trainer_of_megatron_loads_no_transformers_for_a_published_model(tmp_path):
    path = written(tmp_path, PUBLISHED["qwen2"])
    script = (
        "import sys, pathlib, rlhpc.training.megatron.backend\n"
        "from rlhpc.training.megatron.model_config import read_model\n"
        f"print(read_model(pathlib.Path({str(path)!r})).num_hidden_layers, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["24", "False"]


# ------------------------------------------------------------------------------------------ Rows cut over context ranks

CPU = torch.device("cpu")
SCALING = 0.3
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])  # of four heads
# Lengths of the segments of rows that 1, 2, 3 and 4 ranks cut in equal chunks (of 24 tokens: 24, 6, 4, 3).
CUT_ROWS = [(24,), (1,) * 24, (6, 6, 6, 6), (5, 17, 1, 1), (3, 3, 3, 3, 3, 3, 3, 3), (1, 22, 1), (2, 9, 13)]


def row_layout(*, context: int = 1, tensor: int = 1) -> ParallelLayout:
    return ParallelLayout(
        tensor=tensor, context=context, data=1, pipeline=1, chunks=1, expert=1, is_sequence_parallel=tensor > 1
    )


def dense_attention(query, key, value, borders, scores):
    """By a mask of the whole row, which the trainer never makes."""
    segment = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    allowed = torch.from_numpy(segment[:, None] == segment[None]).tril()
    allowed = allowed if scores.window is None else allowed.triu(1 - scores.window)
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    products = torch.einsum("qhd,khd->hqk", query, key) * SCALING
    products = products if scores.softcap is None else scores.softcap * torch.tanh(products / scores.softcap)
    weights = products.masked_fill(~allowed, -torch.inf).exp()
    totals = weights.sum(-1, keepdim=True)
    totals = totals if scores.sinks is None else totals + scores.sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / totals, value)


@pytest.mark.parametrize("lengths", CUT_ROWS, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (0.7, None), (None, SINKS)])
def test_all_ranks_together_attend_as_one_mask_would_have_it(monkeypatch, lengths, num_ranks, window, softcap, sinks):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 4 * 24 * 2)  # two queries at once
    borders = np.cumsum((0, *lengths), dtype=np.int32)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(24, 4, 8, generator=generator)
    keys_and_values = torch.randn(24, 2, 2, 8, generator=generator)
    found, scores = torch.zeros_like(query), Scores(SCALING, window, softcap, sinks)
    for rank in range(num_ranks):
        plan = RowPlan.of(borders, num_ranks, rank, CPU)
        tokens = torch.from_numpy(held_tokens(24, num_ranks, rank))
        parts = zip(query[tokens].chunk(2), plan.chunks, strict=True)
        found[tokens] += torch.cat([chunk_attention(part, keys_and_values, chunk, scores) for part, chunk in parts])
    expected = dense_attention(query, *keys_and_values.unbind(1), borders, scores)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_chunk_continues_at_most_one_segment_and_keeps_the_borders_of_the_others():
    early, late = RowPlan.of(np.array([0, 5, 22, 23, 24], dtype=np.int32), 2, 0, CPU).chunks
    assert (early.key_start, early.key_end, early.num_continued) == (0, 6, 0)
    assert early.query_borders.tolist() == early.key_borders.tolist() == [0, 5, 6]
    assert (late.key_start, late.key_end, late.num_continued) == (5, 24, 4)
    assert late.query_borders.tolist() == [0, 4, 5, 6]
    assert late.key_borders.tolist() == [0, 17, 18, 19]
    assert (late.max_queries, late.max_keys) == (4, 17)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parts_laid_end_to_end_are_brought_back_into_the_order_of_the_row(num_ranks):
    parts = [held_tokens(24, num_ranks, rank) for rank in range(num_ranks)]
    assert np.concatenate(parts)[row_order(24, num_ranks, CPU).numpy()].tolist() == list(range(24))


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)])
def test_every_wanted_token_is_predicted_once_by_the_token_before_it(context, tensor):
    row = mixed_row(3, 100, (5, 1, 9, 2))
    wanted = row.loss_mask & (np.arange(17) % 3 > 0)
    predicted = []
    for rank in range(context):
        local = LocalRow.of(row, wanted, row_layout(context=context, tensor=tensor), rank, CPU)
        num_padded = context * len(local.token_ids)
        assert num_padded % row_layout(context=context, tensor=tensor).row_multiple == 0
        tokens = held_tokens(num_padded, context, rank)
        for predictor, target in zip(local.predictors.tolist(), local.targets.tolist(), strict=True):
            token = tokens[predictor] + 1
            assert row.token_ids[token] == target
            assert row.token_ids[token - 1] == local.token_ids[predictor]
            assert row.position_ids[token - 1] == local.position_ids[predictor]
            predicted.append(int(token))
    assert sorted(predicted) == np.flatnonzero(wanted).tolist()


def test_padding_is_a_segment_of_its_own():
    row = mixed_row(3, 100, (5, 2))
    local = LocalRow.of(row, row.loss_mask, row_layout(tensor=4), 0, CPU)
    assert local.packed.borders.tolist() == [0, 5, 7, 8]
    assert local.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]


def test_transformer_engine_is_refused_where_it_is_not_installed():
    assert core_attention(TrainerConfig(token_budget=64)) is PackedCoreAttention
    with pytest.raises(ConfigError, match=r"trainer\.transformer_engine"):
        core_attention(TrainerConfig(token_budget=64, transformer_engine=True))
