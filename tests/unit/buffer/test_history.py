"""What a restart makes of journal and events: nothing is sampled twice, and steps keep their batches."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from log_files import flip_in_record, place_of
from rollout_samples import (
    ManualClock,
    assert_same_group,
    assert_same_prompt,
    assert_same_scored,
    ledger_settings,
    make_group,
    make_ledger,
    make_prefix,
    make_prompt,
    make_record,
    make_routes,
    make_scored,
    make_writer,
)

from launch.view.rollouts import found_groups
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.history import (
    EVENTS,
    START,
    Admitted,
    Began,
    Event,
    History,
    Position,
    RecordedStep,
    Taken,
    Trained,
    delete_old_journals,
    event_paths,
    read_events,
    read_history,
    recorded_steps,
    timeline_of,
    version_after,
)
from rlhpc.buffer.journal import JournalFiles, journal_paths
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.prefixes import PartialIntake
from rlhpc.buffer.rollout_journal import RolloutJournal, open_journal
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.protocol.errors import LedgerError
from rlhpc.protocol.types import Prompt, Verdict


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    layout.rollouts.mkdir()
    return layout


def begin(layout: RunLayout, attempt: int, history: History | None = None, **changes: int) -> RolloutBuffer:
    """A controller's buffer at the start of an attempt."""
    num_rollouts = history.num_rollouts if history is not None else 0
    buffer = RolloutBuffer(make_ledger(ManualClock(), **changes), make_writer(layout.rollouts))
    if history is not None:
        buffer.restore(history, draw())
    buffer.journal = open_journal(layout, "test", attempt, num_rollouts, None)
    buffer.journal.note(Began(0, num_rollouts, goes_on=True))
    return buffer


def begin_with_groups(layout: RunLayout) -> RolloutBuffer:
    """The first attempt, with groups 0 to 3 in all slots."""
    buffer = begin(layout, 0)
    for group_id in range(4):
        buffer.admit(make_prompt(group_id), 0)
    return buffer


def draw() -> Callable[[int | None], Prompt]:
    order = itertools.count()
    return lambda _: make_prompt(next(order))


def journal_of(buffer: RolloutBuffer) -> RolloutJournal:
    assert buffer.journal is not None
    return buffer.journal


def finish(buffer: RolloutBuffer, *group_ids: int) -> None:
    for group_id, index in itertools.product(group_ids, (0, 1)):
        buffer.deliver("g-0", make_scored(group_id, index))


def train(buffer: RolloutBuffer, step: int) -> list[int]:
    groups = buffer.take(2, step)
    assert groups is not None
    buffer.consume(groups, step, trained_version=step, applied=True, metrics={"loss": step / 2})
    buffer.release([group.group_id for group in groups])
    return [group.group_id for group in groups]


def test_a_group_of_a_hard_prompt_comes_back_with_all_its_members(layout: RunLayout) -> None:
    buffer = begin(layout, 0)
    buffer.admit(make_prompt(0), 0, 5)
    buffer.admit(make_prompt(1), 0)
    finish(buffer, 1)
    for index in (0, 3):
        buffer.deliver("g-0", make_scored(0, index))
    journal_of(buffer).commit()
    history = read_history(layout.rollouts, START)
    again = begin(layout, 1, history)
    assert [len(again.ledger.open_record(group_id).members) for group_id in (0, 1)] == [5, 2]
    assert [again.ledger.is_wanted(0, index) for index in range(6)] == [False, True, True, False, True, False]
    assert history.num_tokens == sum(len(member.scored.rollout.token_ids) for member in history.rollouts) > 0
    for index in (1, 2, 4):
        assert not again.is_finished(0)
        again.deliver("g-0", make_scored(0, index))
    assert [len(group.members) for group in again.finished()] == [5, 2]


def test_a_hard_prompt_s_rollouts_whose_admission_is_lost_come_back(layout: RunLayout) -> None:
    buffer = begin(layout, 0)
    buffer.admit(make_prompt(0), 0, 5)
    buffer.deliver("g-0", make_scored(0, 3))
    journal_of(buffer)._files.append(journal_of(buffer)._pending)
    history = read_history(layout.rollouts, START)
    assert history.implied == {0: Admitted(0, 0, 0, size=4)}
    again = begin(layout, 1, history)
    assert [again.ledger.is_wanted(0, index) for index in range(5)] == [True, True, True, False, False]
    again.ledger.hand_back("g-0", 0, (2, 4), (make_prefix(3), make_prefix(7)))  # by whoever was given five, and leaves
    intake = PartialIntake(again.ledger, 10)
    assert [(each.sample_index, each.end) for each in intake.whole((0, index) for index in (2, 4))] == [(2, 3)]
    with pytest.raises(LedgerError, match="which has 4"):
        again.ledger.hand_back("g-0", 0, (-1,))


def test_a_rollout_whose_admission_was_not_written_any_more_is_not_sampled_again(layout: RunLayout) -> None:
    """A commit writes rollouts first; the process is killed, or the disk refuses, before the events."""
    buffer = begin(layout, 0)
    buffer.admit(make_prompt(0), 0)
    journal_of(buffer).commit()
    buffer.admit(make_prompt(1), 3)
    buffer.admit(make_prompt(2), 3)
    buffer.deliver("g-0", make_scored(2, 1))
    journal_of(buffer)._files.append(journal_of(buffer)._pending)

    history = read_history(layout.rollouts, START)
    assert sorted(history.admitted) == [0]
    assert history.implied == {2: Admitted(2, 2, 3, size=2)}
    again = begin(layout, 1, history)
    assert again.ledger.open_groups() == [0, 1, 2]
    assert (again.ledger.is_wanted(2, 0), again.ledger.is_wanted(2, 1)) == (True, False)
    assert [group.admitted_version for group_id in (0, 1, 2) if (group := again.ledger.open_record(group_id))] == [
        0,
        3,
        3,
    ]


def test_a_run_that_is_killed_finds_everything_again_without_a_checkpoint(layout: RunLayout) -> None:
    buffer = begin_with_groups(layout)
    finish(buffer, 0, 1, 3)
    buffer.drop(3, DropReason.ZERO_VARIANCE)
    buffer.deliver("g-0", make_scored(2, 1))
    assert train(buffer, 0) == [0, 1]
    buffer.admit(make_prompt(4), 1)
    journal_of(buffer).commit()

    history = read_history(layout.rollouts, START)
    assert (history.num_rollouts, history.problems, history.lost_beginning) == (7, [], "")
    again = begin(layout, 1, history)
    assert again.ledger.open_groups() == [0, 1, 2, 4]
    assert [group.group_id for group in again.finished()] == [0, 1]
    assert not again.ledger.is_wanted(2, 1)
    assert again.ledger.is_wanted(2, 0)
    (step,) = recorded_steps(history, 0, again.is_finished)
    assert (step.step, step.groups) == (0, (0, 1))
    assert step.trained is not None
    assert step.trained.metrics == {"loss": 0.0}
    batch = again.take_again(step.groups, 0)
    for group in batch:
        assert_same_group(group, make_group(group.group_id))
    again.consume(batch, 0, trained_version=0, applied=True)
    again.segments.seal()
    assert {r.group.group_id: r.drop_reason for r in read_rollouts_directory(layout.rollouts)} == {
        0: None,
        1: None,
        3: DropReason.ZERO_VARIANCE,
    }


def test_groups_that_came_back_are_told_in_order_with_what_became_of_them(layout: RunLayout) -> None:
    buffer = begin_with_groups(layout)
    finish(buffer, 2, 0)
    buffer.drop(2, DropReason.ZERO_VARIANCE)
    buffer.deliver("g-0", make_scored(1, 0, verdict=Verdict.VERIFIER_ERROR))  # killed before it was dropped
    buffer.deliver("g-0", make_scored(3, 0))
    journal_of(buffer).commit()
    again = RolloutBuffer(make_ledger(ManualClock()), make_writer(layout.rollouts))
    restored = again.restore(read_history(layout.rollouts, START), draw())
    assert [(r.group.group_id, r.drop_reason) for r in restored] == [
        (0, None),
        (1, DropReason.VERIFIER_ERROR),
        (2, DropReason.ZERO_VARIANCE),
    ]
    assert again.ledger.open_groups() == [0, 3]


def test_what_a_checkpoint_knows_is_not_read_again(layout: RunLayout, tmp_path: Path) -> None:
    buffer = begin_with_groups(layout)
    finish(buffer, 0, 1, 2)
    train(buffer, 0)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    frozen = buffer.freeze(1)
    state = frozen.write(directory, frozen.seal())
    buffer.deliver("g-0", make_scored(3, 1))
    buffer.admit(make_prompt(4), 1)
    journal_of(buffer).commit()

    position = Position(**state["journal"])
    assert (position.attempt, position.num_rollouts) == (0, 6)
    history = read_history(layout.rollouts, position)
    assert [(r.scored.rollout.group_id, r.scored.rollout.sample_index) for r in history.rollouts] == [(3, 1)]
    assert list(history.admitted) == [4]
    assert history.batches == {}
    ledger = AdmissionLedger.from_state(state["ledger"], **ledger_settings(ManualClock()))
    again = RolloutBuffer(ledger, make_writer(layout.rollouts, state["next_segment_index"]))
    again.load(directory)
    prompts = draw()
    for _ in range(4):
        prompts(None)
    again.restore(history, prompts)
    assert again.ledger.open_groups() == [2, 3, 4]
    assert not again.ledger.is_wanted(3, 1)


def test_a_prompt_that_is_drawn_with_other_tokens_stays_as_it_was_answered(layout: RunLayout) -> None:
    """The chat template writes the date.  Nobody has answered prompt 1, and it is asked as it is today."""
    buffer = begin(layout, 0)
    for prompt_id in (0, 1):
        buffer.admit(make_prompt(prompt_id), 0)
    buffer.deliver("g-0", make_scored(0, 1))
    journal_of(buffer).commit()
    again = RolloutBuffer(make_ledger(ManualClock()), make_writer(layout.rollouts))
    today = (replace(make_prompt(prompt_id), token_ids=np.array([7, 7], np.int32)) for prompt_id in (0, 1))
    again.restore(read_history(layout.rollouts, START), lambda _: next(today))
    assert_same_prompt(again.ledger.group(0).prompt, make_prompt(0))
    assert again.ledger.group(1).prompt.token_ids.tolist() == [7, 7]
    assert not again.ledger.is_wanted(0, 1)
    assert [again.ledger.is_wanted(0, 0), again.ledger.is_wanted(1, 0)] == [True, True]


def test_a_rollout_of_another_prompt_than_was_admitted_is_sampled_again(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = begin(layout, 0)
    buffer.admit(make_prompt(0), 0)
    other = make_scored(0, 0)
    journal_of(buffer).add(replace(other, rollout=replace(other.rollout, prompt_id=5)), make_prompt(5), 0)
    journal_of(buffer).commit()
    history = read_history(layout.rollouts, START)
    again = begin(layout, 1, history)
    assert again.ledger.is_wanted(0, 0)
    assert history.problems == ["rollout 1 answers another prompt than its group has"]
    assert "rollout 1 answers another prompt than its group has: it is sampled again" in caplog.text


def test_prompts_are_drawn_again_by_their_number_unless_it_is_lost(layout: RunLayout) -> None:
    buffer = begin(layout, 0)
    for prompt_id in (0, 4, 7):  # a curriculum has left the others out
        buffer.admit(make_prompt(prompt_id), 0)
    journal_of(buffer).commit()
    history = read_history(layout.rollouts, START)
    del history.admitted[1]
    asked = list[int | None]()

    def draw_again(prompt_id: int | None) -> Prompt:
        asked.append(prompt_id)
        return make_prompt(1 if prompt_id is None else prompt_id)

    RolloutBuffer(make_ledger(ManualClock()), make_writer(layout.rollouts)).restore(history, draw_again)
    assert asked == [0, None, 7]
    assert history.implied[1].prompt == 1


def test_more_groups_come_back_than_there_are_slots_and_none_is_admitted_until_there_is_one(layout: RunLayout) -> None:
    buffer = begin(layout, 0)
    for step in range(3):
        for group_id in (2 * step, 2 * step + 1):
            buffer.admit(make_prompt(group_id), step)
            finish(buffer, group_id)
        train(buffer, step)
    journal_of(buffer).commit()
    again = begin(layout, 1, read_history(layout.rollouts, START), num_slots=4)
    assert again.ledger.open_groups() == list(range(6))
    assert not again.ledger.has_slot


def test_what_a_stale_writer_appends_after_its_successor_began_does_not_count(layout: RunLayout) -> None:
    buffer = begin_with_groups(layout)
    finish(buffer, 0)
    journal_of(buffer).commit()
    successor = begin(layout, 1, read_history(layout.rollouts, START))
    buffer.deliver("g-0", make_scored(1, 1))  # woken up: no fence in this test
    journal_of(buffer).commit()
    successor.deliver("g-0", make_scored(2, 0))
    journal_of(successor).commit()
    history = read_history(layout.rollouts, START)
    found = [(r.sequence, r.scored.rollout.group_id, r.scored.rollout.sample_index) for r in history.rollouts]
    assert found == [(1, 0, 0), (2, 0, 1), (3, 2, 0)]


def test_a_journal_has_no_routes_while_the_group_keeps_them_in_memory(layout: RunLayout) -> None:
    """They are thirty times as long as all else, and every delivery waits for the disk."""
    buffer, group = begin(layout, 0), None
    buffer.admit(make_prompt(0), 0)
    buffer.ledger.grant("g-0", 2)
    for index in range(2):
        group = buffer.deliver("g-0", make_scored(0, index, length=7, routes=make_routes(7)))
    journal_of(buffer).commit()
    assert group is not None
    assert all(member.rollout.routes is not None for member in group.members)
    history = read_history(layout.rollouts, START)
    assert [record.scored.rollout.routes for record in history.rollouts] == [None, None]


def test_batches_of_an_attempt_that_went_another_way_are_void_from_there_on(layout: RunLayout) -> None:
    first, second = begin(layout, 0), open_journal(layout, "test", 1, 0, None)
    for step in range(4):
        journal_of(first).note(Taken(step, (2 * step, 2 * step + 1)))
    journal_of(first).commit()
    second.note(Began(0, 0, goes_on=True))
    second.note(Taken(0, (0, 1)))
    second.note(Taken(1, (2, 5)))
    second.commit()
    history = read_history(layout.rollouts, START)
    assert {step: taken.groups for step, taken in history.batches.items()} == {0: (0, 1), 1: (2, 5)}


def test_how_a_step_went_is_known_though_an_attempt_that_repeated_it_ended_within_it(layout: RunLayout) -> None:
    """Else it is trained at another rate, or applied where it was skipped, and its version is of other weights."""
    went = Trained(1, 1, applied=False, refused="grad_norm", began_s=7.5)
    for attempt, batches in enumerate(([(0, 1), (2, 3)], [(0, 1), (2, 3)], [(0, 1), (2, 5)])):
        journal = open_journal(layout, "test", attempt, 0, None)
        journal.note(Began(0, 0, goes_on=True))
        for step, groups in enumerate(batches):
            journal.note(Taken(step, groups))
            if attempt == 0 or step == 0:
                journal.note(went if step == 1 else Trained(0, 0, applied=True))
        journal.commit()
        history = read_history(layout.rollouts, START)
        assert (1 in history.trained) == (attempt < 2)
        assert attempt == 2 or history.trained[1] == went


def test_an_attempt_that_starts_over_forgets_all_that_was_before(layout: RunLayout) -> None:
    buffer = begin(layout, 0)
    buffer.admit(make_prompt(0), 0)
    finish(buffer, 0)
    journal_of(buffer).commit()
    journal = open_journal(layout, "test", 1, 2, None)
    journal.note(Began(0, 2, goes_on=False))
    journal.commit()
    history = read_history(layout.rollouts, START)
    assert (history.rollouts, history.admitted, history.num_rollouts) == ([], {}, 2)
    assert history.first_attempt == 1
    assert read_history(layout.rollouts, Position(attempt=1, num_events=1, num_rollouts=2)).first_attempt == 1
    assert read_history(layout.rollouts, Position(attempt=0, num_events=0, num_rollouts=0)).first_attempt == 1


def test_steps_are_repeated_up_to_the_first_that_lacks_a_rollout_and_never_use_a_group_twice(layout: RunLayout) -> None:
    history = History(batches={step: Taken(step, (2 * step, 2 * step + 1)) for step in (3, 4, 5, 7)})
    assert [step.step for step in recorded_steps(history, 3, lambda _: True)] == [3, 4, 5]
    assert [step.step for step in recorded_steps(history, 3, lambda group_id: group_id != 9)] == [3]
    assert recorded_steps(history, 2, lambda _: True) == ()
    history.batches[4] = Taken(4, (7, 8))
    assert [step.step for step in recorded_steps(history, 3, lambda _: True)] == [3]


def test_attempts_of_one_timeline_make_every_version_again(layout: RunLayout) -> None:
    """Else what a generator has sampled meanwhile is of weights that this attempt never has."""

    def timeline(attempt: int, *steps: int, **changes: Any) -> int:
        trained = {step: Trained(step, step, True) for step in (3, 4, 5)}
        history = History(**({"trained": trained, "timeline": 1} | changes))
        return timeline_of(history, attempt, 3, [RecordedStep(step, (), None) for step in steps])

    assert timeline(4, 3, 4, 5) == 1
    assert timeline(4, 3, 4, 5, 6) == 1  # the batch of step 6 was chosen: its weights were never published
    assert timeline(4, 3, 4) == 4
    assert timeline(4) == 4  # not repeated
    assert timeline(4, trained={2: Trained(2, 2, True)}) == 1  # the checkpoint has it
    assert timeline(4, 3, 4, 5, problems=["a line is damaged"]) == 4
    assert timeline(4, 3, 4, 5, timeline=-1) == 4


def test_the_timeline_is_that_of_the_last_attempt(layout: RunLayout) -> None:
    def begin_next(attempt: int, *events: Event) -> int:
        journal = open_journal(layout, "test", attempt, 0, None)
        for event in events:
            journal.note(event)
        journal.commit()
        return read_history(layout.rollouts, START).timeline

    assert read_history(layout.rollouts, START).timeline == -1
    assert begin_next(0, Began(0, 0, goes_on=True)) == 0  # of a version that wrote no timelines
    assert begin_next(1, Began(0, 0, True, 0)) == 0
    assert begin_next(2, Began(0, 0, True, 2)) == 2


def test_repeated_steps_lead_to_the_version_that_they_led_to_at_least() -> None:
    def step(number: int, version: int | None, *, applied: bool = True) -> RecordedStep:
        return RecordedStep(number, (), None if version is None else Trained(number, version, applied))

    assert version_after([], 7) == 7
    assert version_after([step(3, 7), step(4, 8)], 7) == 9
    assert version_after([step(3, 7), step(4, 8, applied=False)], 7) == 8
    assert version_after([step(3, 7), step(4, None)], 7) == 8  # whether it was applied was not on disk any more


def two_journals(layout: RunLayout) -> list[Path]:
    """Of two attempts: rollouts 1 to 4 of groups 0 and 1, and 5 and 6 of group 2."""
    buffer = begin_with_groups(layout)
    finish(buffer, 0, 1)
    journal_of(buffer).commit()
    again = begin(layout, 1, read_history(layout.rollouts, START))
    finish(again, 2)
    journal_of(again).commit()
    return journal_paths(layout.rollouts)


def test_a_damaged_file_costs_what_it_held_and_is_named(layout: RunLayout) -> None:
    path, _ = two_journals(layout)
    path.write_bytes(b"x" * 2000)
    history = read_history(layout.rollouts, START)
    assert history.lost_beginning
    assert [problem for problem in history.problems if path.name in problem]
    assert "missing in the run: rollouts 1 to 4" in history.problems
    assert [record.sequence for record in history.rollouts] == [5, 6]


def test_who_reads_rollouts_is_told_of_damage_and_not_of_a_beginning_that_was_deleted(layout: RunLayout) -> None:
    first, second = two_journals(layout)
    first.unlink()
    said: list[str] = []
    assert [found.resolved.group.group_id for found in found_groups(layout.rollouts, said.append)] == [2]
    assert said == []
    second.write_bytes(b"x" * 2000)
    assert list(found_groups(layout.rollouts, said.append)) == []
    assert [second.name in line for line in said] == [True]


def test_files_are_deleted_once_no_checkpoint_needs_them(layout: RunLayout) -> None:
    files = JournalFiles(layout.rollouts, run_name="test", attempt=0, file_bytes=2200)  # of two rollouts
    buffer = begin(layout, 0)
    buffer.journal = RolloutJournal(files, journal_of(buffer)._events, 0)
    for group_id in range(4):
        buffer.admit(make_prompt(group_id), 0)
    finish(buffer, 0, 1, 2)
    buffer.journal.commit()
    assert len(journal_paths(layout.rollouts)) == 3
    assert delete_old_journals(layout.rollouts, Position(0, 0, 3)) == 1  # rollouts 3 and 4 are in one file
    assert [r.sequence for r in read_history(layout.rollouts, Position(0, 0, 3)).rollouts] == [4, 5, 6]
    assert delete_old_journals(layout.rollouts, Position(0, 0, 6)) == 1  # the last one is kept: it may be written to
    assert [path.name for path in journal_paths(layout.rollouts)] == ["journal_000002.log"]


def test_a_batch_that_is_not_whole_cannot_be_taken_again(layout: RunLayout) -> None:
    buffer = begin(layout, 0)
    buffer.admit(make_prompt(0), 0)
    buffer.admit(make_prompt(1), 0)
    finish(buffer, 0)
    with pytest.raises(LedgerError, match="group 1 cannot be taken: it is in flight"):
        buffer.take_again([0, 1], 0)
    assert buffer.ledger.open_groups() == [0, 1]


def test_a_damaged_event_costs_no_rollout(layout: RunLayout) -> None:
    buffer = begin_with_groups(layout)
    journal_of(buffer).commit()
    finish(buffer, 0, 1, 2)
    train(buffer, 0)
    journal_of(buffer).commit()
    (path,) = event_paths(layout.rollouts)
    event = read_events(path).events[3]
    assert isinstance(event, Admitted)
    assert event.group == 1
    first, end = place_of(path, EVENTS, 2)
    flip_in_record(path, EVENTS, 2)
    history = read_history(layout.rollouts, START)
    assert history.problems == [f"{path}: bytes {first} to {end} are damaged"]
    again = begin(layout, 1, history)
    assert [group.group_id for group in again.finished()] == [0, 1, 2]
    assert again.ledger.open_groups() == [0, 1, 2, 3]
    # What a checkpoint knows is counted in events, damaged ones included.
    assert list(read_history(layout.rollouts, Position(0, 4, 6)).admitted) == [3]


def test_what_counts_of_attempts_before_a_checkpoint_is_said_by_the_attempt_that_wrote_it(layout: RunLayout) -> None:
    buffer = begin_with_groups(layout)
    finish(buffer, 0)
    journal_of(buffer).commit()
    successor = begin(layout, 1, read_history(layout.rollouts, START))
    finish(successor, 1)
    position = journal_of(successor).position  # of a checkpoint, after the line that says where the attempt began
    finish(buffer, 2, 3)  # a stale writer, far beyond
    for each in (buffer, successor):
        journal_of(each).commit()
    assert (position.num_events, position.num_rollouts) == (1, 4)
    assert read_history(layout.rollouts, position).rollouts == []


def test_what_a_checkpoint_knows_of_an_attempt_that_started_over_is_not_read_again(layout: RunLayout) -> None:
    journal = open_journal(layout, "test", 1, 2, None)
    journal.note(Began(0, 2, goes_on=False))
    for group_id, index in itertools.product((0, 1), (0, 1)):
        journal.add(make_scored(group_id, index), make_prompt(group_id), 0)
    position = journal.position  # of a checkpoint
    journal.add(make_scored(2, 0), make_prompt(2), 0)
    journal.commit()
    history = read_history(layout.rollouts, position)
    assert [record.sequence for record in history.rollouts] == [7]
    assert not history.lost_beginning


def test_groups_that_come_back_without_their_rollouts_are_sampled_in_turn_and_never_too_stale(
    layout: RunLayout,
) -> None:
    """Six steps went by; then all rollouts are lost.  Sampled at once, the last would be trained five steps old."""
    buffer, bound = begin(layout, 0), make_ledger(ManualClock()).staleness_bound
    for step in range(6):
        for group_id in (2 * step, 2 * step + 1):
            buffer.admit(make_prompt(group_id), step)
            finish(buffer, group_id)
        train(buffer, step)
    journal_of(buffer).commit()
    for path in journal_paths(layout.rollouts):
        path.unlink()

    again = begin(layout, 1, read_history(layout.rollouts, START))
    sampled_at = dict[int, int]()
    for version in range(6):
        again.readmit(version)
        while (lease := again.ledger.grant("g-0", 100)) is not None:
            sampled_at.setdefault(lease.group_id, version)
            assert lease.admitted_version == min(lease.group_id // 2, version)
        finish(again, *sampled_at)
        groups = again.take(2, version)
        assert groups is not None
        assert all(version - group.admitted_version <= bound for group in groups)
        assert all(version - sampled_at[group.group_id] <= bound for group in groups)
        again.consume(groups, version, trained_version=version, applied=True)
        again.release([group.group_id for group in groups])
    journal_of(again).commit()
    anew = read_history(layout.rollouts, START).admitted
    assert {group_id: anew[group_id].version for group_id in (0, 3, 4, 11)} == {0: 0, 3: 0, 4: 1, 11: 4}


def write_long_rollouts(layout: RunLayout, num_groups: int, length: int) -> None:
    """Two members each, a journal file for every four groups."""
    file_bytes = 8 * (13 * length + 700)  # with one rollout more it would be too long
    files = JournalFiles(layout.rollouts, run_name="test", attempt=0, file_bytes=file_bytes)
    members = itertools.product(range(num_groups), range(2))
    files.append(
        [
            make_record(n, make_scored(group_id, index, length=length), 0)
            for n, (group_id, index) in enumerate(members, 1)
        ]
    )
    files.close()


def bytes_of(history: History) -> int:
    rollouts = [record.scored.rollout for record in history.rollouts]
    return sum(
        array.nbytes
        for each in rollouts
        for array in (each.token_ids, each.behaviour_logprobs, each.versions, each.loss_mask)
    )


def test_a_history_holds_no_arrays_in_memory_until_they_are_looked_at(layout: RunLayout) -> None:
    write_long_rollouts(layout, num_groups=40, length=4096)
    read_history(layout.rollouts, START)  # what is imported and made once
    tracemalloc.start()
    try:
        history = read_history(layout.rollouts, START)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    in_all, num_files = bytes_of(history), len(journal_paths(layout.rollouts))
    assert (in_all, num_files) == (80 * 4096 * 13, 10)
    assert held < in_all / 20
    assert peak < 3 * in_all / num_files  # a file at a time

    for path in journal_paths(layout.rollouts):
        path.unlink()  # as a checkpoint does that no longer needs them
    for record in history.rollouts:
        rollout = record.scored.rollout
        assert_same_scored(record.scored, make_scored(rollout.group_id, rollout.sample_index, length=4096))


def test_where_few_files_may_be_open_a_history_leaves_half_of_them(layout: RunLayout) -> None:
    write_long_rollouts(layout, num_groups=40, length=16)
    gc.collect()  # or what other tests have mapped might be unmapped meanwhile
    before = mapped_journals()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(next_descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * next_descriptor + 8, hard))
    try:
        history = read_history(layout.rollouts, START)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (len(history.rollouts), history.problems) == (80, [])
    assert 1 <= mapped_journals() - before <= 5  # of ten


def mapped_journals() -> int:
    return sum("/journal_" in line for line in Path("/proc/self/maps").read_text().splitlines())
