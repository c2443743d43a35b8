"""[environment]: dialogues of several turns (docs/environments.md), and their rules.  Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhpc.config_data import OWN_REWARD
from rlhpc.config_sections import Arguments, LoosePath, Positive, Section

if TYPE_CHECKING:
    from rlhpc.config import Config

LIBRARIES = ("gymnasium", "verifiers")  # environments of other packages, each with an extra of its name
ToolName = Literal["calculator", "python", "search"]


CALL_END = "</tool_call>"  # of environment.call_form="hermes"


class EnvironmentConfig(Section):
    """[environment]: dialogues of several turns, for datasets that have data.environment."""

    max_turns: Positive = 8
    """Maximum turns of the policy; the last one ends the dialogue."""
    max_turn_tokens: Positive | None = None
    """Maximum tokens of one turn; none: what is left of max_completion_tokens, which also counts the environment's
    tokens."""
    tools: Annotated[tuple[ToolName, ...], Field(strict=False)] = ()
    """Tools of the environment "tools", described to the model by its chat template."""
    call_form: Literal["hermes", "llama3"] = "hermes"
    """How the model writes a call: "hermes", as Qwen: <tool_call>{json}</tool_call>; "llama3": the turn is the call."""
    max_result_characters: Positive = 2000
    """Longer tool results are cut."""
    id: str = ""
    """For "gymnasium" and "verifiers": the environment's name in that library."""
    arguments: Arguments = Field(default={})
    """Keyword arguments of its constructor, or of that of your own class: {max_guesses = 8}."""
    corpus: LoosePath | None = None
    """Documents of "search": a .jsonl file of {"text": …}, or of {"title": …, "text": …}."""
    num_documents: Positive = 3
    """Documents returned by one search."""


def libraries_have_their_id(config: Config) -> None:
    """Which environment of a library; its arguments go with it."""
    table, names = config.environment, {dataset.environment for dataset in config.data}
    libraries = sorted(names & {*LIBRARIES})
    if bool(libraries) != bool(table.id):
        raise ValueError(
            f"environment.id={table.id!r} with data.environment={', '.join(map(repr, sorted(names)))}: it names one of "
            f"{' or '.join(map(repr, LIBRARIES))}, which need it"
        )
    if table.arguments and not libraries and not any(":" in name for name in names):
        raise ValueError(
            f"environment.arguments are for {', '.join(map(repr, LIBRARIES))} and package.module:Class; legal: leave "
            "them out"
        )
    if len(libraries) > 1:
        raise ValueError(
            f"data.environment={', '.join(map(repr, libraries))} in one run share environment.id; legal: one"
        )


def environment_has_its_keys(config: Config) -> None:
    """Turns are told apart by a chat template; tools, and what they need, go together."""
    table = config.environment
    names = {dataset.environment for dataset in config.data}
    for place, dataset in enumerate(config.data):
        where = f"data.{place}." if len(config.data) > 1 else "data."
        if dataset.environment and not dataset.use_chat_template:
            raise ValueError(
                f"{where}environment={dataset.environment!r} with use_chat_template=false: the model's chat "
                "template separates turns; legal: use_chat_template=true"
            )
        if OWN_REWARD in dataset.all_tasks and not dataset.environment:
            raise ValueError(f"{where}task={OWN_REWARD!r} needs {where}environment, which gives the reward")
        if dataset.environment == "tools" and OWN_REWARD in dataset.all_tasks:
            raise ValueError(
                f'{where}environment="tools" with {where}task={OWN_REWARD!r}: tools judge nothing; legal: a task that '
                "judges the last turn"
            )
    if "tools" in names and not table.tools:
        raise ValueError('data.environment="tools" needs environment.tools, such as ["calculator"]')
    if ("search" in table.tools) != (table.corpus is not None):
        raise ValueError(
            f"environment.corpus={str(table.corpus) if table.corpus else None!r} with environment.tools="
            f'{list(table.tools)}: the tool "search" and the documents that it searches go together'
        )
    cut = next((text for text in config.generation.stop if text in CALL_END), None)
    if any(names) and table.call_form == "hermes" and cut is not None:
        raise ValueError(
            f"generation.stop={cut!r} is in {CALL_END}, which ends a call of a tool, and environments are told turns "
            "without it: no call would be whole; legal: leave it out, a turn ends with the model's end token"
        )
    if table.max_turn_tokens and table.max_turn_tokens > config.generation.max_completion_tokens:
        raise ValueError(
            f"environment.max_turn_tokens={table.max_turn_tokens} is above generation.max_completion_tokens="
            f"{config.generation.max_completion_tokens}, which holds the whole dialogue"
        )
