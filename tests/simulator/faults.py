"""What goes wrong, and when: a list that a seed draws, and that can be made shorter."""

from __future__ import annotations

import random
from dataclasses import dataclass

CONTROLLER, TRAINER, GENERATORS = "controller", "trainer", ("generator-0", "generator-1")
LAST_S = 15.0  # faults begin within so many seconds of the start

# (kind, whom it may concern, weight)
KINDS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("kill", (CONTROLLER,), 3),
    ("kill at a file operation", (CONTROLLER,), 3),
    ("power cut", (CONTROLLER,), 2),
    ("power cut at a file operation", (CONTROLLER,), 3),
    ("kill", (TRAINER,), 2),
    ("kill", GENERATORS, 4),
    ("kill everything", (CONTROLLER,), 1),
    ("is taken for dead", (CONTROLLER,), 2),
    ("told to stop", (CONTROLLER,), 1),
    ("told to leave", GENERATORS, 2),
    ("stands still", (CONTROLLER, TRAINER, *GENERATORS), 3),
    ("connection breaks", GENERATORS, 4),
    ("session fails", GENERATORS, 3),
    ("delivers twice", GENERATORS, 5),
    ("messages are late", (TRAINER, *GENERATORS), 3),
    ("disk refuses", (CONTROLLER,), 2),
    ("wall clock is set", (CONTROLLER,), 1),
)


@dataclass(frozen=True, order=True)
class Fault:
    """One of them."""

    at_s: float  # after the start of the run
    kind: str
    who: str
    number: int  # of events, or of file operations, that are left to whom it kills
    seconds: float  # how long it lasts

    def __str__(self) -> str:
        detail = f" {self.number}" if "kill" in self.kind or "cut" in self.kind else f" {self.seconds:.1f} s"
        return f"{self.at_s:6.2f} s  {self.who}: {self.kind},{detail}"


def drawn(seed: str) -> list[Fault]:
    """The faults of a seed, in their order; few of most."""
    rng = random.Random(f"{seed} faults")
    kinds = [(kind, whom) for kind, whom, weight in KINDS for _ in range(weight)]
    faults = []
    for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 6, 8))):
        kind, whom = rng.choice(kinds)
        number = rng.randrange(3) if rng.random() < 0.3 else rng.randrange(60)
        seconds = rng.choice((0.3, 2.0, 8.0, 25.0)) * rng.random()
        faults.append(Fault(round(rng.random() ** 1.5 * LAST_S, 3), kind, rng.choice(whom), number, round(seconds, 3)))
    return sorted(faults)
