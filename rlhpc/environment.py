"""The contract of environments: what a policy talks to over several turns.

    reset(record) ─▶ messages ─▶ the policy's turn ─▶ step(completion) ─▶ messages ─▶ the policy's turn ─▶ … ─▶ done

An environment is text on both sides; what of it becomes tokens, and which of these are trained, is no business of its
own (roles/common/dialogue.py).  It lives in a worker process of the reward service, which may be killed at any moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rlhpc.config_environment import EnvironmentConfig

Message = Mapping[str, str]  # {"role": "tool", "content": "…"}, for the chat template of the model


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to one turn of the policy."""

    messages: Sequence[Message] = ()  # for the next turn; none of them are shown once it is done
    reward: float = 0.0  # of this turn; those of all turns are added up
    is_done: bool = False  # no more turns
    is_correct: bool | None = None  # of the dialogue so far; None: from a sum of rewards of 1.0 on
    parts: Mapping[str, float] = field(default_factory=dict)  # named addends of the reward, for metrics
    detail: str = ""  # one line for people


class Environment(ABC):
    """One dialogue.  Deterministic: the same record and the same turns give the same messages and rewards.

    So it needs no saved state: where a dialogue goes on in another process, its turns so far are played again.
    What a method raises is a verifier error, never a reward of zero.
    """

    @classmethod
    def open(cls, settings: EnvironmentConfig) -> Self:
        """One that has not begun, by the run file's table [environment]; the default takes nothing from it."""
        return cls()

    @abstractmethod
    async def reset(self, record: Mapping[str, Any]) -> Sequence[Message]:
        """Begin with a record of the dataset; return what is to be said after the prompt, () for nothing."""

    @abstractmethod
    async def step(self, completion: str) -> Step:
        """Take one turn of the policy, special tokens spelt out but for the one that ended it.

        A turn that was cut by a limit comes as it is.  Messages that find no more room are not shown.
        """

    async def finish(self) -> Step:
        """The dialogue was ended by a limit behind the last step: what it has earned beside.  No more messages."""
        return Step()

    async def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free what it holds; not called where its process is killed."""
