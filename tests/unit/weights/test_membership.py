from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlhpc.protocol.errors import CheckpointError
from rlhpc.weights.choice import Membership


def of_two() -> Membership:
    membership = Membership()
    membership.hello("b", 2, "b1")
    membership.hello("a", 1, "a1")
    return membership


def test_an_epoch_holds_everyone_by_name_with_their_ranks() -> None:
    membership = of_two()
    assert membership.needs_new_epoch
    group = membership.next_group("gloo", "tcp://here:1")
    assert (group.epoch, group.transport, group.address) == (1, "gloo", "tcp://here:1")
    assert (group.members, group.ranks_per_member, group.world_size) == (("a", "b"), (1, 2), 4)
    assert not membership.needs_new_epoch
    assert membership.is_whole


def test_nobody_makes_no_epoch() -> None:
    membership = Membership()
    assert not membership.needs_new_epoch
    with pytest.raises(ValueError, match="no generator is alive"):
        membership.next_group("gloo")


def test_a_late_joiner_waits_for_the_next_epoch() -> None:
    membership = of_two()
    first = membership.next_group("gloo")
    membership.hello("c", 1, "c1")
    assert membership.needs_new_epoch
    assert not membership.acknowledged("c", first.epoch, 5)
    assert membership.waiting_for(5) == {"a", "b"}
    assert membership.next_group("gloo").members == ("a", "b", "c")


def test_a_dead_member_is_neither_waited_for_nor_in_the_next_epoch() -> None:
    membership = of_two()
    group = membership.next_group("gloo")
    membership.acknowledged("a", group.epoch, 3)
    assert membership.waiting_for(3) == {"b"}
    membership.lost("b")
    assert membership.waiting_for(3) == frozenset()
    assert not membership.is_whole
    assert membership.needs_new_epoch
    assert membership.next_group("gloo").members == ("a",)


def test_a_member_that_comes_back_starts_from_nothing() -> None:
    membership = of_two()
    group = membership.next_group("gloo")
    membership.acknowledged("a", group.epoch, 3)
    membership.lost("a")
    membership.hello("a", 1, "a1")
    assert membership.live_members(0) == frozenset()
    assert not membership.acknowledged("a", group.epoch, 3)  # it is a stranger to this epoch
    assert membership.needs_new_epoch
    assert membership.next_group("gloo").members == ("a", "b")


def test_a_restarted_member_breaks_the_epoch() -> None:
    membership = of_two()
    group = membership.next_group("gloo")
    membership.hello("a", 1, "a2")
    assert membership.needs_new_epoch
    assert not membership.acknowledged("a", group.epoch, 0)


def test_the_same_hello_twice_changes_nothing() -> None:
    membership = of_two()
    group = membership.next_group("gloo")
    membership.acknowledged("a", group.epoch, 3)
    membership.hello("a", 1, "a1")
    assert not membership.needs_new_epoch
    assert membership.live_members(3) == {"a"}


def test_a_member_that_failed_tries_again_in_the_next_epoch_and_serves_what_it_served() -> None:
    membership = of_two()
    group = membership.next_group("gloo")
    membership.acknowledged("a", group.epoch, 3)
    membership.acknowledged("b", group.epoch, 3)
    membership.failed("b", group.epoch)
    assert membership.waiting_for(4) == {"a"}
    assert membership.live_members(3) == {"a", "b"}
    assert membership.needs_new_epoch
    assert membership.candidates == {"a", "b"}
    assert membership.next_group("gloo").members == ("a", "b")
    membership.failed("b", group.epoch)  # a late word about an epoch that is over
    assert not membership.needs_new_epoch


def test_acknowledgements_of_older_epochs_do_not_count() -> None:
    membership = of_two()
    old = membership.next_group("gloo")
    membership.next_group("gloo")
    assert not membership.acknowledged("a", old.epoch, 4)
    assert membership.live_members(4) == frozenset()


def test_a_version_served_counts_for_older_ones_and_in_later_epochs() -> None:
    membership = of_two()
    group = membership.next_group("gloo")
    assert membership.acknowledged("a", group.epoch, 4)
    membership.next_group("gloo")
    assert membership.live_members(3) == {"a"}
    assert membership.waiting_for(4) == {"b"}


def test_epochs_are_counted_on_after_a_restart() -> None:
    membership = of_two()
    membership.next_group("gloo")
    membership.next_group("gloo")
    restarted = Membership()
    restarted.load_state(membership.state())
    restarted.hello("a", 1, "a1")
    assert restarted.next_group("gloo").epoch == 3


@pytest.mark.parametrize("state", [{}, {"last_epoch": "3"}, {"last_epoch": -1}])
def test_a_damaged_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="last_epoch"):
        Membership().load_state(state)


def test_a_member_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_weight_ranks=0"):
        Membership().hello("a", 0, "a1")


NAMES = st.sampled_from(["a", "b", "c"])


class MembershipLaws(RuleBasedStateMachine):
    """Against a model: who is alive, who is in the epoch since it was formed, what each has acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership()
        self.alive: dict[str, int] = {}
        self.in_epoch: set[str] = set()
        self.versions: dict[str, int] = {}
        self.epochs: list[int] = [0]

    @rule(name=NAMES, incarnation=st.integers(0, 2))
    def hello(self, name: str, incarnation: int) -> None:
        self.membership.hello(name, 1, str(incarnation))
        if self.alive.get(name) != incarnation:
            self.alive[name] = incarnation
            self.in_epoch.discard(name)
            self.versions.pop(name, None)

    @rule(name=NAMES)
    def lost(self, name: str) -> None:
        self.membership.lost(name)
        self.alive.pop(name, None)
        self.in_epoch.discard(name)
        self.versions.pop(name, None)

    @rule()
    def form(self) -> None:
        if self.alive:
            group = self.membership.next_group("gloo")
            assert group.epoch > self.epochs[-1]
            assert set(group.members) == set(self.alive)
            self.epochs.append(group.epoch)
            self.in_epoch = set(self.alive)
            assert not self.membership.needs_new_epoch

    @rule(name=NAMES, version=st.integers(0, 5), age=st.integers(0, 1))
    def acknowledge(self, name: str, version: int, age: int) -> None:
        epoch = self.epochs[-1 - age] if len(self.epochs) > age else -1
        counts = self.membership.acknowledged(name, epoch, version)
        assert counts == (age == 0 and epoch > 0 and name in self.in_epoch)
        if counts:
            self.versions[name] = version

    @invariant()
    def agrees_with_the_model(self) -> None:
        for version in range(6):
            serving = {name for name, served in self.versions.items() if served >= version}
            assert self.membership.live_members(version) == serving
            assert self.membership.waiting_for(version) == self.in_epoch - serving
            assert (not self.membership.waiting_for(version)) == (self.in_epoch <= serving)
        assert self.membership.candidates == set(self.alive)


TestMembershipLaws = MembershipLaws.TestCase
TestMembershipLaws.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
