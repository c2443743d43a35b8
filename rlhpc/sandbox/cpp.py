"""C++ in the sandbox: find a node's compiler, and compile programs, in the sandbox and within limits.

Input: the text of a program.  Output: Compiled: the binary, which `Sandbox.run(…, kind="binary")` runs, or the
compiler's error, which is the program's fault.  Raises SandboxError if there is no compiler.  A binary needs a file
system of its own, which only a node with namespaces gives.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhpc.protocol.errors import SandboxError
from rlhpc.sandbox import compile_program
from rlhpc.sandbox.client import MIB, FinishedProgram, ProgramLimits, Sandbox

COMPILERS = ("g++", "clang++")  # the first that exists
FLAGS = ("-O2", "-std=c++17")
_FEW_COMPLAINTS = "-fmax-errors=3", "-ferror-limit=3"  # of g++, of clang++
_BOX_BYTES = 64 * MIB  # of what the compiler writes
_BINARY_BYTES = 16 * MIB
_TELLING = ("error:", "undefined reference")  # the compiler, the linker
_SHOWN_CHARACTERS = 200
_VERSION_S = 30.0
_HARNESS = Path(compile_program.__file__).read_bytes()
_TRIAL = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n << std::endl; }\n"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling a program."""

    binary: bytes
    why_not: str  # "" if there is a binary


def find_compiler(wanted: Sequence[str]) -> tuple[str, ...]:
    """The compiler and its options: `wanted`, or the first of COMPILERS.  Raises SandboxError: there is none."""
    names = wanted[:1] or COMPILERS
    for name in names:
        if path := shutil.which(name):
            return (path, *(wanted[1:] or FLAGS))
    raise SandboxError(
        f"sandbox.languages has 'cpp', and there is no {' or '.join(names)} on PATH: install a compiler (package g++ "
        "or clang) or load its module on nodes of reward services, name one in sandbox.cpp_compiler, or leave 'cpp' out"
    )


@cache
def version_of(compiler: str) -> str:
    """The first line of `compiler --version`; "" if there is none."""
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip().partition("\n")[0]


def compile_limits(cpu_s: float, memory_bytes: int) -> ProgramLimits:
    """Limits of a compiler and its descendants; wall time is twice the processor time."""
    return ProgramLimits(
        cpu_s=cpu_s, wall_s=2 * cpu_s, memory_bytes=memory_bytes, box_bytes=_BOX_BYTES, output_bytes=_BINARY_BYTES
    )


def compile_cpp(sandbox: Sandbox, compiler: Sequence[str], program: bytes, limits: ProgramLimits) -> Compiled:
    """Compile a program in the sandbox.  Raises SandboxError if the sandbox fails."""
    words = (*compiler, _FEW_COMPLAINTS["clang" in Path(compiler[0]).name])
    run = sandbox.run(_HARNESS, program, limits, kind="compiler", arguments=words, wants_results=True)
    if run.stopped_for or run.status or not run.results:
        return Compiled(b"", _complaint(run))
    return Compiled(run.results, "")


def try_compiler(sandbox: Sandbox, compiler: Sequence[str], limits: ProgramLimits) -> None:
    """Compile a small program and run it.  Raises SandboxError with the fault and the remedy."""
    if sandbox.layers.why_not.get("namespaces"):
        raise SandboxError(
            "sandbox.languages has 'cpp', and a binary needs a file system of its own, which this node's sandbox "
            f"({sandbox.layers.described()}) does not give: leave 'cpp' out, or allow unprivileged user namespaces"
        )
    made = compile_cpp(sandbox, compiler, _TRIAL.encode(), limits)
    if why := made.why_not or _fault_of_trial(sandbox.run(made.binary, b"21", ProgramLimits(), kind="binary")):
        raise SandboxError(
            f"{compiler[0]} does not work in the sandbox: {why}; if it lies outside of /usr, name the directories that "
            "it reads in sandbox.readable_paths, or name another in sandbox.cpp_compiler"
        )


def _fault_of_trial(run: FinishedProgram) -> str:
    """Fault of the trial; "": none."""
    if run.stdout == b"42\n":
        return ""
    said = run.stderr.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
    return said or f"its binary ended with status {run.status}"


def _complaint(run: FinishedProgram) -> str:
    """Reason why there is no binary, for people: the first error, without paths."""
    if run.stopped_for:
        return f"too much {run.stopped_for}"
    lines = run.stderr.decode(errors="replace").splitlines()
    told = [line for line in lines if any(word in line for word in _TELLING)] or lines
    return (told[0] if told else f"the compiler ended with status {run.status}")[:_SHOWN_CHARACTERS]
