"""An endless stream of prompts, in a seeded order that a restart continues.

Input: records.  Output: Prompt.  Prompt number n is the (n mod N)-th of epoch n // N over N records; the order of an
epoch depends on seed and epoch only, so that a cursor is the only state to save.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.config.rules import Config
from rlhpc.data.prompt_form import DialogueTemplate, PromptForm
from rlhpc.data.record_source import Record, records_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.data.validation import CheckOf, DatasetSummary, summarise
from rlhpc.protocol.environment import TOOL_SCHEMAS
from rlhpc.protocol.errors import CheckpointError, DataError
from rlhpc.protocol.types import Prompt

# -------------------------------------------------------------------------------------------------------- prompt memory
#
# Per-prompt statistics of a run: pass rate, and when the prompt was last sampled.
#
# Input: finished groups, in any order.  Output: arrays over the records of the dataset.  The rate is an exponential
# average over the groups of a prompt, because a policy in training passes more and more of them.  Such an average never
# comes to 0 or 1 again once it has left it, so that who has learnt a prompt, or cannot, is told by its newest group.


NEVER = -1  # epoch of a prompt that was never asked
_LEVEL = 1  # of compression: most of it is the same number over and over


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """What a finished group says of its prompt."""

    group_id: int
    admitted_version: int
    record: int
    epoch: int
    pass_rate: float  # share of its members


class PromptMemory:
    """Pass rates [N], averaged and of the newest group, NaN where unknown, and epochs [N], by record."""

    def __init__(self, num_records: int, newest_weight: float) -> None:
        self.rates: NDArray[np.float32] = np.full(num_records, np.nan, dtype=np.float32)
        self.newest: NDArray[np.float32] = self.rates.copy()
        self.epochs: NDArray[np.int32] = np.full(num_records, NEVER, dtype=np.int32)
        self._newest_weight = newest_weight
        self._unsettled: dict[int, PromptOutcome] = {}  # by group

    def learn(self, outcome: PromptOutcome) -> None:
        """Keep what a group says until `settle` counts it."""
        self._unsettled[outcome.group_id] = outcome

    def settle(self, live_version: int) -> list[PromptOutcome]:
        """Count what groups admitted before live_version have said, in the order of their ids; return these."""
        ids = sorted(i for i, outcome in self._unsettled.items() if outcome.admitted_version < live_version)
        settled = [self._unsettled.pop(group_id) for group_id in ids]
        for outcome in settled:
            before = self.rates[outcome.record]
            weight = 1.0 if np.isnan(before) else self._newest_weight
            self.rates[outcome.record] = weight * outcome.pass_rate + (1 - weight) * np.nan_to_num(before)
            self.newest[outcome.record] = outcome.pass_rate
            self.epochs[outcome.record] = max(self.epochs[outcome.record], outcome.epoch)
        return settled

    def state(self) -> dict[str, Any]:
        """Return JSON that load_state takes."""
        unsettled = [
            [each.group_id, each.admitted_version, each.record, each.epoch, each.pass_rate]
            for each in self._unsettled.values()
        ]
        arrays = {"rates": self.rates, "newest": self.newest, "epochs": self.epochs}
        return {**{name: _packed(array) for name, array in arrays.items()}, "unsettled": unsettled}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where state() was taken.  Raises CheckpointError, changing nothing, if it is not of these records."""
        try:
            rates, newest = _unpacked(state["rates"], self.rates), _unpacked(state["newest"], self.newest)
            epochs = _unpacked(state["epochs"], self.epochs)
            unsettled = [_outcome(*each) for each in state["unsettled"]]
        except (KeyError, TypeError, ValueError, IndexError, binascii.Error, zlib.error) as error:
            raise CheckpointError(f"the checkpoint's memory of prompts is malformed: {error!r}") from error
        self.rates, self.newest, self.epochs = rates, newest, epochs
        self._unsettled = {outcome.group_id: outcome for outcome in unsettled}


def _outcome(group_id: int, version: int, record: int, epoch: int, rate: float) -> PromptOutcome:
    return PromptOutcome(int(group_id), int(version), int(record), int(epoch), float(rate))


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(array.astype(array.dtype.newbyteorder("<")).tobytes(), _LEVEL)).decode()


def _unpacked(text: str, like: NDArray[Any]) -> NDArray[Any]:
    content = zlib.decompress(base64.b64decode(text, validate=True))
    array = np.frombuffer(content, dtype=like.dtype.newbyteorder("<"))
    if array.shape != like.shape:
        raise ValueError(f"{len(array)} records, and the dataset has {len(like)}")
    return array.astype(like.dtype)


# -------------------------------------------------------------------------------------------------------------- prompts


class SeededPrompts:
    """A dataset as an endless sequence of prompts."""

    def __init__(self, records: Sequence[Record], form: PromptForm, *, seed: int, shuffle: bool) -> None:
        if not records:
            raise DataError("a dataset without records")
        self._records, self._form = records, form
        self._seed, self._shuffle = seed, shuffle
        self._cursor = 0
        self._orders: dict[int, NDArray[np.int64]] = {}  # by epoch
        self._fingerprint = ""  # of the records, made when it is needed

    @property
    def num_records(self) -> int:
        """Prompts of an epoch."""
        return len(self._records)

    @property
    def cursor(self) -> int:
        """The prompt_id of the next draw."""
        return self._cursor

    def skip_to(self, prompt_id: int) -> None:
        """Go to a later prompt, or stay."""
        self._cursor = max(self._cursor, prompt_id)

    def draw(self) -> Prompt:
        """Return the next prompt and advance.  Raises DataError, without advancing, for a record that makes none."""
        prompt = self.peek(self._cursor)
        self._cursor += 1
        return prompt

    def peek(self, prompt_id: int) -> Prompt:
        """Return a prompt of the order.  Raises DataError for a record that makes none."""
        return self._form.prompt(self._records[self.record_index(prompt_id)], prompt_id)

    def source(self, prompt_id: int) -> str:
        """File and line of the record behind a prompt of the order."""
        return self._records[self.record_index(prompt_id)].source

    def numbers(self, field: str, key: str) -> NDArray[np.float64]:
        """A field of every record [N]; `key` of the run file names it.  Raises DataError for one that is no number."""
        return np.array([record.number(field, key) for record in self._records])

    def record_index(self, prompt_id: int) -> int:
        """The place in the dataset of the record behind a prompt of the order."""
        epoch, position = divmod(prompt_id, len(self._records))
        return int(self.records(epoch, position, position + 1)[0])

    def records(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        """Places [n] in the dataset of positions `first` to last − 1 of an epoch, as far as it goes."""
        if not self._shuffle:
            return np.arange(first, min(last, len(self._records)))
        if epoch not in self._orders:
            # Keep two: groups of an epoch are finished while prompts of the next are drawn.
            self._orders = dict(sorted(self._orders.items())[-1:])
            self._orders[epoch] = _epoch_order(len(self._records), self._seed, epoch)
        return self._orders[epoch][first:last]

    def state(self) -> dict[str, Any]:
        """Return {"cursor", "seed", "shuffle", "dataset"}; cursor is the prompt_id of the next draw."""
        return {"cursor": self._cursor, **self._identity()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where state() was taken.  Raises CheckpointError, changing nothing, if it is of another order."""
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise CheckpointError(
                    f"the checkpoint's prompts have {key}={state.get(key)!r}, this run's {mine!r}: the order of "
                    "prompts cannot be continued; start a new run"
                )
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0:
            raise CheckpointError(f"the checkpoint's prompts have cursor={cursor!r}")
        self._cursor = cursor

    def validate(self, check_of: CheckOf | None = None) -> DatasetSummary:
        """Make every prompt and reference once, without drawing.

        check_of: task → what raises ValueError for a reference that it cannot read; None: nothing is checked.
        Raises DataError for the first prompt that fails, or naming the first bad references.
        """
        return summarise(self._records, self._form, check_of)

    def _identity(self) -> dict[str, Any]:
        self._fingerprint = self._fingerprint or _fingerprint(self._records)
        return {"seed": self._seed, "shuffle": self._shuffle, "dataset": self._fingerprint}


def open_prompts(config: Config, place: int = 0) -> SeededPrompts:
    """The prompts of one dataset of a run, at the first one.  Raises DataError, ConfigError."""
    data, tokenizer = config.data[place], PromptTokenizer.of(config.model)
    form = PromptForm(
        data,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens or config.generation.max_prompt_tokens,
        max_completion_tokens=config.max_completion_tokens(place),
        dialogue=dialogue_template(config, tokenizer) if data.environment else None,
    )
    seed = seed_of_dataset(config.run.seed, place)
    return SeededPrompts(records_of(data), form, seed=seed, shuffle=data.shuffle)


def dialogue_template(config: Config, tokenizer: PromptTokenizer) -> DialogueTemplate:
    """The chat template of a run's model, with the tools of its environments.  Raises ConfigError."""
    return DialogueTemplate(tokenizer, [TOOL_SCHEMAS[name] for name in config.environment.tools])


def seed_of_dataset(seed: int, place: int) -> int:
    """The first dataset has the run's, the others have their own: those of equal size would have one order."""
    return seed if place == 0 else int(np.random.SeedSequence([seed, place]).generate_state(1, np.uint64)[0])


def _epoch_order(num_records: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation [N]."""
    return np.argsort(raw_draws(num_records, seed, epoch), kind="stable")


def raw_draws(number: int, *seeds: int) -> NDArray[np.uint64]:
    """Raw numbers of a bit generator, whose stream numpy guarantees never to change.

    Generator.permutation and random may change with any release (NEP 19), and a resumed run with them.
    """
    return np.random.Philox(np.random.SeedSequence(seeds)).random_raw(number)


def _fingerprint(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record.fields, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
