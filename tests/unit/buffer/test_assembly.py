from __future__ import annotations

import pytest
from rollout_samples import assert_same_group, make_group, make_scored

from rlhpc.buffer.assembly import GroupAssembler
from rlhpc.errors import LedgerError


def test_a_group_is_complete_with_its_last_member_and_ordered_by_sample_index():
    assembler = GroupAssembler(3)
    assert assembler.add(make_scored(6, 2), admitted_version=3) is None
    assert assembler.add(make_scored(6, 0), admitted_version=3) is None
    assert assembler.partial() == {6: 2}
    group = assembler.add(make_scored(6, 1), admitted_version=3)
    assert_same_group(group, make_group(6, 3))
    assert assembler.partial() == {}


def test_a_second_copy_changes_nothing_before_or_after_completion():
    assembler = GroupAssembler(2)
    assembler.add(make_scored(0, 0, detail="first"), 0)
    assert assembler.add(make_scored(0, 0, detail="second"), 0) is None
    group = assembler.add(make_scored(0, 1), 0)
    assert group.members[0].detail == "first"
    assert assembler.add(make_scored(0, 1), 0) is None
    assert assembler.partial() == {}


def test_forgetting_a_group_returns_what_had_arrived_of_it():
    assembler = GroupAssembler(3)
    for index in (2, 0):
        assembler.add(make_scored(5, index), 0)
    assert [member.rollout.sample_index for member in assembler.members(5)] == [0, 2]
    assert [member.rollout.sample_index for member in assembler.forget(5)] == [0, 2]
    assert assembler.forget(5) == ()
    assert assembler.partial() == {}


def test_a_member_that_cannot_be_of_the_group_is_refused():
    assembler = GroupAssembler(2)
    with pytest.raises(LedgerError, match="has 2 members"):
        assembler.add(make_scored(0, 2), 0)
    assert assembler.partial() == {}
