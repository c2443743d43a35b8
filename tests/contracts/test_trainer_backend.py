"""The contract of TrainerBackend, held against every backend and layout, and against plain HF on unpacked samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhpc.types import PackedMicrobatch, TrainingSample
from tests.contracts.trainer_cluster import TrainerCluster
from tests.contracts.trainer_scenarios import (
    STEP,
    decay_only,
    export,
    load_refused,
    poison_one_step,
    resume,
    save_midway,
    take_logprobs,
    take_steps,
)
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import clipped_loss, draw_samples, num_loss_tokens, pack_row

# A new backend or layout adds a row: id → (trainer.backend, ranks).
LAYOUTS = {"reference-dp1": ("reference", 1), "reference-dp2": ("reference", 2)}
MODELS = {"qwen2-tied": ("qwen2", True, 100), "qwen3-untied": ("qwen3", False, 100), "llama-odd": ("llama", True, 117)}
LENGTHS = (5, 31, 12, 2, 47, 12, 20, 33, 9)  # too long and too short for one bucket of padding


@pytest.fixture(scope="module")
def start_cluster() -> Iterator[Callable[[str, int], TrainerCluster]]:
    """Start processes once for each layout: importing torch and transformers takes longer than a test."""
    with ExitStack() as stack:

        @cache
        def start(backend: str, world_size: int) -> TrainerCluster:
            cluster = TrainerCluster(backend, world_size)
            stack.callback(cluster.close)
            return cluster

        yield start


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS.keys())
def cluster(request, start_cluster) -> TrainerCluster:
    return start_cluster(*request.param)


@pytest.fixture(scope="module")
def other_cluster(cluster, start_cluster) -> TrainerCluster:
    """The same backend on another number of ranks."""
    return start_cluster(cluster.backend, 3 - cluster.world_size)


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), *request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), *MODELS["qwen2-tied"])


def make_model(directory: Path, family: str, tied: bool, vocabulary: int) -> Path:
    make_tiny_checkpoint(directory, family=family, hidden=32, layers=2, tied=tied)
    if vocabulary != 100:
        hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        hf.resize_token_embeddings(vocabulary, mean_resizing=False)
        hf.save_pretrained(directory)
    return directory


def packed(samples: list[TrainingSample], per_row: int = 3) -> list[PackedMicrobatch]:
    return [pack_row(samples[start : start + per_row]) for start in range(0, len(samples), per_row)]


# -------------------------------------------------------------------------------------------------- plain HF, unpacked


def hf_logprobs(hf: Any, sample: TrainingSample, temperature: float) -> torch.Tensor:
    """float32 [L], 0 on the first token, from full logits of one unpacked sample."""
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = hf(input_ids=tokens[None], use_cache=False).logits[0].float() / temperature
    chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def hf_training(directory: Path, steps: list[list[TrainingSample]], temperature: float) -> tuple[list[Any], Any]:
    """Five lines of textbook: full logits, one backward, torch's own clipping and AdamW."""
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    matrices = [p for p in hf.parameters() if p.ndim >= 2]
    vectors = [p for p in hf.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": STEP["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=STEP["learning_rate"], betas=(0.9, 0.95), eps=1e-3)
    history = []
    for samples in steps:
        current = torch.cat([hf_logprobs(hf, sample, temperature) for sample in samples])
        row = pack_row(samples)
        behaviour, mask = torch.from_numpy(row.behaviour_logprobs), torch.from_numpy(row.loss_mask)
        loss, _ = clipped_loss(
            current,
            behaviour=behaviour,
            proximal=current.detach() * mask,
            advantages=torch.from_numpy(row.advantages),
            loss_mask=mask,
        )
        optimizer.zero_grad()
        (loss / num_loss_tokens([row])).backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), STEP["max_grad_norm"])
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history, dict(hf.named_parameters())


# ---------------------------------------------------------------------------------------------------------- the claims


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_are_those_of_plain_hf_logits(cluster, any_model, temperature, tmp_path):
    samples = draw_samples(LENGTHS)
    rows = packed(samples)
    results = dict(cluster.run(take_logprobs, tmp_path, model=any_model, rows=rows, temperature=temperature))
    hf = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = [torch.cat([hf_logprobs(hf, s, temperature) for s in samples[i : i + 3]]) for i in range(0, 9, 3)]
    for index, wanted in enumerate(expected):
        found = results[index % cluster.world_size][index // cluster.world_size]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_five_steps_equal_textbook_training_on_unpacked_samples(cluster, any_model, tmp_path):
    steps = [draw_samples(LENGTHS, seed=seed) for seed in range(5)]
    history, expected = hf_training(any_model, steps, temperature=0.7)
    answers = cluster.run(take_steps, tmp_path, model=any_model, steps=[packed(s) for s in steps], temperature=0.7)
    for results, _ in answers:
        for result, (loss, norm) in zip(results, history, strict=True):
            assert result.applied
            assert result.metrics["loss"] == pytest.approx(loss, abs=1e-3)  # a sum over about 115 tokens
            assert result.grad_norm == pytest.approx(norm, abs=1e-5)
    for name, tensor in answers[0][1].items():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-5, rtol=0, msg=name)


def test_every_rank_gets_the_same_result(cluster, model, tmp_path):
    answers = cluster.run(take_steps, tmp_path, model=model, steps=[packed(draw_samples(LENGTHS))])
    assert all(results == answers[0][0] for results, _ in answers)


def test_splitting_a_batch_into_more_micro_batches_changes_nothing(cluster, model, tmp_path):
    samples = draw_samples(LENGTHS)
    coarse = cluster.run(take_steps, tmp_path / "9", model=model, steps=[packed(samples, 9)])[0]
    fine = cluster.run(take_steps, tmp_path / "1", model=model, steps=[packed(samples, 1)])[0]
    assert_same_training(coarse, fine)


def test_recomputing_activations_changes_nothing(cluster, model, tmp_path):
    steps = [packed(draw_samples(LENGTHS))]
    kept = cluster.run(take_steps, tmp_path / "a", model=model, steps=steps)[0]
    recomputed = cluster.run(take_steps, tmp_path / "b", model=model, steps=steps, recompute_activations=True)[0]
    assert_same_training(kept, recomputed)


def test_a_row_without_loss_tokens_changes_nothing(cluster, model, tmp_path):
    rows = packed(draw_samples(LENGTHS))
    silent = replace(rows[0], loss_mask=np.zeros_like(rows[0].loss_mask))
    plain = cluster.run(take_steps, tmp_path / "a", model=model, steps=[rows])[0]
    padded = cluster.run(take_steps, tmp_path / "b", model=model, steps=[[*rows, silent, silent, silent]])[0]
    assert_same_training(plain, padded)


def assert_same_training(one: Any, other: Any) -> None:
    (left,), (right,) = one[0], other[0]
    assert left.grad_norm == pytest.approx(right.grad_norm, abs=1e-6)
    assert left.metrics == pytest.approx(right.metrics, abs=1e-3, rel=1e-5)
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("field", ["behaviour_logprobs", "advantages"])
def test_a_nan_on_one_rank_skips_the_step_on_all_ranks_and_changes_no_bit(cluster, model, field, tmp_path):
    rows = packed(draw_samples(LENGTHS))
    values = getattr(rows[1], field).copy()
    values[np.flatnonzero(rows[1].loss_mask)[0]] = np.nan
    poisoned = [rows[0], replace(rows[1], **{field: values}), rows[2]]
    answers = cluster.run(poison_one_step, tmp_path, model=model, rows=rows, poisoned=poisoned)
    assert answers == [(True, False, 1)] * cluster.world_size
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name


def test_a_saved_run_continues_bit_for_bit_in_the_same_layout(cluster, model, tmp_path):
    steps = [packed(draw_samples(LENGTHS, seed=seed)) for seed in range(4)]
    saved = cluster.run(save_midway, tmp_path / "a", model=model, steps=steps, directory=tmp_path / "ckpt")
    resumed = cluster.run(resume, tmp_path / "b", model=model, steps=steps, directory=tmp_path / "ckpt")
    on_disk = {path.name: path.stat().st_size for path in (tmp_path / "ckpt").iterdir()}
    assert [files for files, _, _ in saved] == [on_disk] + [{}] * (cluster.world_size - 1)
    assert saved[0][1] == resumed[0][0]
    assert all(torch.equal(saved[0][2][name], resumed[0][1][name]) for name in saved[0][2])


def test_a_run_saved_by_one_layout_continues_in_another(cluster, other_cluster, model, tmp_path):
    steps = [packed(draw_samples(LENGTHS, seed=seed)) for seed in range(4)]
    saved = cluster.run(save_midway, tmp_path / "a", model=model, steps=steps, directory=tmp_path / "ckpt")
    resumed = other_cluster.run(resume, tmp_path / "b", model=model, steps=steps, directory=tmp_path / "ckpt")
    for there, here in zip(saved[0][1], resumed[0][0], strict=True):
        assert here.metrics["loss"] == pytest.approx(there.metrics["loss"], abs=1e-3)
    for name in saved[0][2]:
        torch.testing.assert_close(saved[0][2][name], resumed[0][1][name], atol=1e-5, rtol=0)


def test_a_damaged_checkpoint_is_refused_on_all_ranks_before_anything_changed(cluster, model, tmp_path):
    steps = [packed(draw_samples(LENGTHS))] * 2
    directory = tmp_path / "ckpt"
    cluster.run(save_midway, tmp_path / "a", model=model, steps=steps, directory=directory)
    victim = max(directory.glob("exp_avg_sq-*"))
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)
    answers = cluster.run(load_refused, tmp_path / "b", model=model, directory=directory)
    assert victim.name in answers[0][0]
    assert "checksum" in answers[0][0]
    assert all(is_unchanged for _, is_unchanged in answers)


def test_a_checkpoint_of_another_model_is_refused(cluster, model, tmp_path):
    other = make_model(tmp_path / "other", "qwen2", False, 100)
    steps = [packed(draw_samples(LENGTHS))] * 2
    cluster.run(save_midway, tmp_path / "a", model=other, steps=steps, directory=tmp_path / "ckpt")
    answers = cluster.run(load_refused, tmp_path / "b", model=model, directory=tmp_path / "ckpt")
    assert all("lm_head.weight" in message and is_unchanged for message, is_unchanged in answers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_the_hf_checkpoint_bit_for_bit(cluster, any_model, dtype, tmp_path):
    specs, weights = cluster.run(export, tmp_path, model=any_model, dtype=dtype)[0]
    assert [(spec.name, spec.shape) for spec in specs] == [(name, tuple(tensor.shape)) for name, tensor in weights]
    assert {spec.dtype for spec in specs} == {dtype}
    hf = AutoModelForCausalLM.from_pretrained(any_model, dtype=getattr(torch, dtype))
    hf_state = hf.state_dict()
    tied = {"lm_head.weight"} if hf.config.tie_word_embeddings else set()
    assert dict(weights).keys() == hf_state.keys() - tied
    assert all(torch.equal(tensor, hf_state[name]) for name, tensor in weights)
    hf.load_state_dict(dict(weights), strict=not tied)


def test_only_the_lead_yields_weights_and_all_ranks_know_the_specs(cluster, model, tmp_path):
    answers = cluster.run(export, tmp_path, model=model, dtype="float32")
    assert [bool(weights) for _, weights in answers] == [True] + [False] * (cluster.world_size - 1)
    assert all(specs == answers[0][0] for specs, _ in answers)


def test_a_segment_cannot_influence_another(cluster, model, tmp_path):
    samples = draw_samples(LENGTHS)
    row = pack_row(samples)
    start, end = row.cu_seqlens[3], row.cu_seqlens[5]
    disturbed = row.token_ids.copy()
    disturbed[start:end] = (disturbed[start:end] + 1) % 100
    found = []
    for name, tokens in (("a", row.token_ids), ("b", disturbed)):
        rows = [replace(row, token_ids=tokens)]
        arguments = {"model": model, "rows": rows, "temperature": 1.0}
        found.append(dict(cluster.run(take_logprobs, tmp_path / name, **arguments))[0][0])
    elsewhere = np.ones(len(disturbed), dtype=bool)
    elsewhere[start:end] = False
    assert torch.equal(found[0][elsewhere], found[1][elsewhere])
    assert not torch.equal(found[0], found[1])


def test_weight_decay_shrinks_matrices_only(cluster, model, tmp_path):
    before, after = cluster.run(decay_only, tmp_path, model=model, rows=packed(draw_samples(LENGTHS)))[0]
    for name in before:
        factor = 1 - 0.1 * 0.5 if before[name].ndim >= 2 else 1.0
        torch.testing.assert_close(after[name], before[name] * factor, msg=name)
