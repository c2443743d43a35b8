"""Show a run's progress: one updated line on a terminal, a line from time to time elsewhere.

Input: status.json.  Output: printed lines.
"""

from __future__ import annotations

import sys
from typing import TextIO

from launch.commands.status import read_status
from rlhpc.metrics.progress import ProgressLine
from rlhpc.run_layout import RunLayout


class Watch:
    """Follows one run directory."""

    def __init__(self, layout: RunLayout, stream: TextIO = sys.stderr) -> None:
        self._layout, self._stream = layout, stream
        self._line: ProgressLine | None = None
        self._last_step = -1

    def look(self) -> None:
        """Show what has changed since the last call."""
        status = read_status(self._layout)
        if status is None or status["step"] == self._last_step:
            return
        self._last_step = status["step"]
        if self._line is None:
            self._line = ProgressLine(self._stream, self._stream.isatty(), status["num_steps"])
        self._line.update(
            status["step"],
            status["reward"],
            status["trainer_tokens_per_s"],
            status["generator_tokens_per_s"],
            status["staleness_max"],
            status["eta_s"],
        )

    def tell(self, text: str) -> None:
        """Print a line of its own."""
        self.close()
        self._stream.write(f"rlhpc: {text}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the live line, if there is one."""
        if self._line is not None:
            self._line.finish()
