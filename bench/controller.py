"""CPU time that a whole controller spends on a rollout, from its sockets to the trainer's and to disk.

    python -m bench.controller [--tokens 64,4096] [--generators 4] [--seconds 20] [--place /dev/shm]
    python -m bench.controller --tokens 64 --generators 4,512

This process is the controller of roles/controller/, with its channels (TCP, CURVE), journal, segments, recorder and
TensorBoard; a second one plays trainer and generators, whose rollouts are made already: each of these has its own
connections, and a step takes at least sixteen rollouts from each.  What is counted is this process's CPU time between
two steps, over the rollouts trained between them, by thread: "loop" is the main thread, "zmq" ZeroMQ's, "helpers" all
others (journal, segments, samples, metrics).  CPU time holds on a busy machine, too.  Beside it stands what the same
bytes cost through bare sockets, into a plain file and segments, without any work on them (bench/controller_floor.py).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.controller_floor import Shape, floor_us
from bench.figures import tell
from bench.journal import records
from launch.demo.task import make_tokenizer, write_dataset
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.prefixes import id_checksum
from rlhpc.config.file import config_hash, write_resolved
from rlhpc.config.rules import Config
from rlhpc.protocol.contracts import ClientChannel
from rlhpc.protocol.messages import (
    BATCHES,
    CONTROL,
    LEASES,
    CanaryTaken,
    Delivery,
    FormGroup,
    GroupOpened,
    Heartbeat,
    PublishReport,
    PublishWeights,
    ReceiveWeights,
    StepReport,
    StopRole,
    TakeCanary,
    TrainBatch,
    TrainerReady,
    WeightsLive,
)
from rlhpc.protocol.types import Lease, TensorSpec, WeightManifest
from rlhpc.roles.controller.controller import assemble
from rlhpc.roles.lifecycle import RoleContext, StopRequest, beat, hello
from rlhpc.transport.open import connect, open_server
from rlhpc.transport.security import mint_run_keys

LIMITS_US = {64: 60.0, 4096: 250.0}
GROUP_SIZE, PROMPT_TOKENS = 8, 64
CAPACITY = 1024  # rollouts that a generator says it could take at once
WARM_STEPS = 3
MANIFEST = WeightManifest(0, 0, (TensorSpec("w", "float32", (1,)),), (1,))
LONG_S = 60.0


def groups_per_step(num_generators: int) -> int:
    """As many as keep a generator busy for a while."""
    return max(32, 2 * num_generators)


def settings(directory: Path, num_tokens: int, num_generators: int) -> Config:
    make_tokenizer().save_pretrained(directory / "model")
    (directory / "model" / "config.json").write_text(
        '{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 99}'
    )
    write_dataset(directory / "train.jsonl", 512, seed=0)
    return Config.model_validate(
        {
            "run": {"name": "bench", "num_steps": 1_000_000, "directory": directory / "run"},
            "model": {"path": directory / "model"},
            "data": {"path": directory / "train.jsonl", "task": "integer_arithmetic"},
            "generation": {
                "engine": "scripted",
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_completion_tokens": num_tokens,
            },
            "admission": {
                "groups_per_step": groups_per_step(num_generators),
                "group_size": GROUP_SIZE,
                "max_staleness": 2,
                "step_parts": 1,  # the trainer that is played here knows whole batches
            },
            "trainer": {"backend": "reference", "token_budget": max(1 << 15, num_tokens + PROMPT_TOKENS)},
            "checkpoint": {"every_steps": 1_000_000},
            "weights": {"canary_every": 0},
            "transport": {"kind": "tcp", "dead_after_s": 60.0},
        }
    )


def context_of(role: str, replica: int, layout: RunLayout, config: Config) -> RoleContext:
    digest = config_hash(config)
    return RoleContext(role, replica, 1, 0, None, f"0.0.0-{role}{replica}", layout, config, digest)


# ---------------------------------------------------------------------------------------------------- the other process


class Generator:
    """Answers every lease at once with rollouts that are made already."""

    def __init__(self, context: RoleContext, scored: list[Any]) -> None:
        self._context, self._scored = context, scored
        self._number = self._oldest = 0
        self._version = -1

    async def run(self) -> None:
        context = self._context
        leases = await connect(LEASES, **context.caller, timeout_s=LONG_S)
        control = await connect(CONTROL, **context.caller, timeout_s=LONG_S)
        await control.send(hello(context, ("",)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beat(control, 1.0, lambda: Heartbeat("running", "", self._version, CAPACITY)))
            tasks.create_task(self._sample(leases))
            tasks.create_task(self._obey(control))

    async def _sample(self, leases: ClientChannel) -> None:
        while True:
            match await leases.receive():
                case Lease() as lease:
                    for index in lease.sample_indices:
                        self._number += 1
                        await leases.send(self._delivery(lease, index), LONG_S)
                case message if hasattr(message, "number"):
                    self._oldest = message.number

    def _delivery(self, lease: Lease, index: int) -> Delivery:
        scored = self._scored[self._number % len(self._scored)]
        rollout = replace(scored.rollout, group_id=lease.group_id, sample_index=index, prompt_id=lease.prompt.prompt_id)
        scored = replace(scored, rollout=rollout, reward=float(index % 2))
        return Delivery(
            self._number, self._oldest + 1, self._context.name, 0, id_checksum(lease.prompt.token_ids), scored
        )

    async def _obey(self, control: ClientChannel) -> None:
        while True:
            match await control.receive():
                case ReceiveWeights(manifest):
                    self._version = manifest.policy_version
                    await control.send(WeightsLive(manifest.epoch, manifest.policy_version, 0.0, 0.0))
                case TakeCanary(number, row):
                    await control.send(CanaryTaken(number, self._version, np.zeros(len(row), np.float32)))
                case StopRole():
                    raise SystemExit


async def train(context: RoleContext) -> None:
    batches = await connect(BATCHES, **context.caller, timeout_s=LONG_S)
    control = await connect(CONTROL, **context.caller, timeout_s=LONG_S)
    await control.send(hello(context))
    await batches.send(TrainerReady(0, MANIFEST, ""))
    version = 0
    beating = asyncio.create_task(beat(control, 1.0, lambda: Heartbeat("running", "", version)))
    while True:
        match await batches.receive():
            case TrainBatch(_, batch):
                version += 1
                await batches.send(
                    StepReport(batch.step, version, applied=True, metrics={"loss": 0.5, "grad_norm": 1.0})
                )
            case FormGroup(group):
                await batches.send(GroupOpened(replace(group, address="memory")))
            case PublishWeights(epoch, published, row):
                canary = None if row is None else np.zeros(len(row), np.float32)
                await batches.send(PublishReport(epoch, published, 0.001, "", canary))
            case StopRole():
                beating.cancel()
                return


def be_others(layout: RunLayout, config: Config, num_generators: int, num_tokens: int) -> None:
    scored = [record.scored for record in records(32, num_tokens)]

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train(context_of("trainer", 0, layout, config)))
            for replica in range(num_generators):
                generator = Generator(context_of("generator", replica, layout, config), scored)
                tasks.create_task(generator.run())

    asyncio.run(play())


# ------------------------------------------------------------------------------------------------------ the controller


def cpu_by_thread() -> dict[str, float]:
    """Seconds of this process's threads: loop, zmq, helpers."""
    found = {"loop": 0.0, "zmq": 0.0, "helpers": 0.0}
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        kind = "loop" if int(task.name) == os.getpid() else "zmq" if name.startswith(("ZMQ", "zmq")) else "helpers"
        found[kind] += nanoseconds / 1e9
        del rest
    return found


async def measure(layout: RunLayout, config: Config, seconds: float) -> tuple[Mapping[str, float], int, float]:
    """Return CPU seconds by thread, rollouts, seconds."""
    context, stop = context_of("controller", 0, layout, config), StopRequest()
    channels = [open_server(spec, **context.listener) for spec in (CONTROL, LEASES, BATCHES)]
    controller = assemble(context, *channels)
    running = asyncio.create_task(controller.run(stop))
    loop = controller.loop

    async def done(step: int) -> None:
        deadline = Deadline(LONG_S)
        while loop.step < step and not running.done() and not deadline.is_over:  # noqa: ASYNC110  looked at
            await asyncio.sleep(0.005)
        if loop.step < step:
            raise SystemExit(f"no step {step}: {running.exception() if running.done() else 'time is over'}")

    try:
        await done(WARM_STEPS)
        step, before, began = loop.step, cpu_by_thread(), time.monotonic()
        await asyncio.sleep(seconds)
        await done(loop.step + 1)
        after, num_rollouts = cpu_by_thread(), (loop.step - step) * GROUP_SIZE * config.admission.groups_per_step
        took_s = time.monotonic() - began
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await controller.close()
        for channel in channels:
            await channel.close()
    return {name: after[name] - before[name] for name in after}, num_rollouts, took_s


def once(num_tokens: int, num_generators: int, options: argparse.Namespace) -> float:
    """Print and return microseconds of CPU a rollout."""
    with tempfile.TemporaryDirectory(dir=options.place) as name:
        directory = Path(name)
        config, layout = settings(directory, num_tokens, num_generators), RunLayout(directory / "run")
        for path in (layout.root, layout.rollouts, layout.checkpoints):
            path.mkdir()
        write_resolved(config, layout, "")
        generators = [f"generator-{replica}" for replica in range(num_generators)]
        mint_run_keys(layout.secrets, ["controller-0", "trainer-0", *generators])
        arguments = (layout, config, num_generators, num_tokens)
        others = multiprocessing.get_context("spawn").Process(target=be_others, args=arguments)
        others.start()
        try:
            cpu_s, num_rollouts, took_s = asyncio.run(measure(layout, config, options.seconds))
        finally:
            others.kill()
            others.join()
    each = {thread: seconds / num_rollouts * 1e6 for thread, seconds in cpu_s.items()}
    total, limit = sum(each.values()), LIMITS_US.get(num_tokens)
    verdict = "" if limit is None else f"; limit {limit:g}, ratio {total / limit:.2f}"
    verdict += "  MISSED" if limit is not None and total > limit else ""
    print(
        f"{num_tokens:6} tokens, {num_generators:3} generators: {_in_parts(each)}{verdict}; "
        f"{num_rollouts / took_s:,.0f} rollouts/s"
    )
    return total


def least(num_tokens: int, num_generators: int, options: argparse.Namespace) -> float:
    """Print and return microseconds of CPU a rollout of the same bytes without a controller."""
    shape = Shape(num_tokens, GROUP_SIZE, num_generators, groups_per_step(num_generators))
    each = floor_us(shape, options.seconds / 4, options.place, cpu_by_thread)
    print(f"{num_tokens:6} tokens, bare sockets, file and segments: {_in_parts(each)}")
    return sum(each.values())


def _in_parts(each: Mapping[str, float]) -> str:
    parts = ", ".join(f"{thread} {us:.0f}" for thread, us in each.items())
    return f"{sum(each.values()):6.0f} µs of CPU a rollout ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="64,4096", help="of a completion, one measurement for each")
    parser.add_argument("--generators", default="4", help="one measurement for each")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--place", default="/dev/shm", help="a directory; its file system holds the run directory")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; Python "
        f"{platform.python_version()}, numpy {np.__version__}"
    )
    for num_tokens in map(int, options.tokens.split(",")):
        found = [
            once(num_tokens, num_generators, options) for num_generators in map(int, options.generators.split(","))
        ]
        tell(f"controller us, {num_tokens} tokens", found[0])
        bare = least(num_tokens, int(options.generators.split(",")[0]), options)
        tell(f"controller floor us, {num_tokens} tokens", bare)
        if len(found) > 1:
            print(f"{num_tokens:6} tokens: last over first {found[-1] / found[0]:.2f}")
            tell(f"controller growth, {num_tokens} tokens", found[-1] / found[0])


if __name__ == "__main__":
    main()
