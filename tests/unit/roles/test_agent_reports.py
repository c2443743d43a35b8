"""What a program that is an agent says of its reward: its last line, where that is JSON."""

from __future__ import annotations

import json

import pytest

from rlhpc.agents.host import MOST_KEPT
from rlhpc.agents.session import last_line
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.outcomes import NoReward


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", " "])
def test_the_last_line_may_hold_what_ends_a_line_elsewhere(mark: str, end: str) -> None:
    line = json.dumps({"reward": 0.5, "detail": f"a{mark}b"}, ensure_ascii=False)
    outcome = last_line(f"begun\n50 %\r100 %\r{line}{end}")
    assert outcome is not None
    assert (outcome.reward, outcome.detail) == (0.5, f"a{mark}b")


@pytest.mark.parametrize("output", ["", "\n", "1.0\ndone", "{"])
def test_words_for_people_are_no_reward(output: str) -> None:
    assert last_line(output) is None


HUGE = "9" * 400  # a whole number for JSON; the digits of a model, perhaps


@pytest.mark.parametrize(
    "line", ["[1]", HUGE, f"-{HUGE}", "1e39", f'{{"reward": 1, "n": {HUGE}}}', f'{{"reward": 1, "acc": {HUGE}}}']
)
def test_what_is_no_reward_is_refused(line: str) -> None:
    with pytest.raises(NoReward):
        last_line(f"begun\n{line}\n")


def test_half_a_surrogate_pair_in_a_report_is_spelt_out_since_no_message_can_have_it() -> None:
    found = last_line('{"reward": 1, "detail": "cut \\ud83d", "part\\udfff": 2}')
    assert found == RewardOutcome(1.0, True, {"part\\udfff": 2.0}, "cut \\ud83d")
    with pytest.raises(NoReward, match=r"not str \\ud83d"):
        last_line('{"reward": "\\ud83d"}')


def test_a_report_whose_beginning_was_not_kept_is_refused_and_not_overheard() -> None:
    """Where the task judges as well, the agent's own part would be missing without a word."""
    line = json.dumps({"reward": 1, "detail": "x" * MOST_KEPT})
    for kept in (line[-MOST_KEPT:], (line + "\n")[-MOST_KEPT:]):
        with pytest.raises(NoReward, match="65536 bytes or more"):
            last_line(kept)
    assert last_line("words without an end " * 10_000) is None
    assert last_line("50 % " * 20_000 + '\r{"reward": 1}') == RewardOutcome(1.0, True)
