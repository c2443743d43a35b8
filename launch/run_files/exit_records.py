"""Exit records of the processes of an attempt: one small file per process, written by its wrapper.

srun returns one status for all tasks, and 0 for tasks that never started; these files give the status of each process.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhpc.files import is_absent, matching, write_atomically
from rlhpc.run_layout import RunLayout

_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class ExitRecord:
    """How one process ended."""

    name: str  # trainer-3
    status: int  # as in a shell: 128 + signal number
    last_words: str  # its last error, or the last line of its log
    starts: int  # how often it was started
    host: str
    job: str
    is_final: bool = True  # False: it is being started again

    @property
    def cause(self) -> str:
        """In words.  Not every status above 128 is a signal's: a container that cannot be made ends with 255."""
        number = self.status - 128
        is_signal = number in set(signal.Signals)
        how = f"signal {signal.Signals(number).name}" if is_signal else f"exit status {self.status}"
        return f"{self.name} on {self.host} ended with {how}: {self.last_words}"


def write_record(path: Path, record: ExitRecord) -> None:
    """Write one record.  Raises OSError."""
    write_atomically(path, json.dumps(asdict(record)).encode())


def read_records(layout: RunLayout, role: str, attempt: int) -> dict[int, ExitRecord]:
    """All records of a role in one attempt, by replica.  Raises OSError."""
    found: dict[int, ExitRecord] = {}
    for directory in matching(layout.logs, f"{role}-*"):
        replica = directory.name.rpartition("-")[2]
        if replica.isdigit():
            record = _found(layout.exit_record(role, int(replica), attempt))
            if record is not None:
                found[int(replica)] = record
    return found


def read_record(layout: RunLayout, name: str, attempt: int) -> ExitRecord | None:
    """The record of one process, by its name; None: it has not ended, or not since it was started with this attempt.

    Raises OSError.
    """
    role, _, replica = name.rpartition("-")
    return _found(layout.exit_record(role, int(replica), attempt))


def read_failures(layout: RunLayout, attempt: int) -> list[ExitRecord]:
    """Processes of one attempt, of any role, that failed and were not started again; the trainer's first.

    When a rank fails, the controller does, too.
    """
    read = (_read(path) for path in sorted(layout.logs.glob(f"*/attempt_{attempt}.exit.json")))
    found = [record for record in read if record is not None and record.status != 0 and record.is_final]
    return sorted(found, key=lambda record: not record.name.startswith("trainer-"))


def last_error_in(log: Path) -> str:
    """The last error in a log file, as last_error_line finds it near its end.  Raises OSError."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return last_error_line(file.read())


def last_error_line(log: bytes) -> str:
    """The text of the last error that a role logged, or else the last line: libraries print more after an error."""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    errors = [words for line in lines if " rlhpc." in line for _, error, words in [line.partition(" ERROR ")] if error]
    if errors or not lines:
        return errors[-1] if errors else "no output"
    ours = re.match(r".* rlhpc\.[a-z._]+ [A-Z]+ (.*)", lines[-1])  # without time, name and level
    return ours.group(1) if ours else lines[-1]


def _found(path: Path) -> ExitRecord | None:
    """None: there is none.  Raises OSError."""
    if is_absent(path):
        return None
    try:
        return ExitRecord(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        return None


def _read(path: Path) -> ExitRecord | None:
    try:
        return ExitRecord(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
