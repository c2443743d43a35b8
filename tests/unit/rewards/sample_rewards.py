"""Reward functions that misbehave; named by tests as "sample_rewards:hang" and so on."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhpc.protocol.contracts import RewardOutcome


def length(completion: str, reference: str) -> RewardOutcome:
    print("a reward function may print")
    return RewardOutcome(float(len(completion)), is_correct=True, parts={"length": float(len(completion))}, detail="ok")


def of_record(completion: str, record: dict) -> bool:
    return completion == record["reward_model"]["ground_truth"] and record["data_source"] == "sums"


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
    os._exit(3)


def fail(completion: str, reference: str) -> RewardOutcome:
    raise ValueError(f"cannot judge {completion}")


def allocate(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(float(len(bytearray(8 << 30))), is_correct=True)


def hold_memory(completion: str, reference: str) -> RewardOutcome:
    held.append(bytearray(64 << 20))
    return RewardOutcome(float(len(held)), is_correct=True)


held: list[bytearray] = []


def fork_and_leave(completion: str, reference: str) -> RewardOutcome:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return RewardOutcome(1.0, is_correct=True)


def fork_and_come_back(completion: str, reference: str) -> RewardOutcome:
    pid = os.fork()
    if pid and completion == "wait":
        time.sleep(0.5)  # the child is back before its parent
    return RewardOutcome(2.0 if pid == 0 else 1.0, is_correct=True)


def keep_program(completion: str, reference: str) -> RewardOutcome:
    if not kept:
        kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
    return RewardOutcome(float(kept[0].pid), is_correct=kept[0].poll() is None)


kept: list[subprocess.Popen[bytes]] = []


def read_input(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(float(len(sys.stdin.read())), is_correct=True)


def return_text(completion: str, reference: str):
    return RewardOutcome(completion, is_correct=True)


def return_nan_and_a_part_called_reward(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(float("nan"), is_correct=True, parts={"reward": 1.0})


def return_nan(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(float("nan"), is_correct=True)


def return_more_than_float32_has(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1e300, is_correct=True)


def return_infinite_part(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1.0, is_correct=True, parts={"bonus": float("inf")})


def rewards_of_words(completion: str, reference: str) -> RewardOutcome:
    ends = [match.end() for match in re.finditer(r"\w+", completion)]
    return RewardOutcome(float(len(ends)), is_correct=True, rewards_at=dict.fromkeys(ends, 1.0))


def reward_before_the_first_character(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1.0, is_correct=True, rewards_at={0: 1.0})


def reward_behind_the_last_character(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1.0, is_correct=True, rewards_at={len(completion): 0.5, len(completion) + 1: 0.5})


def reward_at_a_fraction(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1.0, is_correct=True, rewards_at={1.5: 1.0})  # type: ignore[dict-item]


def nan_at_a_character(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1.0, is_correct=True, rewards_at={1: float("nan")})


def rewards_in_a_list(completion: str, reference: str) -> RewardOutcome:
    return RewardOutcome(1.0, is_correct=True, rewards_at=[1.0])  # type: ignore[arg-type]


def return_nothing(completion: str, reference: str) -> None:
    pass


def return_two_rewards(completion: str, reference: str) -> dict[str, float]:
    return {"reward": 1.0, "score": 0.0}


def return_number(completion: str, reference: str) -> float:
    return len(completion) / 2


async def return_later(completion: str, reference: str) -> dict[str, object]:
    await asyncio.sleep(0)
    return {"score": 0.5, "acc": True, "brevity": 1, "answer": completion}


def raise_half_a_pair(completion: str, reference: str) -> float:
    raise ValueError("\ud800")


def answer_half_a_pair(completion: str, reference: str) -> dict[str, object]:
    return {"reward": 1.0, "answer": "\ud800", "part\udfff": 0.5, "rewards_at": {1: 0.5}}


not_callable = 5


def lengths(completions: list[str], references: list[str]) -> list[object]:
    calls.append(len(completions))
    time.sleep(0.02)  # while others come
    return [{"reward": float(len(text)), "batch": len(completions)} for text in completions]


calls: list[int] = []


async def lengths_later(completions, records):
    await asyncio.sleep(0)
    return [len(text) / record["per"] for text, record in zip(completions, records, strict=True)]


def as_trl_calls_it(prompts, completions, answer, weight=(), **kwargs):
    assert "prompt" not in kwargs
    assert all(len(column) == len(completions) for column in kwargs.values())
    said = zip(prompts, completions, answer, strict=True)
    return [float(text == prompt + wanted) + len(kwargs) / 10 for prompt, text, wanted in said]


def batch_of_which_one_is(completions, references):
    """What the completions ask for; the whole batch suffers from `raise`, `die` and `hang`."""
    time.sleep(0.02)
    for text in completions:
        if text == "raise":
            raise ValueError("cannot judge this")
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "hang":
            hang(text, "")
    rewards = {"nan": float("nan"), "none": None, "text": "1.0"}
    return [rewards.get(text, 1.0) for text in completions]


def one_for_all(completions, references):
    return 1.0


def always_one(completions, references):
    return [1.0]


def batched_by_place(completions, references, /):
    return [1.0 for _ in completions]


def batched_with_rest(completions, references, **kwargs):
    return [float(len(kwargs)) + len(text) if kwargs else float(text) for text in references]


def scaled(completion: str, reference: str, scale: float, *, shift: float = 0.0) -> float:
    return scale * len(completion) + shift


def scaled_together(completions, scale, answer=()):
    return [scale * len(completion) + len(answer) for completion in completions]


def leave_politely(completion: str, reference: str) -> float:
    raise SystemExit(1)


def fail_within(completion: str, reference: str) -> float:
    return _looked_up(completion)


def _looked_up(completion: str) -> float:
    return {"right": 1.0}[completion]


def close_the_pipe(completion: str, reference: str) -> float:
    os.closerange(3, 64)
    time.sleep(1.0)
    os._exit(5)


def batch_that_fails(completions, references):
    return [_looked_up(completion) for completion in completions]
