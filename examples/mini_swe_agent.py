"""A harness of others as the agent: mini-swe-agent mends a repository, and its tests are the reward.

`agent.function = "mini_swe_agent:solve"` (examples/mini_swe_agent.toml) trains with it.  The policy learns from
nothing: `python examples/mini_swe_agent.py swe` makes a tiny model of random weights whose words are five commands, and
a dataset of repositories with one bug each.  Needs mini-swe-agent 2 (`pip install mini-swe-agent`).

The agent's commands run on this node as you.  Those of a model that can write others belong into a container.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
from echo_agent import tiny_model
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import FormatError
from minisweagent.models.utils.actions_text import format_observation_messages, parse_regex_actions
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

SYSTEM = "Answer with exactly one command."
TASK = "Mend this: {{task}}"
COMMANDS = (
    "cat calc.sh",
    "sed -i 's/[-+*]/+/' calc.sh",
    "sed -i 's/[-+*]/-/' calc.sh",
    "sed -i 's/[-+*]/*/' calc.sh",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
ACTIONS = tuple(f"```mswea_bash_command\n{command}\n```" for command in COMMANDS)
RESULTS = {"sum": "+", "difference": "-", "product": "*"}


class PolicyConfig(BaseModel):
    """What mini-swe-agent's templates may use, and saves with its trajectories."""

    model_name: str = "policy"
    action_regex: str = r"```mswea_bash_command\s*\n(.*?)\n```"
    format_error: str = "Format error: {{error}}"
    observation: str = "<returncode>{{output.returncode}}</returncode>\n<output>\n{{output.output}}</output>"


class Policy:
    """mini-swe-agent's protocol of a model, by OpenAI's client: its LitellmModel without litellm."""

    def __init__(self) -> None:
        self.config = PolicyConfig()
        self._client = OpenAI()  # address and key are in the environment

    def query(self, messages: list[dict[str, Any]], **wishes: Any) -> dict[str, Any]:
        """Return the policy's turn with its one action; a turn without is told to the policy, as FormatError."""
        sent = [{"role": message["role"], "content": message["content"]} for message in messages]
        reply = self._client.chat.completions.create(model=self.config.model_name, messages=sent, **wishes)
        said = reply.choices[0].message.content or ""
        turn: dict[str, Any] = {"role": "assistant", "content": said, "extra": {"cost": 0.0}}
        try:
            actions = parse_regex_actions(
                said, action_regex=self.config.action_regex, format_error_template=self.config.format_error
            )
        except FormatError as error:
            raise FormatError(turn, *error.messages) from None  # with the turn, or the history would lose it
        turn["extra"]["actions"] = actions
        return turn

    def format_message(self, **parts: Any) -> dict[str, Any]:
        """Return a message as it is."""
        return parts

    def format_observation_messages(
        self, _message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return what the commands have printed."""
        return format_observation_messages(
            outputs, observation_template=self.config.observation, template_vars=template_vars
        )

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        """Return what templates may use."""
        return self.config.model_dump()

    def serialize(self) -> dict[str, Any]:
        """Return what is saved with a trajectory."""
        return {"info": {"config": {"model": self.config.model_dump(), "model_type": "mini_swe_agent.Policy"}}}


def solve(record: dict[str, Any]) -> dict[str, Any]:
    """Called for every rollout, in a process of its own; the reward is 1 if the repository's test passes."""
    with tempfile.TemporaryDirectory() as place:
        for name, text in record["files"].items():
            Path(place, name).write_text(text, encoding="utf-8")
        agent = DefaultAgent(
            Policy(), LocalEnvironment(cwd=place, timeout=20), system_template=SYSTEM, instance_template=TASK,
            step_limit=3, cost_limit=0.0,
        )  # fmt: skip
        try:
            ended = agent.run(record["task"])["exit_status"]
        except BadRequestError as error:  # no room for another turn
            ended = str(error.code)
        passes = subprocess.run(["sh", "test.sh"], cwd=place, timeout=20, check=False).returncode == 0
    return {"reward": float(passes), "detail": ended, "num_calls": float(agent.n_calls)}


# -------------------------------------------------------------------------------------------------- a model, and tasks


def make(directory: Path) -> None:
    """Write train.jsonl and model/, an ordinary HF checkpoint each of whose tokens may be a whole command."""
    words = (*ACTIONS, *RESULTS, *RESULTS.values(), "calc", "0", "output", "error", "\n", ">")
    tiny_model(directory / "model", words, pattern="|".join([*map(re.escape, ACTIONS), r"\w+", r"[\s\S]"]))
    rng = random.Random(0)
    records = [_record(rng) for _ in range(1000)]
    (directory / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def _record(rng: random.Random) -> dict[str, Any]:
    wanted = rng.choice(list(RESULTS))
    wrong = rng.choice([sign for result, sign in RESULTS.items() if result != wanted])
    a, b = rng.randint(5, 9), rng.randint(2, 4)
    right = {"sum": a + b, "difference": a - b, "product": a * b}[wanted]
    files = {"calc.sh": f'echo "$(($1 {wrong} $2))"\n', "test.sh": f'[ "$(sh calc.sh {a} {b})" = {right} ]\n'}
    return {"task": f"calc has to print the {wanted}", "files": files}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write repositories with a bug and a tiny model of random weights.")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where to write them, such as swe")
    make(parser.parse_args().directory)
