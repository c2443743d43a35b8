"""A reward service and its clients; and what an evaluation has judged."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.metrics.evaluations import EvaluatedSample, EvaluationSettings, SamplesFile, read_samples
from rlhpc.protocol.errors import ChannelTimeout, RoleFailed
from rlhpc.protocol.messages import CONTROL, REWARDS, Hello, Reregister, RewardRequest
from rlhpc.rewards.pool import RewardPool
from rlhpc.roles import reward_service
from rlhpc.roles.evaluator import Evaluator, draw_all
from rlhpc.roles.lifecycle import ControllerSession, RoleContext, heed_controller
from rlhpc.roles.reward_service import RewardService
from rlhpc.transport.rpc import RpcClient
from rlhpc.weights.buckets import make_manifest
from tests import build
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import make_tokenizer_files, sums, write_jsonl
from tests.unit.roles.lone_generator import STOP, VOCABULARY
from tests.unit.roles.small_ring import small_config

# ------------------------------------------------------------------------------------------------------- reward service
#
# A reward service and its clients: who waits behind the requests of others, and who waits for nothing any more.


VERDICT_S, NUM_AHEAD = 0.1, 60
TIMEOUT_S = NUM_AHEAD * VERDICT_S / 2  # that no verdict takes on a busy machine
MODULE = f"""
import time

def slow(completion, reference):
    time.sleep({VERDICT_S})
    return 1.0

def zero(completion, reference):
    return 0.0

def hang(completion, reference):
    time.sleep(3600)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rewards_that_wait.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "rewards_that_wait:"


@asynccontextmanager
async def serving(server: MemoryServer, timeout_s: float) -> AsyncIterator[None]:
    async with RewardPool(1, timeout_s) as pool:
        task = asyncio.create_task(RewardService(server, pool, news_s=0.1).serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def client_of(server: MemoryServer, *name_and_incarnation: str) -> RpcClient:
    return RpcClient([server.connect(*name_and_incarnation)], max_attempts=1)


async def until_waiting(server: MemoryServer, num_requests: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while server.statistics.messages_received < num_requests:  # noqa: ASYNC110 - by polling
            await asyncio.sleep(0.01)


@pytest.mark.starts
async def test_who_waits_behind_the_requests_of_others_is_not_given_up_while_these_go_on(task: str) -> None:
    """For twice as long as an attempt may take."""
    server = MemoryServer(REWARDS)
    first, second = client_of(server, "generator-0"), client_of(server, "generator-1")
    async with serving(server, PATIENCE_S), first, second:
        slow = RewardRequest(0, f"{task}slow", "x", "")
        ahead = [asyncio.create_task(first.call(slow, PATIENCE_S)) for _ in range(NUM_AHEAD)]
        await until_waiting(server, NUM_AHEAD)
        assert (await second.call(slow, TIMEOUT_S)).reward == 1.0
        assert all(reply.reward == 1.0 for reply in await asyncio.gather(*ahead))


@pytest.mark.starts
async def test_a_service_that_has_stopped_is_given_up_though_it_lives(task: str) -> None:
    server = MemoryServer(REWARDS)
    first, second = client_of(server, "generator-0"), client_of(server, "generator-1")
    async with serving(server, 100 * PATIENCE_S), first, second:
        ahead = asyncio.create_task(first.call(RewardRequest(0, f"{task}hang", "x", ""), 10 * PATIENCE_S))
        await until_waiting(server, 1)
        with pytest.raises(ChannelTimeout):
            await second.call(RewardRequest(0, f"{task}slow", "x", ""), 1.0)
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


async def test_a_service_says_hello_again_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    """The controller has taken it for dead, or has never heard its first one."""
    server, config = MemoryServer(CONTROL), small_config()
    context = RoleContext("reward", 0, 1, 0, None, "0.0.0-first", RunLayout(tmp_path), config, config_hash(config))
    control = server.connect("reward-0")
    hearing = asyncio.create_task(heed_controller(control, ControllerSession(context, asyncio.Event())))
    for _ in range(2):
        await server.send("reward-0", Reregister())
        name, message = await server.receive(PATIENCE_S)
        assert isinstance(message, Hello)
        assert (name, message.incarnation) == ("reward-0", "0.0.0-first")
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)


@pytest.mark.starts
async def test_a_verdict_on_what_a_dead_generator_asked_is_none_for_its_next_life(task: str) -> None:
    """Its first question is still being judged; a reply goes to whoever has the name now."""
    server = MemoryServer(REWARDS)
    dead = client_of(server, "generator-0", "0.0.0-a")
    async with serving(server, PATIENCE_S):
        async with dead:
            lost = asyncio.create_task(dead.call(RewardRequest(0, f"{task}slow", "x", ""), PATIENCE_S))
            await until_waiting(server, 1)
        await asyncio.gather(lost, return_exceptions=True)
        alive = client_of(server, "generator-0", "0.0.1-b")
        async with alive:
            assert (await alive.call(RewardRequest(0, f"{task}zero", "x", ""), PATIENCE_S)).reward == 0.0


@pytest.mark.starts
async def test_a_service_that_judges_nothing_while_requests_wait_fails_and_one_that_has_none_does_not(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is gone, and nobody has noticed: to its supervisor it is as if the process had died."""
    monkeypatch.setattr(reward_service, "LOOK_S", 0.25)
    server = MemoryServer(REWARDS)
    client = client_of(server, "generator-0")
    async with RewardPool(1, PATIENCE_S) as pool, client:
        service = asyncio.create_task(RewardService(server, pool, stuck_s=0.5).serve())
        zero = RewardRequest(0, f"{task}zero", "x", "")
        assert (await client.call(zero, PATIENCE_S)).reward == 0.0
        await pool._turns.take("somebody who never gives it back")
        await asyncio.sleep(1.0)
        assert not service.done()
        asked = asyncio.create_task(client.call(zero, 10 * PATIENCE_S))
        with pytest.raises(ExceptionGroup) as failed:
            async with asyncio.timeout(PATIENCE_S):
                await service
        assert failed.group_contains(RoleFailed, match="1 requests wait, and nothing was judged for 0.75 s")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------------ evaluator
#
# What an evaluation has judged, with a scripted engine and real reward workers.


async def evaluated(directory: Path, thinking_end: str, stop: tuple[str, ...] = ()) -> EvaluatedSample:
    """The only sample of a prompt, judged by how many words it has."""
    data = {
        "path": str(write_jsonl(directory / "held_out.jsonl", sums(1))),
        "task": "tests.unit.rewards.sample_rewards:rewards_of_words",
        "prompt_template": "{question}",
        "thinking_end": thinking_end,
    }
    config = build.config(
        model={"path": str(make_tokenizer_files(directory / "model"))},
        data=data,
        generation={"max_prompt_tokens": 9, "max_completion_tokens": 60, "stop": stop},
        trainer={"token_budget": 100},
    )
    settings = EvaluationSettings(config, "title", 1, 1, 1.0, {})
    script = Script(seed=4, vocab_size=VOCABULARY, stop_token_id=STOP, stop_probability=0.0)
    engine = ScriptedEngine(script, decode=PromptTokenizer(directory / "model").decode)
    await engine.receive_weights(make_manifest(0, 1, (), 1))
    place = directory / f"of{len(thinking_end)}{len(stop)}"
    place.mkdir()
    async with RewardPool(1, PATIENCE_S) as pool:
        with SamplesFile(place, 0) as file:
            free = asyncio.Queue[int]()
            free.put_nowait(1)
            await draw_all([Evaluator(settings, [(0, 0)], engine, pool, file, free)], 4, asyncio.Event())
    await engine.close()
    (sample,) = read_samples(place)
    return sample


@pytest.mark.starts
async def test_only_what_follows_the_end_of_thinking_is_judged_and_all_of_it_is_kept(tmp_path: Path) -> None:
    whole = await evaluated(tmp_path, "")
    words = re.findall(r"\w+", whole.completion)
    assert whole.reward == len(words) > 3
    end = words[1]
    judged = await evaluated(tmp_path, end)
    assert judged.completion == whole.completion
    assert judged.reward == len(re.findall(r"\w+", whole.completion.partition(end)[2])) < len(words)


@pytest.mark.starts
async def test_a_sample_ends_with_a_stop_string_and_is_judged_and_kept_without_it(tmp_path: Path) -> None:
    whole = (await evaluated(tmp_path, "")).completion
    stop = whole[20:23]
    judged = await evaluated(tmp_path, "", ("no such text", stop))
    assert judged.completion == whole.partition(stop)[0]
    assert judged.finish_reason == "stop"
    assert len(judged.completion) + len(stop) <= judged.num_tokens < 60
    assert judged.reward == len(re.findall(r"\w+", judged.completion))
