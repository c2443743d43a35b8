"""[agent]: programs of the user's own that sample over HTTP (docs/agents.md), and their rules.  Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rlhpc.config_data import AGENT, DataConfig
from rlhpc.config_sections import Duration, Positive, Section
from rlhpc.user_code import is_import_path

if TYPE_CHECKING:
    from rlhpc.config import Config

_PROMPT_KEYS = ("prompt_template", "prompt_field", "system_prompt")


class AgentConfig(Section):
    """[agent]: who speaks to the policy in datasets with data.environment = "agent"."""

    function: str = ""
    """Your own package.module:function, def or async def, called with the record, each time in a new process; its
    return value is the reward. Or `command`."""
    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Instead: a program and its arguments, started for every rollout.  The record is its standard input, as JSON; the
    last line that it prints is the reward."""
    turn_timeout_s: Duration = 120.0
    """An agent without a pending request for longer is killed: while it starts, between two turns, until it reports."""
    max_sessions: Positive = 256
    """Maximum concurrent agents of each generator; further ones wait."""
    max_request_bytes: Positive = 4 << 20
    """Longer requests are refused."""


def agent_has_its_keys(config: Config) -> None:
    """An agent is a function or a command, says all that the policy reads, and answers while its lease holds."""
    agent = config.agent
    if not any(dataset.environment == AGENT for dataset in config.data):
        return
    if not agent.function and not agent.command:
        raise ValueError(f'data.environment="{AGENT}" needs agent.function (package.module:function) or agent.command')
    if agent.function and agent.command:
        raise ValueError(
            f"agent.function={agent.function!r} beside agent.command={list(agent.command)}; legal: one of them"
        )
    if agent.function and not is_import_path(agent.function):
        raise ValueError(f"agent.function={agent.function!r}; legal: package.module:function")
    if agent.turn_timeout_s >= config.admission.lease_deadline_s:
        raise ValueError(
            f"agent.turn_timeout_s={agent.turn_timeout_s:g} is not below admission.lease_deadline_s="
            f"{config.admission.lease_deadline_s:g}: a rollout whose agent is silent would be sampled a second time"
        )
    for place, dataset in enumerate(config.data):
        where = f"data.{place}" if len(config.data) > 1 else "data"
        for key in _PROMPT_KEYS if dataset.environment == AGENT else ():
            if (value := getattr(dataset, key)) != DataConfig.model_fields[key].default:
                raise ValueError(
                    f'{where}.{key}={value!r} with {where}.environment="{AGENT}": the agent gets the record, and what '
                    f"it says is all that the policy reads; legal: leave {key} out"
                )


def agents_are_not_evaluated(config: Config) -> None:
    """They live beside generators, which an evaluation has none of."""
    if config.evaluation and any(dataset.environment == AGENT for dataset in config.data):
        raise ValueError(
            f'[[evaluation]] with data.environment="{AGENT}": agents are not evaluated; legal: one of the two'
        )
