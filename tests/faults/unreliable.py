"""Agent, environments, tool, judge and reward function that fail as often as a directory says, and work then.

The directory, named by FAULTS, holds an empty file for each failure that is left, and in HOW what a failure does.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium

from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.environments.tools import ToolEnvironment
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.environment import Environment, Step
from tests.ring.ring_rewards import parity

FAULTS = "RLHPC_TEST_FAULTS"  # environment variable
HOW = "how"  # "raise", or "die": the process ends; and where
ALWAYS = 10_000
WORDS = "the tool server answers 502"
CALL = '<tool_call>{"name": "look_up", "arguments": {"text": "%d"}}</tool_call>'
GAME = "tests.faults.unreliable:Unreliable-v0"  # Gymnasium imports the module


def break_down(directory: Path, how: str, times: int = ALWAYS, where: str = "") -> None:
    """Fail so often from now on; where: only in processes with this in the path of their temporary files."""
    directory.mkdir(exist_ok=True)
    for number in range(times):
        (directory / f"{number}.left").touch()
    (directory / HOW).write_text(f"{how} {where}")


def mend(directory: Path) -> None:
    """Fail no more."""
    (directory / HOW).unlink()


def fail_if_told() -> None:
    """Take one of the failures that are left; who takes none goes on."""
    directory = Path(os.environ[FAULTS])
    with suppress(FileNotFoundError):
        how, _, where = (directory / HOW).read_text().partition(" ")
        if where not in os.environ.get("TMPDIR", ""):
            return
        for left in directory.glob("*.left"):
            with suppress(FileNotFoundError):  # another has taken it
                left.unlink()
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ConnectionError(WORDS)


def play(record: dict[str, Any]) -> float:
    """One turn, by HTTP; an agent of docs/environments.md."""
    fail_if_told()
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": [{"role": "user", "content": record["digits"]}]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"] or ""
    return parity(said, "").reward


class OneTurn(Environment):
    """Pays for half of all turns."""

    async def reset(self, record: Mapping[str, Any]) -> tuple[()]:
        fail_if_told()
        return ()

    async def step(self, completion: str) -> Step:
        return Step(reward=parity(completion, "").reward, is_done=True)


class Game(gymnasium.Env[str, str]):
    """The same as a game."""

    observation_space = action_space = gymnasium.spaces.Text(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        fail_if_told()
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", parity(action, "").reward, True, False, {}


class Tools(ToolEnvironment):
    """One tool, whose server fails."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        super().__init__(settings)
        self.tools = {"look_up": look_up}


def look_up(text: str) -> str:
    """Give back what was looked up."""
    fail_if_told()
    return text


gymnasium.register("Unreliable-v0", Game)


def judge(completion: str, reference: str) -> RewardOutcome:
    """As parity."""
    fail_if_told()
    return parity(completion, reference)


def grade(asked: dict[str, Any]) -> str | int:
    """What a judge replies to a request, or the status with which its server fails."""
    try:
        fail_if_told()
    except ConnectionError:
        return 502
    return f"Grade: {10 * parity(asked['messages'][0]['content'], '').reward:.0f}"
