"""Generators say how far long rollouts have come, often enough to renew leases and seldom enough to cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count, pairwise

import numpy as np
import pytest

from rlhpc.generation.scripted_engine import Script, ScriptedEngine
from rlhpc.messages import LeaseProgress
from rlhpc.roles.generator.lease_progress import FIRST_TOKENS, GROWTH, ProgressReporter
from rlhpc.types import Prefix, Prompt, Rollout, RolloutRequest, SamplingParams

NUM_TOKENS = 600


def request_of(group_id: int, sample_index: int, prefix: Prefix | None = None) -> RolloutRequest:
    prompt = Prompt(group_id, "any", np.array([9], np.int32), "42")
    return RolloutRequest(group_id, sample_index, prompt, SamplingParams(max_tokens=NUM_TOKENS), prefix)


def engine() -> ScriptedEngine:
    return ScriptedEngine(Script(stop_probability=1e-9))


async def watched(reporter: ProgressReporter, task: asyncio.Task[Rollout], request: RolloutRequest) -> Iterator:
    """All that is reported of one request until it ends, looking after every token."""
    found = []
    while not task.done():
        await asyncio.sleep(0)
        found += reporter.reports([request])
    return found


async def test_reports_renew_with_every_token_and_carry_prefixes_that_grow_by_half() -> None:
    it, request = engine(), request_of(3, 1)
    reports = await watched(ProgressReporter(it), asyncio.create_task(it.generate(request)), request)
    rollout = await it.generate(request)
    assert len(reports) > NUM_TOKENS / 4
    assert {(report.group_id, report.sample_indices) for report in reports} == {(3, (1,))}
    prefixes = [prefix for report in reports for prefix in report.prefixes if prefix is not None]
    lengths = [len(prefix.token_ids) for prefix in prefixes]
    assert lengths[0] >= FIRST_TOKENS
    assert all(later >= GROWTH * earlier for earlier, later in pairwise(lengths))
    assert lengths[-1] > NUM_TOKENS / 2
    for prefix in prefixes:
        np.testing.assert_array_equal(prefix.token_ids, rollout.token_ids[: len(prefix.token_ids)])
        np.testing.assert_array_equal(prefix.behaviour_logprobs, rollout.behaviour_logprobs[: len(prefix.token_ids)])
        assert len(prefix.versions) == len(prefix.token_ids)


async def test_a_rollout_that_stands_still_is_not_reported() -> None:
    it, request = engine(), request_of(0, 0)
    reporter, sampling = ProgressReporter(it), asyncio.create_task(it.generate(request))
    assert reporter.reports([request]) == []  # it has no token yet
    while not reporter.reports([request]):  # noqa: ASYNC110 - each turn of the loop draws a token
        await asyncio.sleep(0)
    await it.pause()
    for _ in range(3):
        await asyncio.sleep(0.01)
        last = reporter.reports([request])
    assert last == []
    sampling.cancel()


async def test_members_of_a_group_share_a_message_and_a_prefix_that_came_with_the_lease_is_no_news() -> None:
    it = engine()
    whole = await it.generate(request_of(0, 0))
    had = Prefix(whole.token_ids[:200], whole.behaviour_logprobs[:200], whole.versions[:200])
    requests = [request_of(0, 0, had), request_of(0, 1), request_of(1, 0)]
    sampling = [asyncio.create_task(it.generate(request)) for request in requests]
    reporter = ProgressReporter(it)
    for _ in count():
        reports = reporter.reports(requests)
        if len(reports) == 2 and len(reports[0].sample_indices) == 2:
            break
        await asyncio.sleep(0)
    assert reports == [LeaseProgress(0, (0, 1), (None, None)), LeaseProgress(1, (0,), (None,))]
    for task in sampling:
        task.cancel()


@pytest.mark.parametrize("seed", [0, 1])
def test_two_engines_of_a_run_draw_the_same_sample_alike(seed: int) -> None:
    async def draw() -> Rollout:
        return await ScriptedEngine(Script(seed=seed)).generate(request_of(5, 2))

    first, second = asyncio.run(draw()), asyncio.run(draw())
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
