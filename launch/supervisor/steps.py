"""Start the processes of a component: one srun for all its tasks, or each directly in the batch step.

Input: Part.  Output: Step, which can be asked to exit, killed, and polled.  Every srun is given its sizes explicitly:
otherwise the values that Slurm sets for component 0 would apply to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from launch.run_files.plan_file import JobPart, Part
from launch.run_files.run_state import Attempt
from launch.slurm.commands import srun_environment

KILL_PATIENCE_S = 10.0  # for srun to have ended its tasks


class Step:
    """Processes that were started together."""

    def __init__(self, name: str, words: list[str], *, is_srun: bool) -> None:
        """Start `words`."""
        self.name, self._is_srun = name, is_srun
        self.asked = False  # to exit
        environment = srun_environment() if is_srun else None
        # In its own session: a signal can be sent to all its processes, and Ctrl-C at a terminal does not reach it.
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)

    def status(self) -> int | None:
        """Exit status as in a shell (128 + signal), of an srun the highest of its tasks; None while it runs."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def ask_to_leave(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the roles.  srun forwards USR2 to its tasks; SIGTERM would make it kill them."""
        self.asked = True
        self._send(signal.SIGUSR2 if self._is_srun else number)

    def kill(self) -> None:
        """Kill it; returns when it has ended."""
        if self.status() is not None:
            return
        self._send(signal.SIGTERM if self._is_srun else signal.SIGKILL)
        try:
            self._process.wait(KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self._process.wait()

    def wait(self, patience_s: float) -> bool:
        """Wait until it has ended; False: it has not ended in time."""
        deadline = time.monotonic() + patience_s
        while self.status() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.status() is not None

    def _send(self, number: signal.Signals) -> None:
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._is_srun:
                self._process.send_signal(number)
            else:
                os.killpg(self._process.pid, number)  # the task, which ignores it, and its role


def start_part(plan: JobPart, part: Part, het_group: int | None, attempt: Attempt, start: int) -> Step:
    """Start all tasks of a component by one srun.  het_group: its number in a heterogeneous job.

    start: number of its earlier starts in this life of the job.
    """
    words = ["srun", *([f"--het-group={het_group}"] if het_group is not None else []), *part.srun]
    # One task that dies must not end the others, and srun must not wait forever for tasks that never start.
    words += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none", f"--job-name={part.name}"]
    role = part.shares[0].role
    return Step(part.name, [*words, *_task(plan, part, role, attempt, start)], is_srun=True)


def start_in_batch_step(plan: JobPart, part: Part, role: str, index: int, attempt: Attempt, start: int) -> Step:
    """Start one process beside the supervisor."""
    name = f"{role}-{part.share_of(role).first_replica + index}"
    return Step(name, [*_task(plan, part, role, attempt, start), "--index", str(index)], is_srun=False)


def _task(plan: JobPart, part: Part, role: str, attempt: Attempt, start: int) -> list[str]:
    words = [sys.executable, "-u", "-m", "launch.supervisor.role_task", "--plan", str(plan.path), "--job", plan.name]
    words += ["--part", part.name, "--role", role, "--attempt", str(attempt.index), "--start", str(start)]
    words += ["--owner", attempt.fence] if attempt.fence else []
    return words if attempt.resume_step is None else [*words, "--resume-step", str(attempt.resume_step)]
