"""A prompt that kills whoever samples it is dropped, over crashes of the run too, and takes no innocent with it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_samples import ManualClock, make_ledger, make_prompt

from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import ANY_COMPANY, LostLeaseFile, LostLeases, Suspicion
from rlhpc.protocol.contracts import RecordName

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
    path = tmp_path_factory.mktemp("strikes") / "strikes.jsonl"
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
    ("strikes", "max_attempts", "company"),
    [
        (1, 5, ANY_COMPANY),
        (2, 5, 8),
        (3, 5, 1),
        (4, 5, 1),
        (1, 4, ANY_COMPANY),
        (2, 4, 1),
        (1, 3, 1),
        (1, 2, 1),
        (1, 1, 1),
    ],
)
def test_company_shrinks_with_strikes_and_the_last_two_attempts_are_alone(
    strikes: int, max_attempts: int, company: int
) -> None:
    assert Suspicion("p", strikes, together=64).company(max_attempts) == company


def test_who_completes_is_forgiven_and_a_prompt_that_is_drawn_again_keeps_its_strikes(tmp_path: Path) -> None:
    file = LostLeaseFile(tmp_path / "strikes.jsonl")

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
    path = tmp_path / "strikes.jsonl"
    file, book = LostLeaseFile(path), LostLeases()
    book.record_death([(make_prompt(0), 1)])
    file.append(book)
    path.write_bytes(path.read_bytes() + b'\n{"prompt": "0af')
    book.record_death([(make_prompt(1), 1)])
    file.append(book)
    assert [suspicion.prompt for suspicion in file.read()] == ["0", "1"]


def test_strikes_that_the_disk_refuses_are_written_with_the_next(tmp_path: Path) -> None:
    file, book = LostLeaseFile(tmp_path / "away" / "strikes.jsonl"), LostLeases()
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
