"""Tie the lifetime of an engine process to its generator: it ends neither before it nor after it.

Slurm signals every process of a job step: an engine that reacted would be gone before the generator has handed back its
partial rollouts.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from rlhpc.parent_death import end_with_parent

NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class SignalShield:
    """The signals of one process; call its methods on the main thread, otherwise signals stay as they are."""

    def __init__(self) -> None:
        """Ignores nothing yet."""
        self._handlers: dict[signal.Signals, Any] = {}

    def follow(self, generator_pid: int) -> None:
        """Ignore the scheduler's signals, which the generator handles; end when it ends, in a direct child of it.

        Other processes of an engine end with the one that has started them: vLLM sees to that.
        """
        if threading.current_thread() is threading.main_thread():
            self._handlers = {notice: signal.signal(notice, signal.SIG_IGN) for notice in NOTICES}
        if os.getppid() == generator_pid:
            end_with_parent()

    def heed(self) -> None:
        """Restore the signals that follow() ignores, so that vLLM can end its processes."""
        for notice, handler in self._handlers.items():
            signal.signal(notice, handler)
