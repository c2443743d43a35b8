"""Several turns: tokens fed are tokens trained, what was read is masked, a dialogue that was cut goes on exactly."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.dialogue import Dialogue, FinishedDialogue, TurnsTaken
from rlhpc.generation.requests import prefix_of
from rlhpc.protocol.environment import TOOL_SCHEMAS, Environment, Message, Step
from rlhpc.protocol.messages import TurnReply
from rlhpc.protocol.types import FinishReason, Prefix, Prompt, Rollout, RolloutRequest, SamplingParams
from rlhpc.weights.buckets import make_manifest
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.unit.data.checkpoints import QWEN25, TEMPLATES, make_chat_model

# ------------------------------------------------------------------------------------------------------------- dialogue
#
# Several turns: tokens fed are tokens trained, what was read is masked, a dialogue that was cut goes on exactly.


WORDS = ["42", "nothing\nwas found", "è€🙂", "<|im_end|>", "a few words", " ", "</tool_response>", "{}"]


class Babble(Environment):
    """Says what follows from all that was said to it, for some turns."""

    def __init__(self, most: int, salt: int = 0) -> None:
        self.most, self.salt, self.said = most, salt, list[str]()

    async def reset(self, record: Any) -> Sequence[Message]:
        return self._messages(random.Random(record["seed"]), ("user",))

    async def step(self, completion: str) -> Step:
        self.said.append(completion)
        rng = random.Random(zlib.crc32("\0".join(self.said).encode()) + self.salt)
        is_done = len(self.said) >= self.most
        return Step(self._messages(rng, ("tool", "user")), reward=0.25, is_done=is_done, parts={"steps": 1.0})

    def _messages(self, rng: random.Random, roles: Sequence[str]) -> list[Message]:
        role = rng.choice(roles)
        return [{"role": role, "content": " ".join(rng.choices(WORDS, k=3))} for _ in range(rng.randint(0, 2))]


@dataclass
class Table:
    """Environments by dialogue, played again from all turns where they are asked for the first time."""

    most: int
    seed: int = 0
    salt: int = 0
    asked: list[TurnsTaken] = field(default_factory=list)
    environment: Babble | None = None

    async def __call__(self, taken: TurnsTaken) -> TurnReply:
        await asyncio.sleep(0)
        self.asked.append(taken)
        if self.environment is None:
            self.environment = Babble(self.most, self.salt)
            step = Step(await self.environment.reset({"seed": self.seed}))
        for turn in taken.turns[len(self.environment.said) :]:
            step = await self.environment.step(turn)
            self.step = step
        if taken.turns:
            step = self.step
        is_over = step.is_done or taken.is_last
        messages = () if is_over else tuple(dict(message) for message in step.messages)
        reward = 0.25 * len(taken.turns)
        return TurnReply(0, messages, reward, "wrong", {}, "", is_done=step.is_done, is_over=is_over)


class Watched(ScriptedEngine):
    """Remembers what it was fed, and what it made of it."""

    fed: list[tuple[RolloutRequest, Rollout]]

    async def generate(self, request: RolloutRequest) -> Rollout:
        rollout = await super().generate(request)
        self.fed.append((request, rollout))
        return rollout


@pytest.fixture(scope="module")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple]:
    made = {}
    for family in TEMPLATES:
        tokenizer = PromptTokenizer(make_chat_model(tmp_path_factory.mktemp("model") / family, family))
        for has_tools in (False, True):
            tools = [TOOL_SCHEMAS["search"]] if has_tools else []
            made[family, has_tools] = tokenizer, DialogueTemplate(tokenizer, tools)
    return made


async def engine_of(speech, seed: int, stop_probability: float) -> Watched:
    tokenizer, template = speech
    script = Script(
        seed=seed, vocab_size=tokenizer.vocab_size, stop_token_id=template.turn_end, stop_probability=stop_probability
    )
    engine = Watched(script, decode=tokenizer.decode)
    engine.fed = []
    await engine.receive_weights(make_manifest(3, 1, (), 1))
    return engine


def request_for(
    speech, max_tokens: int, prefix: Prefix | None = None, stop_strings: tuple[str, ...] = ()
) -> RolloutRequest:
    tokenizer, template = speech
    prompt = Prompt(0, "environment", template.prompt("What is 12 times 34?"), "{}")
    return RolloutRequest(5, 1, prompt, SamplingParams(max_tokens, 1.0, tokenizer.eos_token_ids, stop_strings), prefix)


def dialogue_of(
    speech, engine, table, limits, max_tokens: int, prefix: Prefix | None = None, stop: tuple[str, ...] = ()
) -> Dialogue:
    request = request_for(speech, max_tokens, prefix, stop)
    return Dialogue(request, engine, table, speech, EnvironmentConfig(**limits), admitted_version=2)


def same(mine: Rollout, other: Rollout) -> None:
    for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name), err_msg=name)
    assert mine.finish_reason is other.finish_reason


def check(
    finished: FinishedDialogue, engine: Watched, table: Table, speech, limits: dict[str, int], max_tokens: int
) -> None:
    """What holds of every dialogue that was not cut off."""
    check_tokens(finished, engine, table, speech, limits, max_tokens)
    if engine.fed:
        assert finished.reply.reward == 0.25 * finished.num_turns
        ends = [len(answer.token_ids) - 1 for _, answer in engine.fed]
        assert finished.token_rewards == dict.fromkeys(ends[:-1], 0.25) or finished.token_rewards == dict.fromkeys(
            ends, 0.25
        )


def check_tokens(
    finished: FinishedDialogue, engine: Watched, table, speech, limits: dict[str, int], max_tokens: int
) -> None:
    """The same, whatever its environment gives."""
    rollout, (tokenizer, template) = finished.rollout, speech
    assert finished.reply is not None
    if finished.reply.verdict == "verifier_error":
        assert "leaves the policy nothing" in finished.reply.detail
        assert not engine.fed
        assert not rollout.loss_mask.any()
        assert len(rollout.token_ids) == max_tokens
        return
    length = len(rollout.token_ids)
    assert 0 < length <= max_tokens
    assert {len(each) for each in (rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask)} == {length}
    sampled = np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    for request, answer in engine.fed:  # fed: a beginning of what is trained; sampled: trained as it was sampled
        start, end = request.num_done, len(answer.token_ids)
        np.testing.assert_array_equal(request.prefix.token_ids, rollout.token_ids[:start])
        np.testing.assert_array_equal(answer.token_ids[start:], rollout.token_ids[start:end])
        assert end - start <= limits.get("max_turn_tokens", max_tokens)
        sampled[start:end], logprobs[start:end] = True, answer.behaviour_logprobs[start:]
    np.testing.assert_array_equal(rollout.loss_mask, sampled)
    np.testing.assert_array_equal(rollout.behaviour_logprobs, logprobs)
    assert (np.diff(rollout.versions) >= 0).all()
    assert rollout.versions.min() >= 3
    assert finished.num_turns == len(engine.fed) <= limits["max_turns"]
    assert finished.reply.is_over
    turns = [answer.token_ids[request.num_done :] for request, answer in engine.fed]
    stops = engine.fed[0][0].sampling.stop_strings if engine.fed else ()
    assert [spoken_text(tokenizer, template, turn, stops) for turn in turns] == list(table.asked[-1].turns)


def spoken_text(tokenizer, template, turn: np.ndarray, stops: tuple[str, ...]) -> str:
    """What the environment is told of a turn, in which no token but the last completes a stop string."""
    assert not any(stop in tokenizer.decode(turn[:-1]) for stop in stops)
    if turn[-1] in template.stop_token_ids:
        return tokenizer.decode(turn[:-1], keep_special_tokens=True)
    text = tokenizer.decode(turn, keep_special_tokens=True)
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


CASES = st.fixed_dictionaries(
    {
        "family": st.sampled_from(sorted(TEMPLATES)),
        "has_tools": st.booleans(),
        "seed": st.integers(0, 1 << 20),
        "most": st.integers(1, 6),
        "stop_probability": st.sampled_from([0.02, 0.2, 0.6]),
        "max_tokens": st.integers(60, 400),
        "max_turns": st.integers(1, 5),
        "max_turn_tokens": st.none() | st.integers(1, 40),
        "stop": st.sampled_from([(), (), ("e",), ("o", "at", "\n")]),
    }
)


def limits_of(case: dict[str, Any]) -> dict[str, int]:
    return {name: case[name] for name in ("max_turns", "max_turn_tokens") if case[name] is not None}


async def converse(speeches, case, *, cut_after: int | None) -> tuple[FinishedDialogue, FinishedDialogue | None]:
    """The whole dialogue; and the same one cut off after so many tokens, and continued by another process."""
    speech, max_tokens = speeches[case["family"], case["has_tools"]], case["max_tokens"]
    limits = limits_of(case)
    engine, table = await engine_of(speech, case["seed"], case["stop_probability"]), Table(case["most"], case["seed"])
    stop = case["stop"]
    whole = await dialogue_of(speech, engine, table, limits, max_tokens, stop=stop).run()
    check(whole, engine, table, speech, limits, max_tokens)
    if cut_after is None:
        return whole, None
    first = await engine_of(speech, case["seed"], case["stop_probability"])
    cut = dialogue_of(speech, first, Table(case["most"], case["seed"]), limits, max_tokens, stop=stop)
    running = asyncio.ensure_future(cut.run())
    while first.statistics().tokens_generated < cut_after and not running.done():  # noqa: ASYNC110 - a token a turn
        await asyncio.sleep(0)
    await cut.cut()
    handed_back = (await running).rollout
    if handed_back.finish_reason is not FinishReason.ABORT:
        return whole, None
    prefix = prefix_of(handed_back) if len(handed_back.token_ids) else None
    second = await engine_of(speech, case["seed"], case["stop_probability"])
    table = Table(case["most"], case["seed"])
    return whole, await dialogue_of(speech, second, table, limits, max_tokens, prefix, stop).run()


@settings(max_examples=60)
@given(case=CASES)
def test_tokens_fed_are_tokens_trained_and_what_was_read_is_masked(speeches, case):
    asyncio.run(converse(speeches, case, cut_after=None))


@settings(max_examples=40)
@given(case=CASES, updates=st.lists(st.integers(1, 60), max_size=4))
def test_every_token_has_the_version_that_sampled_it_and_what_was_read_that_of_the_token_before(
    speeches, case, updates
):
    async def run() -> None:
        speech, max_tokens = speeches[case["family"], case["has_tools"]], case["max_tokens"]
        limits = limits_of(case)
        engine, table = await engine_of(speech, case["seed"], case["stop_probability"]), Table(case["most"])
        dialogue = dialogue_of(speech, engine, table, limits, max_tokens, stop=case["stop"])
        running = asyncio.ensure_future(dialogue.run())
        for version, num_tokens in enumerate(sorted(updates), start=4):
            while engine.statistics().tokens_generated < num_tokens and not running.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await engine.receive_weights(make_manifest(version, 1, (), 1))
        finished = await running
        check(finished, engine, table, speech, limits, max_tokens)
        rollout = finished.rollout
        sampled = {version: engine.logprob_table(version) for version in set(rollout.versions.tolist())}
        for place in range(len(rollout.token_ids)):
            version = int(rollout.versions[place])
            if rollout.loss_mask[place]:
                assert rollout.behaviour_logprobs[place] == sampled[version][rollout.token_ids[place]]
            elif place:
                assert version == rollout.versions[place - 1]

    asyncio.run(run())


@settings(max_examples=60)
@given(case=CASES, cut_after=st.integers(0, 200))
def test_a_dialogue_that_was_cut_goes_on_as_if_it_had_not_been(speeches, case, cut_after):
    whole, continued = asyncio.run(converse(speeches, case, cut_after=cut_after))
    if continued is not None:
        same(continued.rollout, whole.rollout)
        assert continued.token_rewards == whole.token_rewards


@settings(max_examples=30)
@given(case=CASES, share=st.floats(0, 1))
def test_any_beginning_of_a_dialogue_is_a_prefix_of_it(speeches, case, share):
    """Reports cut anywhere, in what was read too, and so does a version that is recalled."""

    async def run() -> None:
        whole, _ = await converse(speeches, case, cut_after=None)
        speech, max_tokens = speeches[case["family"], case["has_tools"]], case["max_tokens"]
        end = int(share * len(whole.rollout.token_ids))
        rollout = whole.rollout
        prefix = Prefix(rollout.token_ids[:end], rollout.behaviour_logprobs[:end], rollout.versions[:end])
        limits = limits_of(case)
        engine = await engine_of(speech, case["seed"], case["stop_probability"])
        table = Table(case["most"], case["seed"])
        again = await dialogue_of(
            speech, engine, table, limits, max_tokens, prefix if end else None, case["stop"]
        ).run()
        same(again.rollout, rollout)
        assert again.reply == whole.reply

    asyncio.run(run())


FIXED = {
    "family": "qwen2.5", "has_tools": False, "seed": 1, "most": 4, "stop_probability": 0.2, "max_tokens": 600,
    "max_turns": 8, "max_turn_tokens": 30, "stop": (),
}  # fmt: skip


async def test_an_environment_that_says_something_else_the_second_time_costs_what_came_after_it(speeches, caplog):
    whole, _ = await converse(speeches, FIXED, cut_after=None)
    speech, limits = speeches["qwen2.5", False], {"max_turns": 8, "max_turn_tokens": 30}
    engine = await engine_of(speech, 1, 0.2)
    table = Table(4, seed=1, salt=9)
    dialogue = dialogue_of(speech, engine, table, limits, 600, prefix_of(whole.rollout))
    again = await dialogue.run()
    kept = dialogue.request.num_done
    assert not whole.rollout.loss_mask[kept]
    assert whole.rollout.loss_mask[:kept].any()
    assert again.rollout.token_ids[kept:].tolist() != whole.rollout.token_ids[kept:].tolist()
    for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(again.rollout, name)[:kept], getattr(whole.rollout, name)[:kept])
    assert "did not repeat its observations" in caplog.text
    sampled = sum(len(answer.token_ids) - request.num_done for request, answer in engine.fed)
    assert sampled == np.count_nonzero(again.rollout.loss_mask[kept:])


async def test_a_failure_of_the_environment_is_no_reward_of_zero(speeches):
    speech = speeches["qwen2.5", False]

    async def fails(taken: TurnsTaken) -> TurnReply:
        return TurnReply(0, (), 0.0, "verifier_error", {}, "it fell", is_done=False, is_over=False)

    engine = await engine_of(speech, 1, 0.2)
    finished = await dialogue_of(speech, engine, fails, {}, 100).run()
    assert finished.reply is not None
    assert (finished.reply.verdict, finished.reply.detail) == ("verifier_error", "it fell")
    assert not engine.fed
    assert not finished.rollout.loss_mask.any()
    assert len(finished.rollout.token_ids) > 0


async def test_an_opening_that_leaves_no_room_is_an_error_that_says_so(speeches):
    speech = speeches["llama3", False]
    engine, table = await engine_of(speech, 1, 0.2), Table(3)
    finished = await dialogue_of(speech, engine, table, {"max_turns": 3}, 3).run()
    check(finished, engine, table, speech, {"max_turns": 3}, 3)
    assert finished.reply is not None
    assert "nothing of the 3 of generation.max_completion_tokens" in finished.reply.detail


async def test_an_environment_that_does_not_answer_does_not_hold_up_who_hands_back(speeches):
    speech = speeches["qwen2.5", False]
    table, silence = Table(5), asyncio.Event()

    async def slow(taken: TurnsTaken) -> TurnReply:
        if taken.turns:
            silence.set()
            await asyncio.sleep(3600)
        return await table(taken)

    engine = await engine_of(speech, 1, 0.2)
    dialogue = dialogue_of(speech, engine, slow, {}, 300)
    running = asyncio.ensure_future(dialogue.run())
    await silence.wait()
    await dialogue.cut()
    finished = await running
    assert finished.rollout.finish_reason is FinishReason.ABORT
    assert finished.rollout.loss_mask.any()
    assert finished.reply is None


# ----------------------------------------------------------------------------------------------------- refused messages
#
# What an environment says and the model's chat template refuses is an error of the dialogue, and ends no generator.


STRICT = (
    "{%- for m in messages if m.role == 'referee' %}{{- raise_exception('no referees here') }}{%- endfor %}" + QWEN25
)


@pytest.mark.parametrize("refused_turn", [0, 1, 2])
async def test_a_message_that_the_chat_template_refuses_is_a_verifier_error(tmp_path: Path, refused_turn: int) -> None:
    tokenizer = PromptTokenizer(make_chat_model(tmp_path, "qwen2.5", STRICT))
    speech = tokenizer, DialogueTemplate(tokenizer)

    async def environment(taken: TurnsTaken) -> TurnReply:
        role = "referee" if len(taken.turns) == refused_turn else "user"
        said: dict[str, Any] = {"messages": ({"role": role, "content": "Go on."},), "reward": 0.25 * len(taken.turns)}
        return TurnReply(0, said["messages"], said["reward"], "wrong", {}, "", is_done=False, is_over=taken.is_last)

    engine = await engine_of(speech, 1, 0.5)
    finished = await dialogue_of(speech, engine, environment, {"max_turns": 5}, 2000).run()
    assert finished.reply is not None
    assert (finished.reply.verdict, finished.num_turns) == ("verifier_error", refused_turn)
    assert "the chat template fails on messages of" in finished.reply.detail
    assert "no referees here" in finished.reply.detail
    assert int(finished.rollout.loss_mask.sum()) == sum(
        len(answer.token_ids) - request.num_done for request, answer in engine.fed
    )
