"""Orphan guard: ends this process when its parent is gone, or another attempt owns the run.

Input: the parent's pid and the fence.  A thread checks every LOOK_S and, if either holds, ends the process, whatever
library call the other threads are in.  Signals and the checks before each write come first (lifecycle.py,
ownership.py); this is for a process that reacts to neither: one that was stopped, that imports, that waits in a
collective.

It also makes TMPDIR again, with which this process and its children were started, where a cleaner has deleted it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from rlhpc.errors import OwnershipLost
from rlhpc.files import make_private
from rlhpc.ownership import Fence

log = logging.getLogger("rlhpc.guard")
LOOK_S = 0.5
FENCE_LOOK_S = 1.0
ORPHAN_GRACE_S = 3.0  # for the orderly exit that the signal of the parent's death starts
NUM_DOUBTS = 3  # consecutive looks without any owner: NFS, or a directory being replaced, may show none once


class Guard(threading.Thread):
    """Start it once; it ends with the process."""

    def __init__(self, fence: Fence | None) -> None:
        """fence: None for a process that outlives attempts."""
        super().__init__(name="guard", daemon=True)
        self._fence, self._parent = fence, os.getppid()
        temporary = os.environ.get("TMPDIR")
        self._temporary = Path(temporary) if temporary else None

    def run(self) -> None:
        """Look until there is a reason to end."""
        fence_looked_at = 0.0
        num_lost = 0
        while True:
            time.sleep(LOOK_S)
            self._keep_temporary_directory()
            if os.getppid() != self._parent:
                log.warning("the parent of this process is gone: ending in %g s", ORPHAN_GRACE_S)
                time.sleep(ORPHAN_GRACE_S)
                end_now()
            if self._fence is not None and time.monotonic() - fence_looked_at >= FENCE_LOOK_S:
                fence_looked_at = time.monotonic()
                num_lost = num_lost + 1 if self._is_lost(self._fence) else 0
                if num_lost >= NUM_DOUBTS:
                    end_now()

    def _keep_temporary_directory(self) -> None:
        if self._temporary is None or self._temporary.is_dir():
            return
        with suppress(OSError):
            make_private(self._temporary)
            log.warning("%s was deleted, and is made again", self._temporary)

    def _is_lost(self, fence: Fence) -> bool:
        try:
            fence.check()
        except OwnershipLost as error:
            log.error("%s", error)  # noqa: TRY400  there is nothing to trace
            return True
        except OSError as error:  # the filesystem does not answer: then this process cannot write there either
            log.warning("%s: %s", fence.layout.owner, error)
        return False


def end_now() -> None:
    """SIGKILL for this process, and for its children if it leads a process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
