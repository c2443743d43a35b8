"""The contract of environments, with which a policy interacts over several turns.

    reset(record) ─▶ messages ─▶ the policy's turn ─▶ step(completion) ─▶ messages ─▶ the policy's turn ─▶ … ─▶ done

An environment reads and writes text; tokenisation, and which tokens are trained, is handled elsewhere
(environments/dialogue.py).  It runs in a worker process of the reward service, which may be killed at any moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rlhpc.config.tables_services import EnvironmentConfig


# --------------------------------------------------------------------------------------------------------- tool schemas
#
# The built-in tools of the environment "tools" as models see them: JSON schemas of functions, by name.
#
# Chat templates write them into the prompt, in the words that a model knows.  What the tools do: environments/tools.py.


def _function(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOL_SCHEMAS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "calculator": _function(
            "calculator",
            "Calculate the value of an arithmetic expression: + - * / // % ** and parentheses.",
            "expression",
            "for example (3 + 4) * 12",
        ),
        "python": _function(
            "python",
            "Run a Python 3 program and return what it prints. No network, no files that last.",
            "code",
            "a whole program, which prints its results",
        ),
        "search": _function(
            "search", "Search a collection of documents and return those that fit best.", "query", "a few words"
        ),
        "shell": _function(
            "shell",
            "Run a shell command in the task's container and return what it prints. Files last, processes do not.",
            "command",
            "for example ls -la",
        ),
    }
)


def tool_name(tool: str) -> str:
    """The name by which the policy calls a tool of the run file: a built-in one, or package.module:function."""
    return tool.rpartition(":")[2]


# ---------------------------------------------------------------------------------------------------------- environment


ROLES = ("system", "developer", "user", "assistant", "tool")  # of messages: others are in no chat template
MOST_KEPT = 1024
Message = Mapping[str, str]  # {"role": "tool", "content": "…"}, for the chat template of the model


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's response to one turn of the policy."""

    messages: Sequence[Message] = ()  # for the next turn; ignored once it is done
    reward: float = 0.0  # for this turn; the rewards of all turns are summed
    is_done: bool = False  # no more turns
    is_correct: bool | None = None  # the dialogue so far; None: correct if the rewards sum to 1.0 or more
    parts: Mapping[str, float] = field(default_factory=dict)  # named addends of the reward, for metrics
    detail: str = ""  # one line for people


class Environment(ABC):
    """One dialogue.  Deterministic: the same record and the same turns give the same messages and rewards.

        class Echo(Environment):  # data.environment = "my_environments:Echo", data.task = "environment"
            async def reset(self, record):
                self.word = record["answer"]
                return [{"role": "user", "content": f"Say {self.word}."}]

            async def step(self, completion):
                return Step(reward=float(completion.strip() == self.word), is_done=True)

    So it needs no saved state: to continue a dialogue in another process, its turns so far are replayed.
    An exception in a method is a verifier error, never a reward of zero.
    """

    @classmethod
    def open(cls, settings: EnvironmentConfig) -> Self:
        """Create an environment from the run file's table [environment]; the default passes environment.arguments."""
        return cls(**settings.arguments)

    @abstractmethod
    async def reset(self, record: Mapping[str, Any]) -> Sequence[Message]:
        """Begin with a record of the dataset; return the messages that follow the prompt, () for none."""

    @abstractmethod
    async def step(self, completion: str) -> Step:
        """Take one turn of the policy, as text with special tokens except the one that ended it.

        A turn that was cut by a limit is passed as it is.  Messages that no longer fit are not shown to the policy.
        """

    async def finish(self) -> Step:
        """A limit ended the dialogue after the last step: return any remaining reward.  No more messages."""
        return Step()

    def offered_tools(self) -> tuple[str, ...]:
        """Names of the tools that a turn may call: `rlhpc check` warns of those that prompts do not name."""
        return ()

    def served_tools(self) -> str:
        """Digest of the tools of [mcp.NAME] that a turn may call; prompts that tell of others are refused."""
        return ""

    @property
    def most_kept(self) -> int:
        """Dialogues that a worker keeps between turns; the one with the oldest last turn is then replayed if needed."""
        return MOST_KEPT

    async def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free resources; not called if its process is killed."""
