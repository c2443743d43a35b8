"""Count the generators and reward workers that each prompt may have killed; keep the counts in a file of lines.

Input: Prompt.  Output: Suspicion, which the ledger consults when it grants leases.  A prompt is identified by its
record (PromptSource.record_of), so that its counts survive a restart of the run, and the next epoch, which draws it
again.  Its tokens may be the same for every record, where an agent or environment adds the rest.  Pure; `LostLeaseFile`
keeps the counts on disk.

Most deaths are caused by the node or by another prompt, and hit many innocent prompts at once: the first lost lease has
no consequence.  After the next ones a group shares its generator with few others, then with none, so that no innocent
prompt ever loses enough leases to be dropped (docs/guarantees.md).  A reward worker has one completion at a time: its
death is that completion's.  Errors of verifiers, environments and agents that kill nothing are not counted here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhpc.base.files import append_lines
from rlhpc.base.ownership import Fence
from rlhpc.protocol.contracts import RecordName
from rlhpc.protocol.types import Prompt

# ------------------------------------------------------------------------------------------------------------ line file
#
# A file of JSON lines that belongs to a run: appended and synced, read whole, and never undone by a resume.
#
# Input: frozen dataclasses of one kind.  Output: lines that are on disk.  A line that a crash cut off is skipped.


log = logging.getLogger("rlhpc.line_file")
Line = TypeVar("Line")


class LineFile(Generic[Line]):
    """A file of lines of one kind; only one thread at a time may append."""

    def __init__(self, path: Path, kind: type[Line], fence: Fence | None = None) -> None:
        """fence: checked before each change; a line that is being written may still land after a take-over."""
        self._path, self._kind, self._fence = path, kind, fence

    def read(self) -> list[Line]:
        """All lines, oldest first; none without a file.  Raises OSError."""
        return [*self.each()]

    def each(self) -> Iterator[Line]:
        """Yield the lines one by one."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    found = self._kind(**json.loads(line))
                except (ValueError, TypeError):
                    log.warning("%s: skipped a malformed line: %r", self._path, line.rstrip(b"\n")[:80])
                else:
                    yield found

    def append(self, lines: Sequence[Any]) -> bool:
        """Write lines to disk.  Returns False, with a warning, if the disk refuses.  Raises OwnershipLost."""
        data = "".join(f"{json.dumps(asdict(line))}\n" for line in lines)
        try:
            if self._fence is not None:
                self._fence.check()
            append_lines(self._path, data.encode())
        except OSError as error:
            log.warning("%s not written: %s", self._path, error.strerror or error)
            return False
        return True


# ---------------------------------------------------------------------------------------------------------- lost leases


ANY_COMPANY = 0
COMPANY_SHRINKS_BY = 8  # from one death to the next
MOST_WORDS = 500  # characters of an error that are kept


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Deaths of generators and reward workers that a prompt may have caused."""

    prompt: str  # RecordName.key
    lost_leases: int  # most leases lost by one of its samples to deaths of generators since it was last completed
    together: int  # groups that the generator held at the last death
    workers: int = 0  # consecutive groups that ended with the death of a reward worker
    source: str = ""  # file and line of the record, for people
    why: str = ""  # the last death

    def company(self, max_attempts: int) -> int:
        """Number of groups that a generator may hold when this is one of them; ANY_COMPANY: any.

        1 from the last attempt but one on: a prompt that lost leases through others' faults then has an attempt left.
        """
        if self.lost_leases >= max(1, max_attempts - 2):
            return 1
        return ANY_COMPANY if self.lost_leases <= 1 else max(1, self.together // COMPANY_SHRINKS_BY)

    def is_quarantined(self, max_attempts: int) -> bool:
        """True if the prompt is no longer given to generators."""
        return max(self.lost_leases, self.workers) >= max_attempts

    @property
    def text(self) -> str:
        """Description for people: the record, what it may have killed, and how."""
        deaths = (("generator", self.lost_leases, "sampling"), ("reward worker", self.workers, "judging"))
        counts = [f"{number} {who}{'s' * (number > 1)} died {what} it" for who, number, what in deaths if number]
        last = f", the last: {self.why}" if self.why else ""
        return f"{RecordName(self.prompt, self.source)}: {' and '.join(counts)}{last}"


def _by_prompt_id(prompt_id: int) -> RecordName:
    return RecordName(str(prompt_id))


class LostLeases:
    """Suspicions by prompt, and which have changed since they were last written."""

    def __init__(self, known: Iterable[Suspicion] = (), record_of: Callable[[int], RecordName] = _by_prompt_id) -> None:
        """known: in the order in which they were recorded; later ones replace earlier ones.

        record_of: names the record behind a prompt, by its number.
        """
        self.record_of = record_of
        self._by_prompt: dict[str, Suspicion] = {}
        self.unwritten: list[Suspicion] = []
        for suspicion in known:
            self._note(suspicion)

    def of(self, prompt: Prompt) -> Suspicion | None:
        """The suspicion of this prompt, if any."""
        return self._by_prompt.get(self.record_of(prompt.prompt_id).key) if self._by_prompt else None

    @property
    def all(self) -> list[Suspicion]:
        """All suspicions."""
        return list(self._by_prompt.values())

    def record_death(self, struck: Sequence[tuple[Prompt, int]], why: str = "") -> list[Suspicion]:
        """Count the death of a generator that sampled these prompts, each with the leases it has lost so far."""
        suspicions = [
            replace(self._known(prompt), lost_leases=lost_leases, together=len(struck), why=why)
            for prompt, lost_leases in struck
        ]
        self._change(suspicions)
        return suspicions

    def record_worker_death(self, prompt: Prompt, why: str) -> None:
        """Count the death of a reward worker that judged a completion of this prompt."""
        known = self._known(prompt)
        self._change([replace(known, workers=known.workers + 1, why=why[:MOST_WORDS])])

    def clear_lost_leases(self, prompt: Prompt) -> None:
        """Clear the deaths of generators: the prompt was sampled to the end."""
        suspicion = self.of(prompt)
        if suspicion is not None and suspicion.lost_leases:
            self._change([replace(suspicion, lost_leases=0, together=0)])

    def clear_workers(self, prompt: Prompt) -> None:
        """Clear the deaths of reward workers: all completions of the prompt were judged."""
        suspicion = self.of(prompt)
        if suspicion is not None and suspicion.workers:
            self._change([replace(suspicion, workers=0)])

    def lift(self) -> list[Suspicion]:
        """Clear the counts of all prompts; return what they were."""
        lifted = self.all
        self._change([replace(suspicion, lost_leases=0, together=0, workers=0) for suspicion in lifted])
        return lifted

    def _known(self, prompt: Prompt) -> Suspicion:
        record = self.record_of(prompt.prompt_id)
        return self._by_prompt.get(record.key) or Suspicion(record.key, 0, 0, source=record.source)

    def _change(self, suspicions: Sequence[Suspicion]) -> None:
        for suspicion in suspicions:
            self._note(suspicion)
        self.unwritten += suspicions

    def _note(self, suspicion: Suspicion) -> None:
        if suspicion.lost_leases or suspicion.workers:
            self._by_prompt[suspicion.prompt] = suspicion
        else:
            self._by_prompt.pop(suspicion.prompt, None)


class LostLeaseFile:
    """One JSON line per lost lease or clearing, appended and synced; it belongs to the run, and no resume undoes it."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        """fence: checked before each change; a line being written may follow a take-over: at worst one lost lease."""
        self._lines = LineFile(path, Suspicion, fence)

    def read(self) -> list[Suspicion]:
        """All lines, oldest first.  A line that a crash cut off is skipped.  Raises OSError."""
        return self._lines.read()

    def suspicions(self) -> list[Suspicion]:
        """Suspicions after the last line, by prompt.  Raises OSError."""
        return LostLeases(self.read()).all

    def append(self, book: LostLeases) -> None:
        """Write the changes to disk; one thread at a time, while another one records more.

        A failed write is a warning: the next call tries again.  Raises OwnershipLost.
        """
        changes = book.unwritten[:]
        if changes and self._lines.append(changes):
            del book.unwritten[: len(changes)]
