"""Test whether a role can reach the controller as in a run: address in a file, CURVE keys, ZeroMQ.

Runs on a node with the Python of a role:
    python -m launch.doctor.channel_probe DIRECTORY NAME
NAME is a component: "controller" serves until the others have connected, at most SERVE_S; the others connect.  Prints a
line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from pathlib import Path

from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.errors import RlhpcError
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.open import connect, open_server

ROLES = {"controller": "controller", "trainer": "trainer", "generation": "generator", "rewards": "reward"}
SERVE_S = 20.0
CONNECT_S = 15.0


def channel_layout(directory: Path) -> RunLayout:
    """Lay out keys and addresses of the probe as in a run directory, below the doctor's own."""
    return RunLayout(directory / "channel")


def main(arguments: list[str]) -> int:
    """Serve or connect; the printed line reports errors."""
    directory, name = Path(arguments[0]), arguments[1]
    began = time.monotonic()
    try:
        asyncio.run(_serve(directory) if name == "controller" else _connect(directory, name))
    except RlhpcError as error:
        print(json.dumps({"error": str(error)}))
        return 0
    print(json.dumps({"ms": 1000 * (time.monotonic() - began)}))
    return 0


async def _serve(directory: Path) -> None:
    """Serve until every client has connected, at most SERVE_S."""
    layout, config = channel_layout(directory), TransportConfig(kind="tcp")
    server = open_server(CONTROL, layout=layout, config=config, replica=0, incarnation=_incarnation())
    clients = json.loads((directory / "peers.json").read_text(encoding="utf-8"))["channel"]
    deadline = Deadline(SERVE_S)
    try:
        while not deadline.is_over and len(server.peers) < len(clients) - 1:  # noqa: ASYNC110 - peers have no event
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # the last one reads our answer
    finally:
        await server.close()


async def _connect(directory: Path, name: str) -> None:
    layout, config = channel_layout(directory), TransportConfig(kind="tcp")
    client = await connect(
        CONTROL,
        layout=layout,
        config=config,
        role=ROLES[name],
        replica=0,
        incarnation=_incarnation(),
        timeout_s=CONNECT_S,
    )
    await client.close()


def _incarnation() -> str:
    return f"0.0.{int(time.time())}-{uuid.uuid4().hex}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
