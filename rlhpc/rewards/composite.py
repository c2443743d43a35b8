"""A task that combines others: [composite.NAME] of the run file.

Input: a completion and a reference, which is the same for every part, or a record of which each part is given a field.
Output: a RewardOutcome: the weighted sum of the parts' rewards, correct where one of them is.  A part that cannot judge
leaves the whole without a verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from rlhpc.config_judge import JudgeConfig
from rlhpc.config_sandbox import CODE_TASKS, SandboxConfig
from rlhpc.config_tasks import CompositeConfig
from rlhpc.contracts import RewardFunction, RewardOutcome
from rlhpc.rewards import registry
from rlhpc.rewards.returned import JudgedOutcome, as_outcome
from rlhpc.rewards.task_settings import task_settings

_SHOWN_CHARACTERS = 120  # of each part's detail


def resolve(task: str) -> RewardFunction:
    """The function of a task, of a composite too.  Raises ConfigError as registry.resolve."""
    settings = task_settings().composite.get(task)
    return registry.resolve(task) if settings is None else Composite(settings)


def reference_check(
    task: str, composites: Mapping[str, CompositeConfig], judge: JudgeConfig, sandbox: SandboxConfig | None = None
) -> Callable[[str], None] | None:
    """A function that raises ValueError for a reference that the task, or a part of a composite, cannot read."""
    if task == "llm_judge":
        # Imported here because only this task needs it before a run.
        from rlhpc.rewards import llm_judge

        return partial(llm_judge.check_reference, settings=judge)
    if (settings := composites.get(task)) is None:
        check = registry.reference_check(task)
        if check is None or sandbox is None or task not in CODE_TASKS:
            return check
        return partial(check, settings=sandbox)
    checks = {name: reference_check(part, {}, judge, sandbox) for name, part in settings.tasks.items()}

    def check_parts(reference: str) -> None:
        given = references(settings, reference)
        for name, part_check in checks.items():
            if part_check is not None:
                part_check(given[name])

    return check_parts


def references(settings: CompositeConfig, reference: str) -> dict[str, str]:
    """The reference of each part.  Raises ValueError if the whole is no record, or lacks a field."""
    if not settings.fields:
        return dict.fromkeys(settings.tasks, reference)
    record = json.loads(reference)
    if not isinstance(record, dict):
        raise ValueError(f"reference {reference[:80]!r} is no record; legal: data.reference_field='*'")  # noqa: TRY004
    return {name: _field(record, settings.fields.get(name), reference) for name in settings.tasks}


def _field(record: Mapping[str, Any], name: str | None, whole: str) -> str:
    if name is None:
        return whole
    if record.get(name) is None:
        raise ValueError(f"the record has no field {name!r}, which composite.fields names; it has {', '.join(record)}")
    value = record[name]
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(repr(value)), "f")  # as data/records.py has it, without an exponent
    return value if isinstance(value, str) else json.dumps(value)


class Composite:
    """A RewardFunction that combines several."""

    def __init__(self, settings: CompositeConfig) -> None:
        """Import the parts' functions.  Raises ConfigError as registry.resolve."""
        self._settings = settings
        self._functions = {name: registry.resolve(task) for name, task in settings.tasks.items()}

    def __call__(self, completion: str, reference: str) -> RewardOutcome:
        """Parts: each part's reward under its name, and its own parts as NAME.PART.  Raises what a part raises."""
        given = references(self._settings, reference)
        found = {name: as_outcome(judge(completion, given[name])) for name, judge in self._functions.items()}
        parts: dict[str, float] = {}
        rewards_at: dict[int, float] = {}
        for name, outcome in found.items():
            parts |= {name: outcome.reward} | {f"{name}.{part}": value for part, value in outcome.parts.items()}
            for place, value in outcome.rewards_at.items():
                rewards_at[place] = rewards_at.get(place, 0.0) + self._settings.weight(name) * value
        deciding = found[self._settings.correct]
        return JudgedOutcome(
            sum(self._settings.weight(name) * outcome.reward for name, outcome in found.items()),
            deciding.is_correct,
            parts,
            "; ".join(f"{name}: {outcome.detail[:_SHOWN_CHARACTERS]}" for name, outcome in found.items()),
            deciding.answer,
            rewards_at,
            costs=_sum(outcome.costs for outcome in found.values() if isinstance(outcome, JudgedOutcome)),
        )


def _sum(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in costs:
        for name, amount in each.items():
            total[name] = total.get(name, 0.0) + amount
    return total
