"""Rows of an agent's session: which one a request continues, and what the policy reads before it answers.

    request ── its messages continue a row ──▶ the new ones are read there
            └─ they do not ── they begin with turns of a row ──▶ a new row: its tokens up to there, the rest rendered
                           └─ they do not ─────────────────────▶ a new row: all of its messages, rendered

Agents rewrite their history (they compact it, strip thoughts, ask sub-agents), and a turn is only worth training where
it stands behind the tokens that it was sampled behind.  So each line of messages is a row of the rollout
(protocol/types.py), with exactly the tokens that the engine was fed.  Turns are trained in the row in which they were
sampled; where they are read again, and where the agent says something in the policy's name, there is no loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhpc.agents.openai_format import Plain, added, piece
from rlhpc.agents.turns import FULL, AgentRequest, AgentTurn, Message, Tool, first_difference, is_same
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.environments.turn_sampler import RowTokens
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import Int32, Routes
from rlhpc.transport.http_server import Refused

TOO_MANY = "too_many_rows"

TemplateFor = Callable[[Sequence[Tool]], DialogueTemplate]


@dataclass(eq=False, slots=True)
class Pending:
    """A request that waits for its turn."""

    row: AgentRow
    asked: AgentRequest
    read: Int32  # tokens [L] that the policy reads before the turn, behind those of the row
    turn: asyncio.Future[AgentTurn] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False, slots=True)
class AgentRow:
    """One line of messages, and its tokens."""

    number: int  # in the order in which they began
    why: str  # FIRST, TOOLS, BRANCH or REWRITTEN
    tools: tuple[Tool, ...]
    template: DialogueTemplate
    messages: list[Message] = field(default_factory=list)  # so far, with those of a pending request
    tokens: RowTokens = field(default_factory=RowTokens)
    is_plain: bool = False  # of text completions
    ends: dict[int, int] = field(default_factory=dict)  # place of a turn in messages → tokens up to its end
    answers: dict[int, tuple[int | None, AgentTurn]] = field(default_factory=dict)  # place of a turn → seed, and turn
    pending: Pending | None = None
    last: tuple[int, int] = (0, 0)  # number of its last turn in the rollout, and tokens up to its end; (0, 0): none
    routes: Routes | None = None  # of prompt and tokens up to the last turn: the engine computed them all
    record: int | None = None  # row of the prefix that is known to begin like this one, or to be its beginning

    @property
    def is_cut(self) -> bool:
        """True if a limit ended its last turn."""
        answer = self.answers.get(len(self.messages) - 1)
        return answer is not None and answer[1].is_cut

    def observation(self, new: Sequence[Message]) -> Int32:
        """Tokens [L] of new messages behind its last turn.  Raises ConfigError."""
        return self.template.observation(new, last_token=self.tokens.ids[-1])

    def knows(self, asked: AgentRequest, place: int) -> bool:
        """True if a request has exactly its messages before this place."""
        if asked.plain is not None:
            new = added(self.messages[:place], asked.plain)
            return new is not None and not new
        return is_same(asked.messages, self.messages[:place])


FIRST = "first"  # why a row was opened; the others are of rewards/outcomes.ROWS
TOOLS = "tools"  # it begins like a row with other tools
BRANCH = "branch"  # it shares turns with another row
REWRITTEN = "rewritten"  # it shares no turn: compacted, or of a sub-agent


class AgentRows:
    """The rows of a session."""

    def __init__(self, template_for: TemplateFor, *, max_rows: int, max_tokens: int) -> None:
        """max_tokens: of each row."""
        self._template_for, self._max_rows, self._max_tokens = template_for, max_rows, max_tokens
        self.all: list[AgentRow] = []

    def known(self, asked: AgentRequest) -> Pending | AgentTurn | None:
        """The turn that was given for the same request before, or the one that waits for it; None: it is another."""
        for row in self._alike(asked):
            waits, place = row.pending, len(row.messages)
            if waits is not None and waits.asked.seed == asked.seed and row.knows(asked, place):
                return waits
            place = place - 1 if row.is_plain else len(asked.messages)  # of a text's turns only the last one
            seed, turn = row.answers.get(place, (None, None))
            if turn is not None and seed == asked.seed and row.knows(asked, place):
                return turn
        return None

    def place(self, asked: AgentRequest) -> Pending:
        """Put a request at the end of a row.  Raises Refused, and has no effect then."""
        if asked.plain is not None:
            return self._place_text(asked, asked.plain)
        if asked.messages[-1]["role"] == "assistant":
            raise Refused("messages: the last one is the assistant's; a turn is not continued here, but sampled whole")
        shared = {row.number: _num_shared(row.messages, asked.messages) for row in self._alike(asked)}
        turns = [(place, -number) for number, num in shared.items() for place in self.all[number].ends if place < num]
        last_turn, number = max(turns, default=(-1, 0))  # the last one that a row shares, in the first such row
        going = [row for row in self._free(asked) if shared[row.number] == len(row.messages) > last_turn]
        try:
            if going:
                new = asked.messages[len(going[0].messages) :]
                return self._ask(going[0], asked, new, going[0].observation(new))
            row = self._opened(asked, self.all[-number] if turns else None, last_turn)
            new = asked.messages[last_turn + 1 :]
            read = row.observation(new) if turns else tokens_of(row.template, new)
            return self._ask(row, asked, new, read)
        except ConfigError as error:
            raise Refused(f"messages: {error}") from error

    def answered(self, pending: Pending, turn: AgentTurn, number: int) -> None:
        """Append a turn, of this number in the rollout, whose tokens the row has."""
        row, place, end = pending.row, len(pending.row.messages), len(pending.row.tokens)
        row.messages.append(piece(turn.content, turn.token_ids) if row.is_plain else turn.message)
        row.ends[place], row.answers[place] = end, (pending.asked.seed, turn)
        row.pending, row.last = None, (number, end)
        if not pending.turn.done():
            pending.turn.set_result(turn)

    def _alike(self, asked: AgentRequest) -> list[AgentRow]:
        """Rows of the same kind, with the same tools."""
        is_plain = asked.plain is not None
        return [row for row in self.all if row.is_plain == is_plain and row.tools == asked.tools]

    def _free(self, asked: AgentRequest) -> list[AgentRow]:
        return [row for row in self._alike(asked) if row.pending is None]

    def _ask(self, row: AgentRow, asked: AgentRequest, new: Sequence[Message], read: Int32) -> Pending:
        """Let a row read new messages, if there is room for a turn behind them."""
        if row.number == len(self.all) >= self._max_rows:
            raise Refused(
                f"this request continues none of the session's {len(self.all)} rows, and there may be no more: "
                f"agent.max_rows={self._max_rows}; legal: all messages of a row, as they were said, and new ones",
                code=TOO_MANY,
            )
        if len(row.tokens) + len(read) >= self._max_tokens:
            raise NoRoom(len(row.tokens) + len(read), self._max_tokens)
        if row.number == len(self.all):
            self.all.append(row)
        row.messages += new
        row.pending = Pending(row, asked, read)
        return row.pending

    def _opened(self, asked: AgentRequest, source: AgentRow | None, last_turn: int) -> AgentRow:
        """A new row that begins like `source` up to this turn; None: like none."""
        if source is None:
            return AgentRow(len(self.all), self._why(asked), asked.tools, self._template_for(asked.tools))
        row = AgentRow(len(self.all), BRANCH, asked.tools, source.template)
        row.messages += asked.messages[: last_turn + 1]
        row.tokens = source.tokens.beginning(source.ends[last_turn])
        row.ends = {place: end for place, end in source.ends.items() if place <= last_turn}
        return row

    def _why(self, asked: AgentRequest) -> str:
        if not self.all:
            return FIRST
        others = (row for row in self.all if row.tools != asked.tools)
        return TOOLS if any(_num_shared(row.messages, asked.messages) for row in others) else REWRITTEN

    # ------------------------------------------------------------------------------------------------------------ texts

    def _place_text(self, asked: AgentRequest, plain: Plain) -> Pending:
        """Put the new piece of a text completion at the end of a row."""
        found = [(row, added(row.messages, plain)) for row in self._free(asked)]
        going = [(row, new) for row, new in found if new is not None]
        if not going:
            template = self._template_for(())
            row, new = AgentRow(len(self.all), REWRITTEN if self.all else FIRST, (), template, is_plain=True), plain
        else:
            row, new = max(going, key=lambda each: len(each[0].tokens))
        if not new and not row.is_cut:
            raise Refused("prompt: it adds nothing to what was said before, and the last turn has ended by itself")
        template, is_new = row.template, row.number == len(self.all)
        beginning = tuple(template.tokens_of_beginning.tolist()) if is_new else ()
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
        read = np.asarray(tokens[len(beginning) :], np.int32)
        return self._ask(row, asked, (piece(new if isinstance(new, str) else None, tokens),), read)


class NoRoom(Refused):
    """A row would be too long for another turn."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        self.num_tokens, self.max_tokens = num_tokens, max_tokens
        super().__init__(
            "the row has no room for another turn: with these messages it has "
            f"{num_tokens} tokens, generation.max_completion_tokens={max_tokens}; begin another with fewer, or report "
            "the reward",
            code=FULL,
        )


class NoTurn(Refused):
    """The rollout may have no more turns."""

    def __init__(self, max_turns: int) -> None:
        super().__init__(
            f"the rollout has had its environment.max_turns={max_turns} turns, in all of its rows; report its reward",
            code=FULL,
        )


def tokens_of(template: DialogueTemplate, messages: Sequence[Message]) -> Int32:
    """Tokens [L] of a whole dialogue without the prompt that every dialogue begins with.  Raises ConfigError."""
    tokens, beginning = template.whole(messages), template.tokens_of_beginning
    if tokens[: len(beginning)].tolist() != beginning.tolist():
        raise ConfigError(f"the chat template begins these otherwise than with {template.beginning!r}")
    return tokens[len(beginning) :]


def _num_shared(known: Sequence[Message], said: Sequence[Message]) -> int:
    """Number of messages with which both begin."""
    place = first_difference(known, said)
    return len(known) if place is None else place
