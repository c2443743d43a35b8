"""The dataset that `rlhpc data` is about: its records, and how prompts are made of them, where that is known.

Input: a dataset or a run file, a model, settings.  Output: Sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.commands.evaluate.settings import document_without_run
from rlhpc.config import Config
from rlhpc.config_data import DataConfig
from rlhpc.config_file import load_config, settled
from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.prompts import dialogue_template
from rlhpc.data.reasoning_gym_source import PREFIX
from rlhpc.data.record_source import records_of
from rlhpc.data.records import Record
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError, DataError

OPEN = ("data", "generation")  # sections that the words may change
_WHERE = tuple(f"data.{key}" for key in ("split", "size", "source_seed", "levels", "settings"))
ANY_LENGTH = 1 << 40  # tokens


@dataclass(frozen=True, slots=True)
class Source:
    """Records, and their prompts if a model is given."""

    data: DataConfig
    records: Sequence[Record]
    tokenizer: PromptTokenizer | None
    form: PromptForm | None  # with a model
    max_prompt_tokens: int  # ANY_LENGTH: nobody said

    def prompts(self) -> tuple[list[tuple[str, bool] | None], list[str]]:
        """The text of every prompt, None for a record that makes none, and why; needs a model."""
        assert self.form is not None
        texts: list[tuple[str, bool] | None] = []
        faults = []
        for record in self.records:
            try:
                texts.append(self.form.text(record))
            except DataError as error:
                texts.append(None)
                faults.append(str(error))
        return texts, faults

    def lengths(self, texts: Sequence[tuple[str, bool] | None]) -> list[int | None]:
        """Numbers of tokens of prompts; needs a model."""
        assert self.tokenizer is not None
        counted = iter(self.tokenizer.lengths([text for text in texts if text is not None]))
        return [None if text is None else next(counted) for text in texts]


def sources_of(data: Path, model: Path | None, words: Sequence[str]) -> list[Source]:
    """The datasets of a run file, or the one at this path.  Raises ConfigError, DataError."""
    for word in words:
        if word.partition(".")[0].strip() not in OPEN:
            raise ConfigError(f"{word!r}: not a setting of `rlhpc data`; legal: {', '.join(f'{s}.…' for s in OPEN)}")
    if data.suffix == ".toml":
        config = load_config(data, [*words, *([f"model.path={model}"] if model is not None else [])])
        tokenizer: PromptTokenizer | None = PromptTokenizer.of(config.model)
    else:
        config = _settings(data, words)
        if model is None and words and not _only_says_where(words):
            raise ConfigError(f"{words[0]!r} sets the prompt; showing prompts needs --model DIR")
        tokenizer = PromptTokenizer(model.absolute()) if model is not None else None
    limit = config.generation.max_prompt_tokens
    has_dialogues = any(each.environment for each in config.data)
    dialogue = dialogue_template(config, tokenizer) if tokenizer is not None and has_dialogues else None
    found = []
    for each in config.data:
        limits = {"max_prompt_tokens": each.max_prompt_tokens or limit, "max_completion_tokens": ANY_LENGTH}
        goes_on = dialogue if each.environment else None
        form = None if tokenizer is None else PromptForm(each, tokenizer, **limits, dialogue=goes_on)
        found.append(Source(each, records_of(each), tokenizer, form, limits["max_prompt_tokens"]))
    return found


def _settings(data: Path, words: Sequence[str]) -> Config:
    table = {"source": str(data)} if str(data).startswith(PREFIX) else {"path": str(data), "task": ""}
    document = document_without_run("data", table, {"max_prompt_tokens": ANY_LENGTH, "max_completion_tokens": 1})
    document["trainer"]["token_budget"] = 2 * ANY_LENGTH
    return settled(document, words, "rlhpc data")


def _only_says_where(words: Sequence[str]) -> bool:
    return all(word.partition("=")[0].strip() in _WHERE for word in words)
