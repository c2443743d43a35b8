"""Many engines in virtual time: which engine decodes which samples, and when each group is finished.

Input: samples with their numbers of tokens.  Output: groups, in the order in which they are finished.  As in
roles/controller/lease_dispatcher.py and roles/generator: an engine leases one group more than it decodes at once, the
next free members go to the engine with the most credit, and a finished member is replaced within the same step.

Between two events of one engine all rollouts that it decodes advance alike, so an event costs O(log) instead of a step
of every engine: the state of an engine is the number of tokens by which its rollouts have advanced so far, and a
rollout ends when that number reaches its own target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launch.prediction import fleet_loop
from launch.prediction.fleet_loop import BUSY_S, DECODING_S, NUM_EVENTS, NUM_WAITING, Array
from launch.prediction.rates import Rates

_State = tuple[Array, Array, Array, Array, Array, Array, Array, Array]
_LARGEST_ANSWER = 4096  # groups that one call returns at most


@dataclass(frozen=True, slots=True)
class FleetShape:
    """How large a fleet is."""

    num_engines: int
    max_num_seqs: int  # that an engine decodes together
    group_size: int
    num_groups: int  # in flight together at most


class Fleet:
    """All engines of a run.  Groups have places: numbers that are reused once a group is finished."""

    def __init__(self, shape: FleetShape, rates: Rates) -> None:
        """All engines are idle, at time 0."""
        self._shape = shape
        credit = shape.max_num_seqs + shape.group_size
        self._engines = np.zeros((shape.num_engines, fleet_loop.NUM_COLUMNS))
        self._engines[:, fleet_loop.NEXT_S] = np.inf
        self._ends = np.zeros((shape.num_engines, shape.max_num_seqs, 2))
        self._waiting = np.zeros((shape.num_engines, credit, 3))
        self._order = np.tile(np.arange(shape.num_engines), (2, 1))
        self._judged = np.zeros((shape.num_engines * credit + 1, 3))
        num_samples = shape.num_groups * shape.group_size
        self._queue = np.zeros((num_samples + 1, 3))
        self._left = np.zeros(shape.num_groups, np.int64)
        self._stops = np.zeros(shape.num_groups, np.bool_)
        self._marks = np.zeros(fleet_loop.NUM_MARKS, np.int64)
        self._rates = np.array(
            [rates.engine_step_s.value, rates.engine_sample_s.value, rates.prefill_token_s.value, rates.judge_s.value]
        )
        self._answer = np.zeros(min(_LARGEST_ANSWER, shape.num_groups), np.int64)
        self.now_s = 0.0

    def add(self, place: int, prompt_tokens: int, tokens: NDArray[np.int64], *, stops: bool) -> None:
        """Queue a group; call `dispatch` afterwards.  stops: `advance` returns as soon as the group is finished."""
        self._stops[place] = stops
        fleet_loop.add(self._queue, self._left, self._marks, place, prompt_tokens, tokens)

    def dispatch(self) -> None:
        """Lease queued samples to engines that have credit."""
        fleet_loop.dispatch(*self._state, self._shape.max_num_seqs, self._shape.group_size, self.now_s)

    def advance(self, until_s: float, most: int) -> list[int]:
        """Advance to that time, to that many finished groups, or to a group that stops; returns their places."""
        most = min(most, len(self._answer))
        limits = (self._shape.max_num_seqs, self._shape.group_size)
        self.now_s, found = fleet_loop.advance(
            *self._state, *limits, self._left, self._stops, self._answer, most, until_s
        )
        return [int(place) for place in self._answer[:found]]

    def stop_at(self, place: int) -> None:
        """Have `advance` return as soon as the group there is finished."""
        self._stops[place] = True

    def pause(self, seconds: float) -> None:
        """Have all engines that decode stand still for this time."""
        fleet_loop.pause(self._engines, self._ends, self._order, self._rates, self.now_s, seconds)

    @property
    def busy_s(self) -> NDArray[np.float64]:
        """Seconds of each engine so far with at least one rollout to decode."""
        return fleet_loop.up_to_now(self._engines, self.now_s)[:, BUSY_S]

    @property
    def decoding_s(self) -> float:
        """Seconds of all engines so far, counted for each rollout that is decoded."""
        return float(fleet_loop.up_to_now(self._engines, self.now_s)[:, DECODING_S].sum())

    @property
    def num_waiting(self) -> int:
        """Samples that no engine has credit for."""
        return int(self._marks[NUM_WAITING])

    @property
    def num_events(self) -> int:
        """Rollouts ended and delivered so far: the cost of a simulation."""
        return int(self._marks[NUM_EVENTS])

    @property
    def _state(self) -> _State:
        rings = (self._judged, self._queue, self._marks)
        return (self._engines, self._ends, self._waiting, self._order, *rings, self._rates)
