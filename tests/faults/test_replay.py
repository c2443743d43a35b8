"""A run is killed between two checkpoints: it trains the same batches again, and samples nothing again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import Taken, event_paths, read_events
from rlhpc.buffer.journal import read_journals
from tests.ring.ring_rewards import GATE, GATE_AFTER, open_gate
from tests.ring.rollouts_on_disk import (
    assert_full_batches_trained_once,
    group_steps,
    num_sampled_again,
    rollouts_on_disk,
)
from tests.ring.run_kit import GONE_S, Lab, Run, make_lab

pytestmark = pytest.mark.ring
SOAK = (pytest.mark.long, pytest.mark.soak)
NUM_STEPS, KILL_AT = 24, 8
HELD_STEPS = 20  # at most so many are done before the kill


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def batches_of(layout: RunLayout, attempt: int) -> dict[int, list[int]]:
    """The groups of each step that an attempt has taken."""
    events = read_events(event_paths(layout.rollouts)[attempt]).events.values()
    return {event.step: sorted(event.groups) for event in events if isinstance(event, Taken)}


def assert_nothing_was_sampled_again(layout: RunLayout, num_before: int) -> None:
    """Each rollout that was journaled before the kill is the one that was trained on or dropped in the end."""
    first, *_ = read_journals(layout.rollouts)
    final = {(row.group_id, row.sample_index): row for row in rollouts_on_disk(layout.rollouts)}
    assert len(first.records) == num_before > 0
    for record in first.records:
        rollout = record.scored.rollout
        row = final[rollout.group_id, rollout.sample_index]
        assert (row.token_ids.tolist(), row.versions.tolist(), row.reward, row.admitted_version) == (
            rollout.token_ids.tolist(),
            rollout.versions.tolist(),
            record.scored.reward,
            record.admitted_version,
        )


@pytest.mark.parametrize(
    ("victims", "every_steps"),
    [
        (("controller", "trainer", "generator"), 1000),  # no checkpoint was ever written
        pytest.param(("controller",), 5, marks=pytest.mark.long),
        pytest.param(("trainer",), 1000, marks=SOAK),
        pytest.param(("generator",), 1000, marks=SOAK),
    ],
)
def test_a_run_that_is_killed_between_checkpoints_goes_on_from_its_journal(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: tuple[str, ...], every_steps: int
) -> None:
    name, gate = f"replayed-{'-'.join(victims)}", tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setenv(GATE_AFTER, str(HELD_STEPS * 16))
    run_file = lab.run_file(
        name,
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:gated_parity"},
        rewards={"timeout_s": 600.0},
        checkpoint={"every_steps": every_steps},
    )
    layout = lab.layout(name)
    with Run(run_file, layout) as run:
        run.wait_for_step(KILL_AT)
        run.kill_roles(*victims)
        open_gate(gate)
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        story = run.story()
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
    if victims == ("generator",):
        return
    before, after = batches_of(layout, 0), batches_of(layout, 1)
    assert len(before) >= KILL_AT
    for step, group_ids in group_steps_of(layout).items():
        assert before.get(step, group_ids) == group_ids
        assert after.get(step, group_ids) == group_ids
    resumed_at = json.loads(layout.attempts.read_text().splitlines()[1])["resume_step"] or 0
    # A checkpoint may have been completed between the look at the step and the kill: then there is nothing to repeat.
    is_repeated = any(step >= resumed_at for step in before)
    assert is_repeated or every_steps < KILL_AT
    assert ("trained again, from the journal: " in story) == is_repeated
    assert "went differently" not in story
    assert_nothing_was_sampled_again(layout, len(next(read_journals(layout.rollouts)).records))


@pytest.mark.long
@pytest.mark.parametrize(
    "victims",
    [
        ("controller",),
        ("launcher",),
        *(pytest.param((role,), marks=pytest.mark.soak) for role in ("trainer", "generator")),
    ],
)
def test_forty_steps_since_the_start_are_trained_again_and_nothing_of_them_is_sampled_again(
    lab: Lab, tmp_path: Path, victims: tuple[str, ...]
) -> None:
    """The first checkpoint would have been that of step 90; the launcher takes everything along."""
    name = f"forty-{victims[0]}"
    run_file = lab.run_file(
        name,
        run={"num_steps": 100},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        checkpoint={"every_steps": 90},
    )
    layout = lab.layout(name)
    with Run(run_file, layout) as run:
        run.wait_for_step(40)
        if victims == ("launcher",):
            run.process.kill()
            run.process.wait()
            run.assert_nothing_is_left(within_s=GONE_S)
        else:
            run.role(victims[0]).kill()
        journals = Path(shutil.copytree(layout.rollouts, tmp_path / "rollouts"))
        if victims != ("launcher",):
            assert run.finish() == 0, run.story()
    if victims == ("launcher",):
        with Run(run_file, layout, "--resume") as run:
            assert run.finish() == 0, run.story()
    assert_full_batches_trained_once(layout.rollouts, 100, 4, 4)
    num_again, num_before = num_sampled_again(layout.rollouts, journals)
    assert num_before >= 40 * 16
    assert num_again == 0


@pytest.mark.long
def test_a_resume_by_other_processes_repeats_the_same_steps(lab: Lab, tmp_path: Path) -> None:
    run_file = lab.run_file("rearranged", run={"num_steps": 100}, checkpoint={"every_steps": 90})
    layout = lab.layout("rearranged")
    with Run(run_file, layout) as run:
        run.wait_for_step(KILL_AT)
        run.process.kill()
        run.process.wait()
        run.assert_nothing_is_left(within_s=GONE_S)
        journals = Path(shutil.copytree(layout.rollouts, tmp_path / "rollouts"))
    others = ["generation.num_replicas=2", "generation.max_num_seqs=8", "rewards.num_replicas=2", "trainer.num_ranks=2"]
    with Run(run_file, layout, "--resume", *others, "trainer.token_budget=128") as run:
        assert run.finish() == 0, run.story()
        story = run.story()
    assert_full_batches_trained_once(layout.rollouts, 100, 4, 4)
    assert "trained again, from the journal: " in story
    assert "went differently" not in story
    num_again, num_before = num_sampled_again(layout.rollouts, journals)
    assert num_before >= KILL_AT * 16
    assert num_again == 0


def group_steps_of(layout: RunLayout) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for group_id, step in sorted(group_steps(layout.rollouts)):
        steps.setdefault(step, []).append(group_id)
    return steps


@pytest.mark.long
def test_a_damaged_journal_costs_what_it_held_and_the_run_goes_on(lab: Lab) -> None:
    run_file = lab.run_file(
        "damaged",
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        checkpoint={"every_steps": 1000},
    )
    layout = lab.layout("damaged")
    with Run(run_file, layout) as run:
        run.wait_for_step(KILL_AT)
        run.process.kill()
        run.process.wait()
    content = next(read_journals(layout.rollouts))
    first, end = content.log.places[len(content.log.places) // 2]
    with content.log.path.open("r+b") as file:
        file.seek((first + end) // 2)
        file.write(b"\xff" * 64)
    with Run(run_file, layout, "--resume") as run:
        assert run.finish() == 0, run.story()
        story = run.story()
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
    assert "journal_000000.log: bytes" in story
    assert "its rollouts are sampled again" in story
