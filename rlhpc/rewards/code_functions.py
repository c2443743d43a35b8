"""Task "code_functions": does the function return what it should, for each list of arguments?

Input: a completion whose last fenced block is a Python program; reference: JSON, {"entry_point", "tests": [{"args",
"kwargs", "output"}]} with values as rlhpc/sandbox/values.py writes them.  Output: a RewardOutcome of 1.0 or 0.0.
Arguments go into the sandbox, returned values come out as plain data and are compared here, where no program can have
changed what `==` means.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config_sandbox import SandboxConfig
from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.code_limits import OwnLimits, own_limits, refuse_above
from rlhpc.rewards.code_place import failure, last_program, limits_of, no_program, place
from rlhpc.sandbox import call_functions, values

_TASK = "code_functions"
_HASHED = ("$set", "$frozenset", "$dict")
_RELATIVE = 1e-9  # of floating-point numbers: sums in another order; absolute where 0.0 is wanted
_HARNESS = b"\n".join(Path(str(module.__file__)).read_bytes() for module in (values, call_functions)).replace(
    b"from __future__ import annotations\n", b""
)


def judge(completion: str, reference: str) -> RewardOutcome:
    """Raises ValueError if the reference cannot be read, SandboxError if the sandbox fails."""
    entry_point, calls, wanted, own = _tests(reference)
    sandbox, settings = place()
    refuse_above(own, settings, _TASK)
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


def check_reference(reference: str, settings: SandboxConfig | None = None) -> None:
    """Raises ValueError if it holds no tests, or they cannot be called, or limits above those of the run."""
    entry_point, calls, _, own = _tests(reference)
    if settings is not None:
        refuse_above(own, settings, _TASK)
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
        has_outputs = any("output" in test for test in tests)  # a table leaves out those that are null
        wanted = [values.decode(test.get("output") if has_outputs else test["output"]) for test in tests]
        entry_point = read["entry_point"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            'the reference of code_functions is {"entry_point", "tests": [{"args", "kwargs", "output"}, ...]} as JSON: '
            f"{type(error).__name__}: {error}"
        ) from error
    if not wanted or not isinstance(entry_point, str):
        raise ValueError("the reference of code_functions has no tests, or an entry_point that is no text; legal: both")
    own = own_limits(read, _TASK)
    if own.language not in (None, "python"):
        raise ValueError(f"the reference of code_functions: language={own.language!r}; legal: 'python', or none")
    return entry_point, calls, wanted, own


def _given(test: dict[str, Any], key: str, none: Any) -> Any:
    return none if test.get(key) is None else test[key]


def _difference(line: bytes, wanted: Any, tolerance: float | None) -> str:
    """How a program's result differs from what was wanted; "": not at all."""
    try:
        said = json.loads(line)
        if "raised" in said:
            return str(said["raised"]) or "an exception"  # a program may write it itself, with nothing in it
        # Not decoded where it cannot be right: a program can choose members of a set that all have the same hash, over
        # which this process would sit for minutes.
        may_be_same = _largest_set_said(said["value"]) <= _largest_set(wanted)
        is_same = may_be_same and _Comparison(tolerance).is_same(values.decode(said["value"]), wanted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return "no value"
    return "" if is_same else "another value"


def _largest_set_said(said: Any) -> int:
    """Members of the largest set, or dict whose keys may be of any kind, in a value that is not decoded yet."""
    if isinstance(said, list):
        return max(map(_largest_set_said, said), default=0)
    if not isinstance(said, dict):
        return 0
    own = max((len(said[tag]) for tag in _HASHED if tag in said), default=0)
    return max(own, *map(_largest_set_said, said.values())) if said else 0


def _largest_set(value: Any) -> int:
    """The same of a value, where every dict counts."""
    if isinstance(value, list | tuple):
        return max(map(_largest_set, value), default=0)
    if isinstance(value, set | frozenset):
        return max([len(value), *map(_largest_set, value)])
    if isinstance(value, dict):
        return max([len(value), *(_largest_set(part) for pair in value.items() for part in pair)])
    return 0


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Of a returned value with the one that was wanted; tolerance: None for that of rounding errors."""

    tolerance: float | None

    def is_same(self, value: Any, wanted: Any) -> bool:
        """Equal and of the same type, except that int and float are interchangeable, and a tuple answers a list."""
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
