"""Task "code_stdin": does the program print what it should, for each input?

Input: a completion whose last fenced block is a Python program; reference: JSON, {"inputs": […], "outputs": […]} or
a list of {"input", "output"}, all of them texts.  Output: a RewardOutcome of 1.0 or 0.0.  Outputs are compared here,
outside the sandbox, where the program cannot see what is expected: by lines, without trailing blanks
and blank lines at the end.
"""

from __future__ import annotations

import json
import time

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.code_place import failure, last_program, limits_of, place


def judge(completion: str, reference: str) -> RewardOutcome:
    """Run until the first test that fails.  Raises ValueError for the reference, SandboxError for the sandbox."""
    tests = _tests(reference)
    program = last_program(completion)
    if program is None:
        return RewardOutcome(0.0, is_correct=False, detail="the last fenced block is no Python program")
    sandbox, settings = place()
    text, deadline = program.encode(errors="replace"), time.monotonic() + settings.wall_s
    for number, (given, wanted) in enumerate(tests, 1):
        run = sandbox.run(text, given.encode(), limits_of(settings, max(0.05, deadline - time.monotonic())))
        why = failure(run) or ("" if _lines(run.stdout) == _lines(wanted.encode()) else "another output")
        if why:
            return RewardOutcome(0.0, is_correct=False, detail=f"test {number} of {len(tests)}: {why}")
    return RewardOutcome(1.0, is_correct=True, detail=f"{len(tests)} tests")


def check_reference(reference: str) -> None:
    """Raises ValueError if it holds no tests, or not in one of the two forms."""
    _tests(reference)


def _tests(reference: str) -> list[tuple[str, str]]:
    try:
        read = json.loads(reference)
        if isinstance(read, dict):
            pairs = list(zip(read["inputs"], read["outputs"], strict=True))
        else:
            pairs = [(test["input"], test["output"]) for test in read]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            'the reference of code_stdin is {"inputs": [...], "outputs": [...]} or [{"input", "output"}, ...] as JSON: '
            f"{type(error).__name__}: {error}"
        ) from error
    if not pairs:
        raise ValueError("the reference of code_stdin has no tests; legal: one or more")
    for number, pair in enumerate(pairs, 1):
        kinds = {what: type(text).__name__ for what, text in zip(("input", "output"), pair, strict=True)}
        if wrong := [f"{what} is of type {kind}" for what, kind in kinds.items() if kind != "str"]:
            raise ValueError(f"the reference of code_stdin: test {number}: {' and '.join(wrong)}; legal: texts")
    return pairs


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]
