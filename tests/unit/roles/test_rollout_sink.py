"""What becomes of a rollout that comes back, by its verdict and by the spread of its group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.algorithms.samples import RewardShaping
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.lost_leases import LostLeases
from rlhpc.buffer.prefixes import id_checksum
from rlhpc.config.tables_algorithm import ShapingConfig
from rlhpc.protocol.errors import LedgerError, RoleFailed, StarvedError
from rlhpc.protocol.types import FinishReason, RolloutGroup, ScoredRollout, Verdict
from rlhpc.rewards.outcomes import KILLS_ITS_WORKER, ErrorGate
from rlhpc.roles.controller.leases import RolloutSink
from rlhpc.roles.controller.state import Totals
from tests.unit.roles.small_ring import make_buffer, make_ledger, prompt, scored, small_config


def receive(sink: RolloutSink, member: ScoredRollout, holder: str = "generator-0") -> bool:
    """Bring it as a generator that had its prompt with these tokens."""
    return sink.receive(holder, member, id_checksum(prompt(member.rollout.prompt_id).token_ids))


class Door:
    """A sink before a buffer of groups of two that are all admitted and leased."""

    def __init__(
        self, directory: Path, max_error_share: float = 1.0, shaping: ShapingConfig | None = None, **admission: object
    ) -> None:
        config = small_config(max_staleness=20, **admission)
        self.buffer = make_buffer(config, directory)
        rules = RewardShaping(shaping or ShapingConfig())
        self.sink = RolloutSink(self.buffer, ErrorGate(max_error_share), config.admission, rules)
        while self.buffer.ledger.has_slot:
            self.buffer.admit(prompt(self.buffer.ledger.counts()["admitted"]), 0)
        while self.buffer.ledger.grant("generator-0", 2) is not None:
            pass

    def bring(self, group_id: int, *rewards: float) -> list[bool]:
        """Bring members 0, 1, … of a group."""
        members = (scored(group_id, index, reward) for index, reward in enumerate(rewards))
        return [receive(self.sink, member) for member in members]

    def fail(self, group_id: int, detail: str = "no compiler") -> bool:
        """Bring a member whose verifier failed."""
        member = scored(group_id, 0, 0.0, verdict=Verdict.VERIFIER_ERROR, detail=detail)
        return receive(self.sink, member)


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path, max_zero_variance_groups=3)


def test_a_group_with_spread_is_kept_and_only_its_last_member_changes_anything(door: Door) -> None:
    assert door.bring(0, 0.0, 1.0) == [False, True]
    stats = door.sink.drain()
    assert [group.group_id for group in stats.groups] == [0]
    assert (stats.num_tokens, stats.num_zero_variance, stats.num_dropped) == (6, 0, {})
    assert door.buffer.ledger.counts()["finished"] == 1


def test_a_zero_variance_group_frees_its_slot_at_once_and_is_recorded(door: Door) -> None:
    assert not door.buffer.ledger.has_slot
    assert door.bring(0, 1.0, 1.0) == [False, True]
    assert door.buffer.ledger.has_slot
    assert door.buffer.segments.num_pending == 1
    stats = door.sink.drain()
    assert stats.num_dropped == {"zero_variance": 1}
    assert len(stats.groups) == 1  # what the policy can now is measured on all groups
    assert door.sink.drain().groups == []


def test_a_verifier_error_drops_the_group_and_is_never_a_reward_of_zero(door: Door) -> None:
    door.bring(0, 1.0)
    assert receive(door.sink, scored(0, 1, 0.0, verdict=Verdict.VERIFIER_ERROR, detail="hung"))
    assert door.buffer.ledger.counts()["dropped_verifier_error"] == 1
    assert door.sink.drain().groups == []
    assert door.fail(1)
    assert door.bring(1, 0.0, 1.0) == [False, False]  # the rest of that group comes too late
    assert door.sink.cancelled == [1]  # while group 0 had no member left to cancel


@pytest.mark.parametrize(
    ("rewards", "shaping", "says"),
    [
        ((0.0, 0.0), {}, r"^3 consecutive groups .*no answer is right: warm-start.*admission\.active_sampling=false"),
        ((1.0, 1.0), {}, "too easy for this model: choose harder prompts"),
        ((0.6, 0.6), {}, r"0\.6 on average.*no answer is right"),  # partial rewards of wrong answers
        ((0.0, 1.0), {"truncated": "masked"}, r"^3 consecutive .*shaping\.truncated='masked'.*max_completion_tokens"),
    ],
)
def test_zero_variance_groups_in_a_row_end_the_run_with_advice(
    tmp_path: Path, rewards: tuple[float, ...], shaping: dict[str, str], says: str
) -> None:
    door = Door(tmp_path, shaping=ShapingConfig.model_validate(shaping), max_zero_variance_groups=3)
    members = [
        scored(group_id, index, reward, verdict=Verdict.WRONG if reward < 1 else Verdict.CORRECT)
        for group_id in range(3)
        for index, reward in enumerate(rewards)
    ]
    if shaping:
        cut = FinishReason.LENGTH
        members = [replace(each, rollout=replace(each.rollout, finish_reason=cut)) for each in members]
    for each in members[:-1]:
        receive(door.sink, each)
    with pytest.raises(StarvedError, match=says) as starved:
        receive(door.sink, members[-1])
    assert "\n" not in str(starved.value)
    if shaping:  # the limit is blamed, and not the task
        assert not any(words in str(starved.value) for words in ("no answer is right", "too easy", "trains regardless"))


def test_one_group_with_spread_begins_the_count_anew(door: Door) -> None:
    for group_id in range(0, 12, 3):
        door.bring(group_id, 0.0, 0.0)
        door.bring(group_id + 1, 0.0, 0.0)
        door.bring(group_id + 2, 0.0, 1.0)
    assert door.sink.drain().num_zero_variance == 8


def test_without_active_sampling_zero_variance_groups_are_trained_on(tmp_path: Path) -> None:
    door = Door(tmp_path, active_sampling=False, max_zero_variance_groups=2)
    for group_id in range(5):
        door.bring(group_id, 0.0, 0.0)
    assert door.buffer.ledger.counts()["finished"] == 5
    stats = door.sink.drain()
    assert (stats.num_zero_variance, stats.num_dropped) == (5, {})


def test_too_large_a_share_of_verifier_errors_ends_the_run_with_the_latest_reasons(tmp_path: Path) -> None:
    door = Door(tmp_path, max_error_share=0.02)  # 4 of the last 200
    for group_id in range(4):
        door.fail(group_id)
    with pytest.raises(RoleFailed, match=r"rewards.max_error_share=0.02.*no compiler for 5"):
        door.fail(5, detail="no compiler for 5")


def test_dropping_what_is_resolved_already_does_nothing(door: Door) -> None:
    door.bring(0, 1.0, 1.0)
    door.sink.drop(0, DropReason.POISON)
    assert door.sink.drain().num_dropped == {"zero_variance": 1}
    door.buffer.ledger.conservation()


def test_groups_from_the_journal_count_as_if_they_had_arrived_and_are_judged_if_they_were_not(door: Door) -> None:
    for group_id, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]):
        for index, reward in enumerate(rewards):
            door.buffer.deliver("journal", scored(group_id, index, reward))
    dropped, judged_late, *_ = [door.buffer.finished()[i] for i in (2, 1)]
    door.buffer.drop(2, DropReason.ZERO_VARIANCE)
    restored = [ResolvedGroup(door.buffer.finished()[0]), ResolvedGroup(judged_late)]
    door.sink.restored([*restored, ResolvedGroup(dropped, drop_reason=DropReason.ZERO_VARIANCE)])
    stats = door.sink.drain()
    assert [group.group_id for group in stats.groups] == [0, 1, 2]
    assert (stats.num_tokens, stats.num_zero_variance, stats.num_dropped) == (0, 2, {"zero_variance": 2})
    assert stats.shaped_rewards == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]  # of the same members as all other rewards
    assert door.buffer.ledger.counts()["dropped_zero_variance"] == 2
    assert not door.buffer.ledger.is_open(1)


def test_a_checkpoint_counts_what_came_in_since_the_last_step_and_the_next_step_counts_it_once(door: Door) -> None:
    totals = Totals(tokens_generated=100, groups_dropped=1)
    door.bring(0, 1.0, 1.0)
    saved = door.sink.counted_in(totals)
    assert (saved.tokens_generated, saved.groups_dropped, saved.zero_variance_groups) == (106, 2, 1)
    assert totals == Totals(tokens_generated=100, groups_dropped=1)
    door.sink.drain().add_to(totals)
    assert totals == saved == door.sink.counted_in(totals)


def test_in_a_deterministic_run_a_rollout_of_other_weights_is_not_taken(tmp_path: Path) -> None:
    """A generator may have kept it from before a restart that did not repeat its steps.  One that was sampled by other
    weights alone ends the attempt: its holder would do the same again, and the run would wait for ever.
    """
    door = Door(tmp_path)
    strict = RolloutSink(door.buffer, ErrorGate(1.0), small_config().admission, of_one_version=True)
    later = scored(0, 0)
    later.rollout.versions[-1] = 1
    assert not receive(strict, later, "generator-1")
    assert door.buffer.ledger.is_wanted(0, 0)
    later.rollout.versions[:] = 1
    with pytest.raises(LedgerError, match=r"sample 0 of group 0, admitted under version 0, .* by versions \[1\]"):
        receive(strict, later)
    receive(strict, scored(0, 0))
    assert not door.buffer.ledger.is_wanted(0, 0)


class Judged:
    """Groups of a prompt, one after the other, and what was said of their first member."""

    def __init__(self, directory: Path, gate: ErrorGate | None = None, **admission: object) -> None:
        config = small_config(max_attempts=3, **admission)
        self.book, self.gate = LostLeases(), gate or ErrorGate(1.0)
        self.buffer = make_buffer(config, directory, make_ledger(config, lost_leases=self.book))
        self.sink = RolloutSink(self.buffer, self.gate, config.admission, lost_leases=self.book)

    def admit(self, prompt_id: int = 7) -> int:
        return self.buffer.admit(prompt(prompt_id), 0)

    def fail(self, failure: str, prompt_id: int = 7, detail: str = "killed") -> None:
        group_id = self.admit(prompt_id)
        assert self.buffer.ledger.poisoned() == []
        self.bring(group_id, 0, prompt_id, Verdict.VERIFIER_ERROR, detail, failure)
        assert not self.buffer.ledger.is_open(group_id)

    def succeed(self, prompt_id: int = 7) -> None:
        group_id = self.admit(prompt_id)
        for index in (0, 1):
            self.bring(group_id, index, prompt_id, Verdict.CORRECT)

    def bring(
        self, group_id: int, index: int, prompt_id: int, verdict: Verdict, detail: str = "", failure: str = ""
    ) -> None:
        member = scored(group_id, index, 0.0, verdict=verdict, detail=detail)
        rollout = replace(member.rollout, prompt_id=prompt_id)
        receive(self.sink, replace(member, rollout=rollout, failure=failure))


@pytest.mark.parametrize("failure", sorted(KILLS_ITS_WORKER))
def test_a_prompt_whose_completions_kill_reward_workers_is_quarantined_after_so_many_groups_in_a_row(
    tmp_path: Path, failure: str
) -> None:
    """Other epochs draw it again."""
    judged = Judged(tmp_path)
    for _ in range(2):
        judged.fail(failure)
    judged.succeed()
    assert judged.book.of(prompt(7)) is None  # it was judged: cleared
    for _ in range(3):
        judged.fail(failure)
    refused = judged.admit()
    assert judged.buffer.ledger.poisoned() == [refused]
    assert judged.buffer.ledger.grant("generator-0", 2) is None
    judged.sink.refuse(refused)
    assert judged.buffer.ledger.poisoned() == []
    assert judged.gate.document() == {
        "causes": {failure: 5, "quarantined": 1},
        "latest": "record 7: 3 reward workers died judging it, the last: killed",
    }


@pytest.mark.parametrize("failure", ["raised", "invalid", "timed_out", "unsent", "unanswered", "agent_died", ""])
def test_errors_that_kill_no_worker_never_quarantine_a_prompt(tmp_path: Path, failure: str) -> None:
    """A tool server that is away for a while, an agent that exits: once they are mended, their prompts are sampled."""
    judged = Judged(tmp_path)
    for _ in range(50):
        judged.fail(failure)
    assert judged.book.all == judged.book.unwritten == []
    judged.succeed()
    assert judged.gate.error_share < 1.0


def test_leases_that_expired_so_often_are_told_from_a_quarantine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has died of it: the next epoch samples it again."""
    judged = Judged(tmp_path)
    group_id = judged.admit()
    for member in judged.buffer.ledger.open_record(group_id).members:
        member.lost_leases = 3
    judged.sink.refuse(group_id)
    words = "record 7: 3 leases of one of its samples expired or ended with a death"
    assert judged.gate.document() == {"causes": {"leases_lost": 1}, "latest": words}
    assert f"group {group_id} is dropped: leases lost: {words}" in caplog.text
    assert judged.book.all == []


def test_a_run_in_which_nothing_but_quarantined_prompts_is_left_ends_and_says_why(tmp_path: Path) -> None:
    judged = Judged(tmp_path, ErrorGate(0.05))
    for prompt_id in range(1, 3):
        for _ in range(3):
            judged.book.record_worker_death(prompt(prompt_id), "parity: worker died: signal SIGSEGV")
    for turn in range(10):
        judged.sink.refuse(judged.admit(1 + turn % 2))
    last = judged.admit(1)
    said = r"11 of the last 11 verdicts .* quarantined 11\).*--lift-quarantine; the latest: .*SIGSEGV"
    with pytest.raises(StarvedError, match=said):
        judged.sink.refuse(last)


def test_whoever_tolerates_every_error_is_told_all_the_same_when_no_batch_can_be_filled(tmp_path: Path) -> None:
    judged = Judged(tmp_path, max_zero_variance_groups=12)
    for prompt_id in range(11):
        judged.fail("raised", prompt_id, "no tool server")
    judged.succeed(20)
    for prompt_id in range(11):
        judged.fail("raised", prompt_id, "no tool server")
    with pytest.raises(StarvedError, match=r"12 errors in a row .* raised 23\).*the latest: no tool server$"):
        judged.fail("raised", 12, "no tool server")


def test_a_rollout_of_another_prompt_than_its_group_s_is_ignored(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """A generator that has outlived a restart may have sampled a prompt that was drawn anew."""
    member = scored(0, 0, 1.0)
    other = replace(member, rollout=replace(member.rollout, prompt_id=99))
    assert not receive(door.sink, other)
    assert "rollout 0:0 belongs to another prompt: ignored" in caplog.text
    assert door.bring(0, 0.0, 1.0) == [False, True]


def test_a_rollout_of_other_tokens_than_its_group_s_prompt_has_now_is_ignored(door: Door) -> None:
    """The chat template writes the date, and the prompt was drawn again on another day."""
    of_yesterday = id_checksum(prompt(0, (9, 8)).token_ids)
    assert not door.sink.receive("generator-0", scored(0, 0, 1.0), of_yesterday)
    assert door.bring(0, 0.0, 1.0) == [False, True]


class Remembered:
    """In the place of the prompts: what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int, float]] = []

    def learn(self, group_id: int, admitted_version: int, prompt_id: int, pass_rate: float) -> None:
        self.told.append((group_id, admitted_version, prompt_id, pass_rate))


def test_pass_rates_are_told_of_every_finished_group_once_with_spread_or_without(tmp_path: Path) -> None:
    config, prompts = small_config(max_staleness=20), Remembered()
    buffer = make_buffer(config, tmp_path)
    sink = RolloutSink(buffer, ErrorGate(1.0), config.admission, prompts=prompts)  # type: ignore[arg-type]
    for group_id in range(4):
        buffer.admit(prompt(group_id), group_id)
    members = {0: (0.0, 1.0), 1: (1.0, 1.0), 2: (0.0,)}
    for group_id, rewards in members.items():
        for index, reward in enumerate(rewards):
            receive(sink, scored(group_id, index, reward))
            receive(sink, scored(group_id, index, reward))
    receive(sink, scored(3, 0, 0.0, verdict=Verdict.VERIFIER_ERROR))
    assert prompts.told == [(0, 0, 0, 0.5), (1, 1, 1, 1.0)]
    back = [RolloutGroup(i, prompt(i), i, (scored(i, 0), scored(i, 1))) for i in (2, 3)]
    sink.restored([ResolvedGroup(back[0]), ResolvedGroup(back[1], drop_reason=DropReason.POISON)])
    assert prompts.told[2:] == [(2, 2, 2, 0.5)]
    lost = ResolvedGroup(
        RolloutGroup(4, prompt(4), 0, ()), drop_reason=DropReason.ZERO_VARIANCE
    )  # with its journal's file
    sink.drain()
    sink.restored([lost])
    stats = sink.drain()
    assert (stats.groups, stats.num_dropped, prompts.told[3:]) == ([], {"zero_variance": 1}, [])
