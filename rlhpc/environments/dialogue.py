"""One rollout of several turns, between an engine and an environment; every token exactly as it was sampled or read.

    prompt │ opening │ turn │ observation │ turn │ … │ turn          the completion is everything after the prompt
             no loss   loss   no loss       loss       loss

The engine continues from the tokens so far, as from a Prefix; exactly these are trained.  Observations are rendered by
the chat template, new messages only (data/prompt_form.py), and have log-probability 0 and the version of the token
before them.

A dialogue that was handed back continues from its prefix: its turns are replayed to the environment, whose observations
must be the tokens of the prefix.  At the first difference the rest of the prefix is dropped, and the dialogue continues
from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlhpc.config.tables import DataConfig
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.record_source import reference_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.turn_sampler import RowTokens, TurnSampler
from rlhpc.protocol.contracts import GenerationEngine
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.messages import TurnReply, TurnRequest
from rlhpc.protocol.types import FinishReason, Int32, Prefix, Rollout, RolloutRequest, Routes, Verdict
from rlhpc.rewards.outcomes import DialogueRequest
from rlhpc.rewards.pool import RewardPool

# ------------------------------------------------------------------------------------------------------------- dialogue

log = logging.getLogger("rlhpc.dialogue")


@dataclass(frozen=True, slots=True)
class TurnsTaken:
    """The turns of a dialogue so far, for its environment."""

    turns: tuple[str, ...]
    answer: str  # the last turn without special tokens
    is_last: bool  # a limit ends the dialogue with this turn


Environment = Callable[[TurnsTaken], Awaitable[TurnReply]]


class Template(Protocol):
    """Converts messages to tokens; DialogueTemplate is one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> Int32:
        """Tokens [L] from the end of the prompt to the first turn."""

    def observation(self, messages: Sequence[Mapping[str, Any]], *, last_token: int) -> Int32:
        """Tokens [L] from the end of a turn, whose last token was this, to the next one."""


@dataclass(frozen=True, slots=True)
class FinishedDialogue:
    """A dialogue that has ended or was cut."""

    rollout: Rollout  # FinishReason.ABORT: cut, may be continued
    reply: TurnReply | None  # the environment's last one; None if the dialogue was cut
    num_turns: int
    token_rewards: dict[int, float]  # last token of a turn before the end → what the turn has earned


class Dialogue:
    """One rollout of several turns, while it lasts."""

    def __init__(
        self,
        request: RolloutRequest,
        engine: GenerationEngine,
        environment: Environment,
        speech: tuple[PromptTokenizer, Template],
        limits: EnvironmentConfig,
        *,
        admitted_version: int,
    ) -> None:
        """admitted_version: version of tokens read before the first is sampled, if the engine's is older."""
        self._engine, self._environment, self._limits = engine, environment, limits
        tokenizer, self._template = speech
        self._sampler = TurnSampler(request, engine, tokenizer, self._template.stop_token_ids, limits)
        self._recorded = request.prefix
        self._version = admitted_version
        self._tokens, self._turns, self._answer = RowTokens(), list[str](), ""
        self._token_rewards, self._earned = dict[int, float](), 0.0
        self._routes: Routes | None = None  # of prompt and tokens up to the last turn: the engine computed them all
        self._is_cut = asyncio.Event()
        self.request = request  # as sampled: without the dropped part of its prefix

    async def run(self) -> FinishedDialogue:
        """Run the dialogue to its end.  Raises as GenerationEngine.generate and the environment do."""
        reply = await self._ask(is_last=False)
        if reply is None:
            return self._finished(FinishReason.ABORT, None)
        spoken, reply = self._opened(reply)
        self._read(spoken[: self._num_left])
        while not _failed(reply) and not reply.is_over:
            reason = await self._take_turn()
            if reason is FinishReason.ABORT:
                return self._finished(reason, None)
            is_last = len(self._turns) >= self._limits.max_turns or self._num_left < 1
            answered = await self._ask(is_last=is_last)
            if answered is None:
                return self._finished(FinishReason.ABORT, None)
            reply = answered
            if _failed(reply) or reply.is_over:
                return self._finished(reason if reply.is_done else FinishReason.LENGTH, reply)
            try:
                observation = self._template.observation(reply.messages, last_token=self._tokens.ids[-1])
            except ConfigError as error:
                return self._finished(FinishReason.LENGTH, _refused(reply, error))
            self._earn(reply)
            if len(observation) < self._num_left:
                self._read(observation)
            elif (last := await self._ask(is_last=True)) is not None:
                return self._finished(FinishReason.LENGTH, last)
            else:
                return self._finished(FinishReason.ABORT, None)
        return self._finished(FinishReason.LENGTH, reply)

    async def cut(self) -> None:
        """End the dialogue early: `run` returns its tokens so far with FinishReason.ABORT."""
        self._is_cut.set()
        await self._engine.abort(self.request.request_id)

    @property
    def _num_left(self) -> int:
        """Tokens that the completion may still have."""
        return self._sampler.num_left(self._tokens)

    # ----------------------------------------------------------------------------------------------------------- turns

    def _opened(self, reply: TurnReply) -> tuple[Int32, TurnReply]:
        """Tokens [L] before the first turn; the reply is an error if the policy cannot take one."""
        try:
            spoken = self._template.opening([] if _failed(reply) else reply.messages)
        except ConfigError as error:
            spoken, reply = self._template.opening([]), _refused(reply, error)
        if len(spoken) >= self._num_left:
            reply = _no_room(reply, len(spoken), self._num_left)
        return spoken, reply

    async def _take_turn(self) -> FinishReason:
        """The policy's next turn: its beginning from the prefix, the rest from the engine."""
        start, longest = len(self._tokens), self._sampler.longest(self._tokens, None)
        self._repeat(longest)
        reason = self._sampler.reason(self._tokens.ids[start:], longest)
        if reason is None:
            if self._is_cut.is_set():
                return FinishReason.ABORT
            reason, self._routes = await self._sampler.sample(self._tokens, start, longest)
        if reason is not FinishReason.ABORT:
            turn, self._answer = self._sampler.spoken(self._tokens.ids[start:], reason)
            self._turns.append(turn)
        return reason

    async def _ask(self, *, is_last: bool) -> TurnReply | None:
        """The environment's answer; None: the dialogue was cut meanwhile."""
        taken = TurnsTaken(tuple(self._turns), self._answer, is_last)
        asking = asyncio.ensure_future(self._environment(taken))
        cutting = asyncio.ensure_future(self._is_cut.wait())
        try:
            await asyncio.wait((asking, cutting), return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            cutting.cancel()

    def _earn(self, reply: TurnReply) -> None:
        """Put the reward of a turn on its last token."""
        earned, self._earned = reply.reward - self._earned, reply.reward
        if earned:
            self._token_rewards[len(self._tokens) - 1] = earned

    # ---------------------------------------------------------------------------------------------------------- prefix

    def _left_of_prefix(self) -> Prefix | None:
        """The rest of the prefix, after the tokens so far."""
        here = len(self._tokens.ids)
        if self._recorded is None or here >= len(self._recorded.token_ids):
            return None
        return self._recorded.row(slice(here, None))

    def _repeat(self, longest: int) -> None:
        """Take over a turn's tokens from the prefix."""
        left = self._left_of_prefix()
        if left is not None:
            self._tokens.sampled(self._sampler.first_turn(left, longest))

    def _read(self, ids: Int32) -> None:
        """Add the environment's messages; if the prefix has other tokens there, drop its rest."""
        left = self._left_of_prefix()
        if left is not None and not np.array_equal(left.token_ids[: len(ids)], ids[: len(left.token_ids)]):
            log.warning(
                "sample %s: its environment did not repeat its observations; %d tokens are dropped",
                self.request.request_id,
                len(left.token_ids),
            )
            self._recorded = left = None
            self.request = replace(self.request, prefix=self._tokens.prefix())
        known = left.versions.tolist()[: len(ids)] if left is not None else []
        version = (
            self._tokens.versions[-1] if self._tokens.versions else max(self._version, self._engine.policy_version)
        )
        start = len(self._tokens.ids)
        self._tokens.read(ids, known[-1] if known else version)
        self._tokens.versions[start : start + len(known)] = known  # nobody has asked for these tokens yet

    def _finished(self, reason: FinishReason, reply: TurnReply | None) -> FinishedDialogue:
        tokens, request = self._tokens, self.request
        if reason is FinishReason.ABORT:
            self._keep_the_rest()
        rollout = Rollout(
            group_id=request.group_id,
            sample_index=request.sample_index,
            prompt_id=request.prompt.prompt_id,
            token_ids=np.asarray(tokens.ids, np.int32),
            behaviour_logprobs=np.asarray(tokens.logprobs, np.float32),
            versions=np.asarray(tokens.versions, np.int32),
            loss_mask=np.asarray(tokens.mask, np.bool_),
            finish_reason=reason,
            routes=self._routes,
        )
        return FinishedDialogue(rollout, reply, len(self._turns), self._token_rewards)

    def _keep_the_rest(self) -> None:
        """Append the rest of the prefix, for a dialogue that was cut while its turns were replayed."""
        left = self._left_of_prefix()
        if left is not None:
            self._tokens.sampled(left)


def _no_room(reply: TurnReply, num_tokens: int, num_left: int) -> TurnReply:
    """Verifier error: the opening leaves the policy no tokens, a fault of the run file."""
    why = (
        f"the environment opens with {num_tokens} tokens, which leaves the policy nothing of the {num_left} of "
        "generation.max_completion_tokens"
    )
    return replace(reply, verdict=Verdict.VERIFIER_ERROR.value, detail=why)


def _refused(reply: TurnReply, error: ConfigError) -> TurnReply:
    """Verifier error: the model's chat template refuses the environment's messages."""
    return replace(reply, verdict=Verdict.VERIFIER_ERROR.value, detail=str(error), is_over=True)


def _failed(reply: TurnReply) -> bool:
    return reply.verdict == Verdict.VERIFIER_ERROR.value


# ----------------------------------------------------------------------------------------------------------- turn calls
#
# Environment steps as calls: send a turn of a dialogue to its environment in a worker pool, get its observation.
#
# Generators call over the network, evaluations call a pool of their own, with the same messages.


def turn_request(request: RolloutRequest, dataset: DataConfig, taken: TurnsTaken) -> TurnRequest:
    """Request to an environment after the turns so far; request_id 0: the RPC client numbers calls."""
    prompt = request.prompt
    return TurnRequest(
        request_id=0,
        dialogue=f"{request.request_id}:{prompt.prompt_id}",
        environment=dataset.environment,
        record=prompt.reference,
        turns=taken.turns,
        task=prompt.task,
        answer=taken.answer,
        reference=reference_of(prompt.reference, dataset.reference_field),
        is_last=taken.is_last,
        tools=prompt.tools,
    )


async def answered(pool: RewardPool, request: TurnRequest) -> TurnReply:
    """Reply of the environment; a failure is the verdict verifier_error."""
    turn = await pool.answer(
        DialogueRequest(
            key=request.dialogue,
            environment=request.environment,
            record=request.record,
            turns=list(request.turns),
            task=request.task,
            answer=request.answer,
            reference=request.reference,
            is_last=request.is_last,
            tools=request.tools,
        )
    )
    verdict = Verdict.CORRECT if turn.is_correct else Verdict.WRONG
    return TurnReply(
        request_id=request.request_id,
        messages=turn.messages,
        reward=turn.reward,
        verdict=(Verdict.VERIFIER_ERROR if turn.error else verdict).value,
        reward_parts=turn.parts,
        detail=turn.error or turn.detail,
        is_done=turn.is_done,
        is_over=turn.is_over,
        failure=turn.failure,
    )
