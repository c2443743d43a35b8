"""Text to tokens and back, with the tokenizer of an HF checkpoint directory and nothing else.

Input: tokenizer.json and the JSON files beside it.  The only module that imports the tokenizers library; needs neither
torch nor transformers, so that a login node can check a dataset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rlhpc.base.hf_config import language_model
from rlhpc.config.tables import ModelConfig
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import Int32

# -------------------------------------------------------------------------------------------------------- chat template
#
# Render the chat template of a checkpoint as its authors' own library does.
#
# Input: a jinja template.  Output: text.  Templates come with models: they run in jinja's sandbox, which lets them
# neither change an object nor reach Python.  Conventions (trim_blocks, loop controls, raise_exception, strftime_now,
# tojson without HTML escapes, the generation tag) are those of transformers' apply_chat_template.


# Given by us, for every dialogue.
_OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
# Errors that expressions of a template may raise.
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
        """kwargs: model.chat_template_kwargs.  Raises ConfigError: does not compile, or ignores one of them."""
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

        Arguments of calls are given as objects, also where a message has them as JSON in a string, as in OpenAI's API;
        a template that fails on objects gets strings (DeepSeek V3's joins them).
        tools: JSON schemas.  Raises ConfigError when the template refuses the messages.
        """
        render = partial(
            self._template.render,
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) or None,
            documents=None,
            **self._variables,
        )
        try:
            return render(messages=[_with_arguments(message, _as_object) for message in messages])
        except _FAILURES as error:
            if any(message.get("tool_calls") for message in messages):
                with suppress(*_FAILURES):
                    return render(messages=[_with_arguments(message, _as_text) for message in messages])
            why = repr(error) if isinstance(error, LookupError) else error  # else the key alone
            raise ConfigError(f"model.path: the chat template fails on {_described(messages)}: {why}") from error


def _with_arguments(message: Mapping[str, Any], spell: Callable[[Any], Any]) -> dict[str, Any]:
    """The message, the arguments of its calls spelt by a function."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_those_of(call, spell) for call in calls]}


def _with_those_of(call: Any, spell: Callable[[Any], Any]) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_those_of(call["function"], spell)}
    return {**call, "arguments": spell(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any) -> Any:
    """Arguments in a string, parsed; whatever else they are stays."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else _to_json(arguments)


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


# ------------------------------------------------------------------------------------------------------------- thinking
#
# The part of a completion that is judged, if the model thinks before it answers (data.thinking_end).

THINKING_START, THINKING_END = "<think>", "</think>"  # of most models that think


def answer_of(completion: str, thinking_end: str) -> tuple[str, int]:
    """Return the text after the thinking, without leading blanks, and the number of characters before it.

    thinking_end: "" if the whole completion is the answer.  A completion that never ends its thinking has no answer.
    """
    if not thinking_end:
        return completion, 0
    answer = completion.partition(thinking_end)[2].lstrip()
    return answer, len(completion) - len(answer)


# --------------------------------------------------------------------------------------------------------- stop strings
#
# Find the token with which a completion's text first contains one of generation.stop.
#
# Input: tokens, and the tokenizer's decoding function.  Output: the number of tokens up to and including that one,
# where the completion ends; and the text before the string, which is judged.  Pure.
#
# The text is that of the completion alone, without special tokens.  Tokens are decoded a few at a time, so that the
# work for each does not grow with the completion; bytes that may be the beginning of a character wait for its end.

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet one
_MOST_UNFINISHED = 3  # bytes of a character without its last one
_MOST_TOKENS = 8  # decoded together
_KEPT_TOKENS = 4  # of them when the first are dropped: one more than a character can be unfinished for


def no_text(_token_ids: Sequence[int]) -> str:
    """Decoder of an engine without stop strings."""
    raise AssertionError("stop strings for an engine that cannot decode")


class StopSearch:
    """The search in one completion, or one turn of a dialogue, read from its beginning."""

    def __init__(self, decode: Decode, stop_strings: Sequence[str]) -> None:
        """decode: tokens → text; stop_strings: without U+FFFD, none empty."""
        self._decode, self._stop_strings = decode, tuple(stop_strings)
        self._longest = max(map(len, self._stop_strings), default=0)
        self._window: list[int] = []  # the last tokens
        self._num_shown = 0  # characters of the window's text that have been searched
        self._tail = ""  # the last characters that have been searched
        self.num_tokens = 0  # read so far
        self.end: int | None = None  # tokens up to and including the one that completes a stop string

    def read(self, token_ids: Sequence[int]) -> int | None:
        """Read the next tokens, none after the one that completes a stop string; return `end`."""
        if not self._stop_strings:
            return None
        for token_id in token_ids:
            if self.end is not None:
                break
            self.num_tokens += 1
            text = self._tail + self._shown_by(token_id)
            if any(each in text for each in self._stop_strings):
                self.end = self.num_tokens
            self._tail = text[max(0, len(text) - self._longest + 1) :]
        return self.end

    def _shown_by(self, token_id: int) -> str:
        """The characters that this token completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = max(len(text.rstrip(UNFINISHED)), len(text) - _MOST_UNFINISHED)
        shown = text[self._num_shown : whole]
        self._num_shown = max(self._num_shown, whole)
        if len(self._window) >= _MOST_TOKENS:
            num_waiting = max(0, len(text) - self._num_shown)
            self._window = self._window[-_KEPT_TOKENS:]
            self._num_shown = max(0, len(self._decode(self._window)) - num_waiting)
        return shown


def stopped_at(decode: Decode, stop_strings: Sequence[str], token_ids: Sequence[int]) -> int | None:
    """Number of tokens up to and including the one that completes a stop string; None: none does."""
    return StopSearch(decode, stop_strings).read(token_ids) if stop_strings else None


def before_stop(decode: Decode, stop_strings: Sequence[str], token_ids: Sequence[int]) -> str | None:
    """Text before the stop string that the last token completes; None: it completes none."""
    if not stop_strings or not len(token_ids):
        return None
    text = decode(token_ids)
    known = len(decode(token_ids[:-1]).rstrip(UNFINISHED))
    begins = (text.find(each, max(0, known - len(each) + 1)) for each in stop_strings)
    begin = min((begin for begin in begins if begin >= 0), default=None)
    return None if begin is None else text[:begin]


# ------------------------------------------------------------------------------------------------------------ tokenizer

_MOST_BYTES = 4  # of a character in UTF-8
_NO_TOKENS: Int32 = np.empty(0, np.int32)
_MARK = "~the~answer~"  # an answer that occurs in no template
_DIALOGUE = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": _MARK})


class PromptTokenizer:
    """The tokenizer of model.path.

    Example: ``PromptTokenizer(path).encode("1 + 1 =")``, or ``.encode_chat("What is 1 + 1?")``.
    """

    def __init__(
        self,
        model_dir: Path,
        chat_template_kwargs: Mapping[str, object] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """chat_template_kwargs: of [model].  `now` is for templates that write the date; such prompts change from day
        to day.  Raises ConfigError.
        """
        self._kwargs = dict(chat_template_kwargs or {})
        self._model_dir = model_dir
        if not model_dir.is_dir():
            raise ConfigError(f"model.path={model_dir} is not a directory; legal: an HF checkpoint directory")
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"model.path={model_dir} has no tokenizer.json; legal: a checkpoint with a fast tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ConfigError(f"model.path: {file} is not a tokenizer: {error}") from error
        # A tokenizer file keeps its last truncation and padding; a prompt must have neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = self._read_json("tokenizer_config.json")
        self._bos = self._special_tokens().get("bos_token", "")
        self._now, self._was_asked_the_date = now, False
        self._chat_template: ChatTemplate | None = None

    @classmethod
    def of(cls, model: ModelConfig) -> PromptTokenizer:
        """Tokenizer of a run's policy, with the variables of its chat template.  Raises ConfigError."""
        return cls(model.path, model.chat_template_kwargs)

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        """Every token, added ones included, by its number, as tokenizer.json writes it."""
        return {number: token for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def encode(self, text: str) -> Int32:
        """Tokens [L] of plain text, with the special tokens the tokenizer itself adds (BOS where it has one).

        A text that begins with BOS has already been rendered, and gets no second BOS.
        """
        return self._encode(text, add_special_tokens=not self._has_bos(text))

    def encode_chat(self, user_message: str) -> Int32:
        """Tokens [L] of the chat template up to the assistant's answer.

        Adds no special tokens: a template spells its own, BOS included.  Raises ConfigError if there is no template.
        """
        return self.encode_rendered(self.render_chat([{"role": "user", "content": user_message}]))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat template's text up to the assistant's next answer.  Raises ConfigError as encode_chat does."""
        return self.chat_template.render(messages)

    def encode_rendered(self, text: str) -> Int32:
        """Tokens [L] of a text that spells its own special tokens, as render_chat returns it."""
        return self._encode(text, add_special_tokens=False)

    def lengths(self, texts: Sequence[tuple[str, bool]]) -> list[int]:
        """Numbers of tokens of many texts, each with a flag for results of render_chat; uses all processors."""
        return self.measured(texts)[0]

    def measured(self, texts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """lengths(), with the highest token of each text, -1 for an empty one."""
        lengths, highest = [0] * len(texts), [-1] * len(texts)
        for place, ids in self._encoded(texts):
            lengths[place], highest[place] = len(ids), max(ids, default=-1)
        return lengths, highest

    def encode_all(self, texts: Sequence[tuple[str, bool]]) -> list[Int32]:
        """Tokens [L] of many texts, by all processors; with each, whether render_chat returned it."""
        found = [_NO_TOKENS] * len(texts)
        for place, ids in self._encoded(texts):
            found[place] = np.array(ids, dtype=np.int32)
        return found

    def _encoded(self, texts: Sequence[tuple[str, bool]]) -> Iterator[tuple[int, list[int]]]:
        """Yield the place and the tokens of each, in any order."""
        is_whole = [rendered or self._has_bos(text) for text, rendered in texts]
        for is_rendered in set(is_whole):
            places = [place for place, whole in enumerate(is_whole) if whole is is_rendered]
            batch = [texts[place][0] for place in places]
            encoded = self._tokenizer.encode_batch_fast(batch, add_special_tokens=not is_rendered)
            yield from ((place, encoding.ids) for place, encoding in zip(places, encoded, strict=True))

    @property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's own.  Raises ConfigError if there is none."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate(
                self._template_source(), self._special_tokens(), self._today, self._kwargs
            )
        return self._chat_template

    def is_special(self, token_id: int) -> bool:
        """True for an added token: it is cut out of any text before the rest is tokenised."""
        return token_id in self._tokenizer.get_added_tokens_decoder()

    def spelt_control(self, text: str) -> str:
        """The first special token that a text spells, which would be read as such; "": there is none."""
        found = self._control_tokens.search(text)
        return found[0] if found else ""

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        """Pattern of the tokens that the tokenizer marks as special: ends of turns, but not <think>."""
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in tokens if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def decode(self, token_ids: Sequence[int] | Int32, *, keep_special_tokens: bool = False) -> str:
        """Text of the tokens; special tokens, the end of sequence among them, are left out unless asked for."""
        text: str = self._tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=not keep_special_tokens)
        return text

    def pieces(self, token_ids: Int32) -> list[str]:
        """Text of each token, special ones included; joined they are the text of all.  A character of several tokens is
        in the text of the last one.
        """
        text = self.decode(token_ids, keep_special_tokens=True)
        ends = [0, *self._character_ends(token_ids, keep_special_tokens=True).tolist()]
        if len(ends) > 1:
            ends[-1] = len(text)  # bytes at the end that are no character
        return [text[first:last] for first, last in pairwise(ends)]

    def decode_completion(
        self,
        token_ids: Sequence[int] | Int32,
        *,
        has_ended: bool,
        stop_strings: Sequence[str] = (),
        keep_special_tokens: bool = False,
    ) -> str:
        """Text of a completion; has_ended: without its end, the last token or the stop string that it completes."""
        ids, decode = list(map(int, token_ids)), partial(self.decode, keep_special_tokens=keep_special_tokens)
        if not has_ended:
            return decode(ids)
        text = before_stop(self.decode, stop_strings, ids)
        if text is None:
            return decode(ids[:-1])
        # With a special token inside the stop string, only one of the two texts contains the string.
        whole = before_stop(decode, stop_strings, ids) if keep_special_tokens else text
        return decode(ids) if whole is None else whole

    def ends(self, stop: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Tokens and texts that end a completion.  stop: generation.stop; a special token, which no text shows, counts
        by its id.
        """
        special = [text for text in stop if self.spelt_control(text) == text]
        ids = {*self.stop_token_ids, *self.encode_rendered("".join(special)).tolist()}
        return tuple(sorted(ids)), tuple(text for text in stop if text not in special)

    def on_tokens(self, values_at: Mapping[int, float], token_ids: Int32) -> dict[int, float]:
        """Move values of the first n characters of a completion's text to the token that completes these characters.

        Values on the same token are added up.  Places of the result ascend.
        """
        if not values_at:
            return {}
        ends, found = self._character_ends(token_ids), dict[int, float]()
        for num_characters, value in sorted(values_at.items()):
            token = min(int(np.searchsorted(ends, num_characters)), len(ends) - 1)
            found[token] = found.get(token, 0.0) + value
        return found

    def _character_ends(self, token_ids: Int32, *, keep_special_tokens: bool = False) -> NDArray[np.int64]:
        """Number of complete characters of the text after each token, [L]; decodes a few tokens at a time.

        A character of several tokens is whole after its last one; until then the decoder shows U+FFFD.  For bytes that
        are no character it always shows that; after four tokens this is certain, since no character has more bytes.
        """
        begin = read = num_characters = 0  # tokens from `begin` on are decoded together, those up to `read` are counted
        known, ends = "", np.zeros(len(token_ids), np.int64)
        for place in range(len(token_ids)):
            text = self.decode(token_ids[begin : place + 1], keep_special_tokens=keep_special_tokens)
            is_whole = not text.endswith("\ufffd") or place - read >= _MOST_BYTES
            if len(text) > len(known) and is_whole:
                num_characters += len(text) - len(known)
                begin, read = read, place + 1
                known = self.decode(token_ids[begin:read], keep_special_tokens=keep_special_tokens)
            ends[place] = num_characters
        return ends

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; the model's embedding may have more rows."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def num_words(self) -> int:
        """Tokens of the vocabulary, without added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    @property
    def eos_tokens(self) -> list[object]:
        """eos_token_id of generation_config.json and config.json, unchecked, in any order."""
        found: list[object] = []
        for name in ("generation_config.json", "config.json"):
            ids = language_model(self._read_json(name)).get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        return found

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a sequence, ascending; () where the checkpoint names none.

        The union of eos_token_id in generation_config.json and config.json and of eos_token in tokenizer_config.json
        and special_tokens_map.json: chat models end a turn with a token that only some of the files name.  Read once,
        since it is used for every group, and the files may be on a network.
        """
        found = {token for token in self.eos_tokens if isinstance(token, int)}
        found.update([] if self._own_eos is None else [self._own_eos])
        return tuple(sorted(found))

    @cached_property
    def _own_eos(self) -> int | None:
        token = self._special_tokens().get("eos_token")
        found: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return found

    @property
    def end_token_id(self) -> int:
        """The token that text without a chat template ends with: the tokenizer's own, or else one that it has.

        Raises ConfigError: the checkpoint names none.
        """
        if self._own_eos is None and not self.eos_token_ids:
            raise ConfigError(
                f"model.path={self._model_dir}: no file names an end token, with which demonstrations without a chat "
                'template end; legal: "eos_token" in tokenizer_config.json'
            )
        return self.eos_token_ids[0] if self._own_eos is None else self._own_eos

    @cached_property
    def writes_date(self) -> bool:
        """True if the chat template writes today's date."""
        with suppress(ConfigError):  # as below
            self.chat_template.render(_DIALOGUE[:1])
        return self._was_asked_the_date

    @cached_property
    def may_think(self) -> bool:
        """True if the chat template mentions THINKING_END."""
        try:
            return THINKING_END in self._template_source()
        except ConfigError:  # there is none
            return False

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion, ascending: eos_token_ids, and the end of an answer in the template.

        For base models with a template the latter is not among the former (Qwen2.5: <|im_end|>, <|endoftext|>), and
        without it they would go on to write the user's next message.
        """
        ends = set(self.eos_token_ids)
        with suppress(ConfigError):  # there is no template, or it refuses to be asked so
            _, found, after = self.chat_template.render(_DIALOGUE, add_generation_prompt=False).rpartition(_MARK)
            first = self.encode_rendered(after.lstrip() if found else "")[:1]
            ends.update(token for token in first.tolist() if self.is_special(token))
        return tuple(sorted(ends))

    def _today(self) -> datetime:
        """Today, for the chat template."""
        self._was_asked_the_date = True
        return self._now()

    def _has_bos(self, text: str) -> bool:
        return self._bos != "" and text.startswith(self._bos)

    def _encode(self, text: str, *, add_special_tokens: bool) -> Int32:
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)

    def _special_tokens(self) -> dict[str, str]:
        """ "bos_token", "eos_token", … as text; each is a string or {"content": string} in the files."""
        named = self._read_json("special_tokens_map.json") | self._config
        texts = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in named.items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def _template_source(self) -> str:
        """The chat template: chat_template.jinja before tokenizer_config.json; "default" of several named ones."""
        file = self._model_dir / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"model.path: {file} is not UTF-8: {error}") from error
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if not isinstance(template, str):
            raise ConfigError(
                f"model.path={self._model_dir} has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json), which chat messages and use_chat_template=true need; legal: texts, with "
                "use_chat_template=false, or a model with one"
            )
        return template

    def _read_json(self, name: str) -> dict[str, Any]:
        """An optional JSON file of the checkpoint; {} where there is none."""
        file = self._model_dir / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {file} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"model.path: {file} does not hold a JSON object")
        return content
