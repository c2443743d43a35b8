"""The ring in virtual time: what it may never be faster or staler than, and where it can be calculated by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.prediction.fleet import Fleet, FleetShape
from launch.prediction.ring import Outcome, Ring
from launch.prediction.splits import Price, numbers_of_engines, other_splits, recommended
from launch.prediction.takeable import Takeable
from rlhpc.buffer import batch_choice
from rlhpc.buffer.batch_choice import choose_part
from rlhpc.config_admission import SmallestPart
from tests.unit.launch.predicted_rings import lengths, rates, shape

NUM_STEPS = 12


def test_a_synchronous_ring_takes_the_sum_of_its_parts() -> None:
    """16 rollouts of 50 tokens at once: 50 steps of 0.01 + 16·0.001 s, then the trainer, the weights, and again."""
    parts = {"judge_s": 0.25, "trainer_step_s": 2.0, "publish_s": 0.5, "live_s": 0.125, "between_steps_s": 0.0625}
    ring = Ring(
        shape(num_engines=1, max_num_seqs=16, max_staleness=0), rates(engine_sample_s=0.001, **parts), lengths("fixed")
    )
    outcome = ring.run(NUM_STEPS)
    assert outcome.step_s == pytest.approx(50 * (0.01 + 16 * 0.001) + sum(parts.values()))
    assert outcome.staleness == {0: 16 * NUM_STEPS}
    assert outcome.engines_full == pytest.approx(1 - outcome.engines_idle)  # all of its places, or none


def test_prompts_are_read_once_a_group_and_pauses_stop_every_engine() -> None:
    still = {"prefill_token_s": 0.01, "pause_s": 0.3}
    ring = Ring(shape(num_engines=1, max_num_seqs=16, max_staleness=0), rates(**still), lengths("fixed"))
    # At live time nobody decodes, where S = 0: only prompts count, 4 of 10 tokens.
    assert ring.run(NUM_STEPS).step_s == pytest.approx(50 * 0.01 + 4 * 10 * 0.01)
    moving = Ring(shape(num_engines=1, max_num_seqs=16, max_staleness=2), rates(**still), lengths("fixed"))
    slow = Ring(shape(num_engines=1, max_num_seqs=16, max_staleness=2), rates(prefill_token_s=0.01), lengths("fixed"))
    assert moving.run(NUM_STEPS).seconds > slow.run(NUM_STEPS).seconds


@settings(max_examples=60)
@given(
    num_engines=st.integers(1, 5),
    max_num_seqs=st.integers(1, 12),
    groups=st.integers(1, 6),
    group_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    window=st.integers(1, 8),
    trainer_s=st.floats(0, 3),
    live_s=st.floats(0, 3),
    dropped=st.sampled_from((0.0, 0.3, 0.7)),
    law=st.sampled_from(("fixed", "geometric", "lognormal:1")),
    parts=st.integers(1, 4),
    least_tokens=st.sampled_from((0, 200)),
)
def test_no_ring_is_faster_than_its_slower_side_nor_staler_than_its_bound(
    num_engines: int, max_num_seqs: int, groups: int, group_size: int, max_staleness: int, window: int,
    trainer_s: float, live_s: float, dropped: float, law: str, parts: int, least_tokens: int,
) -> None:  # fmt: skip
    window = min(window, max_staleness * groups + 1)
    part, token_s = SmallestPart(-(-groups // parts), least_tokens), 0.001
    times = {"trainer_step_s": trainer_s, "trainer_pflop_s": token_s, "publish_s": 0.1, "live_s": live_s}
    ring = Ring(
        shape(num_engines, max_num_seqs, groups, group_size, max_staleness, window, part),
        rates(engine_sample_s=0.001, judge_s=0.05, **times),
        lengths(law, dropped_share=dropped),
    )
    outcome = ring.run(NUM_STEPS)
    ring.ledger.conservation()
    counts = ring.ledger.counts()
    assert counts["released"] + counts["taken"] == groups * NUM_STEPS
    assert counts["dropped"] == outcome.num_dropped
    assert max(outcome.staleness) <= max_staleness
    assert sum(outcome.staleness.values()) == NUM_STEPS * groups * group_size
    # The trainer's side: steps and publications, one after the other.
    assert outcome.seconds >= NUM_STEPS * trainer_s + (NUM_STEPS - 1) * 0.1 - 1e-9
    worked_s = NUM_STEPS * trainer_s + token_s * outcome.tokens_per_s * outcome.seconds
    assert outcome.trainer_works * outcome.seconds == pytest.approx(worked_s)
    # The engines' side: no engine gives its places tokens faster than a step of them all.
    trained_tokens = outcome.tokens_per_s * outcome.seconds - 10 * NUM_STEPS * groups * group_size
    tokens_per_s = num_engines * max(n / (0.01 + 0.001 * n) for n in range(1, max_num_seqs + 1))
    assert trained_tokens <= tokens_per_s * outcome.seconds * (1 + 1e-9)
    assert 0 <= outcome.engines_idle <= 1
    assert outcome.engines_full <= 1 - outcome.engines_idle + 1e-9
    of_trainer = (
        outcome.trainer_works + outcome.trainer_publishes + outcome.trainer_waits_for_groups
        + outcome.trainer_waits_for_weights + outcome.trainer_saves
    )  # fmt: skip
    assert of_trainer == pytest.approx(1, abs=0.1 / outcome.seconds + 1e-6) or of_trainer < 1 + 1e-9


def test_a_step_in_parts_does_not_wait_for_the_longest_rollout_with_idle_ranks() -> None:
    def outcome(part: SmallestPart) -> Outcome:
        sides = shape(max_num_seqs=16, groups=8, max_staleness=0, window=8, part=part)
        return Ring(sides, rates(trainer_pflop_s=0.001), lengths()).run(50)

    whole = outcome(SmallestPart(8))
    assert outcome(SmallestPart(2)).step_s < 0.85 * whole.step_s
    assert outcome(SmallestPart(2, tokens=600)).step_s < 0.95 * whole.step_s
    assert outcome(SmallestPart(2, tokens=100_000)) == whole  # no part fills its rows


def test_more_generators_and_a_larger_bound_make_no_ring_slower() -> None:
    took = {
        (engines, bound): Ring(shape(engines, max_staleness=bound), rates(trainer_step_s=0.5), lengths())
        .run(100)
        .step_s
        for engines in (1, 2, 4)
        for bound in (0, 1, 3)
    }
    for (engines, bound), seconds in took.items():
        assert seconds >= 0.95 * took[max(engines, 2), bound], (engines, bound)
        assert seconds >= 0.95 * took[engines, max(bound, 1)], (engines, bound)
    alike = Ring(shape(4, max_staleness=3), rates(trainer_step_s=0.5), lengths("fixed")).run(100)
    assert alike.step_s == pytest.approx(0.5)  # nothing but the trainer
    assert took[1, 0] > 1.3 * took[1, 3]


def test_the_same_seed_is_the_same_run() -> None:
    one, same, other = (Ring(shape(), rates(), lengths(), seed).run(NUM_STEPS) for seed in (3, 3, 4))
    assert one == same
    assert one.seconds != other.seconds


def test_packing_is_that_of_the_run() -> None:
    """Two ranks wait for the slower one at every micro-step: by cost, not by tokens of the batch."""
    one = shape()
    two = replace(one, data_parallel=2, token_budget=100)
    rows = np.array([100, 10, 10, 10])
    assert one.pflops(rows) == 130
    assert two.pflops(rows) == 100  # the long one on one rank, the others on the other


class RingThatAsksAlways(Ring):
    """Hears of every group as it finishes, and looks through all of them each time."""

    def _advance(self, until_s: float) -> list[int]:
        return self.fleet.advance(until_s, 1)

    def _take(self) -> None:
        self._takeable.number = len(self.ledger.groups)
        self._ready_tokens = 1 << 60
        self.ledger._tally.most_in_part = lambda num_groups, *_: num_groups
        self.ledger.num_missing = lambda num_groups: max(0, num_groups - self.ledger.counts()["finished"])
        super()._take()


@pytest.mark.parametrize("window", [1, 5, 1 << 30])
@pytest.mark.parametrize("dropped", [0.0, 0.5])
@pytest.mark.parametrize("law", ["fixed", "geometric", "lognormal:1.5"])
def test_a_prediction_is_what_asking_at_every_finish_would_give(law: str, dropped: float, window: int) -> None:
    """To the bit: asking less is a matter of speed."""
    for max_staleness, part in itertools.product((0, 1, 3), (None, SmallestPart(2), SmallestPart(1, tokens=250))):
        size = replace(
            shape(num_engines=3, max_num_seqs=4, groups=5, group_size=2, max_staleness=max_staleness, window=window),
            smallest_part=part or SmallestPart(5),
        )
        took = rates(trainer_step_s=0.3, publish_s=0.1, live_s=0.2, judge_s=0.05, engine_sample_s=0.001)
        outcomes = [
            kind(size, took, lengths(law, dropped_share=dropped)).run(30) for kind in (Ring, RingThatAsksAlways)
        ]
        assert outcomes[0] == outcomes[1]


def test_what_the_ledger_would_give_is_counted_without_asking_it() -> None:
    takeable = Takeable(window=2)
    for group_id in range(5):
        takeable.admitted(group_id)
    takeable.ended(3, is_ready=True)  # past the window of group 0
    assert takeable.number == 0
    takeable.ended(1, is_ready=True)  # inside
    assert takeable.number == 1
    takeable.ended(0, is_ready=False)  # dropped: group 2 is the oldest
    assert (takeable.number, takeable.oldest) == (2, 2)
    takeable.ended(2, is_ready=True)
    takeable.ended(4, is_ready=True)
    assert (takeable.number, takeable.oldest) == (4, 5)


def test_a_fleet_gives_every_rollout_its_tokens_and_every_group_its_end() -> None:
    """Two engines of 2 places: the first group of 3 begins on the first engine, where one member waits for a place."""
    fleet = Fleet(FleetShape(num_engines=2, max_num_seqs=2, group_size=3, num_groups=2), rates())
    fleet.add(0, 0, np.array([10, 20, 5]), stops=False)
    fleet.add(1, 0, np.array([40, 40, 1]), stops=False)
    fleet.dispatch()
    assert fleet.num_waiting == 0  # an engine holds a group more than it decodes
    assert fleet.advance(100.0, most=1) == [0]
    assert fleet.now_s == pytest.approx(0.2)  # of its longest member: the third had the place of the first
    assert fleet.advance(100.0, most=1) == [1]
    assert fleet.now_s == pytest.approx(0.41)
    assert fleet.advance(1.0, most=1) == []
    assert fleet.now_s == 1.0
    assert fleet.busy_s == pytest.approx([0.2, 0.41])
    assert fleet.decoding_s == pytest.approx(0.01 * (10 + 20 + 5 + 40 + 40 + 1))


@pytest.mark.parametrize("part", [SmallestPart(16), SmallestPart(16, tokens=1_000_000)])
def test_a_simulation_looks_at_every_group_only_where_a_part_may_begin(
    part: SmallestPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of groups in flight a look takes as long as a hundred events."""
    looks = []

    def counted(*arguments: Any) -> list[int]:
        looks.append(choose_part(*arguments))
        return looks[-1]

    monkeypatch.setattr(batch_choice, "choose_part", counted)
    sides = shape(max_num_seqs=128, groups=64, max_staleness=2, window=192, part=part)
    Ring(sides, rates(trainer_step_s=0.5, engine_sample_s=0.0001), lengths()).run(20)
    assert len(looks) <= 4 * 20


def test_a_simulation_costs_events_and_not_tokens_or_engines() -> None:
    """What a step costs hangs on its rollouts alone, so that thousands of generators can be looked at."""
    few = Ring(shape(4, 8, groups=64), rates(), lengths("fixed", 20)).run(20)
    many = Ring(shape(512, 8, groups=64), rates(), lengths("fixed", 400)).run(20)
    rollouts = 20 * 64 * 4
    for outcome in (few, many):
        assert (
            2 * rollouts <= outcome.num_events <= 2 * 2 * rollouts + 2 * 64 * 4
        )  # ends and deliveries, one bound ahead


def test_the_cheapest_of_the_fast_splits_is_recommended() -> None:
    """A trainer of 0.5 s a step: two generators feed it, and what one bound allows, the next does not better."""
    price = Price(trainer_units=8, engine_units=2, unit="GPU-hours", start_s=60.0)
    splits = other_splits(shape(num_engines=4), rates(trainer_step_s=0.5), lengths("fixed"), price, 1000)
    assert {split.num_engines for split in splits} == set(range(1, 9))
    best = recommended(splits, max_staleness=1)
    assert best.max_staleness <= 1  # a higher bound may cost learning, which is not simulated
    splits = [split for split in splits if split.max_staleness <= 1]
    fastest = min(split.outcome.step_s for split in splits)
    assert best.outcome.step_s <= 1.05 * fastest
    cheaper = [split for split in splits if split.num_engines < best.num_engines]
    assert all(split.outcome.step_s > 1.05 * fastest for split in cheaper)
    assert best.wall_s == pytest.approx(60 + 1000 * best.outcome.step_s, rel=0.02)
    assert best.hours == pytest.approx((8 + 2 * best.num_engines) * best.wall_s / 3600)


@pytest.mark.parametrize(
    ("num_engines", "numbers"), [(1, [1, 2]), (3, [1, 2, 3, 4, 5, 6]), (8, [2, 4, 6, 8, 10, 12, 16])]
)
def test_the_table_has_numbers_around_that_of_the_run(num_engines: int, numbers: list[int]) -> None:
    assert numbers_of_engines(num_engines) == numbers
