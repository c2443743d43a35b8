"""What a generator has judged of a completion, and what it does when the verifier fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.protocol.messages import LEASES, REWARDS, Delivery, RewardReply, RewardRequest
from rlhpc.protocol.types import FinishReason, Lease, Prompt, SamplingParams, ScoredRollout, Verdict
from rlhpc.roles.generator.sampling import Link, Sampling
from rlhpc.transport.rpc import RpcClient
from rlhpc.weights.buckets import make_manifest
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import SPECIAL_TOKENS, make_tokenizer_files
from tests.unit.roles.small_ring import small_config

EOS = SPECIAL_TOKENS.index("<eos>")
VOCABULARY = len(SPECIAL_TOKENS) + 96  # of make_tokenizer_files
MAX_ATTEMPTS = 3


class Verifier:
    """A reward service that fails so many times before it has a verdict."""

    def __init__(self, num_failures: int, rewards_at: dict[int, float] | None = None, replica: int = 0) -> None:
        self.server = MemoryServer(REWARDS, replica)
        self.asked: list[RewardRequest] = []
        self._num_failures, self._rewards_at = num_failures, rewards_at or {}

    async def run(self) -> None:
        while True:
            peer, request = await self.server.receive()
            self.asked.append(request)
            has_failed = len(self.asked) <= self._num_failures
            verdict, reward = ("verifier_error", 0.0) if has_failed else ("correct", 1.0)
            detail = f"{len(self.asked)}"
            await self.server.send(peer, RewardReply(request.request_id, reward, verdict, {}, detail, self._rewards_at))


@asynccontextmanager
async def generator(root: Path, verifiers: Sequence[Verifier], stop_probability: float) -> AsyncIterator[MemoryServer]:
    """What a generator samples of the leases that come over the channel that this yields."""
    leases = MemoryServer(LEASES)
    config = small_config()
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": make_tokenizer_files(root / "model")}),
            "rewards": config.rewards.model_copy(update={"max_attempts": MAX_ATTEMPTS}),
        }
    )
    engine = ScriptedEngine(Script(vocab_size=VOCABULARY, stop_token_id=EOS, stop_probability=stop_probability))
    await engine.receive_weights(make_manifest(0, 1, (), 1))
    client = leases.connect("generator-0")
    replicas = [verifier.server.connect("generator-0") for verifier in verifiers]
    judges = RpcClient(replicas, max_attempts=MAX_ATTEMPTS)
    async with judges, asyncio.TaskGroup() as tasks:
        sampling = Sampling(config, engine, tasks)

        async def start() -> None:
            while True:
                sampling.start(await client.receive())

        loops = [tasks.create_task(loop) for loop in (*(verifier.run() for verifier in verifiers), start())]
        await sampling.enter(0)
        await sampling.attach(Link(client, judges, lambda error: pytest.fail(str(error))))
        try:
            yield leases
        finally:
            for loop in loops:
                loop.cancel()


async def scored(root: Path, *verifiers: Verifier, max_tokens: int, stop_probability: float) -> ScoredRollout:
    """What the generator delivers of one sample."""
    prompt = Prompt(0, "any", np.array([9, 9], np.int32), "42")
    lease = Lease(0, 0, prompt, 2, (0,), SamplingParams(max_tokens=max_tokens), 0)
    async with generator(root, verifiers, stop_probability) as leases:
        await leases.send("generator-0", lease)
        _, delivered = await leases.receive(PATIENCE_S)
    assert isinstance(delivered, Delivery)
    return delivered.scored


@pytest.mark.parametrize("num_failures", [1, MAX_ATTEMPTS - 1])
async def test_a_failed_verifier_is_asked_again_and_its_verdict_then_counts(tmp_path: Path, num_failures: int) -> None:
    verifier = Verifier(num_failures)
    delivered = await scored(tmp_path, verifier, max_tokens=5, stop_probability=0.0)
    assert (delivered.verdict, delivered.reward) == (Verdict.CORRECT, 1.0)
    assert len(verifier.asked) == num_failures + 1


async def test_a_verifier_that_fails_on_one_node_is_asked_on_another_one(tmp_path: Path) -> None:
    broken, sound = Verifier(1000), Verifier(0, replica=1)
    delivered = await scored(tmp_path, broken, sound, max_tokens=5, stop_probability=0.0)
    assert (delivered.verdict, delivered.reward) == (Verdict.CORRECT, 1.0)
    assert (len(broken.asked), len(sound.asked)) == (1, 1)


async def test_a_verifier_that_fails_max_attempts_times_is_asked_no_more_and_its_failure_is_delivered(
    tmp_path: Path,
) -> None:
    verifier = Verifier(1000)
    delivered = await scored(tmp_path, verifier, max_tokens=5, stop_probability=0.0)
    assert delivered.verdict is Verdict.VERIFIER_ERROR
    assert len(verifier.asked) == MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("stop_probability", "reason", "num_judged"), [(1.0, FinishReason.STOP, 0), (0.0, FinishReason.LENGTH, 5)]
)
async def test_a_completion_is_judged_without_its_end_of_sequence_and_whole_if_it_was_truncated(
    tmp_path: Path, stop_probability: float, reason: FinishReason, num_judged: int
) -> None:
    verifier = Verifier(0)
    delivered: Any = await scored(tmp_path, verifier, max_tokens=5, stop_probability=stop_probability)
    assert delivered.rollout.finish_reason is reason
    assert len(delivered.rollout.token_ids) == num_judged + (reason is FinishReason.STOP)
    assert len(verifier.asked[0].completion) == num_judged  # one character a token


async def test_rewards_at_characters_are_delivered_at_the_tokens_that_complete_them(tmp_path: Path) -> None:
    verifier = Verifier(0, rewards_at={5: -1.0, 2: 0.25})
    delivered = await scored(tmp_path, verifier, max_tokens=5, stop_probability=0.0)
    assert list(delivered.token_rewards.items()) == [(1, 0.25), (4, -1.0)]  # one character a token
