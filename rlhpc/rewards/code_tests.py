"""Task "code_functions": does the function return the right value for each list of arguments?

Input: a completion whose last fenced block is a Python program; reference: JSON, {"entry_point", "tests": [{"args",
"kwargs", "output"}]} with values as rlhpc/sandbox/values.py writes them.  Output: a RewardOutcome of 1.0 or 0.0.
Arguments go into the sandbox, returned values come out as plain data and are compared here, where no program can have
redefined `==`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.tables_services import SandboxConfig
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.code_place import (
    OwnLimits,
    executable,
    failure,
    last_program,
    limits_of,
    no_program,
    own_limits,
    place,
    refuse_above,
)
from rlhpc.sandbox import call_functions, values

# ----------------------------------------------------------------------------------------------------------- code stdin
#
# Task "code_stdin": does the program print the right output for each input?
#
# Input: a completion whose last fenced block is a program in a language of sandbox.languages; reference: JSON,
# {"inputs": […], "outputs": […]}, with language and limits of its own (code_place.py) or without, or a list of
# {"input", "output"}, all of them texts.  Output: a RewardOutcome of 1.0 or 0.0.  Outputs are compared here, outside
# the sandbox, where the program cannot see the expected ones: by lines, without trailing blanks and blank lines at the
# end.  If a decimal fraction is expected, a number close to it is right: judges of contests use 1e-6.

_STDIN_TASK = "code_stdin"
_TOLERANCE = 1e-6  # if the reference has none
_NUMBER = re.compile(rb"(?<![\w.])([-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+)(?![\w.]*\w)")
_FRACTION = re.compile(rb"\.|[eE][-+]")


def code_stdin(completion: str, reference: str) -> RewardOutcome:
    """Run tests until one fails.  Raises ValueError for the reference, SandboxError for the sandbox."""
    tests, own = _read(reference)
    sandbox, settings = place()
    refuse_above(own, settings, _STDIN_TASK)
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


def check_code_stdin(reference: str, settings: SandboxConfig | None = None) -> None:
    """Raise ValueError for a reference without tests, in neither of the two forms, or with limits above the run's."""
    _, own = _read(reference)
    if settings is not None:
        refuse_above(own, settings, _STDIN_TASK)


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
    return pairs, own_limits(read, _STDIN_TASK) if isinstance(read, dict) else OwnLimits()


def _calls_a_function(test: Mapping[str, Any]) -> bool:
    """True for a test that calls a function, in the format of APPS, TACO, DeepCoder or LiveCodeBench."""
    return (
        bool(test.get("fn_name")) or {"functional", "function_call"} & {test.get("type"), test.get("testtype")} != set()
    )


def _is_same(output: bytes, wanted: bytes, tolerance: float) -> bool:
    lines, lines_wanted = _lines(output), _lines(wanted)
    if lines == lines_wanted:
        return True
    return len(lines) == len(lines_wanted) and all(map(_is_same_line, lines, lines_wanted, [tolerance] * len(lines)))


def _is_same_line(line: bytes, wanted: bytes, tolerance: float) -> bool:
    """True for equal lines, or if only numbers differ, each close to the decimal fraction that is wanted."""
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


# ------------------------------------------------------------------------------------------------------- code functions

_FUNCTIONS_TASK = "code_functions"
_HASHED = ("$set", "$frozenset", "$dict")
_RELATIVE = 1e-9  # of floating-point numbers: sums in another order; absolute if 0.0 is wanted
_HARNESS = b"\n".join(Path(str(module.__file__)).read_bytes() for module in (values, call_functions)).replace(
    b"from __future__ import annotations\n", b""
)


def code_functions(completion: str, reference: str) -> RewardOutcome:
    """Call the function for each test.  Raises ValueError if the reference cannot be read, SandboxError."""
    entry_point, calls, wanted, own = _tests(reference)
    sandbox, settings = place()
    refuse_above(own, settings, _FUNCTIONS_TASK)
    program = last_program(completion)
    if program is None:
        return RewardOutcome(0.0, is_correct=False, detail=no_program(("python",)))
    request = {"program": program.text, "entry_point": entry_point, "calls": calls}
    limits = limits_of(settings, settings.wall_s, own, wanted_bytes=len(reference))
    run = sandbox.run(_HARNESS, json.dumps(request).encode(), limits, wants_results=True)
    said = run.results.split(b"\n")[:-1]
    for number, output in enumerate(wanted):
        why = (
            _difference(said[number], output, own.tolerance)
            if number < len(said)
            else failure(run) or "it ended before"
        )
        if why:
            return RewardOutcome(0.0, is_correct=False, detail=f"test {number + 1} of {len(wanted)}: {why}")
    if why := failure(run):
        return RewardOutcome(0.0, is_correct=False, detail=f"after {len(wanted)} tests: {why}")
    return RewardOutcome(1.0, is_correct=True, detail=f"{len(wanted)} tests")


def check_code_functions(reference: str, settings: SandboxConfig | None = None) -> None:
    """Raise ValueError for a reference without tests, with tests that are no calls, or with limits above the run's."""
    entry_point, calls, _, own = _tests(reference)
    if settings is not None:
        refuse_above(own, settings, _FUNCTIONS_TASK)
    if not entry_point.isidentifier():
        raise ValueError(f"the reference of code_functions: entry_point={entry_point!r}; legal: the name of a function")
    for number, call in enumerate(calls, 1):
        is_callable = isinstance(call["args"], list) and isinstance(call["kwargs"], dict)
        if not is_callable:
            raise ValueError(
                f"the reference of code_functions: test {number} has args={str(call['args'])[:40]}, "
                f"kwargs={str(call['kwargs'])[:40]}; legal: a list, and an object"
            )
        try:
            values.decode([call["args"], *call["kwargs"].values()])
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"the reference of code_functions: arguments of test {number}: {error}") from error


def _tests(reference: str) -> tuple[str, list[dict[str, Any]], list[Any], OwnLimits]:
    try:
        read = json.loads(reference)
        tests = read["tests"]
        calls = [{"args": _given(test, "args", []), "kwargs": _given(test, "kwargs", {})} for test in tests]
        has_outputs = any("output" in test for test in tests)  # tables leave out null outputs
        wanted = [values.decode(test.get("output") if has_outputs else test["output"]) for test in tests]
        entry_point = read["entry_point"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            'the reference of code_functions is {"entry_point", "tests": [{"args", "kwargs", "output"}, ...]} as JSON: '
            f"{type(error).__name__}: {error}"
        ) from error
    if not wanted or not isinstance(entry_point, str):
        raise ValueError("the reference of code_functions has no tests, or an entry_point that is no text; legal: both")
    own = own_limits(read, _FUNCTIONS_TASK)
    if own.language not in (None, "python"):
        raise ValueError(f"the reference of code_functions: language={own.language!r}; legal: 'python', or none")
    return entry_point, calls, wanted, own


def _given(test: dict[str, Any], key: str, none: Any) -> Any:
    return none if test.get(key) is None else test[key]


def _difference(line: bytes, wanted: Any, tolerance: float | None) -> str:
    """Description of how a program's result differs from the wanted one; "" if it does not."""
    try:
        said = json.loads(line)
        if "raised" in said:
            return str(said["raised"]) or "an exception"  # a program may write an empty one itself
        # Not decoded if it cannot be right: a program can choose members of a set that all have the same hash, which
        # would keep this process busy for minutes.
        may_be_same = _largest_set_said(said["value"]) <= _largest_set(wanted)
        is_same = may_be_same and _Comparison(tolerance).is_same(values.decode(said["value"]), wanted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return "no value"
    return "" if is_same else "another value"


def _largest_set_said(said: Any) -> int:
    """Number of members of the largest set, or dict with keys of any type, in an encoded value."""
    if isinstance(said, list):
        return max(map(_largest_set_said, said), default=0)
    if not isinstance(said, dict):
        return 0
    own = max((len(said[tag]) for tag in _HASHED if tag in said), default=0)
    return max(own, *map(_largest_set_said, said.values())) if said else 0


def _largest_set(value: Any) -> int:
    """Number of members of the largest set, or dict, in a value."""
    if isinstance(value, list | tuple):
        return max(map(_largest_set, value), default=0)
    if isinstance(value, set | frozenset):
        return max([len(value), *map(_largest_set, value)])
    if isinstance(value, dict):
        return max([len(value), *(_largest_set(part) for pair in value.items() for part in pair)])
    return 0


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares a returned value with the wanted one; tolerance: None for rounding errors only."""

    tolerance: float | None

    def is_same(self, value: Any, wanted: Any) -> bool:
        """True if equal and of the same type, but int and float are interchangeable, and a tuple may be a list."""
        if isinstance(wanted, list):
            return type(value) in (list, tuple) and self._are_same(value, wanted)
        if isinstance(wanted, int | float) and not isinstance(wanted, bool):
            return type(value) in (int, float) and self._is_number(value, wanted)
        if type(value) is not type(wanted):
            return False
        if isinstance(wanted, tuple):
            return self._are_same(value, wanted)
        if isinstance(wanted, dict):
            return value.keys() == wanted.keys() and all(self.is_same(value[key], wanted[key]) for key in wanted)
        if isinstance(wanted, complex):
            return self._is_number(value.real, wanted.real) and self._is_number(value.imag, wanted.imag)
        return bool(value == wanted)

    def _is_number(self, value: float, wanted: float) -> bool:
        if value == wanted or (value != value and wanted != wanted):
            return True
        if isinstance(value, int) and isinstance(wanted, int):
            return False
        relative = _RELATIVE if self.tolerance is None else self.tolerance
        absolute = 0.0 if self.tolerance is None and wanted else relative
        try:
            return math.isclose(value, wanted, rel_tol=relative, abs_tol=absolute)
        except OverflowError:  # a whole number that is larger than every float
            return False

    def _are_same(self, value: Any, wanted: Any) -> bool:
        return len(value) == len(wanted) and all(map(self.is_same, value, wanted))
