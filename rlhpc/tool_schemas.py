"""The tools of the environment "tools" as models are told of them: JSON schemas of functions, by name.

Chat templates write them into the prompt, in the words that a model knows.  What the tools do: rewards/environments/.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


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
    }
)
