"""The kernels that read logits on a GPU, beside torch's own operations."""

from __future__ import annotations

import pytest
import torch

from rlhpc.training import logprob
from rlhpc.training.triton_kernels import compiled_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = [(5, 100, 1.0), (3, 9001, 0.7), (64, 151_936, 1.0), (1, 1, 1.3)]


def draw(rows, vocabulary):
    """Logits of which some rule a token out, targets inside and outside the shard; leaves of a seeded generator."""
    generator = torch.Generator("cuda").manual_seed(rows)
    hidden = torch.randn(rows, 16, device="cuda", generator=generator)
    head = torch.randn(vocabulary, 16, device="cuda", generator=generator)
    targets = torch.randint(-5, vocabulary + 5, (rows,), device="cuda", generator=generator)
    targets[0] = 0
    if vocabulary > 50:
        head[7] = -torch.inf
        hidden = hidden.abs()
    return hidden, head, targets


def both_ways(monkeypatch, work):
    """What `work` returns with the kernels, and without."""
    with_kernels = work()
    monkeypatch.setattr(logprob, "kernels_for", lambda module, tensor: None)
    return with_kernels, work()


def test_the_kernels_compile_here():
    assert compiled_kernels("logit_kernels", torch.device("cuda", 0), torch.float32) is not None


@pytest.mark.parametrize(("rows", "vocabulary", "temperature"), SIZES)
@pytest.mark.parametrize("num_sums", [3, 4])
def test_sums_over_the_vocabulary(rows, vocabulary, temperature, num_sums, monkeypatch):
    hidden, head, targets = draw(rows, vocabulary)

    def work():
        maximum = torch.full((rows,), torch.nan, device="cuda")
        sums = torch.full((num_sums, rows), torch.nan, device="cuda")
        logprob._row_statistics(hidden, head, targets, temperature, maximum, sums)
        return maximum, sums

    (maximum, sums), (wanted_maximum, wanted) = both_ways(monkeypatch, work)
    assert torch.equal(maximum, wanted_maximum)
    torch.testing.assert_close(sums, wanted, atol=1e-4, rtol=2e-5)


@pytest.mark.parametrize(("rows", "vocabulary", "temperature"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_the_gradient_of_logits(rows, vocabulary, temperature, dtype, has_entropy, monkeypatch):
    hidden, head, targets = (
        tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in draw(rows, vocabulary)
    )
    log_partition = (hidden.float() @ head.float().T / temperature).logsumexp(1)
    factors = torch.linspace(-1, 2, rows, device="cuda")
    entropy = (factors + 3, 2 - factors) if has_entropy else None
    found, wanted = both_ways(
        monkeypatch,
        lambda: logprob._logit_gradient(hidden, head, targets, temperature, log_partition, factors, entropy),
    )
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2)
