"""Register with the controller and send heartbeats.

One connection on the control channel: Hello first, then a Heartbeat every heartbeat_s.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from rlhpc.contracts import ClientChannel
from rlhpc.messages import Heartbeat, Hello
from rlhpc.roles.common.lifecycle import RoleContext


def hello(context: RoleContext, weight_devices: tuple[str, ...] = ()) -> Hello:
    """Return the first message of this process.  weight_devices: of the workers that receive weights, by rank."""
    return Hello(
        role=context.role,
        replica=context.replica,
        incarnation=context.incarnation,
        config_hash=context.config_hash,
        pid=os.getpid(),
        host=socket.gethostname(),
        num_weight_ranks=len(weight_devices),
        weight_devices=weight_devices,
        code=context.code,
    )


async def beat(control: ClientChannel, interval_s: float, current: Callable[[], Heartbeat]) -> None:
    """Send a heartbeat now and every `interval_s`, endlessly.  Raises ChannelClosed, ChannelFull."""
    while True:
        await control.send(current())
        await asyncio.sleep(interval_s)
