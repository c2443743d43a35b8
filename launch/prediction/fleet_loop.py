"""The loops of fleet.py, compiled: an event costs a microsecond or less.

The state consists of arrays:
    engines   [N, NUM_COLUMNS]  a row an engine, columns below
    ends      [N, M, 2]         a heap by the first of: tokens advanced at which a rollout is done, place of its group
    waiting   [N, M + G, 3]     a ring: samples held and not yet decoded: place, tokens, tokens of a prompt to read
    order     [2, N]            a heap of engines by NEXT_S, and where each stands in it
    judged    [*, 3]            a ring: ended rollouts by the time at which they are delivered: time, engine, place
    queue     [*, 3]            a ring: samples that nobody holds yet, as in waiting
    marks     [NUM_MARKS]       beginnings and lengths of the rings, counters
    rates     [4]               engine_step_s, engine_sample_s, prefill_token_s, judge_s
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.compiled import compiled

Array = NDArray[Any]

CLOCK_S, ADVANCED, NUM_DECODED, NUM_HELD, FIRST_WAITING, NUM_ENGINE_WAITS, NEXT_S, BUSY_S, DECODING_S = range(9)
NUM_COLUMNS = 9
FIRST_JUDGED, NUM_JUDGED, FIRST_QUEUED, NUM_WAITING, NUM_EVENTS = range(5)
NUM_MARKS = 5


@compiled
def add(queue: Array, left: Array, marks: Array, place: int, prompt_tokens: int, tokens: Array) -> None:
    """Queue the members of a group; the first one reads the prompt, and the others find it in the cache."""
    left[place] = len(tokens)
    for k in range(len(tokens)):
        at = (marks[FIRST_QUEUED] + marks[NUM_WAITING]) % len(queue)
        queue[at, 0], queue[at, 1], queue[at, 2] = place, tokens[k], prompt_tokens if k == 0 else 0
        marks[NUM_WAITING] += 1


@compiled
def _sift(engines: Array, order: Array, i: int) -> None:
    """Put an engine whose NEXT_S has changed in its place of the heap."""
    heap, where = order[0], order[1]
    key, at = engines[i, NEXT_S], where[i]
    while at > 0 and engines[heap[(at - 1) // 2], NEXT_S] > key:
        heap[at] = heap[(at - 1) // 2]
        where[heap[at]] = at
        at = (at - 1) // 2
    while True:
        child = 2 * at + 1
        if child >= len(heap):
            break
        if child + 1 < len(heap) and engines[heap[child + 1], NEXT_S] < engines[heap[child], NEXT_S]:
            child += 1
        if engines[heap[child], NEXT_S] >= key:
            break
        heap[at] = heap[child]
        where[heap[at]] = at
        at = child
    heap[at] = i
    where[i] = at


@compiled
def _settle(engines: Array, rates: Array, i: int, now_s: float) -> None:
    """Count what an engine has done up to now; its clock is ahead while it reads prompts or stands still."""
    seconds = now_s - engines[i, CLOCK_S]
    if seconds <= 0:
        return
    engines[i, CLOCK_S] = now_s
    num = engines[i, NUM_DECODED]
    if num > 0:
        engines[i, ADVANCED] += seconds / (rates[0] + rates[1] * num)
        engines[i, BUSY_S] += seconds
        engines[i, DECODING_S] += seconds * num


@compiled
def _plan_next(engines: Array, ends: Array, order: Array, rates: Array, i: int) -> None:
    """Compute when an engine's next rollout ends."""
    num = engines[i, NUM_DECODED]
    if num == 0:
        engines[i, NEXT_S] = np.inf
    else:
        left = max(0.0, ends[i, 0, 0] - engines[i, ADVANCED])
        engines[i, NEXT_S] = engines[i, CLOCK_S] + left * (rates[0] + rates[1] * num)
    _sift(engines, order, i)


@compiled
def _stand_still(engines: Array, i: int, seconds: float) -> None:
    engines[i, CLOCK_S] += seconds
    engines[i, BUSY_S] += seconds
    engines[i, DECODING_S] += seconds * engines[i, NUM_DECODED]


@compiled
def _begin(engines: Array, ends: Array, rates: Array, i: int, place: float, tokens: float, prompt: float) -> None:
    """Decode one more rollout; the caller calls _settle before, and _plan_next afterwards."""
    at, end = int(engines[i, NUM_DECODED]), engines[i, ADVANCED] + tokens
    engines[i, NUM_DECODED] += 1
    while at > 0 and ends[i, (at - 1) // 2, 0] > end:
        ends[i, at, 0], ends[i, at, 1] = ends[i, (at - 1) // 2, 0], ends[i, (at - 1) // 2, 1]
        at = (at - 1) // 2
    ends[i, at, 0], ends[i, at, 1] = end, place
    if prompt > 0:
        _stand_still(engines, i, prompt * rates[2])


@compiled
def _end_first(engines: Array, ends: Array, i: int) -> float:
    """Take the rollout that is done off the heap; returns its group's place."""
    place, num = ends[i, 0, 1], int(engines[i, NUM_DECODED]) - 1
    engines[i, NUM_DECODED] = num
    end, owner, at = ends[i, num, 0], ends[i, num, 1], 0
    while True:
        child = 2 * at + 1
        if child >= num:
            break
        if child + 1 < num and ends[i, child + 1, 0] < ends[i, child, 0]:
            child += 1
        if ends[i, child, 0] >= end:
            break
        ends[i, at, 0], ends[i, at, 1] = ends[i, child, 0], ends[i, child, 1]
        at = child
    if num > 0:
        ends[i, at, 0], ends[i, at, 1] = end, owner
    return float(place)


@compiled
def _hold(
    engines: Array, ends: Array, waiting: Array, queue: Array, marks: Array, rates: Array, i: int, most: int
) -> None:
    """Give an engine the sample that waits longest; the caller settles and plans as for _begin.  most: M."""
    first = marks[FIRST_QUEUED]
    marks[FIRST_QUEUED], marks[NUM_WAITING] = (first + 1) % len(queue), marks[NUM_WAITING] - 1
    engines[i, NUM_HELD] += 1
    if engines[i, NUM_DECODED] < most:
        _begin(engines, ends, rates, i, queue[first, 0], queue[first, 1], queue[first, 2])
        return
    at = int(engines[i, FIRST_WAITING] + engines[i, NUM_ENGINE_WAITS]) % waiting.shape[1]
    waiting[i, at] = queue[first]
    engines[i, NUM_ENGINE_WAITS] += 1


@compiled
def dispatch(
    engines: Array, ends: Array, waiting: Array, order: Array, judged: Array, queue: Array, marks: Array,
    rates: Array, most: int, group_size: int, now_s: float,
) -> None:  # fmt: skip
    """Lease what is queued, a group's members together as far as credit reaches, to the engine with most credit."""
    while marks[NUM_WAITING] > 0:
        i = int(np.argmin(engines[:, NUM_HELD]))
        credit = most + group_size - engines[i, NUM_HELD]
        if credit <= 0:
            return
        _settle(engines, rates, i, now_s)
        place = queue[marks[FIRST_QUEUED], 0]
        while credit > 0 and marks[NUM_WAITING] > 0 and queue[marks[FIRST_QUEUED], 0] == place:
            _hold(engines, ends, waiting, queue, marks, rates, i, most)
            credit -= 1
        _plan_next(engines, ends, order, rates, i)


@compiled
def advance(
    engines: Array, ends: Array, waiting: Array, order: Array, judged: Array, queue: Array, marks: Array,
    rates: Array, most: int, group_size: int, left: Array, stops: Array, answer: Array, num_wanted: int,
    until_s: float,
) -> tuple[float, int]:  # fmt: skip
    """See Fleet.advance; returns the time that was reached, and how many places are in `answer`."""
    found = 0
    while True:
        i = order[0, 0]
        end_s = engines[i, NEXT_S]
        first = marks[FIRST_JUDGED]
        delivery_s = judged[first, 0] if marks[NUM_JUDGED] > 0 else np.inf
        if min(end_s, delivery_s) > until_s or min(end_s, delivery_s) == np.inf:
            return until_s, found
        marks[NUM_EVENTS] += 1
        if end_s < delivery_s:
            _settle(engines, rates, i, end_s)
            engines[i, ADVANCED] = max(engines[i, ADVANCED], ends[i, 0, 0])
            place = _end_first(engines, ends, i)
            at = (first + marks[NUM_JUDGED]) % len(judged)
            judged[at, 0], judged[at, 1], judged[at, 2] = end_s + rates[3], i, place
            marks[NUM_JUDGED] += 1
            if engines[i, NUM_ENGINE_WAITS] > 0:
                next_one = int(engines[i, FIRST_WAITING])
                engines[i, FIRST_WAITING] = (next_one + 1) % waiting.shape[1]
                engines[i, NUM_ENGINE_WAITS] -= 1
                _begin(
                    engines, ends, rates, i, waiting[i, next_one, 0], waiting[i, next_one, 1], waiting[i, next_one, 2]
                )
            _plan_next(engines, ends, order, rates, i)
            continue
        marks[FIRST_JUDGED], marks[NUM_JUDGED] = (first + 1) % len(judged), marks[NUM_JUDGED] - 1
        i, group = int(judged[first, 1]), int(judged[first, 2])
        engines[i, NUM_HELD] -= 1
        if marks[NUM_WAITING] > 0:
            _settle(engines, rates, i, delivery_s)
            _hold(engines, ends, waiting, queue, marks, rates, i, most)
            _plan_next(engines, ends, order, rates, i)
        left[group] -= 1
        if left[group] == 0:
            answer[found] = group
            found += 1
            if stops[group] or found >= num_wanted:
                return delivery_s, found


@compiled
def pause(engines: Array, ends: Array, order: Array, rates: Array, now_s: float, seconds: float) -> None:
    """Have every engine that decodes stand still for some seconds."""
    for i in range(len(engines)):
        if engines[i, NUM_DECODED] > 0:
            _settle(engines, rates, i, now_s)
            _stand_still(engines, i, seconds)
            _plan_next(engines, ends, order, rates, i)


def up_to_now(engines: Array, now_s: float) -> Array:
    """Counters as they stand at this moment, not at each engine's last event; a copy."""
    copy = engines.copy()
    since = now_s - copy[:, CLOCK_S]  # below 0 where an engine's clock is ahead
    copy[:, BUSY_S] += np.where(copy[:, NUM_DECODED] > 0, since, 0.0)
    copy[:, DECODING_S] += since * copy[:, NUM_DECODED]
    return copy
