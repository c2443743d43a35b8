"""Random schedules of everything that can happen to a ledger; what it promises is checked after each event."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_samples import ManualClock, make_ledger, make_prompt

from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.config.tables import AdmissionConfig
from rlhpc.protocol.types import SamplingParams

HOLDERS = st.sampled_from(["g-0", "g-1", "g-2"])


class Ring(RuleBasedStateMachine):
    """A ledger, generators that misbehave, and a trainer that prefetches.

    A batch number s is trained at version s; generators serve `live_version`, which trails the trainer; groups of a
    batch are released only after its weights are live.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.delivered: set[tuple[int, int]] = set()
        self.num_admitted = 0
        self.num_batches = 0
        self.trained_version = 0
        self.live_version = 0
        self.unreleased: list[list[int]] = []
        self.admitted_versions: dict[int, int] = {}
        self.dropped: set[int] = set()
        self.taken: set[int] = set()
        self.begun: set[int] = set()  # groups of the next batch that are trained already

    @initialize(
        groups_per_step=st.integers(1, 4),
        group_size=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        window_share=st.floats(0, 1),
    )
    def build(self, groups_per_step: int, group_size: int, max_staleness: int, window_share: float) -> None:
        window = 1 + int(window_share * max_staleness * groups_per_step)
        admission = AdmissionConfig(
            groups_per_step=groups_per_step,
            group_size=group_size,
            max_staleness=max_staleness,
            window_groups=window,
        )
        self.max_staleness = max_staleness
        self.settings = {
            "num_slots": admission.num_slots,
            "window_groups": admission.window,
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            "sampling": lambda _: SamplingParams(max_tokens=8),
            "lease_deadline_s": 10.0,
            "max_attempts": 3,
            "clock": self.clock,
        }
        self.ledger = AdmissionLedger(**self.settings)
        assert self.ledger.staleness_bound == max_staleness

    @rule(count=st.integers(1, 6))
    def admit(self, count: int) -> None:
        for _ in range(count):
            if not self.ledger.has_slot:
                break
            group_id = self.ledger.admit(make_prompt(self.num_admitted), self.live_version)
            assert group_id == self.num_admitted
            self.admitted_versions[group_id] = self.live_version
            self.num_admitted += 1

    @rule(num_slots=st.integers(0, 20))
    def tighten(self, num_slots: int) -> None:
        self.ledger.tighten(num_slots)

    @rule(holder=HOLDERS, credit=st.integers(0, 5))
    def grant(self, holder: str, credit: int) -> None:
        before = self.ledger.outstanding(holder)
        lease = self.ledger.grant(holder, credit)
        if lease is None:
            return
        assert 1 <= len(lease.sample_indices) <= credit
        assert self.ledger.outstanding(holder) == before + len(lease.sample_indices)
        assert not {(lease.group_id, index) for index in lease.sample_indices} & self.delivered
        assert lease.group_id not in self.dropped | self.taken

    @rule(data=st.data(), whole=st.booleans())
    def deliver(self, data: st.DataObject, whole: bool) -> None:
        """Any member of any group ever admitted: new ones, second copies, those of dropped groups."""
        if not self.num_admitted:
            return
        group_id = data.draw(st.integers(max(0, self.num_admitted - 12), self.num_admitted))
        size = self.ledger.group_size
        for index in range(size) if whole else [data.draw(st.integers(0, size - 1))]:
            key = (group_id, index)
            is_wanted = group_id < self.num_admitted and key not in self.delivered and group_id not in self.dropped
            assert self.ledger.deliver(group_id, index) == is_wanted
            if is_wanted:
                self.delivered.add(key)

    @rule(data=st.data(), holder=HOLDERS)
    def hand_back(self, data: st.DataObject, holder: str) -> None:
        group_id = data.draw(st.integers(max(0, self.num_admitted - 12), self.num_admitted))
        self.ledger.hand_back(holder, group_id, range(self.ledger.group_size))

    @rule(data=st.data(), holder=HOLDERS)
    def go_on(self, data: st.DataObject, holder: str) -> None:
        group_id = data.draw(st.integers(max(0, self.num_admitted - 12), self.num_admitted))
        before = self.ledger.outstanding(holder)
        self.ledger.renew(holder, group_id, range(self.ledger.group_size))
        assert self.ledger.outstanding(holder) == before

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.ledger.expire()

    @rule(holder=HOLDERS)
    def generator_dies(self, holder: str) -> None:
        self.ledger.forget_holder(holder)
        assert self.ledger.outstanding(holder) == 0

    @rule()
    def drop_poison(self) -> None:
        for group_id in self.ledger.poisoned():
            self.ledger.drop(group_id, DropReason.POISON)
            self.dropped.add(group_id)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Active sampling: a zero-variance group makes room for another."""
        droppable = sorted(set(range(self.num_admitted)) - self.dropped - self.taken - self.begun)
        if droppable:
            group_id = data.draw(st.sampled_from(droppable))
            self.ledger.drop(group_id, DropReason.ZERO_VARIANCE)
            self.dropped.add(group_id)

    @rule(least=st.integers(1, 4))
    def begin_a_part(self, least: int) -> None:
        """The trainer waits: it begins with what is finished, as far as all others can still be in time."""
        part = self.ledger.part(self.ledger.groups_per_step, least)
        self.ledger.begin(part)
        assert not part or len(part) >= least
        for group_id in part:
            assert self.num_batches - self.admitted_versions[group_id] <= self.max_staleness
            assert group_id not in self.taken | self.dropped | self.begun
            assert {(group_id, i) for i in range(self.ledger.group_size)} <= self.delivered
        self.begun.update(part)
        assert not self.begun or len(self.begun) < self.ledger.groups_per_step

    @rule()
    def take_batch(self) -> None:
        group_ids = self.ledger.take(self.ledger.groups_per_step, step=self.num_batches)
        if group_ids is None:
            return
        for group_id in group_ids:
            staleness = self.num_batches - self.admitted_versions[group_id]
            assert staleness <= self.max_staleness, "the bound on staleness is broken"
            assert group_id not in self.taken | self.dropped
            assert {(group_id, i) for i in range(self.ledger.group_size)} <= self.delivered
        assert self.begun <= set(group_ids), "what is trained is not in the batch"
        self.begun.clear()
        self.taken.update(group_ids)
        self.unreleased.append(group_ids)
        self.num_batches += 1

    @precondition(lambda self: self.trained_version < self.num_batches)
    @rule()
    def train(self) -> None:
        self.trained_version += 1

    @precondition(lambda self: self.live_version < self.trained_version)
    @rule()
    def weights_go_live(self) -> None:
        self.live_version += 1
        self.ledger.release(self.unreleased.pop(0))

    @precondition(lambda self: self.trained_version == self.live_version)
    @rule()
    def restart(self) -> None:
        """From a checkpoint of this moment: prefetched batches come back and are taken again."""
        state = json.loads(json.dumps(self.ledger.state(next_step=self.trained_version)))
        self.ledger = AdmissionLedger.from_state(state, **self.settings)
        self.taken.difference_update(*self.unreleased)
        self.unreleased.clear()
        self.begun.clear()
        self.num_batches = self.trained_version

    @invariant()
    def promises_hold(self) -> None:
        if self.num_admitted == 0:
            return
        self.ledger.conservation()
        counts = self.ledger.counts()
        assert counts["admitted"] - counts["released"] - counts["dropped"] <= self.ledger.num_slots
        assert counts["admitted"] == sum(counts[k] for k in ("in_flight", "finished", "taken", "released", "dropped"))
        assert counts["dropped"] == len(self.dropped)
        waiting = [group for group in self.ledger.groups if group.step is None]
        num_taken = counts["released"] + counts["taken"]
        for rank, due in enumerate(sorted(group.due_after for group in waiting if group.due_after >= 0)):
            batches_before = rank // self.ledger.groups_per_step
            assert num_taken + batches_before * self.ledger.groups_per_step <= due, "a batch has passed too many"
        if counts["in_flight"] == 0 and counts["finished"] >= self.ledger.groups_per_step:
            assert self.ledger.upcoming(self.ledger.groups_per_step) is not None, "the ring is stuck"

    def teardown(self) -> None:
        """Nothing is ever stuck: a generator that delivers and a trainer that trains bring every group to its end."""
        if not self.num_admitted:
            return
        while lease := self.ledger.grant("last", 100):
            for index in lease.sample_indices:
                self.ledger.deliver(lease.group_id, index)
        self.clock.advance(11.0)
        self.ledger.expire()
        while lease := self.ledger.grant("last", 100):
            for index in lease.sample_indices:
                self.ledger.deliver(lease.group_id, index)
        for group_id in self.ledger.poisoned():
            self.ledger.drop(group_id, DropReason.POISON)
        while group_ids := self.ledger.take(max(1, len(self.begun)), step=self.num_batches):
            self.begun.clear()
            self.ledger.release(group_ids)
        counts = self.ledger.counts()
        assert (counts["in_flight"], counts["finished"]) == (0, 0)


class TestRing(Ring.TestCase):
    settings = settings(
        max_examples=150,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def worst_staleness_with_a_straggler(
    admission: AdmissionConfig, straggler: int, drop_every: int, tightened_to: int | None = None
) -> int:
    """The schedule that the bound is about: one group is held back until no batch can be formed without it.

    All others are finished as soon as they are admitted; every drop_every-th of them is dropped and replaced at once.
    Weights are live as soon as a batch is trained, so that as many young groups as possible are admitted.
    """
    ledger = make_ledger(
        ManualClock(),
        num_slots=admission.num_slots,
        window_groups=admission.window,
        groups_per_step=admission.groups_per_step,
        group_size=1,
    )
    if tightened_to is not None:
        ledger.tighten(admission.model_copy(update={"max_staleness": tightened_to}).num_slots)
    admitted_versions: list[int] = []
    worst = 0
    for step in range(12):
        while ledger.has_slot:
            group_id = ledger.admit(make_prompt(len(admitted_versions)), policy_version=step)
            admitted_versions.append(step)
            if group_id == straggler:
                continue
            ledger.deliver(group_id, 0)
            if drop_every and group_id % drop_every == 0:
                ledger.drop(group_id, DropReason.ZERO_VARIANCE)
        batch = ledger.take(admission.groups_per_step, step)
        if batch is None:
            assert ledger.deliver(straggler, 0)
            batch = ledger.take(admission.groups_per_step, step)
        assert batch is not None, "the ring is stuck"
        worst = max(worst, *(step - admitted_versions[group_id] for group_id in batch))
        ledger.release(batch)
    return worst


@pytest.mark.parametrize("groups_per_step", [1, 2, 3, 4])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_a_straggler_reaches_the_bound_and_never_passes_it(groups_per_step, max_staleness):
    for window in range(1, max_staleness * groups_per_step + 2):
        admission = AdmissionConfig(
            groups_per_step=groups_per_step, group_size=2, max_staleness=max_staleness, window_groups=window
        )
        for drop_every in (0, 2, 3):
            reached = [worst_staleness_with_a_straggler(admission, s, drop_every) for s in range(1, 16)]
            assert max(reached) <= max_staleness
            if not drop_every and admission.num_slots > groups_per_step:  # else no batch can be formed without it
                assert max(reached) == max_staleness


@pytest.mark.parametrize("groups_per_step", [1, 2, 3])
@pytest.mark.parametrize("tightened_to", [0, 1, 2])
def test_a_tightened_ledger_keeps_the_bound_that_it_was_tightened_to(groups_per_step, tightened_to):
    for window in range(1, tightened_to * groups_per_step + 2):
        admission = AdmissionConfig(
            groups_per_step=groups_per_step, group_size=2, max_staleness=4, window_groups=window
        )
        reached = [worst_staleness_with_a_straggler(admission, s, 0, tightened_to) for s in range(1, 16)]
        assert max(reached) <= tightened_to


def test_a_tightened_ledger_admits_nothing_until_enough_is_released_and_then_as_before():
    ledger = make_ledger(ManualClock(), num_slots=6, window_groups=1, group_size=1)
    for index in range(6):
        ledger.deliver(ledger.admit(make_prompt(index), 0), 0)
    ledger.tighten(2)
    assert not ledger.has_slot
    ledger.release(ledger.take(4, 0))
    assert (ledger.has_slot, ledger.counts()["free_slots"]) == (False, 0)  # a batch is two, and two are there
    ledger.tighten(6)
    assert ledger.counts()["free_slots"] == 4


@pytest.mark.parametrize(("groups_per_step", "max_staleness"), [(1, 0), (4, 0), (4, 1), (3, 2), (8, 4)])
def test_the_number_of_slots_is_the_largest_that_keeps_the_bound(groups_per_step, max_staleness):
    admission = AdmissionConfig(groups_per_step=groups_per_step, group_size=2, max_staleness=max_staleness)
    for extra, expected in ((0, max_staleness), (1, max_staleness + 1)):
        ledger = AdmissionLedger(
            num_slots=admission.num_slots + extra,
            window_groups=admission.window,
            groups_per_step=groups_per_step,
            group_size=2,
            sampling=lambda _: SamplingParams(max_tokens=8),
            lease_deadline_s=10.0,
            max_attempts=3,
            clock=ManualClock(),
        )
        assert ledger.staleness_bound == expected
