"""Launchers of runs, as files and processes: one that lives, one of another machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from launch.run_directory.owner import ProcessIdentity
from rlhpc.base.run_directory import RunLayout


@contextmanager
def living_launcher(layout: RunLayout) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that stands in launcher.json."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    layout.launcher.write_text(json.dumps(identity.to_json()))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def launcher_elsewhere(layout: RunLayout) -> None:
    """Write the name of a launcher on another machine."""
    record = {"host": "another-host", "boot_id": "of another machine", "pid": 1, "start_ticks": 1}
    layout.launcher.write_text(json.dumps(record))


@contextmanager
def controller_elsewhere(layout: RunLayout) -> Iterator[None]:
    """launcher_elsewhere, and a status.json that is written again and again."""
    launcher_elsewhere(layout)
    over = threading.Event()

    def write() -> None:
        while not over.wait(0.05):
            layout.status.write_text("{}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()
