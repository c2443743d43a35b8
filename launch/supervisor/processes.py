"""The processes that one job of a run starts: the controller, and everything that serves it.

Generators, services of both kinds and the evaluator keep running from one attempt to the next, a trainer does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from launch.run_files.plan_file import JobPart, Part
from launch.run_files.records import read_exit_record
from launch.run_files.run_state import Attempt, Log, read_progress
from launch.slurm.commands import srun_environment
from launch.slurm.queue import ThisJob
from rlhpc.base.files import leave_deleted_directory
from rlhpc.base.patience import Deadline, seen
from rlhpc.base.processes import die_with
from rlhpc.protocol.errors import RlhpcError

# -------------------------------------------------------------------------------------------------------------- signals
#
# Signals to a supervisor, as flags.
#
# Slurm sends a batch step USR2 `warn_s` before the time limit, and TERM at scancel, preemption, the failure of another
# node, and the limit.  A terminal sends INT, and HUP when it is closed.  Other schedulers, and `--signal` of sbatch,
# warn by the others of ENDS; each of them would kill a process that does not handle it.


ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM, signal.SIGPWR)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS)  # that reach the task of a role


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals in the block; processes started in it have them blocked until they unblock them.

    Python without a handler dies of them, and of a SIGINT during its start with status 1.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopSignal(KeyboardInterrupt):
    """A signal that ends a start before its attempt begins.  Not an Exception: `except Exception` passes it on."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} has ended this start before the run began")
        self.status = 128 + number  # as shells report it


class Signals:
    """The requests that this supervisor has received so far."""

    sender = ""  # of a signal that asks for the end

    def __init__(self) -> None:
        self.warned = False  # of the time limit
        self.end_requested = False  # after the current step, which is saved
        self.interrupts = 0  # 1: end within seconds; 2: at once
        self._reader, self._writer = os.pipe()  # a signal between reading the flags and poll must not be lost
        os.set_blocking(self._writer, False)
        self._poll = select.poll()  # select() knows no descriptor above 1023
        self._poll.register(self._reader, select.POLLIN)

    def sleep(self, seconds: float) -> None:
        """Wait, at most until the next signal."""
        if self._poll.poll(1000 * seconds):
            os.read(self._reader, 64)

    def lost_to(self) -> str:
        """The owner that has taken the run over, in words; "" if none is known here."""
        return ""

    def _warn(self, number: int, frame: FrameType | None) -> None:
        self.warned = True
        self._wake()

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.end_requested = True
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return  # the pipe is full, which wakes the reader, too


class SlurmSignals(Signals):
    """The signals that Slurm has sent so far."""

    sender = "Slurm"

    def __init__(self) -> None:
        """Install the handlers.  One instance per process."""
        super().__init__()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, every process seems to end with status 0
        for number in WARNINGS:
            signal.signal(number, self._warn)
        for number in (*ENDS, signal.SIGINT):
            signal.signal(number, self._end)


# ---------------------------------------------------------------------------------------------------------------- steps
#
# Start the processes of a component: one srun for all its tasks, or each directly in the batch step.
#
# Input: Part.  Output: StartedProcesses, which can be asked to exit, killed, and polled.  Every srun is given its sizes
# explicitly: otherwise the values that Slurm sets for component 0 would apply to it.  A process that is started
# directly leaves nothing behind when it ends.


KILL_PATIENCE_S = 10.0  # for srun to have ended its tasks


@dataclass(frozen=True)
class Tether:
    """Ties processes to a supervisor without Slurm, where no job ends them all."""

    descriptors: tuple[int, ...] = ()  # kept open by each process: the lock of the run directory
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the supervisor's


class StartedProcesses:
    """Processes that were started together."""

    def __init__(
        self, name: str, words: list[str], processes: frozenset[str], attempt: Attempt, tether: Tether | None = None
    ) -> None:
        """Start `words`, an srun or a task; processes: names of its processes."""
        self.name, self.processes, self.attempt = name, processes, attempt
        self.role = min(processes).rpartition("-")[0]
        self.asked = False  # to exit
        self.is_srun, self._is_over = words[0] == "srun", False
        environment = srun_environment() if self.is_srun else None
        if tether is not None:
            environment = {**os.environ, **tether.environment}
        # In its own session: a signal can be sent to all its processes, and Ctrl-C at a terminal does not reach it.
        with blocked(() if self.is_srun else REQUESTS):  # a task unblocks them when it has its handlers
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
            self._send_to_group(signal.SIGKILL)  # processes left behind by a killed task
        return status if status is None or status >= 0 else 128 - status

    def ask_to_leave(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the roles to exit.  srun forwards USR2 to its tasks; SIGTERM would make it kill them."""
        self.asked = True
        self._send(signal.SIGUSR2 if self.is_srun else number)

    def kill(self) -> None:
        """Kill the process; returns when it has ended."""
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
        """Wait for the end; False: it has not ended in time."""
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


def start_part(plan: JobPart, part: Part, het_group: int | None, attempt: Attempt, start: int) -> StartedProcesses:
    """Start all tasks of a component by one srun.  het_group: its number in a heterogeneous job.

    start: number of its earlier starts in this life of the job.
    """
    leave_deleted_directory(plan.layout.root)
    words = ["srun", *([f"--het-group={het_group}"] if het_group is not None else []), *part.srun]
    # One task that dies must not end the others, and srun must not wait forever for tasks that never start.
    words += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none", f"--job-name={part.name}"]
    share = part.shares[0]
    task = _task(plan, part, share.role, attempt, start)
    return StartedProcesses(part.name, [*words, *task], frozenset(share.names), attempt)


def start_beside(
    plan: JobPart, part: Part, role: str, index: int, attempt: Attempt, start: int, tether: Tether | None = None
) -> StartedProcesses:
    """Start one process beside the supervisor: in the batch step, or, tethered, without Slurm."""
    leave_deleted_directory(plan.layout.root)
    name = f"{role}-{part.share_of(role).first_replica + index}"
    words = [*_task(plan, part, role, attempt, start), "--index", str(index)]
    words += ["--hold", *map(str, tether.descriptors)] if tether is not None else []
    return StartedProcesses(name, words, frozenset({name}), attempt, tether)


def _task(plan: JobPart, part: Part, role: str, attempt: Attempt, start: int) -> list[str]:
    # A random.py or types.py in the user's directory would precede the standard library's.
    unsearched = ["-P"] if sys.version_info >= (3, 11) else []
    words = [sys.executable, "-u", *unsearched, "-m", "launch.supervisor.role_task", "--plan", str(plan.path)]
    words += ["--job", plan.name, "--part", part.name, "--role", role]
    words += ["--attempt", str(attempt.index), "--start", str(start)]
    words += ["--owner", attempt.fence] if attempt.fence else []
    return words if attempt.resume_step is None else [*words, "--resume-step", str(attempt.resume_step)]


# ---------------------------------------------------------------------------------------------------------------- begin
#
# Begin an attempt through a command in the roles' Python environment, which can read checkpoints and make keys.


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

        is_over: returns True once an attempt is no longer wanted.  follows: owner of the previous attempt, without
        Slurm, whose job ids order supervisors.  Raises BeginError.
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
            tempfile.tempdir = None  # a cleaner may have deleted it: Python looks for another
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


# ------------------------------------------------------------------------------------------------------------ processes


class Processes:
    """Starts, watches and ends the processes of a job.  `controller` is that of the current attempt."""

    def __init__(self, plan: JobPart, job: ThisJob, log: Log, signals: Signals, tether: Tether | None) -> None:
        self._plan, self._job, self._log, self._signals, self._tether = plan, job, log, signals, tether
        self.controller: StartedProcesses | None = None
        self._steps: dict[str, StartedProcesses] = {}  # everything else, by name
        self._starts: dict[str, int] = {}  # number of starts of each, in this life
        self._ends: dict[str, int] = {}  # number of times that each was restarted by its task, as far as seen
        self._reported: set[str] = set()  # components whose end was returned by ended()

    @property
    def has_controller(self) -> bool:
        """True while the controller runs."""
        return self.controller is not None and self.controller.status() is None

    def start(self, attempt: Attempt) -> None:
        """Start the controller, and every component that is not still running from the previous attempt."""
        self._reported.clear()
        for group, part in enumerate(self._plan.parts):
            if not part.runs_in_batch_step:
                self._start_part(part, group, attempt)
                continue
            for share in part.shares:
                for index in range(share.num_processes):
                    self._start_beside(part, share.role, index, attempt)

    def ended(self) -> list[StartedProcesses]:
        """Components that ended unasked, each once per attempt; also reports processes that their task restarts."""
        found = []
        for name, step in self._steps.items():
            if step.status() is None:
                self._report_restart(name, step)
            elif not step.asked and name not in self._reported:
                self._reported.add(name)
                found.append(step)
        return found

    def has(self, role: str) -> bool:
        """True while a process of this role runs."""
        return any(step.status() is None for step in self._of(role))

    def others_serve(self, role: str) -> bool:
        """True if processes of this role run in this job, or are registered by others."""
        if self.has(role):
            return True
        own = {name for step in self._of(role) for name in step.processes}
        progress = read_progress(self._plan.layout)
        return progress is not None and any(name not in own for name in progress.names(role))

    def has_service(self, step: StartedProcesses) -> bool:
        """True if another process of the service that this one belongs to runs in this job."""
        shares = [share for part in self._plan.parts for share in part.shares if share.service]
        kin = {name for share in shares if step.processes & set(share.names) for name in share.names}
        others = (each for each in self._of("service") if each is not step and each.processes & kin)
        return any(each.status() is None for each in others)

    def end_trainer(self, patience_s: float) -> None:
        """Wait for all ranks; kill those that do not end in time."""
        deadline = Deadline(patience_s)
        for step in self._of("trainer"):
            step.asked = True
            if not step.wait(deadline.left_s, self._signals.sleep):
                step.kill()

    def ask_all_to_leave(self, spared: str = "") -> list[StartedProcesses]:
        """Ask all processes but the controller and the spared role to exit; returns them."""
        left = [step for step in self._steps.values() if step.status() is None and step.role != spared]
        for step in left:
            if not step.asked:
                step.ask_to_leave()
        return left

    def end_all(self, grace_s: float, *, is_wanted: bool, spared: str = "") -> None:
        """End every process of this job; generators hand back their leases, unless Ctrl-C is pressed meanwhile.

        is_wanted: the end was requested, so that a process that has to be killed is no fault of the run.  spared: a
        role that goes on.
        """
        if self.controller is not None:
            self.controller.kill()
        left, interrupts = self.ask_all_to_leave(spared), self._signals.interrupts

        def is_over() -> bool:
            return self._signals.interrupts > interrupts or all(step.status() is not None for step in left)

        Deadline(grace_s).wait_for(is_over, POLL_S, self._signals.sleep)
        for step in left:
            if step.status() is None:
                self._log.say("stop" if is_wanted else "kill", f"{step.name} is killed: it did not exit in time")
                step.kill()

    # ------------------------------------------------------------------------------------------------------- internals

    def _of(self, role: str) -> list[StartedProcesses]:
        return [step for step in self._steps.values() if step.role == role]

    def _start_beside(self, part: Part, role: str, index: int, attempt: Attempt) -> None:
        name = f"{role}-{part.share_of(role).first_replica + index}"
        if self._is_running(name):
            return
        self._ends[name] = 0
        step = start_beside(self._plan, part, role, index, attempt, self._count(name), self._tether)
        if role == "controller":
            self.controller = step
        else:
            self._steps[name] = step

    def _start_part(self, part: Part, group: int, attempt: Attempt) -> None:
        if not self._is_running(part.name):
            het_group = group if self._job.is_heterogeneous else None
            start = self._count(part.name)
            self._steps[part.name] = start_part(self._plan, part, het_group, attempt, start)

    def _is_running(self, name: str) -> bool:
        return name in self._steps and self._steps[name].status() is None

    def _count(self, name: str) -> int:
        self._starts[name] = self._starts.get(name, -1) + 1
        return self._starts[name]

    def _report_restart(self, name: str, step: StartedProcesses) -> None:
        """Report that a process beside the supervisor has ended, and that its task restarts it."""
        if step.is_srun:
            return
        record = seen(lambda: read_exit_record(self._plan.layout, name, step.attempt.index), None)
        if record is None:
            return
        if record.starts > self._ends[name] and not record.is_final:
            self._ends[name] = record.starts
            self._log.say("restart", f"{record.cause}; it is restarted")
