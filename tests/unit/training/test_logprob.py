"""Log-probabilities, over a split vocabulary too, values, and the rows of tokens that a loss gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM

from rlhpc.algorithms.objectives import ValueLoss
from rlhpc.protocol.errors import CheckpointError
from rlhpc.training import logprob
from rlhpc.training.factory import open_backend
from rlhpc.training.logprob import (
    VALUE_HEAD,
    SoftTargets,
    VocabularyShard,
    chunked_logprobs,
    head_logprobs,
    token_row,
)
from rlhpc.training.ranks import RankContext
from rlhpc.training.triton_kernels import compiled_kernels
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import LiveBytes, draw_samples, num_loss_tokens, pack_row, tiny_config
from tests.unit.training.rank_processes import run_ranks

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


def draw_soft(vocabulary: int, k: int, tokens: int = TOKENS) -> SoftTargets:
    """A teacher's k most likely tokens; in the first row it is sure of one, and in the second none is likely."""
    generator = torch.Generator().manual_seed(7)
    teacher = (3 * torch.randn(tokens, vocabulary, generator=generator)).softmax(1)
    weights, ids = teacher.topk(k, dim=1)
    weights[:1] = torch.arange(k) == 0
    weights[1:2] = 0.0
    return SoftTargets(ids, weights)


@pytest.mark.parametrize(("vocabulary", "k"), [(1, 1), (101, 1), (101, 16), (1001, 5), (17, 17)])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1024])
@pytest.mark.parametrize(
    ("has_entropy_gradient", "temperature", "softcap"), [(False, 1.0, None), (True, 0.6, None), (True, 0.6, 0.8)]
)
def test_soft_targets_caps_and_their_gradients_are_those_of_full_logits_in_float64(
    vocabulary, k, chunk_tokens, has_entropy_gradient, temperature, softcap
):
    hidden, head, targets = draw(vocabulary)
    hidden, head, soft = hidden.detach() / 4, head.detach() / 4, draw_soft(vocabulary, k)
    factors = [torch.linspace(*ends, TOKENS) for ends in ((-1, 1), (1, -0.5), (0.3, 0.9))]
    wide = [tensor.double().requires_grad_() for tensor in (hidden, head)]
    logits = wide[0] @ wide[1].t()
    log_softmax = ((softcap * (logits / softcap).tanh() if softcap else logits) / temperature).log_softmax(-1)
    wanted = [
        log_softmax.gather(1, targets[:, None])[:, 0],
        -(log_softmax.exp() * log_softmax).sum(1),
        (soft.weights.double() * log_softmax.gather(1, soft.ids)).sum(1),
    ]
    used = [0, 1, 2] if has_entropy_gradient else [0, 2]
    expected = torch.autograd.grad(sum(wanted[i] @ factors[i].double() for i in used), wide)
    leaves = [tensor.requires_grad_() for tensor in (hidden, head)]
    found = head_logprobs(
        *leaves, targets, temperature=temperature, chunk_tokens=chunk_tokens, want_entropy=True,
        has_entropy_gradient=has_entropy_gradient, soft=soft, softcap=softcap,
    )  # fmt: skip
    for value, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(value.double(), want, atol=1e-6, rtol=1e-6)
    gradients = torch.autograd.grad(sum(found[i] @ factors[i] for i in used), leaves)
    for gradient, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), want, atol=1e-6, rtol=1e-6)


def test_soft_targets_of_a_bfloat16_model_are_rounded_once():
    hidden, head, targets = draw(101, torch.bfloat16)
    leaves = [t.detach().float().requires_grad_() for t in (hidden, head)]
    for pair in ((hidden, head), leaves):
        found = head_logprobs(*pair, targets, temperature=0.9, chunk_tokens=16, soft=draw_soft(101, 8))
        (found[0].sum() + 3 * found[2].sum()).backward()
    for gradient, wanted in (hidden.grad, leaves[0].grad), (head.grad, leaves[1].grad):
        torch.testing.assert_close(gradient.float(), wanted, atol=1e-5, rtol=2**-8)


def test_a_soft_target_beyond_the_vocabulary_adds_nothing():
    hidden, head, targets = draw(20)
    soft = draw_soft(20, 3)
    wider = SoftTargets(
        torch.cat([soft.ids, torch.full((TOKENS, 1), 20)], 1), torch.cat([soft.weights, soft.weights[:, :1] * 0], 1)
    )
    results = [
        head_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=8, soft=each) for each in (soft, wider)
    ]
    torch.testing.assert_close(results[0][2], results[1][2], atol=0, rtol=0)
    none = head_logprobs(hidden[:0], head, targets[:0], temperature=1.0, chunk_tokens=8, soft=draw_soft(20, 3, 0))
    assert none[2].shape == (0,)


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


def test_logits_that_are_huge_or_ruled_out_add_nothing_and_entropy_has_no_gradient_unless_wanted():
    hidden, head, targets = draw(11)
    found, entropy = chunked_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=8, want_entropy=True)
    assert found.requires_grad
    assert not entropy.requires_grad
    hidden, head = torch.ones(1, 1), torch.tensor([[0.0], [0.0], [-torch.inf]])
    found, entropy = chunked_logprobs(
        hidden, head, torch.tensor([0]), temperature=1.0, chunk_tokens=8, want_entropy=True
    )
    assert found.item() == pytest.approx(-0.6931472)
    assert entropy.item() == pytest.approx(0.6931472)
    hidden, head = torch.full((1, 1), 1e4), torch.tensor([[1.0], [-1.0]])
    found, entropy = chunked_logprobs(
        hidden, head, torch.tensor([0]), temperature=1.0, chunk_tokens=8, want_entropy=True
    )
    assert (found.item(), entropy.item()) == (0.0, 0.0)


def test_no_tokens_give_nothing_and_a_target_outside_the_vocabulary_gives_nan():
    hidden, head, targets = draw(11, tokens=0)
    found, _ = chunked_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=8)
    found.sum().backward()
    assert found.shape == (0,)
    assert not head.grad.any()
    hidden, head, _ = draw(11, tokens=3)
    found, _ = chunked_logprobs(hidden, head, torch.tensor([-1, 10, 11]), temperature=1.0, chunk_tokens=8)
    assert found.isnan().tolist() == [True, False, True]


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


# ----------------------------------------------------------------------------------------- vocabulary parallel logprob

SPLIT_HIDDEN, CHUNK = 16, 7
NUM_RANKS = 2, 3


@dataclass(frozen=True)
class Case:
    vocabulary: int
    temperature: float = 1.0
    tokens: int = 40
    dtype: torch.dtype = torch.float32
    ruled_out: tuple[int, ...] = ()  # tokens whose logit is −inf
    broken: int | None = None  # token whose row of the head is nan
    softcap: float | None = None

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, the unpadded head, and targets that begin with the tokens at borders of shards."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.tokens, SPLIT_HIDDEN, generator=generator)
        hidden[:, 0] = 1.0
        head = torch.randn(self.vocabulary, SPLIT_HIDDEN, generator=generator) / 4
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

    def soft(self) -> SoftTargets:
        """Three legal tokens for each row, or as many as there are, from all shards."""
        generator = torch.Generator().manual_seed(1)
        legal = torch.tensor([token for token in range(self.vocabulary) if token not in self.ruled_out])
        places = torch.rand(self.tokens, len(legal), generator=generator).topk(min(3, len(legal)), dim=1).indices
        return SoftTargets(legal[places], torch.rand(places.shape, generator=generator) / 3)

    def rows_per_rank(self, num_ranks: int) -> int:
        return max(2, -(-self.vocabulary // num_ranks))

    def shard(self, head: Tensor, rank: int, num_ranks: int) -> Tensor:
        """The rows of a rank; padding is so large that it would drown the rest if it counted."""
        rows = self.rows_per_rank(num_ranks)
        padding = torch.full((rows * num_ranks - self.vocabulary, SPLIT_HIDDEN), 100.0, dtype=self.dtype)
        return torch.cat([head, padding])[rank * rows : (rank + 1) * rows].clone()


CASES = {
    "odd vocabulary": Case(203),
    "no padding for three": Case(117, temperature=0.6),
    "a rank of padding only": Case(3, tokens=10),
    "no tokens": Case(50, tokens=0),
    "a shard ruled out": Case(60, ruled_out=tuple(range(35))),
    "bfloat16": Case(203, temperature=1.3, dtype=torch.bfloat16),
    "a broken row": Case(60, broken=59),
    "capped": Case(117, temperature=0.6, softcap=0.7),
}


def measure(case: Case, head: Tensor, shard: VocabularyShard | None) -> list[Tensor]:
    """Log-probabilities, entropy, gradients of hidden states and head of both; the same three of soft targets."""
    hidden, _, targets = case.draw()
    head.requires_grad_()
    logprobs, entropy, soft = head_logprobs(
        hidden, head, targets, temperature=case.temperature, chunk_tokens=CHUNK, want_entropy=True,
        has_entropy_gradient=True, shard=shard, soft=case.soft(), softcap=case.softcap,
    )  # fmt: skip
    assert entropy is not None
    assert soft is not None
    factors = torch.linspace(-1, 1, case.tokens)
    gradients = [
        gradient
        for values in (logprobs, entropy, soft)
        for gradient in torch.autograd.grad(values @ factors, (hidden, head), retain_graph=True)
    ]
    return [logprobs.detach(), entropy.detach(), *gradients[:4], soft.detach(), *gradients[4:]]


def measure_shards(rank: int, num_ranks: int) -> dict[str, list[Tensor]]:
    found = {}
    for name, case in CASES.items():
        _, head, _ = case.draw()
        shard = VocabularyShard.of(distributed.group.WORLD, case.rows_per_rank(num_ranks), case.vocabulary)
        found[name] = measure(case, case.shard(head, rank, num_ranks), shard)
        if case.tokens:
            for gradient in (found[name][place] for place in (2, 4, 7)):
                distributed.all_reduce(gradient)  # that of hidden is a partial sum
    return found


@pytest.fixture(scope="module", params=NUM_RANKS)
def by_rank(request: Any, tmp_path_factory: Any) -> list[dict[str, list[Tensor]]]:
    return run_ranks(request.param, measure_shards, tmp_path_factory.mktemp("ranks"))


@pytest.mark.starts
def test_the_cases_hold_a_rank_without_a_real_row_and_one_with_both_kinds():
    case = CASES["a rank of padding only"]
    assert [min(max(case.vocabulary - 2 * rank, 0), case.rows_per_rank(3)) for rank in range(3)] == [2, 1, 0]


@pytest.mark.starts
@pytest.mark.parametrize("name", CASES)
def test_shards_of_the_vocabulary_together_give_what_the_whole_gives(name, by_rank):
    case = CASES[name]
    _, head, _ = case.draw()
    expected = measure(case, head, None)
    found = list(by_rank[0][name])
    for place in (3, 5, 8):
        gradient = torch.cat([of_rank[name][place] for of_rank in by_rank])
        assert not gradient[case.vocabulary :].any()  # padding
        found[place] = gradient[: case.vocabulary]
    of_gradients = [2e-6, 2e-6] if case.dtype == torch.float32 else [2e-2, 1e-2]
    tolerances = [1e-6, 1e-6, *of_gradients * 2, 1e-6, *of_gradients]
    for here, there, tolerance in zip(found, expected, tolerances, strict=True):
        torch.testing.assert_close(here, there, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.starts
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same_bits_on_all_ranks(name, by_rank):
    for found in by_rank[1:]:
        for here, there in ((found[name][place], by_rank[0][name][place]) for place in (0, 1, 6)):
            assert torch.equal(here.view(torch.int32), there.view(torch.int32))


@pytest.mark.starts
def test_a_token_ruled_out_leaves_values_finite_and_a_broken_row_leaves_none(by_rank):
    for found in by_rank:
        assert all(found["a shard ruled out"][place].isfinite().all() for place in (0, 1, 6))
        assert all(result.isnan().all() for result in found["a broken row"][:2])


def peaks(rank: int, num_ranks: int, tokens: int, vocabulary: int, chunk: int) -> tuple[int, int]:
    shard = VocabularyShard.of(distributed.group.WORLD, vocabulary // num_ranks, vocabulary)
    hidden = torch.randn(tokens, SPLIT_HIDDEN, requires_grad=True)
    distributed.broadcast(hidden.detach(), src=0)
    head = torch.randn(vocabulary // num_ranks, SPLIT_HIDDEN, requires_grad=True)
    targets = torch.arange(tokens)
    with LiveBytes(hidden, head, targets) as forward:
        found, _ = chunked_logprobs(
            hidden, head, targets, temperature=1.0, chunk_tokens=chunk, want_entropy=True, shard=shard
        )
    with LiveBytes(hidden, head, targets) as backward:
        found.sum().backward()
    return forward.peak, backward.peak


@pytest.mark.starts
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_peak_memory_stays_below_two_chunks_of_a_ranks_logits_and_the_hidden_states(num_ranks, tmp_path):
    tokens, vocabulary, chunk = 1024, 16_000, 128
    matrix, hidden = 4 * chunk * vocabulary // num_ranks, 4 * tokens * SPLIT_HIDDEN
    for forward, backward in run_ranks(num_ranks, peaks, tmp_path, tokens, vocabulary, chunk):
        assert matrix < forward < 1.125 * matrix + 2 * hidden
        assert matrix < backward < 1.125 * matrix + 2 * hidden  # ⅛: the gradient of the head, H / C


# ----------------------------- A critic beside HF's own trunk: values, gradients, steps; what it saves is loaded again

ROW = pack_row(draw_samples((20, 37, 8, 33)))
STEP: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.0, "max_grad_norm": 1.0}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("model") / "m"
    return make_tiny_checkpoint(directory, hidden=32, layers=2, tied=request.param)


OPEN: list[Any] = []


@pytest.fixture
def _closed() -> Iterator[None]:
    """Groups of a process are its backends', the last one's included."""
    yield
    while OPEN:
        OPEN.pop().close()


def open_critic(model: Path, backend: str = "reference", **settings: object) -> Any:
    return opened(model, backend=backend, has_value_head=True, **settings)


def opened(model: Path, *, has_value_head: bool = False, **settings: object) -> Any:
    OPEN.append(open_backend(tiny_config(model, **settings), RankContext(), has_value_head=has_value_head))
    return OPEN[-1]


def learn(critic: Any, row: Any, times: int = 1) -> list[float]:
    losses = []
    for _ in range(times):
        result = critic.step([row], ValueLoss(None), proximal=None, num_loss_tokens=num_loss_tokens([row]), **STEP)
        assert result.applied
        losses.append(result.metrics["loss"] / num_loss_tokens([row]))
    return losses


@pytest.mark.usefixtures("_closed")
@pytest.mark.starts
def test_a_critic_begins_with_nothing_and_has_no_head_over_the_vocabulary(model: Path) -> None:
    critic = open_critic(model)
    (values,) = critic.logprobs([ROW])
    assert not values.any()
    specs = {spec.name: spec.shape for spec in critic.tensor_specs()}
    assert specs[VALUE_HEAD] == (1, 32)
    assert "lm_head.weight" not in specs
    policy = {spec.name for spec in opened(model).tensor_specs()}
    assert set(specs) - {VALUE_HEAD} == policy - {"lm_head.weight"}


@pytest.mark.usefixtures("_closed")
@pytest.mark.starts
@pytest.mark.parametrize("backend", ["reference", "deepspeed", "megatron"])
def test_values_are_the_head_s_product_with_the_state_before_each_token(model: Path, backend: str) -> None:
    critic = open_critic(model, backend)
    learn(critic, ROW, 3)
    weights = {name: tensor.clone() for name, tensor in critic.weights()}
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    hf.load_state_dict({n: w for n, w in weights.items() if n != VALUE_HEAD}, strict=False)
    (values,) = critic.logprobs([ROW])
    for first, last in zip(ROW.cu_seqlens[:-1], ROW.cu_seqlens[1:], strict=True):
        tokens = torch.from_numpy(ROW.token_ids[first:last].astype(np.int64))
        with torch.no_grad():
            states = hf.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        expected = (states.double() @ weights[VALUE_HEAD].double().t())[:-1, 0]
        assert values[first] == 0
        np.testing.assert_allclose(values[first + 1 : last].numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.usefixtures("_closed")
@pytest.mark.starts
def test_it_learns_what_it_is_told(model: Path) -> None:
    """Returns that can be told from the tokens: whether the next token is even."""
    returns = np.where(ROW.loss_mask, np.roll(ROW.token_ids, 1) % 2, 0).astype(np.float32)
    losses = learn(open_critic(model), replace(ROW, advantages=returns), 60)
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.usefixtures("_closed")
@pytest.mark.starts
def test_all_backends_learn_alike(model: Path) -> None:
    row = replace(ROW, advantages=np.where(ROW.loss_mask, 1, 0).astype(np.float32))
    losses = []
    for backend in ("reference", "deepspeed", "megatron"):
        critic = open_critic(model, backend)
        losses.append(learn(critic, row, 5))
        critic.close()
    for others in losses[1:]:
        np.testing.assert_allclose(others, losses[0], rtol=1e-5)


@pytest.mark.usefixtures("_closed")
@pytest.mark.starts
def test_what_is_saved_is_loaded_and_a_policy_is_no_critic(model: Path, tmp_path: Path) -> None:
    critic = open_critic(model)
    learn(critic, ROW, 2)
    (tmp_path / "critic").mkdir()
    critic.save(tmp_path / "critic").result()
    (file,) = (tmp_path / "critic").glob("*weights*.safetensors")
    assert load_file(file)[VALUE_HEAD].shape == (1, 32)
    another = open_critic(model)
    another.load(tmp_path / "critic")
    torch.testing.assert_close(another.logprobs([ROW]), critic.logprobs([ROW]), rtol=0, atol=0)
    assert learn(another, ROW, 3) == learn(critic, ROW, 3)
    with pytest.raises(CheckpointError):
        opened(model).load(tmp_path / "critic")


@pytest.mark.usefixtures("_closed")
@pytest.mark.starts
def test_figures_of_one_rank_are_its_own(model: Path) -> None:
    assert open_critic(model).sum_over_replicas({"b": 2.5, "a": -1.0}) == {"a": -1.0, "b": 2.5}


ZERO2, ZERO3 = ({"backend": "deepspeed", "zero_stage": stage} for stage in (2, 3))


@pytest.mark.usefixtures("_closed")
@pytest.mark.starts
@pytest.mark.parametrize("trainer", [pytest.param(ZERO2, marks=pytest.mark.long), ZERO3, {"backend": "megatron"}])
def test_policy_and_critic_share_a_process_and_its_groups(model: Path, trainer: dict[str, Any]) -> None:
    """The critic leaves first: the groups are those of the backend that was opened first."""
    for _ in range(2):
        policy = opened(model, **trainer)
        before = policy.logprobs([ROW])[0].clone()
        critic = open_critic(model, **trainer)
        learn(critic, ROW, 2)
        critic.close()
        torch.testing.assert_close(policy.logprobs([ROW])[0], before, rtol=0, atol=0)
        policy.close()


# ------------------------------------------------------ What a loss gets of a packed row is what the samples in it say

LENGTHS = [5, 9, 4]
SHARES = [0.5, 2.0, 1.0]
SAMPLES = [replace(one, loss_weight=share) for one, share in zip(draw_samples(LENGTHS), SHARES, strict=True)]
NOTHING = torch.zeros(18)


def test_every_token_has_the_share_and_the_number_of_its_sequence() -> None:
    row = token_row(pack_row(SAMPLES), NOTHING, proximal=None)
    assert row.num_sequences == 3
    assert row.sequence.tolist() == [0] * 5 + [1] * 9 + [2] * 4
    assert row.weights.tolist() == [0.5] * 5 + [2.0] * 9 + [1.0] * 4
    assert row.versions.tolist() == np.concatenate([sample.versions for sample in SAMPLES]).tolist()


def test_without_log_probabilities_of_its_own_proximal_policy_and_reference_are_the_sampler() -> None:
    packed = pack_row(SAMPLES)
    row = token_row(packed, NOTHING, proximal=None)
    assert torch.equal(row.proximal, row.behaviour)
    assert torch.equal(row.reference, row.behaviour)
    given = token_row(packed, NOTHING, proximal=torch.full((18,), -7.0), reference=torch.full((18,), -5.0))
    assert torch.equal(given.proximal, torch.where(given.loss_mask, -7.0, 0.0))
    assert torch.equal(given.reference, torch.where(given.loss_mask, -5.0, 0.0))
