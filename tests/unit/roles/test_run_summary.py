"""The summary says what the segments say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.segments import SegmentWriter, segment_paths
from rlhpc.protocol.types import RolloutGroup, Verdict
from rlhpc.roles.controller.run_status import reward_by_version, summarise, tenth_means
from rlhpc.roles.controller.state import Totals
from tests.unit.roles.small_ring import prompt, scored


def group(group_id: int, admitted_version: int, *rewards: float, failed: tuple[int, ...] = ()) -> RolloutGroup:
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
        ResolvedGroup(group(0, 0, 0.0, 1.0), consumed_step=0),
        ResolvedGroup(group(1, 0, 1.0, 1.0), drop_reason=DropReason.NO_SPREAD),
        ResolvedGroup(group(2, 1, 1.0, 0.0, failed=(1,)), drop_reason=DropReason.VERIFIER_ERROR),
        ResolvedGroup(group(3, 1, 0.0), drop_reason=DropReason.CANCELLED),
        ResolvedGroup(group(4, 1, 0.0, 0.5), consumed_step=2),
        ResolvedGroup(group(5, 2, 1.0, 0.0), drop_reason=DropReason.CANCELLED),
        ResolvedGroup(group(6, 3, 1.0, 0.0, 0.5), consumed_step=3, group_size=3),
        ResolvedGroup(group(7, 3, 1.0, 1.0), drop_reason=DropReason.CANCELLED, group_size=3),
    )
    curve = {0: (0.75, 4), 1: (0.25, 2), 2: (0.5, 2), 3: (0.5, 3)}
    assert reward_by_version(layout.rollouts, group_size=2) == curve


def test_a_tenth_is_weighed_by_rollouts_and_at_least_one_version() -> None:
    curve = {version: (float(version), 10) for version in range(20)}
    assert tenth_means(curve, 20) == (0.5, 18.5)
    assert tenth_means(curve, 5) == (0.0, 4.0)
    assert tenth_means({0: (1.0, 30), 1: (0.0, 10)}, 20) == (0.75, None)


def test_a_run_is_complete_though_one_of_its_segments_cannot_be_read_any_more(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    """It has trained every step: no attempt could do more."""
    seal(layout, *(ResolvedGroup(group(v, v, 0.0, 1.0), consumed_step=v) for v in range(6)))
    damaged = segment_paths(layout.rollouts)[1]
    damaged.write_bytes(damaged.read_bytes()[:1000])
    summary = summarise(layout, Totals(steps=6), 1, group_size=2)
    assert [version for version, _, _ in summary["reward_by_version"]] == [0, 1, 4, 5]
    assert f"{damaged}: " in caplog.text
    assert layout.summary.exists()


def test_a_run_is_complete_though_one_of_its_segments_is_gone(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    """It was tried again for five minutes, as if the disk were full, and no later start could complete the run."""
    seal(layout, *(ResolvedGroup(group(v, v, 0.0, 1.0), consumed_step=v) for v in range(6)))
    segment_paths(layout.rollouts)[1].unlink()
    summary = summarise(layout, Totals(steps=6), 1, group_size=2)
    assert [version for version, _, _ in summary["reward_by_version"]] == [0, 1, 4, 5]
    assert "segment 1 is missing" in caplog.text
    assert layout.summary.exists()


def test_a_run_of_which_nothing_was_judged_has_no_means(layout: RunLayout) -> None:
    assert tenth_means({}, 10) == (None, None)
    summary = summarise(layout, Totals(), 1, group_size=2)
    assert summary["reward_first_tenth"] is None
    assert summary["reward_by_version"] == []
    assert json.loads(layout.summary.read_bytes()) == summary


def test_tenths_are_of_the_versions_that_there_were_also_where_steps_were_skipped(layout: RunLayout) -> None:
    """A skipped step makes no version: of 20 steps, 4 of them skipped, the last ones sampled under version 15."""
    seal(layout, *(ResolvedGroup(group(v, v, v / 10, v / 10), consumed_step=v) for v in range(16)))
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


def test_totals_survive_a_checkpoint() -> None:
    totals = Totals(steps=3, wall_s=1.5, leases_regranted=2)
    assert Totals(**json.loads(json.dumps(totals.to_json()))) == totals
