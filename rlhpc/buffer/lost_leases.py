"""Count the leases that each prompt has lost when a generator or reward worker died, which it may have caused.

Input: Prompt.  Output: Suspicion, which the ledger consults when it grants leases.  A prompt is identified by its
content, so that its count survives a restart of the run, and the next epoch, which draws it again.  Pure;
`LostLeaseFile` keeps it on disk.

Most deaths are caused by the node or by another prompt, and hit many innocent prompts at once: the first lost lease has
no consequence.  After the next ones a group shares its generator with few others, then with none, so that no innocent
prompt ever loses enough leases to be dropped (docs/faults.md).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhpc.buffer.line_file import LineFile
from rlhpc.ownership import Fence
from rlhpc.types import Prompt

ANY_COMPANY = 0
MANY = 1 << 20  # groups: no generator has died, so there is no limit
COMPANY_SHRINKS_BY = 8  # from one death to the next


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The leases that a prompt has lost to deaths of generators."""

    prompt: str  # key_of
    strikes: int  # most leases lost by one of its samples since it was last completed; 0: cleared
    together: int  # groups that the generator held at the last death

    def company(self, max_attempts: int) -> int:
        """Groups that a generator may hold when this is one of them; ANY_COMPANY: any number.

        Alone from the last attempt but one: a prompt that lost its leases to others' faults has one attempt left then.
        """
        if self.strikes >= max(1, max_attempts - 2):
            return 1
        return ANY_COMPANY if self.strikes <= 1 else max(1, self.together // COMPANY_SHRINKS_BY)


class LostLeases:
    """Suspicions by prompt, and which have changed since they were last written."""

    def __init__(self, known: Iterable[Suspicion] = ()) -> None:
        """known: in the order in which they were recorded; later ones replace earlier ones."""
        self._by_prompt: dict[str, Suspicion] = {}
        self.unwritten: list[Suspicion] = []
        for suspicion in known:
            self._note(suspicion)

    def of(self, prompt: Prompt) -> Suspicion | None:
        """The suspicion of this prompt, if any."""
        return self._by_prompt.get(key_of(prompt)) if self._by_prompt else None

    def record_death(self, struck: Sequence[tuple[Prompt, int]]) -> list[Suspicion]:
        """A generator has died that sampled these prompts, each with the leases it has lost so far."""
        suspicions = [Suspicion(key_of(prompt), strikes, len(struck)) for prompt, strikes in struck]
        for suspicion in suspicions:
            self._note(suspicion)
        self.unwritten += suspicions
        return suspicions

    def record_error(self, prompt: Prompt) -> None:
        """No reward could be computed for a completion, which may have killed the worker.  Counts as a lost lease."""
        known = self.of(prompt) or Suspicion(key_of(prompt), 0, MANY)
        suspicion = replace(known, strikes=known.strikes + 1)
        self._note(suspicion)
        self.unwritten.append(suspicion)

    def clear(self, prompt: Prompt) -> None:
        """The prompt was sampled to the end: clear its count."""
        suspicion = self.of(prompt)
        if suspicion is not None:
            forgiven = Suspicion(suspicion.prompt, 0, 0)
            self._note(forgiven)
            self.unwritten.append(forgiven)

    def _note(self, suspicion: Suspicion) -> None:
        if suspicion.strikes:
            self._by_prompt[suspicion.prompt] = suspicion
        else:
            self._by_prompt.pop(suspicion.prompt, None)


class LostLeaseFile:
    """One JSON line per lost lease or clearing, appended and synced; it belongs to the run, and no resume undoes it."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        """fence: checked before each change; a line being written may follow a take-over: at worst one lost lease."""
        self._lines = LineFile(path, Suspicion, fence)
        self._writing = threading.Lock()

    def read(self) -> list[Suspicion]:
        """All lines, oldest first.  A line that a crash cut off is skipped.  Raises OSError."""
        return self._lines.read()

    def append(self, book: LostLeases) -> None:
        """Write the changes to disk; any thread may call this.

        A failed write is a warning: the next call tries again.  Raises OwnershipLost.
        """
        with self._writing:
            changes = book.unwritten[:]
            if changes and self._lines.append(changes):
                del book.unwritten[: len(changes)]


def key_of(prompt: Prompt) -> str:
    """The identity of a prompt across epochs and attempts."""
    digest = hashlib.sha256(prompt.task.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(prompt.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()[:24]
