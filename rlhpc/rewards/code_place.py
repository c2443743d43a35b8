"""The sandbox of this reward worker, in which the code of completions runs, with the settings of its run.

A worker learns the settings from its environment (VARIABLE), which the service sets.  The sandbox starts with the first
program; one that fails is a verifier error, and the next program starts another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlhpc.config_sandbox import Language, SandboxConfig
from rlhpc.rewards.code_limits import OwnLimits
from rlhpc.rewards.fenced_blocks import last_block
from rlhpc.sandbox.client import Kind, Layers, Sandbox, SandboxSettings
from rlhpc.sandbox.cpp import compile_cpp, compile_limits, find_compiler, try_compiler, version_of
from rlhpc.sandbox.limits import Finished, Limits

VARIABLE = "RLHPC_SANDBOX"
_MARKS: dict[Language, tuple[str, ...]] = {
    "python": ("python", "py", "python3"),
    "cpp": ("cpp", "c++", "cc", "cxx", "c++17", "c++20"),
}
_NAMES: dict[Language, str] = {"python": "Python", "cpp": "C++"}
_SHOWN_CHARACTERS = 160


def environment_of(sandbox: SandboxConfig) -> dict[str, str]:
    """What a reward worker needs to run programs as the run file says."""
    return {VARIABLE: sandbox.model_dump_json()}


def check_sandbox(sandbox: SandboxConfig, *, is_needed: bool) -> Layers | None:
    """Try the sandbox, and the compiler, on this node if they are needed.

    Raises SandboxError where it is weaker than required, or the compiler is not there or makes nothing that runs.
    """
    if not is_needed:
        return None
    with Sandbox(_settings(sandbox)) as tried:
        if sandbox.compiles:
            try_compiler(tried, find_compiler(sandbox.cpp_compiler), _limits_of_compiler(sandbox))
        return tried.layers


def described_languages(sandbox: SandboxConfig) -> str:
    """Which languages programs may be in, for people, with the compiler of this node.  Raises SandboxError as above."""
    if not sandbox.compiles:
        return "Python"
    path, *options = find_compiler(sandbox.cpp_compiler)
    version = version_of(path)
    by = " ".join([path, *options]) + (f" ({version})" if version else "")
    return " and ".join(f"C++ by {by}" if name == "cpp" else _NAMES[name] for name in sandbox.languages)


@dataclass(frozen=True, slots=True)
class Program:
    """What a completion has written."""

    language: Language
    text: str


def executable(program: Program, sandbox: Sandbox, settings: SandboxConfig) -> tuple[bytes, Kind, str]:
    """(what the sandbox is given, of which kind, why it cannot run: "" if it can).  Raises SandboxError."""
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


def limits_of(settings: SandboxConfig, wall_s: float, own: OwnLimits | None = None, *, wanted_bytes: int = 0) -> Limits:
    """Limits of one program.

    wall_s: what is left of the completion's time; own: the record's limits; wanted_bytes: length of the right output,
    about, of which a program may write twice as much.
    """
    own = own or OwnLimits()
    return Limits(
        cpu_s=own.cpu_s or settings.cpu_s,
        wall_s=wall_s,
        memory_bytes=own.memory_bytes or settings.memory_bytes,
        output_bytes=max(Limits.output_bytes, 2 * wanted_bytes),
    )


def last_program(completion: str, languages: Sequence[Language] = ("python",)) -> Program | None:
    """Return the last fenced block if it is in one of these; None if there is none, or it is not closed."""
    mark, text = last_block(completion) or ("", "")
    for language in languages:
        if mark.lower() in _MARKS[language]:
            return Program(language, text)
    return None


def no_program(languages: Sequence[Language]) -> str:
    """The detail of a completion without a program."""
    return f"the last fenced block is no {' or '.join(_NAMES[language] for language in languages)} program"


def failure(run: Finished) -> str:
    """Why a run cannot have been right, for people; "" if it ended well."""
    if run.stopped_for:
        return f"too much {run.stopped_for}"
    if run.status == 0:
        return ""
    last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2][:_SHOWN_CHARACTERS]
    return (f"signal {-run.status}" if run.status < 0 else f"exit status {run.status}") + (f": {last}" if last else "")


def _limits_of_compiler(sandbox: SandboxConfig) -> Limits:
    return compile_limits(sandbox.compile_s, sandbox.compile_memory_bytes)


def _settings(sandbox: SandboxConfig) -> SandboxSettings:
    return SandboxSettings(sandbox.require, sandbox.python, sandbox.readable_paths)
