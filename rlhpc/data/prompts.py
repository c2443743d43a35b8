"""An endless stream of prompts, in a seeded order that a restart continues; a curriculum leaves uninformative ones out.

    order ──▶ stage ──▶ rest ──▶ chance ──▶ Prompt          a prompt that fails a filter waits for a later epoch
                └────────┴────────┴── pass rates, of finished groups of versions before the live one

Input: records, and pass rates of finished groups.  Output: Prompt.  Prompt number n of a dataset is the (n mod N)-th of
epoch n // N over N records; the order of an epoch depends on seed and epoch only, so that only a cursor is saved.
A curriculum leaves prompts out but keeps their numbers, which grow from draw to draw; a mixture alternates between
datasets.  A restart draws the same prompts, whatever is in its memory.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.base.own_tools import told_tools
from rlhpc.config.rules import Config
from rlhpc.config.tables import WHOLE_RECORD
from rlhpc.config.tables_algorithm import CurriculumConfig
from rlhpc.data.files import dataset_files, read_rows
from rlhpc.data.prompt_form import DialogueTemplate, PromptForm
from rlhpc.data.record_source import Record, made_records, records_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.data.validation import CheckOf, DatasetSummary, once, summarise
from rlhpc.protocol.contracts import PromptSource, RecordName
from rlhpc.protocol.errors import CheckpointError, DataError
from rlhpc.protocol.types import Prompt

# -------------------------------------------------------------------------------------------------------- prompt memory
#
# Per-prompt statistics of a run: pass rate, and when the prompt was last sampled.
#
# Input: finished groups, in any order.  Output: arrays over the records of the dataset.  The rate is an exponential
# average over the groups of a prompt, because a policy in training passes more and more of them.  Such an average never
# returns to 0 or 1, so whether a prompt is solved or hopeless is decided by its newest group.

NEVER = -1  # epoch of a prompt that was never asked
_LEVEL = 1  # of compression: most of it is the same number over and over


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """Result of a finished group: the pass rate of its prompt."""

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
        """Keep a group's outcome until `settle` counts it."""
        self._unsettled[outcome.group_id] = outcome

    def settle(self, live_version: int) -> list[PromptOutcome]:
        """Count the outcomes of groups admitted before live_version, in the order of their ids; return them."""
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
        """Return JSON for load_state."""
        unsettled = [
            [each.group_id, each.admitted_version, each.record, each.epoch, each.pass_rate]
            for each in self._unsettled.values()
        ]
        arrays = {"rates": self.rates, "newest": self.newest, "epochs": self.epochs}
        return {**{name: _packed(array) for name, array in arrays.items()}, "unsettled": unsettled}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of state().  Raises CheckpointError, changing nothing, if it is not of these records."""
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


class SeededOrder:
    """The order of a dataset's records in every epoch."""

    def __init__(self, num_records: int, *, seed: int, shuffle: bool) -> None:
        self.num_records, self._seed, self._shuffle = num_records, seed, shuffle
        self._orders: dict[int, NDArray[np.int64]] = {}  # by epoch

    def record_index(self, prompt_id: int) -> int:
        """The place in the dataset of the record behind a prompt of the order."""
        epoch, position = divmod(prompt_id, self.num_records)
        return int(self.records(epoch, position, position + 1)[0])

    def records(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        """Places [n] in the dataset of positions `first` to last − 1 of an epoch, as far as it goes."""
        if not self._shuffle:
            return np.arange(first, min(last, self.num_records))
        if epoch not in self._orders:
            # Keep two: groups of an epoch are finished while prompts of the next are drawn.
            self._orders = dict(sorted(self._orders.items())[-1:])
            self._orders[epoch] = _epoch_order(self.num_records, self._seed, epoch)
        return self._orders[epoch][first:last]


class SeededPrompts:
    """A dataset as an endless sequence of prompts."""

    def __init__(self, records: Sequence[Record], form: PromptForm, *, seed: int, shuffle: bool) -> None:
        if not records:
            raise DataError("a dataset without records")
        self._records, self._form = records, form
        self._seed, self._shuffle = seed, shuffle
        self._order = SeededOrder(len(records), seed=seed, shuffle=shuffle)
        self._cursor = 0
        self._fingerprint = ""  # of the records, made when needed

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
        """Return the next prompt and advance.  Raises DataError, without advancing, for a record without a prompt."""
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
        return self._order.record_index(prompt_id)

    def records(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        """Places [n] in the dataset of positions `first` to last − 1 of an epoch, as of SeededOrder."""
        return self._order.records(epoch, first, last)

    def state(self) -> dict[str, Any]:
        """Return {"cursor", "seed", "shuffle", "dataset"}; cursor is the prompt_id of the next draw."""
        return {"cursor": self._cursor, **self._identity()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of state().  Raises CheckpointError, changing nothing, if it is of another order."""
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

        check_of: task → function that raises ValueError for a reference that it cannot read; None: nothing is checked.
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
    told = told_tools(config.environment.tools, config.tool_servers)
    return DialogueTemplate(tokenizer, told.schemas, of_servers=told.of_servers)


def seed_of_dataset(seed: int, place: int) -> int:
    """Seed of a dataset: the run's for the first, others for the rest, or equal sizes would have equal orders."""
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


# ----------------------------------------------------------------------------------------------------------- curriculum


_COIN = 1  # tells this stream of random numbers from that of the order
FIRST_LOOK, LONGEST_LOOK = 64, 65536  # positions examined at once: at first, and at most


class Curriculum(PromptSource):
    """Draws from a seeded order, leaving out prompts by rules; without rules it only keeps statistics."""

    def __init__(self, prompts: SeededPrompts, config: CurriculumConfig, *, seed: int) -> None:
        """Raises DataError if stages are set and a record has no difficulty, or the first stage has no record."""
        self._prompts, self._config, self._seed = prompts, config, seed
        self._memory = PromptMemory(prompts.num_records, config.newest_weight)
        self._num_left_out = 0
        self._stage_of = _stages(prompts, config)
        self._stage, self._stage_rates = 0, deque[float](maxlen=config.stage_groups)
        self._coins_of, self._coins_in_order = NEVER, np.empty(0, dtype=np.float64)

    @property
    def num_records(self) -> int:
        """Prompts of an epoch if none is left out."""
        return self._prompts.num_records

    # ------------------------------------------------------------------------------------------------------- drawing

    def draw(self, live_version: int) -> Prompt:
        """Return the next prompt that is not left out.  Raises DataError as SeededPrompts.draw, without advancing."""
        self._settle(live_version)
        if self._config.leaves_out:
            self._go_to(self._next_kept(self._prompts.cursor))
        return self._prompts.draw()

    def num_rollouts(self, prompt_id: int) -> int:
        """Rollouts needed for one pass with chance `pass_chance`, at most `max_group_size`; 0 for an unknown rate."""
        if self._config.max_group_size == "off":
            return 0
        rate = float(self._memory.rates[self._prompts.record_index(prompt_id)])
        return rollouts_for_a_pass(rate, self._config.pass_chance, self._config.max_group_size)

    def draw_again(self, prompt_id: int | None) -> Prompt:
        """Return a prompt that was drawn before, even if today's memory would leave it out."""
        if prompt_id is not None:
            cursor = self._prompts.cursor
            may_leave_out = self._config.leaves_out or self._num_left_out > 0
            if prompt_id < cursor or (prompt_id > cursor and not may_leave_out):
                raise CheckpointError(
                    f"prompt {prompt_id} was drawn, and the next one is {cursor}: the order of prompts has changed"
                )
            self._go_to(prompt_id)
        return self._prompts.draw()

    def peek(self, prompt_id: int) -> Prompt:
        """Return a prompt of the order.  Raises DataError for a record that makes none."""
        return self._prompts.peek(prompt_id)

    def record_of(self, prompt_id: int) -> RecordName:
        """Name the record by its place in the dataset."""
        return RecordName(str(self._prompts.record_index(prompt_id)), self._prompts.source(prompt_id))

    def validate(self, check_of: CheckOf | None = None) -> DatasetSummary:
        """Make every prompt and reference once, without drawing.  Raises DataError as SeededPrompts.validate."""
        return self._prompts.validate(check_of)

    # ------------------------------------------------------------------------------------------------------ learning

    def learn(self, group_id: int, admitted_version: int, prompt_id: int, pass_rate: float) -> None:
        """Remember a finished group's pass rate."""
        record, epoch = self._prompts.record_index(prompt_id), prompt_id // self._prompts.num_records
        self._memory.learn(PromptOutcome(group_id, admitted_version, record, epoch, pass_rate))

    def figures(self) -> dict[str, float]:
        """Figures of the whole dataset, by name of the metric."""
        newest = self._memory.newest
        known = newest[~np.isnan(newest)]
        share = 1 / max(1, len(known))
        return {
            "prompt/known_share": len(known) / len(newest),
            "prompt/pass_rate_mean": float(known.sum(dtype=np.float64)) * share,
            "prompt/solved_share": float((known >= np.float32(self._config.solved_at)).sum()) * share,
            "prompt/hopeless_share": float((known <= np.float32(self._config.hopeless_at)).sum()) * share,
            "prompt/left_out_total": float(self._num_left_out),
            "prompt/stage": float(self._stage),
        }

    # --------------------------------------------------------------------------------------------------- persistence

    def state(self) -> dict[str, Any]:
        """Return JSON for load_state: the order's state, the number of prompts left out, and the memory."""
        return {
            **self._prompts.state(),
            "left_out": self._num_left_out,
            "memory": self._memory.state(),
            "stage": self._stage,
            "stage_rates": list(self._stage_rates),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of state().  Raises CheckpointError if it is of another order, or malformed.

        A stage above those of the run file becomes the last one.
        """
        self._prompts.load_state(state)
        try:
            self._memory.load_state(state["memory"])
            self._num_left_out = int(state["left_out"])
            self._stage = min(int(state["stage"]), len(self._config.stages))
            self._stage_rates.extend(map(float, state["stage_rates"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's curriculum is malformed: {error!r}") from error

    # ------------------------------------------------------------------------------------------------------- internals

    def _settle(self, live_version: int) -> None:
        for outcome in self._memory.settle(live_version):
            if self._stage < len(self._config.stages) and self._stage_of[outcome.record] == self._stage:
                self._stage_rates.append(outcome.pass_rate)
                if self._is_stage_mastered():
                    self._stage += 1
                    self._stage_rates.clear()

    def _is_stage_mastered(self) -> bool:
        rates = self._stage_rates
        return len(rates) == rates.maxlen and sum(rates) / len(rates) >= self._config.stage_pass_rate

    def _go_to(self, position: int) -> None:
        self._num_left_out += position - self._prompts.cursor
        self._prompts.skip_to(position)

    def _next_kept(self, position: int) -> int:
        """The first position from this one on that is not left out.

        It exists: a stage has records, resting prompts return after some epochs, and every chance is above 0.
        """
        num_records, look = self._prompts.num_records, FIRST_LOOK
        while True:
            epoch, first = divmod(position, num_records)
            records = self._prompts.records(epoch, first, first + look)
            kept = np.flatnonzero(self._is_kept(records, epoch, position))
            if len(kept):
                return position + int(kept[0])
            position, look = position + len(records), min(2 * look, LONGEST_LOOK)

    def _is_kept(self, records: NDArray[np.int64], epoch: int, position: int) -> NDArray[np.bool_]:
        """Mask [n] of the records, at positions from `position` on in one epoch, that are not left out."""
        config = self._config
        newest, asked = self._memory.newest[records], self._memory.epochs[records]
        kept = self._stage_of[records] <= self._stage
        since = np.where(asked == NEVER, np.iinfo(np.int32).max, epoch - asked)
        # In float32, where the rate 9/10 is a little below 0.9 and 1/10 a little above 0.1; NaN compares false.
        kept &= ~((newest >= np.float32(config.solved_at)) & (since <= config.solved_rest_epochs))
        kept &= ~((newest <= np.float32(config.hopeless_at)) & (since <= config.hopeless_rest_epochs))
        if config.target_pass_rate != "off":
            rates, target = self._memory.rates[records], config.target_pass_rate
            distance = np.nan_to_num(np.abs(rates.astype(np.float64) - target) / max(target, 1 - target), nan=0.0)
            chance = 1 - (1 - config.min_chance) * distance
            first = position % self._prompts.num_records
            kept &= self._coins(epoch)[first : first + len(records)] < chance
        return kept

    def _coins(self, epoch: int) -> NDArray[np.float64]:
        """Random numbers [N] in [0, 1), one per position of an epoch."""
        if epoch != self._coins_of:
            raw = raw_draws(self._prompts.num_records, self._seed, epoch, _COIN)
            self._coins_in_order, self._coins_of = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53, epoch
        return self._coins_in_order


def rollouts_for_a_pass(pass_rate: float, chance: float, most: int) -> int:
    """The least n with 1 − (1 − pass_rate)^n ≥ chance, at most `most`; 0 where the rate is unknown, NaN."""
    if math.isnan(pass_rate):
        return 0
    if pass_rate >= chance:
        return 1
    if pass_rate <= 0:
        return most
    return min(most, math.ceil(math.log1p(-chance) / math.log1p(-pass_rate)))


def open_curriculum(config: Config, place: int = 0) -> Curriculum:
    """The prompts of one dataset of a run, at the first one.  Raises DataError, ConfigError."""
    return Curriculum(open_prompts(config, place), config.curriculum, seed=seed_of_dataset(config.run.seed, place))


def _stages(prompts: SeededPrompts, config: CurriculumConfig) -> NDArray[np.int64]:
    """The first stage [N] in which each record is drawn."""
    if not config.stages:
        return np.zeros(prompts.num_records, dtype=np.int64)
    difficulties = prompts.numbers(config.difficulty_field, "curriculum.difficulty_field")
    stages = np.searchsorted(np.array(config.stages), difficulties, side="left")
    if 0 not in stages:
        field, least = config.difficulty_field, difficulties.min()
        raise DataError(
            f"curriculum.stages={list(config.stages)}: the least {field!r} of all records is {least:g}, and the first "
            "stage asks for none"
        )
    return stages


# -------------------------------------------------------------------------------------------------------------- mixture
#
# Several datasets as one source of prompts, each in its own order, by their weights.
#
# The next dataset: smooth weighted round robin, as in nginx.  Each gains its weight; the first of those with the
# highest total is chosen and pays the sum of all weights.  So every dataset has its share of any run of prompts, to
# within one. Prompt n of dataset d of D has the number n·D + d: it identifies the dataset, and grows with n.


class Mixture(PromptSource):
    """Draws from datasets in turn."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], parts: Sequence[Curriculum]) -> None:
        self._names, self._weights, self._parts = tuple(names), tuple(weights), tuple(parts)
        self._credit = [0.0] * len(parts)

    def draw(self, live_version: int) -> Prompt:
        """Return the next prompt of the dataset whose turn it is.  Raises DataError, advancing nothing."""
        place = self._next()
        prompt = self._parts[place].draw(live_version)
        return self._taken(place, prompt)

    def num_rollouts(self, prompt_id: int) -> int:
        """Rollouts wanted of the prompt drawn last, if more than admission.group_size; else 0."""
        local, place = divmod(prompt_id, len(self._parts))
        return self._parts[place].num_rollouts(local)

    def draw_again(self, prompt_id: int | None) -> Prompt:
        """Return a prompt that was drawn before the run was interrupted, no matter whose turn it would be now."""
        local, place = (None, self._next()) if prompt_id is None else divmod(prompt_id, len(self._parts))
        return self._taken(place, self._parts[place].draw_again(local))

    def peek(self, prompt_id: int) -> Prompt:
        """Return a prompt by its number.  Raises DataError for a record that makes none."""
        local, place = divmod(prompt_id, len(self._parts))
        return self._numbered(place, self._parts[place].peek(local))

    def record_of(self, prompt_id: int) -> RecordName:
        """Name the record by the place of its dataset in the run file, and its own there."""
        local, place = divmod(prompt_id, len(self._parts))
        record = self._parts[place].record_of(local)
        return replace(record, key=f"{place}:{record.key}")

    def learn(self, group_id: int, admitted_version: int, prompt_id: int, pass_rate: float) -> None:
        """Remember a finished group's pass rate."""
        local, place = divmod(prompt_id, len(self._parts))
        self._parts[place].learn(group_id, admitted_version, local, pass_rate)

    def figures(self) -> dict[str, float]:
        """Figures of all prompts together, and those of each dataset: its prompt/X is called dataset_X/NAME."""
        each = {name: part.figures() for name, part in zip(self._names, self._parts, strict=True)}
        figures = {
            f"{metric.replace('prompt/', 'dataset_')}/{name}": value
            for name, own in each.items()
            for metric, value in own.items()
        }
        sizes = [part.num_records for part in self._parts]
        known = [size * own["prompt/known_share"] for size, own in zip(sizes, each.values(), strict=True)]
        figures["prompt/known_share"] = sum(known) / sum(sizes)
        for metric in ("prompt/pass_rate_mean", "prompt/solved_share", "prompt/hopeless_share"):
            figures[metric] = sum(n * own[metric] for n, own in zip(known, each.values(), strict=True)) / max(
                1.0, sum(known)
            )
        figures["prompt/left_out_total"] = sum(own["prompt/left_out_total"] for own in each.values())
        figures["prompt/stage"] = min(own["prompt/stage"] for own in each.values())
        return figures

    def state(self) -> dict[str, Any]:
        """Return JSON for load_state: the totals of the round robin, and the state of every dataset, in their order.

        Without names of datasets: these may come from files, which may be moved.
        """
        return {"credit": list(self._credit), "datasets": [part.state() for part in self._parts]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of state().  Raises CheckpointError if it is of other datasets."""
        saved, credit = state.get("datasets", [{}]), state.get("credit", [])
        if not len(saved) == len(credit) == len(self._parts):
            raise CheckpointError(
                f"the checkpoint is of {len(saved)} datasets, and this run has {len(self._parts)}, by which "
                "prompts are numbered; start a new run"
            )
        for name, part, own in zip(self._names, self._parts, saved, strict=True):
            try:
                part.load_state(own)
            except CheckpointError as error:
                raise CheckpointError(f"dataset {name}: {error}") from error
        self._credit = [float(each) for each in credit]

    # ------------------------------------------------------------------------------------------------------- internals

    def _next(self) -> int:
        """Index of the dataset that the next prompt comes from."""
        gained = [have + weight for have, weight in zip(self._credit, self._weights, strict=True)]
        return gained.index(max(gained))

    def _taken(self, place: int, prompt: Prompt) -> Prompt:
        self._credit = [have + weight for have, weight in zip(self._credit, self._weights, strict=True)]
        self._credit[place] -= sum(self._weights)
        return self._numbered(place, prompt)

    def _numbered(self, place: int, prompt: Prompt) -> Prompt:
        return replace(prompt, prompt_id=prompt.prompt_id * len(self._parts) + place)


def open_prompt_source(config: Config) -> PromptSource:
    """The prompts of a run, at the first one.  Raises DataError, ConfigError."""
    parts = [open_curriculum(config, place) for place in range(len(config.data))]
    if len(parts) == 1:
        return parts[0]
    return Mixture([each.title for each in config.data], [each.weight for each in config.data], parts)


# -------------------------------------------------------------------------------------------------------------- origins

_LARGEST_READ = 1 << 30  # bytes of files that are read to name records


class Origins:
    """The dataset and the record behind each prompt of a run, from its settings and the files as they are now."""

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        """tell: called once for a dataset whose records cannot be named."""
        self._config, self._tell = config, tell
        self.datasets = tuple(each.title for each in config.data)
        self._known: dict[int, tuple[SeededOrder, list[tuple[str, int]]] | None] = {}  # by place of the dataset

    def dataset(self, prompt_id: int) -> str:
        """Name of the dataset that a prompt is of."""
        return self.datasets[prompt_id % len(self.datasets)]

    def record(self, prompt: Prompt) -> str:
        """File and line of a prompt's record; "" if the files are gone, too large, or have changed since the run."""
        local, place = divmod(prompt.prompt_id, len(self.datasets))
        if place not in self._known:
            self._known[place] = self._read(place)
        if (known := self._known[place]) is None:
            return ""
        order, records = known
        source, reference = records[order.record_index(local)]
        if reference != hash(prompt.reference):
            self._tell(f"{self.datasets[place]}: has changed since the run, so that its records are not named")
            self._known[place] = None
            return ""
        return source

    def _read(self, place: int) -> tuple[SeededOrder, list[tuple[str, int]]] | None:
        """The order of a dataset, and each record's file, line and digest of its reference."""
        data = self._config.data[place]
        field = WHOLE_RECORD if data.environment else data.reference_field
        try:
            if data.path is not None:
                files = dataset_files(data.path, data.split)
                if sum(file.stat().st_size for file in files) > _LARGEST_READ:
                    self._tell(f"{data.path} has more than {_LARGEST_READ >> 30} GiB: its records are not named")
                    return None
                rows = (Record(fields, f"{file}:{line}") for file in files for fields, line in read_rows(file))
                found = [(record.source, hash(record.reference(field))) for record in rows]
            else:
                found = [(record.source, hash(record.reference(field))) for record in made_records(data)]
        except (DataError, OSError) as error:
            self._tell(f"{error}; records are not named")
            return None
        seed = seed_of_dataset(self._config.run.seed, place)
        return (SeededOrder(len(found), seed=seed, shuffle=data.shuffle), found) if found else None


def validate_datasets(config: Config, check_of: CheckOf | None = None) -> list[DatasetSummary]:
    """Read, fill and tokenise all datasets, or use the cached result.  Raises DataError, ConfigError.

    check_of: task → check of its references (SeededPrompts.validate); None: no check.
    """
    places = range(len(config.data))
    return [once(config, place, check_of is not None, partial(_validated, config, place, check_of)) for place in places]


def _validated(config: Config, place: int, check_of: CheckOf | None) -> DatasetSummary:
    return open_curriculum(config, place).validate(check_of)
