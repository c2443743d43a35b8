"""Bugs that are planted to see that the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest.mock import patch

from rlhpc.protocol.messages import Delivery
from rlhpc.protocol.types import ScoredRollout
from rlhpc.roles.controller.leases import RolloutSink
from rlhpc.roles.controller.persistence import Journaling, _Receipts
from rlhpc.roles.controller.train_loop import TrainLoop


@contextmanager
def release_too_early() -> Iterator[None]:
    """Slots are freed when the weights are on their way, not when they are live."""
    real = TrainLoop._publish

    async def publish(loop: TrainLoop) -> None:
        groups, loop._unreleased = loop._unreleased, []
        loop._buffer.release(groups)
        loop._wake()
        await real(loop)

    with patch.object(TrainLoop, "_publish", publish):
        yield


@contextmanager
def lost_acknowledgement() -> Iterator[None]:
    """What arrives while a commit is under way is not acknowledged: its receipt is overwritten."""
    real = Journaling.received

    def received(self: Journaling, name: str, delivery: Delivery) -> None:
        if not self._work.is_set():
            real(self, name, delivery)
        self._work.set()

    with patch.object(Journaling, "received", received):
        yield


@contextmanager
def acknowledged_before_the_disk_has_it() -> Iterator[None]:
    """What has arrived while a commit was under way is acknowledged with it."""
    real = _Receipts.advance

    def advance(self: _Receipts, num_durable: int) -> bool:
        return real(self, num_durable + 1000)

    with patch.object(_Receipts, "advance", advance):
        yield


@contextmanager
def duplicate_counted() -> Iterator[None]:
    """A second copy of a rollout is taken for the member that is missing."""
    real = RolloutSink.receive

    def receive(self: RolloutSink, holder: str, scored: ScoredRollout, prompt_checksum: int) -> bool:
        group_id, index = scored.rollout.group_id, scored.rollout.sample_index
        record = self._buffer.ledger.open_record(group_id)
        if record is not None and record.members[index].is_delivered:
            missing = next((i for i, member in enumerate(record.members) if not member.is_delivered), index)
            scored = replace(scored, rollout=replace(scored.rollout, sample_index=missing))
        return real(self, holder, scored, prompt_checksum)

    with patch.object(RolloutSink, "receive", receive):
        yield


BUGS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "release too early": release_too_early,
    "lost acknowledgement": lost_acknowledgement,
    "acknowledged before the disk has it": acknowledged_before_the_disk_has_it,
    "duplicate counted": duplicate_counted,
}
