"""Agents that rewrite their history: every row is trained as the engine was fed it, and every turn once."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.agents.dialogue import AgentDialogue
from rlhpc.agents.rows import Pending
from rlhpc.agents.session import AgentSession, SessionRules
from rlhpc.agents.turns import AgentRequest, AgentTurn, Message, is_same
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.dialogue import FinishedDialogue
from rlhpc.generation.requests import prefix_of
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.environment import TOOL_SCHEMAS
from rlhpc.protocol.types import FinishReason, Prefix, Prompt, Rollout, RolloutRequest, SamplingParams
from rlhpc.transport.http_server import Refused
from rlhpc.weights.buckets import make_manifest
from tests.engines.scripted_engine import Script
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import TEMPLATES, make_chat_model
from tests.unit.roles.test_dialogue import Watched

WORDS = ["42", "nothing\nwas found", "è€🙂", "a few words", "</tool_response>", "{}"]
SEARCH = {"type": "function", "function": TOOL_SCHEMAS["search"]}


# -------------------------------------------------------------------------------------------------------------- harness


@dataclass(frozen=True)
class Heard:
    """A turn that the policy was asked for, and what was said before."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    turn: AgentTurn


@dataclass
class Harness:
    """An agent that does what real ones do to their history; what it says follows from what it has heard."""

    session: AgentSession
    steps: Sequence[str]
    heard: list[Heard] = field(default_factory=list)
    num_delegated: int = 0

    async def play(self) -> None:
        messages: list[Message] = [said("system", "Be brief."), said("user", "What is 12 times 34?")]
        try:
            for step in self.steps:
                messages = await getattr(self, step)(messages)
        except Refused as refused:
            if refused.code not in ("context_length_exceeded", "too_many_rows", "session_over"):
                raise
        self.session.report(RewardOutcome(0.5, is_correct=False))

    async def ask(self, messages: Sequence[Message], **more: Any) -> AgentTurn:
        turn = await self.session.ask(AgentRequest(tuple(messages), **more))
        if all(turn is not each.turn for each in self.heard):  # else it has asked the same before
            self.heard.append(Heard(tuple(messages), more.get("tools", ()), turn))
        return turn

    async def talk(self, messages: list[Message]) -> list[Message]:
        """Go on as every client does."""
        turn = await self.ask(messages)
        return [*messages, turn.message, said("user", words(turn))]

    async def compact(self, messages: list[Message]) -> list[Message]:
        """Have the history summarised, and go on from the summary, in words that nobody has sampled."""
        turn = await self.ask([*messages[:-1], said("user", "Summarise.")])
        return [messages[0], said("assistant", f"So far: {words(turn)}"), said("user", "Go on.")]

    async def strip(self, messages: list[Message]) -> list[Message]:
        """Leave out what the policy thought, here the first half of what it said."""
        turn = await self.ask(messages)
        return [*messages, said("assistant", turn.content[len(turn.content) // 2 :]), said("user", words(turn))]

    async def delegate(self, messages: list[Message]) -> list[Message]:
        """Ask two sub-agents of two turns each at once, and tell what they have found."""
        self.num_delegated += 1
        found = await both(*(self.sub_agent(f"{name} of {self.num_delegated}") for name in ("first", "second")))
        return [*messages[:-1], said("user", f"They say: {' and '.join(found)}")]

    async def sub_agent(self, name: str) -> str:
        messages = [said("user", f"You are the {name}.")]
        for _ in range(2):
            messages = await self.talk(messages)
        return messages[-1]["content"]

    async def branch(self, messages: list[Message]) -> list[Message]:
        """Go on in two ways at once from the same turns, and keep one."""
        one, other = await both(*(self.ask([*messages, said("user", way)]) for way in ("Left.", "Right.")))
        return [*messages, said("user", "Left."), one.message, said("user", words(other))]

    async def siblings(self, messages: list[Message]) -> list[Message]:
        """Ask for two answers to the same, and keep the second."""
        _, kept = await both(*(self.ask(messages, seed=seed) for seed in (1, 2)))
        return [*messages, kept.message, said("user", words(kept))]

    async def again(self, messages: list[Message]) -> list[Message]:
        """Send the same request twice, as a client that has lost patience."""
        one, same = await both(self.ask(messages), self.session.ask(AgentRequest(tuple(messages))))
        assert one is same is await self.session.ask(AgentRequest(tuple(messages)))
        return [*messages, one.message, said("user", words(one))]

    async def tools(self, messages: list[Message]) -> list[Message]:
        """Ask once with a tool."""
        turn = await self.ask(messages, tools=(SEARCH,))
        return [*messages[:-1], said("user", words(turn))]

    async def inject(self, messages: list[Message]) -> list[Message]:
        """Speak in the policy's name."""
        return [*messages, said("assistant", "I shall see."), said("user", "Do.")]


STEPS = ("talk", "compact", "strip", "delegate", "branch", "siblings", "again", "tools", "inject")


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


async def both(*asking: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all, or the first error once all have ended."""
    results = await asyncio.gather(*asking, return_exceptions=True)
    for error in (each for each in results if isinstance(each, BaseException)):
        raise error
    return results


def words(turn: AgentTurn) -> str:
    rng = random.Random(zlib.crc32(turn.content.encode()))
    return " ".join(rng.choices(WORDS, k=3))


# ----------------------------------------------------------------------------------------------------------------- kit


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    root = tmp_path_factory.mktemp("model")
    return {family: PromptTokenizer(make_chat_model(root / family, family)) for family in TEMPLATES}


@dataclass
class Stand:
    """A dialogue, its engine and its agent."""

    tokenizer: PromptTokenizer
    engine: Watched
    session: AgentSession
    dialogue: AgentDialogue
    harness: Harness

    async def run(self) -> FinishedDialogue:
        playing = asyncio.create_task(self.harness.play())
        try:
            return await asyncio.wait_for(self.dialogue.run(), PATIENCE_S)
        finally:
            self.session.close()
            await playing


async def stand_of(
    tokenizer: PromptTokenizer, case: dict[str, Any], prefix: Prefix | None = None, version: int = 3
) -> Stand:
    template = DialogueTemplate(tokenizer)
    script = Script(
        seed=case["seed"], vocab_size=tokenizer.vocab_size, stop_token_id=template.turn_end, stop_probability=0.15
    )
    engine = Watched(script, decode=tokenizer.decode)
    engine.fed = []
    await engine.receive_weights(make_manifest(version, 1, (), 1))
    made: dict[str, DialogueTemplate] = {}
    rules = SessionRules(
        "hermes",
        PATIENCE_S,
        lambda tools: made.setdefault(str(tools), DialogueTemplate(tokenizer, tools)),
        max_rows=case.get("max_rows", 64),
        max_turns=case.get("max_turns", 64),
    )
    session = AgentSession("one", rules, None, max_tokens=case["max_tokens"])
    prompt = Prompt(0, "environment", template.tokens_of_beginning, "{}")
    sampling = SamplingParams(case["max_tokens"], 1.0, tokenizer.eos_token_ids)
    request = RolloutRequest(5, 1, prompt, sampling, prefix)
    limits = EnvironmentConfig(max_turn_tokens=20)
    dialogue = AgentDialogue(request, engine, session, tokenizer, limits, admitted_version=2)
    return Stand(tokenizer, engine, session, dialogue, Harness(session, case["steps"]))


CASES = st.fixed_dictionaries(
    {
        "family": st.sampled_from(sorted(TEMPLATES)),
        "seed": st.integers(0, 1 << 20),
        "max_tokens": st.sampled_from([120, 300, 2000]),
        "max_rows": st.sampled_from([2, 5, 64]),
        "max_turns": st.sampled_from([4, 64]),
        "steps": st.lists(st.sampled_from(STEPS), min_size=1, max_size=6),
    }
)


def rows_of(rollout: Rollout) -> list[Prefix]:
    whole = prefix_of(rollout)
    return [whole.row(row) for row in whole.rows]


def check(finished: FinishedDialogue, stand: Stand, case: dict[str, Any], known: Prefix | None = None) -> None:
    """What holds of every rollout that was not cut off; known: the prefix that it has continued."""
    rollout, heard = finished.rollout, stand.harness.heard
    assert rollout.row_fault == ""
    assert finished.num_turns == len(heard) <= case["max_turns"]
    if not heard:
        assert not rollout.loss_mask.any()
        return
    rows, masks = rows_of(rollout), [rollout.loss_mask[row] for row in rollout.rows]
    assert len(rows) <= case["max_rows"]
    trained = []
    for row, mask in zip(rows, masks, strict=True):
        assert len(row.token_ids) <= case["max_tokens"]
        assert mask[-1]
        assert (np.diff(row.versions) >= 0).all()
        assert (row.behaviour_logprobs[~mask] == 0).all()
        trained += [
            (tuple(row.token_ids[:first].tolist()), tuple(row.token_ids[first:end].tolist()))
            for first, end in turns_of(row, mask, heard)
        ]
    # What the agent was told is trained, once, behind what it had said.
    assert sorted(trained) == sorted((read_before(stand, each), each.turn.token_ids) for each in heard)
    # What the engine was fed is the beginning of a row, whose end is trained there as it was sampled.
    for request, answer in stand.engine.fed:
        assert request.prefix is not None
        start, end = request.num_done, len(answer.token_ids)
        (place,) = [
            place
            for place, (row, mask) in enumerate(zip(rows, masks, strict=True))
            if np.array_equal(row.token_ids[:end], answer.token_ids) and mask[start:end].all()
            and np.array_equal(row.behaviour_logprobs[start:end], answer.behaviour_logprobs[start:])
        ]  # fmt: skip
        np.testing.assert_array_equal(rows[place].token_ids[:start], request.prefix.token_ids)
        np.testing.assert_array_equal(rows[place].versions[start:end], answer.versions[start:])
    drawn = sum(len(answer.token_ids) - request.num_done for request, answer in stand.engine.fed)
    num_known = np.count_nonzero(known.behaviour_logprobs) if known is not None else 0
    assert np.count_nonzero(rollout.loss_mask) == drawn + num_known


def turns_of(row: Prefix, mask: np.ndarray, heard: Sequence[Heard]) -> list[tuple[int, int]]:
    """First token and end of each trained turn of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    found, lengths = [], {each.turn.num_sampled for each in heard}
    for first, last in edges.reshape(-1, 2).tolist():
        assert last - first in lengths  # something is always read between two turns
        found.append((first, last))
    return found


def read_before(stand: Stand, each: Heard) -> tuple[int, ...]:
    """The tokens that the policy reads before a turn, by the rule of docs/environments.md."""
    template, messages = DialogueTemplate(stand.tokenizer, each.tools), each.messages
    for place in reversed(range(len(messages))):
        for other in stand.harness.heard:
            if other.tools == each.tools and is_same((*other.messages, other.turn.message), messages[: place + 1]):
                before = (*read_before(stand, other), *other.turn.token_ids)
                return (*before, *template.observation(messages[place + 1 :], last_token=before[-1]).tolist())
    return tuple(template.whole(messages)[len(template.tokens_of_beginning) :].tolist())


def num_sampled(row: Prefix) -> int:
    return int(np.count_nonzero(row.behaviour_logprobs))


# --------------------------------------------------------------------------------------------------------------- claims


@settings(max_examples=60)
@given(case=CASES)
def test_in_every_row_the_tokens_fed_are_the_tokens_trained_and_each_turn_is_trained_once(tokenizers, case):
    async def run() -> None:
        stand = await stand_of(tokenizers[case["family"]], case)
        check(await stand.run(), stand, case)

    asyncio.run(run())


async def test_two_answers_to_the_same_messages_stay_two_where_they_go_on(tokenizers):
    case = {"family": "qwen2.5", "seed": 3, "max_tokens": 2000, "max_rows": 9, "max_turns": 9}
    first = await stand_of(tokenizers["qwen2.5"], case | {"steps": ["siblings", "talk"]})
    whole = await first.run()
    second = await stand_of(tokenizers["qwen2.5"], case | {"steps": ["siblings"]}, prefix_of(whole.rollout))
    again = await second.run()
    assert not second.engine.fed  # all is known
    one, other = (each.turn.token_ids for each in second.harness.heard)
    assert one != other
    assert len(again.rollout.rows) == 2


async def test_a_request_that_shares_more_with_a_row_that_goes_on_than_with_one_that_waits_begins_there(tokenizers):
    """Else a turn of the policy would be rendered anew, though its tokens are known."""
    tokenizer = tokenizers["qwen2.5"]
    case = {"family": "qwen2.5", "seed": 3, "max_tokens": 2000, "steps": []}
    stand = await stand_of(tokenizer, case)
    rows = stand.session.rows
    start = (said("user", "Go."),)

    def turn(*messages: Message, seed: int | None = None) -> Pending:
        pending = rows.place(AgentRequest(messages, seed=seed))
        tokens = pending.row.tokens
        tokens.read(pending.read, 3)
        begin = len(tokens)
        tokens.sampled(Prefix(np.array([70, 71], np.int32), np.full(2, -1.0, np.float32), np.full(2, 3, np.int32)))
        stand.session.answer(pending, begin, 1, ("fm", "fm"), is_cut=False)
        return pending

    same = said("assistant", "fm")
    first, second = turn(*start, seed=1), turn(*start, seed=2)
    assert turn(*start, same, said("user", "More.")).row is first.row
    assert turn(*start, same, said("user", "More."), same, said("user", "On.")).row is first.row
    other = turn(*start, same, said("user", "More."), same, said("user", "Otherwise."))
    assert other.row not in (first.row, second.row)
    assert other.row.ends.keys() == {1, 3, 5}


@settings(max_examples=60)
@given(case=CASES, cut_after=st.integers(0, 150))
def test_rows_that_were_cut_go_on_elsewhere_without_a_turn_that_is_sampled_twice(tokenizers, case, cut_after):
    async def run() -> None:
        first = await stand_of(tokenizers[case["family"]], case)
        running = asyncio.create_task(first.run())
        while first.engine.statistics().tokens_generated < cut_after and not running.done():
            await asyncio.sleep(0)
            assert first.dialogue.num_tokens == sum(len(row.token_ids) for row in first.dialogue.rows())
        await first.dialogue.cut()
        handed_back = (await running).rollout
        if handed_back.finish_reason is not FinishReason.ABORT or not len(handed_back.token_ids):
            return
        drawn = sum(len(answer.token_ids) - request.num_done for request, answer in first.engine.fed)
        assert np.count_nonzero(handed_back.behaviour_logprobs) == drawn
        prefix = prefix_of(handed_back)
        second = await stand_of(tokenizers[case["family"]], case, prefix, version=4)
        running = asyncio.create_task(second.run())
        while not running.done():
            rows = second.dialogue.rows()  # what is known stays known while it is replayed
            assert second.dialogue.num_tokens == sum(len(row.token_ids) for row in rows)
            if len(second.session.rows.all) < case["max_rows"]:
                assert np.count_nonzero(prefix.behaviour_logprobs) <= sum(map(num_sampled, rows))
            await asyncio.sleep(0)
        check(await running, second, case, prefix)

    asyncio.run(run())
