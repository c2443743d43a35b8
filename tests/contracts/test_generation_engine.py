"""What every generation engine promises.  One engine of each kind for the whole module."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rlhpc.buffer.prefixes import decode_partials, joined
from rlhpc.config.tables import AdmissionConfig, BufferConfig, WeightsConfig
from rlhpc.protocol.contracts import WeightTiming
from rlhpc.protocol.errors import EngineError, TornWeights
from rlhpc.protocol.types import FinishReason, Prefix, Rollout, RolloutRequest
from rlhpc.roles.generator.sampling import ProgressReporter
from rlhpc.weights import broadcast
from rlhpc.weights.broadcast import _send_blocks
from rlhpc.weights.factory import make_publisher
from tests.contracts.engine_subjects import (
    LONG_PROMPT,
    MAX_TOKENS,
    AdapterSubject,
    EngineSubject,
    PublisherDied,
    ScriptedSubject,
    Subject,
    TransformersAdapterSubject,
    TransformersSubject,
    VllmSubject,
    decode,
    living_children,
    remember_strangers,
    request_of,
)
from tests.patience import PATIENCE_S
from tests.tiny_models import FAMILIES, UNTIED

pytestmark = pytest.mark.asyncio(loop_scope="module")
SUBJECTS: dict[tuple[bool, bool], type[EngineSubject]] = {
    (False, False): VllmSubject,
    (False, True): AdapterSubject,
    (True, False): TransformersSubject,
    (True, True): TransformersAdapterSubject,
}
STOP = ".€"  # of three tokens, comes about once in 64
TOLERANCE = 1e-4  # float32, another order of sums


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "scripted",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("vllm apart", marks=[pytest.mark.vllm, pytest.mark.long]),
        pytest.param("vllm paused", marks=[pytest.mark.vllm, pytest.mark.long]),
        pytest.param("adapters", marks=pytest.mark.vllm),
        pytest.param("adapters paused", marks=[pytest.mark.vllm, pytest.mark.long]),
        "transformers",
        pytest.param("transformers paused", marks=pytest.mark.long),
        pytest.param("transformers qwen3_5", marks=pytest.mark.long),
        pytest.param("transformers deepseek_v3", marks=pytest.mark.long),
        pytest.param("transformers adapters", marks=pytest.mark.long),
        pytest.param("transformers adapters paused", marks=pytest.mark.long),
        pytest.param("transformers adapters qwen3_5_text", marks=pytest.mark.long),
    ],
)
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    directory: Path = tmp_path_factory.mktemp("engine")
    remember_strangers()
    if request.param == "scripted":
        config = WeightsConfig(transport="gloo", timeout_s=PATIENCE_S)
        made: Subject = ScriptedSubject(make_publisher(config, directory=directory, device="cpu"))
    else:
        staging = "paused" if request.param.endswith("paused") else "auto"
        holds_adapters = "adapters" in request.param
        family = next((each for each in FAMILIES if each in request.param.split()), "qwen2")
        made = await SUBJECTS["transformers" in request.param, holds_adapters].start(
            directory,
            family=family,
            tied=family not in UNTIED,
            staging=staging,
            is_apart=request.param.endswith("apart"),
            lora=AdapterSubject.LORA if holds_adapters else {},
            seeded_samples=True,
        )
    await made.join()
    await made.update(0)
    yield made
    await made.engine.close()
    made.publisher.dissolve()


def assert_well_formed(rollout: Rollout) -> None:
    length = len(rollout.token_ids)
    assert len(rollout.behaviour_logprobs) == len(rollout.versions) == len(rollout.loss_mask) == length
    assert np.all(np.diff(rollout.versions) >= 0)
    assert np.all(rollout.behaviour_logprobs <= 0)
    assert rollout.loss_mask.all()


def assert_sampled_by(subject: Subject, version: int, rollout: Rollout) -> None:
    assert_well_formed(rollout)
    assert np.all(rollout.versions == version)
    expected = subject.expected_logprobs(version, rollout)
    np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=TOLERANCE)


async def until_sampling(subject: Subject, *requests: RolloutRequest) -> None:
    """Wait until the first token of each is there; they have hundreds to go."""
    async with asyncio.timeout(PATIENCE_S):
        while not all(subject.engine.num_sampled(each.request_id) for each in requests):  # noqa: ASYNC110 - by polling
            await asyncio.sleep(0.001)


async def test_log_probabilities_are_those_of_the_policy(subject: Subject) -> None:
    rollouts = await asyncio.gather(*(subject.engine.generate(request_of(index)) for index in range(8)))
    for index, rollout in enumerate(rollouts):
        assert (rollout.group_id, rollout.sample_index) == (index, 0)
        assert_sampled_by(subject, subject.engine.policy_version, rollout)


async def test_prompts_that_do_not_fit_into_one_step_are_sampled_as_each_is_alone(subject: Subject) -> None:
    """16 of 190 tokens; vLLM's steps take 2,048 on CPU."""
    prompts = [np.asarray([4 + (first * 7 + index) % 90 for index in range(190)], np.int32) for first in range(16)]
    requests = [request_of(group_id, prompt=prompt) for group_id, prompt in enumerate(prompts)]
    together = await asyncio.gather(*map(subject.engine.generate, requests))
    for request, rollout in zip(requests, together, strict=True):
        assert_well_formed(rollout)
        np.testing.assert_array_equal((await subject.engine.generate(request)).token_ids, rollout.token_ids)


async def test_a_completion_ends_at_a_stop_token_or_at_its_length(subject: Subject) -> None:
    stops = tuple(range(4, 60))
    early = await asyncio.gather(
        *(subject.engine.generate(request_of(index, max_tokens=200, stop_token_ids=stops)) for index in range(4))
    )
    for rollout in early:
        assert rollout.finish_reason is FinishReason.STOP
        assert rollout.token_ids[-1] in stops
        assert not set(rollout.token_ids[:-1]) & set(stops)
    whole = await subject.engine.generate(request_of(1, max_tokens=3))
    assert whole.finish_reason is FinishReason.LENGTH
    assert len(whole.token_ids) == 3


def texts_of(token_ids: list[int], first: int = 0) -> list[str]:
    """Of the tokens from `first` on: of none, of one, of two, …"""
    return [decode(token_ids[first:end]) for end in range(first, len(token_ids) + 1)]


def end_of(text_of: list[str], stop: str) -> int | None:
    """Tokens up to the first behind which the stop string is there, by plain search."""
    return next((number for number, text in enumerate(text_of) if stop in text), None)


def stops_of(text_of: list[str]) -> dict[int, str]:
    """Stop strings by where they end: with a token, across borders, within a token, or with a part of a character."""
    found: dict[int, str] = {}
    for number, text in enumerate(text_of):
        for stop in ("€" if text.endswith("€") else "", text[-5:], text[-3:-1], text[-1:]):
            if stop and "\ufffd" not in stop and end_of(text_of, stop) == number:
                found.setdefault(number, stop)
    return found


async def test_a_completion_ends_with_the_token_that_completes_a_stop_string(subject: Subject) -> None:
    wholes = await asyncio.gather(*(subject.engine.generate(request_of(n, max_tokens=60)) for n in range(16)))
    found = [stops_of(texts_of(whole.token_ids.tolist())) for whole in wholes]
    begins_with_text = [group_id for group_id in range(16) if 1 in found[group_id]]
    has_parts = [group_id for group_id in range(16) if "€" in found[group_id].values()]
    for group_id in {begins_with_text[0], has_parts[0]}:
        for end, stop in found[group_id].items():
            limit = end if end % 3 == 0 else 60
            request = request_of(group_id, max_tokens=limit, stop_strings=("not there", stop))
            rollout = await subject.engine.generate(request)
            assert rollout.finish_reason is FinishReason.STOP
            np.testing.assert_array_equal(rollout.token_ids, wholes[group_id].token_ids[:end])
            assert_sampled_by(subject, subject.engine.policy_version, rollout)


async def test_a_stop_string_is_found_across_the_end_of_a_prefix_and_never_before_where_its_turn_begins(
    subject: Subject,
) -> None:
    tokens = [23, 26, 31, 24, 25, 28]  # the last one is the beginning of a character
    prefix = Prefix(np.asarray(tokens, np.int32), np.full(6, -1.5, np.float32), np.zeros(6, np.int32))
    whole = await subject.engine.generate(request_of(5, max_tokens=90, prefix=prefix))
    text_of = texts_of(whole.token_ids.tolist())
    across = [
        text_of[6 + more][-length:] for more in range(1, 8) for length in (9, 4) if text_of[6 + more][-1:] != "\ufffd"
    ]
    for stop in [stop for stop in across if "\ufffd" not in stop]:
        rollout = await subject.engine.generate(request_of(5, max_tokens=90, prefix=prefix, stop_strings=(stop,)))
        np.testing.assert_array_equal(rollout.token_ids, whole.token_ids[: end_of(text_of, stop)])
        np.testing.assert_array_equal(rollout.versions[:6], prefix.versions)
        assert rollout.finish_reason is FinishReason.STOP
    for searched_from, stop in ((3, "f."), (6, "€")):
        behind = end_of(texts_of(whole.token_ids.tolist(), searched_from), stop)
        request = request_of(5, max_tokens=90, prefix=prefix, stop_strings=(stop,), searched_from=searched_from)
        rollout = await subject.engine.generate(request)
        end = None if behind is None else searched_from + behind
        np.testing.assert_array_equal(rollout.token_ids, whole.token_ids[:end])


async def test_a_prefix_with_a_stop_string_is_a_whole_completion(subject: Subject) -> None:
    tokens = np.asarray([26, 31, 24, 25, 30], np.int32)
    prefix = Prefix(tokens, np.full(5, -1, np.float32), np.zeros(5, np.int32))
    rollout = await subject.engine.generate(request_of(5, max_tokens=9, prefix=prefix, stop_strings=("€",)))
    assert rollout.finish_reason is FinishReason.STOP
    np.testing.assert_array_equal(rollout.token_ids, tokens[:4])
    assert_well_formed(rollout)


async def test_nothing_behind_a_stop_string_is_shown_counted_or_returned(subject: Subject) -> None:
    whole = await subject.engine.generate(request_of(14, max_tokens=400))
    text_of = texts_of(whole.token_ids.tolist())
    stop = next(text[-6:] for text in text_of[150:] if "\ufffd" not in text[-6:] and end_of(text_of, text[-6:]) > 100)
    end = end_of(text_of, stop)
    request, shown = request_of(14, max_tokens=400, stop_strings=(stop,)), list[Prefix]()
    running = asyncio.create_task(subject.engine.generate(request))
    while not running.done():
        await asyncio.sleep(0)
        assert subject.engine.num_sampled(request.request_id) <= end
        for start in (0, 60):
            if (part := subject.engine.progress(request.request_id, start)) is not None:
                np.testing.assert_array_equal(part.token_ids, whole.token_ids[start : start + len(part.token_ids)])
                assert start + len(part.token_ids) <= end
                shown.append(part)
    assert shown
    rollout = await running
    np.testing.assert_array_equal(rollout.token_ids, whole.token_ids[:end])
    assert subject.engine.statistics().num_running == 0


async def test_stop_strings_are_found_while_weights_change_and_requests_are_aborted(subject: Subject) -> None:
    old, new = subject.engine.policy_version, subject.engine.policy_version + 1
    requests = [_stopped(index) for index in range(24)]  # more than are sampled at once
    running = [asyncio.create_task(subject.engine.generate(request)) for request in requests]
    async with asyncio.timeout(PATIENCE_S):  # on a busy machine one has ended before another has begun
        while not any(subject.engine.num_sampled(request.request_id) for request in requests[:8]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await subject.update(new)
    for request in requests[20:]:
        await subject.engine.abort(request.request_id)
    for rollout in await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S):
        assert_well_formed(rollout)
        assert set(rollout.versions) <= {old, new}
        end = end_of(texts_of(rollout.token_ids.tolist()), STOP)
        assert end in (None, len(rollout.token_ids))
        assert (rollout.finish_reason is FinishReason.STOP) is (end is not None)


async def test_an_aborted_request_returns_what_there_is(subject: Subject) -> None:
    running = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(4)]
    await until_sampling(subject, *(_long(index) for index in range(4)))
    for index in range(4):
        await subject.engine.abort(_long(index).request_id)
    rollouts = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
    for rollout in rollouts:
        assert rollout.finish_reason is FinishReason.ABORT
        assert 0 < len(rollout.token_ids) < MAX_TOKENS
        assert_sampled_by(subject, subject.engine.policy_version, rollout)


async def test_an_unknown_request_is_aborted_without_effect(subject: Subject) -> None:
    await subject.engine.abort("999:9")


async def test_an_abort_right_after_the_request_is_not_lost(subject: Subject) -> None:
    running = asyncio.create_task(subject.engine.generate(_long(1)))
    await asyncio.sleep(0)
    await subject.engine.abort(_long(1).request_id)
    rollout = await asyncio.wait_for(running, PATIENCE_S)
    assert rollout.finish_reason is FinishReason.ABORT
    assert len(rollout.token_ids) < MAX_TOKENS


async def test_a_cancelled_request_is_gone(subject: Subject) -> None:
    running = asyncio.create_task(subject.engine.generate(_long(2)))
    await until_sampling(subject, _long(2))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    statistics = subject.engine.statistics()
    assert statistics.num_running == statistics.num_waiting == 0


async def test_a_prefix_is_kept_and_continued(subject: Subject) -> None:
    prefix = Prefix(
        np.asarray([20, 21, 22, 23], np.int32), np.full(4, -1.5, np.float32), np.asarray([-1, -1, 0, 0], np.int32)
    )
    rollout = await subject.engine.generate(request_of(5, max_tokens=10, prefix=prefix))
    assert_well_formed(rollout)
    assert len(rollout.token_ids) == 10
    np.testing.assert_array_equal(rollout.token_ids[:4], prefix.token_ids)
    np.testing.assert_array_equal(rollout.behaviour_logprobs[:4], prefix.behaviour_logprobs)
    np.testing.assert_array_equal(rollout.versions[:4], prefix.versions)
    expected = subject.expected_logprobs(subject.engine.policy_version, rollout)
    np.testing.assert_allclose(rollout.behaviour_logprobs[4:], expected[4:], atol=TOLERANCE)


async def test_a_prefix_of_full_length_is_a_whole_completion(subject: Subject) -> None:
    prefix = Prefix(np.full(6, 30, np.int32), np.full(6, -1, np.float32), np.zeros(6, np.int32))
    rollout = await subject.engine.generate(request_of(5, max_tokens=6, prefix=prefix))
    assert rollout.finish_reason is FinishReason.LENGTH
    assert len(rollout.token_ids) == 6


async def test_what_is_shown_of_a_request_is_the_beginning_of_what_it_returns(subject: Subject) -> None:
    request = _long(3)
    running, shown = asyncio.create_task(subject.engine.generate(request)), []
    while not running.done():
        await asyncio.sleep(0.002)
        if (prefix := subject.engine.progress(request.request_id)) is not None:
            shown.append(prefix)
    rollout = await running
    assert any(0 < len(prefix.token_ids) < len(rollout.token_ids) for prefix in shown)
    for prefix in shown:
        begin = slice(len(prefix.token_ids))
        np.testing.assert_array_equal(prefix.token_ids, rollout.token_ids[begin])
        np.testing.assert_array_equal(prefix.behaviour_logprobs, rollout.behaviour_logprobs[begin])
        np.testing.assert_array_equal(prefix.versions, rollout.versions[begin])
    assert subject.engine.progress(request.request_id) is None


async def test_a_request_is_shown_from_any_token_on_whether_its_prefix_or_its_own(subject: Subject) -> None:
    prefix = Prefix(np.full(20, 30, np.int32), np.full(20, -1, np.float32), np.zeros(20, np.int32))
    request = request_of(6, max_tokens=MAX_TOKENS, prefix=prefix)
    running, num_looks = asyncio.create_task(subject.engine.generate(request)), 0
    while not running.done():
        await asyncio.sleep(0.002)
        fewest = subject.engine.num_sampled(request.request_id)
        shown = {start: subject.engine.progress(request.request_id, start) for start in (31, 20, 7, 0)}
        if (whole := shown[0]) is None or shown[31] is None or len(whole.token_ids) <= 31:
            continue
        num_looks += 1
        most = subject.engine.num_sampled(request.request_id)  # an engine may sample while it is asked
        assert fewest <= len(whole.token_ids) <= most
        for start, part in shown.items():
            assert part is not None
            assert fewest <= start + len(part.token_ids) <= len(whole.token_ids)
            for name in ("token_ids", "behaviour_logprobs", "versions"):
                end = start + len(part.token_ids)
                np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[start:end])
    assert num_looks
    assert len((await running).token_ids) == MAX_TOKENS


async def test_a_request_that_waited_while_weights_changed_is_shown_like_any_other(subject: Subject) -> None:
    requests = [request_of(index, max_tokens=MAX_TOKENS) for index in range(20)]  # four more than are sampled at once
    running = [asyncio.create_task(subject.engine.generate(request)) for request in requests]
    await until_sampling(subject, *requests[:16])
    await subject.update(subject.engine.policy_version + 1)
    shown: dict[int, Prefix] = {}
    while not all(task.done() for task in running):
        await asyncio.sleep(0.002)
        for index, request in enumerate(requests):
            if (prefix := subject.engine.progress(request.request_id)) is not None:
                shown[index] = prefix
    for index, task in enumerate(running):
        rollout, prefix = await task, shown[index]
        begin = slice(len(prefix.token_ids))
        np.testing.assert_array_equal(prefix.token_ids, rollout.token_ids[begin])
        np.testing.assert_array_equal(prefix.versions, rollout.versions[begin])


async def test_requests_that_waited_while_weights_changed_begin_on_nothing_that_is_old(subject: Subject) -> None:
    """Their prompt's keys and values are in the cache of the old version, under which they were asked for."""
    old, new = subject.engine.policy_version, subject.engine.policy_version + 1
    await subject.engine.generate(request_of(0, prompt=LONG_PROMPT))
    running = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(16)]
    await until_sampling(subject, *(_long(index) for index in range(16)))
    waiting = [request_of(50 + index, prompt=LONG_PROMPT) for index in range(3)]
    late = [asyncio.create_task(subject.engine.generate(request)) for request in waiting]
    await asyncio.sleep(0)
    await subject.update(new)
    for rollout in await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S):
        assert set(rollout.versions) == {old, new}
    for request, rollout in zip(waiting, await asyncio.wait_for(asyncio.gather(*late), PATIENCE_S), strict=True):
        assert rollout.group_id == request.group_id
        assert rollout.finish_reason is FinishReason.LENGTH
        assert_sampled_by(subject, new, rollout)


async def test_requests_that_are_asked_for_during_an_update_begin_on_nothing_that_is_old(subject: Subject) -> None:
    new = subject.engine.policy_version + 1
    await subject.engine.generate(request_of(0, prompt=LONG_PROMPT))
    updating, late = asyncio.create_task(subject.update(new)), list[asyncio.Task[Rollout]]()
    while not updating.done():
        if len(late) < 40:
            late.append(asyncio.create_task(subject.engine.generate(request_of(50 + len(late), prompt=LONG_PROMPT))))
        await asyncio.sleep(0.002)
    await updating
    for rollout in await asyncio.wait_for(asyncio.gather(*late), PATIENCE_S):
        assert_well_formed(rollout)
        if set(rollout.versions) == {new}:
            assert_sampled_by(subject, new, rollout)


async def test_a_request_that_vllm_adds_only_after_an_update_begins_on_nothing_that_is_old(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for before, under the old version's name for its prompt; an abort does not find it yet."""
    if not isinstance(subject, EngineSubject):
        pytest.skip("no front end that adds requests later")
    llm, gate = subject.engine._core, asyncio.Event()
    sample, requests = llm.sample, [request_of(50 + index, prompt=LONG_PROMPT) for index in range(4)]
    await subject.engine.generate(request_of(0, prompt=LONG_PROMPT))

    async def add_late(*arguments: Any, **options: Any) -> Any:
        await gate.wait()
        return await sample(*arguments, **options)

    monkeypatch.setattr(llm, "sample", add_late)
    late = [asyncio.create_task(subject.engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    new = subject.engine.policy_version + 1
    await subject.update(new)
    aborting = asyncio.create_task(subject.engine.abort(requests[3].request_id))
    gate.set()
    for rollout in await asyncio.wait_for(asyncio.gather(*late[:3]), PATIENCE_S):
        assert rollout.finish_reason is FinishReason.LENGTH
        assert_sampled_by(subject, new, rollout)
    await asyncio.wait_for(aborting, PATIENCE_S)
    assert (await late[3]).finish_reason is FinishReason.ABORT


async def test_a_request_that_waited_over_an_update_is_aborted_like_any_other(subject: Subject) -> None:
    running = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(17)]
    await until_sampling(subject, *(_long(index) for index in range(16)))
    await subject.update(subject.engine.policy_version + 1)
    await subject.engine.abort(_long(16).request_id)
    late = await asyncio.wait_for(running[16], PATIENCE_S)
    assert late.finish_reason is FinishReason.ABORT
    assert len(late.token_ids) < MAX_TOKENS
    await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)


async def test_what_was_reported_of_a_lost_rollout_is_continued_under_the_same_policy(subject: Subject) -> None:
    """As after a death: all that is left of the first request are its reports."""
    admission = AdmissionConfig(groups_per_step=1, group_size=1)
    interval = BufferConfig(partial_interval_tokens=100)
    reporter = ProgressReporter(subject.engine, admission, interval, time.monotonic)
    request, known = request_of(11, max_tokens=MAX_TOKENS), None
    dying = asyncio.create_task(subject.engine.generate(request))
    while known is None or len(known.token_ids) < MAX_TOKENS // 4:
        await asyncio.sleep(0.002)
        assert not dying.done()
        if (report := reporter.report([request], 0)) is not None:
            for piece in decode_partials(report.pieces.tobytes(), report.num_bytes):
                assert piece.follows(known)
                known = joined(known, piece)
    dying.cancel()
    with suppress(asyncio.CancelledError):
        await dying
    rollout = await subject.engine.generate(request_of(11, max_tokens=MAX_TOKENS, prefix=known))
    np.testing.assert_array_equal(rollout.token_ids[: len(known.token_ids)], known.token_ids)
    assert len(rollout.token_ids) == MAX_TOKENS
    assert_sampled_by(subject, subject.engine.policy_version, rollout)


async def test_a_member_that_is_sampled_again_is_drawn_alike_whatever_runs_beside_it(subject: Subject) -> None:
    first = await subject.engine.generate(request_of(7))
    second, *_ = await asyncio.gather(*(subject.engine.generate(request_of(index)) for index in (7, 8, 9)))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)


async def test_a_pause_keeps_requests(subject: Subject) -> None:
    running = [asyncio.create_task(subject.engine.generate(_long(index, 300))) for index in range(4)]
    await until_sampling(subject, *(_long(index) for index in range(4)))
    await subject.engine.pause()
    await subject.engine.pause()
    busy_s = subject.engine.statistics().busy_s
    _, pending = await asyncio.wait(running, timeout=0.3)
    assert pending
    assert subject.engine.statistics().busy_s == busy_s
    await subject.engine.resume()
    await subject.engine.resume()
    for rollout in await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S):
        assert_sampled_by(subject, subject.engine.policy_version, rollout)
        assert rollout.finish_reason is FinishReason.LENGTH


async def test_requests_go_on_while_weights_change(subject: Subject) -> None:
    old, new = subject.engine.policy_version, subject.engine.policy_version + 1
    before = await subject.engine.generate(request_of(0, prompt=LONG_PROMPT))
    assert_sampled_by(subject, old, before)

    running = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(8)]
    await until_sampling(subject, *(_long(index) for index in range(8)))
    timing = await subject.update(new)
    assert isinstance(timing, WeightTiming)
    assert subject.engine.policy_version == new
    rollouts = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)

    differs: list[bool] = []
    for rollout in rollouts:
        assert_well_formed(rollout)
        assert set(rollout.versions) == {old, new}
        assert len(rollout.token_ids) == MAX_TOKENS
        border = int(np.argmax(rollout.versions == new))
        by_old = subject.expected_logprobs(old, rollout)
        # Up to the border nothing but the old weights was at work; with the first token after it, something else,
        # unless both happen to agree on that one token.
        np.testing.assert_allclose(rollout.behaviour_logprobs[:border], by_old[:border], atol=TOLERANCE)
        differs.append(abs(rollout.behaviour_logprobs[border] - by_old[border]) > 10 * TOLERANCE)
    assert sum(differs) > len(differs) / 2

    # The same prompt again: a cache of old keys and values would show.
    after = await subject.engine.generate(request_of(0, prompt=LONG_PROMPT))
    assert_sampled_by(subject, new, after)


async def test_many_updates_leave_versions_in_order(subject: Subject) -> None:
    running = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(6)]
    for _ in range(4):
        await asyncio.sleep(0.03)
        await subject.update(subject.engine.policy_version + 1)
    for rollout in await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S):
        assert_well_formed(rollout)


async def test_an_engine_that_is_paused_stays_paused_over_an_update(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait, too, though they begin anew: a busy machine asks often that they are given up for that."""
    monkeypatch.setattr("rlhpc.generation.engine.ABORT_AGAIN_S", 0.0)
    await subject.engine.pause()
    running = [asyncio.create_task(subject.engine.generate(request_of(index))) for index in range(8)]
    await subject.update(subject.engine.policy_version + 1)
    done, _ = await asyncio.wait(running, timeout=0.3)
    await subject.engine.resume()
    rollouts = await asyncio.gather(*running)
    assert not done
    for rollout in rollouts:
        assert_sampled_by(subject, subject.engine.policy_version, rollout)


def _sends_another_sum_of(bucket: int) -> tuple[str, Callable[..., list[int]]]:
    """Name and stand-in of what sends the buckets: the publisher announces another checksum of one than it has."""

    def send(*args: Any) -> list[int]:
        sums = _send_blocks(*args)
        sums[bucket] ^= 1
        return sums

    return "rlhpc.weights.broadcast._send_blocks", send


async def test_torn_weights_leave_the_old_ones_live(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    if subject.loads_arriving:
        pytest.skip("there are no old ones any more")
    old = subject.engine.policy_version
    with monkeypatch.context() as damage:
        damage.setattr(*_sends_another_sum_of(0))
        with pytest.raises(TornWeights):
            await subject.update(old + 1)
    assert subject.engine.policy_version == old
    assert_sampled_by(subject, old, await subject.engine.generate(request_of(4)))
    await subject.join()
    await subject.update(old + 1)
    assert_sampled_by(subject, old + 1, await subject.engine.generate(request_of(4)))


async def assert_healed_by(subject: Subject, old: int, running: asyncio.Task[Rollout]) -> None:
    """Whatever came of an update of a request's weights, it was not sampled by torn ones, and the next one helps."""
    is_torn = subject.engine.policy_version == -1
    late = asyncio.create_task(subject.engine.generate(request_of(7)))
    if is_torn:
        assert subject.engine.capacity_samples == 0
        await subject.engine.resume()  # nobody can make it sample
        frozen = await subject.num_tokens()
        _, pending = await asyncio.wait([running, late], timeout=0.1)
        assert len(pending) == 2
        assert await subject.num_tokens() == frozen
    else:
        assert subject.engine.policy_version == old
        assert_sampled_by(subject, old, await late)
    await subject.join()
    await subject.update(old + 1)
    assert subject.engine.capacity_samples > 0
    if is_torn:
        assert_sampled_by(subject, old + 1, await asyncio.wait_for(late, PATIENCE_S))
    rollout = await asyncio.wait_for(running, PATIENCE_S)
    assert_well_formed(rollout)
    assert len(rollout.token_ids) == MAX_TOKENS
    assert set(rollout.versions) <= {old, old + 1}
    border = int(np.count_nonzero(rollout.versions == old))
    by_old = subject.expected_logprobs(old, rollout)
    np.testing.assert_allclose(rollout.behaviour_logprobs[:border], by_old[:border], atol=TOLERANCE)
    assert_sampled_by(subject, old + 1, await subject.engine.generate(request_of(0, prompt=LONG_PROMPT)))


def some_everyday(number: int) -> list[Any]:
    """0 … number − 1, of which make test has the first, one in the middle and the last."""
    kept = (0, number // 2, number - 1)
    return [n if n in kept else pytest.param(n, marks=pytest.mark.long) for n in range(number)]


@pytest.mark.parametrize("boundary", some_everyday(8))
async def test_a_publisher_that_dies_at_any_bucket_leaves_nothing_torn_to_sample_from(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, boundary: int
) -> None:
    monkeypatch.setattr(subject, "bucket_bytes", subject.small_bucket_bytes)
    ends = (0, *subject.manifest(0).bucket_ends)
    if boundary >= len(ends):
        pytest.skip("a small model has few buckets")
    old = subject.engine.policy_version
    running = asyncio.create_task(subject.engine.generate(_long(1)))
    await until_sampling(subject, _long(1))
    if ends[boundary] < ends[-1]:
        with pytest.raises(TornWeights):
            await subject.update(old + 1, cut_off_after=ends[boundary])
    else:  # all buckets are here, their checksums are not
        with monkeypatch.context() as damage:
            damage.setattr("rlhpc.weights.broadcast._send_blocks", _send_and_die)
            with pytest.raises(TornWeights):
                await subject.update(old + 1)
    await assert_healed_by(subject, old, running)


@pytest.mark.parametrize("bucket", some_everyday(7))
async def test_a_damaged_bucket_is_never_sampled_from(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr(subject, "bucket_bytes", subject.small_bucket_bytes)
    if bucket >= len(subject.manifest(0).bucket_ends):
        pytest.skip("a small model has few buckets")
    old = subject.engine.policy_version
    running = asyncio.create_task(subject.engine.generate(_long(1)))
    await until_sampling(subject, _long(1))
    with monkeypatch.context() as damage:
        damage.setattr(*_sends_another_sum_of(bucket))
        with pytest.raises(TornWeights, match=f"bucket {bucket} "):
            await subject.update(old + 1)
    assert subject.engine.policy_version == (-1 if subject.loads_arriving else old)
    await assert_healed_by(subject, old, running)


async def test_an_engine_with_torn_weights_hands_back_what_it_has(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not subject.loads_arriving:
        pytest.skip("its weights are never torn")
    monkeypatch.setattr(subject, "bucket_bytes", subject.small_bucket_bytes)
    old = subject.engine.policy_version
    running = asyncio.create_task(subject.engine.generate(_long(1)))
    await until_sampling(subject, _long(1))
    with pytest.raises(TornWeights, match="no token is sampled before a whole version has arrived"):
        await subject.update(old + 1, cut_off_after=len(subject.weights(0)) - 1)
    await subject.engine.abort(_long(1).request_id)
    rollout = await asyncio.wait_for(running, PATIENCE_S)
    assert rollout.finish_reason is FinishReason.ABORT
    assert len(rollout.token_ids) > 0
    assert_sampled_by(subject, old, rollout)
    await subject.join()
    await subject.update(old + 1)


async def test_a_row_is_scored_as_the_policy_scores_it(subject: Subject) -> None:
    for version in (11, 12):
        await subject.update(version)
        for row in (LONG_PROMPT[:64], LONG_PROMPT[5:7], LONG_PROMPT[:64]):  # the last has been seen before
            score = await subject.engine.score(row)
            assert score.policy_version == version
            assert score.logprobs.dtype == np.float32
            assert score.logprobs[0] == 0
            np.testing.assert_allclose(score.logprobs[1:], subject.expected_score(version, row), atol=TOLERANCE)


async def test_rows_are_scored_side_by_side_with_the_most_likely_tokens_in_each_place(subject: Subject) -> None:
    """Of rows that share a beginning, which prefix caching would not compute again, and with numbers that differ."""
    await subject.update(12)
    rows = [LONG_PROMPT[:length] for length in (2, 33, 64, 150, 64, 40)]
    most = (0, 1, 5, 30, 0, 3)
    scores = await asyncio.gather(*map(subject.engine.score, rows, most))
    for row, top_k, score in zip(rows, most, scores, strict=True):
        tables = subject.expected_tables(12, row)
        own = tables[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(score.logprobs[1:], own, atol=TOLERANCE)
        assert score.ranks[0] == 0
        below = (tables > own[:, None] + TOLERANCE).sum(1)
        above = (tables >= own[:, None] - TOLERANCE).sum(1)  # tokens that are as likely may count or not
        assert np.all((below < score.ranks[1:]) & (score.ranks[1:] <= above))
        if not top_k:
            assert score.top is None
            continue
        assert score.top is not None
        assert score.top.token_ids.shape == score.top.logprobs.shape == (len(row), top_k)
        assert not score.top.token_ids[0].any()
        np.testing.assert_allclose(score.top.logprobs[1:], -np.sort(-tables)[:, :top_k], atol=TOLERANCE)
        chosen = np.take_along_axis(tables, score.top.token_ids[1:], 1)
        np.testing.assert_allclose(score.top.logprobs[1:], chosen, atol=TOLERANCE)
        assert all(len(set(ids)) == top_k for ids in score.top.token_ids[1:].tolist())
    with pytest.raises(ValueError, match="100000 of "):
        await subject.engine.score(LONG_PROMPT[:9], 100_000)
    if isinstance(subject, EngineSubject):
        with pytest.raises(ValueError, match=r"length|long"):  # a caller's mistake, of which the engine does not die
            await subject.engine.generate(request_of(0, prompt=np.full(MAX_TOKENS + 193, 9, np.int32)))
        with pytest.raises(ValueError, match="more than the engine has room for"):
            await subject.engine.score(np.full(MAX_TOKENS + 192, 9, np.int32))
        assert_sampled_by(subject, 12, await subject.engine.generate(request_of(0)))


async def test_a_row_is_scored_before_requests_that_wait(subject: Subject) -> None:
    running = [asyncio.create_task(subject.engine.generate(_long(index, 60 + 10 * index))) for index in range(48)]
    await until_sampling(subject, _long(15, 210))  # the last of those that are sampled at first
    score = await asyncio.wait_for(subject.engine.score(LONG_PROMPT[:64]), PATIENCE_S)
    num_done = sum(task.done() for task in running)
    await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
    assert num_done < 16  # of 16 that were sampled at first, 32 waited
    np.testing.assert_allclose(
        score.logprobs[1:], subject.expected_score(score.policy_version, LONG_PROMPT[:64]), atol=TOLERANCE
    )


async def test_a_row_that_was_scored_while_weights_changed_is_of_no_version(subject: Subject) -> None:
    await subject.update(13)
    running = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(32)]
    await until_sampling(subject, *(_long(index) for index in range(16)))
    scoring = asyncio.create_task(subject.engine.score(LONG_PROMPT[:64]))
    await asyncio.sleep(0)
    await subject.update(14)
    score = await asyncio.wait_for(scoring, PATIENCE_S)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    if score.policy_version != -1:  # an engine that scores at once, or had a seat for it
        expected = subject.expected_score(score.policy_version, LONG_PROMPT[:64])
        np.testing.assert_allclose(score.logprobs[1:], expected, atol=TOLERANCE)


async def test_what_an_engine_holds_is_told_by_a_checksum_that_follows_the_weights(subject: Subject) -> None:
    held = [(await subject.update(version)).held for version in (15, 15, 16)]
    if isinstance(subject, EngineSubject):
        first, again, other = (each for each in held if each is not None)
        assert first == again
        assert first.value != other.value
        assert first.layout == other.layout
    else:
        assert held == [None, None, None]


async def test_an_engine_outside_a_group_receives_nothing(subject: Subject) -> None:
    await subject.engine.leave_weights()
    await subject.engine.leave_weights()
    with pytest.raises(TornWeights):
        await subject.engine.receive_weights(subject.manifest(subject.engine.policy_version + 1))
    await subject.join()


async def test_an_engine_goes_back_to_an_earlier_version(subject: Subject) -> None:
    """A trainer was resumed from an earlier checkpoint; the engine outlives it."""
    late = subject.engine.policy_version
    abandoned = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(4)]
    await until_sampling(subject, *(_long(index) for index in range(4)))
    for task in abandoned:
        task.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)
    await subject.engine.leave_weights()
    await subject.join()
    await subject.update(late - 2)
    assert subject.engine.policy_version == late - 2
    assert_sampled_by(subject, late - 2, await subject.engine.generate(request_of(5, prompt=LONG_PROMPT)))
    running = asyncio.create_task(subject.engine.generate(_long(0)))
    await until_sampling(subject, _long(0))
    await subject.update(late - 1)
    assert set((await running).versions) == {late - 2, late - 1}
    assert_sampled_by(subject, late - 1, await subject.engine.generate(request_of(5, prompt=LONG_PROMPT)))
    await subject.update(late)


async def test_statistics_count(subject: Subject) -> None:
    before = subject.engine.statistics()
    rollout = await subject.engine.generate(request_of(6))
    after = subject.engine.statistics()
    assert after.tokens_generated - before.tokens_generated == len(rollout.token_ids)
    assert after.busy_s > before.busy_s
    assert 1 <= subject.engine.capacity_samples <= 16
    assert subject.engine.weight_devices == ("",)


async def test_signals_meant_for_the_role_do_not_end_the_engine(subject: Subject) -> None:
    running = asyncio.create_task(subject.engine.generate(_long(1, 200)))
    await until_sampling(subject, _long(1, 200))
    for process in living_children():
        for notice in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            process.send_signal(notice)
    assert (await asyncio.wait_for(running, PATIENCE_S)).finish_reason is FinishReason.LENGTH


async def test_a_dead_engine_fails_what_is_pending_and_leaves_nothing_behind(subject: Subject) -> None:
    """Last: the engine does not come back."""
    running = asyncio.create_task(subject.engine.generate(_long(1)))
    await until_sampling(subject, _long(1))
    if isinstance(subject, EngineSubject):
        for process in living_children():
            process.kill()
        subject.break_core()
        with pytest.raises(EngineError):
            await asyncio.wait_for(running, PATIENCE_S)
        with pytest.raises(EngineError):
            await subject.engine.generate(request_of(1))
    await subject.engine.close()
    await subject.engine.close()
    if not isinstance(subject, EngineSubject):
        assert (await running).finish_reason is FinishReason.ABORT
    assert living_children() == []
    with pytest.raises(EngineError):
        await subject.engine.generate(request_of(1))


@pytest.mark.vllm
@pytest.mark.long
async def test_vllm_recomputes_keys_and_values_if_told_to_and_closes_in_order(tmp_path: Path) -> None:
    remember_strangers()
    subject = await VllmSubject.start(tmp_path, family="llama", tied=False, recompute_kv=True)
    try:
        await subject.join()
        await subject.update(0)
        running = [asyncio.create_task(subject.engine.generate(_long(index))) for index in range(4)]
        await until_sampling(subject, *(_long(index) for index in range(4)))
        await subject.update(1)
        rollouts = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
        for rollout in rollouts:
            assert set(rollout.versions) == {0, 1}
            border = int(np.argmax(rollout.versions == 1))
            by_new = subject.expected_logprobs(1, rollout)
            np.testing.assert_allclose(rollout.behaviour_logprobs[border:], by_new[border:], atol=TOLERANCE)
        last = asyncio.create_task(subject.engine.generate(_long(1)))
        await until_sampling(subject, _long(1))
    finally:
        await subject.engine.close()
        subject.publisher.dissolve()
    assert (await last).finish_reason is FinishReason.ABORT
    assert living_children() == []


def _send_and_die(*arguments: Any, send: Callable[..., object] = broadcast._send_blocks) -> None:
    """Every bucket is sent, and none of their checksums."""
    send(*arguments)
    raise PublisherDied


def _stopped(index: int) -> RolloutRequest:
    return request_of(index, max_tokens=MAX_TOKENS, stop_strings=(STOP,))


def _long(index: int, max_tokens: int = MAX_TOKENS) -> RolloutRequest:
    return request_of(index, max_tokens=max_tokens)
