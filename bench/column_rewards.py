"""Task "bench.column_rewards:reward": the demo's sums, where every column is paid for as soon as it is written.

Input: a completion such as "7+6+0=13;2+5+1=08;8+3+0=11;4+9+1=14;14183" and the total "14183".  Output: the share of
columns whose last digit is the total's at that place, each earned at its ";".  What is still to be earned can be seen
in what is written, as it cannot where the total alone is judged (bench/critic.py).
"""

from __future__ import annotations

import re

from rlhpc.protocol.contracts import RewardOutcome

COLUMN = re.compile(r"[0-9+]+=[0-9]*([0-9]);")


def reward(completion: str, reference: str) -> RewardOutcome:
    """A column for each digit of the total but the first, which is carried."""
    wanted = reference[:0:-1]
    columns = zip(COLUMN.finditer(completion), wanted, strict=False)
    earned = {column.end(): 1 / len(wanted) for column, digit in columns if column[1] == digit}
    return RewardOutcome(sum(earned.values()), is_correct=completion.rpartition(";")[2] == reference, rewards_at=earned)
