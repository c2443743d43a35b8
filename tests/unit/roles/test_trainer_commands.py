"""How ranks hear commands, what the trainer tells meanwhile, and which signals end it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import distributed

from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.messages import (
    BATCHES,
    CONTROL,
    BatchRows,
    Heartbeat,
    Hello,
    PublishWeights,
    SaveReport,
    ScoreBatch,
    StopRole,
    TrainBatch,
    TrainerReady,
)
from rlhpc.protocol.types import PackedBatch, PackedMicrobatch, PackedMinibatch
from rlhpc.roles.controller.batch_maker import TrainerLink
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer import trainer as command_stream
from rlhpc.roles.trainer.trainer import CommandStream, TrainerHeartbeat
from rlhpc.transport.channel import ZmqBlockingClient, ZmqServer
from rlhpc.transport.open import open_server
from rlhpc.transport.security import mint_run_keys
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.roles.small_ring import MANIFEST, small_config
from tests.unit.training.packed_rows import draw_samples, pack_row, tiny_config
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts

# ------------------------------------------------------------------------------------------------------------- commands
#
# Every rank hears every command, in one order, and is sent the rows of its own replica alone.


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


def serve(secrets: Path) -> ZmqServer:
    return ZmqServer(
        BATCHES, name="controller-0", config=CONFIG, secrets=secrets, clock=time.monotonic, interface="127.0.0.1"
    )


async def test_ranks_get_all_commands_and_the_rows_of_their_replica_alone(tmp_path: Path) -> None:
    server = serve(tmp_path)
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
    await link.send_rows(4, first.minibatches)
    await link.tell(ScoreBatch(4))
    await link.tell(StopRole("done"))
    heard = await ranks
    await server.close()
    for rank, (one, publish, other, scored) in enumerate(heard):
        assert np.array_equal(publish.canary, LONG_ROW)
        assert isinstance(scored, BatchRows)
        assert [len(rows) for rows in scored.minibatches[0].ranks] == [REPLICAS[rank] == k for k in (0, 1)]
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
    with pytest.raises(RoleFailed, match="rank 0 has rows 2, and is told of rows 1"):
        stream.next(lambda: False)


async def test_rows_that_were_lost_end_the_rank_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_stream, "ROWS_S", 0.01)
    server = serve(tmp_path)

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
    server = serve(tmp_path)
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


# ---------------------------------------------------------------------------------------------------- trainer heartbeat
#
# The trainer's second voice: heartbeats, and what other threads have to say, over real sockets.


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


async def heard(server: Any, count: int) -> list[Any]:
    return [(await server.receive(PATIENCE_S))[1] for _ in range(count)]


async def test_what_another_thread_tells_comes_at_once_and_not_with_the_next_heartbeat(tmp_path: Path) -> None:
    async with heartbeat_and_controller(tmp_path, heartbeat_s=3600.0) as (heartbeat, server):
        with heartbeat:
            assert [type(message) for message in await heard(server, 2)] == [Hello, Heartbeat]
            report = SaveReport(4, 0.5, "the disk is full")
            threading.Thread(target=heartbeat.tell, args=(report,)).start()
            assert await server.receive(PATIENCE_S) == ("trainer-0", report)


async def test_what_was_told_before_leaving_is_still_sent(tmp_path: Path) -> None:
    async with heartbeat_and_controller(tmp_path, heartbeat_s=3600.0) as (heartbeat, server):
        with heartbeat:
            await heard(server, 2)
            heartbeat.tell(SaveReport(4, 0.5))
            heartbeat.tell(SaveReport(6, 0.5))
        assert [report.step for report in await heard(server, 2)] == [4, 6]


async def test_heartbeats_go_on_though_nothing_is_told(tmp_path: Path) -> None:
    async with heartbeat_and_controller(tmp_path, heartbeat_s=0.01) as (heartbeat, server):
        with heartbeat:
            heartbeat.now("training", "", 3)
            seen = await heard(server, 5)
            assert seen[-1] == Heartbeat("training", "", 3)


async def test_a_trainer_that_obeys_no_commands_yet_is_stopped_by_the_channel_of_its_heartbeats(tmp_path: Path) -> None:
    left: list[int] = []
    async with heartbeat_and_controller(tmp_path, heartbeat_s=3600.0, leave=left.append) as (heartbeat, server):
        with heartbeat:
            await heard(server, 2)
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


# ------------------------------------------------------------------------------------------------------ trainer signals
#
# Which signals end a trainer: a real process, told what to do by a controller that is this test.


ROOT = Path(__file__).parents[3]
STARTED_S = 150.0  # a trainer is busy for five seconds with imports, on a quiet machine
FROM_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Starts a command and is killed before it.
PARENT = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"


class Trainer:
    """The process, and the controller's ends of its channels."""

    def __init__(self, process: subprocess.Popen[bytes], control: Any, batches: Any, log: Path) -> None:
        self.process, self.control, self.batches, self.log = process, control, batches, log

    async def until_ready(self) -> None:
        assert isinstance((await self.batches.receive(STARTED_S))[1], TrainerReady)

    async def until_next_heartbeat(self) -> Heartbeat:
        while not isinstance(message := (await self.control.receive(PATIENCE_S))[1], Heartbeat):
            pass
        return message

    async def ended(self, timeout_s: float) -> int:
        return await asyncio.to_thread(self.process.wait, timeout_s)


def start(command: list[str], log: Path, *, has_stdout: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        stdout = subprocess.PIPE if has_stdout else file
        return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=file, env=environment)


@asynccontextmanager
async def trainer(root: Path, *options: str, before: Sequence[str] = ()) -> AsyncIterator[Trainer]:
    """before: words of a command that starts the trainer's."""
    config = tiny_config(make_tiny_checkpoint(root / "model", hidden=32, layers=1))
    config = config.model_copy(update={"transport": config.transport.model_copy(update={"dead_after_s": 1.5})})
    layout = RunLayout(root / "run")
    layout.root.mkdir()
    write_resolved(config, layout, "")
    mint_run_keys(layout.secrets, ["controller-0", "trainer-0"])
    control, batches = (
        open_server(spec, layout=layout, config=config.transport, replica=0, incarnation="0.0.0-c")
        for spec in (CONTROL, BATCHES)
    )
    log = root / "trainer.log"
    role = [sys.executable, "-m", "rlhpc.roles", "trainer", "--run-dir", str(layout.root), *options]
    process = start([*before, *role], log, has_stdout=bool(before))
    try:
        yield Trainer(process, control, batches, log)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for channel in (batches, control):
            await channel.close()


async def test_a_trainer_stays_when_slurm_asks_it_to_end_and_leaves_when_the_controller_says_so(
    tmp_path: Path,
) -> None:
    async with trainer(tmp_path, "--incarnation", "7.0.0") as it:
        await it.until_ready()
        for number in FROM_SLURM * 2:
            it.process.send_signal(number)
            await it.until_next_heartbeat()
        assert it.process.poll() is None
        await it.batches.send("trainer-0", StopRole("the run has ended"))
        assert await it.ended(PATIENCE_S) == 0
    said = [line for line in it.log.read_text().splitlines() if "signal from Slurm" in line]
    assert len(said) == 1
    assert re.search(r"trainer SIG(TERM|USR1|USR2): signal from Slurm: the controller decides when to stop$", said[0])


async def test_a_trainer_does_not_outlive_what_started_it(tmp_path: Path) -> None:
    async with trainer(tmp_path, before=(sys.executable, "-c", PARENT)) as it:
        assert it.process.stdout is not None
        pid = int(it.process.stdout.readline())
        await it.until_ready()
        it.process.kill()  # the parent
        try:
            await asyncio.to_thread(until_ended, pid)
        finally:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)


def until_ended(pid: int) -> None:
    assert Deadline(PATIENCE_S).wait_for(lambda: has_ended(pid), 0.05), f"{pid} is still there"


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_trainer_that_waits_for_its_controllers_channel_leaves_when_that_one_stops(tmp_path: Path) -> None:
    """`rlhpc stop` while a run starts: the controller is gone, and nobody would ever open the channel of commands."""
    async with trainer(tmp_path, "--meet-timeout-s", "3600") as it:
        await it.batches.close()
        await it.until_next_heartbeat()
        await it.control.send("trainer-0", StopRole("the controller stops"))
        assert await it.ended(STARTED_S) == 0
    assert "asked to stop: the controller stops" in it.log.read_text()
