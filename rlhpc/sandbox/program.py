"""Become the program: drop all privileges that it must not have, then run it.  Python 3.9 and the standard library."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import resource
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Tuple

from rlhpc.sandbox import kernel
from rlhpc.sandbox.filter import Calls, compile_filter
from rlhpc.sandbox.limits import Limits
from rlhpc.sandbox.root import BOX

if TYPE_CHECKING:
    from rlhpc.sandbox.run_one import Place

_MOST_THREADS = 64
_NAME = "program.py"
_BINARY = BOX + "/program"
_FIRST_OTHER = 3
# The server's own, so that no program waits for it.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": BOX, "TMPDIR": BOX, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Program:
    """What to run; descriptors are the server's."""

    kind: str  # "python": text, run here; "compiler": the same, may start others; "binary": executed from BOX
    arguments: Tuple[str, ...]  # beside its name
    source: int
    standard: Tuple[int, int, int]
    results: int  # -1: none
    user: int  # -1: stay who we are


def become(program: Program, told: int, limits: Limits, place: Place) -> NoReturn:
    """Never returns.  Writes "+" to `told` when every layer is on, else what went wrong."""
    try:
        kernel.forbid_new_privileges()
        if place.files >= 0:  # first, since all other descriptors are closed next
            kernel.restrict_self(place.files)
        source = _take_descriptors(program, told)
        limits.apply()
        if place.has_namespaces:  # counted in this namespace, or for a user that nobody else is
            resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_THREADS, _MOST_THREADS))
        _give_up_privileges(program)
        calls = calls_of(program.kind, only_process=0 if place.has_namespaces else os.getpid())
        if place.has_seccomp:
            kernel.install_filter(compile_filter(calls))
    except BaseException as error:  # noqa: BLE001  whatever it is, the program has not begun
        os.write(_FIRST_OTHER, ("%s: %s" % (type(error).__name__, error)).encode()[:1000])
        os._exit(1)
    os.write(_FIRST_OTHER, b"+")
    if program.kind != "binary":
        os.close(_FIRST_OTHER)
        _run_python(source, program.arguments)
    os.set_inheritable(_FIRST_OTHER, False)
    try:
        os.execve(_BINARY, [_BINARY, *program.arguments], dict(ENVIRONMENT))
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(127)


def calls_of(kind: str, *, only_process: int) -> Calls:
    """only_process: 0 where the program has namespaces of its own."""
    return Calls(
        may_execute=kind != "python",
        may_fork=kind == "compiler",
        may_change_files=only_process == 0,
        only_process=only_process,
    )


def _take_descriptors(program: Program, told: int) -> bytes:
    """Put the program's in place and close the rest.  Returns the text of a Python program; a binary goes to BOX."""
    with os.fdopen(program.source, "rb") as text:
        source = text.read()
    if program.kind == "binary":
        with open(_BINARY, "wb") as binary:
            binary.write(source)
        os.chmod(_BINARY, 0o755)
    # Above all targets first, so that none is overwritten.
    high = [_above(descriptor) for descriptor in (*program.standard, told, program.results) if descriptor >= 0]
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target, inheritable=True)
    os.closerange(len(high), 1 << 16)
    return source


def _above(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 32)


def _give_up_privileges(program: Program) -> None:
    if program.user >= 0:
        os.setgroups([])
        os.setresgid(program.user, program.user, program.user)
        os.setresuid(program.user, program.user, program.user)
    kernel.drop_capabilities()
    kernel.die_with_parent(signal.SIGKILL)
    if program.kind != "binary":
        kernel.refuse_tracers()
    os.umask(0o077)


def _run_python(source: bytes, arguments: Tuple[str, ...]) -> NoReturn:
    """As `python program.py ARGUMENT…` does, in the interpreter that is here already."""
    # Kept, since taking them apart would cost time.
    _hidden = [sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rlhpc"]
    module: Any = types.ModuleType("__main__")
    module.__file__ = _NAME
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [_NAME, *arguments]
    gc.enable()
    code = 0
    try:
        exec(compile(source, _NAME, "exec"), module.__dict__)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:  # noqa: BLE001  what a program raises is its end, told on standard error as python does
        code = 1
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  a closed or a broken output
        code = code or 120
    os._exit(code & 0xFF)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write("%s\n" % (end.code,))
    sys.stderr.flush()
    return 1
