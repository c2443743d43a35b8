"""Rollouts of a run, each with all its details.

    segments, journal ─▶ FoundGroup ─▶ advantages of its step ─▶ texts ─▶ SeenRollout

Input: the directory of a running, killed or complete run, on any machine.  Output: SeenRollout.  Unavailable parts (no
tokenizer here, advantages from a critic) are reported once, and the rest is shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import numpy as np

from launch.common.text import counted, escaped
from rlhpc.algorithms.samples import SampleMaker, on_completion
from rlhpc.base.near_names import near_hint
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.history import START, History, read_history
from rlhpc.buffer.journal import JournalRecord
from rlhpc.buffer.segments import read_columns, read_segment, segments_that_are_left
from rlhpc.config.file import read_resolved
from rlhpc.config.rules import Config
from rlhpc.data.prompts import Origins
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import ConfigError, JournalError, RoleFailed, SegmentError
from rlhpc.protocol.types import (
    Bool,
    Float32,
    Int32,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    TrainingSample,
    Verdict,
)

# ---------------------------------------------------------------------------------------------------------------- texts
#
# Tokens as text if the run's tokenizer is available, otherwise as numbers.
#
# A run directory may be on a machine without the model: its rollouts can be viewed nevertheless.


class Texts:
    """Decodes tokens for people: special tokens are shown, since a prompt's template consists of them."""

    def __init__(self, tokenizer: PromptTokenizer | None) -> None:
        """tokenizer: None shows every token as its number."""
        self._tokenizer = tokenizer

    @property
    def are_known(self) -> bool:
        """True if there is a tokenizer."""
        return self._tokenizer is not None

    def whole(self, token_ids: Int32) -> str:
        """Text of all tokens."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids.tolist()))
        return self._tokenizer.decode(token_ids, keep_special_tokens=True)

    def pieces(self, token_ids: Int32) -> list[str]:
        """Text of each token; a character made of several tokens belongs to the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in token_ids.tolist()]
        return self._tokenizer.pieces(token_ids)


def texts_of(model_dir: Path | None, tokenizer_dir: Path | None) -> tuple[Texts, str]:
    """The texts of a run, and the reason why tokens are shown as numbers; "": shown as text.

    model_dir: from the run's settings; None: these cannot be read.  tokenizer_dir: given by the user, or None.
    Raises ConfigError: the user's directory has no tokenizer.
    """
    if tokenizer_dir is not None:
        return Texts(PromptTokenizer(tokenizer_dir)), ""
    if model_dir is None:
        return Texts(None), "the run's settings cannot be read: tokens are shown as numbers"
    try:
        return Texts(PromptTokenizer(model_dir)), ""
    except ConfigError as error:
        return Texts(None), f"{error}; tokens are shown as numbers; --tokenizer DIR names a copy of that directory"


# --------------------------------------------------------------------------------------------------------- run rollouts
#
# All groups of a run, for people: sealed segments first, then groups that so far are only in the journal.
#
# Input: a rollouts directory of a run that is running, was killed, or is complete.  Output: FoundGroup. Order of
# reading: events and journal before segments, so that groups sealed meanwhile are seen in at least one of them; for a
# group in both, the segment counts.  Damage costs the file or the row; it is reported, and reading continues.


Tell = Callable[[str], None]  # receives descriptions of what cannot be shown


class GroupFate(StrEnum):
    """State of a group: trained, dropped, or not yet either."""

    TRAINED = "trained"
    SKIPPED = "skipped"  # its step was not applied: not finite, or refused by the guard
    DROPPED = "dropped"
    TAKEN = "taken"  # into the batch of a step that is not recorded as done
    WAITING = "waiting"  # not in a batch yet; members may be missing


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A group, possibly incomplete, with its progress."""

    resolved: ResolvedGroup  # consumed_step also for a group that is only taken
    standing: GroupFate


def found_groups(directory: Path, tell: Tell, steps: tuple[int, int] | None = None) -> Iterator[FoundGroup]:
    """Every group on disk: of segments in order of resolution, then of unsealed batches by step, then the others.

    steps: (first, last); segments without a group of these steps are skipped after reading two of their columns.
    Arrays are views of one block per column: copy those to be kept.
    """
    pending = _pending(directory, tell)
    sealed = set[int]()
    for path in segments_that_are_left(directory, tell):
        try:
            if steps is not None and (others := _if_of_other_steps(path, *steps)) is not None:
                sealed |= others
                continue
            groups = read_segment(path)
        except SegmentError as error:
            tell(f"{error}; its groups are not shown")
            continue
        for resolved in groups:
            sealed.add(resolved.group.group_id)
            yield FoundGroup(resolved, standing_of(resolved))
    for group_id, found in sorted(pending.items(), key=_by_batch):
        if group_id not in sealed:
            yield found


def _by_batch(each: tuple[int, FoundGroup]) -> tuple[bool, int, int]:
    """A batch has the groups that finished first, so that group numbers of one step lie between those of others."""
    group_id, found = each
    step = found.resolved.consumed_step
    return step < 0, step, group_id


def standing_of(resolved: ResolvedGroup) -> GroupFate:
    """State of a group in a segment."""
    if resolved.drop_reason is not None:
        return GroupFate.DROPPED
    if resolved.consumed_step < 0:
        return GroupFate.WAITING
    return GroupFate.SKIPPED if resolved.applied is False else GroupFate.TRAINED


def _if_of_other_steps(path: Path, first: int, last: int) -> set[int] | None:
    """Groups of a segment without any of these steps; None: it has some of the steps.  Raises SegmentError."""
    columns = read_columns(path, ["groups/group_id", "groups/consumed_step"])
    step = columns["groups/consumed_step"]
    is_wanted = bool(((step >= first) & (step <= last)).any())
    return None if is_wanted else {*columns["groups/group_id"].tolist()}


def _pending(directory: Path, tell: Tell) -> dict[int, FoundGroup]:
    """Groups of the journal."""
    try:
        history = read_history(directory, START)
    except (JournalError, OSError) as error:
        tell(f"{error}; what is in no segment yet is not shown")
        return {}
    # The beginning of a long run's journal is deleted: missing rollouts there are no damage.
    for problem in history.problems:
        if problem != history.lost_beginning:
            tell(problem)
    members = dict[int, dict[int, JournalRecord]]()
    for record in history.rollouts:
        rollout = record.scored.rollout
        members.setdefault(rollout.group_id, {})[rollout.sample_index] = record
    return {group_id: _found(history, group_id, of_group) for group_id, of_group in members.items()}


def _found(history: History, group_id: int, records: dict[int, JournalRecord]) -> FoundGroup:
    ordered = [record for _, record in sorted(records.items())]
    members = tuple(record.scored for record in ordered)
    group = RolloutGroup(group_id, ordered[0].prompt, ordered[0].admitted_version, members)
    step = history.step_of.get(group_id, -1)
    reason, trained = history.dropped.get(group_id), history.trained.get(step)
    resolved = ResolvedGroup(
        group=group,
        consumed_step=step,
        drop_reason=reason,
        trained_version=-1 if trained is None else trained.version,
        applied=None if trained is None else trained.applied,
    )
    is_open = reason is None and step >= 0 and trained is None
    return FoundGroup(resolved, GroupFate.TAKEN if is_open else standing_of(resolved))


# ------------------------------------------------------------------------------------------------------------- rollouts


_IN_A_BATCH = (GroupFate.TRAINED, GroupFate.SKIPPED, GroupFate.TAKEN)


@dataclass(frozen=True, slots=True)
class SeenRollout:
    """One completion, its reward and its fate.  Arrays [Lc] are over the completion's tokens."""

    group_id: int
    sample_index: int
    prompt_id: int
    task: str
    reference: str
    standing: str  # trained, skipped, dropped, taken, waiting
    drop_reason: str  # "" unless dropped
    step: int  # trained with it, or has it in its batch; -1: none
    admitted_version: int
    trained_version: int  # -1: none
    attempts: int
    reward: float  # nan if the verdict is verifier_error
    verdict: str
    reward_parts: dict[str, float]
    detail: str
    finish_reason: str
    prompt_token_ids: Int32  # [Lp]
    token_ids: Int32  # [Lc]
    behaviour_logprobs: Float32  # [Lc] natural log
    versions: Int32  # [Lc]
    loss_mask: Bool  # [Lc]
    advantages: Float32 | None  # [Lc] 0 where loss_mask is False; None: in no batch, or unknown
    prompt: str
    completion: str
    token_rewards: dict[int, float] = field(default_factory=dict)
    teacher_logprobs: Float32 | None = None  # [Lc] natural log; None: no teacher was asked
    dataset: str = ""  # name of the dataset of the prompt
    record: str = ""  # its file and line; "": it cannot be told
    row_starts: list[int] = field(default_factory=list)  # first token of each row but the first
    num_shared: list[int] = field(default_factory=list)  # tokens at the beginning of each row that an earlier one has
    row_texts: list[str] = field(default_factory=list)  # of several rows the text of each, without that beginning

    @property
    def staleness(self) -> int | None:
        """Versions between admission and training; None: it was not trained."""
        return self.trained_version - self.admitted_version if self.trained_version >= 0 else None

    @property
    def advantage(self) -> float | None:
        """Mean advantage of the loss tokens; None if advantages are None."""
        if self.advantages is None:
            return None
        return float(self.advantages[self.loss_mask].mean()) if self.loss_mask.any() else 0.0

    @property
    def teacher_logprob(self) -> float | None:
        """Mean log-probability of the loss tokens under the teacher; None: no teacher was asked, or no loss tokens."""
        if self.teacher_logprobs is None or not self.loss_mask.any():
            return None
        return float(self.teacher_logprobs[self.loss_mask].mean())


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of rollouts; the default selects all."""

    steps: tuple[int, int] | None = None  # first and last
    task: str | None = None
    verdict: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    pattern: re.Pattern[str] | None = None  # found in prompt, completion, reference or the verifier's line
    dataset: str | None = None

    @classmethod
    def of(
        cls,
        steps: tuple[int, int] | None,
        task: str | None,
        verdict: str | None,
        min_reward: float | None,
        max_reward: float | None,
        grep: str | None,
        dataset: str | None = None,
    ) -> Self:
        """Make a selection from options of `rlhpc rollouts`.  Raises ConfigError with the options' names."""
        if verdict is not None and verdict not in (legal := [each.value for each in Verdict]):
            raise ConfigError(f"--verdict {verdict}; legal: {', '.join(legal)}")
        if min_reward is not None and max_reward is not None and min_reward > max_reward:
            raise ConfigError(
                f"--min-reward {min_reward:g} is above --max-reward {max_reward:g}: nothing is between them"
            )
        try:
            pattern = None if grep is None else re.compile(grep)
        except re.error as error:
            raise ConfigError(f"--grep {grep!r} is not a Python regular expression: {error}") from error
        return cls(steps, task, verdict, min_reward, max_reward, pattern, dataset)

    def wants_member(self, task: str, scored: ScoredRollout) -> bool:
        """True if task, verdict and reward are selected.  A rollout whose verifier failed has no reward."""
        if self.task not in (None, task) or self.verdict not in (None, scored.verdict.value):
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        low = -math.inf if self.min_reward is None else self.min_reward
        high = math.inf if self.max_reward is None else self.max_reward
        return scored.verdict.value != "verifier_error" and bool(low <= scored.reward <= high)


EVERYTHING = Selection()


class RunRollouts:
    """The rollouts of one run directory."""

    def __init__(self, layout: RunLayout, *, tokenizer_dir: Path | None = None, tell: Tell) -> None:
        """tell: called once for each kind of thing that cannot be shown.

        Raises RunDirectoryError: no run is here; ConfigError: no such tokenizer.
        """
        layout.require_run()
        self.layout, self._tell = layout, tell
        self.config = _settings(layout, tell)
        self.texts, remark = texts_of(None if self.config is None else self.config.model.path, tokenizer_dir)
        if remark:
            tell(remark)
        self._maker = _sample_maker(self.config, tell)
        self._origins = None if self.config is None else Origins(self.config, tell)

    def each(self, selection: Selection = EVERYTHING) -> Iterator[SeenRollout]:
        """The selected rollouts, in the order in which their groups were resolved.

        Raises ConfigError: text is searched, and there is no tokenizer; no rollout and no dataset has the task.
        """
        if selection.pattern is not None and not self.texts.are_known:
            raise ConfigError("text is searched, and the run's tokenizer is not on this machine: give --tokenizer DIR")
        known = () if self._origins is None else self._origins.datasets
        if selection.dataset is not None and selection.dataset not in known:
            near = near_hint(selection.dataset, known)
            raise ConfigError(
                f"dataset={selection.dataset!r}: not a dataset of this run; legal: {', '.join(known)}{near}"
            )
        return self._each(selection)

    def _each(self, selection: Selection) -> Iterator[SeenRollout]:
        is_any = False
        for found, advantages in self._with_advantages(selection):
            group = found.resolved.group
            if selection.dataset not in (None, self._dataset(group.prompt)):
                continue
            for index, scored in enumerate(group.members):
                if selection.wants_member(group.prompt.task, scored):
                    mine = None if advantages is None else advantages[index]
                    seen = self._seen(found, scored, mine)
                    texts = (seen.prompt, seen.completion, seen.reference, seen.detail)
                    if selection.pattern is None or any(map(selection.pattern.search, texts)):
                        is_any = True
                        yield seen
        if not is_any:
            self._refuse_unknown(selection.task)

    def _dataset(self, prompt: Prompt) -> str:
        return "" if self._origins is None else self._origins.dataset(prompt.prompt_id)

    def _refuse_unknown(self, task: str | None) -> None:
        """Raises ConfigError: no dataset of the run has this task."""
        if task is None or self.config is None:
            return
        if task not in (known := sorted({name for dataset in self.config.data for name in dataset.all_tasks})):
            raise ConfigError(f"task={task!r}: not a task of this run; legal: {', '.join(known)}")

    def _with_advantages(self, selection: Selection) -> Iterator[tuple[FoundGroup, Sequence[Float32] | None]]:
        """Yield groups of the selected steps with their members' advantages; a step's groups come together."""
        held, step = list[FoundGroup](), -1
        first, last = selection.steps or (-math.inf, math.inf)
        for found in found_groups(self.layout.rollouts, self._tell, selection.steps):
            if not first <= found.resolved.consumed_step <= last:  # -1: of no step
                continue
            is_next = found.standing in _IN_A_BATCH and found.resolved.consumed_step != step
            if is_next or step < 0:
                yield from self._estimate(held)
                held, step = [], found.resolved.consumed_step
            held.append(found)
        yield from self._estimate(held)

    def _estimate(self, held: Sequence[FoundGroup]) -> Iterator[tuple[FoundGroup, Sequence[Float32] | None]]:
        batch = [found for found in held if found.standing in _IN_A_BATCH]
        known = self._advantages(batch) if batch else {}
        for found in held:
            yield found, known.get(found.resolved.group.group_id)

    def _advantages(self, batch: Sequence[FoundGroup]) -> dict[int, list[Float32]]:
        """Advantages of one step's groups, by group; {} if they are not available."""
        if self._maker is None or self.config is None:
            return {}
        is_whole = len(batch) == self.config.admission.groups_per_step
        if self._maker.normalization != "off" and not is_whole:
            return {}  # they are normalised over groups that are missing here
        try:
            samples = self._maker([found.resolved.group for found in batch])
        except (ValueError, ConfigError, RoleFailed) as error:
            self._tell(f"step {batch[0].resolved.consumed_step}: no advantages: {error}")
            return {}
        by_rollout: dict[tuple[int, int], list[TrainingSample]] = {}
        for sample in samples:
            by_rollout.setdefault((sample.group_id, sample.sample_index), []).append(sample)
        rollouts = {found.resolved.group.group_id: found.resolved.group.members for found in batch}
        return {
            group_id: [on_completion(m.rollout, by_rollout[group_id, m.rollout.sample_index]) for m in members]
            for group_id, members in rollouts.items()
        }

    def _seen(self, found: FoundGroup, scored: ScoredRollout, advantages: Float32 | None) -> SeenRollout:
        resolved, rollout, prompt = found.resolved, scored.rollout, found.resolved.group.prompt
        return SeenRollout(
            group_id=rollout.group_id,
            sample_index=rollout.sample_index,
            prompt_id=prompt.prompt_id,
            task=prompt.task,
            reference=prompt.reference,
            standing=found.standing.value,
            drop_reason="" if resolved.drop_reason is None else resolved.drop_reason.value,
            step=resolved.consumed_step,
            admitted_version=resolved.group.admitted_version,
            trained_version=resolved.trained_version,
            attempts=resolved.attempts,
            reward=float("nan") if scored.verdict.value == "verifier_error" else scored.reward,
            verdict=scored.verdict.value,
            reward_parts=scored.reward_parts,
            detail=scored.detail,
            finish_reason=rollout.finish_reason.value,
            # Copies: views would keep whole segments in memory for one rollout.
            prompt_token_ids=prompt.token_ids.copy(),
            token_ids=rollout.token_ids.copy(),
            behaviour_logprobs=rollout.behaviour_logprobs.copy(),
            versions=rollout.versions.copy(),
            loss_mask=rollout.loss_mask.copy(),
            advantages=None if advantages is None else advantages.copy(),
            prompt=self.texts.whole(prompt.token_ids),
            completion=self.texts.whole(rollout.token_ids),
            token_rewards=scored.token_rewards,
            teacher_logprobs=None if scored.teacher is None else scored.teacher.logprobs.copy(),
            dataset=self._dataset(prompt),
            record="" if self._origins is None else self._origins.record(prompt),
            **self._rows(rollout),
        )

    def _rows(self, rollout: Rollout) -> dict[str, Any]:
        if not len(rollout.row_starts):
            return {}
        shared, rows = rollout.num_shared, rollout.rows
        own = [rollout.token_ids[row.start + num : row.stop] for row, num in zip(rows, shared, strict=True)]
        texts = [self.texts.whole(token_ids) for token_ids in own]
        return {"row_starts": rollout.row_starts.tolist(), "num_shared": shared, "row_texts": texts}


def sample_of(rollouts: Iterator[SeenRollout], number: int, choose: Callable[[int], int]) -> list[SeenRollout]:
    """A uniform random sample, in the original order; choose(n): a random number below n."""
    kept = list[tuple[int, SeenRollout]]()
    for place, seen in enumerate(rollouts):
        if len(kept) < number:
            kept.append((place, seen))
        elif (other := choose(place + 1)) < number:
            kept[other] = (place, seen)
    return [seen for _, seen in sorted(kept, key=lambda each: each[0])]


def _settings(layout: RunLayout, tell: Tell) -> Config | None:
    try:
        return read_resolved(layout)[0]
    except ConfigError as error:
        tell(f"{error}; no advantages are shown")
        return None


def _sample_maker(config: Config | None, tell: Tell) -> SampleMaker | None:
    if config is None:
        return None
    if config.has_critic:
        tell("algorithm.advantage=gae: advantages came from the critic and are not on disk: none are shown")
        return None
    try:
        return SampleMaker.of(config)
    except ConfigError as error:  # a user's function that is not on this machine
        tell(f"{error}; no advantages are shown")
        return None


# ----------------------------------------------------------------------------------------------------------- transcript
#
# Rollouts as text for a terminal, and as JSON for programs.
#
# Input: SeenRollout.  Output: lines.  Control characters in sampled text, which could move the cursor or do worse, are
# shown escaped.


_RULE = "─" * 80


def transcripts(rollouts: Iterable[SeenRollout]) -> Iterator[str]:
    """Lines for people: each group's prompt once, below it the selected completions."""
    group_id: int | None = None
    for seen in rollouts:
        if seen.group_id != group_id:
            group_id = seen.group_id
            yield from _head(seen)
        yield from _completion(seen)


def as_document(seen: SeenRollout) -> dict[str, Any]:
    """The rollout as a JSON object: every field, and what is derived from them."""
    values = {each.name: getattr(seen, each.name) for each in fields(seen)}
    document = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    derived = ("staleness", "advantage", "teacher_logprob")
    return document | {name: getattr(seen, name) for name in derived}


def ranges(versions: Int32) -> str:
    """ "3", or "3 to 5"."""
    first, last = int(versions.min()), int(versions.max())
    return f"{first}" if first == last else f"{first} to {last}"


def fate(seen: SeenRollout) -> str:
    """State of a rollout, in words."""
    match seen.standing:
        case "trained":
            return f"trained in step {seen.step}"
        case "skipped":
            return f"in step {seen.step}, which was skipped"
        case "taken":
            return f"taken for step {seen.step}"
        case "dropped":
            return f"dropped: {seen.drop_reason}"
    return "in no batch yet"


def _head(seen: SeenRollout) -> Iterator[str]:
    leases = f", lease {seen.attempts}" if seen.attempts > 1 else ""
    yield _RULE
    origin = f" of {escaped(seen.dataset)}" if seen.dataset else ""
    record = f", {escaped(seen.record)}" if seen.record else ""
    yield f"group {seen.group_id}: {escaped(seen.task)}, {fate(seen)} (prompt {seen.prompt_id}{origin}{leases}{record})"
    yield from _block("prompt", seen.prompt)
    yield from _block("reference", seen.reference)


def _completion(seen: SeenRollout) -> Iterator[str]:
    yield ""
    yield f"  [{seen.sample_index}] {_worth(seen)}"
    yield f"      {_origin(seen)}"
    if seen.detail:
        yield f"      verifier: {escaped(seen.detail)}"
    if not seen.row_texts:
        yield from _block("completion", seen.completion)
    for number, (text, shared) in enumerate(zip(seen.row_texts, seen.num_shared, strict=True)):
        if shared:
            yield from _block(f"row {number}", f"… {counted(shared, 'token')} as in an earlier row …")
        yield from _block("" if shared else f"row {number}", text)


def _worth(seen: SeenRollout) -> str:
    parts = ", ".join(f"{escaped(name)} {value:g}" for name, value in seen.reward_parts.items())
    reward = "no reward" if math.isnan(seen.reward) else f"reward {seen.reward:.4g}"
    advantage = "" if seen.advantage is None else f", advantage {seen.advantage:+.3f}"
    teacher = "" if seen.teacher_logprob is None else f", teacher {seen.teacher_logprob:.3f} a token"
    return f"{seen.verdict}, {reward}{f' ({parts})' if parts else ''}{advantage}{teacher}"


def _origin(seen: SeenRollout) -> str:
    age = "" if seen.staleness is None else f", trained at {seen.trained_version}: staleness {seen.staleness}"
    rows = f" in {len(seen.row_texts)} rows" if seen.row_texts else ""
    said = f"{counted(len(seen.token_ids), 'token')}{rows}, {seen.finish_reason}; versions {ranges(seen.versions)}"
    return f"{said}, admitted at {seen.admitted_version}{age}"


def _block(title: str, text: str) -> Iterator[str]:
    lines = escaped(text).split("\n") or [""]
    for number, line in enumerate(lines):
        yield f"{'' if number else title:<10} │ {line}".rstrip()
