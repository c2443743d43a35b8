"""Chunked log-probabilities on a GPU: bfloat16 multiplied into float32, and the memory that its head says it takes."""

from __future__ import annotations

import pytest
import torch

from rlhpc.training.logprob import chunked_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def draw(tokens, vocabulary, hidden_size, dtype=torch.bfloat16):
    """Logits of a spread of about 5, so that one rounded to bfloat16 would be wrong by about 0.01."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device="cuda", generator=generator).bfloat16()
    head = torch.empty(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16)
    head.normal_(0, 5 / hidden_size**0.5, generator=generator)
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_products_of_bfloat16_are_those_of_float32(temperature):
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        hidden, head, targets = draw(517, 3001, 256, dtype)
        options = {"temperature": temperature, "chunk_tokens": 100, "want_entropy": True}
        logprobs, entropy = chunked_logprobs(hidden, head, targets, has_entropy_gradient=True, **options)
        (logprobs + entropy).backward(torch.linspace(-1, 1, len(targets), device="cuda"))
        results.append((logprobs.detach(), entropy.detach(), hidden.grad.float(), head.grad.float()))
    (logprobs, entropy, *gradients), (wanted_logprobs, wanted_entropy, *wanted_gradients) = results
    torch.testing.assert_close(logprobs, wanted_logprobs, atol=2e-4, rtol=0)
    torch.testing.assert_close(entropy, wanted_entropy, atol=2e-4, rtol=0)
    for found, wanted in zip(gradients, wanted_gradients, strict=True):
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()


def test_no_tokens_and_the_last_token_of_the_vocabulary_are_allowed():
    hidden, head, targets = draw(5, 301, 64)
    none, _ = chunked_logprobs(hidden[:0], head, targets[:0], temperature=1.0, chunk_tokens=4)
    assert none.shape == (0,)
    last, _ = chunked_logprobs(hidden, head, torch.full_like(targets, 300), temperature=1.0, chunk_tokens=4)
    wanted = (hidden.float() @ head.float().T).log_softmax(-1)[:, 300]
    torch.testing.assert_close(last, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("want_entropy", [False, True])
def test_a_row_of_32k_tokens_takes_the_memory_that_is_documented(want_entropy):
    tokens, vocabulary, hidden_size, chunk = 32_768, 150_000, 1024, 1024
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB")
    small = draw(16, 512, 64)
    chunked_logprobs(*small, temperature=1.0, chunk_tokens=8)[0].sum().backward()  # cuBLAS takes its workspace
    del small
    hidden, head, targets = draw(tokens, vocabulary, hidden_size)
    matrix, weight, states = 4 * chunk * vocabulary, 4 * vocabulary * hidden_size, 2 * tokens * hidden_size
    few = 64 << 20  # numbers of one token, and what an allocator rounds up

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    options = {"temperature": 1.0, "chunk_tokens": chunk, "want_entropy": want_entropy}
    logprobs, _ = chunked_logprobs(hidden, head, targets, **options)
    assert torch.cuda.max_memory_allocated() - before <= matrix * (9 if want_entropy else 8) // 8 + few
    torch.cuda.reset_peak_memory_stats()
    logprobs.sum().backward()
    backward = torch.cuda.max_memory_allocated() - before
    assert backward <= matrix // 4 + weight * 3 // 2 + states + few
    assert backward <= 2 * matrix + states
