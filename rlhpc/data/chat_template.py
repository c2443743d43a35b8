"""Render the chat template of a checkpoint as its authors' own library does.

Input: a jinja template.  Output: text.  Templates come with models: they run in jinja's sandbox, which lets them
neither change an object nor reach Python.  Conventions (trim_blocks, loop controls, raise_exception, strftime_now,
tojson without HTML escapes, the generation tag) are those of transformers' apply_chat_template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhpc.errors import ConfigError

# Given by us, for every dialogue.
_OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
# What the expressions of a template may raise.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


class ChatTemplate:
    """A compiled template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime],
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        """kwargs: model.chat_template_kwargs.  Raises ConfigError: does not compile, or does not read one of them."""
        self._variables = dict(special_tokens) | dict(kwargs or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda style: now().strftime(style)
        try:
            self._template = environment.from_string(source)
            known = find_undeclared_variables(environment.parse(source)) - _OWN_VARIABLES
        except jinja2.TemplateError as error:
            raise ConfigError(
                "model.path: the chat template (chat_template.jinja, or in tokenizer_config.json) does not compile: "
                f"{error}"
            ) from error
        if unknown := sorted({*(kwargs or {})} - known):
            raise ConfigError(
                f"model.chat_template_kwargs has {unknown[0]!r}, which the chat template does not read; legal: "
                f"{', '.join(sorted(known - {*special_tokens})) or 'none'}"
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a dialogue, special tokens spelt out; add_generation_prompt: up to where an answer begins.

        tools: JSON schemas.  Raises ConfigError when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                documents=None,
                **self._variables,
            )
        except _FAILURES as error:
            why = repr(error) if isinstance(error, LookupError) else error  # else the key alone
            raise ConfigError(f"model.path: the chat template fails on {_described(messages)}: {why}") from error


def _described(messages: Sequence[Mapping[str, Any]]) -> str:
    roles = [str(message.get("role")) for message in messages]
    return f"a {roles[0]} message" if len(roles) == 1 else f"messages of {', '.join(roles)}"


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks what an assistant said; prompts ignore the mark."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
