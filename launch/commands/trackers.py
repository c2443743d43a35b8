"""Export a run as an offline run of Weights & Biases: files that `wandb sync` uploads from a machine with a network.

Input: a run and its table of metrics.  Output: DIR/wandb/offline-run-…, written by wandb's own package, which needs no
account for it.  Steps are optimiser steps; the time of a point is the time at which the run wrote it.
Guarantees: no network is used, whatever wandb's variables say; each run has one such directory below DIR: an earlier
one is removed when the new one is complete.

Not part of the run's own processes: a run must never wait for a service.  A separate command sends a running run.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from launch.commands.logs import ASK_SLURM_S, LOOK_S, is_over, now_and_then
from launch.common.text import counted, optional_module, quoted
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.curves import CurveTable, shortest
from rlhpc.protocol.errors import EXIT_INTERRUPTED, ConfigError

# ------------------------------------------------------------------------------------------------------------- exported
#
# A run in the form that is exported to Weights & Biases.


@dataclass(frozen=True)
class ExportedRun:
    """A run, its metrics, and a stable id, which differs for another history in the same directory."""

    view: RunView
    table: CurveTable

    @cached_property
    def identity(self) -> str:
        """Id of 12 hexadecimal digits, from all metrics of the run, also those that are not exported."""
        began = float(self.view.metric_table().unix_times_s[0])
        return hashlib.sha256(f"{self.view.root}\n{began!r}".encode()).hexdigest()[:12]

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{counted(len(self.table.steps), 'step')}, {counted(len(self.table.curves), 'metric')}"


# -------------------------------------------------------------------------------------------------------- wandb records
#
# Read wandb's files back: its package reports success on a full disk, too.
#
# Input: a .wandb file, which is a log of records (the log format of LevelDB: blocks of 32 KiB, a head of seven bytes a
# piece) after seven bytes of its own; a record is one of wandb's protobuf messages.  Output: those messages.

_MAGIC, _FILE_HEAD = b":W&B", 7
_BLOCK = 32_768
_HEAD = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _LAST = 1, 4


def records_of(file: Path) -> Iterator[Any]:
    """Yield whole records, in order, up to a place where the file is cut off.  Raises OSError."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, part = file.read_bytes(), _FILE_HEAD, b""
    if not data.startswith(_MAGIC):
        return
    while at + _HEAD.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD.size:
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        at += _HEAD.size + length
        if kind == 0 or at > len(data):
            return
        part += data[at - length : at]
        if kind in (_WHOLE, _LAST):
            yield messages.Record.FromString(part)
            part = b""


# ---------------------------------------------------------------------------------------------------------- wandb files

PROJECT = "rlhpc"  # `wandb sync --project` names another
Row = tuple[int, float, dict[str, float]]  # step, unix time in seconds, points


def write_wandb(directory: Path, run: ExportedRun) -> str:
    """Write the run below a directory; return the next command for the user.

    Raises ConfigError: wandb is not installed, or it could not write all; an earlier export is kept then.
    """
    wandb = _library()
    directory.mkdir(parents=True, exist_ok=True)
    earlier = [*(directory / "wandb").glob(f"offline-run-*-{run.identity}")]
    with ExitStack() as undo:
        for path in earlier:  # names hold seconds: two exports in one are to have two
            path.rename(_aside(path))
            undo.callback(_aside(path).rename, path)
        try:
            written = _write(wandb, directory, run)
        except (wandb.errors.Error, OSError) as error:
            raise ConfigError(f"--wandb {directory}: {error}") from error
        undo.pop_all()
    for path in earlier:
        shutil.rmtree(_aside(path))
    return f"{written}: {run.size}; `wandb sync {quoted(written)}` uploads it"


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _write(wandb: ModuleType, directory: Path, exported: ExportedRun) -> Path:
    run = _begun(wandb, directory, exported, "offline", project=PROJECT)
    written, wanted = Path(run.settings.sync_dir), len(exported.table.steps)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, written)
        undo.callback(wandb.teardown)  # first: the process that writes
        for row in exported.table.rows():
            _log(run, row, float(exported.table.unix_times_s[0]))
        if (num_steps := _num_written(wandb, run)) < wanted:  # raises OSError for wandb's own log, too
            raise OSError(f"{num_steps} of {wanted} steps could be written: is the disk full?")
        undo.pop_all()
    return written


def _library() -> ModuleType:
    """The package wandb.  Raises ConfigError: it is not installed."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # its crash reports go over the network
    return optional_module("wandb", "wandb")


def _begun(wandb: ModuleType, directory: Path, exported: ExportedRun, mode: str, **how: str) -> Any:
    """Begin a run of wandb that records only the given values."""
    settings = wandb.Settings(
        mode=mode,
        console="off",  # what this command prints is nothing of the run
        silent=True,
        x_disable_stats=True,  # of this machine, which need not be the run's
        x_disable_meta=True,
        x_disable_machine_info=True,
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
    )
    who = {"id": exported.identity, "name": exported.view.name, "config": exported.view.settings}
    return wandb.init(dir=str(directory.resolve()), settings=settings, **who, **how)


def _log(run: Any, row: Row, began_s: float) -> None:
    """Write one step at once, not together with the next one."""
    step, unix_time_s, points = row
    run.log({**points, "_timestamp": unix_time_s, "_runtime": unix_time_s - began_s}, step=step, commit=True)


def _num_written(wandb: ModuleType, run: Any) -> int:
    """End a run; return the number of steps in its file."""
    run.finish()
    wandb.teardown()  # waits for the process that writes: it has not written all when finish() returns
    records = records_of(Path(run.settings.sync_file))
    return sum(record.WhichOneof("record_type") == "history" for record in records)


# --------------------------------------------------------------------------------------------------------- wandb follow
#
# Send a running run to Weights & Biases, from a machine that reaches its server: usually a login node.
#
# Input: a run directory, which is read repeatedly.  Output: one run of wandb, whose steps are the optimiser steps.
# Guarantees: the run itself waits for nothing and is not involved; a restarted command continues after the server's
# last step; a step is sent once, when it is complete.
#
# A history of wandb only grows.  So a step that a resume trains again is not sent again, and figures of an evaluation,
# which come after later steps have been sent, are sent with the step that follows them in time, over an axis of their
# own, `evaluation/step`.  The files that `--wandb` writes without `--follow` hold the run's final state.

EVALUATION, EVALUATION_STEP = "evaluation/", "evaluation/step"
LOOKS_COST = 0.05  # share of the time that reading the event files may take: they grow with the run


def follow_wandb(directory: Path, layout: RunLayout, patterns: Sequence[str] = ()) -> int:
    """Send existing steps, then each new step, until the run is over; return the exit status.

    directory: for wandb's own files.  patterns: of metrics, as for RunView.metric_table; none: all.
    Raises ConfigError: wandb is not installed, not logged in, or does not reach its server; RunDirectoryError; OSError.
    """
    wandb = _library()
    layout.require_run()
    ended = now_and_then(lambda: is_over(layout), ASK_SLURM_S if RunView(layout).is_slurm_run else LOOK_S)
    sent = None
    try:
        table = _first_table(layout, ended)
        if table is None:
            raise ConfigError(f"{layout.root}: the run is over and has written no metrics")
        directory.mkdir(parents=True, exist_ok=True)
        sent = _Sent(wandb, directory, ExportedRun(RunView(layout), table), patterns)
        return sent.follow(layout, ended)
    except KeyboardInterrupt:
        how_far = "nothing is sent" if sent is None else f"sent up to step {sent.next_step - 1}"
        _say(f"{layout.root}: {how_far}; the run is left alone, and this command goes on where it was")
        return EXIT_INTERRUPTED
    except wandb.errors.Error as error:
        raise ConfigError(
            f"--wandb --follow: wandb says: {error}; `wandb login` or WANDB_API_KEY says who you are, WANDB_BASE_URL "
            f"where; without a network: `rlhpc metrics {quoted(layout.root)} --wandb`, and `wandb sync` elsewhere"
        ) from error
    finally:
        if sent is not None:
            sent.finish()


class _Sent:
    """One run of wandb that is being sent."""

    def __init__(self, wandb: Any, directory: Path, exported: ExportedRun, patterns: Sequence[str]) -> None:
        mode = os.environ.get("WANDB_MODE", "online")
        if mode not in ("online", "offline"):
            raise ConfigError(f"WANDB_MODE={mode}: nothing would be sent; legal: online, offline")
        self._wandb, self._patterns = wandb, patterns
        self._began_s, self._num_sent = float(exported.table.unix_times_s[0]), 0
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = _begun(wandb, directory, exported, mode, project=project, resume="allow")
        self._run.define_metric(f"{EVALUATION}*", step_metric=EVALUATION_STEP)
        self.next_step = int(self._run.starting_step)  # after the steps that an earlier command has sent
        where = self._run.url or self._run.settings.sync_dir
        _say(f"{exported.view.root}: goes to {where}" + f", from step {self.next_step}" * bool(self.next_step))

    def follow(self, layout: RunLayout, ended: Callable[[], bool]) -> int:
        """Send until the run is over, at least once."""
        while True:
            is_last, began = ended(), time.monotonic()  # asked first: rows written later are read below
            table = _table(layout)
            if table is not None and float(table.unix_times_s[0]) != self._began_s:
                _say(f"{layout.root}: holds another run now; this command is for one, start it again for the other")
                return 1
            if table is not None:
                self._send(table, is_last, is_complete=layout.summary.exists())
            if is_last:
                return 0
            time.sleep(max(LOOK_S, (time.monotonic() - began) / LOOKS_COST))

    def _send(self, table: CurveTable, is_last: bool, is_complete: bool) -> None:
        for step, unix_time_s, points in rows_to_send(table, self.next_step, is_last, is_complete):
            wanted = {name: worth for name, worth in points.items() if name == EVALUATION_STEP or self._is_wanted(name)}
            _log(self._run, (step, unix_time_s, wanted), self._began_s)
            self.next_step, self._num_sent = step + 1, self._num_sent + 1

    def _is_wanted(self, name: str) -> bool:
        return not self._patterns or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def finish(self) -> None:
        """Wait until wandb has sent all.  Raises ConfigError: it could not write its own files."""
        if _num_written(self._wandb, self._run) < self._num_sent:
            raise ConfigError(f"{self._run.settings.sync_dir}: not all steps could be written: is the disk full?")
        if self._num_sent:
            _say(
                f"{counted(self._num_sent, 'step')} sent, up to step {self.next_step - 1}: {self._run.url or 'offline'}"
            )


def rows_to_send(table: CurveTable, next_step: int, is_last: bool, is_complete: bool) -> Iterator[Row]:
    """Yield the rows from `next_step` on that will not change any more; they depend on the table alone.

    is_last: no process writes any more, so that the newest row is complete, too.  is_complete: no resume will add a
    step: evaluations after the last step have rows after it.
    """
    evaluations = {name for name in table.curves if name.startswith(EVALUATION)}
    late = _evaluations(table, evaluations)
    of_training = [
        (step, at, points)
        for step, at, all_points in table.rows()
        if (points := {name: worth for name, worth in all_points.items() if name not in evaluations})
    ]
    for step, at, points in of_training if is_last else of_training[:-1]:
        if late and late[0][0] <= at:
            points |= late.pop(0)[1]  # one a row: their axis has one value there
        if step >= next_step:
            yield step, at, points
    if is_complete and of_training:
        for behind, (at, points) in enumerate(late, of_training[-1][0] + 1):
            if behind >= next_step:
                yield behind, at, points


def _evaluations(table: CurveTable, names: set[str]) -> list[tuple[float, dict[str, float]]]:
    """Time at which each evaluation was written, and its points, in order of time."""
    found = dict[tuple[float, int], dict[str, float]]()
    for name in sorted(names):
        curve = table.curves[name]
        for step, worth, at in zip(curve.steps, curve.values, curve.unix_times_s, strict=True):
            points = found.setdefault((float(at), int(step)), {EVALUATION_STEP: float(step)})
            points[name] = shortest(worth)
    return [(at, points) for (at, _), points in sorted(found.items(), key=lambda each: each[0])]


def _first_table(layout: RunLayout, ended: Callable[[], bool]) -> CurveTable | None:
    """Wait for the first metrics and return them; None if the run has ended without."""
    while True:
        is_last = ended()
        if (table := _table(layout)) is not None or is_last:
            return table
        time.sleep(LOOK_S)


def _table(layout: RunLayout) -> CurveTable | None:
    """Read all metrics; None if there are none yet, or the directory cannot be read at the moment."""
    with suppress(ConfigError, OSError):
        return RunView(layout).metric_table()
    return None


def _say(text: str) -> None:
    sys.stderr.write(f"rlhpc: {text}\n")
