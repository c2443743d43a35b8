"""A frozen reference beside a policy, and what is added to a loss, in every backend and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.protocol.types import PackedMicrobatch, TrainingSample
from tests.contracts.reference_scenarios import (
    ask_a_reference,
    go_on_with_a_reference,
    regularised_steps,
    renew_a_reference,
)
from tests.contracts.trainer_layouts import (
    LENGTHS,
    MODELS,
    in_bfloat16_everywhere_and_in_float32_once_each_way,
    packed,
    usual_model,
)
from tests.contracts.trainer_textbook import load_hf, weights_on_disk
from tests.unit.training.packed_rows import draw_samples, num_loss_tokens, pack_row, with_top_tokens

STEP = {"learning_rate": 1e-2, "weight_decay": 0.0, "max_grad_norm": 1e6}
EPS = 1e-3  # of tiny_config's Adam
TOP_K = 3
PLAIN = {"loss": "reinforce", "proximal": "behaviour", "importance_cap": "off"}
ALGORITHMS: list[dict[str, Any]] = [
    {**PLAIN, "kl_coefficient": 0.4, "kl_estimator": "k1"},
    {**PLAIN, "kl_coefficient": 0.4, "kl_estimator": "k2"},
    {**PLAIN, "kl_coefficient": 0.4, "kl_estimator": "k3"},
    {**PLAIN, "entropy_coefficient": 0.3},
    {**PLAIN, "forward_kl_coefficient": 0.6, "teacher_top_k": TOP_K},
    {**PLAIN, "kl_coefficient": 0.5, "kl_estimator": "k3", "entropy_coefficient": 0.2, "forward_kl_coefficient": 0.3},
]


def draw(cluster: Any) -> list[TrainingSample]:
    return draw_samples(LENGTHS, vocabulary=MODELS[usual_model(cluster.name)]["vocabulary"])


@in_bfloat16_everywhere_and_in_float32_once_each_way()
def test_a_reference_stays_as_it_was_held_and_asking_it_changes_no_bit_of_the_policy(cluster, dtype, model, tmp_path):
    """Held on the device or in host memory: the same bits.  An error while it is in place is no exception."""
    rows = packed(draw(cluster))
    answers = {
        memory: cluster.run(ask_a_reference, tmp_path / memory, model=model, rows=rows, memory=memory, dtype=dtype)
        for memory in ("device", "host")
    }
    for memory, ranks in answers.items():
        for seen in ranks:
            assert same_bits(seen["reference"], seen["start"])
            assert same_bits(seen["reference again"], seen["start"])
            assert same_bits(seen["policy again"], seen["policy"])
            assert not same_bits(seen["policy"], seen["start"])
        names = sorted(path.name for path in (tmp_path / memory / "before").iterdir())
        assert len(names) >= 4  # weights, two moments, and the rest
        for name in names:
            before, after = (tmp_path / memory / when / name for when in ("before", "after"))
            assert before.read_bytes() == after.read_bytes(), name
    for here, there in zip(answers["device"], answers["host"], strict=True):
        assert here.keys() == there.keys()
        assert all(same_bits(here[name], there[name]) for name in here)


@in_bfloat16_everywhere_and_in_float32_once_each_way()
def test_a_reference_that_was_renewed_and_its_policy_are_the_same_bits_after_a_restart(cluster, dtype, model, tmp_path):
    rows = packed(draw(cluster))
    before = cluster.run(renew_a_reference, tmp_path / "before", model=model, rows=rows, dtype=dtype)
    after = cluster.run(go_on_with_a_reference, tmp_path / "after", saved=tmp_path / "before", rows=rows, dtype=dtype)
    for saved, again in zip(before, after, strict=True):
        assert same_bits(saved["reference"], saved["new"])
        assert not same_bits(saved["policy"], saved["reference"])
        assert same_bits(again["reference"], saved["reference"])
        assert same_bits(again["policy"], saved["policy"])


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_every_estimator_the_bonus_and_a_teacher_are_those_of_unpacked_samples_in_float64(cluster, model, tmp_path):
    vocabulary = MODELS[usual_model(cluster.name)]["vocabulary"]
    samples = [with_top_tokens(sample, TOP_K, vocabulary) for sample in draw(cluster)]
    rows, references = packed(samples), drawn_references(packed(samples))
    arguments = {"references": references, "algorithms": ALGORITHMS, "temperature": 0.7}
    step = STEP | {"num_loss_tokens": num_loss_tokens(rows)}
    answers = cluster.run(regularised_steps, tmp_path, model=model, rows=rows, step=step, **arguments)
    expected, weights = in_float64(model, samples, torch.cat(references), ALGORITHMS, temperature=0.7)
    for results, _ in answers:
        for result, (loss, norm, divergence, forward), algorithm in zip(results, expected, ALGORITHMS, strict=True):
            assert result.metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-4), algorithm  # a sum over 115 tokens
            assert result.grad_norm == pytest.approx(norm, rel=5e-6), algorithm
            if "kl_coefficient" in algorithm:
                assert result.metrics["kl_reference"] == pytest.approx(divergence, rel=5e-6)
            else:
                assert "kl_reference" not in result.metrics
            if "forward_kl_coefficient" in algorithm:
                assert result.metrics["forward_kl"] == pytest.approx(forward, rel=5e-6)
            else:
                assert "forward_kl" not in result.metrics
    for name, tensor in answers[0][1].items():  # a step of Adam is up to 10 times as far off as its gradient
        torch.testing.assert_close(tensor.double(), weights[name], atol=5e-6, rtol=1e-6, msg=lambda m, n=name: n + m)


def drawn_references(rows: list[PackedMicrobatch]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [-5 + torch.randn(len(row.token_ids), generator=draw) for row in rows]


def in_float64(
    directory: Path,
    samples: list[TrainingSample],
    reference: Tensor,
    algorithms: list[dict[str, Any]],
    temperature: float,
) -> tuple[list[tuple[float, float, float, float]], dict[str, Tensor]]:
    """(loss, gradient norm, k3, teacher's KL) by each algorithm; weights after a step by the last; from full logits."""
    hf, found, row = load_hf(directory, torch.float64), [], pack_row(samples)
    for algorithm in algorithms:
        current, entropy, forward = _of_samples(hf, samples, temperature)
        loss = forward.sum() * algorithm.get("forward_kl_coefficient", 0)
        divergence = torch.zeros((), dtype=torch.float64)
        for t in row.loss_mask.nonzero()[0].tolist():
            x = float(reference[t]) - current[t]
            estimates = {"k1": -x, "k2": x**2 / 2, "k3": torch.exp(x) - 1 - x}
            loss = loss - float(row.advantages[t]) * current[t]
            loss = loss + algorithm.get("kl_coefficient", 0) * estimates[algorithm.get("kl_estimator", "k3")]
            loss = loss - algorithm.get("entropy_coefficient", 0) * entropy[t]
            divergence = divergence + estimates["k3"].detach()
        hf.zero_grad()
        (loss / num_loss_tokens([row])).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters() if p.grad is not None])
        found.append((loss.item(), norm.item(), divergence.item(), forward.sum().item()))
    for parameter in hf.parameters():  # the first step of Adam
        if parameter.grad is not None:
            parameter.data -= STEP["learning_rate"] * parameter.grad / (parameter.grad.abs() + EPS)
    return found, weights_on_disk(hf)


def _of_samples(hf: Any, samples: list[TrainingSample], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies [T], and of the loss tokens [n] the divergence of the teacher from the policy."""
    logprobs, entropies, divergences = [], [], []
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids.astype("int64"))
        log_softmax = (hf(input_ids=tokens[None], use_cache=False).logits[0].double() / temperature).log_softmax(-1)
        nothing = log_softmax.new_zeros(1)
        logprobs += [nothing, log_softmax[:-1].gather(1, tokens[1:, None])[:, 0]]
        entropies += [nothing, -(log_softmax.exp() * log_softmax).sum(-1)[:-1]]
        assert sample.teacher_top_ids is not None
        assert sample.teacher_top_logprobs is not None
        places = torch.from_numpy(sample.loss_mask.nonzero()[0]) - 1
        ids = torch.from_numpy(sample.teacher_top_ids.reshape(len(places), TOP_K).astype("int64"))
        teacher = torch.from_numpy(sample.teacher_top_logprobs.reshape(len(places), TOP_K)).double()
        divergences.append((teacher.exp() * (teacher - log_softmax[places].gather(1, ids))).sum(1))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(divergences)
