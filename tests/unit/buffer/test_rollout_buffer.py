from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rollout_samples import (
    ManualClock,
    assert_same_group,
    ledger_settings,
    make_group,
    make_ledger,
    make_prompt,
    make_scored,
    make_writer,
)

from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.segments import (
    read_rollouts_directory,
    read_segment,
    segment_paths,
    set_aside_lost_segments,
)
from rlhpc.protocol.errors import CheckpointError, LedgerError
from rlhpc.protocol.types import FinishReason, Verdict


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    return tmp_path / "rollouts"


@pytest.fixture
def buffer(rollouts: Path) -> RolloutBuffer:
    return RolloutBuffer(make_ledger(ManualClock()), make_writer(rollouts))


def admit(buffer: RolloutBuffer, *group_ids: int) -> None:
    for group_id in group_ids:
        assert buffer.admit(make_prompt(group_id), group_id // 2) == group_id


def deliver(buffer: RolloutBuffer, *group_ids: int) -> None:
    for group_id in group_ids:
        assert buffer.deliver("g-0", make_scored(group_id, 1)) is None
        assert_same_group(buffer.deliver("g-0", make_scored(group_id, 0)), make_group(group_id))


def restore(directory: Path, rollouts: Path, state: dict) -> RolloutBuffer:
    state = json.loads(json.dumps(state))
    ledger = AdmissionLedger.from_state(state["ledger"], **ledger_settings(ManualClock()))
    set_aside_lost_segments(rollouts, state["next_segment_index"], attempt=1)
    buffer = RolloutBuffer(ledger, make_writer(rollouts, state["next_segment_index"]))
    buffer.load(directory)
    return buffer


def test_a_group_goes_from_its_members_to_the_record_of_its_step(buffer, rollouts):
    admit(buffer, 0, 1, 2)
    deliver(buffer, 0, 1)
    batch = buffer.take(2, step=5)
    assert [group.group_id for group in batch] == [0, 1]
    assert buffer.take(2, step=6) is None
    buffer.consume(batch, step=5, trained_version=5, applied=True)
    buffer.release([0, 1])
    buffer.segments.seal()
    recorded = list(read_rollouts_directory(rollouts))
    assert [(r.group.group_id, r.consumed_step, r.drop_reason) for r in recorded] == [(0, 5, None), (1, 5, None)]
    assert_same_group(recorded[1].group, make_group(1))
    assert buffer.ledger.counts()["free_slots"] == 3


def test_of_two_copies_the_first_counts_whatever_the_second_holds(buffer):
    admit(buffer, 0)
    buffer.deliver("g-0", make_scored(0, 0, detail="first"))
    assert buffer.deliver("g-1", make_scored(0, 0, detail="second")) is None
    group = buffer.deliver("g-0", make_scored(0, 1))
    assert group.members[0].detail == "first"
    assert buffer.deliver("g-1", make_scored(0, 0, detail="third")) is None
    assert len(buffer.drop(0, DropReason.CANCELLED).members) == 2  # it was complete


def test_a_member_that_cannot_be_of_the_group_changes_nothing(buffer):
    admit(buffer, 0, 1)
    assert buffer.deliver("g-0", make_scored(0, 2)) is None  # its groups have two members
    stranger = replace(make_scored(0, 0), rollout=replace(make_scored(1, 0).rollout, group_id=0))
    with pytest.raises(LedgerError, match="sample 0 of group 0 answers another prompt, 1"):
        buffer.deliver("g-0", stranger)
    assert buffer.ledger.is_wanted(0, 0)
    deliver(buffer, 0)


def test_a_late_copy_of_a_rollout_is_ignored_at_every_stage(buffer):
    admit(buffer, 0, 1)
    deliver(buffer, 0, 1)
    assert buffer.deliver("g-1", make_scored(0, 0)) is None
    batch = buffer.take(2, step=0)
    assert buffer.deliver("g-1", make_scored(0, 0)) is None
    buffer.consume(batch, step=0, trained_version=0, applied=True)
    buffer.release([0, 1])
    assert buffer.deliver("g-1", make_scored(0, 0)) is None
    assert buffer.freeze(next_step=1).groups == ()


def test_a_dropped_group_is_recorded_with_the_members_that_had_arrived(buffer, rollouts):
    admit(buffer, 0, 1, 2)
    deliver(buffer, 0)
    buffer.deliver("g-0", make_scored(1, 1, verdict=Verdict.VERIFIER_ERROR))
    buffer.ledger.grant("g-0", 2)
    buffer.ledger.forget_holder("g-0")
    for group_id, reason in ((0, DropReason.ZERO_VARIANCE), (1, DropReason.VERIFIER_ERROR), (2, DropReason.CANCELLED)):
        buffer.drop(group_id, reason)
    buffer.segments.seal()
    recorded = list(read_rollouts_directory(rollouts))
    assert [(r.drop_reason, len(r.group.members), r.attempts) for r in recorded] == [
        ("zero_variance", 2, 1),
        ("verifier_error", 1, 2),
        ("cancelled", 0, 1),
    ]
    assert recorded[2].group.prompt.reference == "#### 2"
    assert buffer.ledger.counts()["free_slots"] == 4


def test_an_aborted_rollout_is_never_delivered(buffer):
    admit(buffer, 0)
    with pytest.raises(LedgerError, match="g-0 delivered the aborted rollout 0:1"):
        buffer.deliver("g-0", make_scored(0, 1, finish_reason=FinishReason.ABORT))
    assert buffer.ledger.grant("g-0", 2).sample_indices == (0, 1)


def test_a_rollout_whose_rows_cannot_be_is_never_delivered(buffer):
    admit(buffer, 0)
    with pytest.raises(LedgerError, match=r"g-0 delivered rollout 0:1: its rows begin at tokens \[0, 9\] of 4"):
        buffer.deliver("g-0", make_scored(0, 1, length=4, row_starts=(9,)))
    assert buffer.ledger.grant("g-0", 2).sample_indices == (0, 1)


def test_groups_are_consumed_once_for_the_step_they_were_taken_for_and_before_their_release(buffer):
    admit(buffer, 0, 1)
    deliver(buffer, 0, 1)
    batch = buffer.take(2, step=0)
    with pytest.raises(LedgerError, match="before they are consumed"):
        buffer.release([0])
    with pytest.raises(LedgerError, match="not taken for step 1"):
        buffer.consume(batch, step=1, trained_version=1, applied=True)
    buffer.consume(batch, step=0, trained_version=0, applied=True)
    with pytest.raises(LedgerError, match="consumed already"):
        buffer.consume(batch, step=0, trained_version=0, applied=True)
    assert buffer.segments.num_pending == 2


def test_a_checkpoint_carries_finished_prefetched_and_half_assembled_groups(buffer, rollouts, tmp_path):
    admit(buffer, 0, 1, 2, 3)
    deliver(buffer, 0, 1)
    batch = buffer.take(2, step=0)
    buffer.consume(batch, step=0, trained_version=0, applied=True)  # trained; its weights are not live yet
    deliver(buffer, 2)
    buffer.deliver("g-0", make_scored(3, 1))
    frozen = buffer.freeze(next_step=1)
    state = frozen.write(tmp_path, frozen.seal())
    assert [path.name for path in tmp_path.glob("*.h5")] == ["buffered.h5"]

    restored = restore(tmp_path, rollouts, state)
    assert restored.ledger.counts()["released"] == 2
    assert restored.ledger.counts()["in_flight"] == 1
    lease = restored.ledger.grant("g-9", 4)
    assert (lease.group_id, lease.sample_indices) == (3, (0,))
    assert_same_group(restored.deliver("g-9", make_scored(3, 0)), make_group(3))
    for mine, theirs in zip(restored.take(2, step=1), (make_group(2), make_group(3)), strict=True):
        assert_same_group(mine, theirs)
    assert [r.consumed_step for r in read_rollouts_directory(rollouts)] == [0, 0]


def test_a_prefetched_batch_is_trained_once_over_a_restart(buffer, rollouts, tmp_path):
    admit(buffer, 0, 1)
    deliver(buffer, 0, 1)
    prefetched = buffer.take(2, step=1)
    frozen = buffer.freeze(next_step=1)
    state = frozen.write(tmp_path, frozen.seal())
    buffer.consume(prefetched, step=1, trained_version=1, applied=True)  # the timeline that will be lost
    buffer.release([0, 1])
    buffer.segments.seal()

    restored = restore(tmp_path, rollouts, state)
    batch = restored.take(2, step=1)
    assert [group.group_id for group in batch] == [0, 1]
    restored.consume(batch, step=1, trained_version=1, applied=True)
    restored.release([0, 1])
    restored.segments.seal()
    restored.ledger.conservation()
    assert [r.group.group_id for r in read_rollouts_directory(rollouts)] == [0, 1]
    assert [r.group.group_id for r in read_rollouts_directory(rollouts / "lost_attempt_1")] == [0, 1]


def test_what_is_resolved_while_a_checkpoint_is_written_belongs_to_the_time_after_it(buffer, rollouts, tmp_path):
    admit(buffer, 0, 1, 2)
    deliver(buffer, 0, 1)
    buffer.drop(0, DropReason.CANCELLED)
    frozen = buffer.freeze(next_step=0)
    deliver(buffer, 2)
    buffer.drop(1, DropReason.CANCELLED)
    buffer.segments.tick()
    state = frozen.write(tmp_path, frozen.seal())
    buffer.segments.seal_all()
    assert [[r.group.group_id for r in read_segment(path)] for path in segment_paths(rollouts)] == [[0], [1]]

    restored = restore(tmp_path, rollouts, state)
    assert [r.group.group_id for r in read_rollouts_directory(rollouts)] == [0]
    assert_same_group(restored.take(1, step=0)[0], make_group(1))
    assert restored.ledger.grant("g-9", 4).group_id == 2


def test_a_checkpoint_is_refused_while_a_trained_batch_is_not_recorded(buffer, tmp_path):
    admit(buffer, 0, 1)
    deliver(buffer, 0, 1)
    buffer.take(2, step=0)
    with pytest.raises(LedgerError, match="not consumed"):
        buffer.freeze(next_step=1)


def test_buffered_rollouts_that_contradict_the_ledger_are_refused(buffer, rollouts, tmp_path):
    (tmp_path / "earlier").mkdir()
    admit(buffer, 0, 1)
    deliver(buffer, 0)
    buffer.freeze(next_step=0).write(tmp_path / "earlier", 0)
    deliver(buffer, 1)
    state = buffer.freeze(next_step=0).write(tmp_path, 0)
    (tmp_path / "earlier" / "buffered.h5").replace(tmp_path / "buffered.h5")
    with pytest.raises(CheckpointError, match=r"holds 2 rollouts and the ledger counts 4"):
        restore(tmp_path, rollouts, state)


def test_a_rollout_that_a_checkpoint_holds_twice_is_refused(buffer, rollouts, tmp_path):
    admit(buffer, 0)
    deliver(buffer, 0)
    frozen = buffer.freeze(next_step=0)
    state = replace(frozen, groups=frozen.groups * 2).write(tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"holds 4 rollouts and the ledger counts 2.*held twice"):
        restore(tmp_path, rollouts, state)


def test_damaged_buffered_rollouts_are_refused(buffer, rollouts, tmp_path):
    admit(buffer, 0)
    deliver(buffer, 0)
    state = buffer.freeze(next_step=0).write(tmp_path, 0)
    path = tmp_path / "buffered.h5"
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[-1] ^= 1
    path.write_bytes(data.tobytes())
    with pytest.raises(CheckpointError, match="checksum"):
        restore(tmp_path, rollouts, state)
