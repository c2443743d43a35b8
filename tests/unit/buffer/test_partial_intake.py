"""Whatever becomes of reports on their way: a prefix is a beginning of one draft, and what it lacks comes again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from partial_samples import is_beginning_of, make_draft, part_of, piece_of
from rollout_samples import ManualClock, make_ledger, make_prompt, make_scored
from test_rollout_buffer import make_writer

from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.prefixes import PartialIntake, PartialRollout, Receipt
from rlhpc.protocol.types import Prefix, SamplingParams

MAX_TOKENS, ADMITTED, NEWEST = 200, 4, 6


class Door:
    """A buffer with groups 0 and 1, of two members each, granted to g-0 and g-1."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        ledger = make_ledger(self.clock, sampling=lambda _: SamplingParams(max_tokens=MAX_TOKENS), max_attempts=1000)
        self.buffer = RolloutBuffer(ledger, make_writer(directory))
        for group_id in range(2):
            self.buffer.admit(make_prompt(group_id), ADMITTED)
            self.buffer.ledger.grant(f"g-{group_id}", 2)
        self.intake = PartialIntake(self.buffer.ledger, MAX_TOKENS)

    def report(self, piece: PartialRollout, holder: str = "g-0") -> tuple[int, int, int]:
        """Number of pieces that were (kept, wanted whole, refused)."""
        receipt = self.intake.receive(holder, [piece], NEWEST)
        return len(receipt.kept), len(receipt.wanted), len(receipt.refused)

    def prefix(self, group_id: int = 0, index: int = 0) -> Prefix | None:
        record = self.buffer.ledger.open_record(group_id)
        assert record is not None
        return record.members[index].prefix


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


DRAFT = make_draft(0, 120)


def test_the_next_holder_gets_what_the_dead_one_had_reported(door: Door) -> None:
    assert door.report(piece_of(DRAFT, 0, 50)) == (1, 0, 0)
    assert door.report(piece_of(DRAFT, 50, 80)) == (1, 0, 0)
    door.buffer.ledger.forget_holder("g-0")
    lease = door.buffer.ledger.grant("g-2", 2)
    assert lease is not None
    first, second = lease.prefixes
    assert second is None
    assert first is not None
    assert len(first.token_ids) == 80
    assert is_beginning_of(first, DRAFT)


def test_who_goes_on_with_a_rollout_whose_lease_is_over_has_it_again(door: Door) -> None:
    """The lease expired, or the controller that had granted it is gone."""
    door.report(piece_of(DRAFT, 0, 50))
    door.buffer.ledger.forget_holder("g-0")
    assert door.report(piece_of(DRAFT, 50, 80)) == (1, 0, 0)
    assert door.buffer.ledger.outstanding("g-0") == 1
    assert door.report(piece_of(DRAFT, 0, 90), "g-2") == (0, 0, 0)  # too late: it has a holder
    lease = door.buffer.ledger.grant("g-2", 2)
    assert lease is not None
    assert lease.sample_indices == (1,)
    assert door.buffer.ledger.grant("g-2", 2) is None


def test_nobody_has_what_cannot_be_or_is_not_wanted(door: Door) -> None:
    door.buffer.ledger.forget_holder("g-0")
    odd = PartialRollout(0, 0, 7, 0, 0, part_of(DRAFT, 0, 50))  # of another prompt
    assert door.report(odd) == (0, 0, 1)
    assert door.buffer.ledger.outstanding("g-0") == 0
    door.buffer.drop(1, DropReason.POISON)
    pieces = [piece_of(DRAFT, 0, 10, member=member) for member in ((1, 0), (1, 1), (2, 0))]
    assert door.intake.receive("g-1", pieces, NEWEST) == Receipt(unwanted=[1])  # 2 is still to be admitted


def test_a_piece_that_was_lost_leaves_no_hole_and_the_whole_is_asked_for(door: Door) -> None:
    door.report(piece_of(DRAFT, 0, 50))
    assert door.report(piece_of(DRAFT, 60, 80)) == (0, 1, 0)
    assert door.report(piece_of(DRAFT, 0, 50)) == (1, 0, 0)
    assert door.report(piece_of(DRAFT, 0, 100)) == (1, 0, 0)
    prefix = door.prefix()
    assert prefix is not None
    assert len(prefix.token_ids) == 100
    assert is_beginning_of(prefix, DRAFT)


def test_nothing_is_put_together_of_two_drafts(door: Door) -> None:
    door.report(piece_of(DRAFT, 0, 50))
    door.buffer.ledger.forget_holder("g-0")
    door.buffer.ledger.grant("g-2", 2)
    other = make_draft(1, 120, part_of(DRAFT, 0, 50))
    assert door.report(piece_of(other, 50, 80), "g-2") == (1, 0, 0)
    assert door.report(piece_of(DRAFT, 50, 80), "g-0") == (0, 0, 0)  # it wakes, and holds nothing
    door.buffer.ledger.forget_holder("g-2")
    door.buffer.ledger.grant("g-0", 2)  # which still has its own draft, and goes on with it
    assert door.report(piece_of(DRAFT, 80, 90), "g-0") == (0, 1, 0)
    assert door.report(piece_of(DRAFT, 0, 95), "g-0") == (1, 0, 0)
    prefix = door.prefix()
    assert prefix is not None
    assert is_beginning_of(prefix, DRAFT)


def test_what_is_no_longer_wanted_is_ignored(door: Door) -> None:
    door.buffer.deliver("g-0", make_scored(0, 0))
    assert door.report(piece_of(DRAFT, 0, 50)) == (0, 0, 0)
    assert door.report(piece_of(DRAFT, 0, 50, member=(9, 0))) == (0, 0, 0)
    assert door.report(piece_of(DRAFT, 0, 50, member=(1, 0)), "g-0") == (0, 0, 0)
    assert door.intake.all() == []


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (piece_of(DRAFT, 0, 50, member=(0, 2)), "the group has 2"),
        (PartialRollout(0, 0, 3, 0, 0, part_of(DRAFT, 0, 50)), "it continues prompt 3, not 0"),
        (piece_of(make_draft(1, 300), 0, 201), "201 tokens, more than the 200"),
        (PartialRollout(0, 0, 0, 0, 0, Prefix(*(DRAFT.token_ids, DRAFT.behaviour_logprobs, DRAFT.versions - 1))), "3"),
        (PartialRollout(0, 0, 0, 0, 0, Prefix(*(DRAFT.token_ids, DRAFT.behaviour_logprobs, DRAFT.versions + 1))), "7"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(door: Door, piece: PartialRollout, why: str) -> None:
    receipt = door.intake.receive("g-0", [piece, piece_of(DRAFT, 0, 9, member=(0, 1))], NEWEST)
    (text,) = receipt.refused
    assert why in text
    assert [kept.sample_index for kept in receipt.kept] == [1]
    assert door.prefix() is None


def test_reports_renew_leases_though_they_bring_no_tokens(door: Door) -> None:
    door.clock.advance(50.0)
    assert door.report(piece_of(DRAFT, 0, 0)) == (0, 0, 0)
    door.clock.advance(50.0)
    assert len(door.buffer.ledger.expire()) == 2  # the other member of group 0, and group 1
    record = door.buffer.ledger.open_record(0)
    assert record is not None
    assert record.free_indices == [1]


def test_an_attempt_takes_up_what_is_unfinished_as_far_as_it_makes_those_versions_again(door: Door) -> None:
    door.buffer.ledger.forget_holder("g-0")
    door.buffer.deliver("g-1", make_scored(1, 0))
    known = {
        (0, 0): piece_of(DRAFT, 0, 120),
        (0, 1): PartialRollout(0, 1, 8, 0, 0, DRAFT),  # of another prompt
        (1, 0): piece_of(DRAFT, 0, 100, member=(1, 0)),  # delivered
        (7, 0): piece_of(DRAFT, 0, 100, member=(7, 0)),  # gone
    }
    (restored,) = door.intake.restore(known, 5)
    prefix = door.prefix()
    assert prefix is not None
    assert (restored.start, restored.end) == (0, len(prefix.token_ids))
    assert 0 < len(prefix.token_ids) < 120
    assert prefix.versions.max() == 5
    assert DRAFT.versions[len(prefix.token_ids)] == 6
    assert is_beginning_of(prefix, DRAFT)


class Sender:
    """A generator's side, as lease_progress.py has it: what it believes to be known, and drafts that grow."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.shown, self.length = rng, 0, 0
        self.drafts: list[Prefix] = []

    def begin(self, prefix: Prefix | None, seed: int) -> None:
        self.shown = self.length = len(prefix.token_ids) if prefix is not None else 0
        self.drafts.append(make_draft(seed, MAX_TOKENS, prefix))

    def piece(self) -> PartialRollout:
        self.length = min(MAX_TOKENS, self.length + self._rng.randrange(1, 12))
        found = piece_of(self.drafts[-1], self.shown, self.length)
        self.shown = self.length
        return found


class Storm:
    """Two generators that hold a member in turn, and a wire on which anything may happen to reports."""

    def __init__(self, door: Door, seed: int) -> None:
        self._rng, self._door, self._seed, self._num_drafts = random.Random(seed), door, seed, 0
        self.senders = {name: Sender(self._rng) for name in ("g-0", "g-2")}
        self._wire: list[tuple[str, PartialRollout]] = []
        self.holder = "g-0"
        self.senders[self.holder].begin(None, seed)

    def lease_changes_hands(self) -> None:
        """Who has a draft already may go on with it, though another has held the lease meanwhile."""
        self._door.buffer.ledger.forget_holder(self.holder)
        self.holder = "g-2" if self.holder == "g-0" else "g-0"
        self._door.buffer.ledger.grant(self.holder, 2)
        sender, self._num_drafts = self.senders[self.holder], self._num_drafts + 1
        if not sender.drafts or self._rng.random() < 0.5:
            sender.begin(self._door.prefix(), 1000 * self._seed + self._num_drafts)

    def send(self) -> None:
        for name, sender in self.senders.items():
            if sender.drafts and sender.length < MAX_TOKENS:
                self._wire.append((name, sender.piece()))

    def lose(self) -> None:
        self._wire.pop(self._rng.randrange(len(self._wire)))

    def double(self) -> None:
        self._wire.insert(self._rng.randrange(len(self._wire)), self._rng.choice(self._wire))

    def arrive(self) -> None:
        name, piece = self._wire.pop(0 if self._rng.random() < 0.8 else self._rng.randrange(len(self._wire)))
        if self._door.report(piece, name)[1]:
            self.senders[name].shown = 0

    def step(self) -> None:
        happenings = [self.lease_changes_hands, *3 * [self.send]]
        if self._wire:
            happenings += [self.lose, self.double, *4 * [self.arrive]]
        self._rng.choice(happenings)()


@pytest.mark.parametrize("seed", range(40))
def test_reports_lost_doubled_and_late_never_mix_drafts_and_soon_all_is_known(tmp_path: Path, seed: int) -> None:
    door = Door(tmp_path)
    storm = Storm(door, seed)
    for _ in range(60):
        storm.step()
        prefix, drafts = door.prefix(), [draft for sender in storm.senders.values() for draft in sender.drafts]
        assert prefix is None or any(is_beginning_of(prefix, draft) for draft in drafts)
    sender = storm.senders[storm.holder]
    sender.length = min(sender.length, MAX_TOKENS - 30)
    sender.shown = min(sender.shown, sender.length)
    for _ in range(2):  # from here on nothing is lost: the first report may not follow, the second is whole
        if door.report(sender.piece(), storm.holder)[1]:
            sender.shown = 0
    prefix = door.prefix()
    assert prefix is not None
    assert is_beginning_of(prefix, sender.drafts[-1])
    assert len(prefix.token_ids) == sender.length
