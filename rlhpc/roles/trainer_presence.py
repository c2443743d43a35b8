"""The trainer's heartbeat, from a thread of its own: its main thread is busy for whole steps."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rlhpc.errors import ChannelError
from rlhpc.messages import Heartbeat
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.presence import CONNECT_TIMEOUT_S, hello
from rlhpc.topology import CONTROL
from rlhpc.transport.open import connect_blocking


class TrainerPresence:
    """Says hello, then beats, until left.  The main thread calls `now`; everything else happens in the thread."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._current = Heartbeat("starting", "", -1)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        """Start beating."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop beating."""
        self._left.set()
        self._thread.join(timeout=5.0)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        """Replace what the next heartbeats say."""
        self._current = Heartbeat(state, waits_for, policy_version)

    def _beat(self) -> None:
        context = self._context
        try:
            control = connect_blocking(
                CONTROL,
                **context.caller,
                timeout_s=CONNECT_TIMEOUT_S,
            )
            control.send(hello(context))
            while not self._left.is_set():
                control.send(self._current)
                self._left.wait(context.config.transport.heartbeat_s)
            control.close()
        except ChannelError:
            return  # the controller is gone; the main thread finds out at its next message
