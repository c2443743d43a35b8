"""Parts shared by code tasks: limits beside a reference, the program in a completion, and the sandbox that runs it.

In this file: limits of a reference; the last fenced block; the sandbox of this reward worker, with its run's settings.

A worker reads the settings from its environment (VARIABLE), which the service sets.  The sandbox starts with the first
program; if it fails, that is a verifier error, and the next program starts another.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from rlhpc.config.tables_services import Language, SandboxConfig
from rlhpc.sandbox.client import FinishedProgram, Kind, Layers, ProgramLimits, Sandbox, SandboxSettings
from rlhpc.sandbox.cpp import compile_cpp, compile_limits, find_compiler, try_compiler, version_of

# ---------------------------------------------------------------------------------------------------------- code limits
#
# Language, limits and tolerance in the reference of a code task, beside its tests.
#
#     {"inputs": […], "outputs": […], "language": "cpp", "time_limit_s": 2.0, "memory_limit_bytes": 268435456,
#      "tolerance": 1e-4}
#
# Limits of a record are at most those of the run ([sandbox]), from which memory and time are planned.

_LANGUAGES: tuple[Language, ...] = get_args(Language)


@dataclass(frozen=True, slots=True)
class OwnLimits:
    """Language, limits and tolerance of one record; empty fields are not set."""

    language: Language | None = None
    cpu_s: float = 0.0  # of one test
    memory_bytes: int = 0
    tolerance: float | None = None  # of numbers, relative where they are above 1; 0: none

    def languages(self, of_run: tuple[Language, ...]) -> tuple[Language, ...]:
        """Languages in which the record's programs may be written."""
        return of_run if self.language is None else (self.language,)


def own_limits(reference: Mapping[str, Any], task: str) -> OwnLimits:
    """Read a record's own limits.  Raises ValueError for an illegal value."""
    language, cpu_s, memory = (reference.get(key) for key in ("language", "time_limit_s", "memory_limit_bytes"))
    if language is not None and language not in _LANGUAGES:
        raise ValueError(f"the reference of {task}: language={language!r}; legal: {', '.join(map(repr, _LANGUAGES))}")
    if cpu_s is not None and (isinstance(cpu_s, bool) or not isinstance(cpu_s, int | float) or not 0 < cpu_s < 1e6):
        raise ValueError(f"the reference of {task}: time_limit_s={cpu_s!r}; legal: seconds above 0")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0):
        raise ValueError(f"the reference of {task}: memory_limit_bytes={memory!r}; legal: a whole number above 0")
    if (tolerance := reference.get("tolerance")) is not None:
        is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
        if not is_number or not 0 <= tolerance < 1:
            raise ValueError(
                f"the reference of {task}: tolerance={tolerance!r}; legal: 0, for none, or a number below 1"
            )
        tolerance = float(tolerance)
    return OwnLimits(language, float(cpu_s or 0.0), memory or 0, tolerance)


def refuse_above(own: OwnLimits, sandbox: SandboxConfig, task: str) -> None:
    """Raise ValueError for a record whose limits are above the run's."""
    if own.language is not None and own.language not in sandbox.languages:
        raise ValueError(
            f"the reference of {task}: language={own.language!r} is not in sandbox.languages={list(sandbox.languages)}"
        )
    if own.cpu_s > sandbox.cpu_s:
        raise ValueError(
            f"the reference of {task}: time_limit_s={own.cpu_s:g} is above sandbox.cpu_s={sandbox.cpu_s:g}; legal: at "
            "most that, or a larger sandbox.cpu_s"
        )
    if own.memory_bytes > sandbox.memory_bytes:
        raise ValueError(
            f"the reference of {task}: memory_limit_bytes={own.memory_bytes} is above sandbox.memory_bytes="
            f"{sandbox.memory_bytes}; legal: at most that, or a larger sandbox.memory_bytes"
        )


# -------------------------------------------------------------------------------------------------------- fenced blocks
#
# The last fenced block of a completion, which holds its program or its document.
#
# A fence is a line of three backticks, indented by at most three blanks; the first word behind an opening one is the
# block's mark.  A block ends with the first line after it that is a fence and nothing else.  Lines may end as on
# Windows; returned lines end in a line feed.  Each line is read once: a completion may consist of opening fences.

_OPENING = re.compile(r" {0,3}```[ \t]*([\w+-]*)")
_CLOSING = re.compile(r" {0,3}```[ \t]*")


def last_block(text: str) -> tuple[str, str] | None:
    """Return the last block's mark and lines; None if no block is closed."""
    lines = text.replace("\r\n", "\n").split("\n")
    found: tuple[str, int, int] | None = None
    opening: re.Match[str] | None = None
    begin = 0
    for number, line in enumerate(lines):
        if opening is None:
            opening, begin = _OPENING.match(line), number + 1
        elif _CLOSING.fullmatch(line):
            found, opening = (opening[1], begin, number), None
    if found is None:
        return None
    mark, begin, end = found
    return mark, "".join(f"{line}\n" for line in lines[begin:end])


# ----------------------------------------------------------------------------------------------------------- code place

VARIABLE = "RLHPC_SANDBOX"
_MARKS: dict[Language, tuple[str, ...]] = {
    "python": ("python", "py", "python3"),
    "cpp": ("cpp", "c++", "cc", "cxx", "c++17", "c++20"),
}
_NAMES: dict[Language, str] = {"python": "Python", "cpp": "C++"}
_SHOWN_CHARACTERS = 160


def environment_of(sandbox: SandboxConfig) -> dict[str, str]:
    """Environment variables with which a reward worker runs programs as configured."""
    return {VARIABLE: sandbox.model_dump_json()}


def check_sandbox(sandbox: SandboxConfig, *, is_needed: bool) -> Layers | None:
    """Try the sandbox, and the compiler, on this node if they are needed.

    Raises SandboxError if the sandbox is weaker than required, or the compiler is missing or does not work.
    """
    if not is_needed:
        return None
    with Sandbox(_settings(sandbox)) as tried:
        if sandbox.compiles:
            try_compiler(tried, find_compiler(sandbox.cpp_compiler), _limits_of_compiler(sandbox))
        return tried.layers


def described_languages(sandbox: SandboxConfig) -> str:
    """Languages of programs, for people, with the compiler of this node.  Raises SandboxError as check_sandbox."""
    if not sandbox.compiles:
        return "Python"
    path, *options = find_compiler(sandbox.cpp_compiler)
    version = version_of(path)
    by = " ".join([path, *options]) + (f" ({version})" if version else "")
    return " and ".join(f"C++ by {by}" if name == "cpp" else _NAMES[name] for name in sandbox.languages)


@dataclass(frozen=True, slots=True)
class WrittenProgram:
    """The program in a completion."""

    language: Language
    text: str


def executable(program: WrittenProgram, sandbox: Sandbox, settings: SandboxConfig) -> tuple[bytes, Kind, str]:
    """(program for the sandbox, its kind, why it cannot run: "" if it can).  Raises SandboxError."""
    text = program.text.encode(errors="replace")
    if program.language == "python":
        return text, "python", ""
    compiler = find_compiler(settings.cpp_compiler)
    made = compile_cpp(sandbox, compiler, text, _limits_of_compiler(settings))
    return made.binary, "binary", made.why_not


@cache
def place() -> tuple[Sandbox, SandboxConfig]:
    """The sandbox of this process, started with its first program, and its settings."""
    settings = SandboxConfig.model_validate(json.loads(os.environ.get(VARIABLE, "{}")))
    return Sandbox(_settings(settings)), settings


def limits_of(
    settings: SandboxConfig, wall_s: float, own: OwnLimits | None = None, *, wanted_bytes: int = 0
) -> ProgramLimits:
    """Limits of one program.

    wall_s: rest of the completion's time; own: the record's limits; wanted_bytes: approximate length of the right
    output; a program may write twice as much.
    """
    own = own or OwnLimits()
    return ProgramLimits(
        cpu_s=own.cpu_s or settings.cpu_s,
        wall_s=wall_s,
        memory_bytes=own.memory_bytes or settings.memory_bytes,
        output_bytes=max(ProgramLimits.output_bytes, 2 * wanted_bytes),
    )


def last_program(completion: str, languages: Sequence[Language] = ("python",)) -> WrittenProgram | None:
    """Return the last fenced block if it is in one of these languages; None if there is none, or it is not closed."""
    mark, text = last_block(completion) or ("", "")
    for language in languages:
        if mark.lower() in _MARKS[language]:
            return WrittenProgram(language, text)
    return None


def no_program(languages: Sequence[Language]) -> str:
    """The detail of a completion without a program."""
    return f"the last fenced block is no {' or '.join(_NAMES[language] for language in languages)} program"


def failure(run: FinishedProgram) -> str:
    """Reason why a run has failed, for people; "" if it ended well."""
    if run.stopped_for:
        return f"too much {run.stopped_for}"
    if run.status == 0:
        return ""
    last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2][:_SHOWN_CHARACTERS]
    return (f"signal {-run.status}" if run.status < 0 else f"exit status {run.status}") + (f": {last}" if last else "")


def _limits_of_compiler(sandbox: SandboxConfig) -> ProgramLimits:
    return compile_limits(sandbox.compile_s, sandbox.compile_memory_bytes)


def _settings(sandbox: SandboxConfig) -> SandboxSettings:
    return SandboxSettings(sandbox.require, sandbox.python, sandbox.readable_paths)
