"""Task "code_stdin": does the program print what it should, for each input?

Input: a completion whose last fenced block is a program in a language of sandbox.languages; reference: JSON,
{"inputs": […], "outputs": […]}, with language and limits of its own (code_limits.py) or without, or a list of {"input",
"output"}, all of them texts.  Output: a RewardOutcome of 1.0 or 0.0.  Outputs are compared here, outside the sandbox,
where the program cannot see what is expected: by lines, without trailing blanks and blank lines at the end.  Where a
decimal fraction is expected, a number close to it is as good: judges of contests ask for 1e-6.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from rlhpc.config_sandbox import SandboxConfig
from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.code_limits import OwnLimits, own_limits, refuse_above
from rlhpc.rewards.code_place import executable, failure, last_program, limits_of, no_program, place

_TASK = "code_stdin"
_TOLERANCE = 1e-6  # where the reference has none of its own
_NUMBER = re.compile(rb"(?<![\w.])([-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+)(?![\w.]*\w)")
_FRACTION = re.compile(rb"\.|[eE][-+]")


def judge(completion: str, reference: str) -> RewardOutcome:
    """Run until the first test that fails.  Raises ValueError for the reference, SandboxError for the sandbox."""
    tests, own = _read(reference)
    sandbox, settings = place()
    refuse_above(own, settings, _TASK)
    languages = own.languages(settings.languages)
    program = last_program(completion, languages)
    if program is None:
        return RewardOutcome(0.0, is_correct=False, detail=no_program(languages))
    given, kind, why_not = executable(program, sandbox, settings)
    if why_not:
        return RewardOutcome(0.0, is_correct=False, detail=f"it does not compile: {why_not}")
    deadline = time.monotonic() + settings.wall_s
    for number, (text, wanted) in enumerate(tests, 1):
        left_s = max(0.05, deadline - time.monotonic())
        limits = limits_of(settings, left_s, own, wanted_bytes=len(wanted.encode()))
        run = sandbox.run(given, text.replace("\r\n", "\n").encode(), limits, kind=kind)
        tolerance = _TOLERANCE if own.tolerance is None else own.tolerance
        why = failure(run) or ("" if _is_same(run.stdout, wanted.encode(), tolerance) else "another output")
        if why:
            return RewardOutcome(0.0, is_correct=False, detail=f"test {number} of {len(tests)}: {why}")
    return RewardOutcome(1.0, is_correct=True, detail=f"{len(tests)} tests")


def check_reference(reference: str, settings: SandboxConfig | None = None) -> None:
    """Raises ValueError if it holds no tests, or not in one of the two forms, or limits above those of the run."""
    _, own = _read(reference)
    if settings is not None:
        refuse_above(own, settings, _TASK)


def _read(reference: str) -> tuple[list[tuple[str, str]], OwnLimits]:
    """Pairs of input and output, and the record's own limits."""
    try:
        read: Any = json.loads(reference)
        if isinstance(read, dict):
            pairs = list(zip(read["inputs"], read["outputs"], strict=True))
        else:
            pairs = [(test["input"], test["output"]) for test in read]
        calls = next((test for test in (read if isinstance(read, list) else [read]) if _calls_a_function(test)), None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            'the reference of code_stdin is {"inputs": [...], "outputs": [...]} or [{"input", "output"}, ...] as JSON: '
            f"{type(error).__name__}: {error}"
        ) from error
    if calls is not None:
        raise ValueError(
            f"the reference of code_stdin: {str(calls)[:80]} calls a function; legal: tests of standard input, or "
            "code_functions with its own form of tests"
        )
    if not pairs:
        raise ValueError("the reference of code_stdin has no tests; legal: one or more")
    for number, pair in enumerate(pairs, 1):
        kinds = {what: type(text).__name__ for what, text in zip(("input", "output"), pair, strict=True)}
        if wrong := [f"{what} is of type {kind}" for what, kind in kinds.items() if kind != "str"]:
            raise ValueError(f"the reference of code_stdin: test {number}: {' and '.join(wrong)}; legal: texts")
        try:
            "".join(pair).encode()
        except UnicodeEncodeError as error:  # JSON can spell it
            half = error.object[error.start]
            raise ValueError(
                f"the reference of code_stdin: test {number} has {half!r}, half of a surrogate pair, which no "
                "program can read or print; legal: texts"
            ) from error
    return pairs, own_limits(read, _TASK) if isinstance(read, dict) else OwnLimits()


def _calls_a_function(test: Mapping[str, Any]) -> bool:
    """As APPS, TACO and DeepCoder (fn_name, type) and LiveCodeBench (testtype) say it: texts, but of arguments."""
    return (
        bool(test.get("fn_name")) or {"functional", "function_call"} & {test.get("type"), test.get("testtype")} != set()
    )


def _is_same(output: bytes, wanted: bytes, tolerance: float) -> bool:
    lines, lines_wanted = _lines(output), _lines(wanted)
    if lines == lines_wanted:
        return True
    return len(lines) == len(lines_wanted) and all(map(_is_same_line, lines, lines_wanted, [tolerance] * len(lines)))


def _is_same_line(line: bytes, wanted: bytes, tolerance: float) -> bool:
    """Whether they differ in numbers alone, each of them close to a decimal fraction that is wanted."""
    if line == wanted or not tolerance:
        return line == wanted
    parts, parts_wanted = _NUMBER.split(line), _NUMBER.split(wanted)  # every second one is a number
    if len(parts) != len(parts_wanted) or parts[::2] != parts_wanted[::2]:
        return False
    return all(map(_is_close, parts[1::2], parts_wanted[1::2], [tolerance] * len(parts)))


def _is_close(number: bytes, wanted: bytes, tolerance: float) -> bool:
    if number == wanted or not _FRACTION.search(wanted):
        return number == wanted
    value, right = float(number), float(wanted)
    return math.isfinite(right) and math.isclose(value, right, rel_tol=tolerance, abs_tol=tolerance)


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]
