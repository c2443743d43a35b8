"""What our engine of transformers does beside the contract of all engines: families, a full cache, prompts in parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from rlhpc.generation.cached_attention import buckets_of, cached_attention
from rlhpc.generation.running_core import CoreThread
from rlhpc.generation.transformers_core import TransformersEngine, TransformersSteps
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Float32, Int32, Rollout, RolloutRequest, TensorSpec
from rlhpc.weights.hf_names import name_of, named_on_disk
from tests.contracts.engine_subjects import TransformersSubject, request_of, tiny_config
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint

TOLERANCE = 1e-4
CACHED = ("qwen2", "qwen3", "llama", "qwen3_moe", "mistral", "olmo3", "gemma2", "gemma3_text", "gpt_oss")
EVERYDAY = ("qwen3_moe", "gemma2")
KV_CACHE_BYTES = 2 << 20  # five requests of the greatest length


class FamilySubject(TransformersSubject):
    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        fused = self._reference.config.model_type == "gpt_oss"  # has all experts in one tensor on disk, too
        stored = self._base.keys() if fused else ()
        return [
            named
            for name, tensor in super().weights(version)
            for named in named_on_disk(TensorSpec(name_of(name, stored), "float32", tuple(tensor.shape)), tensor)
        ]

    def expected_logprobs(self, version: int, rollout: Rollout) -> Float32:
        self._reference.set_attn_implementation("eager")
        with torch.no_grad():
            drawn = super().weights(version) if version >= 0 else list(self._base.items())
            for (_, weight), parameter in zip(drawn, self._reference.parameters(), strict=True):
                parameter.copy_(weight)
        return self.reference_logprobs(rollout)


def steps_of(subject: TransformersSubject) -> TransformersSteps:
    assert isinstance(subject.engine, TransformersEngine)
    assert isinstance(subject.engine._core, CoreThread)
    steps = subject.engine._core._core
    assert isinstance(steps, TransformersSteps)
    return steps


Start = Callable[..., Any]


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    made = list[TransformersSubject]()

    async def begin(family: str = "qwen2", **options: Any) -> FamilySubject:
        subject = await FamilySubject.start(tmp_path / str(len(made)), family, tied=False, **options)
        made.append(subject)
        return subject

    yield begin
    for subject in made:
        await subject.engine.close()
        subject.publisher.dissolve()


async def together(subject: TransformersSubject, requests: list[RolloutRequest]) -> list[Rollout]:
    return list(await asyncio.wait_for(asyncio.gather(*map(subject.engine.generate, requests)), PATIENCE_S))


def prompt_of(length: int, first: int) -> Int32:
    return np.asarray([4 + (first * 7 + index * index) % 90 for index in range(length)], np.int32)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in EVERYDAY else pytest.mark.long) for each in CACHED]
)
async def test_a_family_is_sampled_as_transformers_scores_it_alone(family: str, start: Start) -> None:
    """Prompts of many lengths, some read in parts beside others that decode, longer than a window and a page."""
    subject = await start(family, max_num_batched_tokens=48)
    requests = [request_of(n, max_tokens=5 + 7 * n % 40, prompt=prompt_of(1 + 23 * n % 97, n)) for n in range(12)]
    for rollout in await together(subject, requests):
        expected = subject.expected_logprobs(-1, rollout)
        np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=TOLERANCE)
    score = await subject.engine.score(prompt_of(150, 3), 4)
    np.testing.assert_allclose(score.logprobs[1:], subject.expected_score(-1, prompt_of(150, 3)), atol=TOLERANCE)
    await subject.join()
    await subject.update(0)
    for rollout in await together(subject, requests[:4]):
        assert set(rollout.versions) == {0}
        np.testing.assert_allclose(rollout.behaviour_logprobs, subject.expected_logprobs(0, rollout), atol=TOLERANCE)


async def test_what_a_full_cache_throws_out_goes_on_with_the_same_tokens(start: Start) -> None:
    requests = [request_of(index, max_tokens=400) for index in range(12)]
    subject = await start(kv_cache_bytes=KV_CACHE_BYTES, seeded_samples=True)
    alone = [await subject.engine.generate(each) for each in requests[-2:]]
    rollouts = await together(subject, requests)
    assert steps_of(subject).worker.num_preemptions > 0
    for one, other in zip(alone, rollouts[-2:], strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
    for rollout in rollouts:
        assert rollout.finish_reason is FinishReason.LENGTH
        assert len(rollout.token_ids) == 400
        np.testing.assert_allclose(rollout.behaviour_logprobs, subject.expected_logprobs(-1, rollout), atol=TOLERANCE)


async def test_when_all_that_run_in_a_full_cache_are_aborted_those_that_wait_begin(start: Start) -> None:
    """After a request was thrown out the library begins none before another has ended."""
    subject = await start(kv_cache_bytes=KV_CACHE_BYTES)
    steps, requests = steps_of(subject), [request_of(index, max_tokens=600) for index in range(40)]
    running = {each.request_id: asyncio.create_task(subject.engine.generate(each)) for each in requests}
    async with asyncio.timeout(PATIENCE_S):
        while not steps._batch.scheduler.block_new_requests:  # noqa: ASYNC110 - by polling
            await asyncio.sleep(0.001)
    await subject.engine.pause()
    begun = [each for each in running if subject.engine.num_sampled(each)]
    aborting = [asyncio.create_task(subject.engine.abort(each)) for each in begun]
    await asyncio.sleep(0)
    await subject.engine.resume()
    await asyncio.gather(*aborting)
    waiting = [task for task in running.values() if not task.done()]
    assert waiting
    done, _ = await asyncio.wait(waiting, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert done
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_pauses_aborts_and_versions_at_any_instant_leave_every_token_its_own_version(
    start: Start, prefix_caching: bool
) -> None:
    """In a cache that is full most of the time, with prompts that share pages."""
    subject = await start(kv_cache_bytes=KV_CACHE_BYTES, max_num_batched_tokens=64, prefix_caching=prefix_caching)
    await subject.join()
    await subject.update(0)
    rng, shared = random.Random(0), prompt_of(70, 1)
    requests = [
        request_of(n, max_tokens=rng.randint(1, 300), prompt=np.append(shared[: rng.choice((3, 40, 70))], n % 90 + 4))
        for n in range(40)
    ]
    running = [asyncio.create_task(subject.engine.generate(each)) for each in requests]
    for version in range(1, 6):
        await asyncio.sleep(rng.random() * 0.2)
        await subject.engine.pause()
        await subject.engine.abort(rng.choice(requests).request_id) if rng.random() < 0.3 else None
        await subject.engine.resume()
        await subject.update(version)
    rollouts = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
    assert any(len(set(rollout.versions)) > 1 for rollout in rollouts)
    for rollout in rollouts:
        assert np.all(np.diff(rollout.versions) >= 0)
        first = int(rollout.versions[0]) if len(rollout.versions) else 0
        own = rollout.versions == first  # keys and values of later tokens are of several versions
        expected = subject.expected_logprobs(first, rollout)
        np.testing.assert_allclose(rollout.behaviour_logprobs[own], expected[own], atol=TOLERANCE)
    after = await subject.engine.generate(request_of(99, prompt=shared))
    np.testing.assert_allclose(after.behaviour_logprobs, subject.expected_logprobs(5, after), atol=TOLERANCE)
    steps = steps_of(subject)
    assert not steps._drawn
    cache = steps._batch.cache
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    assert cache.compute_free_capacity() == 1


async def test_keys_and_values_are_recomputed_if_told_to(start: Start) -> None:
    subject = await start(recompute_kv=True, kv_cache_bytes=KV_CACHE_BYTES)
    await subject.join()
    await subject.update(0)
    requests = [request_of(n, max_tokens=300) for n in range(12)]
    running = [asyncio.create_task(subject.engine.generate(each)) for each in requests]
    async with asyncio.timeout(PATIENCE_S):
        while not all(subject.engine.num_sampled(each.request_id) for each in requests[:4]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await subject.update(1)
    for rollout in await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S):
        new = rollout.versions == 1
        expected = subject.expected_logprobs(1, rollout)
        np.testing.assert_allclose(rollout.behaviour_logprobs[new], expected[new], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("deepseek_v3", {}, "no room for layers of type multi-head latent attention; legal: generation.engine='vllm'"),
        ("qwen2", {"kv_cache_bytes": 1 << 16}, "kv_cache_bytes=65536: the cache has room for one request of"),
    ],
)
async def test_what_the_paged_cache_has_no_room_for_is_refused_before_anything_is_sampled(
    family: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = make_tiny_checkpoint(tmp_path, family)
    with pytest.raises(EngineError, match=words):
        await TransformersEngine.start(tiny_config(model, engine="transformers", **options), seed=0)


def test_buckets_hold_every_request_once_and_pad_little() -> None:
    num_queries, num_keys = [1, 1, 5, 1, 5, 9, 1], [10, 3, 5, 9, 5, 30, 100]
    buckets = buckets_of(num_queries, num_keys, torch.device("cpu"))
    places = torch.cat([bucket.queries.flatten() for bucket in buckets])
    assert sorted(places.tolist()) == list(range(sum(num_queries)))
    assert sorted(tuple(bucket.queries.shape) for bucket in buckets) == [(1, 1), (1, 1), (1, 9), (2, 1), (2, 5)]


def test_a_call_without_the_plan_of_the_step_fails() -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(TypeError, match="step"):
        cached_attention(torch.nn.Module(), tensor, tensor, tensor, None)  # type: ignore[call-arg]
