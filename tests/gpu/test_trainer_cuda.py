"""What only a GPU can show: the variable-length flash kernel, bfloat16 on CUDA, memory."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rlhpc.training.factory import open_backend
from rlhpc.training.logprob import chunked_logprobs
from rlhpc.training.packed_attention import SegmentPlan, packed_attention
from rlhpc.training.ranks import RankContext
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import clipped_loss, draw_samples, num_loss_tokens, pack_row, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROW = pack_row(draw_samples((200, 370, 80, 330, 1, 64)))


@contextmanager
def open_on(device, model, **settings):
    """Closed at the end: its page-locked memory would stay locked, and fail whoever is given the same addresses."""
    backend = open_backend(tiny_config(model, device=device, **settings), RankContext())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden=128, layers=2)


@pytest.mark.parametrize("key_heads", [2, 8])
def test_the_flash_kernel_gives_what_padding_gives(key_heads):
    plan = SegmentPlan.of(ROW.cu_seqlens, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, len(ROW.token_ids), 64) for heads in (8, key_heads, key_heads)]
    full = [torch.randn(shape, device="cuda", generator=generator, requires_grad=True) for shape in shapes]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in full]
    module = torch.nn.Module()
    wanted, _ = packed_attention(module, *full, None, segments=plan)
    found, _ = packed_attention(module, *half, None, segments=plan)
    torch.testing.assert_close(found.float(), wanted, atol=3e-2, rtol=3e-2)
    wanted.sum().backward()
    found.float().sum().backward()
    for left, right in zip(half, full, strict=True):
        torch.testing.assert_close(left.grad.float(), right.grad, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_logprobs_are_near_those_of_the_cpu(model, dtype, tolerance):
    with open_on("cuda", model, dtype=dtype) as backend:
        (found,) = backend.logprobs([ROW])
    with open_on("cpu", model) as backend:
        (wanted,) = backend.logprobs([ROW])
    assert found.is_cuda
    assert (found.cpu() - wanted).abs().max() < tolerance


def test_bfloat16_training_follows_float32_on_the_cpu(model):
    norms = []
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
        with open_on(device, model, dtype=dtype) as backend:
            results = [
                backend.step(
                    [ROW],
                    clipped_loss,
                    proximal=None,
                    num_loss_tokens=num_loss_tokens([ROW]),
                    learning_rate=1e-3,
                    weight_decay=0.0,
                    max_grad_norm=1.0,
                )
                for _ in range(3)
            ]
        assert all(result.applied for result in results)
        norms.append([result.grad_norm for result in results])
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_a_large_vocabulary_needs_memory_for_a_chunk_only():
    tokens, vocabulary, hidden_size, chunk = 16_384, 150_000, 256, 1024
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.from_numpy(np.arange(tokens)).cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found, _ = chunked_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=chunk, want_entropy=True)
    found.sum().backward()
    matrix, weight = 4 * chunk * vocabulary, 4 * vocabulary * hidden_size
    assert torch.cuda.max_memory_allocated() - before < 2.2 * matrix + 3 * weight + 100 * 2**20
