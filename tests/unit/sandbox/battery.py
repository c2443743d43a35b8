"""Run every hostile program and watch from outside.  Prints JSON: what each has achieved, "" for nothing.

`python battery.py STRENGTH|cpp|container [NAME…]`: a process of its own, so that it can be started as another user, or
where namespaces are forbidden.  The standard library only.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from string import Template

sys.path.insert(0, str(Path(__file__).parents[3]))

from rlhpc.protocol.errors import SandboxError
from rlhpc.sandbox import kernel
from rlhpc.sandbox.client import MIB, FinishedProgram, ProgramLimits, Sandbox, SandboxSettings
from rlhpc.sandbox.cpp import compile_cpp, compile_limits, find_compiler
from rlhpc.sandbox.server import USERS, first_user

sys.path.insert(0, str(Path(__file__).parent))
import hostile

LIMITS = ProgramLimits(cpu_s=1.0, wall_s=3.0, memory_bytes=256 * MIB, box_bytes=8 * MIB, output_bytes=1 * MIB)
SECRET = "the-secret-outside"
BUSY_S = 60.0  # on the clock: for what has to come to its end, also on a busy machine
COMPILER = replace(compile_limits(cpu_s=2.0, memory_bytes=1 << 30), wall_s=BUSY_S)
STOPPED = hostile.STOPPED | hostile.CPP_STOPPED
STATUS = hostile.STATUS | hostile.CPP_STATUS
AT_MOST = hostile.AT_MOST | hostile.CPP_AT_MOST
BASIC_MAY = {"thread_bomb"}  # bounded by memory only


class Outside:
    """What programs must neither see nor change."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path) -> None:
        self.directory, self.secret = directory / "open", directory / "secret"
        self.directory.mkdir()
        self.directory.chmod(0o777)
        self.secret.write_text(SECRET)
        self.secret.chmod(0o666)
        victim = [sys.executable, "-S", "-c", "import time; time.sleep(3000)", SECRET]
        self.victim = stack.enter_context(subprocess.Popen(victim, env={"VICTIM": SECRET}))
        stack.callback(self.victim.kill)
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.abstract, self.unix = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self.abstract.bind(f"\0rlhpc-{os.getpid()}")
        self.unix.bind(str(directory / "socket"))
        for listener in (self.tcp, self.udp, self.abstract, self.unix):
            stack.enter_context(listener)
            listener.setblocking(False)
        self.abstract.listen()
        self.unix.listen()
        self.names = {
            "TCP": self.tcp.getsockname()[1], "UDP": self.udp.getsockname()[1], "VICTIM": self.victim.pid,
            "ABSTRACT": f"rlhpc-{os.getpid()}", "UNIX": directory / "socket", "SECRET": self.secret,
            "DIRECTORY": self.directory,
        }  # fmt: skip
        self.before = self.state()

    def state(self) -> tuple[object, ...]:
        status = self.secret.stat()
        process = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()
        limits = Path(f"/proc/{self.victim.pid}/limits").read_text()
        return (
            (status.st_mode, status.st_nlink, status.st_mtime_ns, self.secret.read_text()),
            [path.name for path in self.directory.iterdir()],
            ("stopped" if process[0] in "TZXt" else "", process[16], limits, os.sched_getaffinity(self.victim.pid)),
            (os.getpriority(os.PRIO_PROCESS, 0), socket.gethostname()),
        )

    def what_happened(self) -> str:
        """Since the start."""
        for name, listener in (("tcp", self.tcp), ("abstract", self.abstract), ("unix", self.unix)):
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                return f"a connection came in over {name}"
        with contextlib.suppress(BlockingIOError):
            return f"a datagram came in: {self.udp.recv(100)!r}"
        after = self.state()
        return "" if after == self.before else f"{self.before} became {after}"


def limits_of(name: str) -> ProgramLimits:
    """Of a program."""
    return replace(LIMITS, wall_s=BUSY_S) if name in STATUS else LIMITS


def achievement(name: str, run: FinishedProgram, outside: Outside, strength: str) -> str:
    """What a program has reached; "" if nothing."""
    output = run.stdout + run.stderr
    for word in (SECRET, "root:x:0", *(["ESCAPED"] if not run.stopped_for else [])):
        if word in output.decode(errors="replace").replace('print("ESCAPED', "").replace("'echo ESCAPED'", ""):
            return f"it printed {word}: {output[-300:]!r}"
    if any(word in run.stderr for word in (b"SyntaxError", b"NameError", b"AttributeError")):
        return f"the program is no program: {run.stderr[-300:]!r}"
    if name in STOPPED and run.stopped_for not in STOPPED[name]:
        return f"not stopped: {run}"
    if name in STATUS and run.status != STATUS[name]:
        return f"its exit status became {run.status}: {output[-300:]!r}"
    if name in AT_MOST and not (strength == "basic" and name in BASIC_MAY):
        last = run.stdout.split()[-1] if run.stdout.split() else b""
        if last.isdigit() and int(last) > AT_MOST[name]:
            return f"it made {last!r}"
        if strength == "strong" and not last.isdigit() and not run.stopped_for:
            return f"it said nothing: {run}"
    if (
        run.peak_bytes > LIMITS.memory_bytes + 64 * MIB
        or len(output) > 3 * MIB
        or run.wall_s > limits_of(name).wall_s + 5
    ):
        return f"it used too much: {run.peak_bytes} bytes, {run.wall_s} s, {len(output)} bytes of output"
    return outside.what_happened()


def interpreted(name: str, outside: Outside, sandbox: Sandbox) -> str:
    """What a program in Python achieves."""
    text = hostile.PRELUDE + Template(hostile.PROGRAMS[name]).safe_substitute(outside.names)
    run = sandbox.run(text.encode(), b"input", limits_of(name))
    if len(sys.argv) > 2:
        print(run, file=sys.stderr)
    return achievement(name, run, outside, sandbox.layers.strength)


def compiled(name: str, outside: Outside, sandbox: Sandbox) -> str:
    """What a program in C++ achieves, or what a text makes of the compiler."""
    is_text = name in hostile.TEXTS
    text = hostile.TEXTS[name] if is_text else hostile.HEAD + hostile.CPP_PROGRAMS[name]
    made = compile_cpp(sandbox, find_compiler(()), Template(text).safe_substitute(outside.names).encode(), COMPILER)
    if made.why_not and not is_text:
        return f"the program is no program: {made.why_not}"
    if SECRET.encode() in made.binary or SECRET in made.why_not:
        return f"the compiler has read {SECRET}: {made.why_not}"
    if made.why_not:
        return outside.what_happened()
    run = sandbox.run(made.binary, b"input", limits_of(name), kind="binary")
    if b"ESCAPED" in run.stdout:  # also where it was stopped after that, like who could fork
        return f"it printed ESCAPED: {run.stdout[-300:]!r}"
    return achievement(name, run, outside, "strong")


def alone(name: str, outside: Outside) -> str:
    """What a program achieves without any sandbox: that this file sees it."""
    text = hostile.PRELUDE + Template(hostile.PROGRAMS[name]).safe_substitute(outside.names)
    run = subprocess.run(
        [sys.executable, "-c", text], input=b"input", capture_output=True, cwd=outside.directory.parent
    )
    finished = FinishedProgram(run.returncode, "", run.stdout, run.stderr, 0.0, 0.0, 0)
    seen = achievement(name, finished, outside, "strong")
    deadline = time.monotonic() + BUSY_S  # a signal may take a while
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
        seen = outside.what_happened()
    outside.before = outside.state()
    return seen


def processes_of(server: int) -> list[int]:
    """Children of the server, and processes of the ids that it gives to programs."""
    deadline = time.monotonic() + BUSY_S  # the one that has answered is on its way out
    while (found := _processes_of(server)) and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def _processes_of(server: int) -> list[int]:
    found = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    users = range(first_user(server), first_user(server) + USERS)  # of other servers, other ids
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid in users and (directory / "cmdline").read_text():
                found.append(int(directory.name))
    return found


def become_root_of_a_container() -> None:
    """As `apptainer --fakeroot` and rootless engines make it: user 0, the owner of the node's files, and no other."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)


def forbid_namespaces() -> None:
    """For this process and its children, as a node's administrator would."""
    become_root_of_a_container()
    for kind in ("user", "mnt", "net", "ipc", "uts", "pid"):
        Path(f"/proc/sys/user/max_{kind}_namespaces").write_text("0")


def main(strength: str, names: list[str]) -> None:
    if strength in ("refused", "basic"):
        forbid_namespaces()
    if strength == "container":
        become_root_of_a_container()
        strength = "strong"
    if strength == "refused":
        try:
            Sandbox().start()
        except SandboxError as error:
            print(json.dumps({"strength": "refused", "found": {"refused": str(error)}}))
        return
    found = {}
    os.environ["OUTSIDE"] = SECRET
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.chmod(0o755)
        outside = Outside(stack, directory)
        if strength == "control":
            print(json.dumps({"strength": "control", "found": {name: alone(name, outside) for name in names}}))
            return
        is_cpp = strength == "cpp"
        sandbox = Sandbox(SandboxSettings(require="strong" if is_cpp else strength))  # type: ignore[arg-type]
        layers = sandbox.start()
        stack.callback(sandbox.close)
        for name in names or ([*hostile.CPP_PROGRAMS, *hostile.TEXTS] if is_cpp else hostile.PROGRAMS):
            server = sandbox.server_pid
            try:
                found[name] = (compiled if is_cpp else interpreted)(name, outside, sandbox)
                if found[name]:
                    outside.before = outside.state()
            except SandboxError as error:
                found[name] = f"it broke the sandbox: {error}"
            if sandbox.server_pid == server and (left := processes_of(server)) and not os.environ.get("SHARED"):
                found[name] = found[name] or f"processes are left: {left}"
        time.sleep(0.2)
        found["afterwards"] = outside.what_happened()
    print(json.dumps({"strength": layers.strength, "found": found}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
