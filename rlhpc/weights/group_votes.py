"""The receivers' votes on a version before its first bucket, as one sum over all ranks.

Input: three yes/no votes of every receiver, as one integer; output: how many said yes to each.  All ranks get the same
counts, so that all know without another message whether deltas follow.
"""

from __future__ import annotations

from dataclasses import dataclass

_BITS = 20  # for counts of fewer than a million receivers
_MASK = (1 << _BITS) - 1


def vote(*, keeps: bool, holds: bool) -> int:
    """The vote of a receiver that takes the version; one that does not votes 0.

    keeps: it will still have the bytes when the next version comes.  holds: it has those of the offered base version.
    """
    return 1 | keeps << _BITS | holds << 2 * _BITS


@dataclass(frozen=True, slots=True)
class Votes:
    """Number of receivers for each vote."""

    taking: int
    keeping: int
    holding: int

    @classmethod
    def of(cls, total: int) -> Votes:
        """From the sum of all votes."""
        return cls(total & _MASK, total >> _BITS & _MASK, total >> 2 * _BITS & _MASK)

    def mean_a_delta(self, offered: int, world_size: int) -> bool:
        """True if the version is sent as deltas.  offered: identity of the base version, 0 for none."""
        return bool(offered) and self.holding == world_size - 1
