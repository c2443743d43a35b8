"""Reward functions that misbehave; named by tests as "sample_rewards:hang" and so on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhpc.contracts import RewardOutcome


def length(completion: str, reference: str) -> RewardOutcome:
    print("a reward function may print")
    return RewardOutcome(float(len(completion)), is_correct=True, parts={"length": float(len(completion))}, detail="ok")


def hang(completion: str, reference: str) -> RewardOutcome:
    while True:
        time.sleep(60)


def hang_with_child(completion: str, reference: str) -> RewardOutcome:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(reference).write_text(str(child.pid))
    return hang(completion, reference)


def die(completion: str, reference: str) -> RewardOutcome:
    os.kill(os.getpid(), signal.SIGSEGV)
    return length(completion, reference)


def leave(completion: str, reference: str) -> RewardOutcome:
    raise SystemExit(3)


def fail(completion: str, reference: str) -> RewardOutcome:
    raise ValueError(f"cannot judge {completion}")


def allocate(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(float(len(bytearray(8 << 30))), is_correct=True)


def read_input(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(float(len(sys.stdin.read())), is_correct=True)


def return_text(completion: str, reference: str):
    return RewardOutcome(completion, is_correct=True)


def return_nan(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(float("nan"), is_correct=True)


def return_infinite_part(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1.0, is_correct=True, parts={"bonus": float("inf")})


def return_number(completion: str, reference: str):
    return 1.0


not_callable = 5
