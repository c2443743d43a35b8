"""How long the trainer waits for its batch: from the end of a publication to the rows of the next step, on every rank.

    python -m bench.batch_path [--ranks 4] [--rollouts 560] [--tokens 4096] [--steps 8] [--step-s 2.0]

The controller's train loop, with buffer, ledger, samples, packing, recorder and the real channel (TCP, CURVE); ranks
are processes that receive commands and rows as a trainer's do.  They train nothing: a step is a sleep, a publication
too.  Generators are left out: groups are there as soon as they are admitted.  Tokens are counted at their arrival.  The
first two steps do not count: nothing could be made ahead of the first.

Printed: the wait a step, by the slowest rank; the CPU time on the way, of the controller's loop and of
the slowest rank's main thread, which holds on a busy machine, too; and the limit of both.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.figures import tell
from bench.journal import records
from launch.demo.task import make_tokenizer, write_dataset
from rlhpc.algorithms.packing import FlopCost, warm_up
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.prefixes import id_checksum
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.config.file import config_hash, write_resolved
from rlhpc.config.rules import Config
from rlhpc.config.tables import TransportConfig
from rlhpc.data.prompts import open_curriculum
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.messages import BATCHES, CONTROL, PublishReport, PublishWeights, StepReport, StopRole, TrainerReady
from rlhpc.protocol.types import PackedBatch, SamplingParams, TensorSpec, WeightManifest
from rlhpc.rewards.outcomes import ErrorGate
from rlhpc.roles.controller.batch_maker import TrainerLink
from rlhpc.roles.controller.leases import ProcessRegistry, RolloutSink
from rlhpc.roles.controller.persistence import DiskLane
from rlhpc.roles.controller.recorder import RunRecorder
from rlhpc.roles.controller.run_status import LiveFigures
from rlhpc.roles.controller.state import ControllerState, Totals
from rlhpc.roles.controller.train_loop import TrainLoop
from rlhpc.roles.controller.weight_sync import Canary, WeightSync, WeightSyncLimits
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer.trainer import CommandStream
from rlhpc.training.ranks import RankContext, open_process_group
from rlhpc.transport.channel import ZmqBlockingClient, ZmqServer
from rlhpc.transport.security import mint_run_keys
from rlhpc.weights.choice import Membership
from tests.engines.memory_channel import MemoryServer

LIMIT_S = 0.02
GROUP_SIZE, PROMPT_TOKENS = 8, 128
PUBLISH_S = 0.3
WARM = 2
MANIFEST = WeightManifest(0, 0, (TensorSpec("w", "float32", (1,)),), (1,))
TRANSPORT = TransportConfig(kind="tcp")


# -------------------------------------------------------------------------------------------------------------- ranks


class Wait(NamedTuple):
    seconds: float
    cpu_s: float  # of the main thread
    num_tokens: int  # that came


def now() -> tuple[float, float]:
    return time.monotonic(), time.thread_time()


def be_rank(rank: int, num_ranks: int, address: str, directory: Path, step_s: float, told: Connection) -> None:
    """Main of a rank: report (seconds waited, tokens received) of each step."""
    torch.set_num_threads(1)
    open_process_group(RankContext(rank, num_ranks, f"file://{directory}/meeting"), torch.device("cpu"))
    identity = {"name": f"trainer-{rank}", "incarnation": "bench", "server_name": "controller-0"}
    channel = ZmqBlockingClient(BATCHES, address, config=TRANSPORT, secrets=directory / "secrets", **identity)
    if why := channel.admission(60):
        raise SystemExit(why)
    commands, version, waits = CommandStream(channel, rank, num_ranks), 0, list[Wait]()
    replicas = commands.replicas(rank)
    if rank == 0:
        channel.send(TrainerReady(0, MANIFEST, "", replicas))
    since_s, since_cpu_s = now()
    while not isinstance(command := commands.next(lambda: False), StopRole):
        answer: object = None
        if isinstance(command, PackedBatch):
            mine = [row for minibatch in command.minibatches for row in minibatch.ranks[rank]]
            now_s, now_cpu_s = now()
            waits.append(Wait(now_s - since_s, now_cpu_s - since_cpu_s, sum(len(row.token_ids) for row in mine)))
            time.sleep(step_s)
            version += 1
            answer = StepReport(command.step, version, applied=True, metrics={"loss": 0.5, "wait_for_batch_s": 0.0})
        elif isinstance(command, PublishWeights):
            time.sleep(PUBLISH_S)
            answer = PublishReport(command.epoch, command.policy_version, PUBLISH_S)
        if rank == 0 and answer is not None:
            channel.send(answer)
        since_s, since_cpu_s = now()
    told.send(waits)
    channel.close()


# ---------------------------------------------------------------------------------------------------------- controller


class TimedLink(TrainerLink):
    """Notes the loop's CPU time between the end of a publication and the next command."""

    def __init__(self, batches: ZmqServer) -> None:
        super().__init__(batches)
        self.cpu_s: list[float] = []
        self._published_s = 0.0

    async def tell(self, command: object) -> None:
        await super().tell(command)
        if not isinstance(command, PublishWeights | StopRole):
            self.cpu_s.append(time.thread_time() - self._published_s)

    async def ask(self, command: object, kind: type[Any]) -> Any:
        answer = await super().ask(command, kind)
        self._published_s = time.thread_time()
        return answer


class Weights(WeightSync):
    """Of a run without generators: a version is live when it was published."""

    def __init__(self, trainer: TrainerLink) -> None:
        super().__init__(
            MemoryServer(CONTROL),
            trainer,
            Membership(),
            choose=lambda trainer, engines: "memory",
            limits=WeightSyncLimits(),
            canary=Canary(None, every=0, tolerance=1.0),
        )
        self._link = trainer

    @property
    def ready_members(self) -> frozenset[str]:
        return frozenset({"generator-0"})

    @property
    def is_deserted(self) -> bool:
        return False

    async def publish(self, version: int) -> bool:
        await self._link.ask(PublishWeights(1, version), PublishReport)
        return True

    async def wait_until_live(self, version: int) -> bool:
        self.live_version = version
        return True


class NoCheckpoints:
    write_s = longest_s = 0.0
    has_failed = is_overdue = False

    async def write(self, step: int, policy_version: int) -> None:
        pass

    def raise_failure(self) -> None:
        pass

    async def write_surely(self, step: int, policy_version: int) -> None:
        pass

    async def finish(self) -> None:
        pass


def settings(options: argparse.Namespace, directory: Path) -> Config:
    make_tokenizer().save_pretrained(directory / "model")
    write_dataset(directory / "train.jsonl", 64, seed=0)
    return Config.model_validate(
        {
            "run": {"name": "bench", "num_steps": options.steps, "directory": directory},
            "model": {"path": directory / "model"},
            "data": {"path": directory / "train.jsonl", "task": "integer_arithmetic"},
            "generation": {"max_prompt_tokens": PROMPT_TOKENS, "max_completion_tokens": options.tokens},
            "admission": {"groups_per_step": options.rollouts // GROUP_SIZE, "group_size": GROUP_SIZE, "step_parts": 1},
            "trainer": {
                "backend": "megatron",
                "num_ranks": options.ranks,
                "token_budget": max(1 << 15, options.tokens + PROMPT_TOKENS),
            },
            "checkpoint": {"every_steps": 1_000_000},
        }
    )


class Ring:
    """A controller's part of a step."""

    def __init__(self, options: argparse.Namespace, directory: Path, batches: ZmqServer) -> None:
        config, clock = settings(options, directory), time.monotonic
        self.config, layout = config, RunLayout(directory)
        layout.rollouts.mkdir()
        write_resolved(config, layout, "")
        admission = config.admission
        ledger = AdmissionLedger(
            num_slots=admission.num_slots, window_groups=admission.window, groups_per_step=admission.groups_per_step,
            group_size=GROUP_SIZE, sampling=lambda _: SamplingParams(max_tokens=options.tokens), lease_deadline_s=1e9,
            max_attempts=3, clock=clock,
        )  # fmt: skip
        segments = SegmentWriter(
            layout.rollouts, 0, run_name="bench", run_attempt=0, max_groups=admission.groups_per_step, max_s=1e9,
            clock=clock,
        )  # fmt: skip
        self.buffer, self.link = RolloutBuffer(ledger, segments), TimedLink(batches)
        self.weights = Weights(self.link)
        self.loop = TrainLoop(
            config, self.buffer, self.link, self.weights, FlopCost(1.0, 0.0), step=0, version=0, wake=self.generate
        )
        self.sink = RolloutSink(self.buffer, ErrorGate(1.0), admission)
        self.recorder = self._make_recorder(layout, segments)
        made = records(64, options.tokens)
        self._scored, self._prompt = itertools.cycle([each.scored for each in made]), made[0].prompt

    def generate(self) -> None:
        """Finish what may be admitted."""
        while self.buffer.ledger.has_slot:
            group_id = self.buffer.admit(self._prompt, self.weights.live_version)
            while self.buffer.ledger.grant("generator-0", GROUP_SIZE) is not None:
                pass
            for index in range(GROUP_SIZE):
                scored = next(self._scored)
                rollout = replace(scored.rollout, group_id=group_id, sample_index=index, prompt_id=0)
                scored = replace(scored, rollout=rollout, reward=float(index % 2))
                self.sink.receive("generator-0", scored, id_checksum(self._prompt.token_ids))
        self.loop.groups_changed()

    def _make_recorder(self, layout: RunLayout, segments: SegmentWriter) -> RunRecorder:
        digest = config_hash(self.config)
        context = RoleContext("controller", 0, 1, 0, None, "bench", layout, self.config, digest)
        state = ControllerState(
            open_curriculum(self.config), PromptTokenizer(self.config.model.path), segments, self.buffer.journal,  # type: ignore[arg-type]
            self.buffer, Membership(), Totals(), 0, 0,
        )  # fmt: skip
        registry = ProcessRegistry(digest, 15.0, time.monotonic)
        return RunRecorder(
            context,
            state,
            LiveFigures(),
            registry,
            self.weights,
            self.sink,
            DiskLane("metrics"),
            channels=(),
            clock=time.monotonic,
        )

    async def run(self) -> None:
        await self.link.ready(60.0, list)
        await self.loop.begin()
        self.generate()
        writing = asyncio.create_task(self.recorder.run())
        await self.loop.run(asyncio.Event(), self.recorder.record, NoCheckpoints())  # type: ignore[arg-type]
        writing.cancel()
        await self.link.tell(StopRole("done"))


async def control(options: argparse.Namespace, directory: Path, ranks: list[Any]) -> list[float]:
    """Return CPU seconds of the loop, step by step."""
    server = ZmqServer(
        BATCHES, name="controller-0", config=TRANSPORT, secrets=directory / "secrets", clock=time.monotonic,
        interface="127.0.0.1",
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    for rank in range(options.ranks):
        ours, theirs = context.Pipe()
        arguments = (rank, options.ranks, server.address, directory, options.step_s, theirs)
        process = context.Process(target=be_rank, args=arguments, daemon=True)  # it ends with us, whatever happens
        process.start()
        ranks.append((process, ours))
    ring = Ring(options, directory, server)
    await ring.run()
    await asyncio.to_thread(lambda: [process.join() for process, _ in ranks])
    await server.close()
    return ring.link.cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=560, help="a step, a multiple of 8")
    parser.add_argument("--tokens", type=int, default=4096, help="of a completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=2.0)
    options = parser.parse_args()
    warm_up()
    ranks: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        mint_run_keys(directory / "secrets", ["controller-0", *(f"trainer-{rank}" for rank in range(options.ranks))])
        loop_s = asyncio.run(control(options, directory, ranks))[WARM:]
        waits = [told.recv() for _, told in ranks]
    tokens = sum(of_rank[-1].num_tokens for of_rank in waits)
    counted = list(zip(*waits, strict=True))[WARM:]  # of each step, all ranks
    seconds = [max(wait.seconds for wait in step) for step in counted]
    cpu_s = [max(wait.cpu_s for wait in step) + of_loop for step, of_loop in zip(counted, loop_s, strict=True)]
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; numpy {np.__version__}; "
        f"{options.ranks} ranks, {tokens / 1e6:.2f} Mtok a step, steps of {options.step_s:g} s"
    )
    tell("batch wait s", statistics.median(seconds))
    for name, values in (("wait for the batch", seconds), ("CPU time on the way", cpu_s)):
        middle = statistics.median(values)
        verdict = f"ratio {middle / LIMIT_S:.2f}{'' if middle <= LIMIT_S else '  MISSED'}"
        print(f"{name:20} {middle:.4f} s a step, {min(values):.4f} to {max(values):.4f}; limit {LIMIT_S:g}, {verdict}")


if __name__ == "__main__":
    main()
