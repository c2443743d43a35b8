"""The rollouts of the journal as columns: which have arrived, and which of them count.

Input: rollouts/journal_*.h5.  Output: a number or two for each rollout.  The quick way reads the rows alone, 128 bytes
each; the full way verifies every checksum and leaves damaged rows out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.columns import joined
from launch.checks.audit.events import EventEvidence
from launch.checks.audit.report import Offence
from launch.checks.journal_check import read_settled_journal
from rlhpc.buffer.journal_files import journal_paths
from rlhpc.buffer.journal_layout import JournalLayout
from rlhpc.buffer.journal_reader import read_rollout_rows
from rlhpc.errors import JournalError
from rlhpc.types import Verdict

MEMBERS = 1 << 20  # group · MEMBERS + sample is the key of a rollout
ROW = np.dtype(
    [
        ("sequence", "<i8"),
        ("group", "<i8"),
        ("prompt", "<i8"),
        ("sample", "<i8"),
        ("admitted_version", "<i8"),
        ("num_tokens", "<i8"),
        ("reward", "<f8"),
        ("is_error", "?"),  # the verifier's
        ("oldest", "<i8"),  # version of a token; -1: not looked at, or no tokens
        ("newest", "<i8"),
        ("is_sorted", "?"),
        ("attempt", "<i8"),
        ("file", "<i4"),
        ("row", "<i4"),
    ]
)


@dataclass(slots=True)
class JournalEvidence:
    """Rollouts on disk that no segment may have yet."""

    paths: list[Path] = field(default_factory=list)
    rows: NDArray[Any] = field(default_factory=lambda: np.empty(0, ROW))  # those that count, in order
    unreadable: list[str] = field(default_factory=list)
    num_damaged: int = 0

    @property
    def keys(self) -> NDArray[np.int64]:
        """Keys of the rollouts that count."""
        return keys_of(self.rows["group"], self.rows["sample"])

    def offence_at(self, row: NDArray[np.void] | np.void, text: str) -> Offence:
        """One of a rollout, at its row of `rows`."""
        file = f"rollouts/{self.paths[int(row['file'])].name}"
        return Offence(text, group=int(row["group"]), sample=int(row["sample"]), file=file, row=int(row["row"]))


def keys_of(groups: NDArray[Any], samples: NDArray[Any]) -> NDArray[np.int64]:
    """A number for each rollout."""
    result: NDArray[np.int64] = groups.astype(np.int64) * MEMBERS + samples
    return result


def read_journal_evidence(rollouts: Path, events: EventEvidence, *, is_quick: bool) -> JournalEvidence:
    """Read all journal files.  Raises OSError."""
    found, parts = JournalEvidence(), []
    for path in journal_paths(rollouts) if rollouts.is_dir() else []:
        try:
            layout, rows, num_damaged = _quick_rows(path) if is_quick else _verified_rows(path)
        except JournalError as error:
            if path.exists():  # else a checkpoint has made it superfluous meanwhile
                found.unreadable.append(str(error))
            continue
        rows["attempt"], rows["file"] = layout.attempt, len(found.paths)
        rows["row"] = rows["sequence"] - layout.first_sequence
        found.paths.append(path)
        found.num_damaged += num_damaged
        parts.append(rows[rows["sequence"] > 0])
    found.rows = _that_count(joined(parts, ROW), events)
    return found


def _that_count(rows: NDArray[Any], events: EventEvidence) -> NDArray[Any]:
    counts = rows["sequence"] > events.first_that_counts
    for attempt in np.unique(rows["attempt"]):
        last = events.last_rollout_that_counts(int(attempt))
        if last is not None:
            counts &= (rows["attempt"] != attempt) | (rows["sequence"] <= last)
    return rows[counts]


def _quick_rows(path: Path) -> tuple[JournalLayout, NDArray[Any], int]:
    layout, stored = read_rollout_rows(path)
    rows = np.zeros(len(stored), ROW)
    rows["sequence"], rows["group"], rows["prompt"] = stored["sequence"], stored["group_id"], stored["prompt_id"]
    rows["sample"], rows["admitted_version"] = stored["sample_index"], stored["admitted_version"]
    rows["num_tokens"], rows["reward"] = stored["num_tokens"], stored["reward"]
    rows["is_error"] = stored["verdict"] == Verdict.VERIFIER_ERROR.encode()
    rows["oldest"] = rows["newest"] = -1
    rows["is_sorted"] = True
    return layout, rows, 0


def _verified_rows(path: Path) -> tuple[JournalLayout, NDArray[Any], int]:
    content = read_settled_journal(path)
    rows = np.zeros(len(content.records), ROW)
    for row, record in zip(rows, content.records, strict=True):
        rollout, versions = record.scored.rollout, record.scored.rollout.versions
        has_tokens = len(versions) > 0
        row["sequence"], row["group"], row["sample"] = record.sequence, rollout.group_id, rollout.sample_index
        row["prompt"], row["admitted_version"] = rollout.prompt.prompt_id, record.admitted_version
        row["num_tokens"], row["reward"] = len(versions), record.scored.reward
        row["is_error"] = record.scored.verdict is Verdict.VERIFIER_ERROR
        row["oldest"], row["newest"] = (versions.min(), versions.max()) if has_tokens else (-1, -1)
        row["is_sorted"] = bool((np.diff(versions) >= 0).all())
    return content.layout, rows, len(content.damaged_rows)
