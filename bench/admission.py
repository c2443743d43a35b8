"""How fast a ring is under which rule of admission, and how stale what it trains: virtual time, the real ledger.

    python -m bench.admission [--steps 300] [--seeds 2] [--all] [--law NAME] [--share SHARE] [--pace PACE]

g: seconds in which full generators sample a batch's worth of tokens; t: seconds of an optimiser step.  Figures are
steps a second · max(g, t): 1 is a ring in which one side never waits; in brackets the staleness of what is trained,
mean and worst.  A generator decodes as many samples at once as it has places, each at the same pace.

ours: the ledger as it is by default, a prompt drawn when somebody can sample it.  in parts: the same, and while the
trainer would wait it trains what is finished of its batch, a quarter or more at once (admission.step_parts = 4).
strict: batches in strict order of admission, every slot filled at once.  longest: as strict, but of the groups that
have a slot the one that takes longest begins first, its length known beforehand, which nobody can.
AReaL: begin while (S + version + 1) · P − (accepted + running) is above 0, train the oldest P that are finished
(areal/core/staleness_manager.py).  open-instruct: S · P groups in flight, each that is collected is replaced; a group
is thrown away that is older than S when its batch is put together, up to S batches ahead.
limit: no rule is faster that keeps the bound, begins P groups a version and trains whole batches (docs/staleness.md).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bench.figures import tell
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.config.tables import AdmissionConfig
from rlhpc.protocol.types import Prompt, SamplingParams

P, G = 16, 8  # groups of a step, samples of a group
SETTLE_SHARE = 0.02  # from the end of a step until its weights are live, of max(g, t)
PART_SHARE = 0.01  # what a part of a step costs beside its groups, of max(g, t)
STEP_PARTS = 4
PACES = {"g = t": (1.0, 1.0), "g = 2t": (2.0, 1.0), "t = 2g": (1.0, 2.0)}
SHARES = (0.5, 1.0)
WARM_UP_STEPS = 30
NOTHING = np.zeros(1, np.int32)

Draw = Callable[[np.random.Generator, int], np.ndarray]
LAWS: dict[str, Draw] = {  # lengths of mean 1
    "equal": lambda _, n: np.ones(n),
    "uniform": lambda random, n: random.uniform(0, 2, n),
    "σ = 0.25": lambda random, n: random.lognormal(-(0.25**2) / 2, 0.25, n),
    "σ = 0.5": lambda random, n: random.lognormal(-(0.5**2) / 2, 0.5, n),
    "σ = 1, cut at 3.2": lambda random, n: np.minimum(random.lognormal(0, 1, n), 4.6) / 1.42,
}


@dataclass(slots=True)
class Group:
    """lengths: of its samples, seconds."""

    group_id: int
    version: int  # that was live when it began
    lengths: list[float]
    num_begun: int = 0
    num_ended: int = 0


class Rule(Protocol):
    """What a system decides.  Ids are those of groups, in the order in which they begin."""

    live: int  # newest version that generators sample with
    fills_slots: bool  # whether groups begin before somebody can sample them

    def may_begin(self) -> bool: ...

    def begin(self, group_id: int) -> None: ...

    def finish(self, group_id: int) -> None: ...

    def batch(self, step: int) -> list[int] | None: ...

    def part(self) -> list[int]: ...

    def went_live(self, batch: list[int]) -> None: ...


class Ledger:
    """rlhpc's."""

    def __init__(
        self, max_staleness: int, window: int | None, *, fills_slots: bool = False, step_parts: int = 1
    ) -> None:
        admission = AdmissionConfig(groups_per_step=P, group_size=1, max_staleness=max_staleness, window_groups=window)
        self.ledger = AdmissionLedger(
            num_slots=admission.num_slots,
            window_groups=admission.window,
            groups_per_step=P,
            group_size=1,
            sampling=lambda _: SamplingParams(max_tokens=1),
            lease_deadline_s=math.inf,
            max_attempts=1,
            clock=lambda: 0.0,
        )
        self.live, self.fills_slots, self.least_part = 0, fills_slots, -(-P // step_parts)

    def may_begin(self) -> bool:
        return self.ledger.has_slot

    def begin(self, group_id: int) -> None:
        assert self.ledger.admit(Prompt(0, "", NOTHING, ""), self.live) == group_id

    def finish(self, group_id: int) -> None:
        self.ledger.deliver(group_id, 0)

    def batch(self, step: int) -> list[int] | None:
        return self.ledger.take(P, step)

    def part(self) -> list[int]:
        part = self.ledger.part(P, self.least_part) if self.least_part < P else []
        self.ledger.begin(part)
        return part

    def went_live(self, batch: list[int]) -> None:
        self.ledger.release(batch)


class Areal:
    """A budget by version for what was ever accepted, and whatever is finished is trained, oldest first."""

    fills_slots = False

    def __init__(self, max_staleness: int) -> None:
        self.live, self.max_staleness = 0, max_staleness
        self.num_begun = 0  # accepted or running
        self.finished: list[int] = []

    def may_begin(self) -> bool:
        return (self.max_staleness + self.live + 1) * P > self.num_begun

    def begin(self, group_id: int) -> None:
        self.num_begun += 1

    def finish(self, group_id: int) -> None:
        heapq.heappush(self.finished, group_id)

    def batch(self, step: int) -> list[int] | None:
        return [heapq.heappop(self.finished) for _ in range(P)] if len(self.finished) >= P else None

    def part(self) -> list[int]:
        return []

    def went_live(self, batch: list[int]) -> None:
        pass


class OpenInstruct:
    """Replacement one for one, batches put together up to S ahead, what is too old then is thrown away."""

    fills_slots = False

    def __init__(self, max_staleness: int) -> None:
        self.live, self.max_staleness = 0, max_staleness
        self.num_free = max(1, max_staleness) * P
        self.begun_under: dict[int, int] = {}
        self.results: list[int] = []
        self.collected: list[int] = []
        self.prepared: list[list[int]] = []
        self.num_prepared = self.num_thrown_away = 0

    def may_begin(self) -> bool:
        return self.num_free > 0

    def begin(self, group_id: int) -> None:
        self.num_free -= 1
        self.begun_under[group_id] = self.live

    def finish(self, group_id: int) -> None:
        self.results.append(group_id)
        self._collect()

    def batch(self, step: int) -> list[int] | None:
        taken = self.prepared.pop(0) if self.prepared else None
        self._collect()
        return taken

    def part(self) -> list[int]:
        return []

    def went_live(self, batch: list[int]) -> None:
        pass

    def _collect(self) -> None:
        while self.results and len(self.prepared) < max(1, self.max_staleness):
            group_id = self.results.pop(0)
            self.num_free += 1
            if self.num_prepared - self.begun_under[group_id] > self.max_staleness:
                self.num_thrown_away += 1
                continue
            self.collected.append(group_id)
            if len(self.collected) == P:
                self.prepared.append(self.collected)
                self.collected, self.num_prepared = [], self.num_prepared + 1


@dataclass
class Figures:
    """Of one ring, or the mean of several."""

    efficiency: float
    mean_staleness: float
    worst_staleness: int
    length: float  # mean of what is trained, over that of what was drawn

    def __str__(self) -> str:
        return f"{self.efficiency:.2f} ({self.mean_staleness:.1f}, {self.worst_staleness})"


@dataclass
class Ring:
    """Events in virtual time: a sample ends, a step ends, weights are live."""

    rule: Rule
    g: float
    t: float
    law: Draw
    num_places: int
    seed: int = 0
    is_longest_first: bool = False
    now: float = 0.0
    events: list[tuple[float, int, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.serial, self.random = itertools.count(), np.random.default_rng(self.seed)
        self.sample_s = self.g * self.num_places / (P * G)  # of one of mean length
        self.num_free = self.num_places
        self.groups: dict[int, Group] = {}
        self.waiting: list[Group] = []  # with samples that have not begun
        self.num_drawn = self.trained = 0
        self.batch: list[int] = []
        self.begun: list[int] = []  # groups of the next batch that are trained
        self.is_training, self.is_settling, self.queued = False, False, list[list[int]]()
        self.staleness: list[int] = []
        self.lengths: list[float] = []
        self.began_s = 0.0

    def run(self, num_steps: int) -> Figures:
        """Train so many steps."""
        while self.trained < num_steps:
            self._fill()
            self._train()
            self.now, _, what, which = heapq.heappop(self.events)
            getattr(self, f"_{what}")(which)
            if self.trained == WARM_UP_STEPS and not self.began_s:
                self.began_s = self.now
        pace = (num_steps - WARM_UP_STEPS) / (self.now - self.began_s)
        length = float(np.mean(self.lengths)) / self.sample_s
        efficiency = pace * max(self.g, self.t)
        return Figures(efficiency, float(np.mean(self.staleness)), max(self.staleness), length)

    def _after(self, seconds: float, what: str, which: int = 0) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.serial), what, which))

    def _fill(self) -> None:
        while self.rule.fills_slots and self.rule.may_begin():
            self._draw()
        while self.num_free and (self.waiting or self._may_draw()):
            group = self.waiting[0]
            if self.is_longest_first and not group.num_begun:
                group = max(self.waiting, key=lambda each: sum(each.lengths))
                self.waiting.remove(group)
                self.waiting.insert(0, group)
            self._after(group.lengths[group.num_begun], "sampled", group.group_id)
            group.num_begun += 1
            self.num_free -= 1
            if group.num_begun == G:
                self.waiting.pop(0)

    def _may_draw(self) -> bool:
        if may := self.rule.may_begin():
            self._draw()
        return may

    def _draw(self) -> None:
        lengths = (self.law(self.random, G) * self.sample_s).tolist()
        group = self.groups[self.num_drawn] = Group(self.num_drawn, self.rule.live, lengths)
        self.rule.begin(group.group_id)
        self.waiting.append(group)
        self.num_drawn += 1

    def _sampled(self, group_id: int) -> None:
        self.num_free += 1
        group = self.groups[group_id]
        group.num_ended += 1
        if group.num_ended == G:
            self.rule.finish(group_id)

    def _train(self) -> None:
        """A batch that is there, or a part of one."""
        if self.is_training or len(self.queued) > 1:
            return
        batch, begun = self.rule.batch(self.trained), self.begun
        if batch is not None:
            self.batch, self.begun = batch, []
            self._work([group_id for group_id in batch if group_id not in begun], "stepped")
        elif part := self.rule.part():
            self.begun = [*begun, *part]
            self._work(part, "parted")

    def _work(self, group_ids: list[int], then: str) -> None:
        """Forward and backward of these groups."""
        groups = [self.groups.pop(group_id) for group_id in group_ids]
        if self.trained >= WARM_UP_STEPS:
            self.staleness += [self.trained - group.version for group in groups]
            self.lengths += [length for group in groups for length in group.lengths]
        self.is_training = True
        extra_s = PART_SHARE * max(self.g, self.t) if self.begun else 0.0
        self._after(self.t * len(groups) / P + extra_s, then)

    def _parted(self, _: int) -> None:
        self.is_training = False

    def _stepped(self, _: int) -> None:
        self.is_training = False
        self.trained += 1
        self.queued.append(self.batch)
        self._publish()

    def _publish(self) -> None:
        if self.queued and not self.is_settling:
            self.is_settling = True
            self._after(SETTLE_SHARE * max(self.g, self.t), "settled")

    def _settled(self, _: int) -> None:
        self.is_settling = False
        self.rule.live += 1
        self.rule.went_live(self.queued.pop(0))
        self._publish()


RULES: dict[str, Callable[[int], Rule]] = {
    "ours": lambda bound: Ledger(bound, None),
    "in parts": lambda bound: Ledger(bound, None, step_parts=STEP_PARTS),
    "strict": lambda bound: Ledger(bound, 1, fills_slots=True),
    "longest": lambda bound: Ledger(bound, 1, fills_slots=True),
    "AReaL": Areal,
    "open-instruct": OpenInstruct,
}
KEEP_THE_BOUND = ("ours", "in parts", "strict", "longest")


def limit(bound: int, g: float, t: float, law: Draw, num_places: int) -> float:
    """Steps a second · max(g, t) that no rule of whole batches exceeds which keeps the bound, P groups a version."""
    random, pace = np.random.default_rng(0), max(g, t)
    longest_s = g * num_places / (P * G) * float(np.mean([law(random, P * G).max() for _ in range(1000)]))
    return min(1.0, (bound + 1) * pace / (t + SETTLE_SHARE * pace + longest_s))


def figures_of(name: str, bound: int, pace: str, law: str, num_places: int, *, steps: int, seeds: int) -> Figures:
    """Of a rule, over several seeds."""
    found = []
    for seed in range(seeds):
        ring = Ring(RULES[name](bound), *PACES[pace], LAWS[law], num_places, seed, name == "longest")
        found.append(ring.run(steps))
    worst = max(each.worst_staleness for each in found)
    assert name not in KEEP_THE_BOUND or worst <= bound, (name, bound, worst)
    efficiency, staleness, length = (
        float(np.mean([getattr(each, key) for each in found])) for key in ("efficiency", "mean_staleness", "length")
    )
    return Figures(efficiency, staleness, worst, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="every pace and bound, not those of the documentation")
    parser.add_argument("--law", choices=LAWS, help="of the lengths; this alone")
    parser.add_argument("--share", type=float, choices=SHARES, help="of a batch decoded at once; this alone")
    parser.add_argument("--pace", choices=PACES, help="of generators and trainer; this alone")
    options = parser.parse_args()
    laws, shares = [options.law] if options.law else list(LAWS), [options.share] if options.share else SHARES
    paces = [options.pace] if options.pace else list(PACES if options.all else ("g = t", "g = 2t"))
    bounds = (0, 1, 2, 3, 4, 6, 8) if options.all else (0, 1, 2, 4, 8)
    print("| lengths | places | pace | S | limit |", *(f"{name} |" for name in RULES))
    print("|---" * (5 + len(RULES)) + "|")
    for law, share, pace in itertools.product(laws, shares, paces):
        num_places = int(share * P * G)
        for bound in bounds:
            found = {name: figures_of(name, bound, pace, law, num_places, steps=options.steps, seeds=options.seeds)
                     for name in RULES}  # fmt: skip
            tell(f"admission S = {bound}", found["ours"].efficiency)
            tell(f"admission in parts S = {bound}", found["in parts"].efficiency)
            highest = limit(bound, *PACES[pace], LAWS[law], num_places)
            print(
                f"| {law} | {share:g} | {pace} | {bound} | {highest:.2f} |",
                *(f"{figures} |" for figures in found.values()),
                flush=True,
            )


if __name__ == "__main__":
    main()
