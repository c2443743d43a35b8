"""What the recorder tells the live line, of steps that a small ring trains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.demo.task import make_tokenizer, write_dataset
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash, write_resolved
from rlhpc.config.rules import with_values
from rlhpc.data.curriculum import open_curriculum
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.messages import Hello, WeightsLive
from rlhpc.rewards.outcomes import ErrorGate
from rlhpc.roles.controller.batches import StepRecord
from rlhpc.roles.controller.dispatcher import ProcessRegistry
from rlhpc.roles.controller.persistence import DiskLane
from rlhpc.roles.controller.recorder import NUM_RECENT_STEPS, RunRecorder
from rlhpc.roles.controller.rollout_sink import RolloutSink
from rlhpc.roles.controller.run_status import StatusBoard
from rlhpc.roles.controller.state import ControllerState, Totals
from rlhpc.roles.lifecycle import RoleContext
from tests.patience import PATIENCE_S
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.roles.small_ring import SmallRing, small_config, small_ring


@asynccontextmanager
async def recorded_ring(
    root: Path,
    num_steps: int,
    *,
    attempt: int = 0,
    resume_step: int | None = None,
    clock: Clock | None = None,
    saved: Totals | None = None,
    active_sampling: bool = True,
) -> AsyncIterator[tuple[SmallRing, RunRecorder, StatusBoard]]:
    config = small_config(num_steps, active_sampling=active_sampling)
    layout, clock = RunLayout(root), clock or asyncio.get_running_loop().time
    write_resolved(config, layout, "")
    layout.rollouts.mkdir()
    async with small_ring(config, layout.rollouts) as ring:
        context = RoleContext("controller", 0, 1, attempt, resume_step, "first", layout, config, config_hash(config))
        make_tokenizer().save_pretrained(root / "model")
        write_dataset(root / "train.jsonl", 5, seed=0)
        paths = {"data.path": root / "train.jsonl", "model.path": root / "model"}
        prompts = open_curriculum(with_values(config, paths))
        buffer = ring.buffer
        state = ControllerState(
            prompts,
            PromptTokenizer(root / "model"),
            buffer.segments,
            buffer.journal,
            buffer,
            ring.membership,
            saved or Totals(),
            saved.steps if saved is not None else 0,
            0,
        )
        registry = ProcessRegistry(context.config_hash, 15.0, clock)
        board = StatusBoard(layout, config, registry, buffer)
        sink = RolloutSink(ring.buffer, ErrorGate(1.0), config.admission)
        recorder = RunRecorder(
            context,
            state,
            board.figures,
            registry,
            ring.weight_sync,
            sink,
            DiskLane("metrics"),
            channels=(),
            clock=clock,
        )
        ring.record = recorder.record
        try:
            yield ring, recorder, board
        finally:
            await recorder.close()


def told(board: StatusBoard) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(board.document())
    return document


async def test_before_the_first_step_the_figures_are_those_of_the_attempt(tmp_path: Path) -> None:
    async with recorded_ring(tmp_path, 1, attempt=3, resume_step=20) as (_, _, board):
        document = told(board)
        assert (document["attempt"], document["resume_step"]) == (3, 20)
        assert (document["step_s"], document["save_s"]) == (0.0, 0.0)


async def test_the_longest_of_the_last_ten_steps_is_told_until_ten_more_have_passed(tmp_path: Path) -> None:
    clock = ManualClock()
    async with recorded_ring(tmp_path, 1, clock=clock) as (ring, recorder, board):
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        step = recorder._unwritten[0].record
        writing = asyncio.create_task(recorder.run())
        recorder.training_begins()
        clock.advance(7.0)
        await recorder.record(step)
        assert told(board)["step_s"] == 7.0
        for _ in range(NUM_RECENT_STEPS - 1):
            clock.advance(2.0)
            await recorder.record(step)
            assert told(board)["step_s"] == 7.0
        clock.advance(1.0)
        await recorder.record(step)
        assert told(board)["step_s"] == 2.0
        writing.cancel()


async def test_the_longest_save_is_told_from_the_step_after_it_on(tmp_path: Path) -> None:
    async with recorded_ring(tmp_path, 3) as (ring, recorder, board):
        seen: list[float] = []

        async def record(step: StepRecord) -> None:
            await recorder.record(step)
            seen.append(told(board)["save_s"])
            ring.saving.longest_s = 7.5

        ring.record = record
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert seen == [0.0, 7.5, 7.5]


SAVED = Totals(steps=2, last_reward=0.75, staleness_max=1, tokens_trained=400, tokens_generated=300, training_s=4.0)


async def test_a_resume_tells_the_figures_of_before_until_its_first_step(tmp_path: Path) -> None:
    async with recorded_ring(tmp_path, 3, attempt=1, resume_step=2, saved=SAVED) as (_, _, board):
        document = told(board)
        assert (document["reward"], document["staleness_max"]) == (0.75, 1)
        assert (document["trainer_tokens_per_s"], document["generator_tokens_per_s"]) == (0.0, 0.0)  # nobody works yet


async def test_a_resume_that_has_nothing_left_to_train_tells_the_rates_of_the_whole_run(tmp_path: Path) -> None:
    async with recorded_ring(tmp_path, 2, attempt=1, resume_step=2, saved=SAVED) as (_, _, board):
        document = told(board)
        assert (document["trainer_tokens_per_s"], document["generator_tokens_per_s"]) == (100.0, 75.0)


async def test_the_slowest_generator_is_one_that_is_there(tmp_path: Path) -> None:
    """What one that is gone has said last would be shown for as long as the run goes on, and plans go by it."""
    async with recorded_ring(tmp_path, num_steps=2) as (ring, recorder, _):
        for name, seconds in (("generator-0", 0.5), ("generator-1", 40.0)):
            await ring.add_generator(name)
            settings = config_hash(ring.config)
            recorder._registry.register(name, Hello("generator", int(name[-1]), "0.0.0-g", settings, 1, "here"))
            ring.weight_sync.last_acks[name] = WeightsLive(1, 0, seconds, seconds / 2, "")
        names = "weights/receive_s", "weights/pause_s"
        assert [recorder._situation()[name] for name in names] == [40.0, 20.0]
        recorder._registry.forget("generator-1")
        await ring.weight_sync.lost("generator-1")
        assert [recorder._situation()[name] for name in names] == [0.5, 0.25]


@pytest.mark.parametrize(("active_sampling", "replaced"), [(True, 3.0), (False, 0.0)])
async def test_groups_without_spread_are_replaced_only_where_they_are_not_trained_on(
    tmp_path: Path, active_sampling: bool, replaced: float
) -> None:
    saved = Totals(groups_without_spread=3)
    async with recorded_ring(tmp_path, 1, saved=saved, active_sampling=active_sampling) as (ring, recorder, _):
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        (step,) = recorder._unwritten
        assert step.figures["group/replaced_total"] == replaced
        assert recorder._totals.groups_without_spread == 3
