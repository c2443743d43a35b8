"""Where the code of completions is run: the sandbox of this reward worker, by the settings of its run.

A worker learns the settings from its environment (VARIABLE), which the service sets.  The sandbox starts with the first
program; one that fails is a verifier error, and the next program starts another.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache

from rlhpc.config_sandbox import SandboxConfig
from rlhpc.sandbox.client import Layers, Sandbox, SandboxSettings
from rlhpc.sandbox.limits import Finished, Limits

VARIABLE = "RLHPC_SANDBOX"
_BLOCK = re.compile(r"^[ ]{0,3}```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ ]{0,3}```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3")
_SHOWN_CHARACTERS = 160


def environment_of(sandbox: SandboxConfig) -> dict[str, str]:
    """What a reward worker needs to run programs as the run file says."""
    return {VARIABLE: sandbox.model_dump_json()}


def check_sandbox(sandbox: SandboxConfig, *, is_needed: bool) -> Layers | None:
    """Try the sandbox on this node if it is needed.  Raises SandboxError where it is weaker than required."""
    if not is_needed:
        return None
    with Sandbox(_settings(sandbox)) as tried:
        return tried.layers


@cache
def place() -> tuple[Sandbox, SandboxConfig]:
    """The sandbox of this process, started with its first program, and its settings."""
    settings = SandboxConfig.model_validate(json.loads(os.environ.get(VARIABLE, "{}")))
    return Sandbox(_settings(settings)), settings


def limits_of(settings: SandboxConfig, wall_s: float) -> Limits:
    """Of one program that has this much of the completion's time left."""
    return Limits(cpu_s=settings.cpu_s, wall_s=wall_s, memory_bytes=settings.memory_bytes)


def last_program(completion: str) -> str | None:
    """Return the last fenced block if it is Python; None if there is none, it is not closed, or another language."""
    blocks: list[tuple[str, str]] = _BLOCK.findall(completion)
    if not blocks or blocks[-1][0].lower() not in _PYTHON:
        return None
    return blocks[-1][1]


def failure(run: Finished) -> str:
    """Why a run cannot have been right, for people; "" if it ended well."""
    if run.stopped_for:
        return f"too much {run.stopped_for}"
    if run.status == 0:
        return ""
    last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2][:_SHOWN_CHARACTERS]
    return (f"signal {-run.status}" if run.status < 0 else f"exit status {run.status}") + (f": {last}" if last else "")


def _settings(sandbox: SandboxConfig) -> SandboxSettings:
    return SandboxSettings(sandbox.require, sandbox.python, sandbox.readable_paths)
