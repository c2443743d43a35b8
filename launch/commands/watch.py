"""Show a run's progress: one updated line on a terminal, a line from time to time elsewhere.

    starting | waits for trainer-0, generator-0 | 31 s
    step 120/2000 | 3 h 05 min left | reward 0.412 | staleness 1.2 | …

Input: status.json.  Output: printed lines.  Groups dropped because their rewards cannot be computed, or because they
kill generators, are reported when that happens, and again whenever their number has doubled.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from launch.commands.disk_troubles import disk_troubles
from launch.commands.status import read_status, waiting_for
from launch.common.paths import quoted
from launch.common.text_table import escaped, shortened
from rlhpc.contracts import Clock
from rlhpc.metrics.progress import Progress, ProgressLine, format_duration
from rlhpc.run_layout import RunLayout

_TOLD = {
    "dropped_verifier_error": "no verifier could judge them; `rlhpc rollouts {root} --verdict verifier_error` says why",
    "dropped_poison": "their leases were lost, or their prompts are quarantined: `rlhpc status {root}` lists these",
}
LOOK_AT_DISK_S = 2.0  # where the run itself says nothing
BEFORE = ("starting", "replaying", "waiting for generators")  # phases in which nothing new is trained


class Watch:
    """Follows one run directory."""

    def __init__(
        self,
        layout: RunLayout,
        stream: TextIO = sys.stderr,
        *,
        expected: Sequence[str] = (),
        is_quiet: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """expected: processes that the run needs (process_names).  is_quiet: nothing but what `tell` is told."""
        self._layout, self._stream, self._is_quiet, self._clock = layout, stream, is_quiet, clock
        self._expected, self._began_s = tuple(expected), clock()
        self._line: ProgressLine | None = None
        self._last_step = 0
        self._attempt: int | None = None  # as last seen
        self._told = dict.fromkeys(_TOLD, 0)  # groups at the last warning
        self._has_disk_trouble, self._saw_disk_s = False, -math.inf  # as last told
        self._waits_in: int | None = None  # attempt that waits for verdicts, as last told

    def look(self) -> None:
        """Show what has changed since the last call."""
        status = read_status(self._layout)
        if status is None or self._is_quiet:
            return
        self._warn(status["queue"], status.get("errors", {}).get("latest", ""))
        self._warn_of_errors(status)
        self._warn_of_disk(status)
        if self._line is None:
            self._line = ProgressLine(self._stream, self._stream.isatty(), status["num_steps"], self._clock)
        if self._attempt not in (None, attempt := status.get("attempt")):
            self._began_s = self._clock()  # another attempt starts
        self._attempt = attempt
        if status["phase"] in BEFORE:
            self._last_step = status["step"]  # that a resume begins with
            waits_for = waiting_for(status, self._expected)
            passed = format_duration(self._clock() - self._began_s)
            self._line.wait(status["phase"], f"waits for {waits_for} | {passed}" if waits_for else passed)
        elif status["step"] != self._last_step:
            self._last_step = status["step"]
            self._line.update(_progress(status))

    def _warn(self, queue: dict[str, Any], latest: str) -> None:
        for reason, words in _TOLD.items():
            count = int(queue.get(reason, 0))
            if count >= max(1, 2 * self._told[reason]):
                self._told[reason] = count
                groups = "1 group is" if count == 1 else f"{count} groups are"
                last = f"; the last error: {shortened(latest)}" if latest else ""
                self.tell(f"{groups} dropped: {words.format(root=quoted(self._layout.root))}{last}")

    def _warn_of_errors(self, status: dict[str, Any]) -> None:
        errors, attempt = status.get("errors", {}), status.get("attempt")
        told, self._waits_in = self._waits_in, attempt if "waited_s" in errors else None
        if self._waits_in == told:
            return
        if self._waits_in is not None:
            self.tell(
                f"too many errors in place of verdicts: the run waits for up to {errors['patience_s']:.0f} s until "
                f"there are some again (rewards.error_patience_s); the last error: {shortened(errors['latest'])}"
            )
        elif told == attempt:
            self.tell("the run waits for verdicts no longer")

    def _warn_of_disk(self, status: dict[str, Any]) -> None:
        if not status.get("disk_troubles") and self._clock() - self._saw_disk_s < LOOK_AT_DISK_S:
            return
        troubles, self._saw_disk_s = disk_troubles(self._layout, status), self._clock()
        if bool(troubles) == self._has_disk_trouble:
            return
        self._has_disk_trouble = bool(troubles)
        self.tell(f"the disk refuses: {'; '.join(troubles)}" if troubles else "the disk takes what is written again")

    def tell(self, text: str) -> None:
        """Print a line of its own, if anybody still reads: its terminal or pipe may be closed, its disk full."""
        self.close()
        with suppress(OSError):
            self._stream.write(f"rlhpc: {escaped(text)}\n")  # the last words of a process may quote what was sampled
            self._stream.flush()

    def close(self) -> None:
        """End the live line, if there is one."""
        if self._line is not None:
            self._line.finish()


def _progress(status: dict[str, Any]) -> Progress:
    return Progress(
        status["step"],
        status["num_steps"],
        status["reward"],
        status["trainer_tokens_per_s"],
        status["generator_tokens_per_s"],
        status["staleness_max"],
        status["eta_s"],
    )
