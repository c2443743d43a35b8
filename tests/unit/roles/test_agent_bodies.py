"""Bodies of requests to the endpoint for agents: what is not spoken is refused with words, and nothing breaks it."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.agents.anthropic_format import MESSAGES
from rlhpc.agents.openai_format import CHAT, TEXT
from rlhpc.agents.responses_format import RESPONSES
from rlhpc.agents.session import AgentSession, SessionRules
from rlhpc.agents.turns import Form, SamplingSettings
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.transport.http_server import Refused
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import TEMPLATES, make_chat_model
from tests.unit.roles.test_agent_endpoint import GO, stand_of

RUN = SamplingSettings(1.0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    return {family: PromptTokenizer(make_chat_model(tmp_path_factory.mktemp(family), family)) for family in TEMPLATES}


# ------------------------------------------------------------------------------------------------------------- refusals

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("form", "wish", "why"),
    [
        (MESSAGES, {"temperature": 0}, "temperature=0"),
        (MESSAGES, {"top_k": 5}, "top_k=5"),
        (MESSAGES, {"stop_sequences": ["x"]}, "stop_sequences="),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "the policy decides whether it calls"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "search"}}, "tool_choice="),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "no format is forced"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools.0: .*the agent's own"),
        (MESSAGES, {"tools": [{"name": "search", "input_schema": "any"}]}, "tools.0.input_schema"),
        (MESSAGES, {"tools": [{}]}, "tools.0: "),
        (MESSAGES, {"thread": {"type": "create"}}, "thread: no messages are held here"),
        (MESSAGES, {"container": "c"}, "container: not known here"),
        (MESSAGES, {"mcp_servers": [{"url": "http://x"}]}, "mcp_servers="),
        (MESSAGES, {"max_tokens": 0}, "max_tokens=0"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [{"role": "tool", "content": ""}]}, "messages.0: an object with a role of user"),
        (MESSAGES, {"messages": [{"role": "user", "content": [IMAGE]}]}, 'messages.0.content.0: "image"; legal'),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "0.content.0.text: a text"),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "redacted_thinking"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                             "content": [IMAGE]}]}]}, "parts of type text"),
        (RESPONSES, {"temperature": 0}, "temperature=0"),
        (RESPONSES, {"top_logprobs": 3}, "top_logprobs=3"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice="),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0: .*tools of type function"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "search"}]}, "tools.0"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format="),
        (RESPONSES, {"text": "plain"}, "text.format="),
        (RESPONSES, {"background": True}, "background=true"),
        (RESPONSES, {"truncation": "auto"}, "truncation="),
        (RESPONSES, {"include": ["file_search_call.results"]}, "include="),
        (RESPONSES, {"conversation": "c"}, "conversation: not known here"),
        (RESPONSES, {"previous_response_id": 5}, "previous_response_id=5: a text"),
        (RESPONSES, {"max_output_tokens": 1.5}, "max_output_tokens=1.5"),
        (RESPONSES, {"input": []}, "input: a text, or a list"),
        (RESPONSES, {"input": [5]}, "input.0: an object"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "rs_1"}]}, 'input.0: type="item_reference"'),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "parts of type text"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "arguments are not JSON"),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": ""}]}, "input.0.call_id"),
        (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "gAAAA%"}]}, "this endpoint has sent"),
    ],
)  # fmt: skip
def test_what_is_not_spoken_is_refused_with_words(form: Form, wish: dict[str, Any], why: str) -> None:
    body = {"messages": GO, "max_tokens": 9} if form is MESSAGES else {"input": "go"}
    with pytest.raises(Refused, match=why):
        form.read(body | wish, RUN)


# ------------------------------------------------------------------------------------------------------- hostile bodies

_WORDS = st.sampled_from(["", "go", "{}", "[1]", "null", "</think>", "<think>", "<|im_end|>", "\x00", "a\u2028b"])
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS | st.text(max_size=3), inner, max_size=3),
    max_leaves=9,
)


def _mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What an API asks for, and now and then anything else."""
    return st.integers(0, 19).flatmap(lambda draw: _ANY if draw == 0 else usual)


def _objects(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _mostly(st.fixed_dictionaries({}, optional={key: _mostly(usual) for key, usual in keys.items()}))


def _told(role: str, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _mostly(st.fixed_dictionaries({"role": st.just(role)} | {key: _mostly(each) for key, each in keys.items()}))


def _typed(kind: str, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _mostly(st.fixed_dictionaries({"type": st.just(kind)} | {key: _mostly(each) for key, each in keys.items()}))


_SCHEMAS = _objects(type=st.just("object"), properties=st.dictionaries(_WORDS, _ANY, max_size=2))
_FUNCTIONS = {"name": st.just("f"), "description": _WORDS, "parameters": _SCHEMAS}
_TEXTS = _WORDS | st.lists(_typed("text", text=_WORDS), max_size=2)
_CALLS = st.lists(_objects(id=_WORDS, function=_objects(name=st.just("f"), arguments=_WORDS | _ANY)), max_size=2)
_BLOCKS = (
    _typed("text", text=_WORDS)
    | _typed("thinking", thinking=_WORDS)
    | _typed("tool_use", id=_WORDS, name=_WORDS, input=_ANY)
)
_BODIES = {
    CHAT: _objects(
        messages=st.tuples(
            _told("system", content=_TEXTS) | _told("assistant", content=_TEXTS, tool_calls=_CALLS, reasoning=_WORDS),
            _told("user", content=_TEXTS) | _told("tool", content=_TEXTS, tool_call_id=_WORDS),
        ).map(list),
        tools=st.lists(_objects(type=st.just("function"), function=_objects(**_FUNCTIONS)), max_size=2),
        stream_options=_ANY,
    ),
    TEXT: _objects(prompt=_WORDS | st.lists(st.integers(0, 300), max_size=9), max_tokens=st.integers(1, 9)),
    MESSAGES: _objects(
        messages=st.tuples(
            _told("assistant", content=st.lists(_BLOCKS, max_size=3)) | _told("user", content=_TEXTS),
            _told("user", content=_TEXTS | st.lists(_typed("tool_result", tool_use_id=_WORDS, content=_TEXTS))),
        ).map(list),
        system=_TEXTS,
        tools=st.lists(_objects(name=st.just("f"), description=_WORDS, input_schema=_SCHEMAS), max_size=2),
    ),
    RESPONSES: _objects(
        input=st.lists(
            _told("user", content=_TEXTS)
            | _told("assistant", content=_TEXTS)
            | _typed("reasoning", content=_TEXTS)
            | _typed("reasoning", encrypted_content=st.just("SG0u"))
            | _typed("function_call", name=_WORDS, arguments=_WORDS, call_id=_WORDS)
            | _typed("function_call_output", call_id=_WORDS, output=_TEXTS),
            max_size=3,
        )
        | _WORDS,
        instructions=_WORDS,
        tools=st.lists(_typed("function", **_FUNCTIONS), max_size=2),
    ),
}


@pytest.mark.parametrize("form", _BODIES, ids=["chat", "text", "messages", "responses"])
def test_any_body_is_read_or_refused_and_never_breaks_the_server(
    tokenizers: dict[str, PromptTokenizer], form: Form
) -> None:
    read: list[Any] = []

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(body=_BODIES[form])
    def try_out(body: Any) -> None:
        if asyncio.run(_is_read(tokenizers, form, json.loads(json.dumps(body)))):
            read.append(body)

    try_out()
    assert len(read) > 5  # the others are refused


async def _is_read(tokenizers: dict[str, PromptTokenizer], form: Form, body: Any) -> bool:
    """Whether the policy is asked for a turn; any error but Refused is raised."""
    is_read = False
    for family, tokenizer in tokenizers.items():
        template_for = partial(DialogueTemplate, tokenizer)
        rules = SessionRules("hermes", PATIENCE_S, template_for, max_rows=1, max_turns=1)
        session = AgentSession(family, rules, None, max_tokens=1 << 20)
        try:
            asked = form.read(body, RUN)
            if form is RESPONSES:
                asked = session.responses.continued(asked)
            if asked.plain is None:
                session.count(asked)
        except Refused:
            continue
        asking = asyncio.ensure_future(session.ask(asked))
        await asyncio.sleep(0)
        is_read |= any(row.pending is not None for row in session.rows.all)
        session.close()
        with pytest.raises(Refused):
            await asking
    return is_read


@pytest.mark.parametrize("path", ["/messages", "/messages/count_tokens", "/responses", "/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"messages": ' + b"[" * 5000, b'{"max_tokens": ' + b"9" * 9000 + b"}"],
)
async def test_no_bytes_are_a_server_s_error(tokenizers: dict[str, PromptTokenizer], path: str, body: bytes) -> None:
    async with stand_of(tokenizers["qwen3"]) as stand:
        headers = {"x-api-key": stand.access.key}
        async with stand.http.post(stand.access.base_url + path, data=body, headers=headers) as reply:
            error = await reply.json()
            assert (reply.status, error.get("type")) == (400, "error" if "messages" in path else None), error
