"""Run the [[evaluation]] tables of a run file beside a run on this machine: `rlhpc evaluate RUN_DIR --follow`.

Input: the settings and GPUs of a run.  Output: evaluations in its directory, and evaluations/follow.log.  The process
ends with this one.  The run never waits for it, and goes on if it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Self

from launch.commands.evaluate.past import lines_about, past_evaluations
from launch.commands.evaluate.processes import end_all
from launch.common.paths import quoted
from launch.plan.gpu_map import EVALUATION, VARIABLE, GpuMap
from launch.run_files.exit_records import last_error_in
from rlhpc.config import Config
from rlhpc.parent_death import die_with
from rlhpc.patience import patiently, seen
from rlhpc.run_layout import RunLayout

NICENESS = 10  # where there are no GPUs: it takes cores that the run leaves
END_S = 3.0  # for a process that was asked to end; then the kernel ends it and its engines


class EvaluationBesideRun:
    """The command, while the block runs; nothing where the run file has no [[evaluation]]."""

    def __init__(self, config: Config, layout: RunLayout, gpus: GpuMap, tell: Callable[[str], None]) -> None:
        self._is_wanted, self._layout, self._gpus, self._tell = bool(config.evaluation), layout, gpus, tell
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_all([self._process], END_S)

    @property
    def log(self) -> Path:
        """What it says."""
        return self._layout.evaluations / "follow.log"

    def start(self) -> None:
        """Once the run directory is prepared."""
        if not self._is_wanted:
            return
        environment = dict(os.environ)
        if (devices := self._gpus.variable(EVALUATION)) is not None:
            environment[VARIABLE] = devices
        words = [sys.executable, "-u", "-P", "-m", "launch.cli", "evaluate", str(self._layout.root), "--follow"]
        with patiently(self._open_log, self.log) as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which saves; this one is then ended
                preexec_fn=partial(_begin, os.getpid(), 0 if self._gpus.devices else NICENESS),
            )

    def _open_log(self) -> IO[bytes]:
        self._layout.evaluations.mkdir(exist_ok=True)
        return self.log.open("ab")

    def look(self) -> None:
        """Say once that it has failed."""
        if self._process is None or (status := self._process.poll()) is None:
            return
        self._process = None
        if status != 0:
            why = seen(lambda: last_error_in(self.log), "") or f"status {status}"
            self._tell(f"[evaluation] has failed, and the run continues without it: {why}; see {self.log}")

    def finish(self) -> None:
        """Wait for the evaluation of a complete run, and report its results."""
        if not self._is_wanted:
            return
        if self._process is not None and self._process.poll() is None:
            self._tell(f"the run is complete; its last model is evaluated now, see {self.log}")
            try:
                self._process.wait()
            except KeyboardInterrupt:
                self._tell(f"`rlhpc evaluate {quoted(self._layout.root)}` continues the evaluation")
                return
        self.look()
        for line in seen(lambda: lines_about(past_evaluations(self._layout)), list[str]()):
            self._tell(line)


def _begin(parent: int, niceness: int) -> None:
    """In the child between fork and exec; this process has one thread."""
    die_with(parent)
    os.nice(niceness)
