"""How many steps a second a narrower window allows: the real ledger in virtual time, one generator and one trainer.

    python bench/window.py [--steps 400] [--seeds 3]

g: seconds in which the generator samples a batch's worth of tokens when it is full; t: seconds of an optimiser step.
Figures are steps a second times max(g, t): 1 is a ring in which one side never waits.  Lengths are lognormal; the
generator decodes as many samples at once as a batch has, each at the same pace, and takes the next when one ends.
Every row says the staleness that was reached, which the ledger's bound holds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.config.tables import AdmissionConfig
from rlhpc.protocol.types import Prompt, SamplingParams

GROUPS_PER_STEP, GROUP_SIZE = 16, 8
SETTLE_SHARE = 0.02  # from the end of a step until its weights are live, of max(g, t)
PACES = {"g = t": (1.0, 1.0), "g = 2t": (2.0, 1.0), "t = 2g": (1.0, 2.0)}
WARM_UP_STEPS = 20
NOTHING = np.zeros(1, np.int32)


@dataclass
class Ring:
    """Events in virtual time: a sample ends, a step ends, weights are live."""

    admission: AdmissionConfig
    g: float
    t: float
    sigma: float
    seed: int
    now: float = 0.0
    events: list[tuple[float, int, str, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        admission = self.admission
        self.ledger = AdmissionLedger(
            num_slots=admission.num_slots,
            window_groups=admission.window,
            groups_per_step=admission.groups_per_step,
            group_size=admission.group_size,
            sampling=lambda _: SamplingParams(max_tokens=1),
            lease_deadline_s=math.inf,
            max_attempts=1,
            clock=lambda: self.now,
        )
        self.serial, self.random = itertools.count(), np.random.default_rng(self.seed)
        self.places = GROUPS_PER_STEP * GROUP_SIZE
        self.trained = self.live = self.worst_staleness = 0
        self.is_training = self.settling = False
        self.queued: list[tuple[int, ...]] = []
        self.began_s = 0.0

    def run(self, num_steps: int) -> tuple[float, int]:
        """Return (steps a second · max(g, t), worst staleness)."""
        while self.trained < num_steps:
            self._fill()
            self._train()
            self.now, _, what, which = heapq.heappop(self.events)
            getattr(self, f"_{what}")(*which)
            if self.trained == WARM_UP_STEPS and not self.began_s:
                self.began_s = self.now
        return (num_steps - WARM_UP_STEPS) / (self.now - self.began_s) * max(self.g, self.t), self.worst_staleness

    def _after(self, seconds: float, what: str, *which: int) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.serial), what, which))

    def _fill(self) -> None:
        while self.ledger.has_slot:
            self.ledger.admit(Prompt(0, "", NOTHING, ""), self.live)
        while free := self.places - self.ledger.outstanding("g"):
            lease = self.ledger.grant("g", free)
            if lease is None:
                return
            for index in lease.sample_indices:
                length = self.draw_length(lease.group_id, index)
                self._after(self.g * length, "sampled", lease.group_id, index)

    def draw_length(self, group_id: int, index: int) -> float:
        """Of a sample; of mean 1."""
        return float(self.random.lognormal(-(self.sigma**2) / 2, self.sigma))

    def _sampled(self, group_id: int, index: int) -> None:
        self.ledger.deliver(group_id, index)

    def _train(self) -> None:
        if self.is_training or len(self.queued) > 1:
            return
        batch = self.ledger.take(GROUPS_PER_STEP, self.trained)
        if batch is not None:
            ages = (self.trained - self.ledger.group(group_id).admitted_version for group_id in batch)
            self.worst_staleness = max(self.worst_staleness, *ages)
            self.is_training = True
            self._after(self.t, "stepped", *batch)

    def _stepped(self, *batch: int) -> None:
        self.is_training = False
        self.trained += 1
        self.queued.append(batch)
        self._publish()

    def _publish(self) -> None:
        if self.queued and not self.settling:
            self.settling = True
            self._after(SETTLE_SHARE * max(self.g, self.t), "settled")

    def _settled(self) -> None:
        self.settling = False
        self.ledger.release(self.queued.pop(0))
        self.live += 1
        self._publish()


def windows(max_staleness: int) -> dict[str, int]:
    """The windows that are compared, by name."""
    return {"1": 1, "P/4": GROUPS_PER_STEP // 4, "P/2": GROUPS_PER_STEP // 2, "P": GROUPS_PER_STEP} | (
        {"S·P/2": max_staleness * GROUPS_PER_STEP // 2} if max_staleness > 2 else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"P = {GROUPS_PER_STEP} groups of {GROUP_SIZE}; steps/s · max(g, t), mean over {options.seeds} seeds")
    for sigma, (pace, (g, t)) in itertools.product((0.5, 1.0), PACES.items()):
        for staleness in (1, 2, 4, 8):
            cells = []
            for name, window in windows(staleness).items():
                admission = AdmissionConfig(
                    groups_per_step=GROUPS_PER_STEP,
                    group_size=GROUP_SIZE,
                    max_staleness=staleness,
                    window_groups=window,
                )
                found = [Ring(admission, g, t, sigma, seed).run(options.steps) for seed in range(options.seeds)]
                worst = max(reached for _, reached in found)
                assert worst <= staleness, (admission, worst)
                cells.append(f"W={name}: {np.mean([pace for pace, _ in found]):.2f} ({worst})")
            print(f"sigma {sigma}  {pace:7} S={staleness}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
