"""Slots, leases and batches; a prompt that kills whoever samples it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_samples import ManualClock, ledger_settings, make_ledger, make_prefix, make_prompt

from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import ANY_COMPANY, LostLeaseFile, LostLeases, Suspicion
from rlhpc.protocol.contracts import RecordName
from rlhpc.protocol.errors import CheckpointError, LedgerError
from rlhpc.protocol.types import SamplingParams


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ledger(clock: ManualClock) -> AdmissionLedger:
    return make_ledger(clock)


def admit(ledger: AdmissionLedger, count: int, version: int = 0) -> list[int]:
    return [ledger.admit(make_prompt(index), version) for index in range(count)]


def finish(ledger: AdmissionLedger, *group_ids: int) -> None:
    for group_id in group_ids:
        for index in range(ledger.group_size):
            assert ledger.deliver(group_id, index)


def test_no_group_is_admitted_without_a_slot(ledger):
    admit(ledger, 4)
    assert not ledger.has_slot
    with pytest.raises(LedgerError, match="no free slot"):
        ledger.admit(make_prompt(9), 0)
    assert ledger.counts()["admitted"] == 4


def test_a_slot_stays_taken_until_the_weights_are_live(ledger):
    admit(ledger, 4)
    finish(ledger, 0, 1)
    assert not ledger.has_slot
    assert ledger.take(2, step=0) == [0, 1]
    assert not ledger.has_slot
    ledger.release([0, 1])
    assert ledger.counts()["free_slots"] == 2


def test_a_group_is_granted_once_and_oldest_first(ledger):
    admit(ledger, 2)
    leases = [ledger.grant("g-0", 10) for _ in range(3)]
    assert [lease and lease.group_id for lease in leases] == [0, 1, None]
    assert leases[0].sample_indices == (0, 1)
    assert leases[0].attempt == 0
    assert ledger.outstanding("g-0") == 4


def test_a_lease_never_exceeds_the_credit_so_a_group_is_split(ledger):
    admit(ledger, 1)
    assert ledger.grant("g-0", 0) is None
    first, second = ledger.grant("g-0", 1), ledger.grant("g-1", 5)
    assert (first.sample_indices, second.sample_indices) == ((0,), (1,))
    assert (ledger.outstanding("g-0"), ledger.outstanding("g-1")) == (1, 1)


def test_a_second_copy_is_not_wanted(ledger):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    assert ledger.deliver(0, 1)
    assert not ledger.deliver(0, 1)
    assert ledger.outstanding("g-0") == 1


def test_an_overdue_lease_is_granted_again_before_fresh_groups(ledger, clock):
    admit(ledger, 1)
    ledger.grant("slow", 2)
    clock.advance(59.0)
    assert ledger.expire() == []
    admit(ledger, 1)
    clock.advance(1.0)
    assert ledger.expire() == [(0, "slow")]
    lease = ledger.grant("g-1", 2)
    assert (lease.group_id, lease.attempt) == (0, 1)


def test_a_generator_that_lost_its_lease_may_still_be_the_first_to_deliver(ledger, clock):
    admit(ledger, 1)
    ledger.grant("slow", 2)
    clock.advance(60.0)
    ledger.expire()
    ledger.grant("fast", 2)
    assert ledger.deliver(0, 0)
    assert ledger.outstanding("fast") == 1
    assert not ledger.deliver(0, 0)


def test_the_deadline_of_an_old_lease_does_not_touch_a_newer_one_of_the_same_holder(ledger, clock):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    clock.advance(30.0)
    ledger.hand_back("g-0", 0, [0, 1])
    ledger.grant("g-0", 2)
    clock.advance(30.0)
    assert ledger.expire() == []
    assert ledger.outstanding("g-0") == 2


def test_everything_a_dead_generator_held_is_grantable_again(ledger):
    admit(ledger, 2)
    ledger.grant("dead", 2)
    ledger.grant("dead", 2)
    ledger.deliver(0, 0)
    assert ledger.forget_holder("dead") == [0, 1]
    assert ledger.outstanding("dead") == 0
    assert [ledger.grant(holder, 2).sample_indices for holder in ("g-1", "g-2")] == [(1,), (0, 1)]
    assert ledger.forget_holder("never heard of") == []


def test_a_lease_is_as_long_again_for_the_members_that_its_holder_goes_on_with(ledger, clock):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    clock.advance(50.0)
    ledger.renew("g-0", 0, [1])
    ledger.renew("g-1", 0, [0])  # who does not hold it changes nothing
    clock.advance(50.0)
    assert ledger.expire() == [(0, "g-0")]
    assert ledger.group(0).free_indices == [0]
    clock.advance(11.0)
    assert ledger.expire() == [(0, "g-0")]  # it has stopped going on
    assert ledger.group(0).free_indices == [0, 1]


def test_a_lease_that_is_renewed_all_the_time_takes_no_more_memory_and_expires_when_that_ends(ledger, clock):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    for _ in range(1000):
        clock.advance(1.0)
        ledger.renew("g-0", 0, [0, 1])
        assert ledger.expire() == []
    assert ledger._deadlines.num_entries == 1
    clock.advance(59.0)
    assert ledger.expire() == []
    clock.advance(1.0)
    assert ledger.expire() == [(0, "g-0")]
    assert ledger._deadlines.num_entries == 0


def test_what_a_holder_has_shown_of_a_rollout_survives_its_death(ledger):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    ledger.renew("g-0", 0, [0, 1], [make_prefix(3), None])
    ledger.renew("g-0", 0, [0], [None])
    ledger.forget_holder("g-0")
    lease = ledger.grant("g-1", 2)
    assert [None if prefix is None else len(prefix.token_ids) for prefix in lease.prefixes] == [3, None]
    ledger.deliver(0, 0)  # it was not dead after all
    ledger.forget_holder("g-1")
    assert ledger.grant("g-2", 2).prefixes == ()


def test_progress_of_groups_and_members_that_are_not_there_is_refused_or_ignored(ledger):
    admit(ledger, 1)
    ledger.renew("g-0", 7, [0])
    with pytest.raises(LedgerError, match="which has 2"):
        ledger.renew("g-0", 0, [2])
    with pytest.raises(LedgerError, match="1 members of group 0 with 2 prefixes"):
        ledger.renew("g-0", 0, [0], [None, None])


def test_a_prefix_handed_back_travels_with_the_next_lease(ledger):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    prefix = make_prefix(3)
    ledger.hand_back("g-0", 0, [1], [prefix])
    lease = ledger.grant("g-1", 2)
    assert lease.sample_indices == (1,)
    assert lease.prefixes == (prefix,)
    ledger.forget_holder("g-1")
    assert ledger.grant("g-2", 1).prefixes == (prefix,)


def test_the_longest_prefix_is_kept(ledger):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    long, short = make_prefix(5), make_prefix(2)
    ledger.hand_back("g-0", 0, [0], [long])
    ledger.grant("g-1", 1)
    ledger.hand_back("g-1", 0, [0], [short])
    assert ledger.grant("g-2", 1).prefixes == (long,)


def test_what_another_generator_holds_cannot_be_handed_back(ledger):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    ledger.hand_back("g-1", 0, [0, 1], [make_prefix(4), None])
    assert ledger.outstanding("g-0") == 2
    assert ledger.grant("g-2", 2) is None


def test_a_hand_back_that_contradicts_the_group_is_refused(ledger):
    admit(ledger, 1)
    ledger.grant("g-0", 2)
    with pytest.raises(LedgerError, match="prefixes"):
        ledger.hand_back("g-0", 0, [0, 1], [None])
    with pytest.raises(LedgerError, match="has 2"):
        ledger.hand_back("g-0", 0, [-1])
    assert ledger.outstanding("g-0") == 2


def test_a_group_whose_leases_are_lost_max_attempts_times_is_poison(ledger):
    admit(ledger, 2)
    for attempt in range(3):
        assert ledger.poisoned() == []
        assert ledger.grant(f"g-{attempt}", 2).group_id == 0
        ledger.forget_holder(f"g-{attempt}")
    assert ledger.poisoned() == [0]
    assert ledger.grant("g-9", 2).group_id == 1  # the poison is granted no more
    assert ledger.group(0).attempts == 4
    ledger.drop(0, DropReason.POISON)
    assert ledger.poisoned() == []


def test_splitting_a_group_over_leases_does_not_make_it_poison(ledger):
    admit(ledger, 1)
    for _ in range(2):
        ledger.grant("g-0", 1)
        ledger.grant("g-0", 1)
        ledger.forget_holder("g-0")
    assert ledger.poisoned() == []


def test_a_hand_back_counts_as_no_attempt_and_an_expiry_does(ledger, clock):
    admit(ledger, 1)
    for _ in range(5):
        ledger.grant("g-0", 2)
        ledger.hand_back("g-0", 0, [0, 1])
    assert ledger.poisoned() == []
    for _ in range(3):
        ledger.grant("g-0", 2)
        clock.advance(61.0)
        ledger.expire()
    assert ledger.poisoned() == [0]


def test_a_batch_waits_for_groups_inside_the_window(clock):
    ledger = make_ledger(clock, num_slots=6, window_groups=3)
    admit(ledger, 6)
    finish(ledger, 1, 3, 4)
    assert ledger.upcoming(1) == [1]
    assert ledger.take(2, step=0) is None  # group 0 is the anchor: 0 + 3 is outside
    finish(ledger, 2)
    assert ledger.take(2, step=0) == [1, 2]
    finish(ledger, 0)
    assert ledger.upcoming(3) == [0, 3, 4]  # the anchor moved to 5


def test_a_dropped_anchor_moves_the_window_on(clock):
    ledger = make_ledger(clock, num_slots=6, window_groups=2)
    admit(ledger, 6)
    finish(ledger, 2, 3)
    assert ledger.upcoming(1) is None
    ledger.drop(0, DropReason.POISON)
    assert (ledger.upcoming(1), ledger.upcoming(2)) == ([2], None)
    ledger.drop(1, DropReason.POISON)
    assert ledger.take(2, step=0) == [2, 3]


def test_a_window_of_one_takes_groups_in_strict_order(clock):
    ledger = make_ledger(clock, window_groups=1)
    admit(ledger, 4)
    finish(ledger, 1, 2, 3)
    assert ledger.upcoming(1) is None
    finish(ledger, 0)
    assert ledger.take(2, step=0) == [0, 1]


def test_what_is_taken_can_be_neither_dropped_nor_released_twice(ledger):
    admit(ledger, 2)
    finish(ledger, 0, 1)
    ledger.take(2, step=7)
    with pytest.raises(LedgerError, match="taken for step 7"):
        ledger.drop(0, DropReason.ZERO_VARIANCE)
    with pytest.raises(LedgerError, match="twice"):
        ledger.release([0, 0])
    ledger.release([0])
    with pytest.raises(LedgerError, match="released or dropped"):
        ledger.release([1, 0])
    assert ledger.counts()["taken"] == 1
    with pytest.raises(LedgerError, match="ever admitted"):
        ledger.group(99)


def test_a_group_in_flight_cannot_be_released(ledger):
    admit(ledger, 1)
    with pytest.raises(LedgerError, match="in flight"):
        ledger.release([0])


def test_slots_that_cannot_hold_a_batch_are_refused(clock):
    with pytest.raises(LedgerError, match="never hold"):
        make_ledger(clock, num_slots=1, groups_per_step=2)


def test_the_age_of_the_oldest_group_in_flight_is_known(ledger, clock):
    assert ledger.oldest_in_flight_age_s == 0.0
    admit(ledger, 1)
    clock.advance(5.0)
    admit(ledger, 1)
    assert ledger.oldest_in_flight_age_s == 5.0
    finish(ledger, 0)
    assert ledger.oldest_in_flight_age_s == 0.0


def test_leases_in_flight_are_granted_again_after_a_restart_under_the_same_ids(ledger, clock):
    admit(ledger, 3, version=4)
    ledger.grant("g-0", 2)
    ledger.deliver(0, 1)
    ledger.grant("g-1", 2)
    ledger.drop(2, DropReason.ZERO_VARIANCE)
    restored = restore(ledger, clock, next_step=0)
    assert restored.counts()["dropped_zero_variance"] == 1
    leases = [restored.grant("g-9", 2) for _ in range(3)]
    assert [lease and (lease.group_id, lease.sample_indices) for lease in leases] == [(0, (0,)), (1, (0, 1)), None]
    assert leases[0].admitted_version == 4
    assert leases[0].prompt.reference == "#### 0"
    assert leases[0].prompt.token_ids.dtype == np.int32
    assert restored.admit(make_prompt(9), 5) == 3


def test_a_prefetched_batch_is_taken_again_after_a_restart_and_a_trained_one_is_not(clock):
    ledger = make_ledger(clock, num_slots=6)
    admit(ledger, 6)
    finish(ledger, 0, 1, 2, 3)
    assert ledger.take(2, step=0) == [0, 1]
    assert ledger.take(2, step=1) == [2, 3]
    restored = restore(ledger, clock, next_step=1, num_slots=6)
    assert restored.counts()["released"] == 2
    assert restored.take(2, step=1) == [2, 3]


def test_lost_attempts_outlive_a_restart(ledger, clock):
    admit(ledger, 1)
    for _ in range(3):
        ledger.grant("g-0", 2)
        ledger.forget_holder("g-0")
    assert restore(ledger, clock, next_step=0).poisoned() == [0]


def test_a_smaller_number_of_slots_after_a_restart_only_holds_admission_back(ledger, clock):
    admit(ledger, 4)
    restored = restore(ledger, clock, next_step=0, num_slots=2)
    assert not restored.has_slot
    assert restored.counts()["free_slots"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"group_size": 3}, {"next_group_id": 7}, {"num_released": None}, {"dropped": {"because": 1}},
        {"groups": [{"group_id": 0}]}, {"groups": "none"},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(ledger, clock, damage):
    admit(ledger, 2)
    with pytest.raises(CheckpointError):
        AdmissionLedger.from_state(ledger.state(0) | damage, **ledger_settings(clock))


def restore(ledger: AdmissionLedger, clock: ManualClock, next_step: int, **changes: object) -> AdmissionLedger:
    text = json.dumps(ledger.state(next_step))
    return AdmissionLedger.from_state(json.loads(text), **ledger_settings(clock, **changes))


def test_a_prompt_of_a_dataset_with_a_limit_of_its_own_is_leased_with_it(clock):
    ledger = make_ledger(clock, sampling=lambda prompt_id: SamplingParams(5 if prompt_id % 2 else 8))
    for prompt_id in range(2):
        ledger.admit(make_prompt(prompt_id), 0)
    assert [ledger.grant("g-0", 2).sampling.max_tokens for _ in range(2)] == [8, 5]


def test_what_is_leased_and_delivered_leaves_nothing_behind_before_its_deadline(clock):
    """A lease's deadline is minutes away, and thousands of groups pass in that time."""
    ledger = make_ledger(clock, num_slots=8, groups_per_step=8)
    most = 0
    for group_id in range(2000):
        ledger.admit(make_prompt(group_id), 0)
        ledger.grant("g-0", 2)
        finish(ledger, group_id)
        ledger.drop(group_id, DropReason.ZERO_VARIANCE)
        most = max(most, ledger._deadlines.num_entries)
    assert most < 100
    book = ledger
    assert (len(book._deadlines), book._held, book._returned, book._returned_ids) == (0, {}, {}, [])


def test_a_group_out_of_attempts_is_granted_again_once_the_member_that_was_has_arrived(ledger):
    admit(ledger, 1)
    for _ in range(3):
        ledger.grant("g-0", 1)
        ledger.forget_holder("g-0")
    assert (ledger.poisoned(), ledger.grant("g-1", 2)) == ([0], None)
    ledger.deliver(0, 0)  # by the first holder, which was not dead
    assert ledger.poisoned() == []
    assert ledger.grant("g-1", 2).sample_indices == (1,)


def test_the_oldest_group_that_came_back_is_granted_first(clock):
    ledger = make_ledger(clock, num_slots=6, group_size=1)
    admit(ledger, 6)
    for holder in "abcdef":
        ledger.grant(holder, 1)
    for holder in "dbfa":
        ledger.hand_back(holder, "abcdef".index(holder), [0])
    assert [ledger.grant("g", 1).group_id for _ in range(4)] == [0, 1, 3, 5]


# -------------------------------------------------------------------- A prompt that kills whoever samples it is dropped

NUM_PROMPTS = 40


class Ring:
    """Generators that die when they hold a culprit, a ledger that grants to them, and crashes of the whole run."""

    def __init__(self, path: Path, chance: random.Random, culprits: set[int], **changes: Any) -> None:
        self.file, self.chance, self.culprits = LostLeaseFile(path), chance, culprits
        self.settings = {"num_slots": 16, "window_groups": 16, "groups_per_step": 1, "group_size": 2} | changes
        self.holders: dict[str, dict[tuple[int, int], None]] = {}
        self.finished: set[int] = set()  # prompts
        self.dropped: list[int] = []  # prompts
        self.num_deaths = 0
        self.start()

    def start(self, state: dict[str, Any] | None = None, num_holders: int = 3) -> None:
        self.book = LostLeases(self.file.read())
        clock, more = ManualClock(), {"lost_leases": self.book}
        self.ledger = make_ledger(clock, **self.settings, **more)
        if state is not None:
            self.ledger._restore(state)
        self.holders = {f"g-{n}": {} for n in range(num_holders)}

    def admit(self) -> None:
        there = {group.prompt.prompt_id for group in self.ledger.groups} | self.finished | set(self.dropped)
        for prompt_id in range(NUM_PROMPTS):
            if prompt_id not in there and self.ledger.has_slot:
                self.ledger.admit(make_prompt(prompt_id), 0)

    def grant(self, capacity: int) -> None:
        names = list(self.holders)
        self.chance.shuffle(names)
        for name in names:
            while credit := capacity - len(self.holders[name]):
                lease = self.ledger.grant(name, credit)
                if lease is None:
                    break
                for index in lease.sample_indices:
                    self.holders[name][lease.group_id, index] = None

    def is_doomed(self, name: str) -> bool:
        return any(self.prompt(group_id) in self.culprits for group_id, _ in self.holders[name])

    def prompt(self, group_id: int) -> int:
        return self.ledger.group(group_id).prompt.prompt_id

    def happen(self) -> None:
        """A generator finishes a sample, or dies of one."""
        name = self.chance.choice([name for name, held in self.holders.items() if held])
        if self.is_doomed(name) and self.chance.random() < 0.5:
            self.holders[name].clear()
            self.ledger.forget_holder(name)
            self.num_deaths += 1
            self.file.append(self.book)
        else:
            innocent = [key for key in self.holders[name] if self.prompt(key[0]) not in self.culprits]
            if innocent:
                self.deliver(name, *self.chance.choice(innocent))
        for group_id in self.ledger.poisoned():
            self.dropped.append(self.prompt(group_id))
            self.ledger.drop(group_id, DropReason.POISON)
            for held in self.holders.values():  # CancelGroup
                for key in [key for key in held if key[0] == group_id]:
                    del held[key]

    def deliver(self, name: str, group_id: int, index: int) -> None:
        del self.holders[name][group_id, index]
        assert self.ledger.deliver(group_id, index)
        if self.ledger.group(group_id).is_finished:
            self.finished.add(self.prompt(group_id))
            self.ledger.take(1, 0)
            for group in [group for group in self.ledger.groups if group.step is not None]:
                self.ledger.release([group.group_id])
        self.file.append(self.book)

    @property
    def is_over(self) -> bool:
        return len(self.finished) + len(self.dropped) == NUM_PROMPTS


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    num_culprits=st.integers(1, 3),
    num_holders=st.integers(1, 4),
    capacity=st.integers(4, 24),
    max_attempts=st.integers(2, 6),
    crash_share=st.sampled_from([0.0, 0.02]),
)
def test_culprits_are_dropped_after_max_attempts_and_no_innocent_ever_is(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    num_culprits: int,
    num_holders: int,
    capacity: int,
    max_attempts: int,
    crash_share: float,
) -> None:
    chance = random.Random(seed)
    culprits = set(chance.sample(range(NUM_PROMPTS), num_culprits))
    path = tmp_path_factory.mktemp("lost_leases") / "lost_leases.jsonl"
    ring = Ring(path, chance, culprits, max_attempts=max_attempts)
    ring.start(num_holders=num_holders)
    for _ in range(20_000):
        ring.admit()
        ring.grant(capacity)
        if ring.is_over:
            break
        ring.happen()
        ring.ledger.conservation()
        if chance.random() < crash_share:  # from the beginning, as without a checkpoint, or from this very moment
            state = json.loads(json.dumps(ring.ledger.state(0))) if chance.random() < 0.5 else None
            ring.start(state, num_holders)
    assert ring.is_over, "somebody starves"
    assert sorted(ring.dropped) == sorted(culprits)
    # A group of two may be with two generators, of which each dies.
    assert ring.num_deaths <= num_culprits * 2 * max_attempts


def test_a_suspect_waits_until_a_busy_generator_is_empty_and_then_has_it_to_itself() -> None:
    known = [Suspicion("9", 3, 4)]
    ledger = make_ledger(ManualClock(), num_slots=8, group_size=1, max_attempts=5, lost_leases=LostLeases(known))
    for prompt_id in (0, 1):
        ledger.admit(make_prompt(prompt_id), 0)
    assert [ledger.grant("g-0", 4).group_id for _ in range(2)] == [0, 1]
    for prompt_id in (9, 2, 3):  # groups 2, 3, 4
        ledger.admit(make_prompt(prompt_id), 0)
    assert ledger.grant("g-0", 4) is None  # it is kept free
    assert ledger.grant("g-1", 4).group_id == 2  # who is empty may have it at once
    assert ledger.grant("g-1", 4) is None  # and nothing else
    assert ledger.grant("g-0", 4).group_id == 3  # now there is no need to keep anybody free
    ledger.deliver(2, 0)
    assert ledger.grant("g-1", 4).group_id == 4


def test_what_a_suspect_has_lost_goes_to_nobody_who_has_its_other_member_in_company() -> None:
    ledger = make_ledger(ManualClock(), num_slots=8, group_size=2, max_attempts=2)
    for prompt_id in (0, 1):
        ledger.admit(make_prompt(prompt_id), 0)
        for name in ("g-0", "g-1"):
            assert ledger.grant(name, 1).group_id == prompt_id
    ledger.forget_holder("g-0")
    assert ledger.grant("g-1", 1) is None, "if it died of the one, the other would be out of attempts"
    assert ledger.grant("g-2", 2).group_id == 0
    assert ledger.grant("g-2", 1) is None


def test_a_death_of_many_is_taken_for_a_nodes_and_slows_nobody_down() -> None:
    ledger = make_ledger(ManualClock(), num_slots=8, group_size=1, max_attempts=5)
    for prompt_id in range(8):
        ledger.admit(make_prompt(prompt_id), 0)
        ledger.grant("g-0", 1)
    ledger.forget_holder("g-0")
    granted = [ledger.grant("g-1", 1) for _ in range(8)]
    assert all(granted)
    assert not ledger.is_quarantining


@pytest.mark.parametrize(
    ("lost_leases", "max_attempts", "company"),
    [
        (1, 5, ANY_COMPANY), (2, 5, 8), (3, 5, 1), (4, 5, 1), (1, 4, ANY_COMPANY), (2, 4, 1), (1, 3, 1), (1, 2, 1),
        (1, 1, 1),
    ],
)  # fmt: skip
def test_company_shrinks_with_strikes_and_the_last_two_attempts_are_alone(
    lost_leases: int, max_attempts: int, company: int
) -> None:
    assert Suspicion("p", lost_leases, together=64).company(max_attempts) == company


def test_who_completes_is_forgiven_and_a_prompt_that_is_drawn_again_keeps_its_strikes(tmp_path: Path) -> None:
    file = LostLeaseFile(tmp_path / "lost_leases.jsonl")

    def record_of(prompt_id: int) -> RecordName:
        return RecordName(str(prompt_id % 10), f"questions.jsonl:{prompt_id % 10 + 1}")

    book = LostLeases(file.read(), record_of)
    ledger = make_ledger(ManualClock(), group_size=1, max_attempts=3, lost_leases=book)
    for prompt_id in (0, 1):
        ledger.admit(make_prompt(prompt_id), 0)
        ledger.grant("g-0", 1)
    ledger.forget_holder("g-0")
    file.append(book)
    assert ledger.grant("g-1", 1).group_id == 0
    ledger.deliver(0, 0)
    file.append(book)

    again = LostLeases(file.read(), record_of)
    assert again.of(make_prompt(0)) is None
    found = again.of(make_prompt(71))  # the same record in another epoch
    assert found == Suspicion("1", 1, 2, source="questions.jsonl:2", why="g-0 died or fell silent")
    assert found.text == (
        "record 1 (questions.jsonl:2): 1 generator died sampling it, the last: g-0 died or fell silent"
    )


def test_records_that_are_equal_in_every_token_are_told_apart() -> None:
    """All prompts of an agent's dataset have the same tokens, and so have those of a game that a seed begins."""
    book = LostLeases()
    ledger = make_ledger(ManualClock(), group_size=1, max_attempts=1, lost_leases=book)
    for prompt_id in (0, 1):
        ledger.admit(replace(make_prompt(5), prompt_id=prompt_id), 0)
    ledger.grant("g-0", 1)
    ledger.forget_holder("g-0")
    assert ledger.poisoned() == [0]
    assert ledger.grant("g-1", 1).group_id == 1


def test_deaths_of_reward_workers_are_counted_apart_and_cost_no_company() -> None:
    """They say nothing about generators; who is judged is cleared of them, who is only sampled is not."""
    book, limit = LostLeases(), 3
    for _ in range(limit - 1):
        book.record_worker_death(make_prompt(0), "worker died: signal SIGSEGV")
    ledger = make_ledger(ManualClock(), group_size=1, max_attempts=limit, lost_leases=book)
    assert ledger.admit(make_prompt(0), 0) == 0
    assert not ledger.is_quarantining
    assert ledger.grant("g-0", 1).group_id == 0
    ledger.deliver(0, 0)
    book.record_worker_death(make_prompt(0), "worker died: signal SIGSEGV")
    assert ledger.admit(make_prompt(0), 0) == 1
    assert ledger.poisoned() == [1]
    assert [each.text for each in book.lift()] == [
        "record 0: 3 reward workers died judging it, the last: worker died: signal SIGSEGV"
    ]
    assert book.all == []


def test_a_poisonous_prompt_is_dropped_at_once_by_a_later_attempt() -> None:
    book = LostLeases([Suspicion("0", 3, 1)])
    ledger = make_ledger(ManualClock(), group_size=2, max_attempts=3, lost_leases=book)
    ledger.admit(make_prompt(0), 0)
    assert ledger.poisoned() == [0]
    assert ledger.grant("g-0", 2) is None


def test_a_line_that_a_crash_has_cut_off_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "lost_leases.jsonl"
    file, book = LostLeaseFile(path), LostLeases()
    book.record_death([(make_prompt(0), 1)])
    file.append(book)
    path.write_bytes(path.read_bytes() + b'\n{"prompt": "0af')
    book.record_death([(make_prompt(1), 1)])
    file.append(book)
    assert [suspicion.prompt for suspicion in file.read()] == ["0", "1"]


def test_strikes_that_the_disk_refuses_are_written_with_the_next(tmp_path: Path) -> None:
    file, book = LostLeaseFile(tmp_path / "away" / "lost_leases.jsonl"), LostLeases()
    book.record_death([(make_prompt(0), 1)])
    file.append(book)
    (tmp_path / "away").mkdir()
    book.record_death([(make_prompt(1), 1)])
    file.append(book)
    assert len(file.read()) == 2
    assert book.unwritten == []


def test_members_of_one_group_that_die_with_different_generators_at_once_are_struck_once_each() -> None:
    """A node fails that half of the fleet is on: nobody is to blame."""
    ledger: AdmissionLedger = make_ledger(ManualClock(), group_size=6, max_attempts=3)
    ledger.admit(make_prompt(0), 0)
    for n in range(6):
        ledger.grant(f"g-{n}", 1)
    for n in range(6):
        ledger.forget_holder(f"g-{n}")
    assert ledger.poisoned() == []
