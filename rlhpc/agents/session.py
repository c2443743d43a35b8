"""One agent's session: connects its HTTP requests with its rollout.

    agent   ── request ──▶ ask() ─ waits ─────────────────▶ reply       any number of times
                             │                    ▲
    rollout ◀─ messages ── __call__() ── turn ────┘      as an environment of environments/dialogue.py, and its template
    agent   ── report, or exit ──▶ __call__() ──▶ reward

A session is linear: each request repeats all earlier messages, and adds some.  Tokens of older messages are never made
again, so a request with a changed history cannot be sampled from: it ends the session with a verifier error.  A request
that is sent again after its answer gets the same answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhpc.agents.host import LONGEST_TEXT, MOST_KEPT
from rlhpc.agents.openai_format import Plain, added, piece
from rlhpc.agents.responses_format import KnownResponses
from rlhpc.agents.turns import FULL, AgentRequest, AgentTurn, Message, first_difference, is_same, turn_of
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.environments.dialogue import TurnsTaken
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

CHANGED = "history_changed"
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


@dataclass(eq=False, slots=True)
class _Pending:
    """A request that waits for its turn."""

    asked: AgentRequest
    new: tuple[Message, ...]  # its new messages
    turn: asyncio.Future[AgentTurn] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class SessionRules:
    """Settings common to all sessions of a run."""

    call_form: str
    turn_timeout_s: float
    template_for: Callable[[Sequence[Mapping[str, Any]]], DialogueTemplate]  # by tools


class AgentSession:
    """Session of one agent: the environment and the template of its Dialogue."""

    def __init__(
        self,
        name: str,
        rules: SessionRules,
        judge: Judge | None,
        begin: Callable[[AgentSession], Awaitable[None]] | None = None,
    ) -> None:
        """judge: the dataset's task; None: only the agent reports a reward.  begin: starts the agent."""
        self.name, self._rules, self._judge = name, rules, judge
        self._begin = begin
        self._template = rules.template_for(())
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._history: list[Message] = []  # all messages so far
        self._opening: Int32 | None = None
        self._piece: Int32 | None = None  # tokens that the current request adds, if it is for a text completion
        self._events: asyncio.Queue[_Pending | Reported | Failed] = asyncio.Queue()
        self._pending: _Pending | None = None
        self._answered: tuple[AgentRequest, AgentTurn] | None = None  # the last one
        self._num_turns = 0  # answered
        self._is_full, self._over = False, ""
        self.responses = KnownResponses()
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
            raise Refused(self._over, status=410, code="session_over")
        if self._pending is not None and is_same(asked.messages, self._pending.asked.messages):
            return await asyncio.shield(self._pending.turn)  # a retry of a client that timed out
        if self._answered is not None and is_same(asked.messages, self._answered[0].messages):
            return self._answered[1]
        if self._pending is not None:
            raise self._changed("a second request came before the first was answered")
        if self._is_full:  # before the history grows: refused messages are not part of it, and may come again changed
            raise _no_room()
        new = self._new_messages(asked)
        self._pending = _Pending(asked, new)
        self._events.put_nowait(self._pending)
        return await asyncio.shield(self._pending.turn)

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
        if self._pending is not None and not self._pending.turn.done():
            self._pending.turn.set_exception(Refused(self._over, status=410, code="session_over"))
            self._pending.turn.exception()  # mark as retrieved: the client may be gone

    # ------------------------------------------------------------------------------------------------ of the dialogue

    async def __call__(self, taken: TurnsTaken) -> TurnReply:
        """Answer the pending request with the last turn, and wait for the next request, or for the reward."""
        begin, self._begin = self._begin, None
        if begin is not None:
            await begin(self)
        if len(taken.turns) > self._num_turns:
            self._answer(taken)
        if taken.is_last:
            self._fill()
        event = await self._next_event()
        if isinstance(event, _Pending):
            said = () if event.asked.plain is not None else tuple(dict(message) for message in event.new)
            return TurnReply(0, said, 0.0, Verdict.WRONG.value, {}, "",
                             is_done=False, is_over=False)  # fmt: skip
        return await self._rewarded(event, taken)

    def longest_turn(self) -> int | None:
        """The agent's limit for the next turn, in tokens."""
        return self._pending.asked.max_tokens if self._pending is not None else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See Template."""
        return self._template.stop_token_ids

    def opening(self, _messages: Sequence[Mapping[str, Any]]) -> Int32:
        """Tokens of the first request's messages; without a request, those before any answer."""
        return self._tokens_of(({"role": "user", "content": ""},)) if self._opening is None else self._opening

    def observation(self, messages: Sequence[Mapping[str, Any]], *, last_token: int) -> Int32:
        """See Template."""
        if self._piece is not None:
            return self._piece
        return self._template.observation(messages, last_token=last_token)

    # ---------------------------------------------------------------------------------------------------------- within

    def _new_messages(self, asked: AgentRequest) -> tuple[Message, ...]:
        """New messages of a request.  Raises Refused, and ends the session if the request changes the history."""
        if asked.plain is not None:
            return (self._new_piece(asked.plain),)
        self._piece = None
        if asked.messages[-1]["role"] == "assistant":
            raise Refused("messages: the last one is the assistant's; a turn is not continued here, but sampled whole")
        if self._history and asked.tools != self._tools:
            raise self._changed("its tools are not those of the first request, which the policy has read")
        place = first_difference(self._history, asked.messages)
        if place is not None:
            raise self._changed(f"message {place} of {len(asked.messages)} is not what was said before")
        new = asked.messages[len(self._history) :]
        if self._history and (not new or any(message["role"] == "assistant" for message in new)):
            raise self._changed("it adds what the policy did not say")
        try:
            if self._history:
                self._template.observation(new, last_token=self.stop_token_ids[0])
            else:
                self._tools, self._template = asked.tools, self._rules.template_for(asked.tools)
                self._opening = self._tokens_of(asked.messages)
        except ConfigError as error:
            raise Refused(f"messages: {error}") from error
        self._history += new
        return new

    def _new_piece(self, plain: Plain) -> Message:
        """The new piece of a text completion."""
        new, template = added(self._history, plain), self._template
        if new is None:
            raise self._changed("its prompt does not begin with all that was said before")
        if not new and not (self._answered is not None and self._answered[1].is_cut):
            raise Refused("prompt: it adds nothing to what was said before, and the last turn has ended by itself")
        beginning = () if self._history else tuple(template.tokens_of_beginning.tolist())
        if isinstance(new, str):
            begins = new.startswith(template.beginning)
            tokens = (() if begins else beginning) + tuple(template.plain(new).tolist())
        else:
            tokens = new
        if tokens[: len(beginning)] != beginning or not all(0 <= each < template.vocab_size for each in tokens):
            raise Refused(
                f"prompt: token ids from 0 to {template.vocab_size - 1}, the first of them {list(beginning)}, with "
                "which every rollout of this model begins"
            )
        self._piece = np.asarray(tokens[len(beginning) :], np.int32)
        if not self._history:
            self._opening = self._piece
        said = piece(new if isinstance(new, str) else None, tokens)
        self._history.append(said)
        return said

    def _tokens_of(self, messages: Sequence[Message]) -> Int32:
        """Tokens of a whole dialogue without the prompt that every dialogue begins with.  Raises ConfigError."""
        tokens = self._template.whole(messages)
        beginning = self._template.tokens_of_beginning
        if tokens[: len(beginning)].tolist() != beginning.tolist():
            raise ConfigError(f"the chat template begins these otherwise than with {self._template.beginning!r}")
        return tokens[len(beginning) :]

    async def _next_event(self) -> _Pending | Reported | Failed:
        """Next event of the agent; without room for another turn, only a report or a failure."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._rules.turn_timeout_s):
                event = await self._events.get()
                while self._is_full and isinstance(event, _Pending):
                    event = await self._events.get()
        except TimeoutError:
            limit_s = self._rules.turn_timeout_s
            return Failed(f"no request and no report within agent.turn_timeout_s={limit_s:g}", TIMED_OUT)
        finally:
            self.waited_s += time.monotonic() - began
        return event

    def _answer(self, taken: TurnsTaken) -> None:
        self._num_turns = len(taken.turns)
        pending, self._pending = self._pending, None
        assert pending is not None, "a turn that nobody has asked for"
        is_plain = pending.asked.plain is not None
        turn = turn_of(
            taken.turns[-1],
            taken.answer,
            self._rules.call_form,
            number=self._num_turns,
            tools=self._tools,
            is_cut=taken.is_cut,
            num_tokens=taken.num_tokens,
            token_ids=taken.token_ids,
            is_thinking=None if is_plain else self._template.is_thinking,
            end_of_thought=self._template.end_of_thought,
        )
        self._history.append(piece(turn.content, turn.token_ids) if is_plain else turn.message)
        self._answered = pending.asked, turn
        if not pending.turn.done():
            pending.turn.set_result(turn)

    def _fill(self) -> None:
        """Refuse the pending and all later requests, for lack of room; the reward is still awaited."""
        self._is_full = True
        if self._pending is not None:
            self._pending.turn.set_exception(_no_room())
            self._pending.turn.exception()
            del self._history[len(self._history) - len(self._pending.new) :]
            self._pending = None

    def _changed(self, why: str) -> Refused:
        """End the session with a verifier error: the agent does not continue from the tokens that were sampled."""
        said = (
            f"{CHANGED}: {why}; a session is one line, in which each request repeats all messages and adds new ones "
            "(docs/environments.md)"
        )
        self.fail(said, INVALID)
        return Refused(said, status=400, code=CHANGED)

    def _end(self, event: Reported | Failed, why: str) -> None:
        if not self._over:
            self._over = why
            self._events.put_nowait(event)

    async def _rewarded(self, event: Reported | Failed, taken: TurnsTaken) -> TurnReply:
        """The last reply."""
        if isinstance(event, Reported) and not taken.turns:
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
        judged = await self._judge(taken.answer)
        detail = "; ".join(filter(None, (reported.detail, judged.detail)))
        parts = {**reported.parts, **judged.reward_parts}
        replied = _reply(reported.reward + judged.reward, Verdict(judged.verdict), parts, detail)
        return replace(replied, failure=judged.failure)


def _no_room() -> Refused:
    return Refused(
        "the rollout has no room for another turn (generation.max_completion_tokens, environment.max_turns); report "
        "its reward",
        code=FULL,
    )


def _reply(reward: float, verdict: Verdict, parts: dict[str, float], detail: str) -> TurnReply:
    return TurnReply(0, (), reward, verdict.value, parts, detail, is_done=True, is_over=True)
