"""Start the processes of a component: one srun for all its tasks, or each directly in the batch step.

Input: Part.  Output: Step, which can be asked to exit, killed, and polled.  Every srun is given its sizes explicitly:
otherwise the values that Slurm sets for component 0 would apply to it.  A process that is started directly leaves
nothing behind when it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from launch.run_files.plan_file import JobPart, Part
from launch.run_files.run_state import Attempt
from launch.slurm.commands import srun_environment
from launch.supervisor.signals import REQUESTS, blocked
from rlhpc.deadline import Deadline
from rlhpc.files import leave_deleted_directory
from rlhpc.parent_death import die_with

KILL_PATIENCE_S = 10.0  # for srun to have ended its tasks


@dataclass(frozen=True)
class Tether:
    """Ties processes to a supervisor without Slurm, where no job ends them all."""

    descriptors: tuple[int, ...] = ()  # that each keeps open: the lock of the run directory
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the supervisor's


class Step:
    """Processes that were started together."""

    def __init__(
        self, name: str, words: list[str], processes: frozenset[str], attempt: Attempt, tether: Tether | None = None
    ) -> None:
        """Start `words`, an srun or a task; processes: names of those that it stands for."""
        self.name, self.processes, self.attempt = name, processes, attempt
        self.role = min(processes).rpartition("-")[0]
        self.asked = False  # to exit
        self.is_srun, self._is_over = words[0] == "srun", False
        environment = srun_environment() if self.is_srun else None
        if tether is not None:
            environment = {**os.environ, **tether.environment}
        # In its own session: a signal can be sent to all its processes, and Ctrl-C at a terminal does not reach it.
        with blocked(() if self.is_srun else REQUESTS):  # a task takes them when it has its handlers
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                pass_fds=() if tether is None else tether.descriptors,
                preexec_fn=None if tether is None else partial(die_with, os.getpid()),  # this process has one thread
            )

    def status(self) -> int | None:
        """Exit status as in a shell (128 + signal), of an srun the highest of its tasks; None while it runs."""
        status = self._process.poll()
        if status is not None and not self._is_over:
            self._is_over = True
            self._send_to_group(signal.SIGKILL)  # what a task that was killed has left behind
        return status if status is None or status >= 0 else 128 - status

    def ask_to_leave(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the roles.  srun forwards USR2 to its tasks; SIGTERM would make it kill them."""
        self.asked = True
        self._send(signal.SIGUSR2 if self.is_srun else number)

    def kill(self) -> None:
        """Kill it; returns when it has ended."""
        if self.status() is not None:
            return
        self._send(signal.SIGTERM if self.is_srun else signal.SIGKILL)
        try:
            self._process.wait(KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self._process.wait()
        self.status()

    def wait(self, patience_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Wait until it has ended; False: it has not ended in time."""
        return Deadline(patience_s).wait_for(lambda: self.status() is not None, 0.1, sleep)

    def _send(self, number: signal.Signals) -> None:
        if self.status() is not None:
            return
        if self.is_srun:
            self._process.send_signal(number)
        else:
            self._send_to_group(number)  # the task, which ignores it, and its role

    def _send_to_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def start_part(plan: JobPart, part: Part, het_group: int | None, attempt: Attempt, start: int) -> Step:
    """Start all tasks of a component by one srun.  het_group: its number in a heterogeneous job.

    start: number of its earlier starts in this life of the job.
    """
    leave_deleted_directory(plan.layout.root)
    words = ["srun", *([f"--het-group={het_group}"] if het_group is not None else []), *part.srun]
    # One task that dies must not end the others, and srun must not wait forever for tasks that never start.
    words += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none", f"--job-name={part.name}"]
    share = part.shares[0]
    processes = frozenset(f"{share.role}-{share.first_replica + k}" for k in range(share.num_processes))
    return Step(part.name, [*words, *_task(plan, part, share.role, attempt, start)], processes, attempt)


def start_beside(
    plan: JobPart, part: Part, role: str, index: int, attempt: Attempt, start: int, tether: Tether | None = None
) -> Step:
    """Start one process beside the supervisor: in the batch step, or, tethered, without Slurm."""
    leave_deleted_directory(plan.layout.root)
    name = f"{role}-{part.share_of(role).first_replica + index}"
    words = [*_task(plan, part, role, attempt, start), "--index", str(index)]
    words += ["--hold", *map(str, tether.descriptors)] if tether is not None else []
    return Step(name, words, frozenset({name}), attempt, tether)


def _task(plan: JobPart, part: Part, role: str, attempt: Attempt, start: int) -> list[str]:
    # A random.py or types.py where the user is would come before the standard library's.
    unsearched = ["-P"] if sys.version_info >= (3, 11) else []
    words = [sys.executable, "-u", *unsearched, "-m", "launch.supervisor.role_task", "--plan", str(plan.path)]
    words += ["--job", plan.name, "--part", part.name, "--role", role]
    words += ["--attempt", str(attempt.index), "--start", str(start)]
    words += ["--owner", attempt.fence] if attempt.fence else []
    return words if attempt.resume_step is None else [*words, "--resume-step", str(attempt.resume_step)]
