"""How much shorter than drawn are the rollouts that arrive, when leases are lost: the real ledger in virtual time.

    python bench/length_bias.py [--samples 20000]

Sampling takes lognormal times of mean 1.648 s (σ = 1).  A lease is lost at its deadline, though its holder goes on, or
with its holder, whose death nobody announces; the first copy of a member that arrives counts.

anew: a member that is granted again is drawn again.  progress: holders say how far they have come, which renews
leases and leaves a prefix to go on from, and what follows it is drawn anew.  seeds: a member that is granted again is
drawn alike.  Figures: mean of what arrives; in brackets members lost as poison.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.protocol.types import Prefix, Prompt, SamplingParams

SIGMA = 1.0
TRUE_MEAN_S = math.exp(SIGMA**2 / 2)
TOKENS_PER_S = 100.0
NUM_HOLDERS, PLACES = 4, 16
NOTICE_S = 0.5  # until a death is noticed
SHOWN_EVERY_S = 0.1  # a sixteenth of the mean, as 256 tokens are of 4,000
SWEEP_S = 0.1
NOTHING, NO_LOGPROB = np.zeros(1, np.int32), np.zeros(1, np.float32)


@dataclass(frozen=True)
class Way:
    """What is done against the bias."""

    name: str
    has_seeds: bool
    has_progress: bool


WAYS = (
    Way("anew", False, False),
    Way("progress", False, True),
    Way("seeds", True, False),
    Way("seeds, progress", True, True),
)


@dataclass
class Flight:
    """A member that is being sampled: `total_s` in all, of which `had_s` came with the lease."""

    group_id: int
    began_s: float
    had_s: float
    total_s: float
    shown_s: float = 0.0


@dataclass
class Run:
    way: Way
    lease_deadline_s: float = math.inf
    mtbf_s: float = math.inf
    seed: int = 0
    now: float = 0.0
    arrived_s: list[float] = field(default_factory=list)
    num_poisoned: int = 0

    def __post_init__(self) -> None:
        self.ledger = AdmissionLedger(
            num_slots=2 * NUM_HOLDERS * PLACES,
            window_groups=1,
            groups_per_step=1,
            group_size=1,
            sampling=lambda _: SamplingParams(max_tokens=1),
            lease_deadline_s=self.lease_deadline_s,
            max_attempts=1000,  # poison is another bias
            clock=lambda: self.now,
        )
        self.random, self.serial = np.random.default_rng(self.seed), itertools.count()
        self.events: list[tuple[float, int, str, str, int]] = []
        self.flights: dict[str, dict[int, Flight]] = {f"g-{n}": {} for n in range(NUM_HOLDERS)}
        for name in self.flights:
            self._plan_death(name)

    def mean_s(self, num_samples: int) -> float:
        """Sample so many and return the mean time of those that arrived."""
        swept_s = 0.0
        for _ in range(num_samples):
            self.ledger.admit(Prompt(0, "", NOTHING, ""), 0) if self.ledger.has_slot else None
        while len(self.arrived_s) + self.num_poisoned < num_samples:
            self._grant(num_samples)
            at_s, _, what, name, serial = heapq.heappop(self.events)
            while swept_s + SWEEP_S < at_s:
                swept_s += SWEEP_S
                self.now = swept_s
                self._report()
                self.ledger.expire()
                self._grant(num_samples)
                if self.events and self.events[0][0] < at_s:  # something that was granted just now ends before
                    heapq.heappush(
                        self.events, (at_s, serial if what == "ends" else next(self.serial), what, name, serial)
                    )
                    at_s, _, what, name, serial = heapq.heappop(self.events)
            self.now = max(self.now, at_s)
            getattr(self, f"_{what}")(name, serial)
        return float(np.mean(self.arrived_s))

    def _grant(self, num_samples: int) -> None:
        while self.ledger.has_slot and self.ledger.counts()["admitted"] < num_samples:
            self.ledger.admit(Prompt(0, "", NOTHING, ""), 0)
        for name, flights in self.flights.items():
            while len(flights) < PLACES and (lease := self.ledger.grant(name, 1)):
                if lease.group_id in {flight.group_id for flight in flights.values()}:
                    continue  # it goes on with what it has (roles/generator/role.py)
                prefix = lease.prefixes[0] if lease.prefixes else None
                had_s = len(prefix.token_ids) / TOKENS_PER_S if prefix is not None else 0.0
                serial = next(self.serial)
                flight = flights[serial] = Flight(lease.group_id, self.now, had_s, self._draw_s(lease.group_id, had_s))
                heapq.heappush(self.events, (self.now + flight.total_s - had_s, serial, "ends", name, serial))

    def _draw_s(self, group_id: int, had_s: float) -> float:
        """How long the whole of a member takes that has come so far; what is drawn alike is as long as it was."""
        if self.way.has_seeds:
            return float(np.random.default_rng([self.seed, group_id]).lognormal(0.0, SIGMA))
        while (total_s := float(self.random.lognormal(0.0, SIGMA))) <= had_s:
            continue
        return total_s

    def _ends(self, name: str, serial: int) -> None:
        flight = self.flights[name].pop(serial, None)
        if flight is not None and self.ledger.deliver(flight.group_id, 0):
            self.arrived_s.append(flight.total_s)
            self.ledger.drop(flight.group_id, DropReason.CANCELLED)  # the slot is all that is wanted

    def _report(self) -> None:
        if not self.way.has_progress:
            return
        for name, flights in self.flights.items():
            for flight in flights.values():
                come_s = flight.had_s + self.now - flight.began_s
                is_news = come_s >= SHOWN_EVERY_S + max(flight.shown_s, flight.had_s)
                if is_news:
                    flight.shown_s = come_s
                tokens = np.zeros(int(come_s * TOKENS_PER_S), np.int32)
                prefix = Prefix(tokens, NO_LOGPROB, NOTHING) if is_news else None
                self.ledger.renew(name, flight.group_id, (0,), (prefix,))

    def _plan_death(self, name: str) -> None:
        if math.isfinite(self.mtbf_s):
            at_s = self.now + self.random.exponential(self.mtbf_s)
            heapq.heappush(self.events, (at_s, next(self.serial), "dies", name, 0))

    def _dies(self, name: str, serial: int) -> None:
        self.flights[name].clear()
        heapq.heappush(self.events, (self.now + NOTICE_S, next(self.serial), "is_missed", name, 0))
        self._plan_death(name)

    def _is_missed(self, name: str, serial: int) -> None:
        self.flights[name].clear()  # granted to the dead
        self.ledger.forget_holder(name)
        for group_id in self.ledger.poisoned():
            self.ledger.drop(group_id, DropReason.POISON)
            self.num_poisoned += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    num_samples = parser.parse_args().samples
    print(f"mean sampling time of {num_samples} rollouts that arrive; true {TRUE_MEAN_S:.3f} s")
    for setting, values in (("lease_deadline_s", (10.0, 5.0, 3.0)), ("mtbf_s", (60.0, 20.0, 10.0))):
        for value in values:
            cells = []
            for way in WAYS:
                changed: dict[str, Any] = {setting: value}
                run = Run(way, **changed)
                cells.append(f"{way.name}: {run.mean_s(num_samples):.3f} ({run.num_poisoned})")
            print(f"{setting} {value:4.0f}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
