"""Detect an attempt without progress.  Input: step and phase at each poll, and the time.  Pure."""

from __future__ import annotations


class StallWatch:
    """How long there has been no step.

    Before training begins, roles may be waiting for each other, each with a timeout of its own (meet_s); the limit of
    the first step starts when training begins, so that loading a large model does not use it up.
    """

    def __init__(self, stall_s: float, meet_s: float, now: float) -> None:
        self._stall_s, self._meet_s = stall_s, meet_s
        self._since = now  # when the current step, training, or the attempt began
        self._step, self._is_training = -1, False
        self.has_moved = False  # a step was trained in this attempt

    def look(self, step: int, is_training: bool, now: float) -> float | None:
        """Record the current state; returns the limit in seconds if it is exceeded, else None.

        step: steps trained so far, -1 if unknown.
        """
        if step != self._step:
            self.has_moved |= self._step >= 0
        if step != self._step or is_training != self._is_training:
            self._step, self._is_training, self._since = step, is_training, now
            return None
        limit_s = self._stall_s + (0.0 if is_training else 2 * self._meet_s)
        return limit_s if now - self._since > limit_s else None
