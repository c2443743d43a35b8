"""`rlhpc tensorboard [DIR …]`: TensorBoard of these runs, under their names.

Input: run directories, or directories that hold some.  Output: TensorBoard, until Ctrl-C, of a temporary directory
that has links to event files.  New runs and new points appear while it serves.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from launch.commands.overview.find import DEPTH, directories_to_search, find_runs
from rlhpc.errors import ConfigError
from rlhpc.metrics.curves import EVENT_FILES
from rlhpc.parent_death import die_with
from rlhpc.run_layout import RunLayout

LOOK_EVERY_S = 5.0  # as TensorBoard
FIND_EVERY = 12  # looks: new runs appear within a minute


class EventView:
    """A directory as TensorBoard takes one: a directory for each run, called as the run is."""

    def __init__(self, directory: Path, tops: list[Path]) -> None:
        self._directory, self._tops = directory, tops
        self._names = dict[Path, str]()  # run directory → name; a run keeps its own

    @property
    def names(self) -> list[str]:
        """Of the runs that are shown, in order."""
        return sorted(self._names.values())

    def find(self) -> None:
        """Look for runs that are not shown yet; on a large directory of a shared filesystem this takes a while."""
        for run in find_runs(self._tops, DEPTH).runs:
            if run.root not in self._names and any(run.layout.tensorboard.glob(EVENT_FILES)):
                self._add(run.layout, re.sub(r"^\.+|/", "_", run.name))  # a name, and no path

    def update(self) -> None:
        """Look for what runs have written.  A run that is being deleted is passed over."""
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
    """Have a link to each event file of a directory, and to no other."""
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
    """Serve until Ctrl-C, SIGTERM or an end of TensorBoard; its exit status.  Raises ConfigError: nothing to show."""
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
    # It writes to .tensorboard-info in the directory for temporary files, which may be another user's.
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
