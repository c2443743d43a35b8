"""Reward functions for whole runs, named by their run files as "tests.ring.ring_rewards:parity" and so on."""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from rlhpc.protocol.contracts import RewardOutcome

SLOW_S = 0.01
GATE = "RLHPC_TEST_GATE"  # names a file: until it is there, nobody is judged; a number in it is the next limit
GATE_AFTER = "RLHPC_TEST_GATE_AFTER"  # but so many completions are, by each worker
NO_ANSWER = "I do not know."  # a completion of the trial before a run
_judged = itertools.count()


def parity(completion: str, reference: str) -> RewardOutcome:
    """Random text is right about half the time, so that most groups have spread."""
    reward = float(sum(map(ord, completion)) % 2)
    return RewardOutcome(reward, reward > 0, parts={"odd": reward}, detail=f"against {reference}")


def parity_by_characters(completion: str, reference: str) -> RewardOutcome:
    """The same reward, of which odd characters earn 0.1 / n, n their place; the rest is left for the end."""
    places = [n for n, character in enumerate(completion, 1) if ord(character) % 2]
    return replace(parity(completion, reference), rewards_at={n: 0.1 / n for n in places})


def parity_or_alike(completion: str, reference: str) -> RewardOutcome:
    """As parity, but every third prompt is too easy or too hard: what its rollouts earn is all the same."""
    answer = int(reference)
    if answer % 3:
        return parity(completion, reference)
    return RewardOutcome(float(answer % 2), is_correct=bool(answer % 2))


def slow_parity(completion: str, reference: str) -> RewardOutcome:
    """Bounds the pace of a run from below, so that there is a middle in which something can happen to it."""
    time.sleep(SLOW_S)
    return parity(completion, reference)


def very_slow_parity(completion: str, reference: str) -> RewardOutcome:
    """Steps of half a second, for who wants to be there between two of them."""
    time.sleep(3 * SLOW_S)
    return parity(completion, reference)


def patient_parity(completion: str, reference: str) -> RewardOutcome:
    """Steps of five seconds, for who compares with a step what takes seconds."""
    time.sleep(30 * SLOW_S)
    return parity(completion, reference)


def gated_parity(completion: str, reference: str) -> RewardOutcome:
    """Waits until the test lets it go on, so that there is a middle however fast the machine; see rewards.timeout_s."""
    if is_trial(completion, reference):
        return parity(completion, reference)
    judged, gate = next(_judged), Path(os.environ[GATE])
    if judged < int(os.environ.get(GATE_AFTER, "0")):
        return slow_parity(completion, reference)
    while not gate.exists() or judged >= int(gate.read_text(encoding="utf-8") or sys.maxsize):
        time.sleep(0.05)
    return parity(completion, reference)


def open_gate(gate: Path, up_to: int | None = None) -> None:
    """Let gated_parity judge so many completions, by each worker, or all there are; at one instant for all readers."""
    written = gate.with_suffix(".tmp")
    written.write_text("" if up_to is None else str(up_to), encoding="utf-8")
    written.rename(gate)


def nothing(completion: str, reference: str) -> RewardOutcome:
    """Nobody is ever right: no group has spread."""
    return RewardOutcome(0.0, is_correct=False)


def is_trial(completion: str, reference: str) -> bool:
    """Whether this may be the trial before a run (launch/checks/own_code.py), which nothing may keep."""
    return completion in ("", NO_ANSWER) or reference in completion


def fail(completion: str, reference: str) -> RewardOutcome:
    """The verifier is broken."""
    raise OSError(f"no compiler to judge {reference} with")


def fail_after_the_trial(completion: str, reference: str) -> RewardOutcome:
    """The same, but a start does not notice."""
    return parity(completion, reference) if is_trial(completion, reference) else fail(completion, reference)
