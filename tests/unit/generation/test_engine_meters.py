"""How busy an engine is, and how many samples a replica asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.metrics.meters import BusyClock, SampleWindow

# -------------------------------------------------------------------------------------------------------- sample window
#
# A replica's window follows the lengths that it sees: the KV cache is full, and rarely over-full.


LONGEST, PROMPT, BLOCK, MAX_NUM_SEQS = 512, 16, 4, 200
KV_TOKENS = 20 * LONGEST
Lengths = Callable[[np.random.Generator], float]


def make_window(**changes: int) -> SampleWindow:
    sizes = {"kv_tokens": KV_TOKENS, "longest_tokens": LONGEST, "max_num_seqs": MAX_NUM_SEQS, "block_tokens": BLOCK}
    return SampleWindow(**{**sizes, **changes})


@dataclass
class Decoded:
    mean_running: float  # requests that got a token in a step
    preemptions_per_request: float
    window: SampleWindow


def decode(lengths: Lengths, *, num_requests: int, window: SampleWindow, fixed: int | None = None) -> Decoded:
    """What vLLM's scheduler does: admit what fits now, a token each a step, throw the youngest out when full."""
    rng = np.random.default_rng(1)
    running: list[list[int]] = []  # [length, sampled so far], oldest first
    waiting: list[list[int]] = []
    num_finished = num_preempted = num_steps = num_tokens = 0

    def held(request: list[int]) -> int:
        return -(-(PROMPT + request[1] + 1) // BLOCK) * BLOCK

    while num_finished < num_requests:
        wanted = fixed if fixed is not None else window.num_samples
        while len(running) + len(waiting) < wanted:
            waiting.append([int(np.clip(lengths(rng), 1, LONGEST - PROMPT)), 0])
        room = KV_TOKENS - sum(map(held, running))
        while room < 0:
            waiting.insert(0, running.pop())
            room += held(waiting[0])
            num_preempted += 1
        while waiting and len(running) < MAX_NUM_SEQS and held(waiting[0]) <= room:
            room -= held(waiting[0])
            running.append(waiting.pop(0))
        for request in running:
            request[1] += 1
        num_tokens, num_steps = num_tokens + len(running), num_steps + 1
        for request in [request for request in running if request[1] == request[0]]:
            running.remove(request)
            window.finished(PROMPT, request[0])
            num_finished += 1
    return Decoded(num_tokens / num_steps, num_preempted / num_finished, window)


ALL_SHORT: Lengths = lambda rng: 50  # noqa: E731
LOGNORMAL: Lengths = lambda rng: rng.lognormal(3.7, 0.8)  # noqa: E731  mean 56
FEW_LONG: Lengths = lambda rng: 20 if rng.random() < 0.8 else 400  # noqa: E731
ALL_LONGEST: Lengths = lambda rng: LONGEST  # noqa: E731


@pytest.mark.parametrize(
    ("lengths", "gain", "preemptions"),
    [(ALL_SHORT, 4.0, 0.0), (LOGNORMAL, 3.0, 0.02), (FEW_LONG, 1.6, 0.2), (ALL_LONGEST, 0.99, 0.0)],
    ids=["all short", "lognormal", "few long", "all longest"],
)
def test_more_is_decoded_at_once_than_the_greatest_length_leaves_room_for(
    lengths: Lengths, gain: float, preemptions: float
) -> None:
    by_measure = decode(lengths, num_requests=1500, window=make_window())
    by_longest = decode(lengths, num_requests=300, window=make_window(), fixed=KV_TOKENS // LONGEST)
    assert by_measure.mean_running >= gain * by_longest.mean_running
    assert by_measure.preemptions_per_request <= preemptions


def test_lengths_that_grow_while_a_model_learns_close_the_window_again() -> None:
    window = make_window()
    for _ in range(3000):
        window.finished(PROMPT, 40)
    opened = window.num_samples
    for _ in range(3000):
        window.finished(PROMPT, 400)
    assert opened >= 150
    assert window.num_samples <= KV_TOKENS // (400 + PROMPT)


def test_a_few_short_answers_do_not_open_the_window() -> None:
    """They are the first to finish whatever the others will be."""
    window = make_window()
    before = window.num_samples
    for _ in range(before // 2):
        window.finished(PROMPT, 5)
    assert window.num_samples <= 1.5 * before


@settings(max_examples=200, deadline=None)
@given(
    finished=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 412)), max_size=60),
    kv_tokens=st.integers(1, 10**6),
    max_num_seqs=st.integers(1, 1000),
    block_tokens=st.sampled_from([1, 16, 128]),
)
def test_a_window_stays_between_what_surely_fits_and_what_is_decoded_at_once(
    finished: list[tuple[int, int]], kv_tokens: int, max_num_seqs: int, block_tokens: int
) -> None:
    window = make_window(kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, block_tokens=block_tokens)
    surely = max(1, min(max_num_seqs, kv_tokens // LONGEST))
    assert window.num_samples == surely
    for num_prompt_tokens, num_tokens in finished:
        window.finished(num_prompt_tokens, num_tokens)
        assert surely <= window.num_samples <= max_num_seqs


# ----------------------------------------------------------------------------------------------------------- busy clock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_counts_while_anything_is_in_hand() -> None:
    clock = Clock()
    busy = BusyClock(clock, max_num_seqs=2)
    clock.now += 5
    busy.enter()
    clock.now += 1
    busy.enter()
    clock.now += 1
    busy.leave()
    clock.now += 1
    assert busy.seconds == 3
    busy.leave()
    clock.now += 5
    assert busy.seconds == 3


def test_pauses_do_not_count() -> None:
    clock = Clock()
    busy = BusyClock(clock, max_num_seqs=2)
    busy.enter()
    clock.now += 1
    busy.pause()
    clock.now += 5
    busy.enter()
    assert busy.seconds == 1
    busy.resume()
    clock.now += 1
    assert busy.seconds == 2


def test_each_request_that_is_decoded_counts_and_one_that_waits_for_a_place_does_not() -> None:
    clock = Clock()
    busy = BusyClock(clock, max_num_seqs=2)
    for _ in range(3):
        busy.enter()
        clock.now += 1
    assert (busy.seconds, busy.decoding_s) == (3, 1 + 2 + 2)
    busy.pause()
    clock.now += 5
    busy.resume()
    busy.leave()
    busy.leave()
    clock.now += 1
    assert (busy.seconds, busy.decoding_s) == (4, 6)
