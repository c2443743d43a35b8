"""One rollout of an agent, between an engine and its session: rows that grow side by side, each exact to the token.

    row 0   opening │ turn │ observation │ turn │ …
    row 1   opening │ turn │ other observation │ turn       the first turn read again, without loss
    row 2   other opening │ turn │ …                         of a sub-agent, at the same time perhaps

Each request of the agent is a task that samples the next turn of its row.  The rollout has every row with a turn of its
own, up to the end of its last one, in the order in which these ended: the last row has the last turn.

A rollout that was handed back, or whose agent has failed, goes on from its prefix by content: the agent is started
again, and a request whose tokens are the beginning of a row of the prefix gets the turn that follows there, whatever
the order of requests.  Each turn is given once; what is not found is sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rlhpc.agents.rows import AgentRow, Pending
from rlhpc.agents.session import AgentSession, Failed, Reported
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.dialogue import FinishedDialogue
from rlhpc.environments.turn_sampler import RowTokens, TurnSampler
from rlhpc.protocol.contracts import GenerationEngine
from rlhpc.protocol.messages import TurnReply
from rlhpc.protocol.types import Bool, FinishReason, Prefix, Rollout, RolloutRequest

Result = TypeVar("Result")

# ------------------------------------------------------------------------------------------------------- recorded turns
#
# Turns of a prefix, found by the tokens before them.
#
# A prefix does not say which of its tokens were sampled: those that were read have log-probability 0, turns that were
# read again among them, and here those that were given.  A turn whose every token was certain to the last bit is not
# found, and sampled again, with the same result.


class RecordedTurns:
    """The turns of a prefix; each is given once."""

    def __init__(self, prefix: Prefix | None, sampler: TurnSampler) -> None:
        rows = [prefix.row(row) for row in prefix.rows] if prefix is not None else []
        self.rows = [replace(row, behaviour_logprobs=row.behaviour_logprobs.copy()) for row in rows]
        self._sampler = sampler

    def take(self, row: AgentRow, longest: int) -> int | None:
        """Append the turn that follows these tokens, or the known part of it.

        Returns the recorded row that has it; None: there is none, and nothing was appended.
        """
        tokens, start = row.tokens, len(row.tokens)
        before = np.asarray(tokens.ids, np.int32)
        for place in sorted(range(len(self.rows)), key=lambda place: (place != row.record, place)):
            recorded = self.rows[place]
            if not np.array_equal(recorded.token_ids[:start], before):
                continue
            turn = self._sampler.first_turn(recorded.row(slice(start, None)), longest)
            # Versions never decrease in a row.  What was read before its first turn is as old as it was.
            known = tokens.versions if row.ends else recorded.versions[:start].tolist()
            if turn.behaviour_logprobs.any() and turn.versions[0] >= max(known, default=0):
                tokens.dated(known)
                tokens.sampled(turn)
                recorded.behaviour_logprobs[start : start + len(turn.token_ids)] = 0.0
                return place
        return None


# ------------------------------------------------------------------------------------------------------------- dialogue


class AgentDialogue:
    """One rollout of an agent, while it lasts."""

    def __init__(
        self,
        request: RolloutRequest,
        engine: GenerationEngine,
        session: AgentSession,
        tokenizer: PromptTokenizer,
        limits: EnvironmentConfig,
        *,
        admitted_version: int,
    ) -> None:
        """admitted_version: version of tokens read before the first is sampled, if the engine's is older."""
        self.request, self._engine, self._session = request, engine, session
        self._sampler = TurnSampler(request, engine, tokenizer, session.stop_token_ids, limits)
        self._recorded = RecordedTurns(request.prefix, self._sampler)
        self._version = admitted_version
        self._turns: set[asyncio.Task[None]] = set()  # under way
        self._is_cut, self._has_failed = asyncio.Event(), False
        self._reason = FinishReason.STOP  # of the last turn

    async def run(self) -> FinishedDialogue:
        """Run the dialogue to its end.  Raises as GenerationEngine.generate and the agent's start do."""
        cut = asyncio.ensure_future(self._is_cut.wait())
        try:
            await _unless(cut, self._session.begin())
            event = None if cut.done() else await self._converse(cut)
            if isinstance(event, Failed):
                self._has_failed = True
                await self._abort()
            await self._settle()
            reply = None
            if event is not None and not self._is_cut.is_set():
                reply = await _unless(cut, self._session.outcome(event))
            return self._finished(reply)
        finally:
            for task in (cut, *self._turns):
                task.cancel()
            await asyncio.gather(*self._turns, return_exceptions=True)

    async def cut(self) -> None:
        """End the dialogue early: `run` returns its tokens so far with FinishReason.ABORT."""
        self._is_cut.set()
        await self._abort()

    @property
    def num_tokens(self) -> int:
        """Tokens of `rows`; cheap."""
        lengths = [len(recorded.token_ids) for recorded in self._recorded.rows]
        total, following = 0, dict[int, int]()
        for row in self._session.rows.all:
            sampled = self._engine.num_sampled(self._name_of(row)) if row.pending is not None else 0
            length = max(len(row.tokens), sampled)
            if row.record is None:
                total += length
            else:
                following[row.record] = max(length, lengths[row.record])
        unused = set(self._unused()) - following.keys()
        return total + sum(following.values()) + sum(lengths[place] for place in unused)

    def rows(self) -> list[Prefix]:
        """The tokens of its rows so far, and of those of its prefix that may still be asked for."""
        live = [(row, tokens) for row in self._session.rows.all if (tokens := self._tokens_of(row)) is not None]
        following = {row.record: tokens for row, tokens in live if row.record is not None}
        unused, found = self._unused(), list[Prefix]()
        for place, recorded in enumerate(self._recorded.rows):
            if place in following:
                mine = following[place]
                found.append(mine.followed_by(recorded.row(slice(len(mine.token_ids), None))))
            elif place in unused:
                found.append(recorded)
        return found + [tokens for row, tokens in live if row.record is None]

    def prefix(self) -> Prefix | None:
        """`rows` as a prefix; None: no turn has begun."""
        rows = self.rows()
        return Prefix.of_rows(rows) if any(row.behaviour_logprobs.any() for row in rows) else None

    # ------------------------------------------------------------------------------------------------------ the session

    async def _converse(self, cut: asyncio.Task[bool]) -> Reported | Failed | None:
        """Give the agent its turns until it is over; None: the dialogue was cut."""
        session, event = self._session, asyncio.ensure_future(self._session.events.get())
        try:
            while True:
                limit_s, began = None if self._turns else session.turn_timeout_s, time.monotonic()
                done, _ = await asyncio.wait(
                    (event, cut, *self._turns), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                session.waited_s += 0.0 if limit_s is None else time.monotonic() - began
                self._reap()
                if self._is_cut.is_set():
                    return None
                if event in done:
                    found = event.result()
                    if not isinstance(found, Pending):
                        return found
                    self._turns.add(asyncio.create_task(self._take_turn(found)))
                    event = asyncio.ensure_future(session.events.get())
                elif not done:
                    return session.timed_out()
        finally:
            event.cancel()

    async def _settle(self) -> None:
        """Wait for the turns under way: to drop those that take long would teach the policy short ones."""
        while self._turns:
            await asyncio.wait(self._turns)
            self._reap()

    def _reap(self) -> None:
        """Raise what a turn has raised."""
        for task in [task for task in self._turns if task.done()]:
            self._turns.remove(task)
            task.result()

    async def _abort(self) -> None:
        for row in self._session.rows.all:
            if row.pending is not None:
                await self._engine.abort(self._name_of(row))

    # ----------------------------------------------------------------------------------------------------------- turns

    async def _take_turn(self, pending: Pending) -> None:
        """The next turn of a row: its beginning from the prefix, the rest from the engine."""
        row, tokens = pending.row, pending.row.tokens
        newest = max(self._version, self._engine.policy_version)
        tokens.read(pending.read, tokens.versions[-1] if tokens.versions else newest)
        start, longest = len(tokens), self._sampler.longest(tokens, pending.asked.max_tokens)
        self._follow(row, self._recorded.take(row, longest))
        reason = self._sampler.reason(tokens.ids[start:], longest)
        if reason is None:
            if self._is_cut.is_set():
                return
            reason, row.routes = await self._sampler.sample(tokens, start, longest, row.number)
        if reason is FinishReason.ABORT:
            if not self._has_failed:
                self._is_cut.set()
            return
        self._reason = reason
        texts, num_before = self._sampler.spoken(tokens.ids[start:], reason), len(self.request.prompt.token_ids)
        self._session.answer(pending, start, num_before, texts, is_cut=reason is FinishReason.LENGTH)

    def _follow(self, row: AgentRow, record: int | None) -> None:
        """Remember which recorded row continues this one; it continues no other."""
        for other in self._session.rows.all:
            if record is not None and other.record == record:
                other.record = None
        row.record = record

    def _name_of(self, row: AgentRow) -> str:
        return replace(self.request, row=row.number).request_id

    # ----------------------------------------------------------------------------------------------------------- tokens

    def _tokens_of(self, row: AgentRow) -> Prefix | None:
        tokens = row.tokens.prefix()
        more = self._engine.progress(self._name_of(row), len(row.tokens)) if row.pending is not None else None
        return tokens.followed_by(more) if tokens is not None and more is not None else tokens or more

    def _unused(self) -> list[int]:
        """Recorded rows with turns that were not given, as many as there may be rows beside those of the session."""
        unused = [place for place, row in enumerate(self._recorded.rows) if row.behaviour_logprobs.any()]
        return unused[: self._session.num_rows_left]

    def _finished(self, reply: TurnReply | None) -> FinishedDialogue:
        if reply is None:
            known = self.prefix() or RowTokens().up_to(0)
            return self._rollout(known, known.behaviour_logprobs != 0, FinishReason.ABORT, None)
        session = self._session
        rows = sorted((row for row in session.rows.all if row.last[0]), key=lambda row: row.last)
        parts = [(row.tokens, row.last[1]) for row in rows]
        if not rows:  # no turn: what the agent has said first
            tokens = next((row.tokens for row in session.rows.all if row.tokens.ids), RowTokens())
            if not tokens.ids:
                tokens.read(session.unasked(), self._version)
            parts = [(tokens, len(tokens))]
        joined = Prefix.of_rows([tokens.up_to(end) for tokens, end in parts])
        mask = np.concatenate([np.asarray(tokens.mask[:end], np.bool_) for tokens, end in parts])
        reason = FinishReason.LENGTH if session.lacks_room else self._reason
        finished = self._rollout(joined, mask, reason, reply)
        return replace(finished, rollout=replace(finished.rollout, routes=rows[0].routes if rows else None))

    def _rollout(self, tokens: Prefix, mask: Bool, reason: FinishReason, reply: TurnReply | None) -> FinishedDialogue:
        rollout = Rollout(
            group_id=self.request.group_id,
            sample_index=self.request.sample_index,
            prompt_id=self.request.prompt.prompt_id,
            token_ids=tokens.token_ids,
            behaviour_logprobs=tokens.behaviour_logprobs,
            versions=tokens.versions,
            loss_mask=mask,
            finish_reason=reason,
            row_starts=tokens.row_starts,
        )
        return FinishedDialogue(rollout, reply, self._session.num_turns, {})


async def _unless(cut: asyncio.Task[bool], coroutine: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of a coroutine; None: the dialogue was cut meanwhile."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait((task, cut), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
