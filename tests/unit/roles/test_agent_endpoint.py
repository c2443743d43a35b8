"""The endpoint for agents: who has no key learns nothing, and what would make log-probabilities untrue is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest

from rlhpc.agents.agents import Access, AgentServer
from rlhpc.agents.openai_format import completion, read_message, read_request
from rlhpc.agents.rows import Pending
from rlhpc.agents.session import AgentSession, SessionRules
from rlhpc.agents.turns import SamplingSettings, Tool, first_difference, turn_of
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.messages import TurnReply
from rlhpc.protocol.types import Int32, Prefix
from rlhpc.transport.http_server import Refused
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import make_chat_model

GO = [{"role": "user", "content": "go"}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "è"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(make_chat_model(tmp_path_factory.mktemp("model"), "qwen2.5"))


THREE = np.array([7, 8, 9], np.int32)


@dataclass
class Stand:
    """A session, and a policy that says what a test tells it to."""

    endpoint: AgentServer
    session: AgentSession
    access: Access
    http: aiohttp.ClientSession
    turns: list[str] = field(default_factory=list)  # said so far

    async def ask(self, messages: list[dict[str, Any]], **wishes: Any) -> tuple[int, Any]:
        return await self.post("/chat/completions", {"messages": messages, **wishes})

    async def post(self, path: str, body: object, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.access.key if key is None else key}"}
        async with self.http.post(self.access.base_url + path, json=body, headers=headers) as reply:
            is_json = reply.content_type == "application/json"
            return reply.status, await (reply.json() if is_json else reply.text())

    async def next(self) -> Pending:
        """The agent's next request."""
        event = await asyncio.wait_for(self.session.events.get(), PATIENCE_S)
        assert isinstance(event, Pending), event
        return event

    async def ended(self) -> TurnReply:
        """What has become of the session after the agent's last request."""
        event = await asyncio.wait_for(self.session.events.get(), PATIENCE_S)
        assert not isinstance(event, Pending), event
        return await self.session.outcome(event)

    def say(
        self, pending: Pending, text: str, answer: str | None = None, ids: Int32 = THREE, *, is_cut: bool = False
    ) -> None:
        """Answer a request with these tokens, behind ten; answer: without special tokens."""
        tokens, num = pending.row.tokens, len(ids)
        tokens.read(pending.read, 0)
        start = len(tokens)
        tokens.sampled(Prefix(ids, np.full(num, -1.0, np.float32), np.zeros(num, np.int32)))
        self.turns.append(text)
        self.session.answer(pending, start, 10 - start, (text, text if answer is None else answer), is_cut=is_cut)


@asynccontextmanager
async def stand_of(
    tokenizer: PromptTokenizer,
    *,
    max_request_bytes: int = 1 << 20,
    max_rows: int = 16,
    max_turns: int = 16,
    max_tokens: int = 1000,
) -> AsyncIterator[Stand]:
    def template_for(tools: Sequence[Tool]) -> DialogueTemplate:
        return DialogueTemplate(tokenizer, tools)

    rules = SessionRules("hermes", PATIENCE_S, template_for, max_rows=max_rows, max_turns=max_turns)
    endpoint = AgentServer(run=SamplingSettings(1.0), max_request_bytes=max_request_bytes)
    await endpoint.open("local")
    session = AgentSession("one", rules, None, max_tokens=max_tokens)
    async with aiohttp.ClientSession() as http:
        try:
            yield Stand(endpoint, session, endpoint.admit(session), http)
        finally:
            session.close()
            await endpoint.close()


async def answered(stand: Stand, text: str = "words", **wishes: Any) -> dict[str, Any]:
    """Its first request is answered with this turn; returns what it is told."""
    asking = asyncio.create_task(stand.ask(GO, **wishes))
    stand.say(await stand.next(), text)
    return (await asking)[1]["choices"][0]["message"]


# ------------------------------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/one/v1/chat/completions"), ("POST", "/one/v1/completions"), ("GET", "/one/v1/models"),
        ("POST", "/one/v1/reward"), ("POST", "/one/v1/messages"), ("POST", "/one/v1/responses"),
        ("GET", "/"), ("GET", "/two/v1/models"), ("DELETE", "/one/v1/models"), ("GET", "/one"),
    ],
)  # fmt: skip
async def test_who_has_no_key_gets_401_and_nothing_else(tokenizer: PromptTokenizer, method: str, path: str) -> None:
    async with stand_of(tokenizer) as stand:
        assert stand.endpoint.address.startswith("http://127.0.0.1:")  # for this node alone
        key = stand.access.key
        other = stand.endpoint.admit(AgentSession("two", stand.session._rules, None, max_tokens=9)).key
        if not path.startswith("/one"):
            key, other = other, key
        wrong = (None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {key}", key, f"Bearer {key}x")
        for said in (*wrong, f"Bearer {other}"):
            headers = (
                {}
                if said is None
                else {"Authorization": said, "x-api-key": said.removeprefix("Bearer ").replace(key, "")}
            )
            url = stand.endpoint.address + path
            async with stand.http.request(method, url, data=b"{" * 1000, headers=headers) as reply:
                assert (reply.status, await reply.read()) == (401, b""), said
                assert set(reply.headers) <= {"Content-Length", "Content-Type", "Date", "Connection"}
        assert stand.session.events.empty()


async def test_a_client_that_asks_before_it_sends_is_refused_before_it_has_sent(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand:
        host, _, port = stand.endpoint.address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /one/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 401")
        writer.close()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("OPTIONS * HTTP/1.1", b"401"), ("CONNECT one:80 HTTP/1.1", b"401"), ("GET http://one HTTP/1.1", b"401"),
        ("GET ?one HTTP/1.1", b"400"), ("PRI * HTTP/2.0", b"400"), ("GET /\xff HTTP/1.1", b"400"),
    ],
)  # fmt: skip
async def test_strangers_that_speak_badly_get_no_server_error_and_no_room_in_the_log(
    tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture, request_line: str, status: bytes
) -> None:
    async with stand_of(tokenizer) as stand:
        caplog.clear()
        host, _, port = stand.endpoint.address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{request_line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode("latin-1"))
        assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1] == status
        writer.close()
    assert caplog.text == ""


async def test_a_fault_of_our_own_is_in_the_log(
    tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stand_of(tokenizer) as stand:
        monkeypatch.setattr(stand.endpoint, "_sessions", None)
        assert (await stand.ask(GO))[0] == 500
        monkeypatch.undo()
    assert "has no attribute 'get'" in caplog.text


# -------------------------------------------------------------------------------------------------------------- answers


async def test_a_turn_with_calls_is_told_as_openai_tells_it_and_may_come_back_in_other_words(
    tokenizer: PromptTokenizer,
) -> None:
    async with stand_of(tokenizer) as stand:
        asking = asyncio.create_task(stand.ask(GO, tools=TOOLS, model="any"))
        asked = await stand.next()
        assert '"name": "search"' in tokenizer.decode(asked.read, keep_special_tokens=True)
        stand.say(asked, "Let me see.\n" + CALL)
        status, reply = await asking
        (choice,) = reply["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "tool_calls", "Let me see.")
        assert (call["id"], call["function"]["name"]) == ("call_1_0", "search")
        assert json.loads(call["function"]["arguments"]) == {"query": "è"}
        assert reply["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        assert reply["model"] == "any"
        call["function"]["arguments"] = '{ "query" : "\\u00e8" }'
        said = [
            *GO,
            choice["message"] | {"refusal": None},
            {"role": "tool", "tool_call_id": call["id"], "content": "4"},
        ]
        asking = asyncio.create_task(stand.ask(said, tools=TOOLS))
        asked = await stand.next()
        assert asked.row.number == 0
        assert "<tool_response>\n4\n</tool_response>" in tokenizer.decode(asked.read)
        asking.cancel()


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", "no call at all", CALL + "<tool_call>"])
async def test_what_is_no_whole_call_stays_text(tokenizer: PromptTokenizer, text: str) -> None:
    async with stand_of(tokenizer) as stand:
        said = await answered(stand, text, tools=TOOLS)
        assert said == {"role": "assistant", "content": text}


@pytest.mark.parametrize("query", ['"half of a pair: \\ud83d"', "NaN", "[-Infinity]"])
async def test_a_call_that_nobody_could_say_again_stays_text(tokenizer: PromptTokenizer, query: str) -> None:
    text = f'<tool_call>{{"name": "search", "arguments": {{"query": {query}}}}}</tool_call>'
    async with stand_of(tokenizer) as stand:
        said = await answered(stand, text, tools=TOOLS)
        assert said == {"role": "assistant", "content": text}
        asking = asyncio.create_task(stand.ask([*GO, said, *GO], tools=TOOLS))
        assert (await stand.next()).row.number == 0
        asking.cancel()


async def test_a_stream_has_the_same_in_chunks(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand:
        url, headers = stand.access.base_url + "/chat/completions", {"Authorization": f"Bearer {stand.access.key}"}
        body = {"messages": GO, "stream": True, "stream_options": {"include_usage": True}}
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(stand.http.post(url, json=body, headers=headers))
            stand.say(await stand.next(), "words")
            reply = await asking
            lines = (await reply.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        first, last, usage = (json.loads(line.removeprefix("data: ")) for line in lines[:-2])
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "words"}
        assert last["choices"][0]["finish_reason"] == "stop"
        assert usage["usage"]["total_tokens"] == 13


async def test_a_request_that_comes_again_gets_the_same_turn_and_no_other_is_sampled(
    tokenizer: PromptTokenizer,
) -> None:
    async with stand_of(tokenizer) as stand:
        impatient = asyncio.create_task(stand.ask(GO))
        asked = await stand.next()
        impatient.cancel()
        asking = asyncio.create_task(stand.ask(GO))
        await stand.ask(GO, temperature=0)  # refused, after it
        stand.say(asked, "words")
        _, reply = await asking
        message = reply["choices"][0]["message"]
        going_on = asyncio.create_task(stand.ask([*GO, message, *GO]))
        stand.say(await stand.next(), "more words")
        await going_on
        _, again = await stand.ask(GO)  # also long after it
        assert again["choices"] == reply["choices"]
        assert stand.session.events.empty()


async def test_the_same_messages_with_another_seed_ask_for_another_turn(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand:
        asking = [asyncio.create_task(stand.ask(GO, seed=seed)) for seed in (1, 2, 1)]
        asked = [await stand.next() for _ in range(2)]
        assert [(each.row.number, each.row.why) for each in asked] == [(0, "first"), (1, "rewritten")]
        for each, text in zip(asked, ("one", "two"), strict=True):
            stand.say(each, text)
        said = [(await each)[1]["choices"][0]["message"]["content"] for each in asking]
        assert sorted(said) in (["one", "one", "two"], ["one", "two", "two"])
        assert said[0] == said[2] != said[1]
        assert stand.session.events.empty()


@pytest.mark.parametrize(
    ("text", "is_thinking", "thoughts", "content"),
    [
        ("<think>\nHm.\n</think>\n\nFour.", False, "Hm.", "Four."),
        ("Hm.\n</think>\n\nFour.", True, "Hm.", "Four."),  # the prompt has opened the thought
        ("<think>\nHm.\n</think>\n\nFour.", True, "Hm.", "Four."),
        ("Four. </think>", False, "", "Four. </think>"),
        ("Four.", False, "", "Four."),
        ("Hm, an", True, "Hm, an", ""),  # cut
        ("<think>Hm, an", False, "Hm, an", ""),
        ("<think></think>", False, "", ""),
        ("<think>Hm.</think>\n\n" + CALL, False, "Hm.", ""),
        ("<think>Hm, " + CALL + "</think>Four.", False, "Hm, " + CALL, "Four."),  # no call was meant
        ("Hm.\n" + CALL, True, "Hm.", ""),  # a call ends a thought that has no end
        ("<think>Hm.</think>\n\nFour.", None, "", "<think>Hm.</think>\n\nFour."),  # the template knows no thoughts
    ],
)
def test_thoughts_are_told_apart_and_are_the_same_history_however_they_come_back(
    text: str, is_thinking: bool | None, thoughts: str, content: str
) -> None:
    turn = turn_of(
        text, text, "hermes", number=1, tools=TOOLS, is_cut=False, num_tokens=(1, 1), is_thinking=is_thinking
    )
    assert (turn.thoughts, turn.content) == (thoughts, content)
    assert len(turn.calls) == (text.endswith(CALL))
    for separate in (False, True):
        asked = read_request({"messages": GO, "separate_reasoning": separate}, SamplingSettings(1.0))
        message = completion("one", turn, asked)["choices"][0]["message"]
        if not separate:
            assert (message["content"] or "") == text.removesuffix(CALL).strip()  # as clients have it that know of none
        assert first_difference([turn.message], [read_message(0, message)]) is None
        told = message.pop("reasoning_content", "")
        assert told == (thoughts if separate else "")
        if told and content:
            assert first_difference([turn.message], [read_message(0, message)]) == 0
            assert first_difference([turn.message], [read_message(0, message | {"reasoning": told})]) is None


# ------------------------------------------------------------------------------------------------------------- refusals


X = {"role": "assistant", "content": "x"}
SAID = {"role": "assistant", "content": "words"}
MORE = {"role": "user", "content": "more"}


@pytest.mark.parametrize(
    ("said", "tools", "row", "why"),
    [
        ([*GO, SAID, MORE], [], 0, "first"),
        ([*GO, SAID, X, MORE], [], 0, "first"),  # read there, as what the agent says
        ([*GO, X, MORE], [], 1, "rewritten"),
        ([MORE], [], 1, "rewritten"),
        ([MORE, SAID, MORE], [], 1, "rewritten"),  # the same words in another place are none of the policy's
        ([*GO, SAID, MORE], TOOLS, 1, "tools"),
    ],
)
async def test_a_history_that_was_changed_opens_a_row_that_begins_with_what_it_shares(
    tokenizer: PromptTokenizer, said: list[dict[str, Any]], tools: list[dict[str, Any]], row: int, why: str
) -> None:
    async with stand_of(tokenizer) as stand:
        await answered(stand)
        asking = asyncio.create_task(stand.ask(said, **({"tools": tools} if tools else {})))
        asked = await stand.next()
        assert (asked.row.number, asked.row.why) == (row, why)
        template = DialogueTemplate(tokenizer, tools)
        if row:
            assert not asked.row.tokens.ids
            whole = template.whole(said)[len(template.tokens_of_beginning) :]
            np.testing.assert_array_equal(asked.read, whole)
        else:
            np.testing.assert_array_equal(asked.read, template.observation(said[2:], last_token=9))
        stand.say(asked, "other words")
        assert (await asking)[1]["choices"][0]["message"]["content"] == "other words"


async def test_two_ways_on_from_the_same_turn_share_its_tokens_and_it_is_trained_once(
    tokenizer: PromptTokenizer,
) -> None:
    async with stand_of(tokenizer) as stand:
        message = await answered(stand)
        ways = [{"role": "user", "content": way} for way in ("left", "right")]
        asking = [asyncio.create_task(stand.ask([*GO, message, way])) for way in ways]
        first, second = await stand.next(), await stand.next()
        assert [(each.row.number, each.row.why) for each in (first, second)] == [(0, "first"), (1, "branch")]
        assert second.row.tokens.ids == first.row.tokens.ids
        assert second.row.tokens.versions == first.row.tokens.versions
        assert sum(first.row.tokens.mask) == 3
        assert not any(second.row.tokens.mask)
        for each in (first, second):
            stand.say(each, "words")
        assert [(await each)[0] for each in asking] == [200, 200]


async def test_there_are_no_more_rows_than_may_be_and_the_others_go_on(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer, max_rows=1) as stand:
        message = await answered(stand)
        status, reply = await stand.ask([MORE])
        assert (status, reply["error"]["code"]) == (400, "too_many_rows")
        assert "agent.max_rows=1" in reply["error"]["message"]
        asking = asyncio.create_task(stand.ask([*GO, message, MORE]))
        stand.say(await stand.next(), "words")
        assert (await asking)[0] == 200


async def test_what_has_no_room_may_be_asked_again_and_again_or_shortened_and_the_reward_still_counts(
    tokenizer: PromptTokenizer,
) -> None:
    async with stand_of(tokenizer, max_turns=1) as stand:
        message = await answered(stand)
        said = [*GO, message, {"role": "user", "content": "a long question"}]
        for content in ("a long question", "a long question", "a question"):
            status, reply = await stand.ask([*said[:-1], {"role": "user", "content": content}])
            assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert (await stand.post("/reward", 0.5))[0] == 200
        ended = await stand.ended()
        assert (ended.reward, ended.verdict) == (0.5, "wrong"), ended.detail


async def test_a_row_without_room_is_told_so_and_an_agent_that_compacts_goes_on(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand:
        message = await answered(stand)
        long = {"role": "user", "content": "word " * 1000}
        status, reply = await stand.ask([*GO, message, long])
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert "generation.max_completion_tokens=1000" in reply["error"]["message"]
        assert stand.session.lacks_room
        asking = asyncio.create_task(stand.ask([{"role": "user", "content": "So far: words."}]))
        stand.say(await stand.next(), "words")
        assert (await asking)[0] == 200
        assert not stand.session.lacks_room


async def test_a_first_request_without_room_ends_the_session_with_the_numbers(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer) as stand:
        status, _ = await stand.ask([{"role": "user", "content": "word " * 1000}])
        assert status == 400
        ended = await stand.ended()
        assert ended.verdict == "verifier_error"
        assert "nothing of the 1000 of generation.max_completion_tokens" in ended.detail


@pytest.mark.parametrize(
    "reported", [{"reward": "much"}, {}, "words", [1], {"reward": float("nan")}, {"reward": 1.0, "part": float("inf")}]
)
async def test_what_is_no_reward_is_refused_and_another_may_follow(tokenizer: PromptTokenizer, reported: Any) -> None:
    async with stand_of(tokenizer) as stand:
        status, reply = await stand.post("/reward", reported)
        assert status == 400
        assert reply["error"]["message"].startswith("no reward: ")
        assert (await stand.post("/reward", {"reward": 1, "tests": 3}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "cut \ud83d"}]}),
        ("/chat/completions", {"messages": GO, "tools": [{"type": "function", "function": {"name": "\udfff"}}]}),
        ("/completions", {"prompt": "cut \ud83d"}),
    ],
)
async def test_half_a_surrogate_pair_is_refused_by_name(tokenizer: PromptTokenizer, path: str, body: object) -> None:
    async with stand_of(tokenizer) as stand:
        status, said = await stand.post(path, body)
        assert (status, said["error"]["message"].partition(", ")[2]) == (
            400, "half of a surrogate pair, which is no character"
        )  # fmt: skip


async def test_a_request_that_is_too_long_or_no_json_is_refused(tokenizer: PromptTokenizer) -> None:
    async with stand_of(tokenizer, max_request_bytes=2000) as stand:
        status, reply = await stand.ask([{"role": "user", "content": "x" * 3000}])
        assert (status, reply["error"]["code"]) == (413, "request_too_large")
        assert "agent.max_request_bytes=2000" in reply["error"]["message"]
        headers = {"Authorization": f"Bearer {stand.access.key}"}
        for body in (b"{", b"\xff", b"[" * 1500):
            async with stand.http.post(stand.access.base_url + "/reward", data=body, headers=headers) as answer:
                assert answer.status == 400
                assert "not JSON" in (await answer.json())["error"]["message"]
        async with stand.http.get(stand.access.base_url + "/embeddings", headers=headers) as answer:
            assert answer.status == 404


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"temperature": 0}, r"temperature=0: .*generation.temperature=0.7.*legal: 0.7"),
        ({"temperature": 1.0}, "temperature=1.0"),
        ({"top_p": 0.9}, "top_p=0.9: all rollouts of a run are sampled alike; legal: 1"),
        ({"n": 2}, "n=2"),
        ({"n": True}, "n=true"),
        ({"stop": ["\n"]}, r'stop=.*legal: \["</a>"\] or "</a>"'),
        ({"stop": []}, "stop="),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"guided_json": {}}, "guided_json: not known here"),
        ({"separate_reasoning": "yes"}, 'separate_reasoning="yes"'),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": True}, "max_tokens=true"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": ""}]}, "messages.0: an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
        ({"tools": "all"}, "tools: a list"),
    ],
)
def test_wishes_that_would_make_log_probabilities_untrue_are_refused_with_what_is_legal(
    wish: dict[str, Any], why: str
) -> None:
    with pytest.raises(Refused, match=why) as refused:
        read_request({"messages": GO} | wish, SamplingSettings(0.7, ("</a>",)))
    assert refused.value.status == 400


def test_wishes_that_change_nothing_are_granted() -> None:
    idle = {"temperature": 0.7, "top_p": 1, "n": 1, "stop": None, "seed": 5, "user": "x", "tool_choice": "auto",
            "presence_penalty": 0.0, "response_format": {"type": "text"}, "max_completion_tokens": 9}  # fmt: skip
    content = [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]
    asked = read_request({"messages": [{"role": "developer", "content": content}], **idle}, SamplingSettings(0.7))
    assert asked.messages == ({"role": "system", "content": "go"},)
    assert asked.max_tokens == 9
