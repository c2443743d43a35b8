"""Reward functions that take many completions at once: those with a parameter called `completions`.

    def judge(completions, references)                lists of texts
    def judge(completions, records)                   the whole records of the dataset, with data.reference_field = "*"
    def judge(prompts, completions, answer, **kwargs)   as TRL calls its functions: fields of the records, by name

Each parameter is given by name, and is a list as long as the batch.  `prompts` is the field prompt; a parameter with a
default keeps it if a record lacks the field; **kwargs gets every other field that all records have.
It returns a list of what a function of one completion may return (returned.py), in the same order; async def is
allowed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlhpc.errors import ConfigError
from rlhpc.rewards.returned import NoReward
from rlhpc.rewards.whole_record import record_of

COMPLETIONS, REFERENCES, RECORDS = "completions", "references", "records"
OF_BATCHES = (COMPLETIONS, REFERENCES, RECORDS)  # parameters that are never fields
_OTHER_NAMES = {"prompts": "prompt"}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_batched(names: Iterable[str]) -> bool:
    """Whether a function with these parameters takes many completions at once."""
    return COMPLETIONS in names


def asks_for_fields(names: Sequence[str]) -> bool:
    """Whether a batched function with these parameters needs more of the records than their references."""
    return any(name not in (COMPLETIONS, REFERENCES) for name in names)


class BatchedFunction:
    """A RewardFunction that may also be asked for many completions."""

    def __init__(
        self, key: str, function: Callable[..., object], arguments: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Raises ConfigError for parameters that have no name.

        arguments: given by name with every batch; they hide fields of the records.
        """
        self._function, self._constant = function, dict(arguments)
        signature = inspect.signature(function).parameters
        self._parameters = {name: each for name, each in signature.items() if name not in arguments}
        self._takes_rest = any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())
        for name, each in self._parameters.items():
            if each.kind not in (*_BY_NAME, each.VAR_KEYWORD):
                raise ConfigError(
                    f"{key}: a function with a parameter {COMPLETIONS!r} is batched and called by names, and {name!r} "
                    "cannot be given by name; legal: without / and *"
                )

    def __call__(self, completion: str, reference: str) -> object:
        """A batch of one."""
        (only,) = self.judge_all([completion], [reference])
        return only

    def judge_all(self, completions: Sequence[str], references: Sequence[str]) -> list[object]:
        """What is returned for each.  Raises NoReward unless it is a list of as many; what the function raises."""
        returned = self._function(**self._arguments(completions, references), **self._constant)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        listed: object = returned.tolist() if hasattr(returned, "tolist") else returned  # an array, a tensor
        if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Iterable):
            raise NoReward(
                f"a function with a parameter {COMPLETIONS!r} is batched and returns a list with a reward for each, "
                f"not {type(returned).__name__}"
            )
        rewards = list(listed)
        if len(rewards) != len(completions):
            raise NoReward(
                f"a function with a parameter {COMPLETIONS!r} is batched and returns a reward for each of its "
                f"{len(completions)} completions, not {len(rewards)}"
            )
        return rewards

    def _arguments(self, completions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        arguments: dict[str, Any] = {COMPLETIONS: list(completions)}
        if REFERENCES in self._parameters:
            arguments[REFERENCES] = list(references)
        needs_records = asks_for_fields([name for name, each in self._parameters.items() if each.kind in _BY_NAME])
        if not needs_records and not self._takes_rest:
            return arguments
        try:
            records = [record_of(reference) for reference in references]
        except ValueError:
            if needs_records:
                raise
            return arguments  # references are no records, so that there is nothing for **kwargs
        if RECORDS in self._parameters:
            arguments[RECORDS] = records
        for name, parameter in self._parameters.items():
            if name not in arguments and parameter.kind in _BY_NAME:
                arguments |= self._column(name, records, is_needed=parameter.default is parameter.empty)
        if self._takes_rest:
            known = {*arguments, *self._constant, *(_OTHER_NAMES.get(name, name) for name in arguments)}
            common = set.intersection(*(set(record) for record in records)) - known
            arguments |= {name: [record[name] for record in records] for name in sorted(common)}
        return arguments

    @staticmethod
    def _column(name: str, records: Sequence[Mapping[str, Any]], *, is_needed: bool) -> dict[str, list[Any]]:
        """{name: values}; {} if a record lacks the field and it is not needed.  Raises ValueError if it is needed."""
        field = _OTHER_NAMES.get(name, name)
        lacking = next((record for record in records if field not in record), None)
        if lacking is None:
            return {name: [record[field] for record in records]}
        if is_needed:
            raise ValueError(
                f"the function has a parameter {name!r}, and a record has no field {field!r}; it has "
                f"{', '.join(map(repr, lacking)) or 'none'}"
            )
        return {}
