"""Evaluations of adapters take turns in the slots of an engine."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlhpc.metrics.evaluations import EvaluationSettings, SamplesFile, read_samples
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import Rollout, RolloutRequest
from rlhpc.rewards.pool import RewardPool
from rlhpc.roles.evaluator import Evaluator, draw_all
from rlhpc.weights.buckets import make_manifest
from tests import build
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.unit.data.checkpoints import make_tokenizer_files, sums, write_jsonl
from tests.unit.roles.lone_generator import STOP, VOCABULARY

PLACES = [(prompt, sample) for prompt in range(3) for sample in range(2)]
UNFIT = "adapter-1"


class SlottedEngine(ScriptedEngine):
    """Remembers which adapter each slot holds; refuses one."""

    def __init__(self) -> None:
        super().__init__(Script(seed=4, vocab_size=VOCABULARY, stop_token_id=STOP, stop_probability=0.1, token_s=0.002))
        self.slots: dict[int, str] = {}
        self.loaded: list[str] = []
        self.most_at_once = 0
        self.overwritten: list[str] = []

    async def load_adapter(self, number: int, directory: Path, scale: float, base: str) -> None:
        assert (scale, base) == (2.0, "digest")
        if directory.name == UNFIT:
            raise GroupFailed("has no A")
        self.slots[number] = directory.name
        self.loaded.append(directory.name)

    async def generate(self, request: RolloutRequest) -> Rollout:
        held = self.slots[request.adapter]
        rollout = await super().generate(request)
        self.overwritten += [held] if self.slots[request.adapter] != held else []
        return rollout


async def drawn(tmp_path: Path, names: list[str], num_slots: int) -> tuple[SlottedEngine, list[Evaluator]]:
    """Samples of evaluations of adapters, in directories of their names."""
    data = {"path": str(write_jsonl(tmp_path / "data.jsonl", sums(3))), "task": "exact_match"}
    model = {"path": str(make_tokenizer_files(tmp_path / "model"))}
    engine, free, found = SlottedEngine(), asyncio.Queue[int](), list[Evaluator]()
    await engine.receive_weights(make_manifest(0, 1, (), 1))
    for number in range(1, 1 + num_slots):
        free.put_nowait(number)
    async with RewardPool(1, 20.0) as pool:
        with ExitStack() as stack:
            for name in names:
                config = build.config(
                    model=model,
                    data=data | {"prompt_template": "{question}"},
                    generation={"max_prompt_tokens": 9, "max_completion_tokens": 30},
                    trainer={"token_budget": 100, "backend": "reference"},
                    lora={"rank": 4, "alpha": 8.0, "initial": str(tmp_path / name)},
                )
                (tmp_path / name).mkdir()
                file = stack.enter_context(SamplesFile(tmp_path / name, 0))
                settings = EvaluationSettings(config, f"{name} on data", 2, 3, 1.0, {"base": "digest"})
                found.append(Evaluator(settings, list(PLACES), engine, pool, file, free))
            await draw_all(found, 8, asyncio.Event())
    await engine.close()
    return engine, found


def places_in(directory: Path) -> list[tuple[int, int]]:
    return sorted((each.prompt, each.sample) for each in read_samples(directory))


@pytest.mark.starts
async def test_more_adapters_than_slots_take_turns_and_none_is_overwritten_before_its_last_sample(
    tmp_path: Path,
) -> None:
    names = [f"adapter-{number}" for number in (0, 2, 3, 4)]
    engine, evaluators = await drawn(tmp_path, names, num_slots=2)
    assert engine.loaded == names
    assert not engine.overwritten
    assert sorted(engine.slots) == [1, 2]
    for name, evaluator in zip(names, evaluators, strict=True):
        assert places_in(tmp_path / name) == PLACES
        assert not evaluator.refusal


@pytest.mark.starts
async def test_an_adapter_that_does_not_fit_is_refused_by_name_and_the_others_are_drawn(tmp_path: Path) -> None:
    engine, evaluators = await drawn(tmp_path, names := ["adapter-0", UNFIT, "adapter-2"], num_slots=1)
    assert [each.refusal for each in evaluators] == ["", f"{UNFIT} on data: has no A", ""]
    assert engine.loaded == ["adapter-0", "adapter-2"]
    assert [places_in(tmp_path / name) for name in names] == [PLACES, [], PLACES]
