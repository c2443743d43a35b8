"""Read the event logs of a run line by line, and continue later where the last reading ended.

Input: rollouts/events_*.jsonl.  Output: groups admitted, taken, trained, dropped, in the timeline that counts, and what
an attempt cannot have done.  An attempt repeats steps of the one before; if it takes another batch, what came after
that batch is void.  If attempts disagree, the later one counts.  Unknown kinds of events are counted.
Memory: an object per step, a few numbers per group.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.checks.audit.columns import GroupColumn
from launch.checks.audit.report import Offence
from rlhpc.buffer.event_log import attempt_of, document_of, event_paths


@dataclass(slots=True)
class RecordedStep:
    """A step in the timeline that counts."""

    groups: Sequence[int]
    attempt: int
    line: int
    is_trained: bool = False
    version: int = -1  # that it trained
    applied: bool = True

    @property
    def next_version(self) -> int:
        """Version of the policy after this step."""
        return self.version + self.applied


@dataclass(slots=True)
class AttemptEvents:
    """What one attempt wrote."""

    path: Path
    begins_with: int = -1  # its first step; -1: not known
    num_lines: int = 0
    damaged_lines: list[int] = field(default_factory=list)
    is_torn: bool = False  # its end is half written
    order: array[int] = field(default_factory=lambda: array("q"))  # groups as they were resolved
    fates: array[int] = field(default_factory=lambda: array("q"))  # of those: the step, or -2 for dropped
    offset: int = 0  # bytes read
    expected_step: int = -1  # to be taken next; -1: not known
    untrained: int = -1  # the step that was taken and not trained
    version: int = -1  # before the next step; -1: not known


class EventEvidence:
    """Every event of a run, and the timeline that they make."""

    def __init__(self, rollouts: Path) -> None:
        self._rollouts = rollouts
        self.attempts: dict[int, AttemptEvents] = {}
        self.limits: dict[int, int] = {}  # attempt → rollouts of earlier attempts that count
        self.first_that_counts = 0  # rollouts up to this number are from before the run started over
        self.steps: dict[int, RecordedStep] = {}
        self.last_step = -1  # the highest of these
        self.prompt_of, self.version_of, self.admitted_by = GroupColumn(), GroupColumn(), GroupColumn()
        self.size_of = GroupColumn()  # rollouts wanted, where they are more than admission.group_size
        self.first_version_of = GroupColumn()  # if a later attempt admitted it again: the version before
        self.step_of, self.dropped_by, self.reason_of = GroupColumn(), GroupColumn(), GroupColumn()
        self.reasons: list[str] = []
        self.knows_all = False  # whether it has all events from the first group on
        self.first_admitted = 0  # the first one that is known
        self.lost_version = -1  # the highest one that a trained step made which is void
        self.unknown: Counter[str] = Counter()
        self.offences: list[Offence] = []
        self.trained_at_first = -1  # the last step that was trained at the first look
        self.num_looks = 0

    # --------------------------------------------------------------------------------------------------------- reading

    def look(self, *, is_last: bool = False) -> None:
        """Read what has been added since the last look.  Raises OSError, JournalError."""
        paths = event_paths(self._rollouts) if self._rollouts.is_dir() else []
        newest = self.newest_attempt
        for path in paths:
            if (number := attempt_of(path)) < newest:
                continue
            attempt = self.attempts.setdefault(number, AttemptEvents(path))
            self._read(attempt, number, may_be_written=path == paths[-1] and not is_last)
        self.num_looks += 1
        if self.num_looks == 1:
            self.trained_at_first = max((step for step, known in self.steps.items() if known.is_trained), default=-1)

    def _read(self, attempt: AttemptEvents, number: int, *, may_be_written: bool) -> None:
        attempt.is_torn = False
        with attempt.path.open("rb") as file:
            file.seek(attempt.offset)
            for line in file:
                document = document_of(line[:-1]) if line.endswith(b"\n") else None
                if document is None and (may_be_written or not line.endswith(b"\n")):
                    attempt.is_torn = True  # being written, or left so
                    break
                attempt.offset += len(line)
                attempt.num_lines += 1
                if document is None:
                    attempt.damaged_lines.append(attempt.num_lines)
                else:
                    self._apply(attempt, number, json.loads(document))
            if attempt.damaged_lines == [attempt.num_lines] and not may_be_written:
                attempt.damaged_lines.clear()
                attempt.is_torn = True

    def is_whole(self, attempt: int) -> bool:
        """Whether every event of an attempt up to the last one on disk is known."""
        return attempt in self.attempts and not self.attempts[attempt].damaged_lines

    @property
    def are_whole(self) -> bool:
        """Whether no event is damaged."""
        return not any(attempt.damaged_lines for attempt in self.attempts.values())

    # -------------------------------------------------------------------------------------------------------- timeline

    @property
    def num_admitted(self) -> int:
        """One more than the highest group that was admitted."""
        return self.prompt_of.length

    @property
    def _admissions(self) -> tuple[GroupColumn, ...]:
        return self.prompt_of, self.version_of, self.size_of, self.admitted_by, self.first_version_of

    @property
    def newest_attempt(self) -> int:
        """The last one that wrote something; -1: none did."""
        return max(self.attempts, default=-1)

    def trained_steps(self) -> Iterator[tuple[int, RecordedStep]]:
        """(step, record) of each trained step, in order."""
        return ((step, known) for step, known in sorted(self.steps.items()) if known.is_trained)

    def last_rollout_that_counts(self, attempt: int) -> int | None:
        """An attempt's last rollout that counts, by number: later ones came after its successor began; None: all do."""
        return min((limit for later, limit in self.limits.items() if later > attempt), default=None)

    def _apply(self, attempt: AttemptEvents, number: int, event: dict[str, Any]) -> None:
        kind = str(event.get("event"))
        try:
            match kind:
                case "began":
                    self._began(attempt, number, event)
                case "admitted":
                    self._admitted(attempt, number, event)
                case "taken":
                    self._taken(attempt, number, event)
                case "trained":
                    self._trained(attempt, number, event)
                case "dropped":
                    self._dropped(attempt, number, event)
                case _:
                    self.unknown[kind] += 1
        except (KeyError, TypeError, ValueError):
            self.unknown[f"{kind} of another form"] += 1

    def _accuse(self, attempt: AttemptEvents, text: str, group: int = -1, step: int = -1) -> None:
        """Report a violation unless a damaged line of the same attempt may explain it."""
        if not attempt.damaged_lines:
            file = f"{self._rollouts.name}/{attempt.path.name}"
            self.offences.append(Offence(text, group=group, step=step, file=file, row=attempt.num_lines))

    def _began(self, attempt: AttemptEvents, number: int, event: dict[str, Any]) -> None:
        step = int(event["step"])
        attempt.begins_with = attempt.expected_step = step
        self.limits[number] = int(event["num_rollouts"])
        if not event["goes_on"]:
            self._begin_over(int(event["num_rollouts"]))
        elif len(self.attempts) == 1:
            self.knows_all = step == 0
        before = self.steps.get(step - 1)
        attempt.version = 0 if step == 0 else before.next_version if before is not None and before.is_trained else -1

    def _begin_over(self, num_rollouts: int) -> None:
        trained = [known.next_version for _, known in self.trained_steps()]
        self.lost_version = max([self.lost_version, *trained])
        self.steps.clear()
        self.last_step = -1
        for column in (*self._admissions, self.step_of, self.dropped_by):
            column.clear()
        self.first_that_counts = num_rollouts
        self.knows_all = True

    def _admitted(self, attempt: AttemptEvents, number: int, event: dict[str, Any]) -> None:
        group = int(event["group"])
        if not self.num_admitted:
            self.first_admitted = 0 if self.knows_all else group
        if self.admitted_by[group] == number:
            self._accuse(attempt, f"group {group} is admitted a second time", group)
        if self.admitted_by[group] >= 0:
            self.first_version_of[group] = self.version_of[group]
        self.prompt_of[group], self.version_of[group] = int(event["prompt"]), int(event["version"])
        self.size_of[group] = int(event.get("size", 0))
        self.admitted_by[group] = number

    def _taken(self, attempt: AttemptEvents, number: int, event: dict[str, Any]) -> None:
        step, groups = int(event["step"]), array("q", event["groups"])
        if attempt.untrained >= 0:
            text = f"step {step} is taken while step {attempt.untrained} is not trained"
            self._accuse(attempt, text, step=step)
        elif attempt.expected_step not in (-1, step):
            self._accuse(attempt, f"step {step} follows, where step {attempt.expected_step} is due", step=step)
        known = self.steps.get(step)
        if known is not None and list(known.groups) != list(groups):
            known = None
        if step <= self.last_step and known is None:
            self._void_from(step)
        for group in groups:
            self._take(attempt, number, group, step)
        if len({*groups}) != len(groups):
            self._accuse(attempt, f"step {step} has a group twice: {sorted(groups)}", step=step)
        self.steps[step] = taken = RecordedStep(groups, number, attempt.num_lines)
        if known is not None:  # it is repeated: how it went counts until it has gone anew
            taken.is_trained, taken.version, taken.applied = known.is_trained, known.version, known.applied
        self.last_step = max(self.last_step, step)
        attempt.untrained = attempt.expected_step = step

    def _take(self, attempt: AttemptEvents, number: int, group: int, step: int) -> None:
        other = self.step_of[group]
        if other not in (-1, step) and other in self.steps:
            self._accuse(attempt, f"group {group} is trained at step {other} and at step {step}", group, step)
        if self.knows_all and self.are_whole and self.admitted_by[group] < 0:
            self._accuse(attempt, f"group {group} of step {step} was never admitted", group, step)
        if self.dropped_by[group] == number:
            self._accuse(attempt, f"group {group} was dropped, and is taken for step {step}", group, step)
        self.step_of[group] = step

    def _void_from(self, step: int) -> None:
        """Forget a step and later ones: they came from other weights, and are sampled or trained again."""
        for later in [known for known in self.steps if known >= step]:
            void = self.steps.pop(later)
            if void.is_trained:
                self.lost_version = max(self.lost_version, void.next_version)
            for group in void.groups:
                if self.step_of[group] == later:
                    self.step_of[group] = -1
        self.last_step = max(self.steps, default=-1)

    def _trained(self, attempt: AttemptEvents, number: int, event: dict[str, Any]) -> None:
        step, known = int(event["step"]), self.steps.get(int(event["step"]))
        if known is None or known.attempt != number:
            self._accuse(attempt, f"step {step} is trained, and no batch was taken for it", step=step)
            return
        if attempt.untrained != step:
            self._accuse(attempt, f"step {step} is trained a second time", step=step)
            return
        known.is_trained, known.version, known.applied = True, int(event["version"]), bool(event["applied"])
        if attempt.version not in (-1, known.version):
            text = f"step {step} trained version {known.version}, and the step before it made {attempt.version}"
            self._accuse(attempt, text, step=step)
        attempt.version, attempt.expected_step, attempt.untrained = known.next_version, step + 1, -1
        attempt.order.extend(known.groups)
        attempt.fates.extend([step] * len(known.groups))

    def _dropped(self, attempt: AttemptEvents, number: int, event: dict[str, Any]) -> None:
        group, reason = int(event["group"]), str(event["reason"])
        if self.dropped_by[group] == number:
            self._accuse(attempt, f"group {group} is dropped a second time", group)
        step = self.steps.get(self.step_of[group])
        if step is not None and step.attempt == number:
            self._accuse(attempt, f"group {group} is dropped, and is of step {self.step_of[group]}", group)
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.dropped_by[group], self.reason_of[group] = number, self.reasons.index(reason)
        attempt.order.append(group)
        attempt.fates.append(-2)
