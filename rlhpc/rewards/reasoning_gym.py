"""Score an answer to a problem of the library `reasoning-gym` by the scorer of its own dataset.

Input: a completion, and the entry that data.source puts into a record (rlhpc/data/record_source.py).  The answer
is the last <answer>…</answer>, else the last marked one, else the whole completion.  Many scorers give a part of the
reward to an answer that is close; correct is 1.0.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset

from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.reasoning_gym_reference import EVALUATING, is_harmless, read_reference
from rlhpc.rewards.text_answer import answer_of, last_tagged
from rlhpc.sandbox.values import decode, encode

_SHOWN_CHARACTERS = 80
_DATASETS_HELD = 64
_CANNOT_READ = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


def reasoning_gym(completion: str, reference: str) -> RewardOutcome:
    """The library's score; 0 if its scorer cannot read the answer but reads the right one, or would execute the answer.

    Raises ValueError for a reference that is no such entry, and the scorer's error if it cannot read the right answer.
    """
    name, entry, settings = read_reference(reference)
    answer = final_answer(completion)
    if name in EVALUATING and not is_harmless(answer, str(entry["answer"])):
        why = f"{name}: a program, or no expression: {answer[:_SHOWN_CHARACTERS]}"
        return RewardOutcome(0.0, is_correct=False, detail=why, answer=answer)
    dataset = _dataset(name, json.dumps(encode(settings), sort_keys=True))
    try:
        score = float(dataset.score_answer(answer, entry))
    except _CANNOT_READ:
        dataset.score_answer(entry["answer"], entry)
        score = 0.0
    return RewardOutcome(score, is_correct=score >= 1.0, detail=f"{name}: {answer[:_SHOWN_CHARACTERS]}", answer=answer)


def final_answer(completion: str) -> str:
    """The answer in a completion, stripped."""
    tagged = last_tagged(completion, "<answer>", "</answer>")
    return answer_of(completion) if tagged is None else tagged.strip()


@lru_cache(_DATASETS_HELD)
def _dataset(name: str, settings: str) -> Any:
    """A dataset that scores like the one that made the problem; its own problems are not used."""
    return create_dataset(name, seed=0, size=1, **decode(json.loads(settings)))
