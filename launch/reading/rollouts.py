"""Rollouts of a run, each with all the details that people look for.

    segments, journal ─▶ FoundGroup ─▶ advantages of its step ─▶ texts ─▶ SeenRollout

Input: a run directory, alive, killed or complete, on any machine.  Output: SeenRollout.  What is not available
(no tokenizer here, advantages from a critic) is reported once, and the rest is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from launch.reading.texts import texts_of
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.buffer.run_rollouts import FoundGroup, Standing, Tell, found_groups
from rlhpc.config import Config
from rlhpc.config_file import read_resolved
from rlhpc.errors import ConfigError, RoleFailed
from rlhpc.run_layout import RunLayout
from rlhpc.types import Bool, Float32, Int32, ScoredRollout

_IN_A_BATCH = (Standing.TRAINED, Standing.SKIPPED, Standing.TAKEN)


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
    step: int  # that trained it, or took it; -1: none
    admitted_version: int
    trained_version: int  # -1: none
    attempts: int
    reward: float  # nan where the verdict is verifier_error
    verdict: str
    reward_parts: dict[str, float]
    detail: str
    finish_reason: str
    prompt_token_ids: Int32  # [Lp]
    token_ids: Int32  # [Lc]
    behaviour_logprobs: Float32  # [Lc] natural log
    versions: Int32  # [Lc]
    loss_mask: Bool  # [Lc]
    advantages: Float32 | None  # [Lc] 0 where the mask is False; None: in no batch, or not known
    prompt: str
    completion: str
    token_rewards: dict[int, float] = field(default_factory=dict)

    @property
    def staleness(self) -> int | None:
        """Versions between admission and training; None: it was not trained."""
        return self.trained_version - self.admitted_version if self.trained_version >= 0 else None

    @property
    def advantage(self) -> float | None:
        """Mean over the loss tokens; None where advantages are."""
        if self.advantages is None:
            return None
        return float(self.advantages[self.loss_mask].mean()) if self.loss_mask.any() else 0.0


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of rollouts; the default selects all."""

    steps: tuple[int, int] | None = None  # first and last that count
    task: str | None = None
    verdict: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    pattern: re.Pattern[str] | None = None  # found in prompt, completion, reference or the verifier's line

    def wants_step(self, step: int) -> bool:
        """False if no member of that step's groups is selected; -1: of a group of no step."""
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def wants_member(self, scored: ScoredRollout) -> bool:
        """Checks task, verdict and reward.  With a failed verifier there is no reward."""
        if self.task not in (None, scored.rollout.prompt.task) or self.verdict not in (None, scored.verdict.value):
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        low = -np.inf if self.min_reward is None else self.min_reward
        high = np.inf if self.max_reward is None else self.max_reward
        return scored.verdict.value != "verifier_error" and bool(low <= scored.reward <= high)

    def wants_text(self, *texts: str) -> bool:
        """Checks the text."""
        return self.pattern is None or any(self.pattern.search(text) for text in texts)


EVERYTHING = Selection()


class RunRollouts:
    """The rollouts of one run directory."""

    def __init__(self, layout: RunLayout, *, tokenizer_dir: Path | None = None, tell: Tell) -> None:
        """tell: called once for each thing that cannot be shown.

        Raises RunDirectoryError: no run is here; ConfigError: no such tokenizer.
        """
        layout.require_run()
        self.layout, self._tell = layout, tell
        self.config = _settings(layout, tell)
        self.texts, remark = texts_of(None if self.config is None else self.config.model.path, tokenizer_dir)
        if remark:
            tell(remark)
        self._maker = _sample_maker(self.config, tell)

    def each(self, selection: Selection = EVERYTHING) -> Iterator[SeenRollout]:
        """The selected rollouts, in the order in which their groups were resolved.

        Raises ConfigError: text is searched, and there is no tokenizer; no rollout and no dataset has the task.
        """
        if selection.pattern is not None and not self.texts.are_known:
            raise ConfigError("text is searched, and the run's tokenizer is not on this machine: give --tokenizer DIR")
        return self._each(selection)

    def _each(self, selection: Selection) -> Iterator[SeenRollout]:
        is_any = False
        for found, advantages in self._with_advantages(selection):
            for index, scored in enumerate(found.resolved.group.members):
                if selection.wants_member(scored):
                    mine = None if advantages is None else advantages[index]
                    seen = self._seen(found, scored, mine)
                    if selection.wants_text(seen.prompt, seen.completion, seen.reference, seen.detail):
                        is_any = True
                        yield seen
        if not is_any:
            self._refuse_unknown(selection.task)

    def _refuse_unknown(self, task: str | None) -> None:
        """Raises ConfigError: no dataset of the run has this task."""
        if task is None or self.config is None:
            return
        if task not in (known := sorted({name for dataset in self.config.data for name in dataset.all_tasks})):
            raise ConfigError(f"task={task!r}: not a task of this run; legal: {', '.join(known)}")

    def _with_advantages(self, selection: Selection) -> Iterator[tuple[FoundGroup, Sequence[Float32] | None]]:
        """Groups of the selected steps with their members' advantages; a step's groups are yielded together."""
        held, step = list[FoundGroup](), -1
        for found in found_groups(self.layout.rollouts, self._tell, selection.steps):
            if not selection.wants_step(found.resolved.consumed_step):
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
            return {}  # they are normalised over groups that are not here
        try:
            samples = iter(self._maker([found.resolved.group for found in batch]))
        except (ValueError, ConfigError, RoleFailed) as error:
            self._tell(f"step {batch[0].resolved.consumed_step}: no advantages: {error}")
            return {}
        known: dict[int, list[Float32]] = {}
        for found in batch:
            group = found.resolved.group
            start = len(group.prompt.token_ids)
            known[group.group_id] = [next(samples).advantages[start:] for _ in group.members]
        return known

    def _seen(self, found: FoundGroup, scored: ScoredRollout, advantages: Float32 | None) -> SeenRollout:
        resolved, rollout, prompt = found.resolved, scored.rollout, scored.rollout.prompt
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
            # Copies: the others are views of whole segments, which one rollout would keep in memory.
            prompt_token_ids=prompt.token_ids.copy(),
            token_ids=rollout.token_ids.copy(),
            behaviour_logprobs=rollout.behaviour_logprobs.copy(),
            versions=rollout.versions.copy(),
            loss_mask=rollout.loss_mask.copy(),
            advantages=None if advantages is None else advantages.copy(),
            prompt=self.texts.whole(prompt.token_ids),
            completion=self.texts.whole(rollout.token_ids),
            token_rewards=scored.token_rewards,
        )


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
    except ConfigError as error:  # a function of the user's own that is not on this machine
        tell(f"{error}; no advantages are shown")
        return None
