"""An agent's report on its rollout: anything that a reward function may return, or nothing.

Input: a JSON value.  Output: RewardOutcome, or None if the report has no reward.
"""

from __future__ import annotations

import json

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.returned import NoReward, as_outcome, fault_of, sendable
from rlhpc.roles.generator.agents.host import LONGEST_TEXT, MOST_KEPT


def outcome_of(reported: object) -> RewardOutcome | None:
    """Raises NoReward for what is none, or no finite number."""
    if reported is None:
        return None
    outcome = as_outcome(reported)
    for name, value in {"reward": outcome.reward, **outcome.parts}.items():
        if why := fault_of(name, value):
            raise NoReward(sendable(why))
    if outcome.rewards_at:
        raise NoReward("rewards_at: an agent's reward is of the whole rollout")
    parts = {sendable(name): float(value) for name, value in outcome.parts.items()}
    return RewardOutcome(
        float(outcome.reward), bool(outcome.is_correct), parts, sendable(str(outcome.detail))[:LONGEST_TEXT]
    )


def last_line(output: str) -> RewardOutcome | None:
    """Of a program that has ended well: its last line, where that is JSON; None: it has said nothing of a reward.

    Raises NoReward as outcome_of does.
    """
    line = output.strip().replace("\r", "\n").rpartition("\n")[2]  # splitlines also splits at U+2028, legal in JSON
    if line == output.strip() and line.endswith("}") and len(output.encode()) >= MOST_KEPT:  # the end of a report
        raise NoReward(f"the last line has {MOST_KEPT} bytes or more, of which the beginning is not kept: shorten it")
    try:
        return outcome_of(json.loads(line))
    except (ValueError, RecursionError):  # it speaks to people
        return None
