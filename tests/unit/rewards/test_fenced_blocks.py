"""Fenced blocks: the same as by a regular expression that says what they are, in time that grows with the text."""

from __future__ import annotations

import random
import re
import time

import pytest

from rlhpc.rewards import json_schema
from rlhpc.rewards.code_place import last_block, last_program

# Says the same, in time that grows with the square of the fences that are never closed.
BLOCK = re.compile(r"^[ ]{0,3}```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ ]{0,3}```[ \t]*$", re.DOTALL | re.MULTILINE)
PIECES = ("\n", "\n```", "```\n", "\n```\n", "```", "````", "``", "python", "c++", "json", " ", "   ", "    ", "\t",
          "\r\n", "\x0b", "\x85", "\u2028", "x = 1", "~~~")  # fmt: skip


def test_blocks_are_those_of_the_regular_expression() -> None:
    draw = random.Random(7)
    num_blocks = 0
    for _ in range(20_000):
        text = "".join(draw.choices(PIECES, k=draw.randrange(30)))
        expected = BLOCK.findall(text.replace("\r\n", "\n"))[-1:]
        num_blocks += len(expected)
        assert [*filter(None, [last_block(text)])] == expected, repr(text)
    assert num_blocks > 2_000


@pytest.mark.parametrize("text", ["```python\n" * 5_000, "```python\n" * 5_000 + "```python", "``` " * 20_000])
def test_fences_that_are_never_closed_take_little_time(text: str) -> None:
    began = time.thread_time()
    assert last_program(text) is None
    assert json_schema.json_schema(text, "{}").reward == 0.0
    assert time.thread_time() - began < 0.5
