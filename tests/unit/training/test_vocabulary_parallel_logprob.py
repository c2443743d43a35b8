from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from rlhpc.training.logprob import VocabularyShard, chunked_logprobs
from tests.unit.training.live_bytes import LiveBytes
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts

HIDDEN, CHUNK = 16, 7
NUM_RANKS = 2, 3


@dataclass(frozen=True)
class Case:
    vocabulary: int
    temperature: float = 1.0
    tokens: int = 40
    dtype: torch.dtype = torch.float32
    ruled_out: tuple[int, ...] = ()  # tokens whose logit is −inf
    broken: int | None = None  # token whose row of the head is nan

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, the unpadded head, and targets that begin with the tokens at borders of shards."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.tokens, HIDDEN, generator=generator)
        hidden[:, 0] = 1.0
        head = torch.randn(self.vocabulary, HIDDEN, generator=generator) / 4
        head[list(self.ruled_out), 0] = -torch.inf
        if self.broken is not None:
            head[self.broken] = torch.nan
        legal = torch.tensor([token for token in range(self.vocabulary) if token not in self.ruled_out])
        targets = legal[torch.randint(0, len(legal), (self.tokens,), generator=generator)]
        rows = [self.rows_per_rank(num_ranks) for num_ranks in NUM_RANKS]
        borders = [token for step in rows for first in range(0, self.vocabulary, step) for token in (first - 1, first)]
        fitting = [token for token in borders if token >= 0 and token not in self.ruled_out][: self.tokens]
        targets[: len(fitting)] = torch.tensor(fitting, dtype=torch.int64)
        return hidden.to(self.dtype).requires_grad_(), head.to(self.dtype), targets

    def rows_per_rank(self, num_ranks: int) -> int:
        return max(2, -(-self.vocabulary // num_ranks))

    def shard(self, head: Tensor, rank: int, num_ranks: int) -> Tensor:
        """The rows of a rank; padding is so large that it would drown the rest if it counted."""
        rows = self.rows_per_rank(num_ranks)
        padding = torch.full((rows * num_ranks - self.vocabulary, HIDDEN), 100.0, dtype=self.dtype)
        return torch.cat([head, padding])[rank * rows : (rank + 1) * rows].clone()


CASES = {
    "odd vocabulary": Case(203),
    "no padding for three": Case(117, temperature=0.6),
    "a rank of padding only": Case(3, tokens=10),
    "no tokens": Case(50, tokens=0),
    "a shard ruled out": Case(60, ruled_out=tuple(range(35))),
    "bfloat16": Case(203, temperature=1.3, dtype=torch.bfloat16),
    "a broken row": Case(60, broken=59),
}


def measure(case: Case, head: Tensor, shard: VocabularyShard | None) -> list[Tensor]:
    """Log-probabilities, entropy, the gradients of hidden states and head, and the same two of the entropy."""
    hidden, _, targets = case.draw()
    head.requires_grad_()
    logprobs, entropy = chunked_logprobs(
        hidden, head, targets, temperature=case.temperature, chunk_tokens=CHUNK, want_entropy=True,
        has_entropy_gradient=True, shard=shard,
    )  # fmt: skip
    factors = torch.linspace(-1, 1, case.tokens)
    gradients = [
        gradient
        for values in (logprobs, entropy)
        for gradient in torch.autograd.grad(values @ factors, (hidden, head), retain_graph=True)
    ]
    return [logprobs.detach(), entropy.detach(), *gradients]


def measure_shards(rank: int, num_ranks: int) -> dict[str, list[Tensor]]:
    found = {}
    for name, case in CASES.items():
        _, head, _ = case.draw()
        shard = VocabularyShard.of(distributed.group.WORLD, case.rows_per_rank(num_ranks), case.vocabulary)
        found[name] = measure(case, case.shard(head, rank, num_ranks), shard)
        if case.tokens:
            for gradient in (found[name][2], found[name][4]):
                distributed.all_reduce(gradient)  # that of hidden is a partial sum
    return found


@pytest.fixture(scope="module", params=NUM_RANKS)
def by_rank(request: Any, tmp_path_factory: Any) -> list[dict[str, list[Tensor]]]:
    return run_ranks(request.param, measure_shards, tmp_path_factory.mktemp("ranks"))


def test_the_cases_hold_a_rank_without_a_real_row_and_one_with_both_kinds():
    case = CASES["a rank of padding only"]
    assert [min(max(case.vocabulary - 2 * rank, 0), case.rows_per_rank(3)) for rank in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("name", CASES)
def test_shards_of_the_vocabulary_together_give_what_the_whole_gives(name, by_rank):
    case = CASES[name]
    _, head, _ = case.draw()
    expected = measure(case, head, None)
    found = list(by_rank[0][name])
    for place in (3, 5):
        gradient = torch.cat([of_rank[name][place] for of_rank in by_rank])
        assert not gradient[case.vocabulary :].any()  # padding
        found[place] = gradient[: case.vocabulary]
    tolerances = [1e-6, 1e-6, *([2e-6, 2e-6] if case.dtype == torch.float32 else [2e-2, 1e-2]) * 2]
    for here, there, tolerance in zip(found, expected, tolerances, strict=True):
        torch.testing.assert_close(here, there, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same_bits_on_all_ranks(name, by_rank):
    for found in by_rank[1:]:
        for here, there in zip(found[name][:2], by_rank[0][name][:2], strict=True):
            assert torch.equal(here.view(torch.int32), there.view(torch.int32))


def test_a_token_ruled_out_leaves_values_finite_and_a_broken_row_leaves_none(by_rank):
    for found in by_rank:
        assert all(result.isfinite().all() for result in found["a shard ruled out"][:2])
        assert all(result.isnan().all() for result in found["a broken row"][:2])


def peaks(rank: int, num_ranks: int, tokens: int, vocabulary: int, chunk: int) -> tuple[int, int]:
    shard = VocabularyShard.of(distributed.group.WORLD, vocabulary // num_ranks, vocabulary)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    distributed.broadcast(hidden.detach(), src=0)
    head = torch.randn(vocabulary // num_ranks, HIDDEN, requires_grad=True)
    targets = torch.arange(tokens)
    with LiveBytes(hidden, head, targets) as forward:
        found, _ = chunked_logprobs(
            hidden, head, targets, temperature=1.0, chunk_tokens=chunk, want_entropy=True, shard=shard
        )
    with LiveBytes(hidden, head, targets) as backward:
        found.sum().backward()
    return forward.peak, backward.peak


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_peak_memory_stays_below_two_chunks_of_a_ranks_logits_and_the_hidden_states(num_ranks, tmp_path):
    tokens, vocabulary, chunk = 1024, 16_000, 128
    matrix, hidden = 4 * chunk * vocabulary // num_ranks, 4 * tokens * HIDDEN
    for forward, backward in run_ranks(num_ranks, peaks, tmp_path, tokens, vocabulary, chunk):
        assert matrix < forward < 1.125 * matrix + 2 * hidden
        assert matrix < backward < 1.125 * matrix + 2 * hidden  # ⅛: the gradient of the head, H / C
