"""Which part of a completion is judged."""

from __future__ import annotations

import pytest

from rlhpc.data.tokenizer import answer_of


@pytest.mark.parametrize(
    ("completion", "end", "answer"),
    [
        (" 2</think>3", "", " 2</think>3"),
        ("hm</think>\n\n3 \n", "</think>", "3 \n"),
        ("hm</think>3</think>4", "</think>", "3</think>4"),  # an answer is not made shorter by a second end
        ("</think>", "</think>", ""),
        ("still thinking: 3", "</think>", ""),
        ("", "</think>", ""),
    ],
)
def test_what_follows_the_first_end_of_thinking_is_the_answer(completion: str, end: str, answer: str) -> None:
    found, start = answer_of(completion, end)
    assert found == answer
    assert completion[start:] == answer
