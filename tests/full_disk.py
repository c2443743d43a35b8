"""A small disk of its own, and a file that takes up all of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path, num_bytes: int) -> Iterator[None]:
    """A filesystem of its own in this place, with the same empty directories; skipped where we may mount none."""
    directories = [path.name for path in at.iterdir() if path.is_dir()]  # in which the owner prepares files
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(at)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a full disk needs the right to mount a small one: {done.stderr.strip()}")
    for name in directories:
        (at / name).mkdir()
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(filler: Path, but_bytes: int) -> None:
    """Leave `but_bytes` free at this instant, or none; the next call fills what the run has freed meanwhile."""
    with filler.open("ab") as file:
        disk = os.fstatvfs(file.fileno())
        length, size = file.tell(), file.tell() + disk.f_bavail * disk.f_frsize - but_bytes
        if size < length:
            file.truncate(size)
        elif size > length:
            with contextlib.suppress(OSError):  # the run has taken some meanwhile, and the disk is full
                os.posix_fallocate(file.fileno(), length, size - length)
