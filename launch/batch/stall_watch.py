"""Whether an attempt makes steps.  Input: step and phase of each look, and when it was.  Pure."""

from __future__ import annotations


class StallWatch:
    """How long there has been no step.

    Before training begins, roles may be waiting for each other, each within a limit of its own (meet_s), and the first
    step has its whole limit from then on: models that load for long take nothing from it.
    """

    def __init__(self, stall_s: float, meet_s: float, now: float) -> None:
        self._stall_s, self._meet_s = stall_s, meet_s
        self._since = now  # the present step, the beginning of training, or that of the attempt
        self._step, self._is_training = -1, False
        self.has_moved = False  # a step was trained in this attempt

    def look(self, step: int, is_training: bool, now: float) -> float | None:
        """Note where the attempt stands; returns the limit in seconds that it has exceeded, if it has.

        step: trained so far, -1 if nothing is known.
        """
        if step != self._step:
            self.has_moved |= self._step >= 0
        if step != self._step or is_training != self._is_training:
            self._step, self._is_training, self._since = step, is_training, now
            return None
        limit_s = self._stall_s + (0.0 if is_training else 2 * self._meet_s)
        return limit_s if now - self._since > limit_s else None
