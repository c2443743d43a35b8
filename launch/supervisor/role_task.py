"""The wrapper around one process of a run: every task is a ``python -m launch.supervisor.role_task``.

Input: the job's plan, and the task's rank (SLURM_PROCID, SLURM_LOCALID, or --index where the supervisor itself starts
it).  Starts ``python -m rlhpc.roles ROLE`` with its own log, temporary directory and GPUs, restarts it where the plan
allows that, and writes an exit record.  Guarantees: exits with the role's exit status and leaves no process of the role
behind.

Slurm signals every process of a step.  The wrapper ignores these signals: the role also receives them and reacts.  Only
to a role that outlives attempts it passes srun's notices on as SIGTERM, which ends a role that still loads at once.

The evaluator is the command `rlhpc evaluate RUN_DIR --follow`: it has a role's log, limits and restarts, but no
channel to the run.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from launch.common.text import LONGEST_TEMPORARY_PATH
from launch.run_files.plan_file import EVALUATOR, JobPart, Part, read_plan
from launch.run_files.records import ExitRecord, last_error_in, write_exit_record
from launch.run_files.run_state import is_complete, read_progress
from launch.slurm.queue import ThisJob
from launch.supervisor.processes import REQUESTS, WARNINGS
from rlhpc.base.files import is_absent, keep_others_from_writing
from rlhpc.base.patience import Deadline, patiently, seen
from rlhpc.base.processes import (
    adopt_orphans,
    die_with,
    end_children,
    end_with_parent,
    name_nameless_user,
    wait_for_child,
)
from rlhpc.protocol.errors import EXIT_ALONE, EXIT_CONFIG, EXIT_INTERRUPTED, RlhpcError

# ---------------------------------------------------------------------------------------------------------- bounded log
#
# Keep a role's log below a bound: only the beginning and the end of a longer one are kept.
#
# Input: an open file that other processes append to, all of them from this machine.  Output: the same file, shorter,
# with a line about the omitted bytes.  A user's function may print in a loop, for weeks.  Works on the open file, not
# its name: also if the log was renamed or deleted.  Python 3.9, standard library.


LOOK_S = 2.0
_REMARK = re.compile(rb"^\S+ \S+ \S+ rlhpc\.task WARNING ([\d,]+) bytes are left out here: .*\n", re.MULTILINE)
_LONGEST_REMARK = 1000


class BoundedLog:
    """Checks a file every LOOK_S seconds in a thread.  The number of bytes omitted before is read from the file."""

    def __init__(self, name: str, max_bytes: int) -> None:
        """name: of the process, for the line in the file."""
        self._name, self._max_bytes = name, max_bytes

    @contextmanager
    def over(self, file: int) -> Iterator[None]:
        """Keep a file, open for reading and appending, short during the block."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(file, is_over), name="bounded-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads on this node: run the role, and shorten the log at its end
            is_over.set()
        try:
            yield
        finally:
            if not is_over.is_set():
                is_over.set()
                thread.join()
            self.look(file)

    def _watch(self, file: int, is_over: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that waits
        while not is_over.wait(LOOK_S):
            self.look(file)

    def look(self, file: int) -> None:
        """Shorten the file if it has become too long.  A file that cannot be read or written is left alone."""
        with suppress(OSError):  # the run directory was moved or deleted, or its disk fails: the role reports that
            if os.fstat(file).st_size > self._max_bytes:
                self._shorten(file)

    def _shorten(self, file: int) -> None:
        """Cut the middle out.  Bytes appended between the last read and the cut are lost: microseconds of output."""
        quarter = self._max_bytes // 4
        beginning = os.pread(file, quarter + _LONGEST_REMARK, 0)
        before = _REMARK.search(beginning)
        if before is not None:
            head, left_out, kept = before.start(), int(before[1].replace(b",", b"")), before.end()
        else:
            head = kept = beginning.rfind(b"\n", 0, quarter) + 1 or quarter
            left_out = 0
        begin = os.fstat(file).st_size - quarter
        tail = bytearray(os.pread(file, quarter, begin))
        whole = tail.find(b"\n") + 1  # the tail begins with a whole line
        while more := os.pread(file, 1 << 20, begin + len(tail)):
            tail += more
        os.ftruncate(file, head)
        remark = self._remark(left_out + begin + whole - kept)
        if beginning[head - 1 : head] != b"\n":
            remark = b"\n" + remark
        left = memoryview(remark + bytes(tail[whole:]))
        while left:
            left = left[os.write(file, left) :]

    def _remark(self, left_out: int) -> bytes:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        said = f"{left_out:,} bytes are left out here: run.log_bytes={self._max_bytes:,} is the most of one log"
        return f"{when} {self._name} rlhpc.task WARNING {said}\n".encode()


# --------------------------------------------------------------------------------------------------------- surroundings
#
# A role's environment: its GPUs, its host name for NCCL, and directories of compilers.  Python 3.9.


# Compilers write thousands of small files: on the node, not in a home directory on NFS with a quota of inodes.  Numba
# writes only a few files, beside our source; without them every controller would compile for ten seconds on one core.
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
# Other vendors' variables: on some sites Slurm sets them along with CUDA_VISIBLE_DEVICES, and libraries use them.
_OF_AMD = "ROCR_VISIBLE_DEVICES"  # where Slurm knows its GPUs for AMD's, alone; HIP heeds CUDA_VISIBLE_DEVICES as well
_FOREIGN = (_OF_AMD, "ZE_AFFINITY_MASK")


class TaskError(RlhpcError):
    """This task cannot start its role."""


def caches_below(directory: Path) -> dict[str, str]:
    """Variable → directory, for caches of compilers."""
    return {variable: str(directory / name) for variable, name in _CACHES.items()}


def choose_gpus(environment: dict[str, str], part: Part, is_step: bool) -> None:
    """Restrict a task to its share of its component's GPUs on the node.  Raises TaskError if there are too few."""
    if is_step and _OF_AMD in environment:
        environment.setdefault("CUDA_VISIBLE_DEVICES", environment[_OF_AMD])
    for variable in _FOREIGN:
        environment.pop(variable, None)
    if not is_step or part.gpus_per_task == 0:
        return
    shown = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    first = int(environment["SLURM_LOCALID"]) * part.gpus_per_task
    mine = shown[first : first + part.gpus_per_task]
    if len(mine) < part.gpus_per_task:
        raise TaskError(
            f"task {environment['SLURM_LOCALID']} of {part.name} on {socket.gethostname()} needs GPUs {first} to "
            f"{first + part.gpus_per_task - 1} of those that Slurm shows, "
            f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES')!r}"
        )
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def name_host(environment: dict[str, str], job_id: int, component: str) -> None:
    """Make NCCL treat this component's processes on this node as a separate host, unless NCCL_HOSTID is set.

    Where Slurm confines jobs to their GPUs (ConstrainDevices), NCCL would try direct access to a GPU of another job or
    component on the node, and fail; over the network it reaches all.  Empty: NCCL's own way to tell hosts apart.
    """
    # The component too: all of a heterogeneous job have the SLURM_JOB_ID of its leader.
    if not environment.setdefault("NCCL_HOSTID", f"{node_name(environment)}.{job_id}.{component}"):
        del environment["NCCL_HOSTID"]  # an empty name would make one host of all nodes


def node_name(environment: Mapping[str, str]) -> str:
    """This node's name in Slurm."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


# ------------------------------------------------------------------------------------------------------------ role task


NO_RETRY = {0, EXIT_CONFIG, EXIT_ALONE}
STARTS_OF_A_STEP = 100_000  # an upper bound, so that incarnations of a later step compare greater
MAX_STARTS = 4  # of a dispensable role without progress in between
EVALUATOR_NICENESS = 10  # without GPUs: it uses cores that the run leaves idle
PAUSE_S = 5.0  # before the second start; longer before each further one
POLL_S = 0.2
ASKED = "asked to leave"  # in the exit record
_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)  # settings: another try would not help
_SIGNALS: list[int] = []  # that this process has received
_ENDS = (signal.SIGTERM, signal.SIGINT)


class _LogRefused(RlhpcError):
    """The log of a role could not be opened within the time limit."""


class NotNow(RlhpcError):
    """Transient start failure: another node, or a later try, may start the process."""


def main() -> int:
    """Read the arguments, run the role to its end."""
    options = _options()
    name_nameless_user()
    keep_others_from_writing()
    _outlive_signals()
    try:
        plan = patiently(lambda: read_plan(options.plan, options.job), options.plan)
        part = next(part for part in plan.parts if part.name == options.part)
        return _Task(plan, part, options).run()
    except RlhpcError as error:
        sys.stderr.write(f"rlhpc task: {error}\n")
        return EXIT_CONFIG


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--part", required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--resume-step", type=int, default=None)
    parser.add_argument("--owner", default="", help="attempt file in the run directory")
    parser.add_argument(
        "--index", type=int, default=None, help="index of the process in its component; default: SLURM_PROCID"
    )
    parser.add_argument("--start", type=int, default=0, help="number of earlier starts of this component in this life")
    parser.add_argument(
        "--hold", type=int, nargs="*", default=(), help="inherited file descriptors that the role keeps open"
    )
    return parser.parse_args()


class _Task:
    def __init__(self, plan: JobPart, part: Part, options: argparse.Namespace) -> None:
        share = part.share_of(options.role)
        self._plan, self._part, self._options, self._share = plan, part, options, share
        self._job = ThisJob.without_slurm() if plan.is_local else ThisJob.of(os.environ)
        self._is_step = options.index is None
        index = int(os.environ["SLURM_PROCID"]) if self._is_step else options.index
        tasks_before = (self._job.array_task or 0) * share.num_processes
        self._replica = share.first_replica + tasks_before + index
        self._name = f"{options.role}-{self._replica}"
        self._log = plan.layout.log(options.role, self._replica, options.attempt)
        self._bounded = BoundedLog(self._name, plan.limits.log_bytes)
        self._record = plan.layout.exit_record(options.role, self._replica, options.attempt)
        self._starts = 0
        self._held: int | None = None  # descriptor of its directory for temporary files, locked
        self._is_evaluator = options.role == EVALUATOR
        self._is_expendable = self._is_evaluator or options.role in ("generator", "reward", "service")
        # Signals passed on to the role, by signals to this process; the role receives others itself, or must not.
        self._asks: dict[int, signal.Signals] = {number: number for number in _ENDS}
        if self._is_expendable:
            self._asks.update(dict.fromkeys(WARNINGS, signal.SIGTERM))

    def run(self) -> int:
        """Run the role, restarting it if necessary.  Returns its exit status as in a shell (128 + signal)."""
        patiently(self._make_place, self._log.parent)
        patiently(partial(self._record.unlink, missing_ok=True), self._record)
        fruitless, progress = 0, self._progress()
        while True:
            try:
                status = self._once()
            except TaskError as error:
                self._write_down(EXIT_CONFIG, str(error))
                raise
            except NotNow as error:
                self._write_down(1, str(error))
                return 1
            if self._has_obeyed(status):
                self._write_down(0, ASKED)
                return 0
            fruitless = 1 if self._progress() > progress else fruitless + 1
            progress = self._progress()
            is_over = fruitless >= MAX_STARTS or not self._may_start_again(status)
            self._write_down(status, is_final=is_over)
            if is_over:
                return status
            if Deadline(PAUSE_S * fruitless).wait_for(lambda: bool(_SIGNALS), POLL_S):
                self._write_down(0, ASKED)  # a role that starts only now would not get the signal
                return 0

    def _make_place(self) -> None:
        """Make the directory of the log.  Raises TaskError if the run directory is gone: a log must not recreate it."""
        try:
            for directory in (self._log.parent.parent, self._log.parent):
                directory.mkdir(exist_ok=True)
        except FileNotFoundError:
            if is_absent(self._plan.layout.root):
                raise TaskError(f"{self._plan.layout.root} is gone: was it moved or deleted?") from None
            raise

    def _has_obeyed(self, status: int) -> bool:
        """True if the role ended by a signal sent to it: without a handler yet, or as a command with status 130."""
        if self._is_evaluator and status == EXIT_INTERRUPTED:
            return bool(_SIGNALS)
        return status - 128 in [self._asks.get(number) for number in _SIGNALS]

    def _may_start_again(self, status: int) -> bool:
        if not self._is_expendable or status in NO_RETRY or _SIGNALS:
            return False
        if self._is_evaluator:  # also for a complete run, whose last model is to be evaluated
            return True
        if is_complete(self._plan.layout):
            return False
        if not self._plan.limits.is_attended or (self._share.service and (status > 128 or self._starts > 1)):
            return True
        progress = read_progress(self._plan.layout)
        return progress is not None and self._name in progress.names(self._options.role)

    def _once(self) -> int:
        environment = {**self._part.defaults, **os.environ}
        choose_gpus(environment, self._part, self._is_step)
        environment.update(self._part.environment)
        if self._name in self._part.visible_devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._part.visible_devices[self._name]
        base, temporary = self._temporary_directory()
        environment["TMPDIR"] = str(temporary)
        if not self._plan.is_local:  # on the user's own machine, caches in the home directory are worth keeping
            for variable, place in caches_below(base / "cache").items():
                environment.setdefault(variable, place)
            name_host(environment, self._job.job_id, self._part.name)
        try:
            with self._open_log() as log:
                role = subprocess.Popen(
                    self._command(base),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=self._options.hold,
                    preexec_fn=partial(_before_the_role, os.getpid(), self._niceness),  # this process has one thread
                )
                self._starts += 1
                self._pass_on_signals(role)
                with self._bounded.over(log.fileno()):
                    status = wait_for_child(role.pid, self._plan.limits.dead_after_s, self._say_it_stands_still)
                role.returncode = status  # for Popen, which has not waited for it
            end_children()
        except _LogRefused as error:
            raise NotNow(str(error)) from error
        except OSError as error:
            text = f"{self._part.python[0]}: {error}"
            raise (TaskError(text) if error.errno in _NO_PROGRAM else NotNow(text)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if self._held is not None:
                os.close(self._held)
                self._held = None
            if not self._plan.is_local:  # else made by the supervisor
                leave_node(base)
        return status if status >= 0 else 128 - status

    def _pass_on_signals(self, role: subprocess.Popen[bytes]) -> None:
        """Pass on signals from before the role's start, and USR2, which asks a generator to leave."""
        if self._is_expendable:

            def pass_on(number: int, _: object) -> None:
                _SIGNALS.append(number)
                role.send_signal(signal.SIGTERM)

            for number in WARNINGS:
                signal.signal(number, pass_on)
        for received in [each for each in _SIGNALS if each in self._asks]:
            role.send_signal(self._asks[received])

    def _open_log(self) -> IO[bytes]:
        try:
            return patiently(lambda: self._log.open("a+b"), self._log)
        except OSError as error:
            raise _LogRefused(str(error)) from error

    def _say_it_stands_still(self) -> None:
        limit_s = self._plan.limits.dead_after_s
        with (
            contextlib.suppress(OSError),
            self._log.open("a", encoding="utf-8") as log,
        ):  # a full disk: killed all the same
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{when} {self._name} rlhpc.task ERROR stopped by a signal for {limit_s:g} s: killed\n")

    def _temporary_directory(self) -> tuple[Path, Path]:
        """The job's temporary directory on this node, and this process's within it."""
        try:
            try:
                return self._make_temporary_directory()
            except FileNotFoundError:  # an earlier step's last task removed the job's directory between the two lines
                return self._make_temporary_directory()
        except OSError as error:
            raise NotNow(f"no temporary directory: {error}") from error

    def _make_temporary_directory(self) -> tuple[Path, Path]:
        # Without Slurm the supervisor has made one for the whole run; a cleaner of /tmp may have deleted it.
        base = Path(os.environ["TMPDIR"]) if self._plan.is_local else base_directory(self._job.job_id)
        if not base.is_dir() or not self._plan.is_local:
            own_directory(base)
        with contextlib.nullcontext() if self._plan.is_local else _locked(base):
            own = Path(tempfile.mkdtemp(prefix=f"{self._options.role[:1]}{self._replica}-", dir=base))
            self._held = _held(own, waits=True)
        return base, own

    def _command(self, base: Path) -> list[str]:
        options, plan = self._options, self._plan
        if self._is_evaluator:
            words = ["-P", "-m", "launch.cli", "evaluate", str(plan.layout.root), "--follow"]
            return [*_bound(self._part.python, base), *words]
        # -P: else torch would import a profile.py or code.py of the directory of submission.
        words = [*_bound(self._part.python, base), "-P", "-m", "rlhpc.roles", options.role]
        words += ["--run-dir", str(plan.layout.root)]
        words += ["--replica", str(self._replica), "--attempt", str(options.attempt)]
        words += ["--service", self._share.service] if self._share.service else []
        if options.role == "trainer":
            words += ["--num-ranks", str(self._share.num_processes)]
        if options.resume_step is not None:
            words += ["--resume-step", str(options.resume_step)]
        if options.owner and options.role in ("controller", "trainer"):  # the other roles survive attempts
            words += ["--owner", options.owner]
        start = options.start * STARTS_OF_A_STEP + self._starts
        words += ["--incarnation", self._job.incarnation(start)]
        return [*words, "--meet-timeout-s", str(plan.limits.meet_s)]

    @property
    def _niceness(self) -> int:
        return EVALUATOR_NICENESS if self._is_evaluator and self._name not in self._part.visible_devices else 0

    def _progress(self) -> int:
        """Measure of progress, which grows if a start was useful: steps of the run, or its evaluations."""
        if self._is_evaluator:
            return seen(lambda: sum(1 for _ in self._plan.layout.evaluations.glob("*/summary.json")), 0)
        progress = read_progress(self._plan.layout)
        return progress.step if progress is not None else -1

    def _is_gone(self) -> bool:
        """True if the run directory was moved or deleted."""
        return seen(partial(is_absent, self._plan.layout.root), False)

    def _last_words(self) -> str:
        try:
            return last_error_in(self._log)
        except OSError as error:  # the run directory was moved or deleted
            return f"its log cannot be read: {error.strerror}"

    def _write_down(self, status: int, words: str = "", *, is_final: bool = True) -> None:
        if not words:
            words = self._last_words()
        record = ExitRecord(
            name=self._name,
            status=status,
            last_words=words,
            starts=self._starts,
            host=node_name(os.environ),
            job=self._job.name,
            is_final=is_final,
        )
        try:
            patiently(partial(write_exit_record, self._record, record), self._record, is_over=self._is_gone)
        except OSError as error:
            if not self._is_gone():  # else the controller has reported it
                sys.stderr.write(f"rlhpc task: {self._record} not written: {error.strerror or error}\n")


def _bound(python: Sequence[str], base: Path) -> list[str]:
    """Words of the interpreter; for an image, with the job's directory on this node bound, for TMPDIR and caches."""
    if python[0] != "apptainer" or Path("/tmp") in base.parents:  # /tmp is visible in every image
        return [*python]
    return [*python[:2], "--bind", str(base), *python[2:]]


def leave_node(base: Path) -> None:
    """Delete the job's temporary directory on this node after its last process, with files of killed ones."""
    with contextlib.suppress(OSError), _locked(base):  # another task of this node may have done the same
        is_empty = True
        for path in [path for path in base.iterdir() if path.name != "cache"]:
            if (descriptor := _held(path)) is None:
                is_empty = False
                continue
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)
        if is_empty:
            shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Lock a directory, so that no other task deletes it in the block.  Raises FileNotFoundError: one has done so."""
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: there tasks delete nothing of others
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(descriptor), base.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(base))
        yield
    finally:
        os.close(descriptor)


def _held(directory: Path, *, waits: bool = False) -> int | None:
    """Descriptor of a process's directory, locked until it is closed; systemd-tmpfiles does not clean a locked one.

    waits: for a cleaner that has it locked.  None: a living task has it, or there are no locks.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def base_directory(job_id: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the job's directory for temporary files and caches on this node."""
    name = f"rlhpc-{os.getuid()}-{job_id}"  # not the user's name, which a node may not know
    for parent in (environment.get("SLURM_TMPDIR"), environment.get("TMPDIR"), "/tmp"):
        base = Path(parent) / name if parent else None
        if base is not None and len(str(base)) <= LONGEST_TEMPORARY_PATH - 12 and os.access(str(parent), os.W_OK):
            break
    else:
        raise TaskError("no directory for temporary files: /tmp is not writable")
    return base


def own_directory(base: Path) -> Path:
    """Make a directory of mode 0700 if it does not exist.  Raises TaskError: others can reach it."""
    base.mkdir(mode=0o700, exist_ok=True)
    owner = base.lstat()  # stat would accept a link to a directory of ours, which anybody can make
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077 or not stat.S_ISDIR(owner.st_mode):
        raise TaskError(f"{base}: is a link, belongs to another user or is accessible to others; remove it")
    return base


def _before_the_role(parent: int, niceness: int) -> None:
    """Prepare the role's process before its program: Slurm's warning signals must not kill a role without a handler.

    An interrupt waits until its Python has started, which would else end with status 1 (rlhpc/roles/__main__.py).  The
    role dies with this process; once it has started, by the signal that it chooses itself (lifecycle.py).
    """
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    os.nice(niceness)
    die_with(parent)


def _outlive_signals() -> None:
    """Ignore signals meant for the role, die with the supervisor, and adopt the role's orphans."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, it would hide the role's exit status
    for number in REQUESTS:
        signal.signal(number, lambda number, _: _SIGNALS.append(number))  # not SIG_IGN: the role would inherit that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)  # the supervisor has blocked them (steps.py)
    end_with_parent()
    adopt_orphans()


if __name__ == "__main__":
    sys.exit(main())
