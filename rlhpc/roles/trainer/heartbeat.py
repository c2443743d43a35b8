"""The trainer's heartbeat, from its own thread: the main thread is busy for whole steps.

The same connection carries the messages of other threads of the trainer, since a socket belongs to one thread.  The
controller stops by it a rank that is not ready for commands yet: one that loads its model, waits for other ranks or
for the channel of commands has nothing to finish, and leaves at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rlhpc.contracts import BlockingClientChannel
from rlhpc.deadline import Deadline
from rlhpc.errors import ChannelError, ChannelTimeout, RlhpcError, RoleFailed
from rlhpc.messages import Heartbeat, SaveReport, StopRole
from rlhpc.roles.common.heartbeat import hello
from rlhpc.roles.common.lifecycle import RoleContext, leave_at_once
from rlhpc.topology import CONTROL
from rlhpc.transport.open import connect_blocking

log = logging.getLogger("rlhpc.trainer")
LOOK_S = 0.2  # between two looks whether the controller has said anything


class TrainerHeartbeat:
    """Sends Hello, then heartbeats until closed.

    Any thread may call `tell`, the main thread `now`; a separate thread does the rest.
    """

    def __init__(self, context: RoleContext, interval_s: float, leave: Callable[[int], object] = leave_at_once) -> None:
        """leave: ends the process with an exit status; called when the controller stops it before its first command."""
        self._context, self._interval_s, self._leave = context, interval_s, leave
        self._current = Heartbeat("starting", "", -1)
        self._told: queue.SimpleQueue[SaveReport | None] = queue.SimpleQueue()  # None: stop
        self._failure: RlhpcError | OSError | None = None  # of that thread: nobody else can say that it is silent
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        """Start beating."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the messages that are queued, and stop."""
        self._told.put(None)
        self._thread.join(timeout=5.0)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        """Replace the content of the next heartbeats.  Raises RoleFailed if none will ever come."""
        if self._failure is not None:
            raise RoleFailed(f"heartbeats have ended: {self._failure}") from self._failure
        self._current = Heartbeat(state, waits_for, policy_version)

    def tell(self, message: SaveReport) -> None:
        """Send a message to the controller at once, between heartbeats."""
        self._told.put(message)

    def _beat(self) -> None:
        try:
            control = connect_blocking(
                CONTROL,
                **self._context.caller,
                timeout_s=self._context.meet_timeout_s,
            )
        except (RlhpcError, OSError) as error:  # of keys, or an address that cannot be read for as long
            self._failure = error
            return
        try:
            control.send(hello(self._context))
            control.send(self._current)
            while self._speak_until_next_beat(control):
                control.send(self._current)
            control.close()
        except ChannelError:
            return  # the controller is gone; the main thread finds out at its next message
        except (RlhpcError, OSError) as error:
            self._failure = error

    def _speak_until_next_beat(self, control: BlockingClientChannel) -> bool:
        """Send queued messages until the next heartbeat is due.  False when asked to stop."""
        next_beat = Deadline(self._interval_s)
        while not next_beat.is_over:
            self._obey(control)
            try:
                message = self._told.get(timeout=min(LOOK_S, next_beat.left_s))
            except queue.Empty:
                continue
            if message is None:
                return False
            control.send(message)
        return True

    def _obey(self, control: BlockingClientChannel) -> None:
        """Leave if the controller has said so; it says so here only to ranks that obey no commands yet."""
        with suppress(ChannelTimeout):
            message = control.receive(0.0)
            if isinstance(message, StopRole):
                log.info("asked to stop: %s", message.reason)
                self._leave(0)
