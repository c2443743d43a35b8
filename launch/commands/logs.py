"""`rlhpc logs`: the logs of a run, merged, each line prefixed with its process's name; optionally followed.

Input: RUN_DIR/logs.  Output: printed lines.  Follows by polling every second, because NFS sends no notification when a
file grows.  Logs of new attempts and new replicas are included as their files appear.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.common.text import escaped, quoted, say_or_lose, written_unix_s
from launch.run_files.plan_file import EVALUATOR
from launch.run_files.records import processes_of_service
from launch.run_files.run_state import is_complete
from launch.view.jobs import look_at_run
from launch.view.run import RunView
from rlhpc.base.patience import seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_INTERRUPTED, ConfigError, RunDirectoryError

LAST_LINES = 200
LOOK_S = 1.0
ASK_SLURM_S = 30.0  # sites do not like more frequent queries
SLURM = "slurm"  # logs of batch steps: slurm/hetjob-12
_TAIL_BYTES = 1 << 20  # 200 lines of vLLM's are some 50 kB
_CHUNK_BYTES = 1 << 20
_OUTLIVE_ATTEMPTS = ("generator-", "reward-", "service-", f"{EVALUATOR}-")
_NO_COLOUR = "\x1b[0m"
_ATTEMPT = re.compile(r"attempt_(\d+)\.log")


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log file, with the name that is printed before its lines."""

    name: str  # trainer-0, slurm/hetjob-12
    path: Path
    attempt: int  # -1: log of a batch step, which may span several attempts


def logs(options: argparse.Namespace) -> int:
    """Show logs; returns the exit status."""
    role, *more = options.words or [None]
    if more:
        raise ConfigError(f"{more[0]!r}: at most one role; `rlhpc logs RUN_DIR` shows all")
    return show_logs(options.layout, role, options.follow)


def show_logs(layout: RunLayout, role: str | None, follow: bool) -> int:
    """Print the last lines of each log of the newest attempt; follow: also new lines, until the run is over.

    role: "trainer" for all its ranks, "generator-1" for one process, the name of a service for its processes, "slurm"
    for batch steps, None for all.  Returns the exit status, 130 after Ctrl-C.  Raises RunDirectoryError: no run
    directory; no such role.
    """
    layout.require_run()
    there = log_files(layout, role)
    found = _newest(there)
    if not found and not (follow and _may_come(layout, role)):
        raise RunDirectoryError(_nothing(layout, role))
    tails = {file.path: _Tail(file) for file in found}
    width = max((len(file.name) for file in found), default=0)
    shortened = [tail.file for tail in tails.values() if tail.print_last(LAST_LINES, width)]
    if shortened:
        where = layout.logs if len(shortened) > 1 else shortened[0].path
        say_or_lose(f"rlhpc: only the last {LAST_LINES} lines of {len(shortened)} of {len(tails)} logs; whole: {where}")
    if not follow:
        for tail in tails.values():
            tail.finish(width)
        return 0
    if not found:
        say_or_lose(f"rlhpc: no log yet; waiting for one (`rlhpc status {quoted(layout.root)}` says why)")
    try:
        _follow(layout, role, tails, {file.path for file in there})
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def log_files(layout: RunLayout, role: str | None) -> list[LogFile]:
    """All logs of a role, a process or a service (None: all), by name and age."""
    found, of_service = [], processes_of_service(layout, role) if role else []
    for directory in layout.logs.glob("*"):
        name = directory.name
        if name != SLURM and (role in (None, name, name.rpartition("-")[0]) or name in of_service):
            for path in directory.glob("attempt_*.log"):
                if match := _ATTEMPT.fullmatch(path.name):
                    found.append(LogFile(name, path, int(match[1])))
    for path in (layout.logs / SLURM).glob("*.log"):
        name = f"{SLURM}/{path.stem}"
        if role in (None, SLURM, name):
            found.append(LogFile(name, path, -1))
    return sorted(found, key=lambda file: (*_by_number(file.name), file.attempt))


def roles_there(layout: RunLayout) -> list[str]:
    """Names of processes that have logs."""
    return sorted({file.name for file in log_files(layout, None)}, key=_by_number)


# -------------------------------------------------------------------------------------------------------------- choice


def _newest(files: list[LogFile]) -> list[LogFile]:
    """Logs of the newest attempt, and of batch steps those written within a day of the latest.

    A generator survives attempts, and may continue in the log of an earlier one: its newest log is taken.
    """
    last = max((file.attempt for file in files), default=-1)
    of_name = {file.name: file for file in files if file.attempt >= 0}  # sorted: the last of each name stays
    batch = [file for file in files if file.attempt < 0]
    newest = max((written_unix_s(file.path) for file in batch), default=0.0)
    return [
        *(file for file in of_name.values() if file.attempt == last or file.name.startswith(_OUTLIVE_ATTEMPTS)),
        *(file for file in batch if written_unix_s(file.path) > newest - 86400),
    ]


def _may_come(layout: RunLayout, role: str | None) -> bool:
    """True if a missing log may still appear: the role's name is valid, and the run is not over."""
    roles = ("controller", "trainer", "generator", "reward", "service", EVALUATOR, SLURM)
    known = role is None or role in roles or (role.rpartition("-")[0] in roles and role.rpartition("-")[2].isdigit())
    return (known or bool(role and processes_of_service(layout, role))) and not is_over(layout)


def _nothing(layout: RunLayout, role: str | None) -> str:
    there = roles_there(layout)
    if not there:
        return f"{layout.logs}: no logs yet; `rlhpc status {quoted(layout.root)}` says what the run waits for"
    kinds = sorted({name.partition("/")[0] if "/" in name else name.rpartition("-")[0] for name in there})
    return f"{role!r} has no log in {layout.logs}; legal: {', '.join([*kinds, *there])}"


def _by_number(name: str) -> tuple[str, int]:
    """Sort key of a name: generator-10 comes after generator-9."""
    kind, _, number = name.rpartition("-")
    return (kind, int(number)) if number.isdigit() else (name, -1)


# ----------------------------------------------------------------------------------------------------------- following


class _Tail:
    """A file being printed: the offset of the next line, and the incomplete last line."""

    def __init__(self, file: LogFile) -> None:
        self.file = file
        self._offset, self._rest = 0, b""

    def print_last(self, lines: int, width: int) -> bool:
        """Print the last lines; True if there are others before them."""
        try:
            size = self.file.path.stat().st_size
            with self.file.path.open("rb") as stream:
                stream.seek(max(0, size - _TAIL_BYTES))
                content = stream.read(_TAIL_BYTES)
        except OSError:
            return False
        self._offset = max(0, size - _TAIL_BYTES) + len(content)
        *whole, self._rest = content.split(b"\n")
        self._print(whole[-lines:], width)
        return size > _TAIL_BYTES or len(whole) > lines

    def print_new(self, width: int) -> bool:
        """Print new lines; True if there were any."""
        try:
            size = self.file.path.stat().st_size
            if size < self._offset:  # a batch log, which a requeued job begins anew, or one that has been shortened
                self._offset, self._rest = max(0, size - _TAIL_BYTES), b""
            if size == self._offset:
                return False
            with self.file.path.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read(_CHUNK_BYTES)
        except OSError:
            return False
        self._offset += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        self._print(whole, width)
        return bool(content)

    def finish(self, width: int) -> None:
        """Print an unterminated last line."""
        if self._rest:
            self._print([self._rest], width)
            self._rest = b""

    def _print(self, lines: list[bytes], width: int) -> None:
        for line in lines:
            # A progress bar overwrites its line: print only its last state.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            text = escaped(text, keeps_colours=True)
            end = _NO_COLOUR if "\x1b" in text and not text.endswith(_NO_COLOUR) else ""
            sys.stdout.write(f"{self.file.name:<{width}} | {text}{end}\n")
        sys.stdout.flush()


def _follow(layout: RunLayout, role: str | None, tails: dict[Path, _Tail], known: set[Path]) -> None:
    """Print new lines until the run is over and the logs stop growing.

    known: logs that existed before; those of earlier attempts have no tail, because they do not grow any more.
    """
    width = max((len(tail.file.name) for tail in tails.values()), default=0)
    ended = now_and_then(lambda: is_over(layout), ASK_SLURM_S if RunView(layout).is_slurm_run else LOOK_S)
    quiet = 0
    while quiet < 2:  # processes may still log while the run already counts as over
        over = is_complete(layout) or ended()
        for file in seen(lambda: log_files(layout, role), list[LogFile]()):
            if file.path not in known:
                known.add(file.path)
                tails[file.path] = _Tail(file)
                width = max(width, len(file.name))
        num_grown = sum(tail.print_new(width) for tail in tails.values())
        quiet = quiet + 1 if over and not num_grown else 0
        time.sleep(LOOK_S)
    for tail in tails.values():
        tail.finish(width)


def is_over(layout: RunLayout) -> bool:
    """True if nothing writes logs any more.  If Slurm does not answer the run counts as alive."""
    if is_complete(layout):
        return True

    def is_alive() -> bool:
        view = RunView(layout)
        return look_at_run(view).is_alive if view.is_slurm_run else view.launcher_pid is not None

    return not seen(is_alive, True)


def now_and_then(ask: Callable[[], bool], every_s: float) -> Callable[[], bool]:
    """Limit an expensive query to one in every_s; in between, return the last answer."""
    asked, answer = -every_s, False

    def cheap() -> bool:
        nonlocal asked, answer
        if time.monotonic() - asked >= every_s:
            answer, asked = ask(), time.monotonic()
        return answer

    return cheap
