from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhpc.training import logprob
from rlhpc.training.logprob import chunked_logprobs
from rlhpc.training.triton_kernels import compiled_kernels
from tests.unit.training.live_bytes import LiveBytes

TOKENS, HIDDEN = 50, 16


def draw(vocabulary: int, dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, vocabulary, (tokens,), generator=generator)


def plain(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = ((hidden @ head.t()).float() / temperature).log_softmax(-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1)


@pytest.mark.parametrize("vocabulary", [1, 2, 101, 256])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 50, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_entropy_and_gradients_are_those_of_full_logits(vocabulary, chunk_tokens, temperature):
    hidden, head, targets = draw(vocabulary)
    factors = torch.linspace(-1, 1, TOKENS)
    expected, expected_entropy = plain(hidden, head, targets, temperature)
    wanted = torch.autograd.grad(expected @ factors, (hidden, head))
    found, entropy = chunked_logprobs(
        hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens, want_entropy=True
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    for gradient, want in zip(torch.autograd.grad(found @ factors, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 2, 101, 1001])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_of_entropy_is_that_of_full_logits_in_float64(vocabulary, chunk_tokens, temperature):
    hidden, head, targets = draw(vocabulary)
    hidden, head = hidden.detach() / 4, head.detach() / 4
    of_logprobs, of_entropy = torch.linspace(-1, 1, TOKENS), torch.linspace(1, -0.5, TOKENS)
    wide = [tensor.double().requires_grad_() for tensor in (hidden, head)]
    log_softmax = ((wide[0] @ wide[1].t()) / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(1)
    chosen = log_softmax.gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad(chosen @ of_logprobs.double() + entropy @ of_entropy.double(), wide)
    leaves = [tensor.requires_grad_() for tensor in (hidden, head)]
    found, found_entropy = chunked_logprobs(
        *leaves, targets, temperature=temperature, chunk_tokens=chunk_tokens, want_entropy=True,
        has_entropy_gradient=True,
    )  # fmt: skip
    torch.testing.assert_close(found_entropy.double(), entropy, atol=1e-6, rtol=1e-6)
    gradients = torch.autograd.grad(found @ of_logprobs + found_entropy @ of_entropy, leaves)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), want, atol=1e-6, rtol=1e-6)


def test_the_gradient_of_entropy_of_a_bfloat16_model_is_rounded_once():
    hidden, head, targets = draw(101, torch.bfloat16)
    leaves = [t.detach().float().requires_grad_() for t in (hidden, head)]
    for pair in ((hidden, head), leaves):
        options = {"temperature": 0.9, "chunk_tokens": 16, "want_entropy": True, "has_entropy_gradient": True}
        found, entropy = chunked_logprobs(*pair, targets, **options)
        (found.sum() + 3 * entropy.sum()).backward()
    for gradient, wanted in (hidden.grad, leaves[0].grad), (head.grad, leaves[1].grad):
        torch.testing.assert_close(gradient.float(), wanted, atol=1e-5, rtol=2**-8)


def test_a_token_ruled_out_has_no_part_in_the_gradient_of_entropy():
    """Nor has one whose probability float32 has no number for; a huge factor makes no nan of either."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -1e4]])
    for factor in (1.0, 1e30):
        (whole,) = [logprob._logit_gradient(
            torch.ones(1, 1), logits.t(), torch.tensor([0]), 1.0, logits.logsumexp(1), torch.zeros(1),
            (torch.tensor([0.5822]), torch.tensor([factor])),
        )]  # fmt: skip
        assert torch.isfinite(whole).all()
        assert whole[0, 2:].tolist() == [0, 0]
        assert whole[0, 0] > 0 > whole[0, 1]  # towards the uniform


def test_logits_of_a_bfloat16_model_are_not_rounded_to_bfloat16():
    hidden, head, targets = draw(101, torch.bfloat16)
    wide_hidden, wide_head = (t.detach().float().requires_grad_() for t in (hidden, head))
    found, entropy = chunked_logprobs(hidden, head, targets, temperature=0.9, chunk_tokens=16, want_entropy=True)
    expected, expected_entropy = plain(wide_hidden, wide_head, targets, 0.9)
    rounded, _ = plain(hidden, head, targets, 0.9)
    assert found.dtype == torch.float32
    assert (rounded - expected).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    found.sum().backward()
    expected.sum().backward()
    assert (hidden.grad.dtype, head.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    for gradient, wanted in (hidden.grad, wide_hidden.grad), (head.grad, wide_head.grad):
        torch.testing.assert_close(gradient.float(), wanted, atol=1e-5, rtol=2**-8)  # rounded once, at the end


def test_the_heads_gradient_is_summed_in_float32_over_chunks():
    tokens = 4096  # a bfloat16 sum would stop growing at 256 equal addends
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    head = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    found, _ = chunked_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=1)
    found.sum().backward()
    assert head.grad[:, 0].tolist() == [tokens / 2, -tokens / 2]


def test_entropy_carries_no_gradient_unless_it_is_wanted():
    hidden, head, targets = draw(11)
    found, entropy = chunked_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=8, want_entropy=True)
    assert found.requires_grad
    assert not entropy.requires_grad


def test_a_token_ruled_out_by_the_model_adds_nothing_to_the_entropy():
    hidden, head = torch.ones(1, 1), torch.tensor([[0.0], [0.0], [-torch.inf]])
    found, entropy = chunked_logprobs(
        hidden, head, torch.tensor([0]), temperature=1.0, chunk_tokens=8, want_entropy=True
    )
    assert found.item() == pytest.approx(-0.6931472)
    assert entropy.item() == pytest.approx(0.6931472)


def test_no_tokens_give_no_logprobs_and_zero_gradients():
    hidden, head, targets = draw(11, tokens=0)
    found, _ = chunked_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=8)
    found.sum().backward()
    assert found.shape == (0,)
    assert not head.grad.any()


def test_a_target_outside_the_vocabulary_gives_nan():
    hidden, head, _ = draw(11, tokens=3)
    found, _ = chunked_logprobs(hidden, head, torch.tensor([-1, 10, 11]), temperature=1.0, chunk_tokens=8)
    assert found.isnan().tolist() == [True, False, True]


def test_huge_logits_do_not_overflow():
    hidden, head = torch.full((1, 1), 1e4), torch.tensor([[1.0], [-1.0]])
    found, entropy = chunked_logprobs(
        hidden, head, torch.tensor([0]), temperature=1.0, chunk_tokens=8, want_entropy=True
    )
    assert (found.item(), entropy.item()) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("want_entropy", "has_gradient"), [(False, False), (True, False), (True, True)])
def test_memory_stays_below_the_stated_bound(dtype, want_entropy, has_gradient):
    tokens, vocabulary, chunk = 2048, 5000, 64
    hidden, head, targets = draw(vocabulary, dtype, tokens)
    matrix, weight = 4 * chunk * vocabulary, 4 * vocabulary * HIDDEN
    per_token = 4 * tokens * (9 + HIDDEN)  # results, statistics, and the gradient of hidden
    is_copied = dtype != torch.float32  # the head, on CPU
    with LiveBytes(hidden, head, targets) as forward:
        found, entropy = chunked_logprobs(
            hidden, head, targets, temperature=0.9, chunk_tokens=chunk, want_entropy=want_entropy,
            has_entropy_gradient=has_gradient,
        )  # fmt: skip
    with LiveBytes(hidden, head, targets) as backward:
        (found.sum() + entropy.sum() if has_gradient else found.sum()).backward()
    assert matrix < forward.peak <= (1.125 if want_entropy else 1.0) * matrix + is_copied * weight + per_token
    share = (0.25 if is_copied else 1.0) * (1.125 if has_gradient else 1.0)
    parts = share * matrix + (2.5 * weight if is_copied else weight)
    assert 0.7 * parts < backward.peak <= parts + per_token
    assert max(forward.peak, backward.peak) < 4 * tokens * vocabulary / 10


def test_where_triton_does_not_work_torch_does_the_same_and_it_is_said(caplog):
    with caplog.at_level("WARNING", "rlhpc.training"):
        assert (
            compiled_kernels.__wrapped__("logit_kernels", torch.device("cpu"), torch.float32) is None
        )  # kernels are for a GPU
    assert "without logit_kernels, since Triton does not work here" in caplog.text
