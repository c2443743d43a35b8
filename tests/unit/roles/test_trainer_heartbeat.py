"""The trainer's second voice: heartbeats, and what other threads have to say, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.messages import CONTROL, Heartbeat, Hello, SaveReport, StopRole
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer.commands import TrainerHeartbeat
from rlhpc.transport.open import open_server
from rlhpc.transport.security import mint_run_keys
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import small_config


@asynccontextmanager
async def heartbeat_and_controller(
    root: Path, heartbeat_s: float, meet_timeout_s: float = PATIENCE_S, **options: Any
) -> AsyncIterator[tuple[TrainerHeartbeat, Any]]:
    config = small_config()
    layout = RunLayout(root / "run")
    mint_run_keys(layout.secrets, ["controller-0", "trainer-0"])
    context = RoleContext("trainer", 0, 1, 0, None, "first", layout, config, "hash", meet_timeout_s)
    server = open_server(
        CONTROL, layout=layout, config=config.transport, replica=0, incarnation="one", interface="127.0.0.1"
    )
    try:
        yield TrainerHeartbeat(context, heartbeat_s, **options), server
    finally:
        await server.close()


async def test_what_another_thread_tells_comes_at_once_and_not_with_the_next_heartbeat(tmp_path: Path) -> None:
    async with heartbeat_and_controller(tmp_path, heartbeat_s=3600.0) as (heartbeat, server):
        with heartbeat:
            assert isinstance((await server.receive(PATIENCE_S))[1], Hello)
            assert isinstance((await server.receive(PATIENCE_S))[1], Heartbeat)
            report = SaveReport(4, 0.5, "the disk is full")
            threading.Thread(target=heartbeat.tell, args=(report,)).start()
            assert await server.receive(PATIENCE_S) == ("trainer-0", report)


async def test_what_was_told_before_leaving_is_still_sent(tmp_path: Path) -> None:
    async with heartbeat_and_controller(tmp_path, heartbeat_s=3600.0) as (heartbeat, server):
        with heartbeat:
            for _ in range(2):
                await server.receive(PATIENCE_S)
            heartbeat.tell(SaveReport(4, 0.5))
            heartbeat.tell(SaveReport(6, 0.5))
        assert [(await server.receive(PATIENCE_S))[1].step for _ in range(2)] == [4, 6]


async def test_heartbeats_go_on_though_nothing_is_told(tmp_path: Path) -> None:
    async with heartbeat_and_controller(tmp_path, heartbeat_s=0.01) as (heartbeat, server):
        with heartbeat:
            heartbeat.now("training", "", 3)
            seen = [(await server.receive(PATIENCE_S))[1] for _ in range(5)]
            assert seen[-1] == Heartbeat("training", "", 3)


async def test_a_trainer_that_obeys_no_commands_yet_is_stopped_by_the_channel_of_its_heartbeats(tmp_path: Path) -> None:
    left: list[int] = []
    async with heartbeat_and_controller(tmp_path, heartbeat_s=3600.0, leave=left.append) as (heartbeat, server):
        with heartbeat:
            for _ in range(2):
                await server.receive(PATIENCE_S)
            await server.send("trainer-0", StopRole("the controller stops"))
            await asyncio.to_thread(Deadline(PATIENCE_S).wait_for, lambda: bool(left), 0.01)
    assert left == [0]


async def test_a_trainer_that_nobody_would_miss_does_not_train(tmp_path: Path) -> None:
    """Its connection for heartbeats met an error of the file server, and the one for batches did not."""
    async with heartbeat_and_controller(tmp_path, heartbeat_s=0.01, meet_timeout_s=1.0) as (heartbeat, _):
        (address,) = (tmp_path / "run" / "rendezvous").glob("control-0.json")
        content = address.read_bytes()
        address.unlink()
        address.mkdir()
        with heartbeat, pytest.raises(RoleFailed, match=r"heartbeats have ended: .*'control'"):
            await asyncio.wait_for(train(heartbeat), PATIENCE_S)
        address.rmdir()
        address.write_bytes(content)


async def train(heartbeat: TrainerHeartbeat) -> None:
    while True:
        heartbeat.now("training", "", 0)
        await asyncio.sleep(0.01)
