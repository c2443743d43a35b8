"""A process with the servers of all channels, which tells what came through and what it cost.

    python -m bench.hostile.victim SECRETS        started by victim_link.py

Lines on its standard input: "report", answered by one line of JSON, and "end".  Heartbeats of FRIEND are answered.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from bench.hostile.conformity import conforms
from bench.hostile.specimens import server_codec
from rlhpc.base.native import crc32
from rlhpc.base.processes import allow_many_connections
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ProtocolError
from rlhpc.protocol.messages import CONTROL, TOPOLOGY, ChannelSpec
from rlhpc.transport.channel import ZmqServer

FRIEND = "generator-0"


class ReasonCountingServer(ZmqServer):
    """Counts rejected messages by sender and by what was at fault."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.reasons: Counter[str] = Counter()

    def _reject(self, error: ProtocolError) -> None:
        self.reasons[f"{error.peer}: {error.field.partition('.')[0]}"] += 1
        super()._reject(error)


class Victim:
    """Servers as roles open them, and a tally of all that they deliver."""

    def __init__(self, secrets: Path) -> None:
        self.escaped: list[str] = []
        self.tallies: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # channel/peer → messages, checksum of all
        self.servers = {name: self._open(spec, secrets) for name, spec in TOPOLOGY.items()}

    def _open(self, spec: ChannelSpec, secrets: Path) -> ReasonCountingServer:
        return ReasonCountingServer(
            spec,
            name=f"{spec.server}-0",
            config=TransportConfig(kind="tcp"),
            secrets=secrets,
            clock=time.monotonic,
            interface="127.0.0.1",
        )

    async def listen(self, spec: ChannelSpec) -> None:
        """Receive endlessly, as roles do."""
        server, codec = self.servers[spec.name], server_codec(spec)
        while True:
            peer, message = await server.receive()
            tally = self.tallies[f"{spec.name}/{peer}"]
            tally[0] += 1
            if peer == FRIEND and spec is CONTROL:
                await server.send(peer, m.StopRole(str(message.policy_version)))
                continue
            if not conforms(message, type(message)):
                self.escaped.append(f"{spec.name}: not what its type says: {str(message)[:200]}")
            for frame in codec.encode(message, 0):
                tally[1] = crc32(frame, tally[1])

    def report(self) -> dict[str, Any]:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
        return {
            "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
            "peak_mb": int(status["VmHWM"].split()[0]) / 1024,
            "num_fds": len(list(Path("/proc/self/fd").iterdir())),
            "escaped": self.escaped,
            "tallies": self.tallies,
            "statistics": {
                name: {
                    "received": server.statistics.messages_received,
                    "rejected": server.statistics.messages_rejected,
                    "reasons": server.reasons,
                    "denied": server.statistics.connections_denied,
                    "peers": sorted(server.peers),
                }
                for name, server in self.servers.items()
            },
        }


async def serve(secrets: Path) -> None:
    victim = Victim(secrets)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: victim.escaped.append(f"loop: {context!r}"[:500]))
    threading.excepthook = lambda args: victim.escaped.append(f"thread: {args.exc_value!r}"[:500])
    print(json.dumps({name: server.address for name, server in victim.servers.items()}), flush=True)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    listening = [loop.create_task(victim.listen(spec)) for spec in TOPOLOGY.values()]
    while (await lines.readline()).strip() == b"report":
        for task in listening:
            if task.done():
                victim.escaped.append(f"receive: {task.exception()!r}"[:500])
        print(json.dumps(victim.report()), flush=True)
    for task in listening:
        task.cancel()
    for server in victim.servers.values():
        await server.close()


if __name__ == "__main__":
    allow_many_connections()
    asyncio.run(serve(Path(sys.argv[1])))
