"""Functions of layers, and the attention and copies of packed rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.contracts import TokenRow
from rlhpc.training import packed_attention as packed_attention_module
from rlhpc.training.layer_functions import gated_silu, rms_norm, rotated_heads, rotation_of, weighted_gated_silu
from rlhpc.training.logprob import all_but_first, on_device, token_row
from rlhpc.training.megatron.attention import LocalRow, RowPlan, row_order
from rlhpc.training.packed_attention import (
    MIN_FILL,
    SHORT_TOKENS,
    SegmentPlan,
    group_by_group,
    grouped_attention,
    packed_attention,
)
from rlhpc.training.triton_kernels import compiled_kernels
from tests.unit.training.packed_rows import (
    EPS,
    SHAPES,
    LiveBytes,
    draw_heads,
    draw_hidden,
    draw_samples,
    pack_row,
    plain_heads,
)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_rounds_as_transformers_does(dtype):
    hidden, weight, _ = draw_hidden(dtype)
    theirs = Qwen3RMSNorm(len(weight), EPS)
    theirs.weight.data = weight.detach()
    torch.testing.assert_close(rms_norm(hidden, weight, EPS), theirs(hidden), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_norm(dtype):
    hidden, weight, gradient = draw_hidden(dtype)
    rms_norm(hidden, weight, EPS).backward(gradient)
    wanted = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    (wanted[1] * functional.rms_norm(wanted[0], wanted[0].shape[-1:], None, EPS)).backward(gradient)
    for leaf, autograds in zip((hidden, weight), wanted, strict=True):
        assert leaf.grad.dtype == dtype
        torch.testing.assert_close(leaf.grad, autograds.grad, **TOLERANCES[dtype])


def test_gradients_of_a_norm_are_as_exact_as_autograds():
    hidden, weight, gradient = draw_hidden(torch.float32)
    rms_norm(hidden, weight, EPS).backward(gradient)
    errors = []
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    autograds = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    for leaves in (exact, autograds):
        normed = functional.rms_norm(leaves[0], leaves[0].shape[-1:], None, EPS)
        (leaves[1] * normed).backward(gradient.to(normed.dtype))
    for found in ((hidden, weight), autograds):
        errors.append([float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in zip(found, exact, strict=True)])
    assert max(errors[0]) <= 1.5 * max(errors[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_and_its_gradient(dtype):
    both, _, _ = draw_hidden(dtype)
    gradient = torch.randn(*both.shape[:-1], both.shape[-1] // 2).to(dtype)
    found = gated_silu(both)
    found.backward(gradient)
    wanted = both.detach().requires_grad_()
    gate, up = wanted.chunk(2, -1)
    product = functional.silu(gate) * up
    product.backward(gradient)
    assert torch.equal(found, product)
    assert torch.equal(both.grad, wanted.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weighted_gate_is_that_of_single_operations_and_keeps_its_inputs_alone(dtype):
    torch.manual_seed(0)
    gate_and_up = torch.randn(50, 24).to(dtype).requires_grad_()
    probabilities, gradient = torch.rand(50).requires_grad_(), torch.randn(50, 12).to(dtype)
    before = gradient.clone()
    with LiveBytes(gate_and_up, probabilities) as live:
        product = weighted_gated_silu(gate_and_up, probabilities)
    assert live.live == product.nbytes
    found = torch.autograd.grad(product, [gate_and_up, probabilities], gradient)
    gate, up = gate_and_up.chunk(2, -1)
    plain = (functional.silu(gate) * up * probabilities[:, None]).to(dtype)
    assert torch.equal(product, plain)
    for seen, wanted in zip(found, torch.autograd.grad(plain, [gate_and_up, probabilities], gradient), strict=True):
        assert seen.dtype == wanted.dtype
        torch.testing.assert_close(seen, wanted, rtol=1e-6 if seen.dtype == torch.float32 else 1e-2, atol=1e-6)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_split_normed_and_rotated_as_in_transformers(shape, has_norm, dtype):
    mixed, angles, weights = draw_heads(shape, dtype, has_norm=has_norm)
    found = rotated_heads(mixed, rotation_of(angles, dtype), weights, EPS)
    leaves = [leaf.detach().requires_grad_() for leaf in (mixed, *(weights or ()))]
    query, key, value = plain_heads(leaves[0], tuple(leaves[1:]) or None)
    both = torch.cat([angles, angles], -1)
    query, key = apply_rotary_pos_emb(query, key, both.cos().to(dtype), both.sin().to(dtype), unsqueeze_dim=1)
    gradients = [torch.randn(part.shape).to(dtype) for part in found]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward((query, key, value), gradients)
    assert all(map(torch.equal, found, (query, key, value)))
    exactly = {} if has_norm else {"rtol": 0, "atol": 0}
    for leaf, wanted in zip((mixed, *(weights or ())), leaves, strict=True):
        torch.testing.assert_close(leaf.grad, wanted.grad, **(TOLERANCES[dtype] | exactly))


@pytest.mark.parametrize(("has_norm", "is_kept"), [(True, True), (False, False)])
def test_heads_are_kept_only_for_their_norms(has_norm, is_kept):
    mixed, angles, weights = draw_heads((5, 2, 2, 16), torch.float32, has_norm=has_norm)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.data_ptr()) or each, lambda each: each):
        rotated_heads(mixed, rotation_of(angles, torch.float32), weights, EPS)
    assert (mixed.data_ptr() in kept) == is_kept


# ---------------------------------------------------------------------------------------------------- packed attention

CPU = torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 4, 2, 8


def plan(lengths: list[int]) -> SegmentPlan:
    return SegmentPlan.of(np.cumsum([0, *lengths], dtype=np.int32), CPU)


def draw(num_tokens: int, key_heads: int = KEY_HEADS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, heads, num_tokens, SIZE) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def one_by_one(q, k, v, lengths):
    pieces = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    outputs = [functional.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_padding_segments_together_changes_neither_values_nor_gradients(lengths):
    q, k, v = draw(sum(lengths))
    expected = one_by_one(q, k, v, lengths)
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths))
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * factors).sum(), (q, k, v))
    gradients = torch.autograd.grad((found * factors).sum(), (q, k, v))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=5e-6, rtol=0)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200))
def test_padding_costs_at_most_a_quarter_and_every_token_has_one_place(lengths):
    segments = plan(lengths)
    gather, scatter = segments.gather.numpy(), segments.scatter.numpy()
    assert np.array_equal(gather[scatter], np.arange(sum(lengths)))
    assert len(gather) == sum(count * length for count, length in segments.buckets)
    assert len(gather) <= sum(max(length / MIN_FILL, SHORT_TOKENS) for length in lengths)


def test_buckets_are_few():
    assert len(plan(list(range(30, 90))).buckets) <= 6
    assert len(plan([64] * 100).buckets) == 1


def test_another_segment_changes_no_bit_and_gets_no_gradient():
    lengths = [40, 38, 3, 39]
    q, k, v = draw(sum(lengths))
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths))
    disturbed = [tensor.detach().clone() for tensor in (q, k, v)]
    for tensor in disturbed:
        tensor[:, :, 40:78] += 1e3
    other, _ = packed_attention(Module(), *disturbed, None, segments=plan(lengths))
    assert torch.equal(found[:, :40], other[:, :40])
    assert torch.equal(found[:, 78:], other[:, 78:])
    found[:, :40].sum().backward()
    assert not any(tensor.grad[:, :, 40:].any() for tensor in (q, k, v))


def test_a_nan_in_one_segment_stays_there():
    lengths = [20, 17, 19]
    q, k, v = (tensor.detach() for tensor in draw(sum(lengths)))
    v[:, :, 25] = torch.nan
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths))
    assert found[:, 20:37].isnan().any()
    assert not found[:, :20].isnan().any()
    assert not found[:, 37:].isnan().any()


@pytest.mark.parametrize("lengths", [[30], [30, 29]])
def test_scaling_and_equal_head_counts_are_honoured(lengths):
    q, k, v = draw(sum(lengths), key_heads=HEADS)
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths), scaling=0.1)
    expected = one_by_one(q * (0.1 * SIZE**0.5), k, v, lengths)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 70))
def test_a_window_hides_what_lies_further_back_and_nothing_else(lengths, window):
    q, k, v = draw(sum(lengths))
    behind = torch.arange(max(lengths))[:, None] - torch.arange(max(lengths))
    sees = (behind >= 0) & (behind < window)
    pieces = zip(lengths, *(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    attend = functional.scaled_dot_product_attention
    outputs = [attend(*piece, attn_mask=sees[:length, :length], enable_gqa=True) for length, *piece in pieces]
    expected = torch.cat(outputs, dim=2).transpose(1, 2)
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths), sliding_window=window)
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * factors).sum(), (q, k, v))
    gradients = torch.autograd.grad((found * factors).sum(), (q, k, v))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=5e-6, rtol=0)


SCORED = st.fixed_dictionaries({"softcap": st.sampled_from([None, 0.5, 3.0]), "has_sinks": st.booleans(),
                                "window": st.none() | st.integers(1, 40), "at_once": st.integers(1, 3000)})  # fmt: skip


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), SCORED)
def test_capped_scores_and_sinks_are_those_of_the_formula_however_many_are_computed_at_once(lengths, case):
    """In float64, one by one: softmax over the capped scores and the sink, whose weight goes to no value."""
    q, k, v = draw(sum(lengths))
    sinks = torch.linspace(-1, 2, HEADS).requires_grad_() if case["has_sinks"] else None
    leaves = [q, k, v, *([sinks] if sinks is not None else [])]
    expected = torch.cat([by_formula(piece, sinks, case) for piece in
                          zip(*(t.double().split(lengths, dim=2) for t in (q, k, v)), strict=True)], 1)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention_module, "SCORES_AT_ONCE", case["at_once"])
        found, _ = packed_attention(
            Module(), q, k, v, None, segments=plan(lengths), softcap=case["softcap"], s_aux=sinks,
            sliding_window=case["window"],
        )  # fmt: skip
        factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad((found * factors).sum(), leaves)
    wanted = torch.autograd.grad((expected * factors).sum(), leaves)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=1e-5, rtol=0)


def by_formula(piece, sinks, case):
    query, key, value = piece
    behind = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value))
    scores = query @ key.mT * SIZE**-0.5
    if case["softcap"]:
        scores = case["softcap"] * (scores / case["softcap"]).tanh()
    scores = scores.masked_fill((behind < 0) | (behind >= (case["window"] or 1000)), -torch.inf).exp()
    total = scores.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    return (scores / total @ value).transpose(1, 2)


def test_nothing_of_scores_that_are_computed_block_by_block_is_kept_for_backward():
    q, k, v = draw(512)
    with LiveBytes(q, k, v) as forward:
        found, _ = packed_attention(Module(), q, k, v, None, segments=plan([512]), softcap=1.0, sliding_window=64)
    assert forward.live < 8 * found.numel() * found.element_size()  # all scores would be 128 times as large
    found.sum().backward()


def test_a_call_without_borders_fails_instead_of_attending_across_samples():
    with pytest.raises(TypeError, match="segments"):
        packed_attention(Module(), *draw(4), None)


class Calls(TorchFunctionMode):
    """Notes what torch's attention is called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is functional.scaled_dot_product_attention:
            self.calls.append((*args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_on_cuda_in_float32_torch_is_asked_for_no_groups_and_gets_no_copies_of_keys():
    """Its kernel for groups keeps all scores there.  Fake tensors have a device and shapes, and no numbers."""
    with FakeTensorMode(), Calls() as noted:
        q, k, v = (torch.empty(1, heads, 30, SIZE, device="cuda") for heads in (6, 2, 2))
        found, _ = packed_attention(None, q, k, v, None, segments=plan([30]))
    assert found.shape == (1, 30, 6, SIZE)
    ((query, key, value, options),) = noted.calls
    assert not options.get("enable_gqa")
    assert query.shape[:2] == key.shape[:2] == value.shape[:2]
    assert key.stride(1) == value.stride(1) == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_groups_attend_as_torchs_do(num_rows):
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, 17, heads, SIZE) for heads in (6, 2, 2)]
    q, k, v = (torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes)
    mask = torch.ones(17, 17, dtype=torch.bool).tril(2)
    for options in ({"is_causal": True}, {"attn_mask": mask, "scale": 0.2}):
        expected, found = grouped_attention(q, k, v, **options), group_by_group(q, k, v, **options)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        factors = torch.randn(expected.shape, generator=generator)
        wanted = torch.autograd.grad((expected * factors).sum(), (q, k, v))
        for gradient, want in zip(torch.autograd.grad((found * factors).sum(), (q, k, v)), wanted, strict=True):
            torch.testing.assert_close(gradient, want, atol=5e-6, rtol=0)


# ----------------------------------------------------- Copies of a row to the GPU do not wait for what the GPU is doing

# The meta device stands for a GPU: torch dispatches the same copies, and nothing else is needed of it.

GPU = torch.device("meta")
BORDERS = np.array([0, 5, 16], dtype=np.int32)
ROW = pack_row(draw_samples([5, 11, 4], seed=1))


class Copies(TorchDispatchMode):
    """Every copy from host memory to the device: whether its source is pinned, and whether it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []
        self._pinned: set[int] = set()

        def pin(tensor: Tensor) -> Tensor:
            self._pinned.add(tensor.data_ptr())
            return tensor

        monkeypatch.setattr(Tensor, "pin_memory", pin)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == GPU and args[0].device == CPU:
            self.seen.append((args[0].data_ptr() in self._pinned, bool(kwargs.get("non_blocking"))))
        return func(*args, **kwargs)


def loss_on_gpu() -> None:
    def loss(current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        return current.sum(), {}

    current = torch.zeros(len(ROW.token_ids), device=GPU)
    loss(current, token_row(ROW, current, proximal=None))


def padded_attention() -> None:
    plan = SegmentPlan.of(BORDERS, GPU)
    assert plan.gather.device == plan.scatter.device == GPU


def megatron_row() -> None:
    layout = ParallelLayout(1, 2, 1, 1, 1, 1, is_sequence_parallel=False)
    LocalRow.of(ROW, all_but_first(ROW), layout, 0, GPU)


PATHS: dict[str, Callable[[], object]] = {
    "loss": loss_on_gpu,
    "attention": padded_attention,
    "megatron's row": megatron_row,
    "one context rank": lambda: RowPlan.of(BORDERS, 1, 0, GPU),
    "two context ranks": lambda: RowPlan.of(BORDERS, 2, 1, GPU),
    "order": lambda: row_order(16, 2, GPU),
}


@pytest.mark.parametrize("path", PATHS)
def test_no_copy_of_a_row_to_the_gpu_waits_for_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Copies(monkeypatch) as copies:
        PATHS[path]()
    assert copies.seen
    assert set(copies.seen) == {(True, True)}, "(pinned, does not wait)"


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.bool_])
def test_what_is_copied_is_what_was_there(dtype: type[np.generic]) -> None:
    array = np.arange(7).astype(dtype)
    array.flags.writeable = False  # as those of a message are
    copied = on_device(array, CPU)
    assert copied.numpy().dtype == array.dtype
    np.testing.assert_array_equal(copied.numpy(), array)
    copied.zero_()
    assert array.any()


# --------------------------------------- Where Triton is there and does not work, training goes on without its kernels

KERNELS = "logit_kernels"
# Triton 3.6 where the linker's cache does not list the driver's library, which torch has found by itself.
WITHOUT_LIBCUDA = """
class jit:
    def __init__(self, function): ...
    def __getitem__(self, grid):
        raise AssertionError("libcuda.so cannot found!")
"""


@pytest.fixture
def triton_without_libcuda(tmp_path, monkeypatch):
    for name in ("triton", "triton.language", "triton.errors", f"rlhpc.training.{KERNELS}"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is put back
        del sys.modules[name]
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text(WITHOUT_LIBCUDA)
    (package / "language.py").touch()
    (package / "errors.py").write_text("class TritonError(Exception): ...\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("triton_without_libcuda")
def test_a_triton_that_does_not_find_the_driver_is_done_without(caplog):
    with caplog.at_level("WARNING", "rlhpc.training"):
        assert compiled_kernels.__wrapped__(KERNELS, torch.device("cpu"), torch.float32) is None
    assert "Triton does not work here: libcuda.so cannot found!" in caplog.text
