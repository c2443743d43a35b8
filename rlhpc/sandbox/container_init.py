"""The first process of a task container, and the warm process that forks it.

    worker ── S (main: a request for each container) ── C (init of the container) ── commands, and what they leave
       └─────────────────────────────────────────────────┘ a socket for each container

A container has a user namespace of one user, a root directory of its own that it may write, and its own processes,
network, IPC and host name.  Its root is an overlay over an unpacked image, whose upper part is a file system in memory
of a fixed size; where the kernel lacks that, a copy in one.  Nothing outlives C, which ends when the worker closes
its socket or ends, when S ends, or when no command has come for a while: with C the kernel ends all its processes and
drops its mounts.

C imports nothing once it is inside, since files there are the policy's.  Python 3.9 and the standard library.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NoReturn, Sequence, Tuple

from rlhpc.sandbox import kernel
from rlhpc.sandbox.kernel import Calls, compile_filter

OWNER = 1_999_999_999  # of roots and containers where the worker is real root: a user that owns nothing else
OVERLAY, COPY = "overlay", "copy"
LONGEST_MESSAGE = 1 << 17
_FLOOD_BYTES = 64 << 20  # a command that prints more is stopped
_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
_STAGE = "/sys"  # exists everywhere; the root is built there
_ROOT = _STAGE + "/root"
_OLD = "/.rlhpc-old"
_DIRECTORIES = {"/proc": 0o555, "/dev": 0o755, "/dev/shm": 0o1777, "/tmp": 0o1777}
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2"}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"
_MOST_OPEN_FILES = 1024
_ATIME = {1024: kernel.MS_NOATIME, 2048: kernel.MS_NODIRATIME, 4096: kernel.MS_RELATIME}  # of statvfs: of mount
_SAFE = kernel.MS_NOSUID | kernel.MS_NOEXEC
_WORTH_A_LOOK_BYTES = 64 << 20  # of all processes; below it, what they share need not be known
_ROOM_BYTES = 16 << 20  # of tests: caches, logs
_LOOK_S = 0.2  # between two looks at the memory of a container's processes
_NICE = 10  # below the roles of the run on this node
_OLDEST_KERNEL = (5, 14)  # counts processes of a user by namespace, and lets a user mount an overlay
_CALLS = Calls(may_execute=True, may_fork=True, is_contained=True)
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


@dataclass(frozen=True)
class ContainerLimits:
    """Limits of one container."""

    processes: int = 64  # and threads, at once
    memory_bytes: int = 1 << 30  # of all processes together, without files
    disk_bytes: int = 256 << 20  # of what is written, which is in memory
    files: int = 1 << 16  # that are written
    idle_s: float = 900.0  # without a command it ends
    has_loopback: bool = False
    keeps_processes: bool = False  # what a command leaves behind runs on until the container ends


# --------------------------------------------------------------------------------------------------------------- server


def main(descriptor: int) -> None:
    """S: fork a container for each request until the other end closes; leaves by os._exit."""
    status = 1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=descriptor) as channel:
        settings = json.loads(channel.recv(LONGEST_MESSAGE))
        answer = {"error": "", "way": ""}
        try:
            user, answer["way"] = _prepared(settings["user"])
        except OSError as error:
            answer["error"] = str(error.strerror or error)
        channel.send(json.dumps(answer).encode())
        while not answer["error"]:
            message, descriptors = _receive(channel)
            if not message:
                break
            _fork_container(json.loads(message), descriptors[0], channel, user, answer["way"])
        status = 0
    os._exit(status)


def _prepared(user: int) -> Tuple[Tuple[int, int], str]:
    """Make this process the parent of containers; user: to become, -1 for none.

    Returns (user and group of containers as seen from outside, OVERLAY or COPY).  Raises OSError if they cannot be.
    """
    release = os.uname().release
    if tuple(int("0" + "".join(filter(str.isdigit, part))) for part in release.split(".")[:2]) < _OLDEST_KERNEL:
        raise OSError(errno.ENOSYS, "Linux %s cannot count the processes of a container; 5.14 can" % release)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the first process of a PID namespace ignores them
        signal.signal(number, signal.SIG_DFL)
    compile_filter(_CALLS)
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        kernel.allow_tracers()
    own = os.geteuid(), os.getegid()
    sys.path.clear()
    gc.collect()
    gc.freeze()
    try:
        _tried(lambda: _try_root(own, OVERLAY))
    except OSError:
        _tried(lambda: _try_root(own, COPY))
        return own, COPY
    return own, OVERLAY


def _fork_container(request: Dict[str, Any], own: int, channel: socket.socket, user: Tuple[int, int], way: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no container waits to be reaped
    try:
        if kernel.fork_into(_NAMESPACES) == 0:
            channel.close()
            _be_container(request, own, user, way)
    except OSError as error:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(own)) as told:
            told.send(json.dumps({"error": str(error)}).encode())
    os.close(own)


def _tried(action: Callable[[], None]) -> None:
    """Run a function in a child in new namespaces.  Raises OSError with its error."""
    ours, theirs = os.pipe()
    child = kernel.fork_into(_NAMESPACES)
    if child == 0:
        try:
            action()
        except OSError as error:
            os.write(theirs, ("%d %s" % (error.errno or errno.EIO, error.strerror or error)).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as said:
        number, _, why = said.read().decode().partition(" ")
    os.waitpid(child, 0)
    if number:
        raise OSError(int(number), why)


def _receive(channel: socket.socket) -> Tuple[bytes, List[int]]:
    numbers = array.array("i")
    room = socket.CMSG_SPACE(numbers.itemsize)
    message, controls, _flags, _address = channel.recvmsg(LONGEST_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in controls:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return message, list(numbers)


# ----------------------------------------------------------------------------------------------------------------- root


def _become_root(user: Tuple[int, int]) -> None:
    """Become root of the new user namespace, which is this user and group outside."""
    os.umask(0o022)
    for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % user[0]), ("gid_map", "0 %d 1" % user[1])):
        with open("/proc/self/" + name, "w") as target:
            target.write(text)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.set_host_name("container")


def _make_root(lower: str, way: str, limits: ContainerLimits, lower_size: Sequence[int]) -> None:
    """Make a root from a directory, of lower_size bytes and files, and go there.  Raises OSError."""
    os.chdir(lower)
    own = kernel.MS_NOSUID | kernel.MS_NODEV
    num_bytes, num_files = lower_size if way == COPY else (0, 0)
    options = "size=%d,nr_inodes=%d,mode=755" % (limits.disk_bytes + num_bytes, limits.files + num_files)
    kernel.mount("tmpfs", _STAGE, "tmpfs", own, options)
    os.mkdir(_ROOT, 0o755)
    if way == OVERLAY:
        for name in ("/upper", "/work"):
            os.mkdir(_STAGE + name, 0o755)
        options = "lowerdir=.,upperdir=%s/upper,workdir=%s/work,userxattr" % (_STAGE, _STAGE)
        kernel.mount("overlay", _ROOT, "overlay", own, options)
    else:
        kernel.mount(_ROOT, _ROOT, flags=kernel.MS_BIND)
        copy_tree(".", _ROOT)
    os.mkdir(_ROOT + _OLD, 0o700)
    kernel.pivot_root(_ROOT, _ROOT + _OLD)
    os.chdir("/")
    for path, mode in _DIRECTORIES.items():
        if not os.path.isdir(path):
            os.mkdir(path)
            os.chmod(path, mode)
    # While the node's is there: the kernel asks for it.  This process is not shown: nobody inside may trace it.
    kernel.mount("proc", "/proc", "proc", own | kernel.MS_NOEXEC, "hidepid=4")
    for path in _DEVICES:
        _show_device(path)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    for path, target in _LINKS.items():
        if not os.path.lexists(path):
            os.symlink(target, path)
    if os.path.isdir("/etc") and not os.path.lexists("/etc/hosts"):
        with open("/etc/hosts", "xb") as hosts:
            hosts.write(_HOSTS)


def _show_device(path: str) -> None:
    """Bind a device of the node: it may be written, but not its times and mode."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    kernel.mount(_OLD + path, path, flags=kernel.MS_BIND)
    has = os.statvfs(path).f_flag  # a user may not take flags from a mount of the node
    kept = sum(flag for bit, flag in _ATIME.items() if has & bit)
    kernel.mount("none", path, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _SAFE | kept)


def copy_tree(source: str, target: str) -> int:
    """Copy a directory's files, links and modes into another that exists; returns the bytes.  Raises OSError.

    Owners, devices and sockets are left out; files with several names have them in the copy, too.
    """
    seen, total, pending = {}, 0, [("", "")]  # type: Dict[Tuple[int, int], str], int, List[Tuple[str, str]]
    while pending:
        here, _ = pending.pop()
        for entry in os.scandir(os.path.join(source, here)):
            inner = os.path.join(here, entry.name)
            new, about = os.path.join(target, inner), entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(about.st_mode):
                os.symlink(os.readlink(entry.path), new)
                continue
            if stat.S_ISDIR(about.st_mode):
                os.mkdir(new)
                pending.append((inner, ""))
            elif stat.S_ISREG(about.st_mode):
                key = about.st_dev, about.st_ino
                if key in seen:
                    os.link(seen[key], new, follow_symlinks=False)
                    continue
                if about.st_nlink > 1:
                    seen[key] = new
                total += _copy_file(entry.path, new)
            elif stat.S_ISFIFO(about.st_mode):
                os.mkfifo(new)
            else:
                continue
            # The owner may always read and write: who unpacks, copies and removes it is not root.
            os.chmod(new, stat.S_IMODE(about.st_mode) & 0o1777 | (0o700 if stat.S_ISDIR(about.st_mode) else 0o600))
            if not stat.S_ISDIR(about.st_mode):
                os.utime(new, ns=(about.st_atime_ns, about.st_mtime_ns))
    return total


def _copy_file(source: str, target: str) -> int:
    taken = 0
    with open(source, "rb") as old, open(target, "xb") as new:
        while sent := os.sendfile(new.fileno(), old.fileno(), taken, 1 << 24):
            taken += sent
    return taken


def _try_root(user: Tuple[int, int], way: str) -> None:
    """Try what a container needs of the kernel, on a root of one file."""
    _become_root(user)
    kernel.mount("tmpfs", "/tmp", "tmpfs", 0, "size=64k")
    os.makedirs("/tmp/root/etc")
    os.mkfifo("/tmp/root/etc/one")
    _make_root("/tmp/root", way, ContainerLimits(disk_bytes=1 << 16, files=64), (0, 0))
    os.unlink("/etc/one")
    os.unlink("/etc/hosts")
    os.rmdir("/etc")
    os.mkdir("/etc")  # which the upper part can only say with extended attributes
    if os.listdir("/etc"):
        raise OSError(errno.EIO, "an overlay shows files that were removed")


# ------------------------------------------------------------------------------------------------------------ container
#
# Messages to C are JSON objects with one key, and C answers each:
#
#     {"run": {argv, env, cwd, time_s, output_bytes}}  →  {status, stopped_for, wall_s, peak_bytes}, then the output
#     {"put": {at, files: [[path, mode, bytes], …], is_fresh}}, with a descriptor of all their bytes  →  {error}
#     {"read": {paths, bytes}}  →  {found: [text or null, …]}


def _be_container(request: Dict[str, Any], own: int, user: Tuple[int, int], way: str) -> NoReturn:
    """C: serve commands until the socket closes, or none has come for idle_s.  Never returns."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        channel = socket.socket(fileno=_only(own))
        limits = ContainerLimits(**request["limits"])
        answer = {"error": ""}
        try:
            _become_root(user)
            _make_root(request["root"], way, limits, request["root_size"])
            for path in request["directories"]:
                os.makedirs(path, exist_ok=True)
            if limits.has_loopback:
                _raise_loopback()
        except OSError as error:
            answer["error"] = str(error)
        kernel.refuse_tracers()
        channel.send(json.dumps(answer).encode())
        if not answer["error"]:
            _Container(channel, limits).serve()
    finally:
        os._exit(0)


def _only(own: int) -> int:
    """Close every descriptor but this one, which becomes the first; the standard ones are null.  Returns it."""
    null = os.open("/dev/null", os.O_RDWR)
    high = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, 32)
    for target in range(3):
        os.dup2(null, target)
    os.dup2(high, 3, inheritable=False)
    os.closerange(4, 1 << 16)
    return 3


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


class _Container:
    """C, after its root is made."""

    def __init__(self, channel: socket.socket, limits: ContainerLimits) -> None:
        self._channel, self._limits = channel, limits
        self._woken, wakes = os.pipe()
        for descriptor in (self._woken, wakes):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def serve(self) -> None:
        """Answer messages until the worker closes the socket, or idle_s have passed without one."""
        while self._has_message():
            message, descriptors = _receive(self._channel)
            if not message:
                return
            ((kind, request),) = json.loads(message).items()
            if kind == "run":
                answer, output = self._run(request)
                self._channel.send(json.dumps(answer).encode())
                self._channel.send(b"+" + output)
            elif kind == "put":
                self._channel.send(json.dumps({"error": _put(request, descriptors[0])}).encode())
            else:
                found = [_read(path, request["bytes"]) for path in request["paths"]]
                self._channel.send(json.dumps({"found": found}).encode())

    def _has_message(self) -> bool:
        """Wait for the next message, reap meanwhile.  False: none came in time."""
        poll, deadline = select.poll(), time.monotonic() + self._limits.idle_s
        poll.register(self._channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(poll.poll(1000 * (min(left_s, _LOOK_S) if self._limits.keeps_processes else left_s)))
            self._reap(0)
            if self._channel.fileno() in ready:
                return True
            if self._limits.keeps_processes and _memory_of_all() > self._limits.memory_bytes:
                self._end_all()
        return False

    def _run(self, request: Dict[str, Any]) -> Tuple[Dict[str, Any], bytes]:
        """Run a command to its end, or to a limit.  Returns the answer, and what it printed."""
        started = time.monotonic()
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        child = os.fork()
        if child == 0:
            _become(request, theirs, self._limits)
        os.close(theirs)
        output = _Output(request["output_bytes"])
        status, stopped_for, peak = self._watch(child, ours, output, started + request["time_s"])
        if stopped_for or not self._limits.keeps_processes:
            self._end_all()
        output.take_all(ours)
        os.close(ours)
        wall_s = time.monotonic() - started
        answer = {"status": status, "stopped_for": stopped_for, "wall_s": wall_s, "peak_bytes": peak}
        return answer, output.text()

    def _watch(self, child: int, ours: int, output: _Output, deadline: float) -> Tuple[int, str, int]:
        """Wait for the end of a command.  Returns (its status, the limit that it has exceeded or "", peak bytes)."""
        poll, peak, look_at = select.poll(), 0, time.monotonic() + _LOOK_S
        for descriptor in (ours, self._woken, self._channel):
            poll.register(descriptor, select.POLLIN)
        while (status := self._reap(child)) is None:
            now = time.monotonic()
            if now >= look_at:
                peak, look_at = max(peak, _memory_of_all()), now + _LOOK_S
            over = now >= deadline, peak > self._limits.memory_bytes, output.num_bytes > _FLOOD_BYTES
            if any(over):
                os.kill(child, signal.SIGKILL)
                return -signal.SIGKILL, ("time", "memory", "output")[over.index(True)], peak
            ready = dict(poll.poll(1000 * max(0.0, min(deadline, look_at) - now)))
            if ours in ready and not output.take(ours):
                poll.unregister(ours)
            if self._channel.fileno() in ready:  # it is silent while a command runs: the worker has gone
                os._exit(0)
        return status, "", peak

    def _reap(self, child: int) -> int | None:
        """Reap what has ended.  Returns the status of `child` if it has."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    found = os.waitstatus_to_exitcode(ended[1])
        return found

    def _end_all(self) -> None:
        """End all processes of the container but this one, the init of their namespace."""
        assert os.getpid() == 1, "anywhere else this would end processes of others"
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


class _Output:
    """Output of a command: its beginning and its end, half of the bytes each."""

    def __init__(self, most_bytes: int) -> None:
        self._half, self._head, self._tail = most_bytes // 2, bytearray(), bytearray()
        self.num_bytes = 0

    def take(self, descriptor: int) -> bool:
        """Read the available bytes.  Returns whether more may come."""
        with contextlib.suppress(BlockingIOError):
            piece = os.read(descriptor, 1 << 16)
            self.num_bytes += len(piece)
            room = self._half - len(self._head)
            self._head += piece[:room]
            self._tail += piece[room:]
            if len(self._tail) > 2 * self._half + (1 << 16):
                del self._tail[: -self._half]
            return bool(piece)
        return True

    def take_all(self, descriptor: int) -> None:
        """Read what is left in the pipe; a process that was kept may hold its other end."""
        before = -1
        while before != self.num_bytes:
            before = self.num_bytes
            self.take(descriptor)

    def text(self) -> bytes:
        """All of it, or both ends and how much lies between."""
        tail = bytes(self._tail[-self._half :]) if self._half else b""
        left_out = self.num_bytes - len(self._head) - len(tail)
        between = b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""
        return bytes(self._head) + between + tail


def _become(request: Dict[str, Any], output: int, limits: ContainerLimits) -> NoReturn:
    """Drop what a command must not have, and execute it."""
    argv, environment = request["argv"], request["env"]
    status = 126
    try:
        os.setsid()
        for target in (1, 2):
            os.dup2(output, target)
        os.closerange(3, 1 << 12)
        with contextlib.suppress(OSError):
            os.chdir(request["cwd"])
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        for what, most in _resources(limits).items():
            highest = resource.getrlimit(what)[1]
            most = most if highest == resource.RLIM_INFINITY else min(most, highest)
            resource.setrlimit(what, (most, most))
        kernel.forbid_new_privileges()
        kernel.drop_bounding_set(kernel.FILE_CAPABILITIES)
        kernel.drop_capabilities(kernel.FILE_CAPABILITIES)
        kernel.install_filter(compile_filter(_CALLS))
        os.execvpe(argv[0], argv, environment)
    except FileNotFoundError:
        os.write(2, ("%s: not found\n" % argv[0]).encode(errors="replace"))
        status = 127
    except BaseException as error:  # noqa: BLE001  whatever it is, the command has not begun
        os.write(2, ("%s: %s\n" % (argv[0], error)).encode(errors="replace"))
    finally:
        os._exit(status)


def _resources(limits: ContainerLimits) -> Dict[int, int]:
    return {
        resource.RLIMIT_NPROC: limits.processes + 1,  # with C
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_NOFILE: _MOST_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 1 << 20,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }


def _memory_of_all() -> int:
    """Bytes of memory of all processes but this one; what they share is counted once."""
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    total = sum(_first_number("/proc/%s/statm" % pid, 1) for pid in pids) * resource.getpagesize()
    if total < _WORTH_A_LOOK_BYTES:
        return total
    return sum(_first_number("/proc/%s/smaps_rollup" % pid, 0) for pid in pids) * 1024


def _first_number(path: str, place: int) -> int:
    """The number at a place of a line: of statm; of smaps_rollup its share of memory (Pss), in KiB."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:  # it has ended
        return 0
    if len(lines) > 2:
        return next((int(line.split()[1]) for line in lines if line.startswith(b"Pss:")), 0)
    return int(lines[0].split()[place]) if lines[0] else 0


def _put(request: Dict[str, Any], source: int) -> str:
    """Put files into a directory, or a fresh one over whatever is there.  Returns why not, "" if they are there."""
    at, files = request["at"], request["files"]
    try:
        with open(source, "rb") as content:
            if request["is_fresh"]:
                _cover(at, sum(num_bytes for _path, _mode, num_bytes in files))
            for path, mode, num_bytes in files:
                target = os.path.join(at, path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as new:
                    new.write(content.read(num_bytes))
                os.chmod(target, mode)
    except OSError as error:
        return str(error)
    return ""


def _cover(at: str, num_bytes: int) -> None:
    """Mount an empty file system over a path, for so many bytes and what tests write beside them."""
    if os.path.lexists(at) and not os.path.isdir(at):
        os.unlink(at)
    os.makedirs(at, exist_ok=True)
    options = "size=%d,mode=755" % (2 * num_bytes + _ROOM_BYTES)
    kernel.mount("tmpfs", at, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _read(path: str, most_bytes: int) -> str | None:
    """The text of a file, at most so many bytes; None: there is none.  A link, a pipe or a device is none."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as file:
            is_plain = stat.S_ISREG(os.fstat(opened).st_mode)
            return file.read(most_bytes).decode(errors="replace") if is_plain else None
    except OSError:
        return None
