"""Begin an attempt through a command in the roles' Python environment, which can read checkpoints and make keys."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launch.run_files.plan_file import JobPart
from launch.run_files.run_state import Attempt
from launch.slurm.this_job import ThisJob
from launch.supervisor.signals import Signals
from launch.supervisor.steps import Tether
from rlhpc.deadline import Deadline
from rlhpc.errors import RlhpcError
from rlhpc.files import leave_deleted_directory
from rlhpc.parent_death import die_with

BEGIN_S = 7200.0  # every byte of the newest checkpoint is read, which may be hundreds of GB
POLL_S = 0.1


class BeginError(RlhpcError):
    """No attempt could begin; status: exit status of the command, or 1 if it did not run."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class AttemptStarter:
    """Begins the attempts of one supervisor."""

    def __init__(
        self, plan: JobPart, job: ThisJob, say: Callable[[str, str], None], signals: Signals, tether: Tether | None
    ) -> None:
        """say: called with a line for each checkpoint that is skipped."""
        self._job, self._say, self._signals, self._root = job, say, signals, plan.layout.root
        self._descriptors = () if tether is None else tether.descriptors
        part = next(part for part in plan.parts if any(share.role == "controller" for share in part.shares))
        self._program = [*part.python, "-P", "-m", "launch.run_directory.begin_attempt"]
        self._words = ["--run-dir", str(plan.layout.root), "--job-id", str(job.job_id), "--restart", str(job.restart)]
        self._environment = {**part.defaults, **os.environ, **part.environment}

    def begin(self, is_over: Callable[[], bool], follows: str = "") -> Attempt:
        """Make directories and keys, find the checkpoint to resume from, write attempt.json.

        is_over: whether an attempt is no longer wanted.  follows: owner of the previous attempt, where Slurm does not
        tell which of two supervisors is the later one.  Raises BeginError.
        """
        program = " ".join([self._program[0], *self._program[-2:]])
        try:
            status, out, errors = self._run(["--follows", follows] if follows else [], is_over)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BeginError(f"{program}: {error}") from error
        if status != 0:
            silent = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
            said = (errors or out).strip() or f"{program}: {silent}, without output"
            raise BeginError(f"no attempt could begin: {said}", status)
        try:
            document = json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
        except (StopIteration, ValueError) as error:
            raise BeginError(f"{program}: exit status 0, and says no attempt: {out.strip()[-200:]!r}") from error
        for line in document.get("set_aside", ()):
            self._say("checkpoint", line)
        return Attempt.parse(document)

    def _run(self, words: list[str], is_over: Callable[[], bool]) -> tuple[int, str, str]:
        """Run the command; it is killed once it is no longer wanted.  Returns exit status, output, errors."""
        leave_deleted_directory(self._root)
        if not Path(tempfile.gettempdir()).is_dir():
            tempfile.tempdir = None  # a cleaner has deleted it: Python looks for another
        deadline = Deadline(BEGIN_S)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*self._program, *self._words, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=self._environment,
                pass_fds=self._descriptors,
                preexec_fn=partial(die_with, os.getpid()),  # this process has one thread
            )
            try:
                while process.poll() is None:
                    if is_over():
                        process.kill()
                    if deadline.is_over:
                        raise subprocess.TimeoutExpired(self._program, BEGIN_S)
                    self._signals.sleep(POLL_S)
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            errors.seek(0)
            return process.returncode, out.read(), errors.read()
