"""Reward functions that are given the whole record in place of a reference.

    def judge(completion, record):   # the second parameter has this name
        return verl_score(record["data_source"], completion, record["reward_model"]["ground_truth"])

The run file has data.reference_field = "*", by which the reference is the record as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rlhpc.contracts import RewardFunction

PARAMETER = "record"  # the name by which a function asks for it
PLACE = 1  # after the completion


def given_its_record(function: Callable[..., object], names: Sequence[str]) -> RewardFunction:
    """The function itself, or where it asks for a record one that reads it from the reference; names: its parameters.

    That raises ValueError for a reference that is no object in JSON.
    """
    if tuple(names[PLACE : PLACE + 1]) != (PARAMETER,):
        return function

    def judge(completion: str, reference: str) -> object:
        return function(completion, record_of(reference))

    return judge


def record_of(reference: str) -> dict[str, Any]:
    """The record that a reference is.  Raises ValueError if it is no object in JSON."""
    try:
        record: dict[str, Any] = dict(json.loads(reference))
    except (TypeError, ValueError) as error:  # of json, or because it is a list or a number
        raise ValueError(
            f'the function asks for the record, and the reference is {reference[:60]!r}; set data.reference_field = "*"'
        ) from error
    return record
