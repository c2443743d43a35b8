"""A generator goes on sampling while no controller is there; the next one gets what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from rlhpc.buffer.prefixes import decode_partials
from rlhpc.protocol.messages import LEASES, REWARDS, Delivery, RewardReply, RewardRequest
from rlhpc.protocol.types import Lease, Prompt, SamplingParams
from rlhpc.roles.generator.sampling import Link, Sampling
from rlhpc.transport.rpc import RpcClient
from rlhpc.weights.buckets import make_manifest
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import SPECIAL_TOKENS, make_tokenizer_files
from tests.unit.roles.small_ring import small_config

VOCABULARY = len(SPECIAL_TOKENS) + 96  # of make_tokenizer_files


def lease_of(*indices: int, prompt_id: int = 0, max_tokens: int = 5) -> Lease:
    prompt = Prompt(prompt_id, "any", np.array([9, 9], np.int32), "42")
    return Lease(0, 0, prompt, 2, indices, SamplingParams(max_tokens=max_tokens), 0)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - each turn draws a token
            await asyncio.sleep(0)


class Session:
    """A controller and a reward service, as long as they live."""

    def __init__(self, *, judges: bool = True) -> None:
        self.leases, self.rewards = MemoryServer(LEASES), MemoryServer(REWARDS)
        self.rpc = RpcClient([self.rewards.connect("generator-0")])
        self.client = self.leases.connect("generator-0")
        self.failures: list[BaseException] = []
        self.num_asked = 0
        self._judging = asyncio.create_task(self._judge(answers=judges))

    async def _judge(self, *, answers: bool) -> None:
        while True:
            peer, request = await self.rewards.receive()
            assert isinstance(request, RewardRequest)
            self.num_asked += 1
            if answers:
                await self.rewards.send(peer, RewardReply(request.request_id, 1.0, "correct", {}, ""))

    async def begin(self, sampling: Sampling) -> None:
        await self.rpc.__aenter__()
        await sampling.attach(Link(self.client, self.rpc, self.failures.append))

    async def end(self, sampling: Sampling) -> None:
        sampling.detach()
        self._judging.cancel()
        await self.rpc.close()
        await self.client.close()

    async def delivered(self) -> Delivery:
        _, message = await self.leases.receive(PATIENCE_S)
        assert isinstance(message, Delivery)
        return message


class Generator:
    def __init__(self, model: Path, tasks: asyncio.TaskGroup) -> None:
        config = small_config()
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
        script = Script(vocab_size=VOCABULARY, stop_token_id=SPECIAL_TOKENS.index("<eos>"), stop_probability=0.0)
        self.engine = ScriptedEngine(script)
        self.sampling = Sampling(config, self.engine, tasks)

    async def until(self, num_tokens: int) -> None:
        await until(lambda: self.engine.num_sampled("0:0") >= num_tokens)


@pytest.fixture
async def generator(tmp_path: Path) -> AsyncIterator[Generator]:
    async with asyncio.TaskGroup() as tasks:
        made = Generator(make_tokenizer_files(tmp_path / "model"), tasks)
        await made.engine.receive_weights(make_manifest(0, 1, (), 1))
        await made.sampling.enter(0)
        yield made
        await made.sampling.give_up()


async def test_what_is_finished_while_nobody_is_there_goes_to_the_next_controller(generator: Generator) -> None:
    first = Session()
    await first.begin(generator.sampling)
    await generator.engine.pause()
    generator.sampling.start(lease_of(0, 1))
    await asyncio.sleep(0)
    await first.end(generator.sampling)
    await generator.engine.resume()
    await until(lambda: not generator.engine.statistics().num_running)
    second = Session()
    await second.begin(generator.sampling)
    found = [await second.delivered() for _ in range(2)]
    assert sorted(each.scored.rollout.sample_index for each in found) == [0, 1]
    assert {(each.scored.reward, each.timeline) for each in found} == {(1.0, 0)}
    assert (first.num_asked, second.num_asked) == (0, 2)
    assert not first.failures
    await second.end(generator.sampling)


async def test_a_verdict_that_died_with_its_session_is_asked_for_again(generator: Generator) -> None:
    first = Session(judges=False)
    await first.begin(generator.sampling)
    generator.sampling.start(lease_of(0))
    await until(lambda: first.num_asked)
    await first.end(generator.sampling)
    second = Session()
    await second.begin(generator.sampling)
    assert (await second.delivered()).scored.reward == 1.0
    assert not first.failures
    await second.end(generator.sampling)


async def test_a_reward_service_that_cannot_be_asked_ends_the_session_and_not_the_rollout(generator: Generator) -> None:
    first = Session()
    await first.begin(generator.sampling)
    await first.rpc.close()
    generator.sampling.start(lease_of(0))
    await until(lambda: first.failures)
    await first.end(generator.sampling)
    second = Session()
    await second.begin(generator.sampling)
    assert (await second.delivered()).scored.reward == 1.0
    await second.end(generator.sampling)


async def test_the_next_controller_hears_of_all_that_runs_though_nothing_was_drawn_since(generator: Generator) -> None:
    first, second = Session(), Session()
    await first.begin(generator.sampling)
    generator.sampling.start(lease_of(0, 1, max_tokens=10_000))
    await generator.until(50)
    await generator.engine.pause()
    while generator.sampling.report() is not None:
        pass
    await first.end(generator.sampling)
    await second.begin(generator.sampling)
    report = generator.sampling.report()
    assert report is not None
    assert report.timeline == 0
    members = [(piece.group_id, piece.sample_index) for piece in decode_partials(report.pieces.data, report.num_bytes)]
    assert sorted(members) == [(0, 0), (0, 1)]
    assert generator.sampling.report() is None
    await second.end(generator.sampling)


async def test_a_lease_that_its_predecessor_was_granted_is_not_sampled_without_weights(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        restarted = Generator(make_tokenizer_files(tmp_path / "model"), tasks)
        restarted.sampling.start(lease_of(0, 1))
        assert len(restarted.sampling) == 0
        await restarted.sampling.enter(0)
        restarted.sampling.start(lease_of(0, 1))
        assert len(restarted.sampling) == 2
        await restarted.sampling.give_up()


async def test_weights_of_another_timeline_end_what_those_before_have_begun(generator: Generator) -> None:
    first = Session(judges=False)
    await first.begin(generator.sampling)
    generator.sampling.start(lease_of(0))  # waits for its verdict
    await until(lambda: first.num_asked)
    generator.sampling.start(lease_of(1, max_tokens=10_000))
    await first.end(generator.sampling)
    second = Session()
    await second.begin(generator.sampling)
    await generator.sampling.enter(3)
    assert len(generator.sampling) == 0
    assert generator.engine.statistics().num_running == 0
    generator.sampling.start(lease_of(0))
    delivery = await second.delivered()
    assert (delivery.timeline, delivery.scored.rollout.sample_index) == (3, 0)
    await second.end(generator.sampling)


async def test_a_lease_of_what_is_being_sampled_begins_nothing_unless_it_is_of_another_prompt(
    generator: Generator,
) -> None:
    session = Session()
    await session.begin(generator.sampling)
    generator.sampling.start(lease_of(0, max_tokens=10_000))
    await generator.until(20)
    generator.sampling.start(lease_of(0, max_tokens=10_000))
    await generator.until(30)
    assert generator.engine.statistics().num_running == 1
    generator.sampling.start(lease_of(0, prompt_id=7))
    assert (await session.delivered()).scored.rollout.prompt.prompt_id == 7
    assert generator.engine.statistics().num_running == 0
    await session.end(generator.sampling)
