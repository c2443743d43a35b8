"""Publish a new version of the weights to the generators, and leave out those that fail.

A version goes out in two parts.  publish(): the trainer broadcasts it to the group of the current membership epoch,
forming a new epoch first when members came or went; it ends when the trainer is free again.  wait_until_live(): every
member has acknowledged, or has been left out.  Only then is the version live and slots may be released.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from rlhpc.config import Config
from rlhpc.contracts import Clock, ServerChannel
from rlhpc.deadline import Deadline
from rlhpc.errors import ConfigError, PeerUnreachable, RoleFailed
from rlhpc.messages import (
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
from rlhpc.roles.controller.canary import Canary, CanaryVerdict, differing
from rlhpc.roles.controller.trainer_link import TrainerLink
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.choice import choose_transport
from rlhpc.weights.membership import Membership

log = logging.getLogger("rlhpc.weight_sync")
MAX_FAILED_BROADCASTS = 8
FIRST_MEMBER_S = 900.0  # engines load for minutes
PAUSE_S = 0.2  # after the first failure, growing: time for the dead to be noticed


@dataclass(frozen=True, slots=True)
class WeightSyncLimits:
    """How long to wait for generators."""

    first_member_s: float = FIRST_MEMBER_S  # for the first generator to register
    ack_timeout_s: float = 120.0  # for acknowledgements of one broadcast

    @classmethod
    def of(cls, meet_timeout_s: float, ack_timeout_s: float) -> WeightSyncLimits:
        """Limits for processes that wait this long for each other; loading the engine comes on top."""
        return cls(max(FIRST_MEMBER_S, meet_timeout_s), ack_timeout_s)


ChooseTransport: TypeAlias = Callable[[str, Mapping[str, Sequence[str]]], str]


def transport_choice(config: Config) -> ChooseTransport:
    """How weights travel from the trainer's device to those of the engines' workers; it raises ConfigError."""
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
        """choose: see transport_choice.  timeline: of the run (buffer/history.py).  `clock`: for others' time-outs."""
        self._control, self._trainer, self._membership = control, trainer, membership
        self._canary = canary
        self._limits, self._clock = limits, clock
        self._choose, self._trainer_device, self._timeline = choose, "", timeline
        self._devices: dict[str, tuple[str, ...]] = {}  # of every generator's workers
        self._manifest: WeightManifest | None = None
        self._group: WeightGroup | None = None  # of the current epoch, while it is intact
        self._changed = asyncio.Condition()
        self._is_ending = False
        self.live_version = -1  # newest version that every remaining member samples with
        self.publish_s = 0.0  # of the last broadcast, on the trainer
        self.sent_share = 1.0  # bytes that it took, for each of the weights
        self.last_acks: dict[str, WeightsLive] = {}
        self._num_canaries_failed = 0  # since take_failed_canaries()
        self.num_checksums_differed = 0  # times that a generator's was not that of the others

    def describe(self, manifest: WeightManifest, device: str) -> None:
        """Record what the trainer will broadcast, and from which device."""
        self._manifest, self._trainer_device = manifest, device

    # ---------------------------------------------------------------------------------------- what generators tell us

    def misplaced(self, name: str, devices: tuple[str, ...]) -> str:
        """Why a generator with workers on these devices cannot receive weights as the others do; "" if it can.

        Before the first version is live none is refused: then an unreachable generator ends the run.
        """
        if self.live_version < 0:
            return ""
        try:
            self._choose(self._trainer_device, self._devices_of(self._membership.candidates) | {name: devices})
        except ConfigError as error:
            return str(error)
        return ""

    async def joined(self, name: str, devices: tuple[str, ...], incarnation: str) -> None:
        """A generator has registered, with a worker on each of these devices; it takes part from the next epoch on."""
        async with self._changed:
            self._devices[name] = devices
            self._membership.hello(name, len(devices), incarnation)
            self._canary.joined(name, incarnation)
            self._changed.notify_all()

    async def lost(self, name: str) -> None:
        """A generator is dead; it is left out from now on."""
        async with self._changed:
            self._membership.lost(name)
            self._canary.lost(name)
            self._changed.notify_all()

    async def acknowledge(self, name: str, ack: WeightsLive) -> None:
        """A generator samples with this version, or reports why not; then it retries in the next epoch."""
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
        """What is due because of this acknowledgement."""
        suspects = self._canary.differ(differing(self.last_acks, ack.epoch, ack.policy_version))
        for suspect in suspects:
            held = self.last_acks[suspect].held
            log.warning("%s has other weights than others at version %d: %s", suspect, ack.policy_version, held)
        self.num_checksums_differed += len(suspects)
        asked = ((each, self._canary.acknowledged(each, ack.policy_version)) for each in sorted({name, *suspects}))
        return {each: canary for each, canary in asked if canary is not None}

    async def scored(self, name: str, answer: CanaryTaken) -> None:
        """A generator has scored the canary."""
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
        """Number of canaries that failed since the last call."""
        number, self._num_canaries_failed = self._num_canaries_failed, 0
        return number

    @property
    def canary_logratio(self) -> float:
        """Largest mean |log-ratio| of the last canaries, nats."""
        return self._canary.logratio

    @property
    def is_deserted(self) -> bool:
        """True if no generator may be given leases, and one is registered that a publication may help."""
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
        """Broadcast `version` until it has reached some group.

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
            # One message for all: of 18,000 tensors, for 300 generators, the codec would keep the loop for 4 s.
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
        """Wait for the acknowledgements.  True: the version is live on at least one generator.

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
        """All have acknowledged; and if nobody is trusted with the version yet, nobody's canary is under way.

        A version does not wait for canaries while somebody is trusted: who has to pass gets its leases later.  It does
        where checksums differ: the next weights would heal the damage before it is known whose tokens it is in.
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
