"""The generator's sampling tasks, from lease to delivery; they outlive the sessions with controllers.

    Lease ─▶ engine ─▶ verdict ─▶ outbox

While there is no controller, sampling goes on, and what is finished waits for the reward services of the next session.
The next controller learns from a report what is being sampled, and counts it as leased (buffer/partial_intake.py).

What is sampled counts as long as the weights that sample it do: in one *timeline* every controller repeats the steps of
the one before.  A controller that cannot begins another, whose number comes with its first weights; what was sampled
before is given up then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlhpc.config import Config
from rlhpc.config_data import AGENT, OWN_REWARD
from rlhpc.contracts import ClientChannel, GenerationEngine
from rlhpc.data.dialogue_template import DialogueTemplate
from rlhpc.data.prompts import dialogue_template
from rlhpc.data.records import reference_of
from rlhpc.data.thinking import answer_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ChannelError, ChannelTimeout
from rlhpc.generation.finished_request import prefix_of, prefix_of_failed, prefix_up_to
from rlhpc.messages import LeaseProgress, LeaseReturn, RewardReply, RewardRequest, TurnReply, TurnRequest
from rlhpc.metrics.meters import Rate
from rlhpc.rewards.failures import UNANSWERED
from rlhpc.roles.common.dialogue import Dialogue, Environment, Finished, Taken, Template
from rlhpc.roles.common.turn_calls import turn_request
from rlhpc.roles.generator.agents.agents import Agents
from rlhpc.roles.generator.lease_progress import ProgressReporter
from rlhpc.roles.generator.outbox import Outbox
from rlhpc.transport.rpc import RpcClient
from rlhpc.types import FinishReason, Lease, Prefix, Rollout, RolloutRequest, ScoredRollout, Verdict

log = logging.getLogger("rlhpc.generator")
JUDGE_TIMEOUT_S = 60.0  # of one replica, its queue included: a long queue does not justify a second request
DRAIN_S = 5.0  # for verdicts in flight when asked to stop


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """What a session lends."""

    leases: ClientChannel
    judges: RpcClient
    failed: Callable[[BaseException], None]  # to be called when one of these does not work


class Sampling:
    """Rollouts that are being sampled or judged, each a task."""

    def __init__(self, config: Config, engine: GenerationEngine, tasks: asyncio.TaskGroup) -> None:
        """tasks: they run in this group, which fails with the engine."""
        self._config, self._engine, self._group = config, engine, tasks
        self._tokenizer = PromptTokenizer.of(config.model)
        self._now = asyncio.get_running_loop().time
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._requests: dict[str, RolloutRequest] = {}  # the same
        self._link: Link | None = None
        self._linked = asyncio.Condition()
        self._rate = Rate(10.0, self._now())
        self._is_leaving = False
        self.num_handed_back = 0  # members of leases
        self._dialogues: dict[str, Dialogue] = {}  # by request id, of those that have several turns
        self._template: DialogueTemplate | None = None
        self.agents = Agents(config, self._tokenizer)  # of the dialogues that these begin
        self._recalled: dict[str, int] = {}  # request id → version up to which its tokens are kept
        self.outbox = Outbox()
        self.progress = ProgressReporter(engine, config.admission, config.buffer, self._now)
        self.timeline = -1  # -1: no weights have come yet

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def tokens_per_s(self) -> float:
        """Of finished rollouts, in the last seconds."""
        return self._rate.per_second(self._now())

    # ----------------------------------------------------------------------------------------------------- sessions

    async def attach(self, link: Link) -> None:
        """A session begins; its controller will hear of everything that is being sampled."""
        self.progress.begin_anew()
        async with self._linked:
            self._link = link
            self._linked.notify_all()

    def detach(self) -> None:
        """The session is over, and its channels will be closed."""
        self._link = None

    async def enter(self, timeline: int) -> None:
        """Weights of this timeline are coming."""
        if timeline != self.timeline:
            if self._tasks:
                log.info("%d rollouts are dropped: the run resumes from before their weights", len(self._tasks))
            await self.give_up()
        self.timeline = timeline

    async def give_up(self) -> None:
        """Stop sampling; nothing is handed back."""
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
        """Wait a little for those that were aborted, and for verdicts in flight."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=DRAIN_S)

    async def recall(self, newest: int) -> None:
        """What is being sampled goes back to the controller without the tokens of versions later than `newest`."""
        for request_id in list(self._tasks):
            self._recalled[request_id] = newest
            await self._abort(request_id)

    async def _abort(self, request_id: str) -> None:
        await asyncio.sleep(0)  # one that was started a moment ago has begun then; before, nothing knows of it
        dialogue = self._dialogues.get(request_id)
        await (dialogue.cut() if dialogue is not None else self._engine.abort(request_id))

    # -------------------------------------------------------------------------------------------------------- leases

    def start(self, lease: Lease) -> None:
        """Sample every member of a lease that is not being sampled already.

        A lease that comes before any weights was granted to this process's predecessor, and is the controller's again
        as soon as it hears of this one.
        """
        if self.timeline < 0:
            return
        prefixes: Sequence[Prefix | None] = lease.prefixes or (None,) * len(lease.sample_indices)
        if self._config.run.deterministic:  # the rest of a prefix would be drawn otherwise than the whole
            prefixes = (None,) * len(lease.sample_indices)
        for sample_index, prefix in zip(lease.sample_indices, prefixes, strict=True):
            request = RolloutRequest(lease.group_id, sample_index, lease.prompt, lease.sampling, prefix)
            known = self._requests.get(request.request_id)
            if known is not None and known.prompt.prompt_id == lease.prompt.prompt_id:
                continue  # the lease had expired, or its controller was replaced
            if known is not None:  # a controller that lost the admission has numbered another prompt so
                self._tasks[request.request_id].cancel()
            task = self._group.create_task(self._sample(request, lease.admitted_version))
            self._tasks[request.request_id], self._requests[request.request_id] = task, request
            task.add_done_callback(partial(self._forget, request.request_id))

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id], self._requests[request_id]
            self._recalled.pop(request_id, None)
            self._dialogues.pop(request_id, None)

    async def cancel(self, group_id: int) -> None:
        """Nobody wants this group any more."""
        for request_id in [request_id for request_id in self._tasks if request_id.startswith(f"{group_id}:")]:
            await self._abort(request_id)

    def report(self) -> LeaseProgress | None:
        """What was sampled since the last report, if one is due."""
        requests = (self._as_it_is(request) for request in self._requests.values())
        return self.progress.report(requests, self.timeline)

    def _as_it_is(self, request: RolloutRequest) -> RolloutRequest:
        dialogue = self._dialogues.get(request.request_id)
        return request if dialogue is None else dialogue.request

    # ------------------------------------------------------------------------------------------------------ one rollout

    async def _sample(self, request: RolloutRequest, admitted_version: int) -> None:
        scored: ScoredRollout | None
        if self._config.dataset_of(request.prompt.prompt_id).environment:
            rollout, scored = await self._converse(request, admitted_version)
        else:
            rollout, scored = await self._engine.generate(request), None
        self._rate.add(self._now(), len(rollout.token_ids))
        if rollout.finish_reason is FinishReason.ABORT:
            if self._is_leaving or request.request_id in self._recalled:
                await self._return(request, rollout)
            return
        if scored is None:
            scored = await self._judge(rollout)
        link = await self._next_link()
        try:
            await self.outbox.deliver(link.leases, scored, self.timeline)
        except ChannelError as error:  # it is kept, and sent to the next controller
            self._complain(link, error)

    async def _converse(self, request: RolloutRequest, admitted_version: int) -> tuple[Rollout, ScoredRollout | None]:
        """A rollout of several turns, and its rewards; None where it was cut off."""
        if self._config.dataset_of(request.prompt.prompt_id).environment == AGENT:
            finished = await self._with_agent(request, admitted_version)
        else:
            if self._template is None:
                self._template = dialogue_template(self._config, self._tokenizer)
            environment = partial(self._environment_says, request)
            finished = await self._talk(request, admitted_version, environment, self._template)
        reply, rollout = finished.reply, finished.rollout
        if reply is None:
            return rollout, None
        verdict = Verdict(reply.verdict)
        parts, token_rewards = reply.reward_parts, finished.token_rewards
        return rollout, ScoredRollout(rollout, reply.reward, verdict, parts, reply.detail, token_rewards, reply.failure)

    async def _with_agent(self, request: RolloutRequest, admitted_version: int) -> Finished:
        """One that fails is started again, as a verifier is asked again, and goes on from the tokens that there are."""
        judge = None if request.prompt.task == OWN_REWARD else partial(self._judge_answer, request)
        for left in reversed(range(self._config.rewards.max_attempts)):
            async with self.agents.session(request, judge) as session:
                finished = await self._talk(request, admitted_version, session, session, session.longest_turn)
            if not (left and session.may_do_better):
                break
            if not self._config.run.deterministic:
                request = replace(request, prefix=prefix_of_failed(request.prefix, finished.rollout))
        return finished

    async def _talk(
        self,
        request: RolloutRequest,
        admitted_version: int,
        environment: Environment,
        template: Template,
        longest_turn: Callable[[], int | None] = lambda: None,
    ) -> Finished:
        dialogue = self._dialogues[request.request_id] = Dialogue(
            request,
            self._engine,
            environment,
            (self._tokenizer, template),
            self._config.environment,
            admitted_version=admitted_version,
            longest_turn=longest_turn,
        )
        return await dialogue.run()

    async def _judge_answer(self, request: RolloutRequest, answer: str) -> RewardReply:
        """What the task says to an agent's last turn; a failure is a verdict."""
        prompt = request.prompt
        field = self._config.dataset_of(prompt.prompt_id).reference_field
        asked = RewardRequest(0, prompt.task, answer, reference_of(prompt.reference, field))
        reply: RewardReply | ChannelTimeout = await self._ask(asked)
        if isinstance(reply, RewardReply):
            return reply
        return RewardReply(0, 0.0, Verdict.VERIFIER_ERROR.value, {}, str(reply), failure=UNANSWERED)

    async def _environment_says(self, request: RolloutRequest, taken: Taken) -> TurnReply:
        """What the environment answers to the turns so far; a failure is a verdict."""
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
            with suppress(ChannelError):  # it has what was reported
                returned = LeaseReturn(request.group_id, (request.sample_index,), (prefix,), why, self.timeline)
                await self._link.leases.send(returned)
                self.num_handed_back += 1

    async def _judge(self, rollout: Rollout) -> ScoredRollout:
        """Ask for a verdict, again if the verifier failed; a verifier error is never a reward of zero."""
        prompt, has_ended = rollout.prompt, rollout.finish_reason is FinishReason.STOP
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
        """The reply, of the next session where this one ends; or ChannelTimeout: every replica was asked."""
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
        timeout_s = max(JUDGE_TIMEOUT_S, 10 * rewards.longest_timeout_s)
        tried: set[int] = set()  # its node may be what fails, and fails fast, so that it would always be the idlest
        reply = await judges.call(request, timeout_s, tried)
        for _ in range(1, rewards.max_attempts):
            if reply.verdict != Verdict.VERIFIER_ERROR.value:
                break
            reply = await judges.call(request, timeout_s, tried)
        return reply

    async def _next_link(self, other_than: Link | None = None) -> Link:
        """Wait for a session, where there is none."""
        if self._link is not None and self._link is not other_than:
            return self._link
        async with self._linked:
            await self._linked.wait_for(lambda: self._link is not None and self._link is not other_than)
            assert self._link is not None
            return self._link

    def _complain(self, link: Link, error: BaseException) -> None:
        if link is self._link:  # else its session is over, which closes its channels
            link.failed(error)
