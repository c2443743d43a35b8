"""The canary: does an engine give a fixed row of tokens the probability that the trainer gives it?

Input: publications, log-probabilities of the row by the trainer and by engines, acknowledgements.  Output: who has to
score the row, who is trusted with leases, and verdicts.  Pure: no clock, no channels.

Rules:
1. A generator that has come, or has failed, is not trusted before it has passed, under weights that arrived since.
2. All have to pass at the first publication, and every `every` versions; until they fail they stay trusted.
3. Generators whose checksums of the same version differ have to pass at once, the fewer if there are fewer; until then
   they are not trusted, and no further version is published.
4. An answer counts for the publication that it was asked for, and if one version scored all of it: else another is due.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from rlhpc.config import Config
from rlhpc.contracts import PromptSource
from rlhpc.messages import CanaryTaken, TakeCanary, WeightsLive
from rlhpc.types import Float32, Int32

log = logging.getLogger("rlhpc.canary")
MAX_TOKENS = 64
MAX_FAILURES = 3  # in a row: then new weights do not help, and the process is started again
NEVER = -1
# Mean |log-ratio|, nats.  Other kernels and orders of sums give up to 1e-4 in float32; in bfloat16 0.03 on average
# (docs/log.md), and several times that where a mixture routes a token otherwise.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.25}


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """What a canary has shown."""

    name: str
    version: int
    logratio: float  # mean |log-ratio| of engine and trainer over the row, nats; inf: not finite
    has_passed: bool
    newest_good: int  # version of the last canary that it passed before; -1: none
    num_failures: int  # in a row, this one included

    @property
    def must_restart(self) -> bool:
        """New weights have not helped."""
        return self.num_failures >= MAX_FAILURES


@dataclass(slots=True)
class _Member:
    incarnation: str
    is_trusted: bool = False
    has_to: bool = True  # pass, at the next publication if not at this one
    asked: int = 0  # number of the publication that it was last asked about
    newest_good: int = NEVER
    num_failures: int = 0


class Canary:
    """Who is trusted."""

    def __init__(self, row: Int32 | None, *, every: int, tolerance: float) -> None:
        """row: int32 [T], T ≥ 2; None: nobody is asked, and all are trusted.  every: 0 for rules 1 and 3 alone."""
        self._row, self._every, self._tolerance = row, every, tolerance
        self._members: dict[str, _Member] = {}
        self._number, self._version = 0, NEVER  # of the publication
        self._newest_round = NEVER  # version of the last one at which all had to
        self._expected: Float32 | None = None  # the trainer's
        self._answers: dict[str, Float32] = {}  # without a verdict
        self._waiting: set[str] = set()  # who have to, and have no verdict in this publication
        self._failed: dict[str, Float32] = {}  # in this publication
        self._num_passed = 0  # in this publication
        self._differing: set[str] = set()  # in this publication, by their checksums
        self._fruitless: set[tuple[str, str]] = set()  # (name, incarnation) that failed since the last that passed
        self._num_fruitless = 0  # publications in a row in which some failed and none passed
        self.logratio = 0.0  # the largest of the last publication in which there were verdicts

    # -------------------------------------------------------------------------------------------------- membership

    def joined(self, name: str, incarnation: str) -> None:
        """A generator has registered.  Idempotent for one incarnation."""
        if name not in self._members or self._members[name].incarnation != incarnation:
            self._members[name] = _Member(incarnation)

    def lost(self, name: str) -> None:
        """A generator is gone."""
        self._members.pop(name, None)
        self._waiting.discard(name)
        self._answers.pop(name, None)

    def trusts(self, name: str) -> bool:
        """Whether this generator may be given leases."""
        return self._row is None or (name in self._members and self._members[name].is_trusted)

    def is_waiting_for(self, name: str) -> bool:
        """Whether this generator has to pass in this publication, and has not answered yet."""
        return name in self._waiting

    def is_suspected(self, name: str) -> bool:
        """Whether this generator's checksum is not that of others, and its canary has not told yet who is right."""
        return name in self._waiting and name in self._differing

    # ------------------------------------------------------------------------------------------------- publications

    def begins(self, version: int, members: Collection[str]) -> Int32 | None:
        """A version is about to be published to these.  Returns the row if the trainer has to score it, too."""
        if self._row is None:
            return None
        if self._failed and not self._num_passed:
            self._num_fruitless += 1
        self._number, self._version, self._expected = self._number + 1, version, None
        self._answers, self._failed, self._num_passed, self._differing = {}, {}, 0, set()
        if self._newest_round == NEVER or (self._every and version - self._newest_round >= self._every):
            self._newest_round = version
            for member in self._members.values():
                member.has_to = True
        here = self._members.keys() & set(members)  # one that was lost while its epoch was formed is not
        self._waiting = {name for name in here if self._members[name].has_to}
        return self._row if self._waiting or len(members) > 1 else None  # several: rule 3 may need it

    def hopeless(self) -> str:
        """Why no further publication would help; "" if one may."""
        names = ", ".join(sorted({name for name, _ in self._fruitless}))
        figures = f"they differ by {self.logratio:.3g} nats a token on average, {self._tolerance:g} are tolerated"
        if len(self._failed) > 1 and not self._num_passed and not self._waiting and self._are_alike():
            return f"{names} agree with each other on a row of tokens, and not with the trainer: {figures}"
        if self._num_fruitless >= MAX_FAILURES and len(self._fruitless) > 1:
            return f"{names} do not agree with the trainer on a row of tokens, whatever is sent to them: {figures}"
        return ""

    def by_trainer(self, logprobs: Float32 | None) -> list[CanaryVerdict]:
        """The trainer's log-probabilities of the row, by the version that it has just published."""
        self._expected = logprobs
        return self._judge()

    # --------------------------------------------------------------------------------------------------- generators

    def acknowledged(self, name: str, version: int) -> TakeCanary | None:
        """A generator samples with this version.  Returns what it has to do."""
        member = self._members.get(name)
        if self._row is None or member is None or version != self._version:
            return None
        if name not in self._waiting or member.asked == self._number:
            return None
        member.asked = self._number
        return TakeCanary(self._number, self._row)

    def not_received(self, name: str) -> None:
        """A generator could not receive this publication: its canary is for the next one."""
        self._waiting.discard(name)

    def differ(self, names: Collection[str]) -> list[str]:
        """These hold something else than others under the same version.  Returns those of whom this is news."""
        news = [name for name in names if name in self._members and name not in self._differing]
        for name in news:
            member = self._members[name]
            self._differing.add(name)
            if self._row is not None and member.newest_good != self._version and name not in self._failed:
                member.is_trusted, member.has_to = False, True
                self._waiting.add(name)
        return news

    def answered(self, name: str, answer: CanaryTaken) -> list[CanaryVerdict]:
        """A generator has scored the row."""
        if answer.number != self._number or name not in self._waiting:
            return []
        if answer.policy_version != self._version:
            log.info("%s had new weights while it scored the canary of version %d", name, self._version)
            self._waiting.discard(name)
            return []
        self._answers[name] = answer.logprobs
        return self._judge()

    def _judge(self) -> list[CanaryVerdict]:
        if self._expected is None:
            return []
        ready, self._answers = self._answers, {}
        return [self._verdict(name, logprobs, self._expected) for name, logprobs in ready.items()]

    def _verdict(self, name: str, logprobs: Float32, expected: Float32) -> CanaryVerdict:
        member, logratio = self._members[name], _mean_logratio(logprobs, expected)
        self._waiting.discard(name)
        is_first = not self._failed and not self._num_passed
        self.logratio = logratio if is_first else max(self.logratio, logratio)
        has_passed = logratio <= self._tolerance
        newest_good = member.newest_good
        member.is_trusted, member.has_to = has_passed, not has_passed
        if has_passed:
            member.newest_good, member.num_failures = self._version, 0
            self._num_passed += 1
            self._num_fruitless = 0
            self._fruitless.clear()
        else:
            member.num_failures += 1
            self._failed[name] = logprobs
            self._fruitless.add((name, member.incarnation))
        return CanaryVerdict(name, self._version, logratio, has_passed, newest_good, member.num_failures)

    def _are_alike(self) -> bool:
        first, *others = self._failed.values()
        return all(_mean_logratio(first, other) <= self._tolerance for other in others)


def open_canary(config: Config, prompts: PromptSource) -> Canary:
    """As a run has it.  A scripted engine has no model that a trainer could agree with."""
    weights, generation = config.weights, config.generation
    num_tokens = min(MAX_TOKENS, generation.max_tokens - 1)
    wanted = weights.max_canary_logratio
    if generation.engine != "vllm" or wanted == "off":
        return Canary(None, every=0, tolerance=np.inf)
    row = canary_row(prompts, num_tokens)
    return Canary(row, every=weights.canary_every, tolerance=wanted or TOLERANCE[config.model.dtype])


def canary_row(prompts: PromptSource, num_tokens: int) -> Int32 | None:
    """The first prompts of a run, one after the other, up to so many tokens: text that the policy knows.

    None if there are fewer than two tokens.
    """
    row, prompt_id = prompts.peek(0).token_ids, 1
    while len(row) < num_tokens:
        row, prompt_id = np.concatenate((row, prompts.peek(prompt_id).token_ids)), prompt_id + 1
    return row[:num_tokens].astype(np.int32) if num_tokens > 1 else None


def differing(acks: Mapping[str, WeightsLive], epoch: int, version: int) -> list[str]:
    """Who holds something else than most of those whose checksums are comparable; all of them where none is rarer."""
    found: list[str] = []
    held = {
        name: ack.held
        for name, ack in acks.items()
        if ack.held is not None and not ack.error and (ack.epoch, ack.policy_version) == (epoch, version)
    }
    for layout in {each.layout for each in held.values()}:
        values = {name: each.value for name, each in held.items() if each.layout == layout}
        counts = Counter(values.values())
        most = max(counts.values())
        is_tie = list(counts.values()).count(most) > 1
        found += [name for name, value in values.items() if len(counts) > 1 and (is_tie or counts[value] < most)]
    return sorted(found)


def _mean_logratio(ours: Float32, theirs: Float32) -> float:
    """Over all tokens but the first; inf if something is not finite."""
    if ours.shape != theirs.shape:
        return float("inf")
    mean = float(np.abs(ours[1:] - theirs[1:]).mean())
    return mean if np.isfinite(mean) else float("inf")
