"""Throughput of generation with a teacher that answers at the speed of sampling / without a teacher, turn about.

    python -m bench.teachers [--rounds 5] [--rollouts 600] [--sequences 32] [--token-s 0.02] [--top-k 0] [--speed 1.0]

A generator with a scripted engine, whose tokens take as long as those of a real one, its heartbeats' credit and a
window of three times its sequences: what a controller with staleness bound 2 grants.  Verdicts come at once.  The
teacher is another process, an HTTP server that answers one row after the other, --speed completions in the time in
which the engine samples one.  Tokens a second are those of delivered rollouts, after the first tenth of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from bench.figures import tell
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.config.rules import Config
from rlhpc.protocol.messages import LEASES, REWARDS, Delivered, Delivery, RewardReply
from rlhpc.protocol.types import Lease, Prompt, SamplingParams
from rlhpc.roles.generator.generator import Generator
from rlhpc.roles.generator.sampling import Link, Sampling
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.transport.rpc import RpcClient
from rlhpc.transport.service_address import ServiceAddress, publish_address
from rlhpc.weights.buckets import make_manifest
from tests import build
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.unit.data.checkpoints import SPECIAL_TOKENS, make_tokenizer_files

NAME, KEY = "larger", "bench"
PROMPT_TOKENS, MOST_TOKENS, STOP_PROBABILITY = 32, 256, 0.01
VOCABULARY, STOP = len(SPECIAL_TOKENS) + 96, SPECIAL_TOKENS.index("<eos>")
WINDOW = 3  # times the engine's sequences
WARM_SHARE = 0.1  # of the rollouts, which are not counted


# -------------------------------------------------------------------------------------------------------------- teacher


async def serve(rendezvous: Path, tokens_per_s: float) -> None:
    """Answer one row after the other, at so many completion tokens a second, until ended."""
    free_at = 0.0

    async def complete(request: web.Request) -> web.Response:
        nonlocal free_at
        body = await request.json()
        row, num_top, now = body["prompt"], body["prompt_logprobs"], time.monotonic()
        free_at = max(now, free_at) + (len(row) - PROMPT_TOKENS) / tokens_per_s
        own = [{str(token): {"logprob": -1.5, "rank": num_top + 1, "decoded_token": None}} for token in row]
        likely = {str(1000 + r): {"logprob": -0.1 * r, "rank": r, "decoded_token": None} for r in range(1, num_top + 1)}
        entries = [None, *(each | likely for each in own[1:])]
        reply = web.json_response({"model": body["model"], "choices": [{"prompt_logprobs": entries}]})
        await asyncio.sleep(free_at - time.monotonic())
        return reply

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    publish_address(rendezvous, ServiceAddress(NAME, 0, url, KEY, NAME, "bench", os.getpid(), "here"))
    print("ready", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def teaching(rendezvous: Path, tokens_per_s: float) -> AsyncIterator[None]:
    """Run the teacher in a process of its own."""
    command = [sys.executable, "-m", "bench.teachers", "--serve", str(rendezvous), str(tokens_per_s)]
    teacher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert teacher.stdout is not None
        await teacher.stdout.readline()
        yield
    finally:
        teacher.kill()
        await teacher.wait()


# ------------------------------------------------------------------------------------------------------------ generator


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of a measurement."""

    num_rollouts: int
    num_sequences: int
    token_s: float
    top_k: int


def config_of(model: Path, case: Case, *, has_teacher: bool) -> Config:
    """Settings of a run, with a teacher or without."""
    forward = {"forward_kl_coefficient": 0.1, "teacher_top_k": case.top_k} if case.top_k else {}
    taught: dict[str, Any] = {
        "service": [{"name": NAME, "kind": "teacher", "path": "/models/larger"}],
        "algorithm": {"advantage": "distillation"} | forward,
    }
    return build.config(
        model={"path": str(model)},
        admission={"active_sampling": False, "max_staleness": 2},
        generation={"max_prompt_tokens": PROMPT_TOKENS, "max_completion_tokens": MOST_TOKENS},
        trainer={"backend": "reference", "token_budget": 4096},
        **(taught if has_teacher else {}),
    )


async def judge(server: MemoryServer) -> None:
    """Call every completion correct, at once."""
    while True:
        peer, request = await server.receive()
        await server.send(peer, RewardReply(request.request_id, 1.0, "correct", {}, ""))


async def generate(root: Path, case: Case, *, has_teacher: bool) -> tuple[float, float]:
    """Tokens a second of delivered rollouts, and seconds of a request to the teacher."""
    config = config_of(root / "model", case, has_teacher=has_teacher)
    layout = RunLayout(root)
    script = Script(
        vocab_size=VOCABULARY, stop_token_id=STOP, stop_probability=STOP_PROBABILITY, token_s=case.token_s,
        max_num_seqs=case.num_sequences,
    )  # fmt: skip
    engine, leases, rewards = ScriptedEngine(script), MemoryServer(LEASES), MemoryServer(REWARDS)
    context = RoleContext("generator", 0, 1, 0, None, "bench", layout, config, config_hash(config))
    client, judging = leases.connect(context.name), asyncio.create_task(judge(rewards))
    async with RpcClient([rewards.connect(context.name)]) as judges, asyncio.TaskGroup() as tasks:
        sampling = Sampling(config, engine, tasks, layout.rendezvous)
        await engine.receive_weights(make_manifest(0, 1, (), 1))
        await sampling.enter(0)
        await sampling.attach(Link(client, judges, _raise))
        generator = Generator(context, engine, sampling, client, judges)
        tokens_per_s = await _grant(case, config, generator, sampling, leases)
        figures = sampling.teachers.as_metrics()
        await sampling.give_up()
        await sampling.teachers.close()
    judging.cancel()
    answered = figures.get(f"teacher:answered:{NAME}", 0.0)
    return tokens_per_s, figures.get(f"teacher:seconds:{NAME}", 0.0) / max(1.0, answered)


def _raise(error: BaseException) -> None:
    raise error


async def _grant(case: Case, config: Config, generator: Generator, sampling: Sampling, leases: MemoryServer) -> float:
    """Grant leases as a controller does, by the credit of heartbeats within its window; return tokens a second."""
    rng, num_granted, num_delivered, credit = np.random.default_rng(0), 0, 0, 0
    beat_at, counted, began = -1e9, 0, 0.0
    num_warm = int(WARM_SHARE * case.num_rollouts)
    while num_delivered < case.num_rollouts:
        if time.monotonic() - beat_at >= config.transport.heartbeat_s:
            beat_at, credit = time.monotonic(), generator.heartbeat().capacity_samples
        while num_granted - num_delivered < min(credit, WINDOW * case.num_sequences):
            ids = rng.integers(5, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
            prompt = Prompt(num_granted, "any", ids, "42")
            sampling.start(Lease(num_granted, 0, prompt, 1, (0,), SamplingParams(MOST_TOKENS), 0))
            num_granted += 1
        _, message = await leases.receive(600.0)
        if isinstance(message, Delivery):
            assert (message.scored.teacher is not None) == bool(config.service), message.scored.detail
            sampling.outbox.acknowledged(Delivered(message.number, message.outbox))
            num_delivered += 1
            counted += len(message.scored.rollout.token_ids) if num_delivered > num_warm else 0
            began = time.monotonic() if num_delivered == num_warm else began
    return counted / (time.monotonic() - began)


# --------------------------------------------------------------------------------------------------------------- rounds


async def measure(case: Case, rounds: int, speed: float) -> None:
    """Print both throughputs of every round, and the median of their ratios."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_tokenizer_files(root / "model")
        ratios = list[float]()
        print("round   without   with a teacher   ratio   s a request")
        for number in range(rounds):
            without, _ = await generate(root, case, has_teacher=False)
            async with teaching(root / "rendezvous", speed * without):
                taught, request_s = await generate(root, case, has_teacher=True)
            ratios.append(taught / without)
            print(f"{number:>5}   {without:>7.0f}   {taught:>14.0f}   {ratios[-1]:>5.3f}   {request_s:>11.2f}")
        print(f"median of the ratios: {statistics.median(ratios):.3f}")
        tell("generation with a teacher", statistics.median(ratios))


def main() -> None:
    """Measure, or be the teacher."""
    parser = argparse.ArgumentParser(prog="python -m bench.teachers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=600)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--token-s", type=float, default=0.02)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(Path(options.serve[0]), float(options.serve[1])))
    else:
        case = Case(options.rollouts, options.sequences, options.token_s, options.top_k)
        asyncio.run(measure(case, options.rounds, options.speed))


if __name__ == "__main__":
    main()
