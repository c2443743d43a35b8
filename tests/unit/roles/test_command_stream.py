"""Every rank hears every command, in one order, and is sent the rows of its own replica alone."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import distributed

from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.messages import BATCHES, BatchRows, PublishWeights, StopRole, TrainBatch, TrainerReady
from rlhpc.protocol.types import PackedBatch, PackedMicrobatch, PackedMinibatch
from rlhpc.roles.controller.batches import TrainerLink
from rlhpc.roles.trainer import commands as command_stream
from rlhpc.roles.trainer.commands import CommandStream
from rlhpc.transport.client import ZmqBlockingClient
from rlhpc.transport.server import ZmqServer
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import MANIFEST
from tests.unit.training.packed_rows import draw_samples, pack_row
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts

CONFIG = TransportConfig(kind="tcp", curve=False)
REPLICAS = (0, 1, 1)  # of three ranks
READY_S = 240.0  # three processes are busy for seconds with imports, on a quiet machine
LONG_ROW = np.arange(60_000, dtype=np.int32)  # with its command: more than the first broadcast holds, in two frames


def be_rank(rank: int, num_ranks: int, address: str, secrets: Path) -> list[Any]:
    identity = {"name": f"trainer-{rank}", "incarnation": "one", "server_name": "controller-0"}
    channel = ZmqBlockingClient(BATCHES, address, config=CONFIG, secrets=secrets, **identity)
    assert channel.admission(READY_S) == ""
    commands = CommandStream(channel, rank, num_ranks)
    replicas = commands.replicas(REPLICAS[rank])
    if rank == 0:
        channel.send(TrainerReady(0, MANIFEST, "", replicas))
    heard = []
    while not isinstance(command := commands.next(lambda: False), StopRole):
        heard.append(command)
    distributed.barrier()
    channel.close()
    return heard


def minibatch_of(seed: int) -> PackedMinibatch:
    rows = [pack_row(draw_samples((5, 9), seed=seed + replica)) for replica in (0, 1)]
    return PackedMinibatch(tuple((row,) for row in rows), 7, 4)


def same(one: PackedMicrobatch, other: PackedMicrobatch) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__slots__)


async def test_ranks_get_all_commands_and_the_rows_of_their_replica_alone(tmp_path: Path) -> None:
    server = ZmqServer(
        BATCHES, name="controller-0", config=CONFIG, secrets=tmp_path, clock=time.monotonic, interface="127.0.0.1"
    )
    arguments = (len(REPLICAS), be_rank, tmp_path / "ranks", server.address, tmp_path)
    ranks = asyncio.create_task(asyncio.to_thread(run_ranks, *arguments, timeout_s=READY_S))
    link = TrainerLink(server)
    assert (await link.ready(READY_S, list)).replicas == REPLICAS
    batches = [PackedBatch(step, step, (minibatch_of(10 * step),) * 2, (1, 0)) for step in (0, 1)]
    await link.send_rows(1, (minibatch_of(77),))  # made for nothing
    first, second = batches
    await link.send_rows(2, first.minibatches)
    await link.tell(TrainBatch(2, replace(first, minibatches=())))
    await link.send_rows(3, second.minibatches)  # while the first is trained
    await link.tell(PublishWeights(1, 1, LONG_ROW))
    await link.tell(TrainBatch(3, replace(second, minibatches=())))
    await link.tell(StopRole("done"))
    heard = await ranks
    await server.close()
    for rank, (one, publish, other) in enumerate(heard):
        assert np.array_equal(publish.canary, LONG_ROW)
        for batch, received in zip(batches, (one, other), strict=True):
            assert (received.step, received.order) == (batch.step, batch.order)
            for wanted, minibatch in zip(batch.minibatches, received.minibatches, strict=True):
                [own] = minibatch.ranks[REPLICAS[rank]]
                assert same(own, wanted.ranks[REPLICAS[rank]][0])
                assert minibatch.ranks[1 - REPLICAS[rank]] == ()
                assert minibatch.num_loss_tokens == wanted.num_loss_tokens


def ready_trainer(server: ZmqServer, secrets: Path) -> ZmqBlockingClient:
    channel = ZmqBlockingClient(
        BATCHES, server.address, name="trainer-0", incarnation="one", server_name="controller-0", config=CONFIG,
        secrets=secrets,
    )  # fmt: skip
    channel.send(TrainerReady(0, MANIFEST, ""))
    return channel


class Ear:
    """A channel on which a rank hears what a test says."""

    def __init__(self, *messages: object) -> None:
        self._messages = list(messages)

    def receive(self, timeout_s: float | None = None) -> object:
        return self._messages.pop(0)


def test_rows_that_are_not_those_of_the_command_are_never_trained() -> None:
    batch = PackedBatch(0, 0, ())
    stream = CommandStream(Ear(BatchRows(2, ()), TrainBatch(1, batch)), 0, 1)  # type: ignore[arg-type]
    with pytest.raises(RoleFailed, match="rank 0 has rows 2, and is to train rows 1"):
        stream.next(lambda: False)


async def test_rows_that_were_lost_end_the_rank_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_stream, "ROWS_S", 0.01)
    server = ZmqServer(
        BATCHES, name="controller-0", config=CONFIG, secrets=tmp_path, clock=time.monotonic, interface="127.0.0.1"
    )

    def be_alone() -> None:
        channel = ready_trainer(server, tmp_path)
        try:
            CommandStream(channel, 0, 1).next(lambda: False)
        finally:
            channel.close()

    rank, link = asyncio.create_task(asyncio.to_thread(be_alone)), TrainerLink(server)
    await link.ready(PATIENCE_S, list)
    await link.tell(TrainBatch(5, PackedBatch(3, 3, ())))
    with pytest.raises(RoleFailed, match=r"rank 0 has not received rows 5, of step 3, within 0\.01 s"):
        await rank
    await server.close()


async def test_a_rank_asked_to_leave_does_so_though_the_exception_of_the_handler_was_lost(
    tmp_path: Path,
) -> None:
    # As where the handler ran while Python freed an object: it raises, and the interpreter only prints that.
    server = ZmqServer(
        BATCHES, name="controller-0", config=CONFIG, secrets=tmp_path, clock=time.monotonic, interface="127.0.0.1"
    )
    is_asked, found = threading.Event(), list[str]()

    def wait_for_a_command() -> None:
        channel = ready_trainer(server, tmp_path)
        try:
            found.append(f"heard {CommandStream(channel, 0, 1).next(is_asked.is_set)}")
        except KeyboardInterrupt:
            found.append("left")
        finally:
            channel.close()

    rank, link = threading.Thread(target=wait_for_a_command, daemon=True), TrainerLink(server)
    rank.start()
    await link.ready(PATIENCE_S, list)
    is_asked.set()
    await asyncio.to_thread(rank.join, PATIENCE_S)
    assert found == ["left"]
    await server.close()
