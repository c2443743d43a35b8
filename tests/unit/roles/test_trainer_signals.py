"""Which signals end a trainer: a real process, told what to do by a controller that is this test."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.messages import BATCHES, CONTROL, Heartbeat, StopRole, TrainerReady
from rlhpc.transport.open import open_server
from rlhpc.transport.security import mint_run_keys
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import tiny_config

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[3]
READY_S = 150.0  # a trainer is busy for five seconds with imports, on a quiet machine
FROM_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Starts a command and is killed before it.
PARENT = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"


class Trainer:
    """The process, and the controller's ends of its channels."""

    def __init__(self, process: subprocess.Popen[bytes], control: Any, batches: Any, log: Path) -> None:
        self.process, self.control, self.batches, self.log = process, control, batches, log

    async def until_ready(self) -> None:
        assert isinstance((await self.batches.receive(READY_S))[1], TrainerReady)

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


async def test_a_trainer_whose_controller_does_not_turn_up_says_so_after_the_time_it_was_given(tmp_path: Path) -> None:
    async with trainer(tmp_path, "--meet-timeout-s", "0.5") as it:
        await it.batches.close()
        status = await it.ended(READY_S)
    assert status not in (0, 70)
    assert "ChannelTimeout: controller-0 has not opened channel 'batches'" in it.log.read_text()


async def test_a_trainer_that_waits_for_its_controllers_channel_leaves_when_that_one_stops(tmp_path: Path) -> None:
    """`rlhpc stop` while a run starts: the controller is gone, and nobody would ever open the channel of commands."""
    async with trainer(tmp_path, "--meet-timeout-s", "3600") as it:
        await it.batches.close()
        await it.until_next_heartbeat()
        await it.control.send("trainer-0", StopRole("the controller stops"))
        assert await it.ended(READY_S) == 0
    assert "asked to stop: the controller stops" in it.log.read_text()
