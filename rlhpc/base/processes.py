"""Know a process by more than its pid, and have it end together with its parent, by means of the Linux kernel.

Linux only; a no-op on other systems.  Python 3.9 and the standard library.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.base.patience import Deadline

# ----------------------------------------------------------------------------------------------------------- open files
#
# How many files and connections a process may have open.  Standard library.

MAX_OPEN_FILES = 1 << 16


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files as far as allowed, to MAX_OPEN_FILES at most.

    Slurm gives jobs that of the submitting shell, which is usually 1,024.  ZeroMQ accepts whoever connects, and closes
    those without a handshake only after a while, so that as many silent connections would keep a controller from
    opening its own files.  A trainer's rank has a connection to each of the others in every group of gloo.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ------------------------------------------------------------------------------------------------------------- own user
#
# The user that this process runs as, where neither /etc/passwd nor a directory service has to know the uid.
#
# Input: the uid and HOME.  Output: a name, a home, and both for libraries.  Containers, and nodes whose directory
# service does not answer, run processes of uids without an entry.  Python 3.9 and the standard library.


def own_user() -> str:
    """Return the name of the user that this process runs as, whatever the environment says; without one, the uid."""
    return own_name() or str(os.getuid())


def own_name() -> str:
    """Return the name that the system knows this process's uid by; "" if it knows none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def own_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return HOME, or else the home that the system knows; without one, a private directory for temporary files."""
    if home := environment.get("HOME", ""):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return _made_up_home()


def name_nameless_user(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give libraries a name and a home in the environment, if the system knows none for the uid of this process.

    getpass.getuser, which torch's compiler calls, and Path.home raise otherwise, and expanduser leaves "~" as it is.
    """
    if own_name():
        return
    for variable in ("USER", "LOGNAME"):
        environment.setdefault(variable, own_user())
    environment["HOME"] = str(own_home(environment))


def _made_up_home() -> Path:
    """A home per uid; another one if it belongs to another user, since Python runs code found in a home."""
    home = Path(tempfile.gettempdir(), f"rlhpc-home-{os.getuid()}")
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="rlhpc-home-"))
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return home if is_own else Path(tempfile.mkdtemp(prefix="rlhpc-home-"))


# --------------------------------------------------------------------------------------------------------- python child
#
# Start Python processes that import what this one can: reward workers, agents, trials of the user's own code.
#
# They get this process's import path, so that what was found when the configuration was checked is found again.  They
# do not search the current directory (-P): torch would import a script there that is called profile or code in place
# of the standard library's module.


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the words that run this module in a process of its own."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**settings: str) -> dict[str, str]:
    """Return this process's variables with its import path and one thread for OpenMP; `settings` replace them."""
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return os.environ | own | settings


def keep_pipes() -> tuple[int, int]:
    """Return descriptors of the original standard input and output, replaced here by an empty input and the log."""
    kept = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return kept


def stay_at(numbers: Iterable[int]) -> None:
    """Do nothing at these signals, which Slurm sends to every process of a job: another process knows when to go.

    A handler that does nothing, not SIG_IGN: that would be inherited by programs which this process starts.
    """
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)


@contextmanager
def variables_set(variables: Mapping[str, str], *others: str) -> Iterator[None]:
    """Set environment variables for a block, and restore them afterwards, with others that the block may set."""
    before = {name: os.environ.get(name) for name in (*variables, *others)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ----------------------------------------------------------------------------------------------------- process identity
#
# Identify a process on a machine, robust against reused pids and changed clocks.
#
# Input: a pid.  Output: ProcessIdentity, which can be stored and later checked, by any process on any machine, for
# whether that process is alive.  Linux: /proc.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GONE_STATES = ("Z", "X", "x")  # ended, but not yet reaped by its parent
_SUSPENDED_STATES = ("T", "t")


@dataclass(frozen=True)
class ProcessIdentity:
    """One process in one boot of one machine."""

    host: str
    boot_id: str  # differs between machines, and after a reboot
    pid: int
    start_ticks: int  # from boot to process start; not affected by changes of the clock

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identity of a process on this machine; None: there is none, or it has ended."""
        found = _state_and_ticks(pid)
        if found is None or found[0] in _GONE_STATES:
            return None
        return cls(socket.gethostname(), boot_id(), pid, found[1])

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """This process's identity."""
        identity = cls.of(os.getpid())
        assert identity is not None
        return identity

    @classmethod
    def parse(cls, document: dict[str, Any]) -> ProcessIdentity:
        """Inverse of to_json.  Raises KeyError or ValueError."""
        return cls(str(document["host"]), str(document["boot_id"]), int(document["pid"]), int(document["start_ticks"]))

    def to_json(self) -> dict[str, Any]:
        """Make a JSON object for a file."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """True if it belongs to this boot of this machine, so that its state is visible here."""
        return self.boot_id == boot_id()

    @property
    def is_alive(self) -> bool:
        """True if exactly this process exists on this machine, running or suspended."""
        found = ProcessIdentity.of(self.pid) if self.is_here else None
        return found is not None and found.start_ticks == self.start_ticks

    @property
    def is_suspended(self) -> bool:
        """True if it is alive on this machine and stopped by a signal, as by Ctrl-Z, or by a debugger."""
        found = _state_and_ticks(self.pid) if self.is_alive else None
        return found is not None and found[0] in _SUSPENDED_STATES


def boot_id() -> str:
    """Id of the current boot of this machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _state_and_ticks(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: another user's, on a site with hidepid
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name in brackets may hold anything, brackets too
    return fields[0], int(fields[19])


# --------------------------------------------------------------------------------------------------------- parent death

_LIBC = ctypes.CDLL(None)  # loaded here: a child between fork and exec should do as little as possible
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_KILLED_S, _POLL_S = 5.0, 0.01  # for the kernel to end a killed process
_LOOK_S = 0.2  # polling interval for stopped children


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to the calling process when the thread that started it ends.

    It covers neither grandparents nor a parent that had ended before: see die_with.
    """
    with suppress(OSError, AttributeError):  # no prctl: not Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Be sent this signal when `parent`, the process that started this one, ends; end now if it has."""
    end_with_parent(number)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, even in another session."""
    with suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_child(pid: int, standstill_s: float = float("inf"), say: Callable[[], object] = lambda: None) -> int:
    """Wait until this child has ended, and reap all others that end meanwhile.

    standstill_s: kill it once a signal has kept it stopped for this long; time in which this process was stopped too,
    as in a suspended job, hardly counts.  say: called before the kill.
    Returns its exit status, negative for a signal.
    """
    stopped_s = -1.0  # negative: it is not stopped
    while True:
        is_stopped = stopped_s >= 0
        found, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED | (os.WNOHANG if is_stopped else 0))
        if not found:
            time.sleep(_LOOK_S)
            stopped_s += _LOOK_S
            if stopped_s >= standstill_s:
                say()
                os.kill(pid, signal.SIGKILL)
                stopped_s = -1.0
        elif found == pid and os.WIFSTOPPED(status):
            stopped_s = 0.0
        elif found == pid and os.WIFCONTINUED(status):
            stopped_s = -1.0
        elif found == pid:
            return os.waitstatus_to_exitcode(status)


def end_children() -> None:
    """Kill and reap every child of this process, those adopted meanwhile too.

    A child that the kernel does not end within seconds (a hanging driver) is left behind.
    """
    deadline = Deadline(_KILLED_S)
    while not deadline.is_over and (children := own_children()):
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def own_children() -> list[int]:
    """Return the children of all threads of this process; none if the kernel does not list them."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


# ------------------------------------------------------------------------------------------------------- tied programs
#
# A program that ends with the process that started it, however that ends, together with all that it has started.
#
# A small process stands between the two: it adopts what the program leaves behind, in other sessions too, and kills it
# all when the program ends, when it is told to end, or when its parent is gone.

_TIED = "import sys; sys.path.insert(0, sys.argv[1]); from rlhpc.base.processes import run_tied; run_tied(sys.argv[2:])"


def tied_command(words: Sequence[str]) -> list[str]:
    """Return the words that run a program tied to this process; its variables and descriptors are its own."""
    package = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-c", _TIED, package, str(os.getpid()), *words]


def run_tied(words: Sequence[str]) -> None:
    """Run words[1:] until it ends, or words[0], the pid of this process's parent; exit with its status."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    adopt_orphans()
    die_with(int(words[0]), signal.SIGTERM)
    try:
        program = subprocess.Popen(words[1:], preexec_fn=end_with_parent)  # this process has one thread
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):  # the other ends shall see when the program closes its own
            os.dup2(nothing, number)
        status = wait_for_child(program.pid)
    finally:
        end_children()
    sys.exit(status if status >= 0 else 128 - status)
