"""One agent's session: connects its HTTP requests with its rollout.

    agent   ── request ──▶ ask() ── waits ──────▶ reply         any number of times, several at once
                             │          ▲
    rollout ◀───── event ────┘    turn ─┘                       agents/dialogue.py
    agent   ── report, or exit ──▶ outcome() ──▶ reward

A request continues a row of the rollout, or opens one (agents/rows.py).  The same request again, by messages, tools and
seed, gets the same answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from rlhpc.agents.host import LONGEST_TEXT, MOST_KEPT
from rlhpc.agents.responses_format import KnownResponses
from rlhpc.agents.rows import AgentRows, NoRoom, NoTurn, Pending, TemplateFor, tokens_of
from rlhpc.agents.turns import AgentRequest, AgentTurn, turn_of
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.messages import RewardReply, TurnReply
from rlhpc.protocol.types import Int32, Verdict
from rlhpc.rewards.outcomes import DIED, INVALID, OF_AGENTS, TIMED_OUT, NoReward, as_outcome, fault_of, sendable
from rlhpc.transport.http_server import Refused

# -------------------------------------------------------------------------------------------------------------- reports
#
# An agent's report on its rollout: any value that a reward function may return, or nothing.
#
# Input: a JSON value.  Output: RewardOutcome, or None if the report has no reward.


def outcome_of(reported: object) -> RewardOutcome | None:
    """Outcome of a report; None if it has no reward.  Raises NoReward for a wrong value, or one that is not finite."""
    if reported is None:
        return None
    outcome = as_outcome(reported)
    for name, value in {"reward": outcome.reward, **outcome.parts}.items():
        if why := fault_of(name, value):
            raise NoReward(sendable(why))
    if outcome.rewards_at:
        raise NoReward("rewards_at: an agent's reward is of the whole rollout")
    parts = {sendable(name): float(value) for name, value in outcome.parts.items()}
    return RewardOutcome(
        float(outcome.reward), bool(outcome.is_correct), parts, sendable(str(outcome.detail))[:LONGEST_TEXT]
    )


def last_line(output: str) -> RewardOutcome | None:
    """Parse the last line of a successful program, if it is JSON; None: no reward was reported.

    Raises NoReward as outcome_of does.
    """
    line = output.strip().replace("\r", "\n").rpartition("\n")[2]  # splitlines also splits at U+2028, legal in JSON
    if line == output.strip() and line.endswith("}") and len(output.encode()) >= MOST_KEPT:  # the end of a report
        raise NoReward(f"the last line has {MOST_KEPT} bytes or more, of which the beginning is not kept: shorten it")
    try:
        return outcome_of(json.loads(line))
    except (ValueError, RecursionError):  # text for people
        return None


# -------------------------------------------------------------------------------------------------------------- session

Judge = Callable[[str], Awaitable[RewardReply]]  # the last turn


@dataclass(frozen=True, slots=True)
class Reported:
    """The agent's report of its reward; None: no reward, the task alone judges."""

    outcome: RewardOutcome | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed session: there will be no reward."""

    why: str
    failure: str  # one of rewards.failures.FAILURES


@dataclass(frozen=True, slots=True)
class SessionRules:
    """Settings common to all sessions of a run."""

    call_form: str
    turn_timeout_s: float
    template_for: TemplateFor
    max_rows: int
    max_turns: int  # of all rows


class AgentSession:
    """Session of one agent, with the rows of its rollout."""

    def __init__(
        self,
        name: str,
        rules: SessionRules,
        judge: Judge | None,
        begin: Callable[[AgentSession], Awaitable[None]] | None = None,
        *,
        max_tokens: int,
    ) -> None:
        """judge: the dataset's task; None: only the agent reports a reward.  begin: starts the agent.

        max_tokens: of each row.
        """
        self.name, self._rules, self._judge = name, rules, judge
        self._begin = begin
        self.rows = AgentRows(rules.template_for, max_rows=rules.max_rows, max_tokens=max_tokens)
        self.events: asyncio.Queue[Pending | Reported | Failed] = asyncio.Queue()
        self._over, self._answer = "", ""
        self.responses = KnownResponses()
        self._num_asked = self.num_turns = 0  # requests that have, or will have, a turn of their own; turns given
        self.lacks_room = False  # the last request that was not a repetition was refused for lack of room
        self.is_settled = False  # rewarded, or failed
        self.failure = ""  # then one of rewards.failures.FAILURES, or ""
        self.waited_s = 0.0  # for the agent

    @property
    def may_do_better(self) -> bool:
        """True if another try may succeed: the failure was not the agent's breach of the protocol."""
        return self.failure not in ("", INVALID)

    # ------------------------------------------------------------------------------------------------- of the endpoint

    async def ask(self, asked: AgentRequest) -> AgentTurn:
        """The policy's next turn.  Raises Refused."""
        if self._over:
            raise _session_over(self._over)
        known = self.rows.known(asked)
        if isinstance(known, AgentTurn):
            return known
        if known is None:
            known = self._placed(asked)
            self.events.put_nowait(known)
        return await asyncio.shield(known.turn)

    def count(self, asked: AgentRequest) -> int:
        """Number of tokens of a request's messages and tools, as the chat template writes them.  Raises Refused."""
        try:
            return len(self._rules.template_for(asked.tools).whole(asked.messages))
        except ConfigError as error:
            raise Refused(f"messages: {error}") from error

    def report(self, outcome: RewardOutcome | None) -> None:
        """Accept the agent's report.  Only the first one counts."""
        self._end(Reported(outcome), "the session is over: its reward was reported")

    def fail(self, why: str, failure: str = DIED) -> None:
        """End the session without a report."""
        self._end(Failed(why, failure), f"the session is over: {why}")

    def close(self) -> None:
        """Close the session of a rollout that is over, or was handed back."""
        self._over = self._over or "the session is over: its rollout goes on elsewhere, or nowhere"
        for row in self.rows.all:
            if row.pending is not None and not row.pending.turn.done():
                row.pending.turn.set_exception(_session_over(self._over))
                row.pending.turn.exception()  # mark as retrieved: the client may be gone

    # ------------------------------------------------------------------------------------------------ of the dialogue

    async def begin(self) -> None:
        """Start the agent, once."""
        begin, self._begin = self._begin, None
        if begin is not None:
            await begin(self)

    @property
    def num_rows_left(self) -> int:
        """Rows that it may still open."""
        return self._rules.max_rows - len(self.rows.all)

    @property
    def turn_timeout_s(self) -> float:
        """Seconds to wait for an event while no request is pending."""
        return self._rules.turn_timeout_s

    def timed_out(self) -> Failed:
        """End a session whose agent was silent for so long."""
        why = f"no request and no report within agent.turn_timeout_s={self.turn_timeout_s:g}"
        self._over = self._over or f"the session is over: {why}"
        return Failed(why, TIMED_OUT)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self._rules.template_for(()).stop_token_ids

    def unasked(self) -> Int32:
        """Tokens of a rollout whose agent has asked nothing."""
        return tokens_of(self._rules.template_for(()), ({"role": "user", "content": ""},))

    def answer(self, pending: Pending, start: int, num_before: int, texts: tuple[str, str], *, is_cut: bool) -> None:
        """Give a turn, the tokens of its row from `start` on.

        num_before: tokens of the prompt, before those of the row.  texts: of the turn, with special tokens and without.
        is_cut: a limit has ended it.
        """
        row, (text, answer) = pending.row, texts
        self.num_turns += 1
        self._answer = answer
        token_ids = tuple(row.tokens.ids[start:])
        turn = turn_of(
            text,
            answer,
            self._rules.call_form,
            number=self.num_turns,
            before=row.messages,
            tools=row.tools,
            is_cut=is_cut,
            num_tokens=(num_before + start, len(token_ids)),
            token_ids=token_ids,
            is_thinking=None if row.is_plain else row.template.is_thinking,
            end_of_thought=row.template.end_of_thought,
        )
        self.rows.answered(pending, turn, self.num_turns)

    async def outcome(self, event: Reported | Failed) -> TurnReply:
        """The rollout's reward, or its failure."""
        if isinstance(event, Reported) and not self.num_turns:
            event = Failed("the agent has reported a reward and asked for no turn: there is nothing to train", INVALID)
        if isinstance(event, Reported) and event.outcome is None and self._judge is None:
            event = Failed(
                'the agent has reported no reward, and data.task="environment" has no other; legal: a number, or '
                "another data.task, which judges its last turn",
                INVALID,
            )
        self.is_settled = True
        if isinstance(event, Failed):
            self.failure = event.failure
            failed = _reply(0.0, Verdict.VERIFIER_ERROR, {}, f"agent: {event.why}")
            return replace(failed, failure=OF_AGENTS + event.failure)
        reported = event.outcome or RewardOutcome(0.0, is_correct=False)
        if self._judge is None:
            verdict = Verdict.CORRECT if reported.is_correct else Verdict.WRONG
            return _reply(reported.reward, verdict, reported.parts, reported.detail)
        judged = await self._judge(self._answer)
        detail = "; ".join(filter(None, (reported.detail, judged.detail)))
        parts = {**reported.parts, **judged.reward_parts}
        replied = _reply(reported.reward + judged.reward, Verdict(judged.verdict), parts, detail)
        return replace(replied, failure=judged.failure)

    # ---------------------------------------------------------------------------------------------------------- within

    def _placed(self, asked: AgentRequest) -> Pending:
        """Put a request into a row.  Raises Refused; ends the session if not even its first request has room."""
        if self._num_asked >= self._rules.max_turns:
            self.lacks_room = True
            raise NoTurn(self._rules.max_turns)
        try:
            pending = self.rows.place(asked)
        except NoRoom as refused:
            self.lacks_room = True
            if not self.rows.all:
                self.fail(
                    f"its first request has {refused.num_tokens} tokens, which leaves the policy nothing of the "
                    f"{refused.max_tokens} of generation.max_completion_tokens",
                    INVALID,
                )
            raise
        self._num_asked, self.lacks_room = self._num_asked + 1, False
        return pending

    def _end(self, event: Reported | Failed, why: str) -> None:
        if not self._over:
            self._over = why
            self.events.put_nowait(event)


def _session_over(why: str) -> Refused:
    return Refused(why, status=410, code="session_over")


def _reply(reward: float, verdict: Verdict, parts: dict[str, float], detail: str) -> TurnReply:
    return TurnReply(0, (), reward, verdict.value, parts, detail, is_done=True, is_over=True)
