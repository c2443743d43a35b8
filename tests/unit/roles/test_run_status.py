"""What a run tells of itself: figures of steps, the live line, its summary, timeline.jsonl."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.demo.task import make_tokenizer, write_dataset
from rlhpc.algorithms.estimators import grpo
from rlhpc.algorithms.packing import FlopCost, pack
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.lost_leases import LineFile
from rlhpc.buffer.segments import SegmentWriter, segment_paths
from rlhpc.config.file import config_hash, write_resolved
from rlhpc.config.rules import with_values
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.data.prompts import open_curriculum
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.metrics.names import HISTOGRAMS, find_metric
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.messages import Hello, StepReport, WeightsLive
from rlhpc.protocol.types import PackedBatch, RolloutGroup, Verdict
from rlhpc.rewards.outcomes import ErrorGate
from rlhpc.roles.controller.batch_maker import StepRecord
from rlhpc.roles.controller.leases import IntakeStats, ProcessRegistry, RolloutSink
from rlhpc.roles.controller.persistence import DiskLane
from rlhpc.roles.controller.recorder import (
    NUM_RECENT_STEPS,
    RunRecorder,
    dataset_figures,
    histograms,
    sampling_figures,
    training_figures,
)
from rlhpc.roles.controller.run_status import (
    SHORTEST_S,
    SILENT,
    WORKS,
    StatusBoard,
    Timeline,
    TimelineEntry,
    reward_by_version,
    summarise,
    tenth_means,
)
from rlhpc.roles.controller.state import ControllerState, Totals
from rlhpc.roles.lifecycle import RoleContext
from tests.full_disk import fill, small_disk
from tests.patience import PATIENCE_S
from tests.unit.algorithms.algorithm_rows import token_row
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.roles.small_ring import SmallRing, prompt, scored, small_config, small_ring

# -------------------------------------------------------------------------------------------------------- the live line
#
# What the recorder tells the live line, of steps that a small ring trains.


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
            prompts, PromptTokenizer(root / "model"), buffer.segments, buffer.journal, buffer, ring.membership,
            saved or Totals(), saved.steps if saved is not None else 0, 0,
        )  # fmt: skip
        registry = ProcessRegistry(context.config_hash, 15.0, clock)
        board = StatusBoard(layout, config, registry, buffer.ledger)
        sink = RolloutSink(ring.buffer, ErrorGate(1.0), config.admission)
        recorder = RunRecorder(
            context, state, board.figures, registry, ring.weight_sync, sink, DiskLane("metrics"), channels=(),
            clock=clock,
        )  # fmt: skip
        ring.record = recorder.record
        try:
            yield ring, recorder, board
        finally:
            await recorder.close()


def told(board: StatusBoard) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(board.document())
    return document


async def test_the_longest_of_the_last_ten_steps_is_told_until_ten_more_have_passed(tmp_path: Path) -> None:
    clock = ManualClock()
    async with recorded_ring(tmp_path, 1, clock=clock) as (ring, recorder, board):
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        step = recorder._unwritten.steps[0].record
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


@pytest.mark.parametrize(
    ("num_steps", "rates"), [(3, (0.0, 0.0)), (2, (100.0, 75.0))], ids=["nobody works yet", "nothing left to train"]
)
async def test_a_resume_tells_the_figures_of_before_until_its_first_step(
    tmp_path: Path, num_steps: int, rates: tuple[float, float]
) -> None:
    async with recorded_ring(tmp_path, num_steps, attempt=1, resume_step=2, saved=SAVED) as (_, _, board):
        document = told(board)
        assert (document["attempt"], document["resume_step"]) == (1, 2)
        assert (document["step_s"], document["save_s"]) == (0.0, 0.0)
        assert (document["reward"], document["staleness_max"]) == (0.75, 1)
        assert (document["trainer_tokens_per_s"], document["generator_tokens_per_s"]) == rates


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
async def test_zero_variance_groups_are_replaced_only_where_they_are_not_trained_on(
    tmp_path: Path, active_sampling: bool, replaced: float
) -> None:
    saved = Totals(zero_variance_groups=3)
    async with recorded_ring(tmp_path, 1, saved=saved, active_sampling=active_sampling) as (ring, recorder, _):
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        (step,) = recorder._unwritten.steps
        assert step.figures["group/replaced_total"] == replaced
        assert recorder._totals.zero_variance_groups == 3


# --------------------------------------------------------------------------------------------------------- step figures
#
# Every figure of a step has a documented name.


REPORT = dict.fromkeys(
    ("loss", "grad_norm", "entropy", "learning_rate", "step_s", "wait_for_batch_s", "clip_low", "clip_high", "ratio",
     "importance_weight", "importance_weight_squared", "importance_capped", "kl_k1", "kl_k3", "mismatch_abs",
     "mismatch_kl"),
    1.0,
)  # fmt: skip


def group(group_id: int, admitted_version: int, *rewards: float) -> RolloutGroup:
    members = tuple(scored(group_id, index, reward, reward_parts={"form": 0.5}) for index, reward in enumerate(rewards))
    return RolloutGroup(group_id, prompt(group_id), admitted_version, members)


@pytest.fixture
def record() -> StepRecord:
    groups = (group(0, 1, 0.0, 1.0), group(1, 2, 1.0, 0.0))
    minibatch = pack(SampleMaker(grpo)(groups), token_budget=16, num_ranks=1, cost=FlopCost(1.0, 0.0))
    batch = PackedBatch(3, 3, (minibatch,))
    return StepRecord(StepReport(3, 4, True, REPORT), batch, groups, 3, 1.0, 0.1, 0.01, 0.2, 0.3, 0.4)


def test_every_name_is_in_the_table(record: StepRecord) -> None:
    stats = IntakeStats(groups=[*record.groups, group(2, 3, 0.0, 0.0), group(3, 3, 1.0, 1.0)])
    figures = training_figures(record, 16) | sampling_figures(stats)
    for name, value in figures.items():
        find_metric(name)  # raises KeyError
        assert np.isfinite(value), name
    assert histograms(record).keys() == HISTOGRAMS.keys()


@pytest.mark.parametrize("proximal", ["behaviour", "loglinear", "current"])
def test_every_metric_of_a_loss_has_a_row_of_the_table(record: StepRecord, proximal: str) -> None:
    tokens = torch.zeros(3)
    loss = make_policy_loss(AlgorithmConfig.model_validate({"proximal": proximal}), 3)
    _, sums = loss(tokens, token_row(tokens, versions=torch.tensor([1, 2, 3])))
    record = replace(record, report=StepReport(3, 4, True, {name: value.item() for name, value in sums.items()}))
    for name in training_figures(record, 16):
        find_metric(name)  # raises KeyError


def test_a_metric_of_a_loss_that_has_no_row_is_refused_and_not_passed_over(record: StepRecord) -> None:
    record = replace(record, report=StepReport(3, 4, True, {"tapered_share": 0.5}))
    assert training_figures(record, 16)["policy/tapered_share"] == 0.5
    with pytest.raises(KeyError, match="policy/tapered_share"):
        find_metric("policy/tapered_share")


def test_staleness_is_counted_from_admission_against_the_version_that_was_trained(record: StepRecord) -> None:
    figures = training_figures(record, 16)
    assert (figures["staleness/mean"], figures["staleness/max"]) == (1.5, 2.0)
    assert histograms(record)["staleness/histogram"].tolist() == [2, 2, 1, 1]


def test_packing_fill_is_tokens_over_budget(record: StepRecord) -> None:
    figures = training_figures(record, 16)
    assert figures["packing/num_microbatches"] == 2
    assert figures["packing/fill"] == pytest.approx(20 / 32)


def test_zero_variance_groups_are_told_apart_by_why() -> None:
    stats = IntakeStats(
        groups=[group(0, 0, 0.0, 0.0), group(1, 0, 1.0, 1.0), group(2, 0, 1.0, 1.0), group(3, 0, 0.0, 1.0)]
    )
    figures = sampling_figures(stats)
    assert figures["group/all_wrong_share"] == 0.25
    assert figures["group/all_correct_share"] == 0.5
    assert figures["reward/mean"] == pytest.approx(5 / 8)
    assert figures["reward_part/form"] == 0.5


def test_a_step_in_which_no_group_was_finished_says_nothing_of_rewards() -> None:
    assert sampling_figures(IntakeStats()) == {}


def test_of_several_datasets_each_has_figures_of_its_own() -> None:
    groups = [group(0, 0, 0.0, 0.0), group(3, 0, 1.0, 1.0), group(1, 0, 0.0, 1.0), group(6, 0, 1.0, 0.0)]
    figures = dataset_figures(groups, ["math", "sums", "code"])  # prompts 0, 3 and 6, then 1
    assert figures["dataset_reward/math"] == pytest.approx(3 / 6)
    assert figures["dataset_reward/sums"] == 0.5
    assert figures["dataset_share/math"] == 0.75
    assert not [name for name in figures if name.endswith("code")]
    assert dataset_figures(groups, ["math"]) == dataset_figures([], ["math", "sums"]) == {}


# ---------------------------------------------------------------------------------------------------------- run summary
#
# The summary says what the segments say.


def group_of(group_id: int, admitted_version: int, *rewards: float, failed: tuple[int, ...] = ()) -> RolloutGroup:
    members = tuple(scored(group_id, index, reward) for index, reward in enumerate(rewards))
    members = tuple(
        replace(member, verdict=Verdict.VERIFIER_ERROR) if index in failed else member
        for index, member in enumerate(members)
    )
    return RolloutGroup(group_id, prompt(group_id), admitted_version, members)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    layout.rollouts.mkdir()
    return layout


def seal(layout: RunLayout, *groups: ResolvedGroup) -> None:
    writer = SegmentWriter(
        layout.rollouts, 0, run_name="r", run_attempt=0, max_groups=2, max_s=1e9,
        clock=lambda: 0.0,
    )  # fmt: skip
    for resolved in groups:
        writer.add(resolved)
    writer.seal_all()


def test_the_curve_counts_groups_that_were_judged_whole_whatever_became_of_them(layout: RunLayout) -> None:
    seal(
        layout,
        ResolvedGroup(group_of(0, 0, 0.0, 1.0), consumed_step=0),
        ResolvedGroup(group_of(1, 0, 1.0, 1.0), drop_reason=DropReason.ZERO_VARIANCE),
        ResolvedGroup(group_of(2, 1, 1.0, 0.0, failed=(1,)), drop_reason=DropReason.VERIFIER_ERROR),
        ResolvedGroup(group_of(3, 1, 0.0), drop_reason=DropReason.CANCELLED),
        ResolvedGroup(group_of(4, 1, 0.0, 0.5), consumed_step=2),
        ResolvedGroup(group_of(5, 2, 1.0, 0.0), drop_reason=DropReason.CANCELLED),
        ResolvedGroup(group_of(6, 3, 1.0, 0.0, 0.5), consumed_step=3, group_size=3),
        ResolvedGroup(group_of(7, 3, 1.0, 1.0), drop_reason=DropReason.CANCELLED, group_size=3),
    )
    curve = {0: (0.75, 4), 1: (0.25, 2), 2: (0.5, 2), 3: (0.5, 3)}
    assert reward_by_version(layout.rollouts, group_size=2) == curve


def test_a_tenth_is_weighed_by_rollouts_and_at_least_one_version() -> None:
    curve = {version: (float(version), 10) for version in range(20)}
    assert tenth_means(curve, 20) == (0.5, 18.5)
    assert tenth_means(curve, 5) == (0.0, 4.0)
    assert tenth_means({0: (1.0, 30), 1: (0.0, 10)}, 10) == (1.0, 0.0)
    assert tenth_means({0: (0.5, 30)}, 20) == (0.5, 0.5)  # all batches are of one version
    assert tenth_means({3: (0.5, 30)}, 20) == (None, 0.5)  # segments were lost
    assert tenth_means({0: (0.5, 30), 8: (0.25, 30), 10: (1.0, 5)}, 10) == (0.5, 0.25)  # 10 follows the last step


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_run_is_complete_though_one_of_its_segments_cannot_be_read_any_more_or_is_gone(
    layout: RunLayout, caplog: pytest.LogCaptureFixture, is_gone: bool
) -> None:
    """It has trained every step: no attempt could do more."""
    seal(layout, *(ResolvedGroup(group_of(v, v, 0.0, 1.0), consumed_step=v) for v in range(6)))
    damaged = segment_paths(layout.rollouts)[1]
    if is_gone:
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:1000])
    summary = summarise(layout, Totals(steps=6), 1, group_size=2)
    assert [version for version, _, _ in summary["reward_by_version"]] == [0, 1, 4, 5]
    assert ("segment 1 is missing" if is_gone else f"{damaged}: ") in caplog.text
    assert layout.summary.exists()


def test_a_run_of_which_nothing_was_judged_has_no_means(layout: RunLayout) -> None:
    assert tenth_means({}, 10) == (None, None)
    summary = summarise(layout, Totals(), 1, group_size=2)
    assert summary["reward_first_tenth"] is None
    assert summary["reward_by_version"] == []
    assert json.loads(layout.summary.read_bytes()) == summary


def test_tenths_are_of_the_versions_that_there_were_also_where_steps_were_skipped(layout: RunLayout) -> None:
    """A skipped step makes no version: of 20 steps, 4 of them skipped, the last ones sampled under version 15."""
    seal(layout, *(ResolvedGroup(group_of(v, v, v / 10, v / 10), consumed_step=v) for v in range(16)))
    summary = summarise(layout, Totals(steps=20, skipped_steps=4), 1, group_size=2)
    assert (summary["reward_first_tenth"], summary["reward_last_tenth"]) == (0.0, 1.5)
    alone = summarise(layout, Totals(steps=3, skipped_steps=3), 1, group_size=2)
    assert (alone["reward_first_tenth"], alone["reward_last_tenth"]) == (0.0, 0.0)


def test_rates_and_ratios_are_over_training_time(layout: RunLayout) -> None:
    totals = Totals(
        steps=4, rollouts_trained=16, rollouts_spanning_update=4, tokens_generated=800, tokens_trained=1000,
        packing_fill_sum=3.0, trainer_idle_s=1.0, generator_idle_s=4.0, generator_s=16.0, training_s=8.0, wall_s=20.0,
    )  # fmt: skip
    summary = summarise(layout, totals, 3, group_size=2)
    assert {key: summary[key] for key in (
        "generator_tokens_per_s", "trainer_tokens_per_s", "rollouts_spanning_update", "packing_fill",
        "trainer_idle_ratio", "generator_idle_ratio", "staleness_bound", "wall_s",
    )} == {
        "generator_tokens_per_s": 100.0, "trainer_tokens_per_s": 125.0, "rollouts_spanning_update": 0.25,
        "packing_fill": 0.75, "trainer_idle_ratio": 0.125, "generator_idle_ratio": 0.25, "staleness_bound": 3,
        "wall_s": 20.0,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- timeline
#
# timeline.jsonl: what each process did, interval by interval, and who came and went.


START_S = 1_000_000.0


def _row(name: str, waits_for: str = "", *, pid: int = 1, silent_s: float = 0.1, **metrics: float) -> dict[str, Any]:
    state = "running" if name.startswith("generator") else "training"
    known = {"state": state, "version": 0, "host": "node"}
    return {"name": name, "waits_for": waits_for, "pid": pid, "silent_s": silent_s, "metrics": metrics, **known}


def _entries(path: Path) -> list[TimelineEntry]:
    return LineFile(path, TimelineEntry).read()


class _Watch:
    """A timeline that is looked at twice a second."""

    def __init__(self, path: Path) -> None:
        self.timeline, self.path, self.now_s = Timeline(path), path, START_S

    def look(self, *rows: dict[str, Any], seconds: float = 0.5) -> None:
        self.timeline.look(self.now_s, rows, attempt=0, step=3, phase="training")
        self.timeline.write(self.now_s)
        self.now_s += seconds


@pytest.fixture
def watch(tmp_path: Path) -> _Watch:
    return _Watch(tmp_path / "timeline.jsonl")


def test_an_interval_says_what_share_of_it_each_process_worked_or_waited_for_what(watch: _Watch) -> None:
    for place in range(12):
        watch.look(_row("trainer-0", "batch" if place % 4 == 0 else ""))
    (interval,) = [entry for entry in _entries(watch.path) if entry.seconds > 0]
    assert interval.seconds == pytest.approx(SHORTEST_S)
    assert interval.work["trainer-0"]["batch"] == pytest.approx(3 / 11, abs=0.001)
    assert sum(interval.work["trainer-0"].values()) == pytest.approx(1, abs=0.002)


def test_an_engines_own_counter_is_believed_before_looks_at_its_state(watch: _Watch) -> None:
    for place in range(12):  # busy for a fifth of the time, and at no moment in which somebody looks
        watch.look(_row("generator-0", "leases", busy_s=10 + 0.1 * place))
    (interval,) = [entry for entry in _entries(watch.path) if entry.seconds > 0]
    assert interval.work["generator-0"] == pytest.approx({WORKS: 0.2, "leases": 0.8}, abs=0.002)


def test_a_process_that_dies_is_silent_then_lost_and_joins_again(watch: _Watch) -> None:
    watch.look(_row("generator-0", pid=7, running=8.0, busy_s=1.0))
    for place in range(12):
        watch.look(_row("generator-0", pid=7, silent_s=0.5 * place, running=8.0, busy_s=1.0))
    watch.look()
    watch.look(_row("generator-0", pid=9))
    told = [(entry.event, entry.text) for entry in _entries(watch.path) if entry.event]
    assert [event for event, _ in told] == ["joined", "lost", "joined"]
    assert told[1][1] == "no sign of life for 5.5 s; it was running with 8 rollouts"
    assert told[2][1] == "pid 9 on node"
    (interval,) = [entry for entry in _entries(watch.path) if entry.seconds > 0]
    assert interval.work["generator-0"].get(SILENT, 0) > 0.3


def test_another_process_of_the_same_name_is_a_loss_and_an_arrival(watch: _Watch) -> None:
    watch.look(_row("generator-0", pid=7))
    watch.look(_row("generator-0", pid=8))
    assert [entry.event for entry in _entries(watch.path)] == ["joined", "lost", "joined"]


def test_one_that_said_so_has_left_and_is_not_lost(watch: _Watch) -> None:
    watch.look(_row("generator-0") | {"state": "draining"})
    watch.look()
    assert [entry.event for entry in _entries(watch.path)] == ["joined", "left"]


@pytest.mark.parametrize(("num_processes", "most_lines"), [(8, 9_000), (1024, 6_000)])
def test_a_month_is_thousands_of_lines(tmp_path: Path, num_processes: int, most_lines: int) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    num_lines, now_s = 0, START_S
    while now_s < START_S + 30 * 86_400:
        interval_s = timeline._interval_s(now_s, num_processes) if num_lines else SHORTEST_S
        timeline._first_s, now_s, num_lines = START_S, now_s + interval_s, num_lines + 1
    assert 1_000 < num_lines < most_lines


def test_an_attempt_of_an_old_run_begins_with_long_intervals(watch: _Watch) -> None:
    watch.look(_row("trainer-0"))
    again = _Watch(watch.path.parent / "timeline.jsonl")
    again.now_s = START_S + 20 * 86_400
    for _ in range(3500):
        again.look(_row("trainer-0"))
    lengths = [entry.seconds for entry in _entries(watch.path) if entry.seconds]
    assert lengths == [pytest.approx(20 * 86.4, rel=0.01)]


@pytest.mark.starts
def test_a_full_disk_delays_lines_and_the_file_says_for_how_long(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    with small_disk(directory, 8 << 20):
        watch = _Watch(directory / "timeline.jsonl")
        watch.look(_row("trainer-0"))
        filler = directory / "filler"
        fill(filler, 0)
        for place in range(400):  # more than the file's last block has room for
            watch.look(_row("generator-0", pid=place + 1), seconds=1.0)
        held = len(_entries(watch.path))
        filler.unlink()
        for _ in range(7):
            watch.look(_row("generator-0", pid=400), seconds=1.0)
        entries = _entries(watch.path)
    assert held < 400
    (disk,) = [entry for entry in entries if entry.event == "disk"]
    assert "could not be written for" in disk.text
    joined = [entry.text for entry in entries if entry.event == "joined" and entry.name == "generator-0"]
    assert joined == [f"pid {number} on node" for number in range(1, 401)]  # none is lost, none stands there twice
