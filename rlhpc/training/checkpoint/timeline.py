"""Which checkpoints belong to the current history of the run, and which to steps that a later resume has undone.

Input: attempts.jsonl, where each attempt says which step it began with, and the number of the attempt that wrote a
checkpoint.  Output: the attempt that has undone it, if any.  A checkpoint that was set aside and comes back by hand, or
one that a controller of an earlier attempt completes too late, is recognised by this alone.  Loads without torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlhpc.files import is_absent


@dataclass(frozen=True, slots=True)
class Timeline:
    """The first step of every attempt."""

    begins: tuple[tuple[int, int], ...]  # (attempt, first step), in the order in which they began

    @classmethod
    def read(cls, attempts: Path) -> Timeline:
        """Read attempts.jsonl; lines that are not whole are left out.  Raises OSError if it cannot be read."""
        if is_absent(attempts):
            return cls(())
        lines = attempts.read_text(encoding="utf-8", errors="replace").splitlines()
        return cls(tuple(begin for begin in map(_begin_of, lines) if begin is not None))

    def undone_by(self, step: int, attempt: int | None) -> int | None:
        """The attempt that began before `step` after `attempt` had written its checkpoint; None if none did.

        attempt: None for a checkpoint that does not record its attempt; then the result is None.
        """
        if attempt is None:
            return None
        return next((later for later, begin in self.begins if later > attempt and begin < step), None)


def _begin_of(line: str) -> tuple[int, int] | None:
    try:
        document = json.loads(line)
        return int(document["index"]), int(document["resume_step"] or 0)
    except (ValueError, KeyError, TypeError):
        return None
