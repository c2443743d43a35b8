from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import (
    RolloutRequest,
    WeightManifest,
)
from tests import build
from tests.engines.scripted_engine import Script, ScriptedEngine


def request(group_id: int = 0, sample_index: int = 0, max_tokens: int = 40) -> RolloutRequest:
    return build.request(group_id, sample_index, max_tokens=max_tokens)


async def test_tokens_are_drawn_from_the_stated_distribution() -> None:
    engine = ScriptedEngine(Script(vocab_size=8, stop_probability=0))
    rollouts = [await engine.generate(request(group_id, max_tokens=100)) for group_id in range(40)]
    counts = np.bincount(np.concatenate([rollout.token_ids for rollout in rollouts]), minlength=8) / 4000
    np.testing.assert_allclose(counts, np.exp(engine.logprob_table(-1)), atol=0.03)
    assert np.exp(engine.logprob_table(5)).sum() == pytest.approx(1, abs=1e-5)


async def test_it_dies_when_it_is_scripted_to() -> None:
    engine = ScriptedEngine(Script(die_after_tokens=10, stop_probability=0))
    results = await asyncio.gather(*(engine.generate(request(index)) for index in range(3)), return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert engine.statistics().tokens_generated == 10
    with pytest.raises(EngineError, match="after 10 tokens"):
        await engine.generate(request())
    await engine.close()


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


async def test_the_vocabulary_is_that_of_the_models_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": [3, 1]}))
    config = build.config(model={"path": tmp_path}, generation={"max_num_seqs": 5})
    engine = ScriptedEngine.of(config, seed=4)
    assert engine.script == Script(seed=4, vocab_size=32, stop_token_id=3, max_num_seqs=5)
    assert engine.capacity_samples == 5
