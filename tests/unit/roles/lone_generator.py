"""A generator with a scripted engine and a real reward service; the test is its controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import PromptTokenizer, no_text
from rlhpc.protocol.messages import LEASES, REWARDS, Delivery
from rlhpc.protocol.types import Lease, Prefix, Prompt, SamplingParams, ScoredRollout
from rlhpc.rewards.pool import RewardPool
from rlhpc.roles.generator.sampling import Link, Sampling
from rlhpc.roles.reward_service import RewardService
from rlhpc.transport.rpc import RpcClient
from rlhpc.weights.buckets import make_manifest
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import SPECIAL_TOKENS

VOCABULARY = len(SPECIAL_TOKENS) + 96  # of make_tokenizer_files
STOP = SPECIAL_TOKENS.index("<eos>")


class LoneGenerator:
    """Serves version 0, for as long as the `running` context lasts."""

    def __init__(self, config: Config, tasks: asyncio.TaskGroup, pool: RewardPool | None) -> None:
        self.leases, self.rewards = MemoryServer(LEASES), MemoryServer(REWARDS)
        self.engine = ScriptedEngine(
            Script(seed=4, vocab_size=VOCABULARY, stop_token_id=STOP, stop_probability=0.1, token_s=0.0),
            decode=PromptTokenizer.of(config.model).decode if config.generation.stop else no_text,
        )
        self.stop_strings = config.generation.stop
        self.sampling = Sampling(config, self.engine, tasks)
        self.client = self.leases.connect("generator-0")
        self.rpc = RpcClient([self.rewards.connect("generator-0")])
        self.judging = None if pool is None else asyncio.create_task(RewardService(self.rewards, pool).serve())
        self.failures: list[BaseException] = []

    @classmethod
    @asynccontextmanager
    async def running(cls, config: Config, pool: RewardPool | None = None) -> AsyncIterator[Self]:
        """pool: of the reward service; None: there is none."""
        async with asyncio.TaskGroup() as tasks:
            generator = cls(config, tasks, pool)
            await generator.engine.receive_weights(make_manifest(0, 1, (), 1))
            await generator.sampling.enter(0)
            await generator.rpc.__aenter__()
            await generator.sampling.attach(Link(generator.client, generator.rpc, generator.failures.append))
            try:
                yield generator
            finally:
                await generator.sampling.give_up()
                await generator.sampling.agents.close()
                if generator.judging is not None:
                    generator.judging.cancel()
                await generator.rpc.close()

    def grant(
        self,
        group_id: int,
        prompt: Prompt,
        group_size: int,
        indices: tuple[int, ...],
        prefixes: tuple[Prefix | None, ...],
        max_tokens: int,
    ) -> None:
        """Give it a lease on members of a group."""
        sampling = SamplingParams(max_tokens, 1.0, (STOP,), self.stop_strings)
        self.sampling.start(Lease(group_id, 0, prompt, group_size, indices, sampling, 0, prefixes))

    async def next(self, kind: type) -> Any:
        """The next message of a kind that it sends; others are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                _, message = await self.leases.receive(PATIENCE_S)
                if isinstance(message, kind):
                    return message

    async def delivered(self) -> ScoredRollout:
        """The next rollout."""
        delivery: Delivery = await self.next(Delivery)
        return delivery.scored
