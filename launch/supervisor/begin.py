"""Begin an attempt by a command in the roles' Python environment, which can read checkpoints and make keys."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

from launch.run_files.plan_file import JobPart
from launch.run_files.run_state import Attempt
from launch.slurm.this_job import ThisJob
from rlhpc.errors import RlhpcError

BEGIN_S = 7200.0  # every byte of the newest checkpoint is read, which may be hundreds of GB


class BeginError(RlhpcError):
    """No attempt could begin; status: exit status of the command, or 1 if it did not run."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def begin_attempt(plan: JobPart, job: ThisJob, say: Callable[[str, str], None]) -> Attempt:
    """Make directories and keys, find the checkpoint to resume from, write attempt.json; report skipped checkpoints.

    Raises BeginError.
    """
    part = next(part for part in plan.parts if any(share.role == "controller" for share in part.shares))
    words = [*part.python, "-m", "launch.run_directory.begin_attempt", "--run-dir", str(plan.layout.root)]
    words += ["--job-id", str(job.job_id), "--restart", str(job.restart)]
    environment = {**part.defaults, **os.environ, **part.environment}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=BEGIN_S,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BeginError(f"{words[0]} -m launch.run_directory.begin_attempt: {error}") from error
    if done.returncode != 0:
        silent = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        said = (
            done.stderr or done.stdout
        ).strip() or f"{words[0]} -m launch.run_directory.begin_attempt: {silent}, without output"
        raise BeginError(f"no attempt could begin: {said}", done.returncode)
    document = json.loads(done.stdout.strip().splitlines()[-1])
    for line in document.get("set_aside", ()):
        say("checkpoint", line)
    return Attempt.parse(document)
