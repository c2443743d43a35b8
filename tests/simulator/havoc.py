"""Bring a fault about: what each kind does to whom.

A kill takes effect when its victim has run so many more callbacks, or wants to do so many more file operations, so that
every await and every write of the controller is a place to die at.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from tests.simulator.disk import SimulatedDisk
from tests.simulator.faults import CONTROLLER, TRAINER, Fault
from tests.simulator.generators import SimulatedGenerator
from tests.simulator.loop import Process, SimulatedLoop
from tests.simulator.network import SimulatedClient, SimulatedServer


class Victims(Protocol):
    """What faults reach of the world."""

    loop: SimulatedLoop
    disk: SimulatedDisk
    processes: dict[str, Process]
    generators: dict[str, SimulatedGenerator]
    servers: dict[str, SimulatedServer]
    is_power_cut: bool  # how the controller's next death is one

    def tell(self, *words: object) -> None: ...

    def usurp(self, seconds: float) -> None: ...


async def bring(world: Victims, fault: Fault) -> None:
    """Wait for its time, and do it, if there is somebody to do it to."""
    await asyncio.sleep(fault.at_s)
    process = world.processes.get(fault.who)
    if process is not None and not process.is_dead:
        world.tell("FAULT", str(fault).split("  ", 1)[1])
        await WAYS[fault.kind](world, process, fault)


async def _kill(world: Victims, process: Process, fault: Fault) -> None:
    world.is_power_cut |= fault.kind.startswith("power cut")
    if fault.kind.endswith("file operation"):
        process.file_operations_left = fault.number
    else:
        process.events_left = fault.number


async def _kill_everything(world: Victims, process: Process, fault: Fault) -> None:
    for each in list(world.processes.values()):
        each.kill()


async def _take_for_dead(world: Victims, process: Process, fault: Fault) -> None:
    world.usurp(fault.seconds)


async def _tell_to_stop(world: Victims, process: Process, fault: Fault) -> None:
    handler = world.loop.signals.get((CONTROLLER, signal.SIGTERM))
    if handler is not None:
        handler()


async def _tell_to_leave(world: Victims, process: Process, fault: Fault) -> None:
    world.generators[fault.who].stop.set()


async def _stand_still(world: Victims, process: Process, fault: Fault) -> None:
    process.stands_still_until = world.loop.time() + fault.seconds


async def _break_connections(world: Victims, process: Process, fault: Fault) -> None:
    for client in _connections(world, fault.who):
        lost = client.break_connection()
        client.delay(fault.seconds)
        world.tell(fault.who, "loses", lost, "messages")


async def _fail_session(world: Victims, process: Process, fault: Fault) -> None:
    """Nothing comes for a while, then the channels are given up."""
    channels = world.generators[fault.who].channels
    for client in channels:
        client.down.delay(fault.seconds)
    await asyncio.sleep(fault.seconds)
    for client in channels:
        await client.close()


async def _deliver_twice(world: Victims, process: Process, fault: Fault) -> None:
    world.generators[fault.who].outbox.twice_until_s = world.loop.time() + fault.seconds


async def _delay(world: Victims, process: Process, fault: Fault) -> None:
    for client in _connections(world, fault.who):
        client.delay(fault.seconds)


async def _refuse(world: Victims, process: Process, fault: Fault) -> None:
    world.disk.refuses_until = world.loop.time() + fault.seconds


async def _set_clock(world: Victims, process: Process, fault: Fault) -> None:
    world.disk.wall_clock_offset_s += fault.seconds * 10_000 - 50_000


def _connections(world: Victims, who: str) -> list[SimulatedClient]:
    name = "trainer-0" if who == TRAINER else who
    return [server.connections[name] for server in world.servers.values() if name in server.connections]


WAYS: Mapping[str, Callable[[Victims, Process, Fault], Awaitable[None]]] = {
    "kill": _kill,
    "kill at a file operation": _kill,
    "power cut": _kill,
    "power cut at a file operation": _kill,
    "kill everything": _kill_everything,
    "is taken for dead": _take_for_dead,
    "told to stop": _tell_to_stop,
    "told to leave": _tell_to_leave,
    "stands still": _stand_still,
    "connection breaks": _break_connections,
    "session fails": _fail_session,
    "delivers twice": _deliver_twice,
    "messages are late": _delay,
    "disk refuses": _refuse,
    "wall clock is set": _set_clock,
}
