"""Serve one controller after another: how generators and reward services outlive the controller.

A *session* is the service of one controller, from connecting to its channels until one of these ends it:

    a signal, or StopRole(run_is_over)    the process leaves
    StopRole, but the run goes on         it looks for the next controller
    another incarnation in rendezvous/    the same: ours was killed and could not send StopRole
    a channel that fails                  the same; the next one is possibly the same controller again

Each session has its own incarnation, of the same order: a controller that knows the one before treats it as dead and
reclaims its leases.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine

from rlhpc.config_file import read_resolved
from rlhpc.errors import ChannelError, RoleFailed, RunDirectoryError
from rlhpc.messages import StopRole
from rlhpc.patience import patiently_aside
from rlhpc.roles.common.lifecycle import RoleContext, first_leaf, run_until
from rlhpc.topology import ChannelSpec
from rlhpc.transport.incarnation import another_of
from rlhpc.transport.open import FoundClient, connect
from rlhpc.transport.rendezvous import Endpoint, successor

log = logging.getLogger("rlhpc.controller_session")
LOOK_S = 1.0  # between looks at the addresses of those that we are connected to
FOLLOW_TIMEOUT_S = 10.0  # for a restarted server: another one may have restarted as well


class ControllerSession:
    """The service of one controller."""

    def __init__(self, context: RoleContext, stop: asyncio.Event, gone: str = "") -> None:
        """gone: incarnation of a controller that is known to be dead."""
        self.context, self.stop = context, stop
        self.gone = gone
        self.is_last = False
        self._over = asyncio.Event()
        self._controller: list[Endpoint] = []  # where we are connected to it; the control channel is the last

    async def connect(
        self, spec: ChannelSpec, server_replica: int = 0, *, gone: str = "", timeout_s: float | None = None
    ) -> FoundClient:
        """Connect to a server.  timeout_s: None for the time that roles wait for each other.

        Raises ChannelTimeout that says who is missing, RoleFailed if the settings of the run have changed.
        """
        is_controllers = spec.server == "controller"
        channel = await connect(
            spec,
            **self.context.caller,
            server_replica=server_replica,
            timeout_s=self.context.meet_timeout_s if timeout_s is None else timeout_s,
            gone=self.gone if is_controllers else gone,
            awaits_keys=True,
        )
        if is_controllers:
            self._controller.append(channel.endpoint)
            try:
                await self._refuse_other_settings()
            except BaseException:  # a cancelled connect, too, must not leave a socket behind
                await channel.close()
                raise
        return channel

    async def until_over(self, *loops: Coroutine[None, None, None]) -> None:
        """Run endless loops side by side until the session is over; the first failure is raised, in a group."""
        await run_until(self._over, self._heed(self.stop), self._watch(), *loops)

    def asked_to_stop(self, message: StopRole) -> None:
        """The controller ends the session."""
        if not self._over.is_set():
            log.info("asked to stop: %s", message.reason)
            self.is_last |= message.run_is_over
            self._leave_controller(self._controller[-1])

    def failed(self, error: BaseException) -> None:
        """A channel does not work.  The controller itself may be alive."""
        log.warning("a channel failed: %s", error)
        self.gone = ""
        self._over.set()

    async def _heed(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.is_last = True
        self._over.set()

    async def _watch(self) -> None:
        """Look for another controller in the place of ours, off the event loop: the filesystem may be slow."""
        while True:
            await asyncio.sleep(LOOK_S)
            for endpoint in self._controller:
                if await asyncio.to_thread(successor, self.context.layout.rendezvous, endpoint) is not None:
                    log.info("%s was started again", endpoint.name)
                    self._leave_controller(endpoint)
                    return

    def _leave_controller(self, endpoint: Endpoint) -> None:
        self.gone = endpoint.incarnation
        self._over.set()

    async def _refuse_other_settings(self) -> None:
        """A resume may change settings; this process has those of its start."""
        layout = self.context.layout
        _, digest = await patiently_aside(lambda: read_resolved(layout), layout.config)
        if digest != self.context.config_hash:
            raise RoleFailed(f"the run's settings have changed ({digest}) since {self.context.name} was started")


async def serve_controllers(
    context: RoleContext, stop: asyncio.Event, serve: Callable[[ControllerSession], Awaitable[None]]
) -> None:
    """Serve one controller after the other, until the run is over or `stop` is set.

    serve: connects, works until its session is over, and closes its channels.  Raises what it raises, but for channels
    that fail within a task group.
    """
    session = ControllerSession(context, stop)
    while True:
        try:
            await serve(session)
        except BaseExceptionGroup as group:
            if group.split(ChannelError)[1] is not None:
                raise
            session.failed(first_leaf(group))
        if session.is_last or stop.is_set():
            return
        log.info("looking for the next controller, for %g s at most", context.meet_timeout_s)
        next_context = dataclasses.replace(context, incarnation=another_of(context.incarnation))
        session = ControllerSession(next_context, stop, gone=session.gone)


async def follow_services(
    session: ControllerSession,
    spec: ChannelSpec,
    services: list[FoundClient],
    replace: Callable[[FoundClient, FoundClient], Awaitable[None]],
) -> None:
    """Reconnect to each server replica that was restarted, endlessly; `replace` takes (old channel, new channel)."""
    directory = session.context.layout.rendezvous
    while True:
        await asyncio.sleep(LOOK_S)
        for replica, old in enumerate(services):
            if await asyncio.to_thread(successor, directory, old.endpoint) is None:
                continue
            try:
                new = await session.connect(spec, replica, gone=old.endpoint.incarnation, timeout_s=FOLLOW_TIMEOUT_S)
            except (ChannelError, RunDirectoryError) as error:  # it has died again, or a new attempt mints its keys
                log.warning("%s was started again and cannot be reached: %s", old.endpoint.name, error)
                continue
            log.info("%s was started again", old.endpoint.name)
            services[replica] = new
            await replace(old, new)
