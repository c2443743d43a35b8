from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Phi3Config

from rlhpc.models.shape import LOGPROB_CHUNK_TOKENS
from rlhpc.training.factory import open_backend
from rlhpc.training.hf_model import load_causal_lm
from rlhpc.training.logprob import plain_row
from rlhpc.training.ranks import RankContext
from rlhpc.training.reference import ReferenceBackend, ReferenceSettings
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import (
    clipped_loss,
    draw_samples,
    dummy_row,
    num_loss_tokens,
    pack_row,
    tiny_config,
    with_top_tokens,
)
from tests.unit.training.rank_processes import run_ranks

ROW = pack_row(draw_samples((20, 37, 8, 33)))
STEP: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.0, "max_grad_norm": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden=32, layers=2)


def open_one(model, **settings):
    return open_backend(tiny_config(model, **settings), RankContext())


def train(backend, rows, **overrides):
    options = {"proximal": None, "num_loss_tokens": num_loss_tokens(rows), **STEP, **overrides}
    return backend.step(rows, clipped_loss, **options)


def test_what_is_loaded_is_turned_as_the_longest_sequence_of_the_run_file_asks(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}  # fmt: skip
    config = Phi3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        pad_token_id=0, intermediate_size=64, original_max_position_embeddings=8, rope_parameters=rope,
        initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    row = np.arange(3, 9, dtype=np.int32)  # short; the run file's longest sequence is longer than 8
    (found,) = open_one(tmp_path).logprobs([plain_row(row)])
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = hf(input_ids=torch.arange(3, 20)[None], use_cache=False).logits[0].log_softmax(-1)
    expected = logits[:5].gather(1, torch.arange(4, 9)[:, None])[:, 0]
    torch.testing.assert_close(found[1:], expected, atol=1e-4, rtol=0)


def test_metrics_are_sums_over_loss_tokens(model):
    result = train(open_one(model), [ROW, ROW])
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    entropy = 0.0
    for start, end in zip(ROW.cu_seqlens[:-1], ROW.cu_seqlens[1:], strict=True):
        tokens = torch.from_numpy(ROW.token_ids[start:end].astype(np.int64))
        with torch.no_grad():
            log_softmax = hf(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)[:-1]  # of the distribution each next token is drawn from
        entropy += entropies[torch.from_numpy(ROW.loss_mask[start + 1 : end])].sum().item()
    assert result.metrics.keys() == {"loss", "entropy", "ratio"}
    assert result.metrics["entropy"] == pytest.approx(2 * entropy, rel=1e-5)


def test_without_proximal_logprobs_the_behaviour_is_taken_and_off_the_mask_they_do_no_harm(model):
    behaviour = [torch.from_numpy(ROW.behaviour_logprobs)]
    assert train(open_one(model), [ROW]) == train(open_one(model), [ROW], proximal=behaviour)
    wild = torch.where(torch.from_numpy(ROW.loss_mask), torch.from_numpy(ROW.behaviour_logprobs), -200.0)
    assert train(open_one(model), [ROW], proximal=[wild]) == train(open_one(model), [ROW])
    assert open_one(model).logprobs([dummy_row()])[0].tolist() == [0.0]
    backend = open_one(model)
    assert isinstance(backend, ReferenceBackend)
    assert (backend.dp_rank, backend.dp_size, backend.is_rank_zero, backend.device) == (0, 1, True, "cpu")


def test_arrays_that_may_not_be_written_to_are_taken_as_they_are(model, recwarn):
    num_tokens = len(ROW.token_ids)
    row = replace(
        pack_row([with_top_tokens(sample, 2, 20) for sample in draw_samples((20, 37, 8, 33))]),
        teacher_logprobs=np.zeros(num_tokens, np.float32),
    )
    held = {field.name: getattr(row, field.name) for field in fields(row)}
    arrays = {name: each.copy() for name, each in held.items() if isinstance(each, np.ndarray)}
    for each in arrays.values():
        each.setflags(write=False)
    assert held.keys() - arrays.keys() == {"routes"}
    frozen = replace(row, **arrays)
    assert train(open_one(model), [frozen]) == train(open_one(model), [row])
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


class NoMatrixOfLogits(TorchDispatchMode):
    """Fails when an operation makes more rows of logits than a chunk, or a mask over pairs of tokens."""

    def __init__(self, num_tokens: int, vocabulary: int, chunk_tokens: int, hidden: int) -> None:
        super().__init__()
        self.num_tokens, self.vocabulary = num_tokens, vocabulary
        self.allowed = {(vocabulary, hidden), (hidden, vocabulary)}
        self.chunk_tokens = chunk_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                shape = tuple(tensor.shape)
                is_logits = len(shape) >= 2 and self.vocabulary in shape and shape not in self.allowed
                assert not (is_logits and tensor.numel() > self.chunk_tokens * self.vocabulary), (func, shape)
                assert shape[-2:] != (self.num_tokens, self.num_tokens), (func, shape)
        return result


def test_neither_all_logits_nor_a_mask_of_pairs_is_ever_made(model):
    long = pack_row(draw_samples((700, 600, 500)))
    backend = open_one(model)
    with NoMatrixOfLogits(len(long.token_ids), vocabulary=100, chunk_tokens=LOGPROB_CHUNK_TOKENS, hidden=32):
        backend.logprobs([long])
        assert train(backend, [long]).applied


def test_a_bfloat16_model_learns_through_its_float32_masters(model, tmp_path):
    backend = open_one(model, dtype="bfloat16", adam_eps=1e-8)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    for _ in range(3):
        assert train(backend, [ROW], learning_rate=1e-6).applied
    after = dict(backend.weights())
    num_same = sum(torch.equal(before[name], after[name]) for name in before)
    assert num_same >= 2  # norms are 1 ± 3e-6, which bfloat16 rounds back to 1
    backend.save(tmp_path / "ckpt").result()
    resumed = open_one(model, dtype="bfloat16", adam_eps=1e-8)
    resumed.load(tmp_path / "ckpt")
    for _ in range(3):
        assert train(backend, [ROW], learning_rate=1e-3) == train(resumed, [ROW], learning_rate=1e-3)
    assert all(torch.equal(tensor, dict(resumed.weights())[name]) for name, tensor in backend.weights())


def test_experts_carry_the_names_that_checkpoints_give_them(tmp_path):
    """Transformers fuses all experts of a layer into one parameter; weights() and checkpoints must not show it."""
    model = make_tiny_checkpoint(tmp_path / "model", family="qwen3_moe", hidden=32, layers=2)
    backend = open_one(model)
    on_disk = load_file(model / "model.safetensors")
    weights = dict(backend.weights())
    assert weights.keys() == on_disk.keys() == {spec.name for spec in backend.tensor_specs()}
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in weights.items())
    assert [(name, tuple(tensor.shape)) for name, tensor in backend.weights()] == [
        (spec.name, spec.shape) for spec in backend.tensor_specs()
    ]


def test_a_mixture_of_experts_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", family="qwen3_moe", hidden=32, layers=2)
    backend = open_one(model)
    assert train(backend, [ROW]).applied
    files = backend.save(tmp_path / "ckpt").result()
    assert "mlp.experts.7.gate_proj.weight" in str(sorted(load_file(tmp_path / "ckpt" / "exp_avg-00001.safetensors")))
    assert files
    resumed = open_one(model)
    resumed.load(tmp_path / "ckpt")
    for _ in range(2):
        assert train(backend, [ROW]) == train(resumed, [ROW])
    assert all(torch.equal(tensor, dict(resumed.weights())[name]) for name, tensor in backend.weights())


def test_what_was_accumulated_before_a_load_is_not_in_the_step_after_it(model, tmp_path):
    backend, other = open_one(model), open_one(model)
    backend.save(tmp_path / "ckpt").result()
    backend.accumulate([ROW], clipped_loss, proximal=None, num_loss_tokens=50, is_first=True)
    rows = [pack_row(draw_samples((5, 9)))]
    for each in (backend, other):
        each.load(tmp_path / "ckpt")
    assert train(backend, rows) == train(other, rows)


def clipped_step(rank, world_size, model):
    """The norm and the weights after a step that is clipped, of this rank's share of four rows."""
    rows = [pack_row([sample]) for sample in draw_samples((20, 37, 8, 33))]
    settings = ReferenceSettings(torch.float32, temperature=1.0, chunk_tokens=37, betas=(0.9, 0.999), eps=1e-3)
    policy = load_causal_lm(model, device=torch.device("cpu"), recompute_activations=False)
    backend = ReferenceBackend(policy, settings, rank=rank, world_size=world_size)
    options = {"num_loss_tokens": num_loss_tokens(rows), "max_grad_norm": 0.01}
    result = train(backend, rows[rank::world_size], **options)
    return result.grad_norm, {name: tensor.clone() for name, tensor in backend.weights()}


@pytest.mark.starts
def test_two_ranks_clip_by_the_norm_of_the_gradient_of_both_and_step_as_one_does(model, tmp_path):
    ((norm, weights),) = run_ranks(1, clipped_step, tmp_path / "one", model)
    (norm_of_two, weights_of_two), (norm_there, _) = run_ranks(2, clipped_step, tmp_path / "two", model)
    assert norm > 0.01  # it is clipped
    assert norm_of_two == norm_there == pytest.approx(norm, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_of_two[name], tensor, rtol=0, atol=1e-6)
