"""The demo's task: addition worked out column by column, and a careless solver for the warm start.

Prompts look like ``4827+9356=``, answers like ``7+6+0=13;2+5+1=08;8+3+0=11;4+9+1=14;14183``: one field per column,
right to left, as digit + digit + carry = two-digit sum; then the total.  The last ``;``-separated field is the answer.
Guarantees: everything is a pure function of its seed; training and held-out problems are disjoint.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_DIGITS = 3
MAX_DIGITS = 5
MAX_PROMPT_CHARACTERS = 2 * MAX_DIGITS + 2  # both numbers, plus, equals
MAX_ANSWER_CHARACTERS = 9 * MAX_DIGITS + MAX_DIGITS + 1  # "7+6+0=13;" for each column, then the total

_HELD_OUT_ONE_IN = 16
_LARGEST_COLUMN_SUM = 9 + 9 + 1
_CARRY_SLIP_SHARE = 0.6  # a lost carry is one habit to unlearn; slips by one concern about 200 facts


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers with equally many digits, without leading zeros, whose sum has one digit more.

    One digit more because totals with and without a leading carry have their digits at different positions, which costs
    so small a model three times the steps, or defeats it.
    """

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The question as the model reads it."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The total: the only part that the reward checks."""
        return str(self.left + self.right)

    @property
    def is_held_out(self) -> bool:
        """Whether this problem is kept for evaluation: about one in 16, the same ones on every machine."""
        return zlib.crc32(self.prompt.encode()) % _HELD_OUT_ONE_IN == 0

    @property
    def columns(self) -> Iterator[tuple[int, int]]:
        """The digits to be added, right to left."""
        return zip(map(int, reversed(str(self.left))), map(int, reversed(str(self.right))), strict=True)


def problems(seed: int, n: int, *, held_out: bool = False) -> list[Problem]:
    """Return n different problems, drawn as draw_problem does."""
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < n:
        found[draw_problem(rng, held_out=held_out)] = None
    return list(found)


def draw_problem(rng: random.Random, *, held_out: bool = False) -> Problem:
    """Return a training problem, or a held-out one; all lengths from MIN_DIGITS to MAX_DIGITS are equally likely."""
    while True:
        num_digits = rng.randint(MIN_DIGITS, MAX_DIGITS)
        lowest, highest = 10 ** (num_digits - 1), 10**num_digits - 1
        problem = Problem(rng.randint(lowest, highest), rng.randint(lowest, highest))
        if problem.left + problem.right > highest and problem.is_held_out == held_out:
            return problem


def worked_answer(problem: Problem) -> str:
    """Return the answer with all its columns, without a slip."""
    return careless_answer(problem, 0.0, random.Random(0))


def careless_answer(problem: Problem, slip_rate: float, rng: random.Random) -> str:
    """Return the answer of a pupil who gets each column's sum wrong with probability slip_rate.

    A slip is off by one or, with a carry lost or invented, by ten.  What follows is consistent with it, so that one
    slip spoils the total (unless a later one happens to undo a wrong carry) although all other tokens are correct.
    """
    carry, fields, total = 0, [], ""
    for left, right in problem.columns:
        column_sum = left + right + carry
        written = _slip(column_sum, rng) if rng.random() < slip_rate else column_sum
        fields.append(f"{left}+{right}+{carry}={written:02d}")
        carry, unit = divmod(written, 10)
        total = f"{unit}{total}"
    return ";".join([*fields, f"1{total}" if carry else total])


def write_dataset(path: Path, n: int, seed: int, *, held_out: bool = False) -> None:
    """Write n problems as JSON lines {"prompt": "4827+9356=", "answer": "14183"}; makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = ({"prompt": p.prompt, "answer": p.answer} for p in problems(seed, n, held_out=held_out))
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def _slip(column_sum: int, rng: random.Random) -> int:
    if rng.random() < _CARRY_SLIP_SHARE:
        return (column_sum + 10) % 20
    wrong = (column_sum - 1, column_sum + 1)
    return rng.choice([value for value in wrong if 0 <= value <= _LARGEST_COLUMN_SUM])
