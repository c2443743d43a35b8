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
from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Int32, Prefix, Rollout, RolloutRequest
from tests.contracts.engine_subjects import TransformersSubject, request_of, tiny_config
from tests.patience import PATIENCE_S
from tests.tiny_models import FAMILIES, make_tiny_checkpoint

TOLERANCE = 1e-4
EVERYDAY = ("qwen3_moe", "gemma2", "deepseek_v3", "qwen3_5")
KV_CACHE_BYTES = 2 << 20  # few requests of the greatest length
STOP = ".€"  # of three tokens, comes about once in 64
LATENT_CACHE_BYTES = 6 << 20  # also of keys and values made of latents
OTHER_CACHES = [
    pytest.param("qwen2", KV_CACHE_BYTES),
    pytest.param("qwen3_5", KV_CACHE_BYTES, marks=pytest.mark.long),
    pytest.param("deepseek_v3", LATENT_CACHE_BYTES, marks=pytest.mark.long),
]


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

    async def begin(family: str = "qwen2", **options: Any) -> TransformersSubject:
        subject = await TransformersSubject.start(tmp_path / str(len(made)), family, tied=False, **options)
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
    "family", [pytest.param(each, marks=[] if each in EVERYDAY else pytest.mark.long) for each in FAMILIES]
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


@pytest.mark.parametrize(("family", "kv_cache_bytes"), OTHER_CACHES)
async def test_what_a_full_cache_throws_out_goes_on_with_the_same_tokens(
    start: Start, family: str, kv_cache_bytes: int
) -> None:
    requests = [request_of(index, max_tokens=400) for index in range(12)]
    subject = await start(family, kv_cache_bytes=kv_cache_bytes, seeded_samples=True)
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


@pytest.mark.parametrize(
    ("family", "kv_cache_bytes", "prefix_caching"),
    [
        ("qwen2", KV_CACHE_BYTES, True),
        pytest.param("qwen2", KV_CACHE_BYTES, False, marks=pytest.mark.long),
        ("qwen3_5", KV_CACHE_BYTES, True),
        pytest.param("deepseek_v3", LATENT_CACHE_BYTES, True, marks=pytest.mark.long),
    ],
)
async def test_pauses_aborts_and_versions_at_any_instant_leave_every_token_its_own_version(
    start: Start, family: str, kv_cache_bytes: int, prefix_caching: bool
) -> None:
    """In a cache that is full most of the time, with prompts that share pages."""
    subject = await start(
        family, kv_cache_bytes=kv_cache_bytes, max_num_batched_tokens=64, prefix_caching=prefix_caching
    )
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


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
async def test_a_deterministic_engine_has_the_same_bits_alone_and_beside_others(start: Start, family: str) -> None:
    subject = await start(family, deterministic=True)
    requests = [request_of(index, max_tokens=20, prompt=prompt_of(3 + 29 * index, index)) for index in range(6)]
    alone = [await subject.engine.generate(each) for each in requests]
    for one, other in zip(alone, reversed(await together(subject, requests[::-1])), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.behaviour_logprobs, other.behaviour_logprobs)


@pytest.mark.parametrize(
    ("family", "kv_cache_bytes"),
    [("qwen3_moe", 1 << 19), pytest.param("deepseek_v3", 3 << 19, marks=pytest.mark.long)],
)
async def test_routes_are_those_of_transformers_whatever_a_full_cache_throws_out(
    start: Start, family: str, kv_cache_bytes: int
) -> None:
    subject = await start(family, kv_cache_bytes=kv_cache_bytes, max_completion_tokens=150, routing_replay=True)
    stops = [(STOP,) * (index % 3 == 0) for index in range(12)]
    requests = [request_of(index, max_tokens=120 + index, stop_strings=own) for index, own in enumerate(stops)]
    rollouts = await together(subject, requests)
    assert steps_of(subject).worker.num_preemptions > 0
    assert any(rollout.finish_reason is FinishReason.STOP for rollout in rollouts)
    begun = rollouts[1]
    prefix = Prefix(begun.token_ids[:50], begun.behaviour_logprobs[:50], begun.versions[:50])
    continued = request_of(1, max_tokens=90, prefix=prefix)
    rollouts.append(await subject.engine.generate(continued))
    form = MixtureForm.of_replayed(subject.config.model.path)
    for asked, rollout in zip([*requests, continued], rollouts, strict=True):
        assert rollout.routes is not None
        tokens = np.concatenate([asked.prompt.token_ids, rollout.token_ids])
        np.testing.assert_array_equal(form.unpack(rollout.routes), experts_of(subject, tokens)[:-1])


def experts_of(subject: TransformersSubject, tokens: Int32) -> np.ndarray:
    """Those that transformers chooses for a row alone, int64 [T, mixtures, k], ascending."""
    found = list[torch.Tensor]()
    mixtures = [part for part in subject._reference.modules() if hasattr(part, "experts")]
    hooks = [part.experts.register_forward_pre_hook(lambda _, given: found.append(given[1])) for part in mixtures]
    with torch.no_grad():
        subject._reference(torch.from_numpy(tokens).long()[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.numpy()


@pytest.mark.parametrize(("family", "kv_cache_bytes"), OTHER_CACHES)
async def test_keys_and_values_are_recomputed_if_told_to(start: Start, family: str, kv_cache_bytes: int) -> None:
    subject = await start(family, recompute_kv=True, kv_cache_bytes=kv_cache_bytes)
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
        ("qwen2", {"kv_cache_bytes": 1 << 16}, "kv_cache_bytes=65536: the cache has room for one request of"),
        ("qwen3_5_text", {"kv_cache_bytes": 1 << 17}, "kv_cache_bytes=131072: the cache has room for one request of"),
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
