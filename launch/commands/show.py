"""`rlhpc report RUN_DIR`: report on a run, short on the terminal, or as a page for a browser.

Input: the directory of a run, running or ended.  Output: text, or an HTML file.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from launch.common.text import counted, escaped, json_text, print_paged, say_or_lose
from launch.run_files.run_state import is_supervised, read_progress
from launch.view.run import RunView
from launch.view.standing import DEPTH, directories_to_search, find_runs
from rlhpc.base.files import write_atomically
from rlhpc.base.processes import die_with
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import ConfigError, RunDirectoryError

if TYPE_CHECKING:
    from launch.view.rollouts import SeenRollout
    from rlhpc.metrics.curves import CurveTable

# -------------------------------------------------------------------------------------------------------------- command
#
# `rlhpc metrics RUN_DIR`: the metrics of a run as a table, or as files for other programs.
#
# Input: the directory of a run, running or ended.  Output: CSV or Parquet, a row per step; or a run of Weights & Biases
# in files.  Writes nothing into the run directory, and uses the network only with --wandb --follow.


def show_metrics(options: argparse.Namespace) -> int:
    """Print or write the metrics.  Raises ConfigError: no run, no such metric, no such format; OSError."""
    _check_name(options.out)
    if options.follow:
        if options.wandb is None:
            raise ConfigError("--follow: legal only beside --wandb; `rlhpc tensorboard` shows a run that goes on")
        from launch.commands.trackers import follow_wandb  # an optional package

        return follow_wandb(options.wandb, options.layout, options.tag)
    view = RunView(options.layout)
    table = view.metric_table(options.tag)
    if options.wandb is not None:
        from launch.commands.trackers import ExportedRun, write_wandb  # an optional package

        print(write_wandb(options.wandb, ExportedRun(view, table)))
    elif options.out is None:
        sys.stdout.writelines(table.csv_lines())
    else:
        write_table(options.out, table)
        print(f"{options.out}: {counted(len(table.steps), 'step')}, {counted(len(table.curves), 'metric')}")
    return 0


def write_table(file: Path, table: CurveTable) -> None:
    """Write a table, atomically, in the format of the suffix.  Raises ConfigError: unknown suffix; OSError."""
    _check_name(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".csv":
        write_atomically(file, "".join(table.csv_lines()).encode())
        return
    from rlhpc.data.arrow_tables import columns_as_parquet  # loading pyarrow takes a while

    write_atomically(file, columns_as_parquet(table.columns()))


def _check_name(file: Path | None) -> None:
    if file is not None and file.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--out {file}: legal: a name that ends in .csv or .parquet")


# ------------------------------------------------------------------------------------------------------------- rollouts
#
# `rlhpc rollouts RUN_DIR`: transcripts of sampled rollouts, as text, as one HTML page, or as JSON lines.
#
# Input: the directory of a run that is running, was killed, or was copied from elsewhere.  Output: transcripts.


def show_rollouts(options: argparse.Namespace) -> int:
    """Print transcripts, or write the page.  Raises ConfigError: no run, or options that contradict each other."""
    from launch.view.rollouts import RunRollouts, Selection, as_document, transcripts  # slow to import

    bounds = options.min_reward, options.max_reward
    if is_supervised(options.layout):
        raise RunDirectoryError(
            f"{options.layout.root}: supervised fine-tuning, in which nothing is sampled; `rlhpc check RUN.toml` shows "
            "its first conversation"
        )
    selection = Selection.of(
        _steps(options.step), options.task, options.verdict, *bounds, options.grep, options.dataset
    )
    rollouts = RunRollouts(options.layout, tokenizer_dir=options.tokenizer, tell=_tell)
    if options.html is not None:
        from launch.view.rollouts_page import write_page

        written = write_page(options.html, rollouts, _chosen(rollouts.each(selection), options.sample))
        print(f"{options.html}: {written}")
        return 0
    shown = [0]
    chosen = _counted(_chosen(rollouts.each(selection), options.sample), shown)
    if options.json:
        for seen in chosen:
            print(json_text(as_document(seen)))
        _tell(counted(shown[0], "rollout"))
        return 0
    first = next(chosen, None)
    if first is None:
        _tell(f"no rollout of this run is selected{_range(options)}")
        return 0
    print_paged(transcripts(chain([first], chosen)))
    _tell(f"{counted(shown[0], 'rollout')} shown")
    return 0


def _counted(rollouts: Iterator[SeenRollout], shown: list[int]) -> Iterator[SeenRollout]:
    for seen in rollouts:
        shown[0] += 1
        yield seen


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ConfigError(f"--step {text}; legal: a step, such as 7, or the first and the last of some, such as 5-9")
    return int(match[1]), int(match[2] or match[1])


def _range(options: argparse.Namespace) -> str:
    """Steps that a run has, if the selected ones are beyond them; else ""."""
    chosen, progress = _steps(options.step), read_progress(options.layout)
    if chosen is None or progress is None or chosen[0] < progress.step:
        return ""
    return f": --step {options.step}; legal: 0 to {progress.step - 1}" if progress.step else ": no step is done yet"


def _chosen(rollouts: Iterator[SeenRollout], number: int | None) -> Iterator[SeenRollout]:
    """Choose `number` rollouts, the same each time, so that two people who type the same command see the same."""
    if number is None:
        return rollouts
    from launch.view.rollouts import sample_of

    return iter(sample_of(rollouts, number, random.Random(0).randrange))


def _tell(line: str) -> None:
    say_or_lose(f"rlhpc: {escaped(line)}")


# ---------------------------------------------------------------------------------------------------------- tensorboard
#
# `rlhpc tensorboard [DIR …]`: TensorBoard with these runs, under their names.
#
# Input: run directories, or their parents.  Output: TensorBoard, until Ctrl-C, on a temporary directory with links to
# event files.  New runs and new points appear while it serves.

LOOK_EVERY_S = 5.0  # as in TensorBoard
FIND_EVERY = 12  # looks between searches: new runs appear within a minute


class EventView:
    """A log directory for TensorBoard: a subdirectory for each run, with the run's name."""

    def __init__(self, directory: Path, tops: list[Path]) -> None:
        self._directory, self._tops = directory, tops
        self._names = dict[Path, str]()  # run directory → name, which stays the same

    @property
    def names(self) -> list[str]:
        """Names of the runs shown, in order."""
        return sorted(self._names.values())

    def find(self) -> None:
        """Add runs that are not shown yet; slow for a large directory on a shared filesystem."""
        from rlhpc.metrics.curves import EVENT_FILES

        for run in find_runs(self._tops, DEPTH).runs:
            if run.root not in self._names and any(run.layout.tensorboard.glob(EVENT_FILES)):
                self._add(run.layout, re.sub(r"^\.+|/", "_", run.name))  # a name, and no path

    def update(self) -> None:
        """Link new event files of the runs.  A run that is being deleted is skipped."""
        for root, name in self._names.items():
            with suppress(OSError):  # it is being deleted or begun anew: the next look sees what has become of it
                layout, place = RunLayout(root), self._directory / name
                _link(layout.tensorboard, place)
                _link(layout.evaluations / layout.tensorboard.name, place / "evaluations")

    def _add(self, layout: RunLayout, name: str) -> None:
        taken = {*self._names.values()}
        if name in taken:
            name = f"{name} ({layout.root.parent.name}/{layout.root.name})"
        while name in taken:
            name += "'"
        self._names[layout.root] = name


def _link(source: Path, place: Path) -> None:
    """Make links to the event files of a directory, and remove other links."""
    from rlhpc.metrics.curves import EVENT_FILES

    files = {file.name: file for file in source.glob(EVENT_FILES)}
    if files:
        place.mkdir(parents=True, exist_ok=True)
    for link in place.glob(EVENT_FILES):
        if link.name not in files:
            link.unlink()
    for name, file in files.items():
        if not (place / name).is_symlink():
            (place / name).symlink_to(file)


def serve_tensorboard(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C, SIGTERM or the end of TensorBoard; return its status.  Raises ConfigError: nothing found."""
    tops = directories_to_search(options.directories)
    with tempfile.TemporaryDirectory(prefix="rlhpc-tensorboard-") as directory:
        shown, temporary = Path(directory, "runs"), Path(directory, "temporary")
        for each in (shown, temporary):
            each.mkdir()
        view = EventView(shown, tops)
        view.find()
        view.update()
        if not view.names:
            raise ConfigError(f"no run with metrics below {', '.join(map(str, tops))}")
        print(f"{', '.join(view.names)}: add #custom_scalars to the address for groups of charts", flush=True)
        return _serve(view, shown, temporary, options)


def _serve(view: EventView, directory: Path, temporary: Path, options: argparse.Namespace) -> int:
    where = ["--bind_all"] if options.bind_all else []
    where += [] if options.port is None else [f"--port={options.port}"]
    command = [sys.executable, "-P", "-m", "tensorboard.main", f"--logdir={directory}", "--window_title=rlhpc"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the directory is removed then, too
    # TensorBoard writes to .tensorboard-info in the directory for temporary files, which may be another user's.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    server = subprocess.Popen([*command, *where], env=environment, preexec_fn=partial(die_with, os.getpid()))
    try:
        looks = 0
        while True:
            with suppress(subprocess.TimeoutExpired):
                return server.wait(LOOK_EVERY_S)
            looks += 1
            if looks % FIND_EVERY == 0:
                view.find()
            view.update()
    except KeyboardInterrupt:
        return 0
    finally:
        server.terminate()
        server.wait()


# --------------------------------------------------------------------------------------------------------------- report


def report_run(options: argparse.Namespace) -> int:
    """Print the short report, and write the page if one is named.  Raises ConfigError: no run at this path."""
    from launch.view.report import as_text, read_report, write_report

    page, report = options.html, read_report(RunView(options.layout))
    if page is None:
        print(escaped("\n".join(as_text(report))))
        return 0
    num_bytes = write_report(page, report)
    size = f"{counted(report.view.num_steps_seen, 'step')}, {counted(len(report.marks), 'event')}"
    print(f"{page}: {size}, {num_bytes / 1e6:.1f} MB")
    return 0
