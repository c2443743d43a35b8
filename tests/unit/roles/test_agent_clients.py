"""The unmodified clients of OpenAI and Anthropic sample from the policy: Messages, Responses, chat completions."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhpc.agents.anthropic_format import MESSAGES
from rlhpc.agents.responses_format import RESPONSES
from rlhpc.agents.rows import Pending
from rlhpc.agents.session import AgentSession
from rlhpc.agents.turns import Message, SamplingSettings, first_difference
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.types import Verdict
from tests.unit.data.checkpoints import CHATML, make_chat_model, make_tokenizer_files
from tests.unit.roles.test_agent_endpoint import CALL, GO, TOOLS, Stand, stand_of
from tests.unit.roles.test_agents import AgentsHost, config_with, function, turns_of

openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")

OTHER_CALL = CALL.replace("è", "9")
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
ANTHROPIC_TOOLS: list[Any] = [{"name": "search", "description": "Find it.", "input_schema": SCHEMA}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "name": "search", "description": "Find it.", "parameters": SCHEMA}]
RUN = SamplingSettings(1.0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    """By family: qwen2.5 knows no thoughts, turns of qwen3 may begin with one, those of qwen3.5 begin within one."""
    families = ("qwen2.5", "qwen3", "qwen3.5")
    return {family: PromptTokenizer(make_chat_model(tmp_path_factory.mktemp(family), family)) for family in families}


@pytest.fixture
def tokenizer(tokenizers: dict[str, PromptTokenizer]) -> PromptTokenizer:
    return tokenizers["qwen3"]


@asynccontextmanager
async def speaking(
    stand: Stand, tokenizer: PromptTokenizer, *turns: str, after_s: float = 0.0, is_cut: bool = False
) -> AsyncIterator[list[list[Message]]]:
    """A policy that says these turns, one for each request; yields what it was told before each."""
    told: list[list[Message]] = []

    async def speak() -> None:
        while True:
            asked = await stand.session.events.get()
            if not isinstance(asked, Pending):
                continue
            told.append([dict(message) for message in asked.row.messages[max(asked.row.ends, default=-1) + 1 :]])
            await asyncio.sleep(after_s)
            turn = turns[len(stand.turns)]
            ids = tokenizer.encode_rendered(turn)
            stand.say(asked, turn, tokenizer.decode(ids), ids, is_cut=is_cut)

    task = asyncio.create_task(speak())
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled() or isinstance(task.exception(), IndexError)


# ------------------------------------------------------------------------------------------- ways to ask the same thing

Ask = Callable[..., Awaitable[Any]]
Way = Callable[[Stand], Ask]


def _anthropic_client(stand: Stand, kind: str, **more: Any) -> Any:
    return getattr(anthropic, kind)(base_url=stand.access.address, api_key=stand.access.key, **more)


def _openai_client(stand: Stand, kind: str, **more: Any) -> Any:
    return getattr(openai, kind)(base_url=stand.access.base_url, api_key=stand.access.key, **more)


def anthropic_sync(stand: Stand) -> Ask:
    client = _anthropic_client(stand, "Anthropic")
    return lambda **body: asyncio.to_thread(client.messages.create, model="any", max_tokens=99, **body)


def anthropic_sync_streamed(stand: Stand) -> Ask:
    client = _anthropic_client(stand, "Anthropic")

    def ask(**body: Any) -> Any:
        with client.messages.stream(model="any", max_tokens=99, **body) as stream:
            return stream.get_final_message()

    return lambda **body: asyncio.to_thread(ask, **body)


def anthropic_async(stand: Stand) -> Ask:
    client = _anthropic_client(stand, "AsyncAnthropic", auth_token=None)
    return lambda **body: client.messages.create(model="any", max_tokens=99, **body)


def anthropic_async_streamed(stand: Stand) -> Ask:
    client = _anthropic_client(stand, "AsyncAnthropic")

    async def ask(**body: Any) -> Any:
        async with client.messages.stream(model="any", max_tokens=99, **body) as stream:
            return await stream.get_final_message()

    return ask


def responses_sync(stand: Stand) -> Ask:
    client = _openai_client(stand, "OpenAI")
    return lambda **body: asyncio.to_thread(client.responses.create, model="any", **body)


def responses_sync_streamed(stand: Stand) -> Ask:
    client = _openai_client(stand, "OpenAI")

    def ask(**body: Any) -> Any:
        with client.responses.stream(model="any", **body) as stream:
            return stream.get_final_response()

    return lambda **body: asyncio.to_thread(ask, **body)


def responses_async(stand: Stand) -> Ask:
    client = _openai_client(stand, "AsyncOpenAI")
    return lambda **body: client.responses.create(model="any", **body)


def responses_async_streamed(stand: Stand) -> Ask:
    client = _openai_client(stand, "AsyncOpenAI")

    async def ask(**body: Any) -> Any:
        async with client.responses.stream(model="any", **body) as stream:
            return await stream.get_final_response()

    return ask


def chat_sync(stand: Stand) -> Ask:
    client = _openai_client(stand, "OpenAI")
    return lambda **body: asyncio.to_thread(client.chat.completions.create, model="any", **body)


def chat_async_streamed(stand: Stand) -> Ask:
    client = _openai_client(stand, "AsyncOpenAI")

    async def ask(**body: Any) -> Any:
        async with client.chat.completions.stream(model="any", **body) as stream:
            return await stream.get_final_completion()

    return ask


OF_ANTHROPIC = [anthropic_sync, anthropic_sync_streamed, anthropic_async, anthropic_async_streamed]
OF_RESPONSES = [responses_sync, responses_sync_streamed, responses_async, responses_async_streamed]
OF_CHAT = [chat_sync, chat_async_streamed]

THOUGHTS = {"qwen2.5": "", "qwen3": "<think>\nHm.\n</think>\n\n", "qwen3.5": "Hm.\n</think>\n\n"}
NO_THOUGHTS = {"qwen2.5": "", "qwen3": "", "qwen3.5": "</think>\n\n"}
FAMILIES = list(THOUGHTS)


def three_turns(family: str) -> tuple[str, str, str]:
    """Thoughts, a text and two calls; then a text; then nothing at all."""
    with_calls = f"{THOUGHTS[family]}Let me see.\n{CALL}\n{OTHER_CALL}"
    return with_calls, NO_THOUGHTS[family] + "It is 4.", NO_THOUGHTS[family]


def read_again(told: Sequence[Sequence[Message]], results: list[str]) -> None:
    """What the policy was told before its second turn are these results."""
    assert [(message["role"], message["content"]) for message in told[1]] == [("tool", each) for each in results]
    assert [message["tool_call_id"] for message in told[1]] == ["call_1_0", "call_1_1"]


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("way", OF_ANTHROPIC)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_client_of_anthropic_s_goes_on_with_the_blocks_that_it_got(
    tokenizers: dict[str, PromptTokenizer], family: str, way: Way
) -> None:
    tokenizer = tokenizers[family]
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, *three_turns(family)) as told:
        ask = way(stand)
        body: dict[str, Any] = {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": ANTHROPIC_TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
        reply = await ask(messages=messages, **body)
        assert (reply.role, reply.model, reply.stop_reason, reply.stop_sequence) == (
            "assistant",
            "any",
            "tool_use",
            None,
        )
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (
            10,
            len(tokenizer.encode_rendered(stand.turns[0])),
        )
        *thinking, text, first, second = reply.content
        assert [block.thinking for block in thinking] == ["Hm."] * bool(THOUGHTS[family])
        assert (text.text, first.name, first.input, second.input) == (
            "Let me see.", "search", {"query": "è"}, {"query": "9"}
        )  # fmt: skip
        results = [
            {"type": "tool_result", "tool_use_id": first.id, "content": "none"},
            {"type": "tool_result", "tool_use_id": second.id, "content": [{"type": "text", "text": "4"}]},
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        reply = await ask(messages=messages, **body)
        assert (reply.stop_reason, [block.to_dict() for block in reply.content]) == (
            "end_turn", [{"type": "text", "text": "It is 4."}]
        )  # fmt: skip
        read_again(told, ["none", "4"])
        messages += [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Sure?"}]
        reply = await ask(messages=messages, **body)
        assert [block.text for block in reply.content] == [""]
        tokens = stand.session.rows.all[0].tokens
        prompt = tokenizer.decode(tokens.ids[: tokens.mask.index(True)], keep_special_tokens=True)
        assert ('"name": "search"' in prompt) == (family != "qwen3")  # the template of that name has no tools here
        assert "Be brief." in prompt
        if THOUGHTS[family]:
            del reply, messages[1]["content"][0]
            without = MESSAGES.read(json.loads(json.dumps({"messages": messages, **body}, default=_plain)), RUN)
            assert (
                first_difference(stand.session.rows.all[0].messages, without.messages) == 2
            )  # a system message before


def _plain(value: Any) -> Any:
    return value.to_dict()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_loop_of_anthropic_s_own_client_runs_to_its_end(
    tokenizer: PromptTokenizer, is_streamed: bool
) -> None:
    asked: list[str] = []

    async def search(query: str) -> str:
        """Find it."""
        asked.append(query)
        return "4"

    turns = three_turns("qwen3")[0], "<think>So.</think>It is 4."
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, *turns) as told:
        runner = _anthropic_client(stand, "AsyncAnthropic").beta.messages.tool_runner(
            model="any", max_tokens=99, messages=GO, tools=[anthropic.beta_async_tool(search)], stream=is_streamed
        )
        last = await runner.until_done()
        assert [block.text for block in last.content if block.type == "text"] == ["It is 4."]
        assert (asked, last.stop_reason) == (["è", "9"], "end_turn")
        read_again(told, ["4", "4"])


async def test_the_events_of_a_message_come_in_order_each_under_its_name(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, three_turns("qwen3")[0]):
        body = {"messages": GO, "tools": ANTHROPIC_TOOLS, "stream": True, "max_tokens": 99}
        url, headers = f"{stand.access.address}/v1/messages", {"x-api-key": stand.access.key}
        async with stand.http.post(url, json=body, headers=headers) as reply:
            assert reply.content_type == "text/event-stream"
            events = (await reply.text()).removesuffix("\n\n").split("\n\n")
    names, data = zip(*(event.split("\n") for event in events), strict=True)
    read = [json.loads(each.removeprefix("data: ")) for each in data]
    assert [name.removeprefix("event: ") for name in names] == [each["type"] for each in read]
    shown = [
        each["type"] + (f" {each['delta'].get('type')}" if "index" in each and "delta" in each else "") for each in read
    ]
    start, stop = "content_block_start", "content_block_stop"
    of_calls = [start, "content_block_delta input_json_delta", stop] * 2
    assert shown == [
        "message_start", start, "content_block_delta thinking_delta", "content_block_delta signature_delta", stop,
        start, "content_block_delta text_delta", stop, *of_calls, "message_delta", "message_stop",
    ]  # fmt: skip
    assert [each["index"] for each in read if each["type"] == start] == [0, 1, 2, 3]
    assert read[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_tokens_are_counted_as_the_template_writes_them_and_no_turn_is_taken(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, "words"):
        client = _anthropic_client(stand, "AsyncAnthropic")
        counted = await client.messages.count_tokens(model="any", system="Be brief.", messages=GO)
        told = [{"role": "system", "content": "Be brief."}, *GO]
        assert counted.input_tokens == len(DialogueTemplate(tokenizer).whole(told))
        assert not stand.turns
        assert [model.id async for model in client.models.list()] == ["policy"]


# ------------------------------------------------------------------------------------------------------------ responses


@pytest.mark.parametrize("way", OF_RESPONSES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("by", ["items", "id", "encrypted"])
async def test_a_response_is_continued_by_its_items_or_by_its_name(
    tokenizers: dict[str, PromptTokenizer], family: str, way: Way, by: str
) -> None:
    tokenizer = tokenizers[family]
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, *three_turns(family)) as told:
        ask = way(stand)
        body: dict[str, Any] = {"tools": RESPONSES_TOOLS, "instructions": "Be brief.", "reasoning": {"effort": "high"}}
        if by == "encrypted":
            body |= {"include": ["reasoning.encrypted_content"], "store": False}
        said: list[Any] = [{"role": "user", "content": "go"}]
        reply = await ask(input="go", **body)
        assert (reply.object, reply.status, reply.model, reply.error) == ("response", "completed", "any", None)
        size = len(tokenizer.encode_rendered(stand.turns[0]))
        num_thought = len(tokenizer.encode_rendered(THOUGHTS[family].strip()))
        usage = reply.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (10, size, 10 + size)
        assert usage.output_tokens_details.reasoning_tokens == num_thought
        *thinking, message, first, second = reply.output
        assert [item.content[0].text for item in thinking] == ["Hm."] * bool(THOUGHTS[family])
        assert (reply.output_text, message.role) == ("Let me see.", "assistant")
        assert [(call.name, json.loads(call.arguments)["query"]) for call in (first, second)] == [
            ("search", "è"), ("search", "9")
        ]  # fmt: skip
        if by == "encrypted":
            for item in thinking:
                assert base64.b64decode(item.encrypted_content) == b"Hm."
                item.content = None
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in ((first, "none"), (second, "4"))
        ]
        said += [*reply.output, *results]
        following = {"input": results, "previous_response_id": reply.id} if by == "id" else {"input": said}
        reply = await ask(**following, **body)
        assert reply.output_text == "It is 4."
        read_again(told, ["none", "4"])
        asked = [{"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]}]
        said += [{"role": "assistant", "content": "It is 4."}, *asked]
        following = {"input": asked, "previous_response_id": reply.id} if by == "id" else {"input": said}
        reply = await ask(**following, **body)
        assert [(item.type, item.content[0].text) for item in reply.output] == [("message", "")]
        assert [(message["role"], message["content"]) for message in told[2]] == [("user", "Sure?")]
        if thinking:
            without = [item for item in said if getattr(item, "type", "") != "reasoning"]
            read = RESPONSES.read(json.loads(json.dumps({"input": without, **body}, default=_plain)), RUN)
            assert first_difference(stand.session.rows.all[0].messages, read.messages) == 2


async def test_the_events_of_a_response_are_numbered_and_end_with_the_whole(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, three_turns("qwen3")[0]):
        stream = await _openai_client(stand, "AsyncOpenAI").responses.create(
            model="any", input="go", tools=RESPONSES_TOOLS, stream=True
        )
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    item = ["response.output_item.added", "response.output_item.done"]
    part = [item[0], "response.content_part.added", "delta", "done", "response.content_part.done", item[1]]
    expected = [
        "response.created", "response.in_progress",
        *(each if "." in each else f"response.reasoning_text.{each}" for each in part),
        *(each if "." in each else f"response.output_text.{each}" for each in part),
        *[item[0], *(f"response.function_call_arguments.{each}" for each in ("delta", "done")), item[1]] * 2,
        "response.completed",
    ]  # fmt: skip
    assert [event.type for event in events] == expected
    assert [event.output_index for event in events if event.type == item[0]] == [0, 1, 2, 3]
    assert [item.type for item in events[-1].response.output] == [
        "reasoning", "message", "function_call", "function_call"
    ]  # fmt: skip


@pytest.mark.parametrize("way", [*OF_ANTHROPIC, responses_sync, responses_async])
async def test_a_turn_that_a_limit_has_cut_says_so(tokenizer: PromptTokenizer, way: Way) -> None:
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, "<think>Hm, an", is_cut=True):
        if way in OF_ANTHROPIC:
            reply = await way(stand)(messages=GO)
            assert (reply.stop_reason, [block.thinking for block in reply.content]) == ("max_tokens", ["Hm, an"])
        else:
            reply = await way(stand)(input=GO, max_output_tokens=7)
            assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert [item.type for item in reply.output] == ["reasoning"]
            stream = await _openai_client(stand, "AsyncOpenAI").responses.create(model="any", input=GO, stream=True)
            assert [event.type async for event in stream][-1] == "response.incomplete"


# ----------------------------------------------------------------------------------------------------- chat completions


@pytest.mark.parametrize("way", OF_CHAT)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_separate", [False, True])
async def test_thoughts_are_in_the_content_of_a_chat_or_beside_it_and_come_back_alike(
    tokenizers: dict[str, PromptTokenizer], family: str, way: Way, is_separate: bool
) -> None:
    tokenizer = tokenizers[family]
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, *three_turns(family)) as told:
        ask, body = way(stand), {"tools": TOOLS, "extra_body": {"separate_reasoning": True} if is_separate else None}
        messages: list[Any] = list(GO)
        (choice,) = (await ask(messages=messages, **body)).choices
        is_apart = is_separate and bool(THOUGHTS[family])
        assert getattr(choice.message, "reasoning_content", None) == ("Hm." if is_apart else None)
        assert choice.message.content.endswith("Let me see.")
        assert (choice.message.content == "Let me see.") == (is_separate or not THOUGHTS[family])
        calls = choice.message.tool_calls
        messages.append(choice.message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": call.id} for call in calls]
        (choice,) = (await ask(messages=messages, **body)).choices
        read_again(told, [call.id for call in calls])


# --------------------------------------------------------------------------------------------------- refusals, failures


def _clients(stand: Stand, **more: Any) -> list[Callable[..., Awaitable[Any]]]:
    """A request by each client; more: of the clients."""
    mine, other = _anthropic_client(stand, "AsyncAnthropic", **more), _openai_client(stand, "AsyncOpenAI", **more)
    return [
        lambda **body: mine.messages.create(**{"model": "any", "max_tokens": 99, "messages": GO, **body}),
        lambda **body: other.responses.create(**{"model": "any", "input": GO, **body}),
        lambda **body: other.chat.completions.create(**{"model": "any", "messages": GO, **body}),
    ]


Errors = (anthropic.APIStatusError, openai.APIStatusError)


async def _error(asking: Awaitable[Any]) -> Any:
    with pytest.raises(Errors) as raised:
        await asking
    return raised.value


async def test_clients_know_a_wrong_key_and_a_session_that_is_over(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand:
        for ask in _clients(stand):
            error = await _error(ask(extra_headers={"x-api-key": "sk-no", "Authorization": "Bearer sk-no"}))
            assert isinstance(error, anthropic.AuthenticationError | openai.AuthenticationError)
        stand.session.fail("it is late")
        for ask in _clients(stand):
            error = await _error(ask())
            assert (error.status_code, "it is late" in error.message) == (410, True)
        stand.endpoint.dismiss(stand.session)
        for ask in _clients(stand):
            assert (await _error(ask())).status_code == 410


async def test_clients_are_told_in_their_words_that_there_is_no_more_room(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer, max_turns=1) as stand:
        filling = asyncio.create_task(stand.ask(GO))
        stand.say(await stand.next(), "words")
        await filling
        said = [*GO, {"role": "assistant", "content": "words"}, *GO]
        mine, responses, chat = _clients(stand)
        error = await _error(mine(messages=said))
        assert isinstance(error, anthropic.BadRequestError)
        assert error.body["error"]["type"] == "invalid_request_error"
        assert error.body["error"]["message"].startswith("prompt is too long: ")
        for asking in (responses(input=said), chat(messages=said)):
            error = await _error(asking)
            assert isinstance(error, openai.BadRequestError)
            assert error.code == "context_length_exceeded"


async def test_a_request_that_is_too_long_is_refused_in_the_shape_of_its_api(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer, max_request_bytes=50_000, max_tokens=50_000) as stand:
        long = [{"role": "user", "content": "x" * 60_000}]
        mine, responses, chat = _clients(stand)
        error = await _error(mine(messages=long))
        assert (error.status_code, error.body["type"], error.body["error"]["type"]) == (
            413,
            "error",
            "request_too_large",
        )
        for asking in (responses(input=long), chat(messages=long)):
            error = await _error(asking)
            assert (error.status_code, error.code) == (413, "request_too_large")
        client = _anthropic_client(stand, "AsyncAnthropic")
        error = await _error(client.messages.batches.list())
        assert (type(error), error.body["error"]["type"]) == (anthropic.NotFoundError, "not_found_error")
        async with speaking(stand, tokenizer, "words"):
            long = [{"role": "user", "content": "x" * 40_000}]
            assert (await mine(messages=long)).content[0].text == "words"


TIMES_OUT_S, SPEAKS_AFTER_S = 0.5, 2.0


@pytest.mark.parametrize("place", range(3))
async def test_a_client_that_does_not_wait_and_asks_again_gets_the_one_turn(
    tokenizer: PromptTokenizer, place: int
) -> None:
    async with (
        stand_of(tokenizer) as stand,
        speaking(stand, tokenizer, "words", after_s=SPEAKS_AFTER_S),
    ):
        ask = _clients(stand, timeout=TIMES_OUT_S, max_retries=200)[place]
        assert "words" in str(await ask())
        assert stand.turns == ["words"]


async def test_sessions_that_ask_at_once_in_all_tongues_get_their_own_turns(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand:
        rules = stand.session._rules
        sessions = [AgentSession(f"s{place}", rules, None, max_tokens=1000) for place in range(24)]
        stands = [Stand(stand.endpoint, each, stand.endpoint.admit(each), stand.http) for each in sessions]

        async def one(place: int) -> None:
            mine = stands[place]
            async with speaking(mine, tokenizer, f"words {place}"):
                asking = _clients(mine)[place % 3]()
                assert f"words {place}'" in repr((await asking).to_dict())

        async with asyncio.TaskGroup() as group:
            for place in range(len(stands)):
                group.create_task(one(place))
        for session in sessions:
            session.close()


async def test_a_response_that_is_not_known_is_refused_by_openai_s_code(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand, speaking(stand, tokenizer, "words"):
        ask = _clients(stand)[1]
        error = await _error(ask(previous_response_id="resp_of_another"))
        assert (error.status_code, error.code) == (400, "previous_response_not_found")
        assert (await ask()).output_text == "words"  # the session goes on


# --------------------------------------------------------------------------------------------------------- whole agents


@pytest.mark.starts
@pytest.mark.parametrize("name", ["by_messages", "by_responses"])
async def test_what_the_clients_of_an_agent_got_is_what_is_trained(tmp_path: Path, name: str) -> None:
    model = make_tokenizer_files(tmp_path, chat_template=CHATML)
    async with AgentsHost.running(config_with(model, function(name))) as host:
        scored = await host.one()
    assert scored.verdict is not Verdict.VERIFIER_ERROR, scored.detail
    ended = [turn[:-1] if len(turn) < 9 else turn for turn in turns_of(scored.rollout)]
    texts = [host.tokenizer.decode(turn) for turn in ended]
    assert texts == json.loads(scored.detail)
    assert len(texts) == 3
