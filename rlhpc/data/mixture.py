"""Several datasets as one source of prompts, each in its own order, by their weights.

The next dataset: smooth weighted round robin, as in nginx.  Each gains its weight; the first of those with the highest
total is chosen and pays the sum of all weights.  So every dataset has its share of any run of prompts, to within one.
Prompt n of dataset d of D has the number n·D + d: it identifies the dataset, and grows with n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlhpc.config import Config
from rlhpc.contracts import PromptSource, RecordName
from rlhpc.data.checked_before import once
from rlhpc.data.curriculum import Curriculum, open_curriculum
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.data.references import CheckOf
from rlhpc.errors import CheckpointError
from rlhpc.types import Prompt


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
        """Rollouts that are wanted of the prompt that was drawn last, if more than admission.group_size; else 0."""
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
        """Remember what a finished group says of its prompt."""
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
        """Return JSON that load_state takes: whose turn it is, and the state of every dataset, in their order.

        Without names: files may be moved, and a dataset without a name is called after them.
        """
        return {"credit": list(self._credit), "datasets": [part.state() for part in self._parts]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where state() was taken.  Raises CheckpointError if it is of other datasets."""
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
        """The dataset that would be drawn from now."""
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


def validate_datasets(config: Config, check_of: CheckOf | None = None) -> list[DatasetSummary]:
    """Read, fill and tokenise all datasets, or use the cached result.  Raises DataError, ConfigError.

    check_of: task → what checks its references (SeededPrompts.validate); None: nothing does.
    """
    places = range(len(config.data))
    return [once(config, place, check_of is not None, partial(_validated, config, place, check_of)) for place in places]


def _validated(config: Config, place: int, check_of: CheckOf | None) -> DatasetSummary:
    return open_curriculum(config, place).validate(check_of)
