"""Generators say what is sampled of running rollouts: often enough that a death costs little, and each token once."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from rlhpc.buffer.prefixes import PartialRollout, decode_partials, id_checksum, joined
from rlhpc.config.tables import AdmissionConfig, BufferConfig
from rlhpc.protocol.contracts import GenerationEngine
from rlhpc.protocol.messages import LeaseProgress
from rlhpc.protocol.types import Prefix, Prompt, Rollout, RolloutRequest, SamplingParams
from rlhpc.roles.generator.sampling import ProgressReporter
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.unit.buffer.rollout_samples import ManualClock

NUM_TOKENS = 600
INTERVAL_TOKENS, INTERVAL_S = 40, 10.0


def request_of(group_id: int, sample_index: int, prefix: Prefix | None = None) -> RolloutRequest:
    prompt = Prompt(group_id + 100, "any", np.array([9], np.int32), "42")
    return RolloutRequest(group_id, sample_index, prompt, SamplingParams(max_tokens=NUM_TOKENS), prefix)


def engine() -> ScriptedEngine:
    return ScriptedEngine(Script(stop_probability=1e-9))


def reporter_of(it: GenerationEngine, clock: ManualClock, lease_deadline_s: float = 600.0) -> ProgressReporter:
    admission = AdmissionConfig(groups_per_step=1, group_size=2, lease_deadline_s=lease_deadline_s)
    buffer = BufferConfig(partial_interval_tokens=INTERVAL_TOKENS, partial_interval_s=INTERVAL_S)
    return ProgressReporter(it, admission, buffer, clock)


def pieces_of(report: LeaseProgress | None) -> list[PartialRollout]:
    return decode_partials(report.pieces.tobytes(), report.num_bytes) if report is not None else []


def beginning(rollout: Rollout, length: int) -> Prefix:
    return Prefix(rollout.token_ids[:length], rollout.behaviour_logprobs[:length], rollout.versions[:length])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def test_every_token_is_reported_once_and_before_more_than_an_interval_has_been_sampled(
    clock: ManualClock,
) -> None:
    it, request = engine(), request_of(3, 1)
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    pieces: list[PartialRollout] = []
    while not sampling.done():
        await asyncio.sleep(0)
        pieces += pieces_of(reporter.report([request], 0))
        assert reporter.num_unreported <= INTERVAL_TOKENS
    rollout = await sampling
    assert {(piece.group_id, piece.sample_index, piece.prompt_id) for piece in pieces} == {(3, 1, 103)}
    assert pieces[0].start == 0
    assert all(later.start == earlier.end for earlier, later in pairwise(pieces))
    assert all(INTERVAL_TOKENS - 4 <= len(piece.tokens.token_ids) <= INTERVAL_TOKENS for piece in pieces)
    known: Prefix | None = None
    for piece in pieces:
        assert piece.follows(known)
        known = joined(known, piece)
    assert known is not None
    assert len(known.token_ids) >= NUM_TOKENS - INTERVAL_TOKENS
    for mine, whole in zip(
        (known.token_ids, known.behaviour_logprobs, known.versions),
        (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, whole[: len(mine)])


async def test_a_slow_rollout_is_reported_after_the_time_of_an_interval_and_one_that_stands_still_is_not(
    clock: ManualClock,
) -> None:
    it, request = engine(), request_of(0, 0)
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    assert reporter.report([request], 0) is None  # it has no token yet
    while it.num_sampled(request.request_id) < 3:  # noqa: ASYNC110 - each turn of the loop draws a token
        await asyncio.sleep(0)
    await it.pause()
    assert reporter.report([request], 0) is None
    clock.advance(INTERVAL_S - reporter.look_s)
    (piece,) = pieces_of(reporter.report([request], 0))
    assert len(piece.tokens.token_ids) in (3, 4)
    clock.advance(5 * INTERVAL_S)
    assert reporter.report([request], 0) is None
    sampling.cancel()


async def test_what_came_with_the_lease_is_not_reported_again_until_somebody_asks_for_it(clock: ManualClock) -> None:
    it = engine()
    whole = await it.generate(request_of(0, 0))
    request = request_of(0, 0, beginning(whole, 200))
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    while not (pieces := pieces_of(reporter.report([request], 0))):  # noqa: ASYNC110 - each turn draws a token
        await asyncio.sleep(0)
    assert (pieces[0].start, pieces[0].before) == (200, id_checksum(whole.token_ids[:200]))
    reporter.show_whole([(0, 0), (7, 7)])
    (piece,) = pieces_of(reporter.report([request], 0))
    assert (piece.start, piece.before) == (0, 0)
    assert piece.end >= pieces[0].end
    np.testing.assert_array_equal(piece.tokens.token_ids, whole.token_ids[: piece.end])
    sampling.cancel()


async def test_all_rollouts_share_a_message_and_those_that_are_almost_due_come_along(clock: ManualClock) -> None:
    it, requests = engine(), [request_of(group, sample) for group in range(3) for sample in range(2)]
    reporter, sampling = reporter_of(it, clock), [asyncio.create_task(it.generate(requests[0]))]
    for _ in range(INTERVAL_TOKENS // 4):
        await asyncio.sleep(0)
    sampling += [asyncio.create_task(it.generate(request)) for request in requests[1:-1]]
    while not (pieces := pieces_of(reporter.report(requests, 0))):  # noqa: ASYNC110 - each turn draws a token
        await asyncio.sleep(0)
    assert [(piece.group_id, piece.sample_index) for piece in pieces] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    for task in sampling:
        task.cancel()


async def test_an_engine_that_cannot_tell_the_tokens_renews_its_leases_all_the_same(clock: ManualClock) -> None:
    class Blind(ScriptedEngine):
        is_blind = True

        def progress(self, request_id: str, start: int = 0) -> Prefix | None:
            return None if self.is_blind else super().progress(request_id, start)

    it, request = Blind(Script(stop_probability=1e-9)), request_of(0, 0)
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    found: list[PartialRollout] = []
    while it.num_sampled(request.request_id) < NUM_TOKENS // 2:
        await asyncio.sleep(0)
        clock.advance(INTERVAL_S / 20)
        found += pieces_of(reporter.report([request], 0))
    assert NUM_TOKENS // 2 // 21 <= len(found) <= NUM_TOKENS // 2 // 18
    assert {(piece.start, len(piece.tokens.token_ids)) for piece in found} == {(0, 0)}
    it.is_blind = False  # at the next look all is told, and not only what came since the last report
    while it.num_sampled(request.request_id) == reporter._reported[request.request_id].num_seen:  # noqa: ASYNC110
        await asyncio.sleep(0)
    (piece,) = pieces_of(reporter.report([request], 0))
    assert (piece.start, piece.end) == (0, it.num_sampled(request.request_id))
    assert reporter.num_unreported == 0
    sampling.cancel()


def test_leases_that_are_short_are_renewed_more_often(clock: ManualClock) -> None:
    assert reporter_of(engine(), clock, lease_deadline_s=2.0).look_s == 0.5 / 8


@pytest.mark.parametrize("seed", [0, 1])
def test_two_engines_of_a_run_draw_the_same_sample_alike(seed: int) -> None:
    async def draw() -> Rollout:
        return await ScriptedEngine(Script(seed=seed)).generate(request_of(5, 2))

    first, second = asyncio.run(draw()), asyncio.run(draw())
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
