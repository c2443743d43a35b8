from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from rlhpc.config.rules import Config
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import (
    FinishReason,
    Prefix,
    Prompt,
    Rollout,
    RolloutRequest,
    SamplingParams,
    WeightGroup,
    WeightManifest,
)
from tests.engines.scripted_engine import Script, ScriptedEngine


def request(
    group_id: int = 0, sample_index: int = 0, max_tokens: int = 40, prefix: Prefix | None = None
) -> RolloutRequest:
    prompt = Prompt(group_id, "math", np.asarray([5, 6], np.int32), "11")
    return RolloutRequest(group_id, sample_index, prompt, SamplingParams(max_tokens), prefix)


async def test_the_same_member_gets_the_same_tokens_whatever_runs_beside_it() -> None:
    alone = await ScriptedEngine(Script(seed=1)).generate(request(3, 2))
    crowd = ScriptedEngine(Script(seed=1))
    among = (await asyncio.gather(*(crowd.generate(request(group_id, 2)) for group_id in range(6))))[3]
    assert alone.token_ids.tolist() == among.token_ids.tolist()


async def test_members_and_seeds_differ() -> None:
    engine, other = ScriptedEngine(Script(stop_probability=0)), ScriptedEngine(Script(seed=1, stop_probability=0))
    drawn = [
        await engine.generate(request(0, 0)),
        await engine.generate(request(0, 1)),
        await engine.generate(request(1, 0)),
        await other.generate(request(0, 0)),
    ]
    assert len({tuple(rollout.token_ids.tolist()) for rollout in drawn}) == 4


async def test_a_continued_prefix_ends_as_if_it_had_never_stopped() -> None:
    engine = ScriptedEngine(Script(stop_probability=0))
    whole = await engine.generate(request())
    prefix = Prefix(whole.token_ids[:17], whole.behaviour_logprobs[:17], whole.versions[:17])
    assert (await engine.generate(request(prefix=prefix))).token_ids.tolist() == whole.token_ids.tolist()


async def test_tokens_are_drawn_from_the_stated_distribution() -> None:
    engine = ScriptedEngine(Script(vocab_size=8, stop_probability=0))
    rollouts = [await engine.generate(request(group_id, max_tokens=100)) for group_id in range(40)]
    counts = np.bincount(np.concatenate([rollout.token_ids for rollout in rollouts]), minlength=8) / 4000
    np.testing.assert_allclose(counts, np.exp(engine.logprob_table(-1)), atol=0.03)
    assert np.exp(engine.logprob_table(5)).sum() == pytest.approx(1, abs=1e-5)


async def test_without_a_receiver_a_version_is_adopted_by_word() -> None:
    engine = ScriptedEngine(Script())
    await engine.join_weights(WeightGroup(1, "gloo", "", ("g",), (1,)), "g")
    await engine.receive_weights(WeightManifest(7, 1, (), ()))
    assert engine.policy_version == 7
    rollout = await engine.generate(request())
    assert set(rollout.versions.tolist()) == {7}
    np.testing.assert_array_equal(rollout.behaviour_logprobs, engine.logprob_table(7)[rollout.token_ids])


async def test_it_dies_when_it_is_scripted_to() -> None:
    engine = ScriptedEngine(Script(die_after_tokens=10, stop_probability=0))
    results = await asyncio.gather(*(engine.generate(request(index)) for index in range(3)), return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert engine.statistics().tokens_generated == 10
    with pytest.raises(EngineError, match="after 10 tokens"):
        await engine.generate(request())
    await engine.close()


async def test_no_more_than_max_num_seqs_are_drawn_at_once() -> None:
    engine = ScriptedEngine(Script(max_num_seqs=2, stop_probability=0))
    running = [asyncio.create_task(engine.generate(request(index))) for index in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    statistics = engine.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (2, 3)
    await asyncio.gather(*running)


async def test_a_static_batch_is_decoded_to_its_end_before_another_begins() -> None:
    engine = ScriptedEngine(Script(max_num_seqs=2, stop_probability=0, static_batches=True))
    short, long = request(0, max_tokens=2), request(1)
    first = [asyncio.create_task(engine.generate(each)) for each in (short, long)]
    await first[0]
    late = asyncio.create_task(engine.generate(request(2)))
    for _ in range(5):
        await asyncio.sleep(0)
        assert engine.statistics().num_running == 1
    await first[1]
    assert len((await late).token_ids)


async def test_an_engine_that_drains_lets_whoever_has_begun_end_with_the_weights_of_the_beginning() -> None:
    engine = ScriptedEngine(Script(stop_probability=0, drains=True))
    await engine.receive_weights(WeightManifest(1, 1, (), ()))
    begun = asyncio.create_task(engine.generate(request(0)))
    await asyncio.sleep(0)
    update = asyncio.create_task(engine.receive_weights(WeightManifest(2, 1, (), ())))
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(request(1)))
    await update
    assert set((await begun).versions.tolist()) == {1}
    assert set((await late).versions.tolist()) == {2}


@pytest.mark.parametrize("ending", ["abort", "cancel"])
async def test_who_leaves_a_batch_or_does_not_wait_for_it_keeps_nobody_from_the_next_one(ending: str) -> None:
    engine = ScriptedEngine(Script(max_num_seqs=2, stop_probability=0, static_batches=True))
    running = [asyncio.create_task(engine.generate(request(index))) for index in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.statistics().num_running == 2
    await engine.abort(request(2).request_id)  # it waits for the next batch
    for index in range(2):
        if ending == "abort":
            await engine.abort(request(index).request_id)
        else:
            running[index].cancel()
    *_, waited = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(waited, Rollout)
    assert len(waited.token_ids) == 0
    next_batch = await asyncio.gather(*(engine.generate(request(index)) for index in (3, 4)))
    assert all(len(rollout.token_ids) for rollout in next_batch)
    await engine.close()


async def test_an_engine_that_dies_while_it_drains_has_no_new_version() -> None:
    engine = ScriptedEngine(Script(stop_probability=0, drains=True, die_after_tokens=3))
    begun = asyncio.create_task(engine.generate(request(0)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="after 3 tokens"):
        await engine.receive_weights(WeightManifest(2, 1, (), ()))
    assert engine.policy_version == -1
    with pytest.raises(EngineError):
        await begun


async def test_a_drain_that_is_cancelled_lets_others_begin_again() -> None:
    engine = ScriptedEngine(Script(stop_probability=0, drains=True))
    begun = asyncio.create_task(engine.generate(request(0)))
    await asyncio.sleep(0)
    update = asyncio.create_task(engine.receive_weights(WeightManifest(2, 1, (), ())))
    await asyncio.sleep(0)
    update.cancel()
    late = await engine.generate(request(1))
    assert set(late.versions.tolist()) == {-1}
    await begun


async def test_a_token_takes_the_longer_the_more_are_decoded_with_it() -> None:
    loop = asyncio.get_running_loop()
    engine = ScriptedEngine(Script(stop_probability=0, sample_s=0.002))
    began = loop.time()
    await asyncio.gather(*(engine.generate(request(index, max_tokens=3)) for index in range(10)))
    assert loop.time() - began >= 3 * 10 * 0.002


async def test_a_paused_request_can_be_aborted() -> None:
    engine = ScriptedEngine(Script(stop_probability=0))
    await engine.pause()
    running = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0)
    await engine.abort(request().request_id)
    assert (await running).finish_reason is FinishReason.ABORT


async def test_the_vocabulary_is_that_of_the_models_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": [3, 1]}))
    config = Config.model_validate(
        {
            "run": {"name": "r", "num_steps": 1},
            "model": {"path": tmp_path},
            "data": {"path": tmp_path, "task": "math"},
            "generation": {"max_prompt_tokens": 8, "max_completion_tokens": 8, "max_num_seqs": 5},
            "admission": {"groups_per_step": 1, "group_size": 2},
            "trainer": {"token_budget": 16},
        }
    )
    engine = ScriptedEngine.of(config, seed=4)
    assert engine.script == Script(seed=4, vocab_size=32, stop_token_id=3, max_num_seqs=5)
    assert engine.capacity_samples == 5
