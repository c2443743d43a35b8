"""What must hold after every event of the controller, and of every message and step.

Input: the controller's parts, looked at from outside; what generators have delivered, what the trainer is given, what
was acknowledged.  Output: Violation, with the invariant and what broke it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.buffer.segments import read_segment, segment_paths
from rlhpc.config.rules import Config
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import LedgerError
from rlhpc.protocol.messages import Delivered, Delivery
from rlhpc.protocol.types import Lease, PackedBatch, Prompt, ScoredRollout
from rlhpc.roles.controller.controller import Controller
from tests.simulator.trainer import Weights, prompts_of

ANSWER_S = 5.0  # virtual: a commit takes some hundredths
Key = tuple[int, int]  # group, sample index
Made = tuple[int, int, str]  # and the prompt's tokens


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Known:
    """What is true of a run whatever happens to its processes."""

    made: dict[str, Made] = field(default_factory=dict)  # by the verdict's text, which is unique: what it was made for
    deliveries: dict[tuple[str, int], Key] = field(default_factory=dict)  # (outbox, number)
    acknowledged: set[Key] = field(default_factory=set)


class _Inbox:
    """What the controller has heard of one generator's deliveries, and not answered yet."""

    def __init__(self, outbox: str) -> None:
        self.outbox = outbox
        self.unanswered: dict[int, float] = {}  # number → when it was heard last
        self.whole = 0  # all up to this one are here
        self._heard: set[int] = set()

    def heard(self, message: Delivery, now_s: float) -> None:
        self.unanswered[message.number] = now_s
        self._heard.add(message.number)
        self.whole = max(self.whole, message.oldest - 1)
        while self.whole + 1 in self._heard:
            self.whole += 1

    def answered(self, message: Delivered) -> list[int]:
        """Return the numbers that this one answers."""
        found = sorted(number for number in self.unanswered if number <= message.number)
        for number in found:
            del self.unanswered[number]
        return found

    def begin_again(self, now_s: float) -> None:
        self.unanswered = dict.fromkeys(self.unanswered, now_s)


class Invariants:
    """Of one attempt's controller."""

    def __init__(
        self, controller: Controller, known: Known, clock: Clock, is_hindered: Callable[[str, str], bool]
    ) -> None:
        """is_hindered: whether a generator, with this outbox, cannot be answered, for a reason that is no bug."""
        self._controller, self._known = controller, known
        state: Any = controller.state
        self._for_a_group: set[tuple[str, int]] = set()  # deliveries whose group was there when they were heard
        self._buffer, self._ledger, self._journal = state.buffer, state.buffer.ledger, state.journal
        self._timeline = state.replay.timeline
        self._weight_sync: Any = controller.weight_sync
        self._config = controller.context.config
        self._seen: tuple[int, ...] = ()
        self._num_slots_taken = len(self._ledger.groups)
        self._taken: dict[int, int | None] = {}  # group → version that its step makes, once it is known
        self._clock, self._is_hindered = clock, is_hindered
        self._looked_s = clock()
        self._last_arrived = 0
        self._inboxes: dict[str, _Inbox] = {}  # by generator
        self.check_restored()

    # --------------------------------------------------------------------------------------------- after every event

    def check(self) -> None:
        """Cheap where nothing has changed."""
        ledger, sync = self._ledger, self._weight_sync
        if self._clock() >= self._looked_s + 1.0:
            self._looked_s = self._clock()
            self._check_answered()
        seen = (
            ledger.next_group_id,
            len(ledger._untaken),
            len(ledger._taken),
            ledger._num_released,
            self._journal._last,
            sync.live_version,
            self._controller.loop.version,
            self._controller.loop.step,
            ledger.num_held,
        )
        if seen == self._seen:
            return
        self._seen = seen
        try:
            ledger.conservation()
        except LedgerError as error:
            raise Violation(f"conservation: {error}") from error
        self._check_arrived()
        self._check_slots()
        self._check_taken()
        if sync.live_version > self._controller.loop.version:
            raise Violation(f"version {sync.live_version} is live, and {self._controller.loop.version} is the newest")

    def _check_slots(self) -> None:
        num_taken, limit = len(self._ledger.groups), self._config.admission.num_slots
        if num_taken > max(limit, self._num_slots_taken):  # more may have come back after a restart
            raise Violation(f"slots: {num_taken} of {limit} are taken")
        self._num_slots_taken = num_taken

    def _check_taken(self) -> None:
        """Groups are fresh and whole when they are taken, and released when the weights of their step are live."""
        taken, loop = self._ledger._taken, self._controller.loop
        for group_id in [group_id for group_id in self._taken if group_id not in taken]:
            made, live = self._taken.pop(group_id), self._weight_sync.live_version
            is_replay = live < 0
            if not is_replay and (made is None or live < made):
                raise Violation(f"group {group_id} is released when version {live} is live, its step makes {made}")
        for group_id, record in taken.items():
            if group_id not in self._taken:
                self._check_whole(group_id)
                version = loop.version
                if version - record.admitted_version > self._config.admission.max_staleness:
                    raise Violation(f"group {group_id}, of version {record.admitted_version}, is taken at {version}")
                self._taken[group_id] = None
            if self._taken[group_id] is None and loop.step > record.step:
                self._taken[group_id] = loop.version

    def _check_arrived(self) -> None:
        """Each rollout that came in counts for what it was made for."""
        for record in self._journal._pending:
            if record.sequence > self._last_arrived:
                self._last_arrived = record.sequence
                rollout = record.scored.rollout
                self._check_made_for(record.scored, record.prompt, rollout.group_id, rollout.sample_index)

    def _check_made_for(self, scored: ScoredRollout, prompt: Prompt, group_id: int, index: int) -> None:
        made = self._known.made.get(scored.detail)
        if made != (group_id, index, str(prompt.token_ids)):
            counts_for = f"sample {index} of group {group_id}, prompt {prompt.token_ids}"
            raise Violation(f"{counts_for} is rollout {scored.detail}, made for {made}")

    def _check_whole(self, group_id: int) -> None:
        group = self._buffer._groups[group_id]
        members = group.members
        for index, member in enumerate(members):
            self._check_made_for(member, group.prompt, group_id, index)
        least, wanted = self._config.admission.group_size, len(self._ledger.group(group_id).members)
        if len(members) != wanted or not least <= wanted <= self._config.largest_group:
            raise Violation(f"group {group_id} has {len(members)} members of {wanted}")

    # ------------------------------------------------------------------------------------------------ what was said

    def check_restored(self) -> None:
        """What was acknowledged is here, or its group is over."""
        for group_id, index in self._known.acknowledged:
            if group_id >= self._ledger.next_group_id or self._buffer.ledger.is_wanted(group_id, index):
                raise Violation(f"rollout {group_id}:{index} was acknowledged, and is gone after a restart")

    def heard(self, peer: str, message: object) -> None:
        """The controller has received a message."""
        if isinstance(message, Delivery):
            rollout = message.scored.rollout
            name = message.outbox, message.number
            self._known.deliveries[name] = rollout.group_id, rollout.sample_index
            # Not taken is what comes before its group is admitted anew, after that was lost with a controller, and what
            # was sampled by weights that this controller's trainer may not make again.
            is_taken = self._is_alive(rollout.group_id) and message.timeline == self._timeline
            (self._for_a_group.add if is_taken else self._for_a_group.discard)(name)
            inbox = self._inboxes.get(peer)
            if inbox is None or inbox.outbox != message.outbox:
                inbox = self._inboxes[peer] = _Inbox(message.outbox)
            inbox.heard(message, self._clock())

    def said(self, peer: str, message: object) -> None:
        """The controller has sent a message."""
        if isinstance(message, Lease):
            for index in message.sample_indices:
                if (message.group_id, index) in self._known.acknowledged:
                    raise Violation(f"rollout {message.group_id}:{index} was acknowledged, and is granted again")
        elif isinstance(message, Delivered):
            self._check_acknowledged(peer, message)

    def _check_answered(self) -> None:
        """Whoever delivers is told soon that it may forget, again if it delivers again."""
        for peer, inbox in self._inboxes.items():
            if self._is_hindered(peer, inbox.outbox):
                inbox.begin_again(self._clock())
            elif late := [
                n for n, at_s in inbox.unanswered.items() if n <= inbox.whole and self._clock() > at_s + ANSWER_S
            ]:
                raise Violation(f"{peer} delivered number {late[0]} and is not told that it is on disk")

    def _check_acknowledged(self, peer: str, message: Delivered) -> None:
        """What is acknowledged is on disk; it counts unless its group was dropped."""
        pending = {
            (record.scored.rollout.group_id, record.scored.rollout.sample_index) for record in self._journal._pending
        }
        inbox = self._inboxes[peer]
        for number in inbox.answered(message):
            group_id, index = key = self._known.deliveries[message.outbox, number]
            if key in pending:
                raise Violation(f"rollout {group_id}:{index} is acknowledged, and not on disk")
            if self._is_alive(group_id) and (message.outbox, number) in self._for_a_group:
                self._known.acknowledged.add(key)

    def _is_alive(self, group_id: int) -> bool:
        return group_id in self._ledger._untaken or group_id in self._ledger._taken


def made(known: Known, prompt: Prompt, scored: ScoredRollout) -> None:
    """Note a rollout of this prompt that a generator begins to deliver."""
    known.made[scored.detail] = scored.rollout.group_id, scored.rollout.sample_index, str(prompt.token_ids)


def check_totals(controller: Controller, rollouts: Path) -> None:
    """At the end of a run its totals are what segments hold, however often it was begun again."""
    groups = [resolved for path in segment_paths(rollouts) for resolved in read_segment(path)]
    num_tokens = sum(len(member.rollout.token_ids) for resolved in groups for member in resolved.group.members)
    num_dropped = sum(resolved.drop_reason is not None for resolved in groups)
    totals = controller.sink.counted_in(controller.state.totals)
    if (totals.tokens_generated, totals.groups_dropped) != (num_tokens, num_dropped):
        told = f"{totals.tokens_generated} tokens and {totals.groups_dropped} dropped groups"
        raise Violation(f"totals tell of {told}, segments have {num_tokens} and {num_dropped}")


def check_step(batch: PackedBatch, weights: Weights, config: Config) -> None:
    """The trainer is about to train this: contiguous steps, whole groups, none twice on this timeline."""
    if (batch.step, batch.policy_version) != (weights.step, weights.version):
        raise Violation(
            f"step {batch.step} of version {batch.policy_version} comes to a trainer at step {weights.step}, version "
            f"{weights.version}"
        )
    prompts = prompts_of(batch)
    sizes, admission = sorted(prompts.values()), config.admission
    if (
        len(sizes) != admission.groups_per_step
        or not admission.group_size <= sizes[0] <= sizes[-1] <= config.largest_group
    ):
        raise Violation(f"step {batch.step} has samples {sizes} of its prompts")
    for earlier, before in enumerate(weights.lineage):
        if again := sorted(prompts.keys() & before.keys()):
            raise Violation(f"prompt {again[0]} is trained in step {batch.step}, and was in step {earlier}")
