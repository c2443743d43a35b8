"""The ring in virtual time: the run's own ledger and planner, with engines and a trainer that only take time.

Input: RingShape, Rates, Lengths.  Output: Outcome.  The order of events is that of roles/controller/train_loop.py:

    full batch ──▶ train ──▶ publish ──┬──▶ next batch …       the trainer goes on while the generators load
    part of one ─▶ train ──▶ the rest  └──▶ live ───▶ release     a publication waits for the one before to be live

To the ledger a group is one member, delivered together with the last of its rollouts: admission, window, staleness and
release know only groups.  launch/prediction/fleet.py decides which engine decodes which rollout.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from launch.prediction.fleet import Fleet, FleetShape
from launch.prediction.lengths import DrawnGroup, Lengths
from launch.prediction.rates import Rates
from launch.prediction.takeable import Takeable
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.resolved import DropReason
from rlhpc.config import Config
from rlhpc.config_admission import SmallestPart
from rlhpc.config_sections import AdmissionConfig
from rlhpc.packing.cost import FlopCost
from rlhpc.packing.planner import plan
from rlhpc.types import Prompt, SamplingParams

PFLOP = 1e15
_FLEET = "fleet"  # the holder of every lease
_PROMPT = Prompt(0, "", np.zeros(1, np.int32), "")
_LEASE_S = 600.0


@dataclass(frozen=True, slots=True)
class RingShape:
    """The settings of a run file that determine its speed."""

    admission: AdmissionConfig
    smallest_part: SmallestPart
    num_engines: int
    max_num_seqs: int
    data_parallel: int
    token_budget: int
    num_minibatches: int
    num_epochs: int
    save_every: int
    cost: FlopCost

    @classmethod
    def of(cls, config: Config, cost: FlopCost) -> Self:
        """The shape of a configured run; cost: of the model."""
        return cls(
            admission=config.admission,
            smallest_part=config.smallest_part,
            num_engines=config.generation.num_replicas,
            max_num_seqs=config.generation.max_num_seqs,
            data_parallel=config.trainer.data_parallel,
            token_budget=config.trainer.token_budget,
            num_minibatches=config.algorithm.minibatches,
            num_epochs=config.algorithm.epochs,
            save_every=config.checkpoint.every_steps,
            cost=cost,
        )

    def split(self, num_engines: int, max_staleness: int) -> Self:
        """The same shape with these values."""
        admission = self.admission.model_copy(update={"max_staleness": max_staleness})
        return replace(self, num_engines=num_engines, admission=admission)

    def pflops(self, lengths: NDArray[np.int64]) -> float:
        """10^15 operations of the slowest ranks, summed over micro-batches, for a batch of these rows (Rates)."""
        total = 0.0
        for part in np.array_split(lengths, min(self.num_minibatches, len(lengths))):
            planned = plan(part, token_budget=self.token_budget, num_ranks=self.data_parallel, cost=self.cost)
            total += float(planned.row_sums(self.cost(part)).max(axis=0).sum())
        return self.num_epochs * total / PFLOP


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulated run, from its first lease on; shares are of that time."""

    num_steps: int
    seconds: float
    step_s: float  # between two steps, mean without the first ones
    trainer_works: float
    trainer_publishes: float
    trainer_waits_for_groups: float
    trainer_waits_for_weights: float  # until the previous version is live
    trainer_saves: float
    engines_idle: float  # of engine time, without anything to decode
    engines_full: float  # decoded together over max_num_seqs, mean over time
    staleness: dict[int, int]  # versions → rollouts trained
    tokens_per_s: float  # trained, prompts included
    num_dropped: int  # groups whose rewards are all equal
    num_events: int

    @property
    def trainer_idle(self) -> float:
        """The metric trainer/idle_ratio, without the time between two steps."""
        return self.trainer_waits_for_groups + self.trainer_waits_for_weights + self.trainer_saves

    @property
    def mean_staleness(self) -> float:
        """Mean over rollouts."""
        return sum(age * count for age, count in self.staleness.items()) / sum(self.staleness.values())


class Ring:
    """One simulation."""

    def __init__(self, shape: RingShape, rates: Rates, lengths: Lengths, seed: int = 0) -> None:
        """Everything is idle, and the weights to begin with are live."""
        admission = shape.admission
        self._shape, self._rates, self._lengths = shape, rates, lengths
        self.now_s = 0.0
        self.ledger = AdmissionLedger(
            num_slots=admission.num_slots,
            window_groups=admission.window,
            groups_per_step=admission.groups_per_step,
            group_size=1,
            sampling=lambda _: SamplingParams(max_tokens=1),
            lease_deadline_s=_LEASE_S,
            max_attempts=1,
            clock=lambda: self.now_s,
        )
        fleet = FleetShape(shape.num_engines, shape.max_num_seqs, admission.group_size, admission.num_slots)
        self.fleet = Fleet(fleet, rates)
        self._random, self._serial = np.random.default_rng(seed), itertools.count()
        self._events: list[tuple[float, int, str]] = []
        self._free = list(range(admission.num_slots))
        self._at: dict[int, int] = {}  # place → group in flight
        self._place_of: dict[int, int] = {}
        self._drawn: dict[int, DrawnGroup] = {}  # group → what it will be
        self._takeable = Takeable(admission.window)
        self._batch: list[int] = []  # in training, then until its weights are live
        self._begun: set[int] = set()  # groups of the next batch that are trained
        self._ready_tokens = 0  # of finished groups that are not trained
        self._going_live: list[int] | None = None  # batch of the version that is published
        self._needs_live = ""  # what the controller does once that version is live
        self._wants_batch, self._wants_since_s = True, 0.0
        self.trained = self.live = self._num_dropped = 0
        self._num_tokens = 0
        self._staleness: Counter[int] = Counter()
        self._spent = dict.fromkeys(("works", "publishes", "groups", "weights", "saves"), 0.0)  # the trainer's seconds
        self._step_ends_s: list[float] = []

    def run(self, num_steps: int) -> Outcome:
        """Run until this many steps are done.  Call it once."""
        self._admit()
        while self.trained < num_steps:
            self._take()
            until_s = self._events[0][0] if self._events else math.inf
            places = self._advance(until_s)
            self.now_s = self.fleet.now_s
            if places:
                for place in places:
                    self._finished(place)
                continue
            assert self._events, f"step {self.trained}: the simulated run is stuck: no event is left"
            getattr(self, f"_{heapq.heappop(self._events)[2]}")()
        return self._outcome()

    def _advance(self, until_s: float) -> list[int]:
        """Advance.  Groups may finish unnoticed while that has no effect; one to be dropped is noticed at once."""
        admission = self._shape.admission
        if not self._wants_batch:
            return self.fleet.advance(until_s, admission.num_slots)
        if admission.window > 1:
            missing = self.ledger.num_missing(admission.groups_per_step)
            short_of_part = self._shape.smallest_part.groups + len(self._begun) - self._takeable.number
            return self.fleet.advance(until_s, max(1, min(missing, short_of_part)))
        oldest = self._place_of.get(self._takeable.oldest)  # no batch without it
        if oldest is not None:
            self.fleet.stop_at(oldest)
        return self.fleet.advance(until_s, admission.num_slots if oldest is not None else 1)

    def _after(self, seconds: float, what: str) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._serial), what))

    # ------------------------------------------------------------------------------------------------------ admission

    def _admit(self) -> None:
        is_new = self.ledger.has_slot
        while self.ledger.has_slot:
            group_id = self.ledger.admit(_PROMPT, self.live)
            self.ledger.grant(_FLEET, 1)
            drawn = self._drawn[group_id] = self._lengths.draw(self._shape.admission.group_size, self._random)
            place = self._free.pop()
            self._at[place], self._place_of[group_id] = group_id, place
            self._takeable.admitted(group_id)
            self.fleet.add(place, drawn.prompt_tokens, drawn.tokens, stops=self._is_dropped(drawn))
        if is_new:
            self.fleet.dispatch()

    def _is_dropped(self, drawn: DrawnGroup) -> bool:
        return self._shape.admission.active_sampling and not drawn.has_spread

    def _finished(self, place: int) -> None:
        group_id = self._at.pop(place)
        self._free.append(place)
        del self._place_of[group_id]
        self.ledger.deliver(group_id, 0)
        if self._is_dropped(self._drawn[group_id]):
            self.ledger.drop(group_id, DropReason.NO_SPREAD)
            del self._drawn[group_id]
            self._num_dropped += 1
            self._takeable.ended(group_id, is_ready=False)
            self._admit()
        else:
            self._takeable.ended(group_id, is_ready=True)
            self._ready_tokens += int(self._drawn[group_id].trained_tokens.sum())

    # ------------------------------------------------------------------------------------------------------- the loop

    def _take(self) -> None:
        admission = self._shape.admission
        if not self._wants_batch or self._begin_part():
            return
        if self._takeable.number < admission.groups_per_step:
            return
        batch = self.ledger.take(admission.groups_per_step, self.trained)
        if batch is None:  # other groups would miss their due date: try again when the next one finishes
            return
        self._batch = batch
        self._takeable.number -= len(batch)
        for group_id in batch:
            self._staleness[self.trained - self.ledger.group(group_id).admitted_version] += admission.group_size
        self._train([group_id for group_id in batch if group_id not in self._begun], "stepped")
        self._begun.clear()

    def _begin_part(self) -> bool:
        """Train what is finished, if that is a part of a batch that is not there (roles/controller/step_parts.py)."""
        num_groups, smallest = self._shape.admission.groups_per_step, self._shape.smallest_part
        if smallest.groups == num_groups or self._ready_tokens < smallest.tokens:
            return False
        if self.ledger.upcoming(num_groups) is not None:
            return False
        part = self.ledger.part(num_groups, smallest.groups)
        if not part or sum(self._drawn[group_id].trained_tokens.sum() for group_id in part) < smallest.tokens:
            return False
        self.ledger.begin(part)
        self._begun.update(part)
        self._train(part, "next")
        return True

    def _train(self, groups: list[int], then: str) -> None:
        """What a step takes beside its rows is counted once, with its last part."""
        self._wants_batch = False
        self._spent["groups"] += self.now_s - self._wants_since_s
        rows = np.concatenate([self._drawn.pop(group_id).trained_tokens for group_id in groups])
        self._num_tokens += int(rows.sum())
        self._ready_tokens -= int(rows.sum())
        seconds = self._rates.trainer_pflop_s.value * self._shape.pflops(rows)
        seconds += self._rates.trainer_step_s.value if then == "stepped" else 0.0
        self._spent["works"] += seconds
        self._after(seconds, then)

    def _stepped(self) -> None:
        self.trained += 1
        self._step_ends_s.append(self.now_s)
        self._once_live("publish")

    def _publish(self) -> None:
        seconds = self._rates.between_steps_s.value + self._rates.publish_s.value
        self._spent["publishes"] += seconds
        self._after(seconds, "published")

    def _published(self) -> None:
        self._going_live, self._batch = self._batch, []
        self._after(self._rates.live_s.value, "is_live")
        if self.trained % self._shape.save_every == 0:
            self._once_live("save")
        else:
            self._next()

    def _save(self) -> None:
        self._spent["saves"] += self._rates.save_s.value
        self._after(self._rates.save_s.value, "next")

    def _next(self) -> None:
        self._wants_batch, self._wants_since_s = True, self.now_s

    def _once_live(self, what: str) -> None:
        """Do it now, or when the version that is published has gone live."""
        if self._going_live is None:
            getattr(self, f"_{what}")()
        else:
            self._needs_live, self._wants_since_s = what, self.now_s

    def _is_live(self) -> None:
        assert self._going_live is not None
        self.ledger.release(self._going_live)
        self._going_live, self.live = None, self.live + 1
        self.fleet.pause(self._rates.pause_s.value)
        self._report_progress()
        self._admit()
        if self._needs_live:
            what, self._needs_live = self._needs_live, ""
            self._spent["weights"] += self.now_s - self._wants_since_s
            getattr(self, f"_{what}")()

    def _report_progress(self) -> None:
        """Renew leases, as generators do, so that none runs out; forget ended ones."""
        for group_id in self._at.values():
            self.ledger.renew(_FLEET, group_id, (0,))
        self.ledger.expire()

    # -------------------------------------------------------------------------------------------------------- figures

    def _outcome(self) -> Outcome:
        ends, seconds = self._step_ends_s, self.now_s
        first = min(len(ends) // 4, 4 * (self._shape.admission.max_staleness + 2))  # until the ring has filled
        engines = self._shape.num_engines * seconds
        return Outcome(
            num_steps=self.trained,
            seconds=seconds,
            step_s=(ends[-1] - ends[first]) / (len(ends) - 1 - first) if len(ends) > 1 else seconds,
            trainer_works=self._spent["works"] / seconds,
            trainer_publishes=self._spent["publishes"] / seconds,
            trainer_waits_for_groups=self._spent["groups"] / seconds,
            trainer_waits_for_weights=self._spent["weights"] / seconds,
            trainer_saves=self._spent["saves"] / seconds,
            engines_idle=max(0.0, 1 - float(self.fleet.busy_s.sum()) / engines),
            engines_full=self.fleet.decoding_s / (engines * self._shape.max_num_seqs),
            staleness=dict(sorted(self._staleness.items())),
            tokens_per_s=self._num_tokens / seconds,
            num_dropped=self._num_dropped,
            num_events=self.fleet.num_events,
        )
