"""Per-prompt statistics of a run: pass rate, and when the prompt was last sampled.

Input: finished groups, in any order.  Output: arrays over the records of the dataset.  The rate is an exponential
average over the groups of a prompt, because a policy in training passes more and more of them.  Such an average never
comes to 0 or 1 again once it has left it, so that who has learnt a prompt, or cannot, is told by its newest group.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.errors import CheckpointError

NEVER = -1  # epoch of a prompt that was never asked
_LEVEL = 1  # of compression: most of it is the same number over and over


@dataclass(frozen=True, slots=True)
class Outcome:
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
        self._unsettled: dict[int, Outcome] = {}  # by group

    def learn(self, outcome: Outcome) -> None:
        """Keep what a group says until `settle` counts it."""
        self._unsettled[outcome.group_id] = outcome

    def settle(self, live_version: int) -> list[Outcome]:
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


def _outcome(group_id: int, version: int, record: int, epoch: int, rate: float) -> Outcome:
    return Outcome(int(group_id), int(version), int(record), int(epoch), float(rate))


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(array.astype(array.dtype.newbyteorder("<")).tobytes(), _LEVEL)).decode()


def _unpacked(text: str, like: NDArray[Any]) -> NDArray[Any]:
    content = zlib.decompress(base64.b64decode(text, validate=True))
    array = np.frombuffer(content, dtype=like.dtype.newbyteorder("<"))
    if array.shape != like.shape:
        raise ValueError(f"{len(array)} records, and the dataset has {len(like)}")
    return array.astype(like.dtype)
