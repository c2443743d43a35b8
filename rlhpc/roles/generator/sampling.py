"""The generator's sampling tasks, from lease to delivery; they outlive the sessions with controllers.

    Lease ─▶ engine ─▶ verdict, and teacher ─▶ outbox

While there is no controller, sampling goes on, and finished rollouts wait for the reward services of the next session.
The next controller learns from a report which rollouts are running, and counts them as leased (buffer/prefixes.py).

Rollouts count as long as their weights do: in one *timeline* every controller repeats the steps of the one before.  A
controller that cannot repeat them begins another timeline, whose number comes with its first weights; rollouts of the
old timeline are given up then.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.agents.agents import Agents
from rlhpc.agents.dialogue import AgentDialogue
from rlhpc.buffer.prefixes import PartialRollout, encode_partials, id_checksum, rows_checksum
from rlhpc.config.rules import Config
from rlhpc.config.tables import AGENT, OWN_REWARD, AdmissionConfig, BufferConfig
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.prompts import dialogue_template
from rlhpc.data.record_source import reference_of
from rlhpc.data.tokenizer import PromptTokenizer, answer_of
from rlhpc.environments.dialogue import Dialogue, FinishedDialogue, TurnsTaken, turn_request
from rlhpc.generation.requests import prefix_of, prefix_up_to
from rlhpc.metrics.meters import Rate
from rlhpc.protocol.contracts import ClientChannel, Clock, GenerationEngine
from rlhpc.protocol.errors import ChannelError, ChannelTimeout
from rlhpc.protocol.messages import (
    Delivered,
    Delivery,
    LeaseProgress,
    LeaseReturn,
    RewardReply,
    RewardRequest,
    TurnReply,
    TurnRequest,
)
from rlhpc.protocol.types import FinishReason, Lease, Prefix, Prompt, Rollout, RolloutRequest, ScoredRollout, Verdict
from rlhpc.rewards.outcomes import UNANSWERED
from rlhpc.roles.generator.teachers import TeacherFailed, Teachers
from rlhpc.transport.rpc import RpcClient

# ------------------------------------------------------------------------------------------------------- lease progress
#
# Report the tokens of running rollouts, so that neither a deadline nor a death restarts them from the beginning.
#
# Input: an engine, and the requests in flight.  Output: LeaseProgress, one for all rollouts with new tokens, whose
# leases it renews.  Guarantee: a rollout is reported before it has grown by more than partial_interval_tokens, or for
# longer than partial_interval_s, since its last report; only new tokens are sent.  A controller that lacks the
# beginning requests it (`show_whole`).  Rows of an agent are reported each by itself, and all of them anew where one
# is not what it was.
#
# A restarted rollout is likely to be shorter than the lost one, since long rollouts are lost more often: the policy
# would learn from rollouts that are shorter than its own (docs/staleness.md).


LOOKS_PER_INTERVAL = 8
LONGEST_LOOK_S = 0.25
MOST_TOKENS = 1 << 20  # in one report
AT_ONCE = float("-inf")  # as the time of the last report: the rollout has to be reported now
_NO_TOKENS = Prefix(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(slots=True)
class _Reported:
    """Reported tokens of a rollout."""

    request: RolloutRequest
    shown: list[tuple[int, int]]  # of each row: tokens sent to the controller, and the checksum of their ids
    num_counted: int  # tokens at the last report, sent or not
    at_s: float  # time of the last report
    num_seen: int  # tokens at the last look

    @property
    def num_shown(self) -> int:
        """Tokens sent to the controller."""
        return sum(num for num, _ in self.shown)


RowsOf = Callable[[str], AgentDialogue | None]  # by request id


class ProgressReporter:
    """Compares rollouts in flight with their last reports."""

    def __init__(
        self,
        engine: GenerationEngine,
        admission: AdmissionConfig,
        buffer: BufferConfig,
        clock: Clock,
        rows_of: RowsOf = lambda _: None,
    ) -> None:
        """rows_of: the dialogue of a rollout that may have several rows; None: it has one, which the engine knows."""
        self._engine, self._clock, self._rows_of = engine, clock, rows_of
        self._interval_s = min(buffer.partial_interval_s, admission.longest_report_interval_s)
        self._interval_tokens = buffer.partial_interval_tokens
        self._reported: dict[str, _Reported] = {}
        self.look_s = min(LONGEST_LOOK_S, self._interval_s / LOOKS_PER_INTERVAL)  # seconds between calls of report()

    @property
    def num_unreported(self) -> int:
        """Tokens that the death of this process would lose."""
        return sum(
            max(0, self._num_sampled(request_id, each.num_seen) - each.num_shown)
            for request_id, each in self._reported.items()
        )

    def show_whole(self, members: Iterable[tuple[int, int]]) -> None:
        """Send these members, (group, sample), from their first token in the next report."""
        for group_id, sample_index in members:
            reported = self._reported.get(f"{group_id}:{sample_index}")
            if reported is not None:
                reported.shown, reported.at_s = [], AT_ONCE

    def begin_anew(self) -> None:
        """Put every rollout into the next report: a new controller does not know which generator samples it."""
        for reported in self._reported.values():
            reported.at_s = AT_ONCE

    def report(
        self, in_flight: Iterable[RolloutRequest], timeline: int, sampled: Container[str] = ()
    ) -> LeaseProgress | None:
        """Report all rollouts with new tokens, if one has to be reported now.

        timeline: of their weights.  sampled: requests that are finished and wait for a verdict or a teacher, whose
        leases are renewed.
        """
        grown = self._look({request.request_id: request for request in in_flight}, sampled)
        now = self._clock()
        if not any(self._urgency(reported, growth, now) >= 1.0 for _, reported, growth in grown):
            return None
        pieces, room = list[PartialRollout](), MOST_TOKENS
        for request, reported, growth in grown:
            # Half-due rollouts go with the due ones: reports are few, and rollouts come to be due together.
            if room > 0 and self._urgency(reported, growth, now) >= 0.5:
                new = self._pieces(request, reported, now)
                pieces += new
                room -= sum(len(piece.tokens.token_ids) for piece in new)
        if not pieces:
            return None
        data, num_bytes = encode_partials(pieces)
        return LeaseProgress(np.frombuffer(data, np.uint8), num_bytes, timeline)

    def _look(
        self, requests: dict[str, RolloutRequest], sampled: Container[str]
    ) -> list[tuple[RolloutRequest, _Reported, int]]:
        """Rollouts with tokens to report, each with its last report and its growth in tokens since the last look."""
        for request_id in self._reported.keys() - requests.keys():
            del self._reported[request_id]
        grown = []
        for request_id, request in requests.items():
            reported = self._reported.get(request_id)
            if reported is None or reported.request is not request:
                done, prefix = request.num_done, request.prefix
                rows = [prefix.row(row) for row in prefix.rows] if prefix is not None else []
                shown = [(len(row.token_ids), id_checksum(row.token_ids)) for row in rows]
                reported = self._reported[request_id] = _Reported(request, shown, done, self._clock(), done)
            num_tokens = self._num_sampled(request_id, reported.num_seen)
            growth = max(0, num_tokens - reported.num_seen)
            reported.num_seen = num_tokens
            if num_tokens > reported.num_counted or reported.at_s == AT_ONCE or request_id in sampled:
                grown.append((request, reported, growth))
        return grown

    def _urgency(self, reported: _Reported, growth: int, now: float) -> float:
        """Share of the interval, in tokens or time, that will have passed by the next look; 1.0: report now."""
        tokens = (reported.num_seen - reported.num_shown + growth) / self._interval_tokens
        return max(tokens, self._lateness(reported, now))

    def _lateness(self, reported: _Reported, now: float) -> float:
        return (now - reported.at_s + self.look_s) / self._interval_s

    def _num_sampled(self, request_id: str, num_seen: int) -> int:
        """Tokens so far; num_seen: at the last look, which the engine forgets between two turns."""
        dialogue = self._rows_of(request_id)
        return max(num_seen, self._engine.num_sampled(request_id)) if dialogue is None else dialogue.num_tokens

    def _pieces(self, request: RolloutRequest, reported: _Reported, now: float) -> list[PartialRollout]:
        """Pieces for the report; none if the engine cannot give tokens now (weights change) and the lease may wait."""
        dialogue = self._rows_of(request.request_id)
        member = partial(PartialRollout, request.group_id, request.sample_index, request.prompt.prompt_id)
        if dialogue is not None:
            pieces = _new_pieces(member, reported, dialogue.rows())
        else:
            (start, before) = reported.shown[0] if reported.shown else (0, 0)
            tokens = self._engine.progress(request.request_id, start)
            pieces = [] if tokens is None else [member(start, before, tokens)]
            if tokens is not None:
                reported.shown = [(start + len(tokens.token_ids), id_checksum(tokens.token_ids, before))]
        if not pieces and self._lateness(reported, now) < 1.0:
            return []
        reported.num_counted, reported.at_s = reported.num_seen, now
        return pieces or [member(*(reported.shown[0] if reported.shown else (0, 0)), _NO_TOKENS)]


def _new_pieces(
    member: Callable[..., PartialRollout], reported: _Reported, rows: Sequence[Prefix]
) -> list[PartialRollout]:
    """Cut off what rows have beyond what was shown; all that they have, if one of them does not continue what was."""
    shown, pieces = list(reported.shown), list[PartialRollout]()
    known = [id_checksum(row.token_ids[:num]) for row, (num, _) in zip(rows, shown, strict=False)]
    is_longer = all(len(row.token_ids) >= num for row, (num, _) in zip(rows, shown, strict=False))
    if len(rows) < len(shown) or not is_longer or known != [checksum for _, checksum in shown]:
        shown = []
    for place, row in enumerate(rows):
        start, before = shown[place] if place < len(shown) else (0, 0)
        if place == len(shown):
            before = rows_checksum(checksum for _, checksum in shown) if place else 0
            shown.append((0, 0))
        if len(row.token_ids) > start:
            tokens = row.row(slice(start, None))
            pieces.append(member(start, before, tokens, place))
            shown[place] = len(row.token_ids), id_checksum(tokens.token_ids, before if start else 0)
    reported.shown = shown
    return pieces


# --------------------------------------------------------------------------------------------------------------- outbox
#
# Keep delivered rollouts until the controller has them on disk; a controller that died before gets them again.
#
# Input: ScoredRollout.  Output: Delivery, in order; sent again after a silence, and to the next controller.
# Guarantee: a rollout is deleted only when a controller has acknowledged it, and lost only when this process dies.


SILENCE_S = 20.0  # without an acknowledgement before deliveries are sent again
LONGEST_SILENCE_S = 300.0  # each silence after the first is twice as long: a disk may refuse for minutes


class Outbox:
    """Delivered rollouts that are not acknowledged yet; outlives the sessions with controllers."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex[:12]
        self._num_delivered = 0
        self._kept: dict[int, Delivery] = {}  # in the order of delivery

    @property
    def num_kept(self) -> int:
        """Rollouts that wait for an acknowledgement."""
        return len(self._kept)

    async def deliver(self, channel: ClientChannel, prompt: Prompt, scored: ScoredRollout, timeline: int) -> None:
        """Send a rollout, and keep it.  prompt: of its lease; timeline: of the weights that sampled it.

        Raises ChannelError; the rollout is kept then, too.
        """
        self._num_delivered += 1
        number, checksum = self._num_delivered, id_checksum(prompt.token_ids)
        self._kept[number] = Delivery(number, number, self._name, timeline, checksum, scored)
        await self._send(channel, number)

    def acknowledged(self, message: Delivered) -> None:
        """Delete deliveries up to this one: the controller has them on disk."""
        if message.outbox == self._name:
            for number in [number for number in self._kept if number <= message.number]:
                del self._kept[number]

    async def repeat(self, channel: ClientChannel) -> None:
        """Send all kept deliveries to a controller that may lack them, and again after each silence; endlessly."""
        silence_s = SILENCE_S
        while True:
            oldest = min(self._kept, default=0)
            for number in list(self._kept):
                if number in self._kept:
                    await self._send(channel, number)
            while True:  # until nothing was acknowledged for long
                await asyncio.sleep(silence_s)
                before, oldest = oldest, min(self._kept, default=0)
                if oldest and oldest == before:
                    silence_s = min(2 * silence_s, LONGEST_SILENCE_S)
                    break
                silence_s = SILENCE_S

    async def _send(self, channel: ClientChannel, number: int) -> None:
        await channel.send(replace(self._kept[number], oldest=min(self._kept)))


# ------------------------------------------------------------------------------------------------------------- sampling


log = logging.getLogger("rlhpc.generator")
JUDGE_TIMEOUT_S = 60.0  # for one replica, its queue included: a long queue does not justify a second request
DRAIN_S = 5.0  # for verdicts in flight when asked to stop


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """Channels of a session, lent to the sampling tasks."""

    leases: ClientChannel
    judges: RpcClient
    failed: Callable[[BaseException], None]  # to be called when one of these channels fails


class Sampling:
    """Rollouts that are being sampled or judged, each a task."""

    def __init__(
        self, config: Config, engine: GenerationEngine, tasks: asyncio.TaskGroup, rendezvous: Path = Path()
    ) -> None:
        """tasks: the group in which rollouts run; it fails with the engine.  rendezvous: addresses of services."""
        self._config, self._engine, self._group = config, engine, tasks
        self._tokenizer = PromptTokenizer.of(config.model)
        self._now = asyncio.get_running_loop().time
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._requests: dict[str, RolloutRequest] = {}  # by request id
        self._link: Link | None = None
        self._linked = asyncio.Condition()
        self._rate = Rate(10.0, self._now())
        self._is_leaving = False
        self.num_handed_back = 0  # members of leases
        self._dialogues: dict[str, Dialogue | AgentDialogue] = {}  # by request id, of rollouts with several turns
        self._template: DialogueTemplate | None = None
        self._templating = asyncio.Lock()
        self.agents = Agents(config, self._tokenizer)  # for the dialogues that agents begin
        self.teachers = Teachers(config, rendezvous)
        self._sampled: set[str] = set()  # request ids of rollouts that wait for a verdict or a teacher
        self._recalled: dict[str, int] = {}  # request id → version up to which its tokens are kept
        self.outbox = Outbox()
        self.progress = ProgressReporter(engine, config.admission, config.buffer, self._now, self._rows_of)
        self.timeline = -1  # -1: no weights have come yet

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def num_sampled(self) -> int:
        """Rollouts whose sampling is over and which wait for a verdict or a teacher; the engine has room for others."""
        return len(self._sampled)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of rollouts finished in the last seconds."""
        return self._rate.per_second(self._now())

    # ----------------------------------------------------------------------------------------------------- sessions

    async def attach(self, link: Link) -> None:
        """Begin a session: report every running rollout to its controller."""
        self.progress.begin_anew()
        async with self._linked:
            self._link = link
            self._linked.notify_all()

    def detach(self) -> None:
        """End the session, before its channels are closed."""
        self._link = None

    async def enter(self, timeline: int) -> None:
        """Prepare for weights of this timeline: give up rollouts of another."""
        if timeline != self.timeline:
            if self._tasks:
                log.info("%d rollouts are dropped: the run resumes from before their weights", len(self._tasks))
            await self.give_up()
        self.timeline = timeline

    async def give_up(self) -> None:
        """Stop sampling, without handing anything back."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def hand_back(self) -> None:
        """Stop sampling; every unfinished rollout goes back to the controller as a prefix for another generator."""
        self._is_leaving = True
        for request_id in list(self._tasks):
            await self._abort(request_id)
        await self.settle()
        await self.give_up()

    async def settle(self) -> None:
        """Wait up to DRAIN_S for aborted rollouts and verdicts in flight."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=DRAIN_S)

    async def recall(self, newest: int) -> None:
        """Hand running rollouts back to the controller without the tokens of versions later than `newest`."""
        for request_id in list(self._tasks):
            self._recalled[request_id] = newest
            await self._abort(request_id)

    async def _abort(self, request_id: str) -> None:
        await asyncio.sleep(0)  # lets a task started a moment ago begin: before, the engine does not know its request
        dialogue = self._dialogues.get(request_id)
        await (dialogue.cut() if dialogue is not None else self._engine.abort(request_id))

    # -------------------------------------------------------------------------------------------------------- leases

    def start(self, lease: Lease) -> None:
        """Sample every member of a lease that is not being sampled already.

        A lease that comes before any weights was granted to this process's predecessor; the controller takes it back
        when this process registers.
        """
        if self.timeline < 0:
            return
        prefixes: Sequence[Prefix | None] = lease.prefixes or (None,) * len(lease.sample_indices)
        if self._config.run.deterministic:  # continuing a prefix would draw other tokens than the whole
            prefixes = (None,) * len(lease.sample_indices)
        for sample_index, prefix in zip(lease.sample_indices, prefixes, strict=True):
            request = RolloutRequest(lease.group_id, sample_index, lease.prompt, lease.sampling, prefix)
            known = self._requests.get(request.request_id)
            if known is not None and known.prompt.is_same(lease.prompt):
                continue  # the lease had expired, or its controller was replaced
            # A controller that lost the admission has given the id to another prompt, or tokenised it differently.
            if known is not None:
                self._tasks[request.request_id].cancel()
            task = self._group.create_task(self._sample(request, lease.admitted_version))
            self._tasks[request.request_id], self._requests[request.request_id] = task, request
            task.add_done_callback(partial(self._forget, request.request_id))

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id], self._requests[request_id]
            self._recalled.pop(request_id, None)
            self._dialogues.pop(request_id, None)
            self._sampled.discard(request_id)

    async def cancel(self, group_id: int) -> None:
        """Stop sampling a group that the controller has dropped, and asking about it."""
        for request_id in [request_id for request_id in self._tasks if request_id.startswith(f"{group_id}:")]:
            if request_id in self._sampled:
                self._tasks[request_id].cancel()
            else:
                await self._abort(request_id)

    def report(self) -> LeaseProgress | None:
        """Tokens sampled since the last report, if one is due."""
        requests = (self._as_it_is(request) for request in self._requests.values())
        return self.progress.report(requests, self.timeline, self._sampled)

    def _as_it_is(self, request: RolloutRequest) -> RolloutRequest:
        dialogue = self._dialogues.get(request.request_id)
        return request if dialogue is None else dialogue.request

    def _rows_of(self, request_id: str) -> AgentDialogue | None:
        dialogue = self._dialogues.get(request_id)
        return dialogue if isinstance(dialogue, AgentDialogue) else None

    # ------------------------------------------------------------------------------------------------------ one rollout

    async def _sample(self, request: RolloutRequest, admitted_version: int) -> None:
        scored: ScoredRollout | None
        if self._config.dataset_of(request.prompt.prompt_id).environment:
            rollout, scored = await self._converse(request, admitted_version)
        else:
            rollout, scored = await self._engine.generate(request), None
        self._rate.add(self._now(), rollout.num_distinct_tokens)
        if rollout.finish_reason is FinishReason.ABORT:
            if self._is_leaving or request.request_id in self._recalled:
                await self._return(request, rollout)
            return
        self._sampled.add(request.request_id)
        scored = await self._scored(request.prompt, rollout, scored)
        link = await self._next_link()
        try:
            await self.outbox.deliver(link.leases, request.prompt, scored, self.timeline)
        except ChannelError as error:  # the outbox keeps it and sends it to the next controller
            self._complain(link, error)

    async def _scored(self, prompt: Prompt, rollout: Rollout, judged: ScoredRollout | None) -> ScoredRollout:
        """Ask for a verdict, unless it was judged, and the teacher at the same time; both are needed."""
        if not self.teachers.are_asked(prompt):
            return judged or await self._judge(prompt, rollout)
        try:
            async with asyncio.TaskGroup() as both:
                asking = both.create_task(self.teachers.scores(prompt, rollout))
                scored = judged or await self._judge(prompt, rollout)
                if scored.verdict is Verdict.VERIFIER_ERROR:
                    asking.cancel()
        except* TeacherFailed as failed:
            error = failed.exceptions[0]
            assert isinstance(error, TeacherFailed)
            scored = ScoredRollout(rollout, 0.0, Verdict.VERIFIER_ERROR, detail=str(error), failure=error.failure)
        if scored.verdict is Verdict.VERIFIER_ERROR:
            return scored
        return replace(scored, teacher=asking.result())

    async def _converse(self, request: RolloutRequest, admitted_version: int) -> tuple[Rollout, ScoredRollout | None]:
        """Sample a rollout of several turns; return it and its rewards, None if it was cut off."""
        is_agent = self._config.dataset_of(request.prompt.prompt_id).environment == AGENT
        finished = await (self._with_agent if is_agent else self._with_environment)(request, admitted_version)
        reply, rollout = finished.reply, finished.rollout
        if reply is None:
            return rollout, None
        verdict = Verdict(reply.verdict)
        parts, token_rewards = reply.reward_parts, finished.token_rewards
        return rollout, ScoredRollout(rollout, reply.reward, verdict, parts, reply.detail, token_rewards, reply.failure)

    async def _dialogue_template(self) -> DialogueTemplate:
        """The template, made for the first rollout: in a thread, since a user's tools are imported for it."""
        async with self._templating:
            if self._template is None:
                self._template = await asyncio.to_thread(dialogue_template, self._config, self._tokenizer)
        return self._template

    async def _with_agent(self, request: RolloutRequest, admitted_version: int) -> FinishedDialogue:
        """Sample with an agent; one that fails is started again, like a verifier, and continues from its tokens."""
        judge = None if request.prompt.task == OWN_REWARD else partial(self._judge_answer, request)
        for left in reversed(range(self._config.rewards.max_attempts)):
            async with self.agents.session(request, judge) as session:
                dialogue = self._dialogues[request.request_id] = AgentDialogue(
                    request,
                    self._engine,
                    session,
                    self._tokenizer,
                    self._config.environment,
                    admitted_version=admitted_version,
                )
                finished = await dialogue.run()
            if not (left and session.may_do_better):
                break
            if not self._config.run.deterministic:
                request = replace(request, prefix=dialogue.prefix())
        return finished

    async def _with_environment(self, request: RolloutRequest, admitted_version: int) -> FinishedDialogue:
        dialogue = self._dialogues[request.request_id] = Dialogue(
            request,
            self._engine,
            partial(self._environment_says, request),
            (self._tokenizer, await self._dialogue_template()),
            self._config.environment,
            admitted_version=admitted_version,
        )
        return await dialogue.run()

    async def _judge_answer(self, request: RolloutRequest, answer: str) -> RewardReply:
        """Return the task's verdict on an agent's last turn; a failure is a verdict, too."""
        prompt = request.prompt
        field = self._config.dataset_of(prompt.prompt_id).reference_field
        asked = RewardRequest(0, prompt.task, answer, reference_of(prompt.reference, field))
        reply: RewardReply | ChannelTimeout = await self._ask(asked)
        if isinstance(reply, RewardReply):
            return reply
        return RewardReply(0, 0.0, Verdict.VERIFIER_ERROR.value, {}, str(reply), failure=UNANSWERED)

    async def _environment_says(self, request: RolloutRequest, taken: TurnsTaken) -> TurnReply:
        """Return the environment's answer to the turns so far; a failure is a verdict, too."""
        dataset = self._config.dataset_of(request.prompt.prompt_id)
        reply: TurnReply | ChannelTimeout = await self._ask(turn_request(request, dataset, taken))
        if isinstance(reply, TurnReply):
            return reply
        return TurnReply(0, (), 0.0, Verdict.VERIFIER_ERROR.value, {}, str(reply),
                         is_done=False, is_over=True, failure=UNANSWERED)  # fmt: skip

    async def _return(self, request: RolloutRequest, rollout: Rollout) -> None:
        newest = self._recalled.get(request.request_id)
        tokens = prefix_of(rollout) if newest is None else prefix_up_to(rollout, newest)
        prefix, why = tokens if len(tokens.token_ids) else None, "leaving" if newest is None else "quarantined"
        if self._link is not None:
            with suppress(ChannelError):  # the controller has the reported tokens
                returned = LeaseReturn(request.group_id, (request.sample_index,), (prefix,), why, self.timeline)
                await self._link.leases.send(returned)
                self.num_handed_back += 1

    async def _judge(self, prompt: Prompt, rollout: Rollout) -> ScoredRollout:
        """Ask for a verdict, again if the verifier failed; a verifier error is never a reward of zero."""
        has_ended = rollout.finish_reason is FinishReason.STOP
        completion = self._tokenizer.decode_completion(
            rollout.token_ids, has_ended=has_ended, stop_strings=self._config.generation.stop
        )
        answer, start = answer_of(completion, self._config.dataset_of(prompt.prompt_id).thinking_end)
        request = RewardRequest(0, prompt.task, answer, prompt.reference)  # the RPC client numbers calls
        reply: RewardReply | ChannelTimeout = await self._ask(request)
        if isinstance(reply, ChannelTimeout):
            return ScoredRollout(rollout, 0.0, Verdict.VERIFIER_ERROR, detail=str(reply), failure=UNANSWERED)
        rewards_at = {start + place: reward for place, reward in reply.rewards_at.items()}
        token_rewards = self._tokenizer.on_tokens(rewards_at, rollout.token_ids)
        verdict = Verdict(reply.verdict)
        parts, failure = reply.reward_parts, reply.failure
        return ScoredRollout(rollout, reply.reward, verdict, parts, reply.detail, token_rewards, failure)

    async def _ask(self, request: RewardRequest | TurnRequest) -> Any:
        """Return the reply, in the next session if this one ends, or ChannelTimeout if no replica has answered."""
        link = await self._next_link()
        while True:
            try:
                return await self._attempts(link.judges, request)
            except ChannelTimeout as error:
                return error
            except ChannelError as error:
                self._complain(link, error)
                link = await self._next_link(link)

    async def _attempts(self, judges: RpcClient, request: RewardRequest | TurnRequest) -> Any:
        rewards = self._config.rewards
        timeout_s = max(JUDGE_TIMEOUT_S, 10 * rewards.longest_timeout_s) + self._config.longest_service_patience_s
        tried: set[int] = set()  # a replica on a broken node fails fast, so that it would always be the idlest
        reply = await judges.call(request, timeout_s, tried)
        for _ in range(1, rewards.max_attempts):
            if reply.verdict != Verdict.VERIFIER_ERROR.value:
                break
            reply = await judges.call(request, timeout_s, tried)
        return reply

    async def _next_link(self, other_than: Link | None = None) -> Link:
        """Return the present session's link, or wait for the next session."""
        if self._link is not None and self._link is not other_than:
            return self._link
        async with self._linked:
            await self._linked.wait_for(lambda: self._link is not None and self._link is not other_than)
            assert self._link is not None
            return self._link

    def _complain(self, link: Link, error: BaseException) -> None:
        if link is self._link:  # else its session is over, which closes its channels
            link.failed(error)
