"""Render new messages of an environment with the model's chat template, as tokens to append after a turn.

    tokens of the prompt │ opening │ turn, as sampled │ observation │ turn, as sampled │ …

A turn is never tokenised, and earlier messages are never rendered again: an observation is the difference that the
new messages make to a dialogue of two fixed messages, from the end of the second one on.  So tokens that the policy
sampled, and tokens it has read, stay what they were, whatever a template does to older messages (Qwen3 drops thoughts).
At the start a test checks that the difference does not depend on earlier messages; templates that fail are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError
from rlhpc.types import Int32

Message = Mapping[str, Any]
_ASKED: Message = {"role": "user", "content": "Q"}
_MARK = "~the~turn~"  # a turn that occurs in no template
_ANSWERED: Message = {"role": "assistant", "content": _MARK}
_OTHER: tuple[Message, ...] = (
    _ASKED,
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
)
_PROBE: Message = {"role": "user", "content": "O"}
_TOLD: Message = {"role": "system", "content": "S"}
_TOOL: Message = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {}}}


class DialogueTemplate:
    """A model's chat template, applied message by message."""

    def __init__(self, tokenizer: PromptTokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """tools: JSON schemas, shown where the template has its place for them, in the prompt.

        Raises ConfigError if the template cannot be applied so, or if the end of its turns begins with no special
        token.
        """
        self._tokenizer, self._tools = tokenizer, tuple(tools)
        self._close = self._rendered((_ASKED, _ANSWERED), add_generation_prompt=False).rpartition(_MARK)[2]
        closing = tokenizer.encode_rendered(self._close)
        if not len(closing) or not self._ends_a_turn(int(closing[0])):
            raise self._refused(f"a turn ends with {self._close!r}, which does not begin with a special token")
        self.turn_end = int(closing[0])  # id of the token with which the template ends a turn
        self._try_out()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn, ascending."""
        return tuple(sorted({self.turn_end, *self._tokenizer.eos_token_ids}))

    def prompt(self, user_message: str) -> Int32:
        """Tokens [L] of what a dialogue begins with, the tools among them; the environment's opening follows."""
        return self._tokenizer.encode_rendered(self.prompt_text([{"role": "user", "content": user_message}]))

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text of the same, for messages of a record."""
        return self._rendered(messages, add_generation_prompt=False)

    @cached_property
    def beginning(self) -> str:
        """The special tokens, at least one, that every dialogue begins with, whoever speaks.  Raises ConfigError."""
        texts = [self._rendered([_ASKED])]
        for messages, tools in (([_TOLD, _ASKED], ()), ([_ASKED], (_TOOL,))):
            with suppress(ConfigError):  # a template that knows no system message, or no tools
                texts.append(self._tokenizer.chat_template.render(messages, tools=tools))
        shared = "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False)))
        beginning = ""
        for token in takewhile(self._tokenizer.is_special, self._tokenizer.encode_rendered(shared).tolist()):
            longer = beginning + self._tokenizer.decode([token], keep_special_tokens=True)
            if not shared.startswith(longer):  # a letter that the vocabulary lacks
                break
            beginning = longer
        if not beginning:
            raise self._refused("dialogues do not begin with a special token")
        return beginning

    @cached_property
    def tokens_of_beginning(self) -> Int32:
        """Tokens [L] of `beginning`."""
        return self._tokenizer.encode_rendered(self.beginning)

    def whole(self, messages: Sequence[Message]) -> Int32:
        """Tokens [L] of a dialogue up to the policy's next turn.  Raises ConfigError if the template refuses it."""
        return self._tokenizer.encode_rendered(self._rendered(messages))

    def plain(self, text: str) -> Int32:
        """Tokens [L] of a text that no template is applied to; special tokens may be spelt out in it."""
        return self._tokenizer.encode_rendered(text)

    @property
    def vocab_size(self) -> int:
        """All token ids are below it."""
        return self._tokenizer.vocab_size

    def opening(self, messages: Sequence[Message]) -> Int32:
        """Tokens [L] from the end of any prompt up to the policy's first turn.  Raises ConfigError."""
        before = self.prompt_text([_ASKED])
        whole = self._rendered((_ASKED, *messages))
        if not whole.startswith(before):
            raise self._refused("what it makes of a prompt is not the beginning of what it makes of a dialogue")
        return self._tokenizer.encode_rendered(whole[len(before) :])

    def observation(self, messages: Sequence[Message], *, last_token: int) -> Int32:
        """Tokens [L] from the end of a turn up to the next one; last_token: of the turn, as sampled.

        A turn that was cut, and lacks its end, gets it here.
        """
        tokens = self._tokenizer.encode_rendered(self._after((_ASKED, _ANSWERED, *messages)))
        return tokens[1:] if last_token in self.stop_token_ids else tokens

    def _try_out(self) -> None:
        after = self._after((_ASKED, _ANSWERED, _PROBE))
        if _MARK in after:
            raise self._refused("a turn is rendered more than once")
        if not after.startswith(self._close):
            raise self._refused(f"a turn ends with {self._close!r} where it is the last one, else with {after!r}")
        if self._after((*_OTHER, _ANSWERED, _PROBE)) != after:
            raise self._refused("what it makes of a message depends on the number of those before it")
        whole = self._rendered((_ASKED, _ANSWERED, _PROBE))
        parts = [self._tokenizer.encode_rendered(part) for part in (whole[: -len(after)], after)]
        if not np.array_equal(self._tokenizer.encode_rendered(whole), np.concatenate(parts)):
            raise self._refused("its tokenizer makes other tokens of a message than of the same text in a dialogue")
        self.opening(())

    def _after(self, messages: Sequence[Message]) -> str:
        """The text behind the turn that is marked."""
        _, found, after = self._rendered(messages).partition(_MARK)
        if not found:
            raise self._refused("a turn is not rendered as it is")
        return after

    def _rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        template = self._tokenizer.chat_template
        return template.render(messages, tools=self._tools, add_generation_prompt=add_generation_prompt)

    def _ends_a_turn(self, token_id: int) -> bool:
        return token_id in self._tokenizer.eos_token_ids or self._tokenizer.is_special(token_id)

    @staticmethod
    def _refused(why: str) -> ConfigError:
        return ConfigError(
            f"data.environment: the chat template of model.path cannot be applied one message after the other: {why}; "
            "legal: a template that writes every message once, and ends a turn with a special token"
        )
