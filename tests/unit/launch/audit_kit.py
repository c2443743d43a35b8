"""Histories for the audit, made by the real buffer and killed anywhere, and ways of falsifying them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from launch.run_directory.prepare import (
    AttemptStart,
    ResumePoint,
    choose,
    note_attempt,
    num_attempts,
    put_aside,
    set_journal_aside,
)
from rlhpc.algorithms.estimators import has_reward_variance
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.history import EVENTS, Admitted, Dropped, Event, Taken, Trained, event_paths, read_events
from rlhpc.buffer.journal import JOURNAL, journal_paths, read_journals
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.log import MARK, read_log
from rlhpc.buffer.segments import SegmentWriter, read_raw_columns, read_segment, segment_paths, to_hdf5
from rlhpc.config.file import write_resolved
from rlhpc.config.rules import Config
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, SamplingParams, ScoredRollout, Verdict
from rlhpc.roles.controller.state import (
    SavedState,
    Totals,
    _restore,
    delete_needless_journals,
    read_saved_state,
    set_aside_later_segments,
    write_saved_state,
)
from rlhpc.training.checkpoint_directory import COMPLETE, KnownCheckpoints, begin, complete, prune
from tests.unit.buffer.log_files import flip_in_record, write_anew
from tests.unit.buffer.rollout_samples import ManualClock, make_prompt, make_teacher
from tests.unit.launch.site_kit import config_of

# ------------------ Run directories with a history, made by the controller's real ledger, buffer, journal, segments and

TWO_DATASETS = 'data=[{path="a.jsonl", task="integer_arithmetic"}, {path="b.jsonl", task="integer_arithmetic"}]'


class Killed(Exception):
    """The controller is dead: what was only in memory is gone."""


class CountedPrompts:
    """Endless datasets in turn, twice the first and once the second, of each of which every fifth is left out."""

    def __init__(self, num_datasets: int) -> None:
        self.cursors, self.left_out, self.num_drawn = [0] * num_datasets, [0] * num_datasets, 0

    def draw(self) -> Prompt:
        place = self._whose_turn
        return self._draw(place, self.cursors[place] + (self.cursors[place] % 5 == 4))

    def draw_again(self, prompt_id: int | None) -> Prompt:
        if prompt_id is None:
            return self._draw(self._whose_turn, self.cursors[self._whose_turn])
        local, place = divmod(prompt_id, len(self.cursors))
        return self._draw(place, local)

    @property
    def _whose_turn(self) -> int:
        return (0, 0, 1)[self.num_drawn % 3] % len(self.cursors)

    def _draw(self, place: int, local: int) -> Prompt:
        self.left_out[place] += local - self.cursors[place]
        self.cursors[place] = local + 1
        self.num_drawn += 1
        return make_prompt(local * len(self.cursors) + place)

    def state(self) -> dict[str, Any]:
        states = [{"cursor": c, "left_out": left} for c, left in zip(self.cursors, self.left_out, strict=True)]
        return {"datasets": states} if len(states) > 1 else states[0]

    def load_state(self, state: dict[str, Any]) -> None:
        states = state.get("datasets", [state])
        self.cursors, self.left_out = [each["cursor"] for each in states], [each["left_out"] for each in states]
        self.num_drawn = sum(self.cursors) - sum(self.left_out)


class AuditedRun:
    """One run directory, and the controllers that follow each other in it."""

    def __init__(
        self, root: Path, seed: int, *, num_steps: int = 8, every_steps: int = 3, segment_groups: int = 3
    ) -> None:
        self.seed, self.random, self.layout = seed, random.Random(seed), RunLayout(root)
        self.config: Config = config_of(
            f"run.directory={root}",
            f"run.num_steps={num_steps}",
            "trainer.warmup_steps=0",
            "admission.group_size=2",
            "admission.groups_per_step=2",
            f"admission.max_staleness={seed % 3}",
            f"buffer.segment_groups={segment_groups}",
            f"checkpoint.every_steps={every_steps}",
            *((TWO_DATASETS,) if seed % 3 == 2 else ()),
            *(("curriculum.max_group_size=5",) if seed % 4 == 0 else ()),
        )
        if not self.layout.is_run:
            for directory in (root, self.layout.rollouts, self.layout.checkpoints):
                directory.mkdir()
            write_resolved(self.config, self.layout, "")
        self.tell: Callable[[int], None] = _pass_over  # is told each step that was trained
        self.outbox: list[tuple[int, ScoredRollout]] = []  # rollouts that were not acknowledged: (number, rollout)
        self.step = self.version = self.live = 0

    # -------------------------------------------------------------------------------------------------------- attempts

    def start(self, point: ResumePoint | None = None) -> None:
        """Begin an attempt, as launcher and controller do."""
        index = num_attempts(self.layout)
        choice = choose(self.layout, point or ResumePoint(), _unheard)
        put_aside(choice, _unheard)
        set_journal_aside(self.layout, point or ResumePoint(), (), index, _unheard)
        if point is not None and point != ResumePoint():
            self.outbox.clear()  # its generators were started anew
        note_attempt(self.layout, AttemptStart(index, choice.step))
        self.attempt = index
        self._open(choice.step)

    def _open(self, resume_step: int | None) -> None:
        config, layout = self.config, self.layout
        saved = read_saved_state(layout, resume_step) if resume_step is not None else None
        self.prompts = CountedPrompts(len(self.config.data))
        self.held: list[tuple[int, int]] = []  # members that the generator is sampling
        settings: dict[str, Any] = {
            "num_slots": config.admission.num_slots,
            "window_groups": config.window_groups,
            "groups_per_step": config.admission.groups_per_step,
            "group_size": config.admission.group_size,
            "sampling": lambda _: SamplingParams(max_tokens=16),
            "lease_deadline_s": 60.0,
            "max_attempts": 3,
            "clock": ManualClock(),
        }
        self.totals, self.step, self.version, self.saved = Totals(), 0, 0, resume_step or 0
        ledger = AdmissionLedger(**settings)
        if saved is not None:
            self.prompts.load_state(saved.prompts)
            ledger = AdmissionLedger.from_state(saved.buffer["ledger"], **settings)
        segments = SegmentWriter(
            layout.rollouts,
            set_aside_later_segments(layout, saved, self.attempt),
            run_name=config.run.name,
            run_attempt=self.attempt,
            max_groups=config.buffer.segment_groups,
            max_s=60.0,
            clock=ManualClock(),
        )
        self.buffer = RolloutBuffer(ledger, segments)
        if saved is not None:
            self.buffer.load(layout.checkpoint(saved.step))
            self.totals, self.step, self.version = Totals(**saved.totals), saved.step, saved.policy_version
        context: Any = SimpleNamespace(layout=layout, config=config, attempt=self.attempt, fence=None)
        self.replay, self.journal = _restore(context, saved, self.step, self.buffer, self.prompts)  # type: ignore[arg-type]

    def run(self, kill_after: int | None = None) -> None:
        """Repeat recorded steps, then train to the last step.  kill_after: so many moments; raises Killed."""
        self._moments_left = kill_after
        self._replay()
        self._durable()
        self.live = self.version
        while self.step < self.config.run.num_steps:
            self._sample()
            groups = self.buffer.take(self.config.admission.groups_per_step, self.step)
            if groups is not None:
                self._moment()
                self._train(groups)
                self._moment()
                self._durable()
                self.live = self.version
                self.tell(self.step)
                self.buffer.release([group.group_id for group in groups])
                if self.step % self.config.checkpoint.every_steps == 0:
                    self.save()
        if self.step > self.saved:
            self.save()
        self._close()

    def _replay(self) -> None:
        self._drop_restored()
        for recorded in self.replay.steps:
            self._moment()
            groups = self.buffer.take_again(recorded.groups, self.step)
            self._deliver_again()
            self._train(groups)
            self.buffer.release(recorded.groups)

    def _drop_restored(self) -> None:
        """As RolloutSink.restored."""
        for resolved in self.replay.restored:
            if resolved.drop_reason is None and self.buffer.ledger.is_open(resolved.group.group_id):
                self._look_at(resolved.group.group_id, resolved.group.members)

    def _deliver_again(self) -> None:
        """What generators kept, since nobody had acknowledged it."""
        kept, self.outbox = [scored for _, scored in self.outbox], []
        for scored in kept:
            self._deliver(scored)

    def _close(self) -> None:
        for group_id in self.buffer.ledger.open_groups():
            self.buffer.drop(group_id, DropReason.CANCELLED)
        self.buffer.segments.seal_all()
        self.layout.summary.write_text("{}")
        self.journal.commit()
        self.journal.close()

    # ----------------------------------------------------------------------------------------------- what happens in it

    def _moment(self) -> None:
        """Something may happen on disk, or the end."""
        if self._moments_left is not None:
            self._moments_left -= 1
            if self._moments_left < 0:
                raise Killed
        if self.random.random() < 0.3:
            self.commit()
        if self.random.random() < 0.2:
            self.buffer.segments.tick()

    def _sample(self) -> None:
        self._deliver_again()
        self.buffer.readmit(self.live)
        while self.buffer.ledger.has_slot:
            prompt = self.prompts.draw()
            size = 2 + (7 * prompt.prompt_id + self.live) % 4 if self.config.curriculum.max_group_size != "off" else 0
            self.buffer.admit(prompt, self.live, size)
        if self.config.curriculum.goes_by_memory:
            self._durable()  # as LeaseDispatcher
        while (lease := self.buffer.ledger.grant("g-0", 100)) is not None:
            self.held += [(lease.group_id, index) for index in lease.sample_indices]
        self.held = [
            (group_id, index) for group_id, index in self.held if self.buffer.ledger.is_wanted(group_id, index)
        ]
        self._moment()
        for group_id, index in self.random.sample(self.held, min(len(self.held), 3)):
            if self.buffer.ledger.is_wanted(group_id, index):  # it was not dropped meanwhile
                self._deliver(self._rollout(group_id, index))
            self._moment()

    def _rollout(self, group_id: int, index: int) -> ScoredRollout:
        record = self.buffer.ledger.group(group_id)
        length = self.random.randint(1, 9)
        first = min(record.admitted_version, self.live)
        versions = [self.random.randint(first, self.live) for _ in range(length)]
        others = [place for place in range(1, length) if index and place % 3 == index - 1]  # rows of some members
        borders = [0, *others, length]
        versions = [version for row in pairwise(borders) for version in sorted(versions[slice(*row)])]
        rollout = Rollout(
            group_id=group_id,
            sample_index=index,
            prompt_id=record.prompt.prompt_id,
            token_ids=np.arange(length, dtype=np.int32),
            behaviour_logprobs=np.full(length, -0.5, np.float32),
            versions=np.array(versions, np.int32),
            loss_mask=np.ones(length, np.bool_),
            finish_reason=FinishReason.STOP,
            row_starts=np.array(others, np.int32),
        )
        reward = float(self.random.random() < 0.5)
        verdict = Verdict.CORRECT if reward else Verdict.WRONG
        if self.random.random() < 0.02:
            verdict = Verdict.VERIFIER_ERROR
        teacher = make_teacher(length, num_top=self.seed % 3, seed=index) if self.seed % 2 else None
        return ScoredRollout(rollout, reward, verdict, {}, "", teacher=teacher)

    def _deliver(self, scored: ScoredRollout) -> None:
        """As RolloutSink.receive."""
        group_id, index = scored.rollout.group_id, scored.rollout.sample_index
        if not self.buffer.ledger.is_wanted(group_id, index):
            return
        group = self.buffer.deliver("g-0", scored)
        self.outbox.append((self.journal.num_added, scored))
        if scored.verdict is Verdict.VERIFIER_ERROR:
            self._moment()
            self.buffer.drop(group_id, DropReason.VERIFIER_ERROR)
        elif group is not None:
            self._look_at(group_id, group.members)

    def _look_at(self, group_id: int, members: tuple[ScoredRollout, ...]) -> None:
        rewards = np.array([member.reward for member in members], np.float32)
        if not has_reward_variance(rewards):
            self.buffer.drop(group_id, DropReason.ZERO_VARIANCE)

    def _train(self, groups: list[Any]) -> None:
        applied = self.step % 5 != 3  # by the step alone: a repeated step goes as it went
        trained, self.version = self.version, self.version + applied
        self.buffer.consume(groups, self.step, trained_version=trained, applied=applied, metrics={})
        self.step += 1
        self.totals.steps += 1
        self.totals.skipped_steps += not applied
        self.totals.rollouts_trained += sum(len(group.members) for group in groups)

    def commit(self) -> None:
        """Make the journal durable, and acknowledge."""
        durable = self.journal.commit()
        self.outbox = [(number, scored) for number, scored in self.outbox if number > durable]

    _durable = commit

    def save(self) -> None:
        """As CheckpointWriter."""
        self.saved = self.step
        frozen = self.buffer.freeze(self.step)
        prompts, totals = self.prompts.state(), self.totals.to_json()
        self._moment()
        temporary = begin(self.layout.checkpoint(self.step))
        own = frozen.write(temporary, frozen.seal())
        state = SavedState(self.step, self.version, own, prompts, {}, totals, {}, {})
        write_saved_state(temporary, state)
        self._moment()
        self._durable()
        manifest = {"step": self.step, "policy_version": self.version, "attempt": self.attempt}
        complete(temporary, self.layout.checkpoint(self.step), manifest)
        self._moment()
        known = KnownCheckpoints(self.layout.checkpoints)
        prune(self.layout.checkpoints, 2, known)
        delete_needless_journals(self.layout, [step for step, _ in known.steps()])

    def damage(self) -> None:
        """Turn a bit of a rollout in the journal."""
        if paths := journal_paths(self.layout.rollouts):
            path = self.random.choice(paths)
            if num_records := len(read_log(path, JOURNAL).places):
                flip_in_record(path, JOURNAL, self.random.randrange(num_records))

    def tear(self) -> None:
        """What a kill may leave behind the last one of the events."""
        if self.random.random() < 0.5 and (paths := event_paths(self.layout.rollouts)):
            with paths[-1].open("ab") as file:
                file.write(MARK + b"0123abcd" * 5)


def _unheard(_: str) -> None:
    """Takes lines."""


def _pass_over(_: int) -> None:
    """Takes steps."""


def live_through(run: AuditedRun, num_kills: int, audit: Any) -> None:
    """Start, be killed, start again …, to the end; audit is called after every kill and at the end."""
    point: ResumePoint | None = None
    for _ in range(num_kills):
        run.start(point)
        try:
            run.run(kill_after=run.random.randint(0, 90))
        except Killed:
            run.tear()
        audit()
        if run.layout.summary.exists():
            run.layout.summary.unlink()
        steps = [step for step, _ in KnownCheckpoints(run.layout.checkpoints).steps()]
        point = run.random.choices(
            [
                ResumePoint(),
                ResumePoint(no_replay=True),
                ResumePoint(from_start=True),
                ResumePoint(step=max(steps, default=0)),
            ],
            [6, 1, 1, 1 if steps else 0],
        )[0]
    run.start(point)
    run.run()
    audit()


# ----------------- Ways to falsify the history of a run so that every checksum still holds: what only an audit can find


@dataclass(frozen=True, slots=True)
class Falsified:
    """What the audit must name; -1: not that."""

    group: int = -1
    step: int = -1
    file: str = ""


# --------------------------------------------------------------------------------------------------------- segments


def edit_segment(path: Path, change: Callable[[list[ResolvedGroup]], None]) -> None:
    """Write a segment anew, with checksums that hold."""
    groups = read_segment(path)
    attributes, _ = read_raw_columns(path, [], is_verified=False)
    change(groups)
    own = {name: attributes[name] for name in ("run_name", "run_attempt", "segment_index", "sealed_unix_s")}
    path.write_bytes(to_hdf5(groups, own))


def _some_group(
    layout: RunLayout, chance: random.Random, is_wanted: Callable[[ResolvedGroup], bool] = lambda group: True
) -> tuple[Path, int, ResolvedGroup] | None:
    """(segment, row, group): any but the last one, which might as well not be sealed yet."""
    found = [
        (path, row, group) for path in segment_paths(layout.rollouts) for row, group in enumerate(read_segment(path))
    ]
    found = [each for each in found[:-1] if is_wanted(each[2])]
    return chance.choice(found) if found else None


def is_trained(group: ResolvedGroup) -> bool:
    return group.consumed_step >= 0


def a_group_is_gone(layout: RunLayout, chance: random.Random) -> Falsified | None:
    if (found := _some_group(layout, chance)) is None:
        return None
    path, row, group = found
    edit_segment(path, lambda groups: groups.pop(row))
    return Falsified(group=group.group.group_id)


def a_group_stands_twice(layout: RunLayout, chance: random.Random) -> Falsified | None:
    if (found := _some_group(layout, chance)) is None:
        return None
    _, _, group = found
    edit_segment(segment_paths(layout.rollouts)[-1], lambda groups: groups.append(group))
    return Falsified(group=group.group.group_id)


def _with_members(group: ResolvedGroup, members: tuple[ScoredRollout, ...]) -> ResolvedGroup:
    return replace(group, group=replace(group.group, members=members))


def _replaced(
    layout: RunLayout,
    chance: random.Random,
    change: Callable[[ResolvedGroup], ResolvedGroup],
    is_wanted: Callable[[ResolvedGroup], bool] = is_trained,
) -> Falsified | None:
    if (found := _some_group(layout, chance, is_wanted)) is None:
        return None
    path, row, group = found

    def put(groups: list[ResolvedGroup]) -> None:
        groups[row] = change(groups[row])

    edit_segment(path, put)
    return Falsified(group=group.group.group_id, step=group.consumed_step)


def a_member_is_gone(layout: RunLayout, chance: random.Random) -> Falsified | None:
    return _replaced(layout, chance, lambda group: _with_members(group, group.group.members[1:]))


def a_sample_stands_twice(layout: RunLayout, chance: random.Random) -> Falsified | None:
    return _replaced(layout, chance, lambda group: _with_members(group, (group.group.members[0],) * 2))


def it_is_staler_than_allowed(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(group: ResolvedGroup) -> ResolvedGroup:
        return replace(group, group=replace(group.group, admitted_version=group.trained_version - 3))

    return _replaced(layout, chance, change)


def it_is_of_another_step(layout: RunLayout, chance: random.Random) -> Falsified | None:
    return _replaced(layout, chance, lambda group: replace(group, consumed_step=group.consumed_step + 1))


def it_was_dropped(layout: RunLayout, chance: random.Random) -> Falsified | None:
    dropped = {"consumed_step": -1, "trained_version": -1, "applied": None, "drop_reason": DropReason.POISON}
    return _replaced(layout, chance, lambda group: replace(group, **dropped))


def it_trained_another_version(layout: RunLayout, chance: random.Random) -> Falsified | None:
    found = _replaced(layout, chance, lambda group: replace(group, trained_version=group.trained_version + 1))
    return None if found is None else Falsified(file="segment")


def it_has_another_prompt(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(group: ResolvedGroup) -> ResolvedGroup:
        prompt = replace(group.group.prompt, prompt_id=group.group.prompt.prompt_id + 1000)
        return replace(group, group=replace(group.group, prompt=prompt))

    return _replaced(layout, chance, change, lambda group: True)


def _with_versions(group: ResolvedGroup, versions: Callable[[Any], Any]) -> ResolvedGroup:
    first, *others = group.group.members
    rollout = replace(first.rollout, versions=versions(first.rollout.versions))
    return _with_members(group, (replace(first, rollout=rollout), *others))


def a_token_is_of_a_version_that_never_was(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(versions: Any) -> Any:
        return np.append(versions[:-1], np.int32(1000)).astype(np.int32)

    return _replaced(layout, chance, lambda group: _with_versions(group, change))


def a_token_is_older_than_the_one_before(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def is_long(group: ResolvedGroup) -> bool:
        versions = group.group.members[0].rollout.versions if group.group.members else ()
        return is_trained(group) and len(versions) > 1 and versions[0] > 0

    def change(versions: Any) -> Any:
        return np.append(versions[:-1], versions[0] - 1).astype(np.int32)

    return _replaced(layout, chance, lambda group: _with_versions(group, change), is_long)


def a_row_goes_on_in_the_next(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def falls(member: ScoredRollout) -> bool:
        return bool((np.diff(member.rollout.versions) < 0).any())

    def joined(group: ResolvedGroup) -> ResolvedGroup:
        members = group.group.members
        one_row = [replace(each.rollout, row_starts=np.empty(0, np.int32)) for each in members]
        return _with_members(
            group, tuple(replace(each, rollout=row) for each, row in zip(members, one_row, strict=True))
        )

    return _replaced(layout, chance, joined, lambda group: any(map(falls, group.group.members)))


def a_teacher_has_said_something_else(layout: RunLayout, chance: random.Random) -> Falsified | None:
    """What it was, only the journal knows: of groups whose rollouts are still there."""
    known = {record.scored.rollout.group_id for content in read_journals(layout.rollouts) for record in content.records}

    def change(group: ResolvedGroup) -> ResolvedGroup:
        first, *others = group.group.members
        told = make_teacher(len(first.rollout.token_ids), seed=chance.randrange(1000, 2000))
        return _with_members(group, (replace(first, teacher=told), *others))

    return _replaced(layout, chance, change, lambda group: group.group.group_id in known and bool(group.group.members))


def a_segment_is_gone(layout: RunLayout, chance: random.Random) -> Falsified | None:
    paths = segment_paths(layout.rollouts)[:-1]
    if not paths:
        return None
    path = chance.choice(paths)
    path.unlink()
    return Falsified(file=f"rollouts/{path.name}")


# ----------------------------------------------------------------------------------------------------------- events


def edit_events(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Write the whole events of a log anew, with checksums that hold."""
    events = [*read_events(path).events.values()]
    change(events)
    write_anew(path, EVENTS, events)


def _some_event(layout: RunLayout, chance: random.Random, kind: type[Event]) -> tuple[Path, int, Any] | None:
    """(file, index, event): one that others of its attempt follow, since a kill may take the last ones."""
    found = list(_events(layout))
    last = {path: index for path, index, event in found if isinstance(event, Trained | Taken)}
    found = [each for each in found if isinstance(each[2], kind) and each[1] < last.get(each[0], 0)]
    return chance.choice(found) if found else None


def _events(layout: RunLayout) -> Iterator[tuple[Path, int, Event]]:
    for path in event_paths(layout.rollouts):
        for index, event in enumerate(read_events(path).events.values()):
            yield path, index, event


def _named(event: Event) -> Falsified:
    return Falsified(group=getattr(event, "group", -1), step=getattr(event, "step", -1))


def an_event_is_gone(kind: type[Event]) -> Callable[[RunLayout, random.Random], Falsified | None]:
    def mutate(layout: RunLayout, chance: random.Random) -> Falsified | None:
        if (found := _some_event(layout, chance, kind)) is None:
            return None
        path, index, event = found
        edit_events(path, lambda events: events.pop(index))
        return _named(event)

    mutate.__name__ = f"an_event_is_gone_{kind.__name__}"
    return mutate


def an_event_stands_twice(kind: type[Event]) -> Callable[[RunLayout, random.Random], Falsified | None]:
    def mutate(layout: RunLayout, chance: random.Random) -> Falsified | None:
        if (found := _some_event(layout, chance, kind)) is None:
            return None
        path, index, event = found
        edit_events(path, lambda events: events.insert(index, event))
        return _named(event)

    mutate.__name__ = f"an_event_stands_twice_{kind.__name__}"
    return mutate


def a_batch_has_another_group(layout: RunLayout, chance: random.Random) -> Falsified | None:
    if (found := _some_event(layout, chance, Taken)) is None:
        return None
    path, index, event = found
    edit_events(path, lambda events: events.__setitem__(index, replace(event, groups=(9999, *event.groups[1:]))))
    return Falsified(step=event.step)


# ------------------------------------------------------------------------------------------------------ checkpoints


def edit_checkpoint(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change controller.json, and complete the checkpoint again."""
    document = json.loads((path / "controller.json").read_bytes())
    manifest = {name: value for name, value in json.loads((path / COMPLETE).read_bytes()).items() if name != "files"}
    change(document)
    temporary = path.with_name(f".{path.name}.tmp")
    path.rename(temporary)
    (temporary / COMPLETE).unlink()
    (temporary / "controller.json").write_text(json.dumps(document))
    complete(temporary, path, manifest)


def _edited(layout: RunLayout, chance: random.Random, change: Callable[[dict[str, Any]], None]) -> Falsified | None:
    steps = KnownCheckpoints(layout.checkpoints).steps()
    if not steps:
        return None
    _, path = chance.choice(steps)
    edit_checkpoint(path, change)
    return Falsified(file=f"checkpoints/{path.name}")


def a_checkpoint_counts_one_more_trained(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        document["buffer"]["ledger"]["num_released"] += 1

    return _edited(layout, chance, change)


def a_checkpoint_counts_one_more_dropped(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        dropped = document["buffer"]["ledger"]["dropped"]
        dropped["poison"] = dropped.get("poison", 0) + 1

    return _edited(layout, chance, change)


def a_checkpoint_is_of_another_version(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        document["policy_version"] += 1

    return _edited(layout, chance, change)


def a_checkpoint_has_another_cursor(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        prompts = document["prompts"]
        chance.choice(prompts.get("datasets", [prompts]))["cursor"] += 1

    return _edited(layout, chance, change)


def a_checkpoint_has_lost_an_open_group(layout: RunLayout, chance: random.Random) -> Falsified | None:
    steps = KnownCheckpoints(layout.checkpoints).steps()
    if not steps:
        return None
    path = steps[-1][1]  # older ones are gone by the time that their open groups would be missed
    groups = json.loads((path / "controller.json").read_bytes())["buffer"]["ledger"]["groups"]
    resolved = {group.group.group_id for segment in segment_paths(layout.rollouts) for group in read_segment(segment)}
    groups = [group["group_id"] for group in groups if group["group_id"] not in resolved and not group["delivered"]]
    if not groups:
        return None
    gone = chance.choice(groups)

    def change(document: dict[str, Any]) -> None:
        ledger = document["buffer"]["ledger"]
        ledger["groups"] = [group for group in ledger["groups"] if group["group_id"] != gone]

    edit_checkpoint(path, change)
    return Falsified(group=gone)


def a_checkpoint_opens_a_trained_group(layout: RunLayout, chance: random.Random) -> Falsified | None:
    steps = KnownCheckpoints(layout.checkpoints).steps()
    if not steps:
        return None
    path = steps[-1][1]
    document = json.loads((path / "controller.json").read_bytes())
    before = [
        group.group
        for segment in segment_paths(layout.rollouts)[: document["buffer"]["next_segment_index"]]
        for group in read_segment(segment)
        if is_trained(group)
    ]
    if not before:
        return None
    group = chance.choice(before)
    prompt = group.prompt
    again = {
        "group_id": group.group_id,
        "admitted_version": group.admitted_version,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "task": prompt.task,
            "token_ids": prompt.token_ids.tolist(),
            "reference": prompt.reference,
        },
        "delivered": [],
        "lost_leases": [0, 0],
        "num_leases": 0,
    }
    edit_checkpoint(path, lambda document: document["buffer"]["ledger"]["groups"].append(again))
    return Falsified(group=group.group_id)


MUTATIONS: tuple[Callable[[RunLayout, random.Random], Falsified | None], ...] = (
    a_group_is_gone,
    a_group_stands_twice,
    a_member_is_gone,
    a_sample_stands_twice,
    it_is_staler_than_allowed,
    it_is_of_another_step,
    it_was_dropped,
    it_trained_another_version,
    it_has_another_prompt,
    a_token_is_of_a_version_that_never_was,
    a_token_is_older_than_the_one_before,
    a_row_goes_on_in_the_next,
    a_teacher_has_said_something_else,
    a_segment_is_gone,
    *map(an_event_is_gone, (Admitted, Taken, Trained, Dropped)),
    *map(an_event_stands_twice, (Admitted, Taken, Trained, Dropped)),
    a_batch_has_another_group,
    a_checkpoint_counts_one_more_trained,
    a_checkpoint_counts_one_more_dropped,
    a_checkpoint_is_of_another_version,
    a_checkpoint_has_another_cursor,
    a_checkpoint_has_lost_an_open_group,
    a_checkpoint_opens_a_trained_group,
)
