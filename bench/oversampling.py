"""What cutting stragglers off gains, and how much shorter what is trained becomes: the real ledger in virtual time.

    python bench/oversampling.py [--steps 400] [--seeds 3]

The ring of bench/window.py: lognormal lengths of mean 1, P = 16 groups of 8.  As soon as 16 of the oldest 16 + E groups
are finished and the trainer waits, those in between that are not finished are cut (admission.oversample = E / 16), and
what they hold is free for others.

length: mean length of the samples that are trained over the mean of all that were begun; 1 is no bias.
pace: steps a second times max(g, t), 1 is a ring in which neither side waits.  wasted: share of all tokens sampled
that are those of cut groups, finished members included.  `of prompt`: the share of the variance of log lengths that
the samples of one prompt have in common.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from bench.window import GROUP_SIZE, GROUPS_PER_STEP, PACES, Ring
from rlhpc.buffer.early_cut import in_the_way
from rlhpc.buffer.resolved import DropReason
from rlhpc.config_sections import AdmissionConfig

SHARES = (0.0, 0.125, 0.25, 0.5)


@dataclass
class CuttingRing(Ring):
    """As Ring, with stragglers that are cut."""

    of_prompt: float = 0.0  # share of the variance of log lengths
    of_prompts: dict[int, float] = field(default_factory=dict)
    has_news: bool = False  # since a batch was looked for
    trained_lengths: list[float] = field(default_factory=list)
    begun_lengths: dict[tuple[int, int], float] = field(default_factory=dict)
    begun_at: dict[tuple[int, int], float] = field(default_factory=dict)
    wasted: float = 0.0
    done: float = 0.0
    num_cut: int = 0

    def draw_length(self, group_id: int, index: int) -> float:
        """Of mean 1."""
        common = self.of_prompts.setdefault(group_id, self.random.standard_normal())
        deviate = math.sqrt(self.of_prompt) * common + math.sqrt(1 - self.of_prompt) * self.random.standard_normal()
        length = math.exp(self.sigma * deviate - self.sigma**2 / 2)
        self.begun_lengths[group_id, index], self.begun_at[group_id, index] = length, self.now
        return length

    def _sampled(self, group_id: int, index: int) -> None:
        super()._sampled(group_id, index)
        self.has_news |= self.ledger.is_open(group_id) and self.ledger.group(group_id).is_finished

    def _train(self) -> None:
        if self.is_training or len(self.queued) > 1 or not self.has_news:
            return
        self.has_news = self.ledger.counts()["finished"] > GROUPS_PER_STEP
        waiting = (group for group in self.ledger.groups if group.step is None)
        for group_id in in_the_way(waiting, GROUPS_PER_STEP, self.admission.most_cut):
            self._cut(group_id)
        before = {group.group_id for group in self.ledger.groups if group.step is not None}
        super()._train()
        for group in self.ledger.groups:
            if group.step is not None and group.group_id not in before:
                lengths = [self.begun_lengths[group.group_id, index] for index in range(GROUP_SIZE)]
                self.trained_lengths += lengths
                self.done += sum(lengths)

    def _cut(self, group_id: int) -> None:
        self.num_cut += 1
        for index, member in enumerate(self.ledger.group(group_id).members):
            if not member.is_free:
                length = self.begun_lengths[group_id, index]
                self.wasted += min(length, (self.now - self.begun_at[group_id, index]) / self.g)
        self.ledger.drop(group_id, DropReason.CUT)

    @property
    def length_ratio(self) -> float:
        """Mean length trained over mean length of everything that was begun."""
        return float(np.mean(self.trained_lengths) / np.mean(list(self.begun_lengths.values())))

    @property
    def wasted_share(self) -> float:
        """Of the tokens of groups that are trained or cut."""
        return self.wasted / (self.wasted + self.done)


@dataclass(frozen=True)
class Figures:
    """Means over seeds."""

    pace: float
    length: float
    wasted: float
    cut_per_step: float


def measure(share: float, staleness: int, pace: str, sigma: float, of_prompt: float, steps: int, seeds: int) -> Figures:
    """Run the ring so many times."""
    admission = AdmissionConfig(
        groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_staleness=staleness, oversample=share
    )
    found = []
    for seed in range(seeds):
        ring = CuttingRing(admission, *PACES[pace], sigma, seed, of_prompt=of_prompt)
        steps_per_s, worst = ring.run(steps)
        assert worst <= staleness, (admission, worst)
        found.append((steps_per_s, ring.length_ratio, ring.wasted_share, ring.num_cut / steps))
    return Figures(*np.mean(found, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"P = {GROUPS_PER_STEP} groups of {GROUP_SIZE}; length trained / begun, pace, share wasted, cut a step")
    for sigma, of_prompt, staleness, pace in itertools.product((0.5, 1.0), (0.0, 0.5), (1, 2, 4), ("g = t", "g = 2t")):
        cells = []
        for share in SHARES:
            it = measure(share, staleness, pace, sigma, of_prompt, options.steps, options.seeds)
            cells.append(f"{share:5.3f}: {it.length:.3f} {it.pace:.2f} {it.wasted:.0%} {it.cut_per_step:.1f}")
        print(f"sigma {sigma} of prompt {of_prompt} S={staleness} {pace:7} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
