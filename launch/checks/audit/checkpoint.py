"""Groups in the checkpoints of a run: open ones, and how many were trained or dropped before.

Input: checkpoints/step_*/{COMPLETE, controller.json, buffered.h5}.  The quick way compares sizes of files, the full way
reads every byte.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.journal import keys_of
from rlhpc.buffer.frozen_buffer import BUFFERED_FILE
from rlhpc.buffer.history import Position
from rlhpc.buffer.segment_reader import read_raw_columns
from rlhpc.errors import CheckpointError, SegmentError
from rlhpc.roles.controller.saved_state import STATE_FILE, Totals, read_saved_state
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import COMPLETE, CheckpointState, Fate, KnownCheckpoints
from rlhpc.training.checkpoint.file_record import FileRecord, check_file


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group that was neither trained nor dropped."""

    group: int
    prompt: int
    admitted_version: int
    delivered: tuple[int, ...]
    size: int  # members, delivered or not


@dataclass(frozen=True, slots=True)
class CheckpointEvidence:
    """One checkpoint that a resume may go on from."""

    name: str
    step: int
    version: int
    next_group: int  # all below it were admitted
    open_groups: dict[int, SavedGroup]
    num_trained: int
    dropped: dict[str, int]
    next_segment: int  # those below it hold what was trained or dropped
    position: Position
    num_drawn: int  # prompts
    totals: Totals
    manifest_step: int  # as COMPLETE says
    manifest_version: int
    buffered: NDArray[np.int64]  # keys of the rollouts in buffered.h5


@dataclass(slots=True)
class Checkpoints:
    """All checkpoints of a run, newest first."""

    states: list[CheckpointState] = field(default_factory=list)
    sound: list[CheckpointEvidence] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (name, why)

    @property
    def newest(self) -> CheckpointEvidence | None:
        """The one that a resume goes on from; None: it begins at step 0, or is refused."""
        return self.sound[0] if self.sound else None


def read_checkpoints(layout: RunLayout, *, is_quick: bool) -> Checkpoints:
    """The checkpoints that exist now.  Raises OSError; FileNotFoundError: one disappeared meanwhile, read again."""
    found = Checkpoints()
    known = KnownCheckpoints(layout.checkpoints, read_up_to_bytes=0 if is_quick else math.inf)
    for state in known.newest_first():
        if not state.path.exists():
            continue  # pruned meanwhile
        found.states.append(state)
        if state.fate is not Fate.SOUND:
            continue
        try:
            found.sound.append(_read(layout, state))
        except (CheckpointError, SegmentError, KeyError, TypeError, ValueError) as error:
            if state.path.exists():
                found.unreadable.append((state.path.name, str(error) or repr(error)))
    return found


def _read(layout: RunLayout, state: CheckpointState) -> CheckpointEvidence:
    manifest = json.loads((state.path / COMPLETE).read_bytes())
    check_file(state.path / STATE_FILE, FileRecord(*manifest["files"][STATE_FILE]), verify_content=True)
    saved = read_saved_state(layout, state.step)
    ledger = saved.buffer["ledger"]
    names = ["rollouts/group_id", "rollouts/sample_index"]
    _, columns = read_raw_columns(state.path / BUFFERED_FILE, names, is_verified=False)  # COMPLETE has its checksum
    return CheckpointEvidence(
        name=state.path.name,
        step=saved.step,
        version=saved.policy_version,
        next_group=int(ledger["next_group_id"]),
        open_groups={int(group["group_id"]): _saved_group(group) for group in ledger["groups"]},
        num_trained=int(ledger["num_released"]),
        dropped={str(reason): int(count) for reason, count in ledger["dropped"].items()},
        next_segment=int(saved.buffer["next_segment_index"]),
        position=saved.position,
        num_drawn=_num_drawn(saved.prompts),
        totals=Totals(**saved.totals),
        manifest_step=int(manifest["step"]),
        manifest_version=int(manifest["policy_version"]),
        buffered=np.sort(keys_of(columns[names[0]], columns[names[1]])),
    )


def _num_drawn(prompts: dict[str, Any]) -> int:
    if (datasets := prompts.get("datasets")) is not None:
        return sum(map(_num_drawn, datasets))
    return int(prompts["cursor"]) - int(prompts["left_out"])


def _saved_group(state: dict[str, Any]) -> SavedGroup:
    return SavedGroup(
        int(state["group_id"]),
        int(state["prompt"]["prompt_id"]),
        int(state["admitted_version"]),
        tuple(int(index) for index in state["delivered"]),
        len(state["strikes"]),
    )
