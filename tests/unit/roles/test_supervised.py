"""The train loop of supervised fine-tuning, and its part of a checkpoint, with a trainer that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.algorithms.packing import FlopCost
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import supervised
from rlhpc.data.demonstrations import Demonstrations, open_demonstrations
from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.messages import (
    BATCHES,
    BatchRows,
    SaveCheckpoint,
    SaveReport,
    ScoreBatch,
    ScoreReport,
    SnapshotTaken,
    StepReport,
    TrainBatch,
)
from rlhpc.roles.controller.batch_maker import RANK_0, StepRecord, SupervisedBatches, TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.guarding import Guarding
from rlhpc.roles.controller.persistence import DiskWriter
from rlhpc.roles.controller.supervised import StagePart, StageState, SupervisedLoop, open_stage_state
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.training.checkpoint_directory import KnownCheckpoints, latest_complete
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.tiny_models import make_character_tokenizer

RUN_FILE = """
[run]
name = "taught"
[model]
path = "model"
[[demonstrations]]
path = "pairs.jsonl"
prompt_field = "q"
completion_field = "a"
[sft]
batch_size = 4
num_steps = 12
held_out = 0.2
evaluate_every = 2
[trainer]
token_budget = 32
[checkpoint]
every_steps = 5
keep = 2
"""


@dataclass
class Desk:
    """A loop, and what its trainer was told."""

    loop: SupervisedLoop
    state: StageState
    writer: CheckpointWriter
    layout: RunLayout
    told: list[Any]
    records: list[StepRecord]
    context: RoleContext
    num_evaluated: int = 0  # held-out losses that no step's record has

    async def run(self, stop: asyncio.Event | None = None) -> None:
        async def record(done: StepRecord) -> None:
            self.records.append(done)

        async def evaluated() -> None:
            self.num_evaluated += 1

        await asyncio.wait_for(self.loop.run(stop or asyncio.Event(), record, evaluated, self.writer), PATIENCE_S)

    @property
    def steps_on_disk(self) -> list[int]:
        return [step for step, _ in KnownCheckpoints(self.layout.checkpoints).steps()]


@pytest.fixture
def taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run file, a tokenizer and twenty pairs."""
    monkeypatch.chdir(tmp_path)
    make_character_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text("".join(f'{{"q": "{n}+1=", "a": "{n + 1}"}}\n' for n in range(20)))
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path


@asynccontextmanager
async def desk(
    root: Path,
    losses: Callable[[int], float] = lambda step: 1.0 / (1 + step),
    *words: str,
    resume_step: int | None = None,
    error: str = "",
) -> AsyncIterator[Desk]:
    """losses: held out, after so many steps.  error: of the trainer, in place of each checkpoint."""
    config = load_config(root / "run.toml", words)
    demonstrations: Demonstrations = open_demonstrations(config)
    config = supervised(config, demonstrations.num_conversations)
    layout, batches = RunLayout(root / "run"), MemoryServer(BATCHES)
    layout.checkpoints.mkdir(parents=True, exist_ok=True)
    context = RoleContext("controller", 0, 1, 0, resume_step, "first", layout, config, "hash")
    state, told, client = open_stage_state(context, lambda: 0.0), list[Any](), batches.connect(RANK_0)
    step = state.step

    async def be_trainer(writer: CheckpointWriter) -> None:
        nonlocal step
        rows = dict[int, BatchRows]()
        while True:
            match await client.receive():
                case BatchRows(number) as message:
                    rows = {number: message}
                case TrainBatch(number, batch):
                    told.append((batch.step, rows[number].minibatches[0], batch.learning_rate))
                    step = batch.step + 1
                    await client.send(StepReport(batch.step, step, True, {"loss": 1.0, "grad_norm": 1.0}))
                case ScoreBatch(number):
                    count = rows[number].minibatches[0].num_loss_tokens
                    told.append(("score", step, count))
                    await client.send(ScoreReport(number, count, losses(step) * count))
                case SaveCheckpoint(saved, directory):
                    await client.send(SnapshotTaken(saved, 0.0))
                    (Path(directory) / "trainer").mkdir()
                    (Path(directory) / "trainer" / "state").write_text(str(saved))
                    asyncio.get_running_loop().call_later(0.01, writer.reported, SaveReport(saved, 0.0, error))

    trainer = TrainerLink(batches)
    own = StagePart(state, 0, keeps_best=config.sft.early_stop != "off")
    writer = CheckpointWriter(layout, config.checkpoint.keep, trainer, own, DiskWriter())
    guarding = Guarding(state.guard, None, config.admission)
    cost = FlopCost(linear=1.0, quadratic=0.0)
    loop = SupervisedLoop(
        config, SupervisedBatches(demonstrations, config, cost), trainer, state, guarding,
        has_held_out=demonstrations.num_held_out > 0,
    )  # fmt: skip
    playing = asyncio.create_task(be_trainer(writer))
    try:
        yield Desk(loop, state, writer, layout, told, [], context)
    finally:
        playing.cancel()


async def test_steps_losses_and_checkpoints_come_when_they_are_due(taught: Path) -> None:
    async with desk(taught) as it:
        await it.run()
        assert [each[0] for each in it.told if each[0] != "score"] == [*range(12)]
        assert [each[1] for each in it.told if each[0] == "score"] == [2, 4, 6, 8, 10, 12]
        assert it.steps_on_disk == [10, 12]
        assert it.state.held_out.best_step == 12
        assert it.state.held_out.first == pytest.approx(1 / 3)
        assert len(it.records) == 12
        assert it.loop.is_over


async def test_a_run_ends_when_the_held_out_loss_no_longer_falls_and_the_best_model_stays(taught: Path) -> None:
    losses = {2: 0.5, 4: 0.2, 6: 0.3, 8: 0.4, 10: 0.35}
    async with desk(taught, losses.__getitem__, "sft.early_stop=3", "checkpoint.every_steps=1") as it:
        await it.run()
        assert it.state.step == 10
        assert it.loop.is_over
        assert it.steps_on_disk == [4, 9, 10]
        assert (it.state.held_out.best, it.state.held_out.best_step) == (0.2, 4)


@pytest.mark.parametrize("resume_step", [5, 10])
async def test_a_restart_does_what_an_undisturbed_run_does(taught: Path, resume_step: int) -> None:
    losses = {2: 0.5, 4: 0.2, 6: 0.3, 8: 0.4, 10: 0.35, 12: 0.1}
    words = ("sft.early_stop=4", "sft.warmup_steps=6", "checkpoint.keep=5")
    async with desk(taught, losses.__getitem__, *words) as it:
        await it.run()
        whole, held_out = it.told, it.state.held_out
    async with desk(taught, losses.__getitem__, *words, resume_step=resume_step) as it:
        assert it.state.step == resume_step
        for step in (each for each in it.steps_on_disk if each > resume_step):
            it.layout.checkpoint(step).rename(it.layout.checkpoints / f"step_{step:06d}.undone")
        await it.run()
        again = [each for each in it.told if each[0] != "score"]
        before = [each for each in whole if each[0] != "score" and each[0] >= resume_step]
        assert [(step, rate) for step, _, rate in again] == [(step, rate) for step, _, rate in before]
        for (_, one, _), (_, other, _) in zip(again, before, strict=True):
            assert all((a.token_ids == b.token_ids).all() for a, b in zip(one.rows, other.rows, strict=True))
        assert it.state.held_out == held_out


async def test_a_stop_saves_and_a_loss_that_it_interrupts_is_computed_after_the_restart(taught: Path) -> None:
    stop = asyncio.Event()
    async with desk(taught) as it:
        task = asyncio.create_task(it.run(stop))
        while it.state.step < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        stop.set()
        await task
        last = it.state.step
        assert latest_complete(it.layout.checkpoints) == (last, it.layout.checkpoint(last))
    async with desk(taught, resume_step=last) as it:
        await it.run()
        scored = [each[1] for each in it.told if each[0] == "score"]
        assert scored == [step for step in (2, 4, 6, 8, 10, 12) if step > last or (step == last and scored[0] == last)]
        assert it.num_evaluated == (scored[0] == last)


async def test_a_checkpoint_that_cannot_be_written_is_left_out_and_tried_again(taught: Path) -> None:
    async with desk(taught, error="no space left on device") as it:
        it.writer._patience._clock = iter(range(0, 10**9, 1000)).__next__  # type: ignore[assignment]
        with pytest.raises(CheckpointError, match="no space left on device"):
            await it.run()
        assert it.state.totals.checkpoints_failed > 1
        assert it.steps_on_disk == []


def test_a_checkpoint_whose_part_is_damaged_is_refused_by_name(taught: Path) -> None:
    layout = RunLayout(taught / "run")
    layout.checkpoint(3).mkdir(parents=True)
    (layout.checkpoint(3) / "controller.json").write_text('{"step": 3}')
    config = supervised(load_config(taught / "run.toml", []), 16)
    context = RoleContext("controller", 0, 1, 0, 3, "first", layout, config, "hash")
    with pytest.raises(CheckpointError, match=r"step_000003/controller.json: KeyError\('guard'\)"):
        open_stage_state(context, lambda: 0.0)
