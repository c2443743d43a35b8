"""The durable history of a run: rollouts as they arrive, and events of their groups; one commit for both.

    add, note ──▶ in memory ──▶ commit, by a thread ──▶ journal_NNNNNN.log, then events_NNNNNN.log ──▶ num_durable

Input: ScoredRollout, Event.  Output: the files that history.py reads.  Guarantees: when an event is on disk, all
rollouts that were added before it are; items that a commit could not write are written by the next, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import Event, GroupEventLog, Position
from rlhpc.buffer.journal import JournalFiles, JournalRecord
from rlhpc.protocol.errors import JournalError
from rlhpc.protocol.types import Prompt, ScoredRollout


def open_journal(
    layout: RunLayout, run_name: str, attempt: int, num_rollouts: int, fence: Fence | None
) -> RolloutJournal:
    """The journal of an attempt.  num_rollouts: of earlier attempts that count.  Writes nothing yet."""
    files = JournalFiles(
        layout.rollouts, run_name=run_name, attempt=attempt, first_sequence=num_rollouts + 1, fence=fence
    )
    return RolloutJournal(files, GroupEventLog(layout.rollouts, attempt, fence, run_name), attempt)


class RolloutJournal:
    """Collects in memory and writes many at once.

    `add` and `note` do no input or output and may be called by one thread while another one commits; only one commits
    at a time.
    """

    def __init__(self, files: JournalFiles, events: GroupEventLog, attempt: int) -> None:
        self._files, self._events, self._attempt = files, events, attempt
        self._pending: list[JournalRecord] = []
        self._last = files.next_sequence - 1

    @property
    def num_added(self) -> int:
        """Number of the last rollout that was added."""
        return self._last

    @property
    def num_durable(self) -> int:
        """All rollouts up to this number are on disk."""
        return self._files.next_sequence - 1

    @property
    def position(self) -> Position:
        """The current position: everything added later lies behind it."""
        return Position(self._attempt, self._events.num_added, self._last)

    def holds(self, position: Position) -> bool:
        """True if everything up to a position is on disk."""
        num_events = self._events.num_added - self._events.num_pending
        return self.num_durable >= position.num_rollouts and num_events >= position.num_events

    def add(self, scored: ScoredRollout, prompt: Prompt, admitted_version: int) -> int:
        """Keep a rollout for the next commit; return its number in the run.  prompt, admitted_version: of its group."""
        self._last += 1
        # Routes are many times as long as all else, and every rollout waits for this file.
        self._pending.append(JournalRecord(self._last, scored.without_routes(), prompt, admitted_version))
        return self._last

    def note(self, event: Event) -> None:
        """Keep an event for the next commit."""
        self._events.add(event)

    def commit(self) -> int:
        """Write everything added before this call; return the number up to which rollouts are on disk.

        Raises JournalError when something cannot be written (it stays in memory), OwnershipLost.
        """
        num_events = self._events.num_pending  # read first: rollouts added before these events are pending now
        records: Sequence[JournalRecord] = self._pending[:]
        try:
            if records:
                self._files.append(records)
        except JournalError as error:
            left = self._last - self.num_durable
            raise JournalError(f"{error}; {left} {'stays' if left == 1 else 'stay'} in memory") from error
        finally:
            done = sum(record.sequence < self._files.next_sequence for record in records)
            del self._pending[:done]
        self._events.commit(num_events)
        return self.num_durable

    def close(self) -> None:
        """Close the files; uncommitted items are lost."""
        self._files.close()
        self._events.close()
