"""What receivers say of a version before its first bucket, in one sum over all ranks.

Input: three statements of every receiver, as one integer; output: how many made each, known to all ranks alike, so that
all know without another message whether a delta follows.
"""

from __future__ import annotations

from dataclasses import dataclass

_BITS = 20  # for counts of fewer than a million receivers
_MASK = (1 << _BITS) - 1


def vote(*, keeps: bool, holds: bool) -> int:
    """Of a receiver that takes the version; one that does not says 0.

    keeps: it will have the bytes when the next version comes.  holds: it has those of the version that was offered.
    """
    return 1 | keeps << _BITS | holds << 2 * _BITS


@dataclass(frozen=True, slots=True)
class Votes:
    """How many receivers said so."""

    taking: int
    keeping: int
    holding: int

    @classmethod
    def of(cls, total: int) -> Votes:
        """From the sum of all votes."""
        return cls(total & _MASK, total >> _BITS & _MASK, total >> 2 * _BITS & _MASK)

    def mean_a_delta(self, offered: int, world_size: int) -> bool:
        """True if the version follows as a delta.  offered: identity, 0 for none."""
        return bool(offered) and self.holding == world_size - 1
