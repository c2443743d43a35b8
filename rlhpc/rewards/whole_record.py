"""Reward functions that are given the whole record in place of a reference.

    def judge(completion, record):   # the second parameter is called so
        return verl_score(record["data_source"], completion, record["reward_model"]["ground_truth"])

The run file has data.reference_field = "*", by which the reference is the record as JSON.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from rlhpc.contracts import RewardFunction

PARAMETER = "record"  # the name by which a function asks for it
PLACE = 1  # after the completion


def given_its_record(function: Callable[..., object]) -> RewardFunction:
    """The function itself, or where it asks for a record one that reads it from the reference.

    That raises ValueError for a reference that is no object in JSON.
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of C, perhaps
        return function
    if names[PLACE : PLACE + 1] != [PARAMETER]:
        return function

    def judge(completion: str, reference: str) -> object:
        return function(completion, _record(reference))

    return judge


def _record(reference: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = dict(json.loads(reference))
    except (TypeError, ValueError) as error:  # of json, or because it is a list or a number
        raise ValueError(
            f'the function asks for the record, and the reference is {reference[:60]!r}; set data.reference_field = "*"'
        ) from error
    return record
