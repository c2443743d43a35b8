"""A batch is formed as soon as finished groups can be spared by all others; what admission's defaults rest on."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from rollout_samples import ManualClock, make_ledger, make_prompt

from bench.admission import LAWS, PACES, Figures, G, P, figures_of, limit
from bench.length_bias import SIGMA, TRUE_MEAN_S, WAYS, Run
from rlhpc.buffer.batches import DropReason, GroupRecord, MemberRecord, choose_batch, choose_part
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.config.tables import NO_WINDOW

# --------------------- A batch is formed as soon as some finished groups can be spared by all others, and never before


@pytest.fixture
def ledger() -> AdmissionLedger:
    """Batches of two, a staleness of 2."""
    return make_ledger(ManualClock(), num_slots=6, group_size=1, window_groups=NO_WINDOW)


def admit(ledger: AdmissionLedger, count: int, version: int = 0) -> None:
    for _ in range(count):
        ledger.admit(make_prompt(ledger.next_group_id), version)


def finish(ledger: AdmissionLedger, *group_ids: int) -> None:
    for group_id in group_ids:
        assert ledger.deliver(group_id, 0)


def test_stragglers_are_passed_until_they_are_due(ledger: AdmissionLedger) -> None:
    admit(ledger, 6)
    finish(ledger, 1, 2, 3, 4, 5)
    assert ledger.take(2, step=0) == [1, 2]
    assert ledger.take(2, step=1) == [3, 4]
    assert ledger.upcoming(2) is None  # group 0 is as stale as it may be
    finish(ledger, 0)
    assert ledger.take(2, step=2) == [0, 5]


def test_no_batch_passes_more_groups_than_the_next_ones_have_room_for(ledger: AdmissionLedger) -> None:
    admit(ledger, 6)
    finish(ledger, 1, 2)
    ledger.release(ledger.take(2, step=0))
    admit(ledger, 2, version=1)
    finish(ledger, 6, 7)
    assert ledger.upcoming(2) is None  # four others, one batch after this one
    finish(ledger, 3)
    assert ledger.upcoming(2) is None  # three others
    finish(ledger, 5)
    assert ledger.take(2, step=1) == [3, 5]
    assert ledger.upcoming(2) is None


def test_what_comes_back_after_a_restart_goes_in_its_order(ledger: AdmissionLedger) -> None:
    admit(ledger, 4)
    state = ledger.state(next_step=0)
    again = AdmissionLedger.from_state(
        state, num_slots=6, window_groups=NO_WINDOW, groups_per_step=2, group_size=1, sampling=lambda _: None,
        lease_deadline_s=60.0, max_attempts=3, clock=ManualClock(),
    )  # fmt: skip
    admit(again, 2)
    finish(again, 1, 2, 3, 4, 5)
    assert again.upcoming(2) is None
    finish(again, 0)
    assert [again.take(2, step) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), max_staleness=st.integers(0, 3), window=st.sampled_from((1, 3, NO_WINDOW)))
def test_what_counts_say_is_what_a_look_at_every_group_would(
    data: st.DataObject, max_staleness: int, window: int
) -> None:
    """Asked at every change; and no batch is there before so many have ended as were said to be missing."""
    per_step, version, no_batch_before, num_ended = 3, 0, 0, 0
    num_slots = (max_staleness + 1) * per_step
    ledger = make_ledger(
        ManualClock(), num_slots=num_slots, groups_per_step=per_step, group_size=1, window_groups=window
    )
    taken: list[list[int]] = []
    begun: list[int] = []
    for _ in range(40):
        while ledger.has_slot:
            ledger.admit(make_prompt(ledger.next_group_id), version)
        open_groups = [group for group in ledger.groups if group.step is None]
        in_flight = [group.group_id for group in open_groups if not group.is_finished]
        what = data.draw(st.sampled_from(("finish", "finish", "drop", "release", "tighten")))
        if what == "finish" and in_flight:
            finish(ledger, data.draw(st.sampled_from(in_flight)))
            num_ended += 1
        elif what == "drop" and (droppable := [g.group_id for g in open_groups if g.group_id not in begun]):
            ledger.drop(data.draw(st.sampled_from(droppable)), DropReason.ZERO_VARIANCE)
            num_ended += 1
        elif what == "release" and taken:
            ledger.release(taken.pop(0))
            version += 1
        elif what == "tighten":
            ledger.tighten(data.draw(st.integers(per_step, num_slots)))
        open_groups = [group for group in ledger.groups if group.step is None]
        num_taken = per_step * (version + len(taken))
        chosen = choose_batch(open_groups, per_step, num_taken, per_step, window, begun)
        assert ledger.upcoming(per_step) == chosen
        assert chosen is None or num_ended >= no_batch_before
        assert window != NO_WINDOW or (chosen is None) == (ledger.num_missing(per_step) > 0)
        no_batch_before = max(no_batch_before, num_ended + ledger.num_missing(per_step))
        least = data.draw(st.integers(1, 2))
        part = choose_part(open_groups, per_step, num_taken, per_step, window, begun)
        assert ledger.part(per_step, least) == (part if len(part) >= least else [])
        most = ledger._tally.most_in_part(per_step, num_taken, [ledger.group(group_id).due_after for group_id in begun])
        assert len(part) == most if window == NO_WINDOW else len(part) <= most
        if chosen is not None and data.draw(st.booleans()):
            ledger.take_these(chosen, step=version + len(taken))
            taken.append(chosen)
            begun.clear()
            no_batch_before = 0
        elif chosen is None and part and data.draw(st.booleans()):
            ledger.begin(part)
            begun += part
        ledger.conservation()


def record(group_id: int, due: int, *, is_finished: bool) -> GroupRecord:
    member = MemberRecord(is_delivered=is_finished)
    return GroupRecord(group_id, make_prompt(group_id), 0, 0.0, [member], due_after=due)


def leaves_room(spares: list[int], groups_per_step: int) -> bool:
    """Whether groups that have so many batches before their last one can all be in one in time."""
    ordered = sorted(spares)
    return all(place // groups_per_step <= spare for place, spare in enumerate(ordered))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    groups=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=9),
    groups_per_step=st.integers(1, 3),
    num_taken=st.integers(0, 2),
)
def test_it_waits_only_where_every_choice_would_leave_somebody_behind(
    groups: list[tuple[int, bool]], groups_per_step: int, num_taken: int
) -> None:
    if not leaves_room([spare for spare, _ in groups], groups_per_step):
        return  # no ledger comes to this
    base = num_taken * groups_per_step
    records = [
        record(group_id, base + spare * groups_per_step, is_finished=is_finished)
        for group_id, (spare, is_finished) in enumerate(groups)
    ]
    chosen = choose_batch(records, groups_per_step, base, groups_per_step, NO_WINDOW)
    finished = [group_id for group_id, (_, is_finished) in enumerate(groups) if is_finished]

    def is_sound(batch: tuple[int, ...]) -> bool:
        left = [spare - 1 for group_id, (spare, _) in enumerate(groups) if group_id not in batch]
        return min(left, default=0) >= 0 and leaves_room(left, groups_per_step)

    possible = any(map(is_sound, itertools.combinations(finished, groups_per_step)))
    assert (chosen is not None) == possible
    assert chosen is None or is_sound(tuple(chosen))


def test_a_part_takes_no_place_that_a_group_due_in_its_batch_needs() -> None:
    """Two places: of the groups due in this batch none, one or two are in flight, and two younger ones are finished."""
    for num_due, part in ((0, [3]), (1, [3]), (2, [])):
        due = [record(group_id, 0, is_finished=False) for group_id in range(num_due)]
        younger = [record(group_id, 2, is_finished=True) for group_id in (3, 4)]
        assert choose_part([*due, *younger], 2, 0, 2, NO_WINDOW) == part


# ------------------------------------------------------------------------------- What the defaults of admission rest on


def figures(name: str, bound: int, pace: str = "g = t", law: str = "σ = 0.5", share: float = 0.5) -> Figures:
    return figures_of(name, bound, pace, law, int(share * P * G), steps=100, seeds=1)


@pytest.mark.parametrize("pace", list(PACES))
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_no_rule_that_keeps_the_bound_is_faster_than_the_limit_and_ours_is_no_slower_than_strict_order(
    bound: int, pace: str
) -> None:
    for share in (0.5, 1.0):
        highest = limit(bound, *PACES[pace], LAWS["σ = 0.5"], int(share * P * G))
        ours, strict = (figures(name, bound, pace, share=share) for name in ("ours", "strict"))
        assert 0.98 * strict.efficiency < ours.efficiency < highest + 0.03
        assert ours.worst_staleness <= bound


def test_where_generation_is_what_all_wait_for_half_the_staleness_does_as_well() -> None:
    ours, strict = (figures(name, 4) for name in ("ours", "strict"))
    assert ours.efficiency > 0.98
    assert ours.mean_staleness < 0.7 * strict.mean_staleness


def test_what_is_trained_is_as_long_as_what_is_drawn() -> None:
    for bound in (1, 4):
        assert abs(figures("ours", bound).length - 1) < 0.03


def test_other_rules_do_not_keep_the_bound_that_they_are_given() -> None:
    assert figures("AReaL", 1).worst_staleness > 1


# ---------------------------------------- What is lost and granted again does not make the rollouts that arrive shorter

NUM_SAMPLES = 2000
STANDARD_ERROR_S = TRUE_MEAN_S * np.sqrt(np.exp(SIGMA**2) - 1) / np.sqrt(NUM_SAMPLES)
ANEW, PROGRESS, SEEDS, BOTH = WAYS
LOSSES = {"deadline": {"lease_deadline_s": 3.0}, "deaths": {"mtbf_s": 10.0}}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("way", [SEEDS, BOTH], ids=["seeds", "both"])
def test_with_seeds_every_rollout_arrives_as_it_was_first_drawn(loss: str, way) -> None:
    run = Run(way, **LOSSES[loss])
    run.mean_s(NUM_SAMPLES)
    drawn = [run._draw_s(group_id, 0.0) for group_id in range(NUM_SAMPLES)]
    assert sorted(run.arrived_s) == sorted(drawn)


def test_leases_that_progress_renews_lose_nothing_to_their_deadline() -> None:
    assert Run(ANEW, **LOSSES["deadline"]).mean_s(NUM_SAMPLES) < TRUE_MEAN_S - 5 * STANDARD_ERROR_S
    assert abs(Run(PROGRESS, **LOSSES["deadline"]).mean_s(NUM_SAMPLES) - TRUE_MEAN_S) < 4 * STANDARD_ERROR_S


def test_prefixes_take_most_of_the_bias_of_deaths_away() -> None:
    anew, progress = (Run(way, **LOSSES["deaths"]).mean_s(NUM_SAMPLES) for way in (ANEW, PROGRESS))
    assert anew < TRUE_MEAN_S - 5 * STANDARD_ERROR_S
    assert TRUE_MEAN_S - progress < (TRUE_MEAN_S - anew) / 2
