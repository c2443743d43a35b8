"""What an evaluation has judged, with a scripted engine and real reward workers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.metrics.evaluations import EvaluatedSample, EvaluationSettings, SamplesFile, read_samples
from rlhpc.rewards.pool import RewardPool
from rlhpc.roles.evaluator import Evaluator
from rlhpc.weights.buckets import make_manifest
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import make_tokenizer_files, sums, write_jsonl
from tests.unit.roles.lone_generator import STOP, VOCABULARY

pytestmark = pytest.mark.starts


async def evaluated(directory: Path, thinking_end: str, stop: tuple[str, ...] = ()) -> EvaluatedSample:
    """The only sample of a prompt, judged by how many words it has."""
    data = {
        "path": str(write_jsonl(directory / "held_out.jsonl", sums(1))),
        "task": "tests.unit.rewards.sample_rewards:rewards_of_words",
        "prompt_template": "{question}",
        "thinking_end": thinking_end,
    }
    document = {
        "run": {"name": "evaluation", "num_steps": 1},
        "model": {"path": str(make_tokenizer_files(directory / "model"))},
        "data": data,
        "generation": {"max_prompt_tokens": 9, "max_completion_tokens": 60, "stop": stop},
        "admission": {"groups_per_step": 1, "group_size": 2},
        "trainer": {"token_budget": 100},
    }
    settings = EvaluationSettings(Config.model_validate(document), "title", 1, 1, 1.0, {})
    script = Script(seed=4, vocab_size=VOCABULARY, stop_token_id=STOP, stop_probability=0.0)
    engine = ScriptedEngine(script, decode=PromptTokenizer(directory / "model").decode)
    await engine.receive_weights(make_manifest(0, 1, (), 1))
    place = directory / f"of{len(thinking_end)}{len(stop)}"
    place.mkdir()
    async with RewardPool(1, PATIENCE_S) as pool:
        with SamplesFile(place, 0) as file:
            await Evaluator(settings, engine, pool, file).sample([(0, 0)], asyncio.Event())
    await engine.close()
    (sample,) = read_samples(place)
    return sample


async def test_only_what_follows_the_end_of_thinking_is_judged_and_all_of_it_is_kept(tmp_path: Path) -> None:
    whole = await evaluated(tmp_path, "")
    words = re.findall(r"\w+", whole.completion)
    assert whole.reward == len(words) > 3
    end = words[1]
    judged = await evaluated(tmp_path, end)
    assert judged.completion == whole.completion
    assert judged.reward == len(re.findall(r"\w+", whole.completion.partition(end)[2])) < len(words)


async def test_a_sample_ends_with_a_stop_string_and_is_judged_and_kept_without_it(tmp_path: Path) -> None:
    whole = (await evaluated(tmp_path, "")).completion
    stop = whole[20:23]
    judged = await evaluated(tmp_path, "", ("no such text", stop))
    assert judged.completion == whole.partition(stop)[0]
    assert judged.finish_reason == "stop"
    assert len(judged.completion) + len(stop) <= judged.num_tokens < 60
    assert judged.reward == len(re.findall(r"\w+", judged.completion))
