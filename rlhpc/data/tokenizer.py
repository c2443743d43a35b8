"""Text to tokens and back, with the tokenizer of an HF checkpoint directory and nothing else.

Input: tokenizer.json and the JSON files beside it.  The only module that imports the tokenizers library; needs neither
torch nor transformers, so that a login node can check a dataset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rlhpc.config_sections import ModelConfig
from rlhpc.data.chat_template import ChatTemplate
from rlhpc.data.thinking import THINKING_END
from rlhpc.errors import ConfigError
from rlhpc.stop_strings import before_stop
from rlhpc.types import Int32

_MOST_BYTES = 4  # of a character in UTF-8
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
        """That of a run's policy, with the variables of its chat template.  Raises ConfigError."""
        return cls(model.path, model.chat_template_kwargs)

    def encode(self, text: str) -> Int32:
        """Tokens [L] of plain text, with the special tokens the tokenizer itself adds (BOS where it has one).

        A text that begins with BOS has been rendered already, and gets no second one.
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
        """Numbers of tokens of many texts, by all processors; with each, whether render_chat returned it."""
        return self.measured(texts)[0]

    def measured(self, texts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """The same, and the highest token of each text, -1 of one without."""
        lengths, highest = [0] * len(texts), [-1] * len(texts)
        is_whole = [rendered or self._has_bos(text) for text, rendered in texts]
        for is_rendered in set(is_whole):
            places = [place for place, whole in enumerate(is_whole) if whole is is_rendered]
            batch = [texts[place][0] for place in places]
            encoded = self._tokenizer.encode_batch_fast(batch, add_special_tokens=not is_rendered)
            for place, encoding in zip(places, encoded, strict=True):
                lengths[place], highest[place] = len(encoding), max(encoding.ids, default=-1)
        return lengths, highest

    @property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's own.  Raises ConfigError if there is none."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate(
                self._template_source(), self._special_tokens(), self._today, self._kwargs
            )
        return self._chat_template

    def is_special(self, token_id: int) -> bool:
        """Whether it is cut out of any text before the rest is tokenised."""
        return token_id in self._tokenizer.get_added_tokens_decoder()

    def spelt_control(self, text: str) -> str:
        """The first special token that a text spells, which would be read as such; "": there is none."""
        found = self._control_tokens.search(text)
        return found[0] if found else ""

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        """Those that the tokenizer itself calls special: ends of turns, but not <think>."""
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in tokens if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def decode(self, token_ids: Sequence[int] | Int32, *, keep_special_tokens: bool = False) -> str:
        """Text of the tokens; special tokens, the end of sequence among them, are left out unless asked for."""
        text: str = self._tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=not keep_special_tokens)
        return text

    def pieces(self, token_ids: Int32) -> list[str]:
        """Text of each token, special ones included, that together are the text of all; a character stands with the
        last of its tokens, the others are "".
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
        """Text of a completion; has_ended: without what ended it, the last token or the stop string it completes."""
        ids, decode = list(map(int, token_ids)), partial(self.decode, keep_special_tokens=keep_special_tokens)
        if not has_ended:
            return decode(ids)
        text = before_stop(self.decode, stop_strings, ids)
        if text is None:
            return decode(ids[:-1])
        # With a special token in the midst of it the string stands in the one text, and not in the other.
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
        """Values that belong to the first n characters of a completion's text, each at the token that completes these.

        Several on one token are added up.  Places of the result ascend.
        """
        if not values_at:
            return {}
        ends, found = self._character_ends(token_ids), dict[int, float]()
        for num_characters, value in sorted(values_at.items()):
            token = min(int(np.searchsorted(ends, num_characters)), len(ends) - 1)
            found[token] = found.get(token, 0.0) + value
        return found

    def _character_ends(self, token_ids: Int32, *, keep_special_tokens: bool = False) -> NDArray[np.int64]:
        """Characters of the text that are whole after each token, [L]; a few tokens at a time, since decoding is
        linear.

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
        """Tokens of its vocabulary, without those that were added to it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    @property
    def eos_tokens(self) -> list[object]:
        """eos_token_id of generation_config.json and config.json, unchecked, in any order."""
        found: list[object] = []
        for name in ("generation_config.json", "config.json"):
            ids = self._read_json(name).get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        return found

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a sequence, ascending; () where the checkpoint names none.

        The union of eos_token_id in generation_config.json and config.json and of eos_token in tokenizer_config.json
        and special_tokens_map.json: chat models end a turn with a token that only some of the files name.  Read once:
        it is asked for with every group, and the files may lie on a network.
        """
        found = {token for token in self.eos_tokens if isinstance(token, int)}
        if (token := self._special_tokens().get("eos_token")) is not None:
            token_id = self._tokenizer.token_to_id(token)
            found.update([] if token_id is None else [token_id])
        return tuple(sorted(found))

    @cached_property
    def writes_date(self) -> bool:
        """Whether the chat template asks for today's date."""
        with suppress(ConfigError):  # as below
            self.chat_template.render(_DIALOGUE[:1])
        return self._was_asked_the_date

    @cached_property
    def may_think(self) -> bool:
        """Whether the chat template knows of thinking."""
        try:
            return THINKING_END in self._template_source()
        except ConfigError:  # there is none
            return False

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion, ascending: eos_token_ids, and what the chat template ends an answer with.

        For base models with a template that is no end of a sequence (Qwen2.5: <|im_end|> beside <|endoftext|>), and
        without it they go on to write the user's next message.
        """
        ends = set(self.eos_token_ids)
        with suppress(ConfigError):  # there is no template, or it refuses to be asked so
            _, found, after = self.chat_template.render(_DIALOGUE, add_generation_prompt=False).rpartition(_MARK)
            first = self.encode_rendered(after.lstrip() if found else "")[:1]
            ends.update(token for token in first.tolist() if self.is_special(token))
        return tuple(sorted(ends))

    def _today(self) -> datetime:
        """For the chat template."""
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
        """chat_template.jinja before tokenizer_config.json, of several named templates "default"."""
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
                "tokenizer_config.json), which data.use_chat_template=true and chat messages as prompts need; legal: "
                "prompts that are text, with use_chat_template=false"
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
