"""Publish a new version of the weights, leave out generators that fail, and check by a canary that engines hold it.

A version goes out in two parts.  publish(): the trainer broadcasts it to the group of the current membership epoch,
forming a new epoch first when members came or went; it ends when the trainer is free again.  wait_until_live(): every
member has acknowledged, or has been left out.  Only then is the version live and slots may be released.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from rlhpc.base.patience import Deadline
from rlhpc.config.rules import Config
from rlhpc.protocol.contracts import Clock, PromptSource, ServerChannel
from rlhpc.protocol.errors import ConfigError, PeerUnreachable, RoleFailed
from rlhpc.protocol.messages import (
    CanaryTaken,
    FormGroup,
    GroupOpened,
    JoinGroup,
    PublishReport,
    PublishWeights,
    Quarantine,
    ReceiveWeights,
    Reregister,
    TakeCanary,
    WeightsLive,
)
from rlhpc.protocol.types import Float32, Int32, WeightGroup, WeightManifest
from rlhpc.roles.controller.batch_maker import TrainerLink
from rlhpc.weights.choice import Membership, choose_transport

# --------------------------------------------------------------------------------------------------------------- canary
#
# The canary: does an engine give a fixed row of tokens the probability that the trainer gives it?
#
# Input: publications, log-probabilities of the row by the trainer and by engines, acknowledgements.  Output: generators
# that have to score the row, generators that may be given leases, and verdicts.  Pure: no clock, no channels.
#
# Rules:
# 1. A generator that is new or has failed is not trusted until it has passed, under weights that arrived since.
# 2. All have to pass at the first publication, and every `every` versions; until they fail they stay trusted.
# 3. Generators whose checksums of a version differ from the others' (the minority, if there is one) have to pass at
#    once; until then they are not trusted, and no further version is published.
# 4. An answer counts only for the publication for which it was requested, and only if one version scored the whole
#    row: else another answer is due.

log = logging.getLogger("rlhpc.weight_sync")
MAX_TOKENS = 64
MAX_FAILURES = 3  # in a row: then new weights do not help, and the generator is restarted
NEVER = -1
# Mean |log-ratio|, nats.  Other kernels and orders of sums give up to 1e-4 in float32; in bfloat16 0.03 on average
# (docs/log.md), and several times that where a mixture routes a token otherwise.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.25}


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """Result of one generator's canary."""

    name: str
    version: int
    logratio: float  # mean |log-ratio| of engine and trainer over the row, nats; inf: not finite
    has_passed: bool
    newest_good: int  # version of the last canary that this generator passed; -1: none
    num_failures: int  # in a row, this one included

    @property
    def must_restart(self) -> bool:
        """True if new weights have not helped, so that the process must be restarted."""
        return self.num_failures >= MAX_FAILURES


@dataclass(slots=True)
class _Member:
    incarnation: str
    is_trusted: bool = False
    has_to: bool = True  # has to pass, at this publication or the next
    asked: int = 0  # number of the publication of its last request
    newest_good: int = NEVER
    num_failures: int = 0


class Canary:
    """Keeps the set of trusted generators."""

    def __init__(self, row: Int32 | None, *, every: int, tolerance: float) -> None:
        """row: int32 [T], T ≥ 2; None: no canaries, and all are trusted.  every: 0 for rules 1 and 3 alone."""
        self._row, self._every, self._tolerance = row, every, tolerance
        self._members: dict[str, _Member] = {}
        self._number, self._version = 0, NEVER  # of the publication
        self._newest_round = NEVER  # version of the last publication at which all had to pass
        self._expected: Float32 | None = None  # the trainer's
        self._answers: dict[str, Float32] = {}  # generators' log-probabilities that have no verdict yet
        self._waiting: set[str] = set()  # generators that have to pass in this publication and have no verdict
        self._failed: dict[str, Float32] = {}  # answers that failed in this publication
        self._num_passed = 0  # in this publication
        self._differing: set[str] = set()  # generators whose checksums differ in this publication
        self._fruitless: set[tuple[str, str]] = set()  # (name, incarnation) that failed since the last pass
        self._num_fruitless = 0  # consecutive publications with failures and without a pass
        self.logratio = 0.0  # the largest mean in the last publication with verdicts, nats

    # -------------------------------------------------------------------------------------------------- membership

    def joined(self, name: str, incarnation: str) -> None:
        """Note that a generator has registered.  Idempotent for one incarnation."""
        if name not in self._members or self._members[name].incarnation != incarnation:
            self._members[name] = _Member(incarnation)

    def lost(self, name: str) -> None:
        """Remove a generator."""
        self._members.pop(name, None)
        self._waiting.discard(name)
        self._answers.pop(name, None)

    def trusts(self, name: str) -> bool:
        """Whether this generator may be given leases."""
        return self._row is None or (name in self._members and self._members[name].is_trusted)

    def is_waiting_for(self, name: str) -> bool:
        """Whether this generator has to pass in this publication and has not answered yet."""
        return name in self._waiting

    def is_suspected(self, name: str) -> bool:
        """Whether this generator's checksum differs from others' and its canary has not decided yet which is right."""
        return name in self._waiting and name in self._differing

    # ------------------------------------------------------------------------------------------------- publications

    def begins(self, version: int, members: Collection[str]) -> Int32 | None:
        """Begin the publication of a version to these members; return the row if the trainer has to score it, too."""
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
        """Reason why no further publication would help; "" if one may help."""
        names = ", ".join(sorted({name for name, _ in self._fruitless}))
        figures = f"they differ by {self.logratio:.3g} nats a token on average, {self._tolerance:g} are tolerated"
        if len(self._failed) > 1 and not self._num_passed and not self._waiting and self._are_alike():
            return f"{names} agree with each other on a row of tokens, and not with the trainer: {figures}"
        if self._num_fruitless >= MAX_FAILURES and len(self._fruitless) > 1:
            return f"{names} do not agree with the trainer on a row of tokens, whatever is sent to them: {figures}"
        return ""

    def by_trainer(self, logprobs: Float32 | None) -> list[CanaryVerdict]:
        """Take the trainer's log-probabilities of the row under the published version; return new verdicts."""
        self._expected = logprobs
        return self._judge()

    # --------------------------------------------------------------------------------------------------- generators

    def acknowledged(self, name: str, version: int) -> TakeCanary | None:
        """Note that a generator samples with this version; return its request to score the row, if one is due."""
        member = self._members.get(name)
        if self._row is None or member is None or version != self._version:
            return None
        if name not in self._waiting or member.asked == self._number:
            return None
        member.asked = self._number
        return TakeCanary(self._number, self._row)

    def not_received(self, name: str) -> None:
        """Move a generator's canary to the next publication: it could not receive this one."""
        self._waiting.discard(name)

    def differ(self, names: Collection[str]) -> list[str]:
        """Suspect these generators, whose checksums of the version differ; return those not suspected before."""
        news = [name for name in names if name in self._members and name not in self._differing]
        for name in news:
            member = self._members[name]
            self._differing.add(name)
            if self._row is not None and member.newest_good != self._version and name not in self._failed:
                member.is_trusted, member.has_to = False, True
                self._waiting.add(name)
        return news

    def answered(self, name: str, answer: CanaryTaken) -> list[CanaryVerdict]:
        """Take a generator's log-probabilities of the row; return new verdicts."""
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
    """Open the run's canary; without a row for a scripted engine, which has no model to compare."""
    weights, generation = config.weights, config.generation
    num_tokens = min(MAX_TOKENS, generation.max_tokens - 1)
    wanted = weights.max_canary_logratio
    if not generation.has_model or wanted == "off":
        return Canary(None, every=0, tolerance=np.inf)
    row = canary_row(prompts, num_tokens)
    return Canary(row, every=weights.canary_every, tolerance=wanted or TOLERANCE[config.model.dtype])


def canary_row(prompts: PromptSource, num_tokens: int) -> Int32 | None:
    """Join the first prompts of a run up to num_tokens tokens: text that the policy knows.

    None if there are fewer than two tokens.
    """
    row, prompt_id = prompts.peek(0).token_ids, 1
    while len(row) < num_tokens:
        row, prompt_id = np.concatenate((row, prompts.peek(prompt_id).token_ids)), prompt_id + 1
    return row[:num_tokens].astype(np.int32) if num_tokens > 1 else None


def differing(acks: Mapping[str, WeightsLive], epoch: int, version: int) -> list[str]:
    """Names whose checksum differs from most of the comparable ones; all of these if no checksum is rarer."""
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
    """Mean |log-ratio| over all tokens but the first, nats; inf if a value is not finite."""
    if ours.shape != theirs.shape:
        return float("inf")
    mean = float(np.abs(ours[1:] - theirs[1:]).mean())
    return mean if np.isfinite(mean) else float("inf")


# ---------------------------------------------------------------------------------------------------------- weight sync

MAX_FAILED_BROADCASTS = 8
FIRST_MEMBER_S = 900.0  # engines load for minutes
PAUSE_S = 0.2  # after the first failure, growing: time to notice dead generators


@dataclass(frozen=True, slots=True)
class WeightSyncLimits:
    """Time-outs for generators."""

    first_member_s: float = FIRST_MEMBER_S  # for the first generator to register
    ack_timeout_s: float = 120.0  # for acknowledgements of one broadcast

    @classmethod
    def of(cls, meet_timeout_s: float, ack_timeout_s: float) -> WeightSyncLimits:
        """Limits for processes that wait this long for each other; loading the engine comes on top."""
        return cls(max(FIRST_MEMBER_S, meet_timeout_s), ack_timeout_s)


ChooseTransport: TypeAlias = Callable[[str, Mapping[str, Sequence[str]]], str]


def transport_choice(config: Config) -> ChooseTransport:
    """Return the function that chooses a transport between devices; it raises ConfigError."""
    return partial(
        choose_transport,
        config.weights.transport,
        is_one_host=config.transport.kind != "tcp",
        is_deterministic=config.run.deterministic,
    )


class WeightSync:
    """Owns the membership epochs and the transfer of a version from trainer to generators."""

    def __init__(
        self,
        control: ServerChannel,
        trainer: TrainerLink,
        membership: Membership,
        *,
        choose: ChooseTransport,
        timeline: int = 0,
        limits: WeightSyncLimits,
        canary: Canary,
        clock: Clock = time.monotonic,
    ) -> None:
        """choose: see transport_choice.  timeline: the run's (buffer/history.py).  clock: for generators' time-outs."""
        self._control, self._trainer, self._membership = control, trainer, membership
        self._canary = canary
        self._limits, self._clock = limits, clock
        self._choose, self._trainer_device, self._timeline = choose, "", timeline
        self._devices: dict[str, tuple[str, ...]] = {}  # generator → devices of its workers
        self._manifest: WeightManifest | None = None
        self._group: WeightGroup | None = None  # of the current epoch, while it is intact
        self._changed = asyncio.Condition()
        self._is_ending = False
        self.live_version = -1  # newest version with which every remaining member samples
        self.publish_s = 0.0  # duration of the last broadcast, on the trainer
        self.sent_share = 1.0  # bytes sent / bytes of the weights, in the last broadcast
        self.last_acks: dict[str, WeightsLive] = {}
        self._num_canaries_failed = 0  # since take_failed_canaries()
        self.num_checksums_differed = 0  # times that a generator's checksum differed from the others'

    def describe(self, manifest: WeightManifest, device: str) -> None:
        """Record the manifest of the trainer's broadcasts, and its device."""
        self._manifest, self._trainer_device = manifest, device

    # ---------------------------------------------------------------------------------------- what generators tell us

    def misplaced(self, name: str, devices: tuple[str, ...]) -> str:
        """Reason why a generator with workers on these devices cannot receive weights like the others; "" if it can.

        Before the first version is live it is always "": an unreachable generator ends the run then.
        """
        if self.live_version < 0:
            return ""
        try:
            self._choose(self._trainer_device, self._devices_of(self._membership.candidates) | {name: devices})
        except ConfigError as error:
            return str(error)
        return ""

    async def joined(self, name: str, devices: tuple[str, ...], incarnation: str) -> None:
        """Add a registered generator, with a worker on each of these devices, from the next epoch on."""
        async with self._changed:
            self._devices[name] = devices
            self._membership.hello(name, len(devices), incarnation)
            self._canary.joined(name, incarnation)
            self._changed.notify_all()

    async def lost(self, name: str) -> None:
        """Leave out a dead generator from now on."""
        async with self._changed:
            self._membership.lost(name)
            self._canary.lost(name)
            self._changed.notify_all()

    async def acknowledge(self, name: str, ack: WeightsLive) -> None:
        """Take a generator's report: it samples with this version, or says why not and retries in the next epoch."""
        canaries: dict[str, TakeCanary] = {}
        async with self._changed:
            self.last_acks[name] = ack
            if ack.error:
                log.warning("%s: epoch %d, version %d: %s", name, ack.epoch, ack.policy_version, ack.error)
                self._membership.failed(name, ack.epoch)
                self._canary.not_received(name)
            elif self._membership.acknowledged(name, ack.epoch, ack.policy_version):
                canaries = self._canaries_after(name, ack)
            self._changed.notify_all()
        for each, canary in canaries.items():
            await self._tell(each, canary)

    def _canaries_after(self, name: str, ack: WeightsLive) -> dict[str, TakeCanary]:
        """Canaries that are due after this acknowledgement, by generator."""
        suspects = self._canary.differ(differing(self.last_acks, ack.epoch, ack.policy_version))
        for suspect in suspects:
            held = self.last_acks[suspect].held
            log.warning("%s has other weights than others at version %d: %s", suspect, ack.policy_version, held)
        self.num_checksums_differed += len(suspects)
        asked = ((each, self._canary.acknowledged(each, ack.policy_version)) for each in sorted({name, *suspects}))
        return {each: canary for each, canary in asked if canary is not None}

    async def scored(self, name: str, answer: CanaryTaken) -> None:
        """Take a generator's log-probabilities of the canary."""
        await self._follow(self._canary.answered(name, answer))

    async def _follow(self, verdicts: list[CanaryVerdict]) -> None:
        """Report canary results, and quarantine generators that failed."""
        async with self._changed:
            self._changed.notify_all()
        for verdict in verdicts:
            if verdict.has_passed:
                log.info("%s: canary of version %d: %.3g nats", verdict.name, verdict.version, verdict.logratio)
                continue
            self._num_canaries_failed += 1
            reason = (
                f"its canary of version {verdict.version} differs from the trainer's by {verdict.logratio:.3g} nats a "
                f"token on average, the failure is number {verdict.num_failures} in a row"
            )
            log.error("%s is quarantined: %s", verdict.name, reason)
            await self._tell(verdict.name, Quarantine(verdict.newest_good, verdict.must_restart, reason))

    @property
    def ready_members(self) -> frozenset[str]:
        """Generators that sample with the live version, and are trusted to: they may be given leases."""
        return self._trusted_members(self.live_version) if self.live_version >= 0 else frozenset()

    def is_ready(self, name: str) -> bool:
        """Whether this is one of the ready members."""
        return self.live_version >= 0 and self._membership.serves(name, self.live_version) and self._canary.trusts(name)

    def _trusted_members(self, version: int) -> frozenset[str]:
        return frozenset(filter(self._canary.trusts, self._membership.live_members(version)))

    def take_failed_canaries(self) -> int:
        """Return the number of canaries that failed since the last call."""
        number, self._num_canaries_failed = self._num_canaries_failed, 0
        return number

    @property
    def canary_logratio(self) -> float:
        """Largest mean |log-ratio| of the last canaries, nats."""
        return self._canary.logratio

    @property
    def is_deserted(self) -> bool:
        """True if no generator may be given leases, and a publication may help one of them."""
        return self.live_version >= 0 and not self.ready_members and bool(self._membership.candidates)

    @property
    def epoch(self) -> int:
        """Current membership epoch; 0 before the first."""
        return self._group.epoch if self._group is not None else 0

    # ------------------------------------------------------------------------------------------------------ publishing

    async def stop_waiting(self) -> None:
        """The run is ending: end every wait for a generator."""
        async with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    async def publish(self, version: int) -> bool:
        """Broadcast `version`, to new groups after failures, until one group has received it.

        False: the run is ending and there is no generator.  Raises RoleFailed when there is none for `first_member_s`,
        or after too many failed broadcasts.
        """
        if self._manifest is None:
            raise RoleFailed("weights cannot be published before the trainer has described them")
        for failures in range(1, MAX_FAILED_BROADCASTS + 1):
            group = await self._current_group()
            if group is None:
                return False
            if why := self._canary.hopeless():
                raise RoleFailed(f"trainer and engines do not compute the same model: {why}")
            row = self._canary.begins(version, group.members)
            # Encoded once for all: for 18,000 tensors and 300 generators the codec would block the event loop for 4 s.
            coming = ReceiveWeights(replace(self._manifest, policy_version=version, epoch=group.epoch))
            await asyncio.gather(*(self._tell(name, coming) for name in group.members))
            report = await self._trainer.ask(PublishWeights(group.epoch, version, row), PublishReport)
            self.publish_s, self.sent_share = report.seconds, report.sent_share
            if not report.error:
                await self._follow(self._canary.by_trainer(report.canary))
                return True
            log.warning("epoch %d dissolved: %s", group.epoch, report.error)
            self._group = None
            await asyncio.sleep(PAUSE_S * failures)
        raise RoleFailed(
            f"version {version}: {MAX_FAILED_BROADCASTS} broadcasts in a row failed, the last: {report.error}"
        )

    async def wait_until_live(self, version: int) -> bool:
        """Wait for acknowledgements.  True: the version is live on at least one generator.

        Members that failed, died or stayed silent too long are left out of the next epoch; False: no member is left,
        and the caller publishes again.
        """
        if not await self._until(lambda: self._is_settled(version), self._limits.ack_timeout_s):
            for name in sorted(self._membership.waiting_for(version)):
                log.warning("%s did not acknowledge version %d: it retries in the next epoch", name, version)
                self._membership.failed(name, self.epoch)
        if not self._trusted_members(version):
            return False
        self.live_version = version
        return True

    def _is_settled(self, version: int) -> bool:
        """Whether all have acknowledged; if no generator is trusted yet, also all canaries must be answered.

        A version does not wait for canaries while a generator is trusted: one that has to pass gets its leases later.
        It does wait if checksums differ: the next weights would overwrite the damage before it is known which
        generator's tokens it is in.
        """
        if self._membership.waiting_for(version):
            return False
        live = self._membership.live_members(version)
        if any(self._canary.is_suspected(name) for name in live):
            return False
        return bool(self._trusted_members(version)) or not any(map(self._canary.is_waiting_for, live))

    async def _current_group(self) -> WeightGroup | None:
        if self._group is None or self._membership.needs_new_epoch:
            self._group = await self._form()
        return self._group

    async def _form(self) -> WeightGroup | None:
        """Open a new epoch with every generator that is alive.

        Raises RoleFailed when none appears, ConfigError when no transport connects these devices.
        """
        if not await self._somebody():
            return None
        members = self._membership.candidates
        group = self._membership.next_group(self._choose(self._trainer_device, self._devices_of(members)))
        opened = await self._trainer.ask(FormGroup(group), GroupOpened)
        if opened.error:
            raise RoleFailed(f"the trainer cannot open membership epoch {group.epoch}: {opened.error}")
        log.info("epoch %d, by %s: %s", group.epoch, group.transport, ", ".join(group.members))
        await asyncio.gather(*(self._tell(name, JoinGroup(opened.group, self._timeline)) for name in group.members))
        return opened.group

    def _devices_of(self, members: Iterable[str]) -> dict[str, tuple[str, ...]]:
        return {name: self._devices[name] for name in members}

    async def _somebody(self) -> bool:
        """Wait for a generator that can be reached.  False: the run is ending, and there is none."""
        while True:
            if not await self._until(
                lambda: bool(self._membership.candidates) or self._is_ending, self._limits.first_member_s
            ):
                raise RoleFailed(
                    f"no generator for {self._limits.first_member_s:.0f} s; see logs/generator-*/ for the reason"
                )
            await asyncio.gather(*(self._tell(name, Reregister()) for name in sorted(self._membership.candidates)))
            if self._membership.candidates or self._is_ending:
                return bool(self._membership.candidates)

    async def _until(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Wait until the condition holds; False after `limit_s`, by a clock that excludes pauses of this process."""
        deadline = Deadline(limit_s, self._clock)
        async with self._changed:
            while not is_so():
                if deadline.is_over:
                    return False
                with suppress(TimeoutError):
                    async with asyncio.timeout(deadline.left_s):
                        await self._changed.wait()
        return True

    async def _tell(self, name: str, message: object) -> None:
        try:
            await self._control.send(name, message)
        except PeerUnreachable:
            log.warning("%s cannot be reached: left out", name)
            await self.lost(name)
