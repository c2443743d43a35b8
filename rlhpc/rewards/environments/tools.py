"""The environment "tools": a question is answered with the help of tools, in as many turns as it takes.

A turn that calls tools gets their results, one message of role "tool" per call; a turn that calls none is the answer,
which the dataset's task judges.  A malformed call, a call of an unknown tool, or one whose tool fails gets an error as
its result: the policy may try again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rlhpc.config_environment import EnvironmentConfig
from rlhpc.environment import Environment, Message, Step
from rlhpc.rewards.environments.calculator import calculate
from rlhpc.rewards.environments.python_tool import run_python
from rlhpc.rewards.environments.search import open_collection
from rlhpc.rewards.environments.tool_calls import FORMS, Call, CallError
from rlhpc.tool_schemas import TOOL_SCHEMAS

Tool = Callable[[str], str]  # argument → result; raises ValueError for what the policy should hear of


def open_tools(settings: EnvironmentConfig) -> dict[str, Tool]:
    """The tools of a run by name.  Raises ConfigError for a corpus that cannot be read."""

    known: dict[str, Tool] = {"calculator": calculate, "python": run_python}
    if settings.corpus is not None:
        collection = open_collection(settings.corpus)
        known["search"] = lambda query: collection.found(query, settings.num_documents)
    return {name: known[name] for name in settings.tools}


class ToolEnvironment(Environment):
    """Calls tools for the policy.  Subclass it for tools of your own: `tools` maps names to functions of a text."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self.tools: Mapping[str, Tool] = open_tools(settings)
        self._calls_in = FORMS[settings.call_form]

    @classmethod
    def open(cls, settings: EnvironmentConfig) -> Self:
        """See Environment."""
        return cls(settings)

    async def reset(self, record: Mapping[str, Any]) -> Sequence[Message]:
        """Nothing: the prompt is the question, and the chat template names the tools."""
        return ()

    async def step(self, completion: str) -> Step:
        """Results of the calls, or the end."""
        calls = self._calls_in(completion)
        if not calls:
            return Step(is_done=True)
        return Step(tuple({"role": "tool", "content": self._result(call)} for call in calls))

    def _result(self, call: Call | CallError) -> str:
        if isinstance(call, CallError):
            return f"error: {call.why}"
        if call.name not in self.tools:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self.tools)}"
        try:
            result = self.tools[call.name](_argument(call))
        except ValueError as error:
            result = f"error: {error}"
        most = self.settings.max_result_characters
        return result if len(result) <= most else f"{result[:most]}… ({len(result) - most} more characters)"


def _argument(call: Call) -> str:
    """The only argument, under the name of its schema, or any other.  Raises ValueError."""
    values = [value for value in call.arguments.values() if isinstance(value, str | int | float)]
    schema = TOOL_SCHEMAS.get(call.name, {"function": {"parameters": {"required": ["text"]}}})
    (name,) = schema["function"]["parameters"]["required"]
    if len(call.arguments) != 1 or len(values) != 1:
        raise ValueError(f'{call.name} has one argument: {{"{name}": …}}')
    return str(values[0])
