"""A service: its answers in vLLM's format, whom it refuses, and how it ends.  The engine is scripted."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import math
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.protocol.errors import ConfigError, EngineError
from rlhpc.protocol.messages import CONTROL, Hello, Reregister
from rlhpc.roles.lifecycle import ControllerSession, RoleContext, heed_controller
from rlhpc.roles.service import models, service
from rlhpc.roles.service.models import start_model
from rlhpc.roles.service.service import MAX_REQUEST_BYTES, ServiceEndpoint, own_service
from rlhpc.transport import http_server
from rlhpc.transport.service_address import addresses_of, publish_address
from tests import build
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import CHATML, SPECIAL_TOKENS, make_tokenizer_files

VOCABULARY, STOP = len(SPECIAL_TOKENS) + 96, SPECIAL_TOKENS.index("<eos>")
ROW = [10, 11, 40, 12, 50, 10, 99]
CHAT = [{"role": "user", "content": "Is it right?"}]


def make_model(directory: Path, **script: Any) -> Path:
    make_tokenizer_files(directory, chat_template=CHATML)
    model = {"vocab_size": VOCABULARY, "eos_token_id": STOP, "max_position_embeddings": 512, "scripted_engine": script}
    (directory / "config.json").write_text(json.dumps(model))
    return directory


def context_of(directory: Path, kind: str, *, replica: int = 0, start: int = 0, **table: Any) -> RoleContext:
    """One start of a service of this kind, whose name is "helper"."""
    model = directory / "model"
    config = build.config(
        model={"path": str(model)},
        generation={"engine": "scripted", "max_prompt_tokens": 20, "max_completion_tokens": 40},
        service=[{"name": "helper", "kind": kind, "path": str(model), **table}],
    )
    layout, incarnation = RunLayout(directory / "run"), f"0.0.{start}-x"
    return RoleContext(
        "service", replica, 1, 0, None, incarnation, layout, config, config_hash(config), service="helper"
    )


@dataclass
class Client:
    """What has the address of a service, as whoever may read the run directory."""

    endpoint: ServiceEndpoint
    http: aiohttp.ClientSession
    url: str
    key: str

    async def post(self, path: str, body: object, key: str | None = None) -> tuple[int, Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        async with self.http.post(self.url.removesuffix("/v1") + path, data=data, headers=headers) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text else None

    async def scores(self, row: list[int], top_k: int = 0) -> list[dict[str, dict[str, Any]] | None]:
        body = {"model": "helper", "prompt": row, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
        status, reply = await self.post("/v1/completions", body)
        assert status == 200, reply
        found: list[dict[str, dict[str, Any]] | None] = reply["choices"][0]["prompt_logprobs"]
        return found


@asynccontextmanager
async def client_of(
    context: RoleContext, *, leave_s: float = PATIENCE_S, pulse_s: float = 10 * PATIENCE_S
) -> AsyncIterator[Client]:
    """Of a service that is ready, and leaves at the end."""
    model = await start_model(context.config, own_service(context), replica=context.replica)
    endpoint = ServiceEndpoint(context, model, leave_s=leave_s, pulse_s=pulse_s)
    await endpoint.open()
    (address,) = addresses_of(context.layout.rendezvous, "helper")
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(endpoint, http, address.url, address.key)
    finally:
        await endpoint.leave()
        await model.close()


def engine_of(client: Client) -> ScriptedEngine:
    engine: ScriptedEngine = client.endpoint._model._engine  # type: ignore[attr-defined]
    return engine


async def under_way(client: Client, number: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while client.endpoint._num_asked != number:  # noqa: ASYNC110 - by polling
            await asyncio.sleep(0.001)


# -------------------------------------------------------------------------------------------------------------- teacher


@pytest.mark.parametrize("many", [0, 10**9])
async def test_a_teacher_returns_every_token_of_a_row_with_the_likeliest_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """Large answers are written on a thread, and say the same."""
    monkeypatch.setattr(models, "MANY_ENTRIES", many)
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        table = engine_of(client).logprob_table(-1)
        for top_k in (0, 1, 5):
            first, *others = await client.scores(ROW, top_k)
            assert first is None
            for token, found in zip(ROW[1:], others, strict=True):
                assert found is not None
                own = found[str(token)]
                assert own["logprob"] == pytest.approx(table[token], abs=1e-6)
                assert own["decoded_token"] is None
                best = {its["rank"]: int(each) for each, its in found.items() if its["rank"] <= top_k}
                likeliest = np.argsort(-table, kind="stable")[:top_k].tolist()
                assert [best[rank] for rank in range(1, top_k + 1)] == likeliest
                assert len(found) == top_k + (own["rank"] > top_k)
                assert own["rank"] == (table >= table[token]).sum()
        assert await client.scores(ROW[:1], 3) == [None]


async def test_a_log_probability_that_json_cannot_spell_is_a_low_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        (_, impossible) = await client.scores([10, 0])
        assert impossible == {"0": {"logprob": -9999.0, "rank": VOCABULARY, "decoded_token": None}}


async def test_a_teacher_takes_the_longest_rollout_and_nothing_longer(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        assert len(await client.scores([10] * 60)) == 60
        body = {"prompt": [10] * 61, "max_tokens": 1, "prompt_logprobs": 0}
        status, reply = await client.post("/v1/completions", body)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert "61 tokens; legal: 60 at most" in reply["error"]["message"]


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"prompt": None}, "a list of token ids"),
    "text": ({"prompt": "words"}, "a list of token ids"),
    "empty": ({"prompt": []}, "a list of token ids"),
    "two": ({"prompt": [[1, 2], [3]]}, "a list of token ids"),
    "fractions": ({"prompt": [1, 2.0]}, "a list of token ids"),
    "truths": ({"prompt": [1, True]}, "a list of token ids"),
    "unknown token": ({"prompt": [1, VOCABULARY]}, f"token {VOCABULARY}; legal: 0 to {VOCABULARY - 1}"),
    "negative": ({"prompt": [1, -1]}, "token -1"),
    "no scores": ({"prompt_logprobs": None}, "legal: prompt_logprobs=0"),
    "too many": ({"prompt_logprobs": VOCABULARY + 1}, "a whole number from 0"),
    "samples": ({"max_tokens": 2}, "a whole number from 0 to 1"),
    "stream": ({"stream": True}, "stream=true: not here; legal: false"),
    "unknown key": ({"beam": 1}, "beam: not known here"),
    "other model": ({"model": "gpt"}, "legal: 'helper'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
async def test_what_a_teacher_cannot_answer_is_refused_with_what_is_legal(tmp_path: Path, case: str) -> None:
    change, said = BAD_ROWS[case]
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        body = {"prompt": ROW, "max_tokens": 1, "prompt_logprobs": 0} | change
        status, reply = await client.post("/v1/completions", body)
        assert status == (404 if case == "other model" else 400)
        assert said in reply["error"]["message"]
        assert reply["error"]["type"] == "invalid_request_error"
        assert len(await client.scores(ROW)) == len(ROW)


# ---------------------------------------------------------------------------------------------------------------- judge


async def test_a_judge_says_what_its_script_says(tmp_path: Path) -> None:
    make_model(tmp_path / "model", reply="Grade: 7")
    async with client_of(context_of(tmp_path, "judge")) as client:
        body = {"model": "helper", "messages": CHAT, "temperature": 0, "max_tokens": 30}
        status, reply = await client.post("/v1/chat/completions", body)
        assert status == 200
        (choice,) = reply["choices"]
        assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "Grade: 7"}, "stop")
        assert reply["usage"]["completion_tokens"] == len("Grade: 7") + 1
        status, reply = await client.post("/v1/chat/completions", body | {"max_tokens": 3})
        assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("Gra", "length")
        status, reply = await client.post("/v1/chat/completions", body | {"stop": ["e: "]})
        assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("Grad", "stop")


BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"messages": []}, "a list of at least one"),
    "no role": ({"messages": [{"content": "x"}]}, "messages.0: an object with a role"),
    "too long": ({"messages": [{"role": "user", "content": "x" * 500}]}, "legal: 511 at most"),
    "hot": ({"temperature": 3}, "legal: 0 to 2"),
    "text": ({"temperature": "0"}, "legal: 0 to 2"),
    "no tokens": ({"max_tokens": 0}, "a whole number from 1"),
    "stop": ({"stop": [""]}, "none of them empty"),
    "several": ({"n": 2}, "n=2: not here; legal: 1"),
    "cut": ({"top_p": 0.5}, "top_p=0.5: not here; legal: 1"),
    "unknown key": ({"guided_json": {}}, "guided_json: not known here"),
}


@pytest.mark.parametrize("case", BAD_CHATS)
async def test_what_a_judge_cannot_answer_is_refused_with_what_is_legal(tmp_path: Path, case: str) -> None:
    change, said = BAD_CHATS[case]
    make_model(tmp_path / "model", reply="7")
    async with client_of(context_of(tmp_path, "judge")) as client:
        status, reply = await client.post("/v1/chat/completions", {"messages": CHAT} | change)
        assert status == 400
        assert said in reply["error"]["message"]
        assert (await client.post("/v1/chat/completions", {"messages": CHAT}))[0] == 200


async def test_a_seeded_request_is_answered_alike_each_time(tmp_path: Path) -> None:
    make_model(tmp_path / "model", stop_probability=0.01)
    async with client_of(context_of(tmp_path, "judge")) as client:

        async def said(**more: Any) -> str:
            _, reply = await client.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 20, **more})
            text: str = reply["choices"][0]["message"]["content"]
            return text

        assert await said(seed=3) == await said(seed=3)
        assert len({await said() for _ in range(4)}) == 4


async def test_texts_and_chats_are_tokenised_as_the_model_reads_them(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "judge")) as client:
        _, chat = await client.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False})
        _, prompted = await client.post("/tokenize", {"messages": CHAT})
        _, text = await client.post("/tokenize", {"prompt": "ab"})
        first = text["tokens"][0]
        assert (text["count"], text["tokens"], text["max_model_len"]) == (2, [first, first + 1], 512)
        assert prompted["tokens"][: chat["count"]] == chat["tokens"]
        assert prompted["count"] > chat["count"]
        assert (await client.post("/tokenize", {"prompt": "a", "messages": CHAT}))[0] == 400


# --------------------------------------------------------------------------------------------------------- reward model

STATED = {"7": 2.0, "wrong": -1.0}


async def test_a_scripted_reward_model_adds_up_what_is_stated(tmp_path: Path) -> None:
    make_model(tmp_path / "model", scores=STATED)
    async with client_of(context_of(tmp_path, "reward")) as client:
        _, one = await client.post("/classify", {"model": "helper", "input": "it is 7", "use_activation": False})
        assert [(it["index"], it["probs"], it["num_classes"]) for it in one["data"]] == [(0, [2.0], 1)]
        _, many = await client.post("/classify", {"input": ["7 wrong", "x"]})
        assert [it["probs"] for it in many["data"]] == [[1.0], [0.0]]
        _, spoken = await client.post("/classify", {"messages": [*CHAT, {"role": "assistant", "content": "7"}]})
        assert spoken["data"][0]["probs"] == [2.0]
        _, tokens = await client.post("/tokenize", {"prompt": "a7b"})
        _, places = await client.post("/pooling", {"input": tokens["tokens"], "task": "token_classify"})
        assert places["data"] == [{"index": 0, "object": "pooling", "data": [[0.0], [2.0], [2.0]]}]
        _, active = await client.post("/classify", {"input": "x", "use_activation": True})
        assert active["data"][0]["probs"] == [0.5]
        assert client.endpoint.heartbeat().metrics["answered"] == 6.0


BAD_INPUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing": ("/classify", {"input": None}, "a list of either"),
    "no input": ("/classify", {}, "one of both"),
    "both": ("/classify", {"input": "x", "messages": CHAT}, "one of both"),
    "empty list": ("/classify", {"input": []}, "a list of either"),
    "empty text": ("/classify", {"input": [""]}, "a text without a token"),
    "mixed": ("/classify", {"input": ["x", 3]}, "a list of token ids"),
    "unknown token": ("/classify", {"input": [VOCABULARY]}, "legal: 0 to"),
    "too long": ("/classify", {"input": "x" * 513}, "513 tokens; legal: 512 at most"),
    "activation": ("/classify", {"input": "x", "use_activation": 1}, "legal: true or false"),
    "truncation": ("/classify", {"input": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens: not known"),
    "task": ("/pooling", {"input": [9], "task": "embed"}, "legal: classify or token_classify"),
    "form": ("/pooling", {"input": [9], "encoding_format": "base64"}, 'legal: "float"'),
    "no message": ("/classify", {"messages": [{"role": "king", "content": ""}]}, "an object with a role"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
async def test_what_a_reward_model_cannot_score_is_refused_with_what_is_legal(tmp_path: Path, case: str) -> None:
    path, body, said = BAD_INPUTS[case]
    make_model(tmp_path / "model", scores=STATED)
    async with client_of(context_of(tmp_path, "reward")) as client:
        status, reply = await client.post(path, body)
        assert status == 400
        assert said in reply["error"]["message"]
        assert (await client.post("/classify", {"input": "x"}))[0] == 200


async def test_a_number_that_json_cannot_spell_is_no_score(tmp_path: Path) -> None:
    make_model(tmp_path / "model", scores={"7": math.inf})
    async with client_of(context_of(tmp_path, "reward")) as client:
        status, reply = await client.post("/classify", {"input": "7"})
        assert (status, reply["error"]["code"]) == (500, "not_finite")


async def test_a_pooling_engine_that_dies_ends_the_process(tmp_path: Path) -> None:
    make_model(tmp_path / "model", scores=STATED, die_after_rows=3)
    async with client_of(context_of(tmp_path, "reward")) as client:
        watching = asyncio.create_task(client.endpoint.until_dead())
        status, reply = await client.post("/classify", {"input": ["a", "b", "c", "d"]})
        assert (status, reply["error"]["code"]) == (503, "engine_died")
        with pytest.raises(EngineError, match="scripted to die"):
            await asyncio.wait_for(watching, PATIENCE_S)


# ------------------------------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/nothing", "/"])
async def test_who_has_no_key_gets_401(tmp_path: Path, path: str) -> None:
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        for key in ("", "wrong", client.key[:-1], client.key + "x"):
            status, _ = await client.post(path, b"{" * 1000, key)
            assert status == 401
        async with client.http.get(client.url.removesuffix("/v1") + "/health") as reply:
            assert (reply.status, "Server" in reply.headers) == (200, False)
        async with client.http.get(client.url + "/models", headers={"Authorization": f"Bearer {client.key}"}) as reply:
            assert [each["id"] for each in (await reply.json())["data"]] == ["helper"]


async def test_bodies_that_are_no_request_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        for body in (b"", b"{", b"[]", b"3", b"\xff", b'"\\ud83d"', b"[" * 100_000, b"NaN"):
            status, reply = await client.post("/v1/completions", body)
            assert (status, reply["error"]["code"]) == (400, "invalid_request"), body[:9]
        assert (await client.post("/v1/nothing", b"{}"))[0] == 404
        assert (await client.post("/v1/chat/completions", b"{}"))[0] == 404
        assert (await client.post("/health", b"{}"))[0] == 405
        status, reply = await client.post("/v1/completions", b" " * (MAX_REQUEST_BYTES + 1))
        assert (status, reply["error"]["code"]) == (413, "request_too_large")
        assert len(await client.scores(ROW)) == len(ROW)


async def _half_sent(client: Client, num_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = client.url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {client.key}", "Content-Length: 9999")
    writer.write("\r\n".join((*lines, "", "")).encode() + b" " * num_bytes)
    await writer.drain()
    return reader, writer


async def test_clients_that_are_slow_silent_or_gone_disturb_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "BODY_S", 1.0)
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        host, _, port = client.url.removeprefix("http://").removesuffix("/v1").partition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        slow = [await _half_sent(client, number) for number in range(20)]
        gone = [await _half_sent(client, number) for number in range(20)]
        for _, writer in gone:
            writer.transport.abort()
        assert len(await client.scores(ROW)) == len(ROW)
        for reader, _ in slow:
            assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 408")
        for _, writer in (*silent, *slow):
            writer.close()
        assert len(await client.scores(ROW)) == len(ROW)
        assert client.endpoint.heartbeat().waits_for == "requests"
    assert caplog.text == "" or "Error handling request" not in caplog.text


# ----------------------------------------------------------------------------------------------------------------- ends


async def test_a_heartbeat_tells_what_is_asked_and_what_was_answered(tmp_path: Path) -> None:
    make_model(tmp_path / "model", token_s=0.01, stop_probability=0.0)
    async with client_of(context_of(tmp_path, "judge", max_num_seqs=2), leave_s=0.0) as client:
        body = {"messages": CHAT, "max_tokens": 80}
        asked = [asyncio.create_task(client.post("/v1/chat/completions", body)) for _ in range(3)]
        await under_way(client, 3)
        beat = client.endpoint.heartbeat()
        assert (beat.state, beat.waits_for, beat.policy_version) == ("running", "", -1)
        assert (beat.metrics["running"], beat.metrics["waiting"], beat.metrics["answered"]) == (2.0, 1.0, 0.0)
        assert all(status == 200 for status, _ in await asyncio.gather(*asked))
        beat = client.endpoint.heartbeat()
        assert (beat.waits_for, beat.metrics["running"], beat.metrics["answered"]) == ("requests", 0.0, 3.0)
        assert beat.metrics["tokens"] > 3 * 80


async def test_a_service_that_leaves_ends_what_it_has_begun_and_refuses_the_rest(tmp_path: Path) -> None:
    make_model(tmp_path / "model", token_s=0.01, stop_probability=0.0)
    context = context_of(tmp_path, "judge")
    async with client_of(context) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 50}))
        await under_way(client)
        leaving = asyncio.create_task(client.endpoint.leave())
        await asyncio.sleep(0.05)
        assert addresses_of(context.layout.rendezvous, "helper") == []
        status, reply = await client.post("/v1/chat/completions", {"messages": CHAT})
        assert (status, reply["error"]["code"], reply["error"]["type"]) == (503, "leaving", "server_error")
        async with client.http.get(client.url.removesuffix("/v1") + "/health") as health:
            assert health.status == 503
        assert (await asked)[0] == 200
        await leaving


async def test_a_service_that_leaves_waits_for_a_while_only(tmp_path: Path) -> None:
    make_model(tmp_path / "model", token_s=0.1, stop_probability=0.0)
    async with client_of(context_of(tmp_path, "judge"), leave_s=0.2) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", {"messages": CHAT}))
        await under_way(client)
        await asyncio.wait_for(client.endpoint.leave(), 5.0)
        with pytest.raises(aiohttp.ClientError):
            await asked


async def test_a_client_that_hangs_up_costs_no_further_tokens(tmp_path: Path) -> None:
    make_model(tmp_path / "model", token_s=0.05, stop_probability=0.0)
    async with client_of(context_of(tmp_path, "judge"), leave_s=0.0) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", {"messages": CHAT}))
        await under_way(client)
        asked.cancel()
        await under_way(client, 0)
        assert engine_of(client).statistics().num_running == 0


async def test_an_engine_that_dies_is_told_to_who_asks_and_ends_the_process(tmp_path: Path) -> None:
    make_model(tmp_path / "model", stop_probability=0.0, die_after_tokens=30)
    async with client_of(context_of(tmp_path, "judge")) as client:
        watching = asyncio.create_task(client.endpoint.until_dead())
        status, reply = await client.post("/v1/chat/completions", {"messages": CHAT})
        assert (status, reply["error"]["code"]) == (503, "engine_died")
        with pytest.raises(EngineError, match="scripted to die"):
            await asyncio.wait_for(watching, PATIENCE_S)


@pytest.mark.parametrize("kind", ["teacher", "judge", "reward"])
async def test_an_engine_that_dies_while_nobody_asks_ends_the_process(tmp_path: Path, kind: str) -> None:
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, kind), pulse_s=0.01) as client:
        watching = asyncio.create_task(client.endpoint.until_dead())
        await asyncio.wait({watching}, timeout=0.2)
        assert not watching.done()
        await client.endpoint._model.close()  # as if it had died
        with pytest.raises(EngineError, match="is dead: closed"):
            await asyncio.wait_for(watching, PATIENCE_S)


async def test_an_engine_that_answers_nothing_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SILENT_S", 0.3)
    make_model(tmp_path / "model", row_s=3600.0)
    async with client_of(context_of(tmp_path, "reward"), pulse_s=0.01) as client:
        with pytest.raises(EngineError, match=r"the engine has not answered within 0\.3 s"):
            await asyncio.wait_for(client.endpoint.until_dead(), PATIENCE_S)


async def test_each_start_has_an_address_and_a_key_of_its_own_and_takes_no_later_one_away(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as first:
        async with client_of(context_of(tmp_path, "teacher", start=1)) as second:
            assert first.url != second.url
            assert first.key != second.key
            assert (await second.post("/tokenize", {"prompt": "a"}, first.key))[0] == 401
            await first.endpoint.leave()
            (address,) = addresses_of(second.endpoint._context.layout.rendezvous, "helper")
            assert address.url == second.url
        assert addresses_of(first.endpoint._context.layout.rendezvous, "helper") == []


async def test_an_address_that_is_being_written_when_its_service_leaves_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new controller has the address written again, in a thread that outlives the task that has asked for it."""
    is_writing, is_written = threading.Event(), threading.Event()

    def slowly(*given: Any) -> None:
        is_writing.set()
        time.sleep(0.3)
        publish_address(*given)
        is_written.set()

    make_model(tmp_path / "model")
    async with client_of(context_of(tmp_path, "teacher")) as client:
        monkeypatch.setattr(service, "publish_address", slowly)
        publishing = asyncio.create_task(client.endpoint.publish())
        await asyncio.to_thread(is_writing.wait, PATIENCE_S)
        publishing.cancel()
        await client.endpoint.leave()
        await asyncio.to_thread(is_written.wait, PATIENCE_S)
        assert addresses_of(client.endpoint._context.layout.rendezvous, "helper") == []


async def test_a_service_says_hello_again_as_often_as_it_is_asked_to_and_stops_when_told(tmp_path: Path) -> None:
    server, context = MemoryServer(CONTROL), context_of(tmp_path, "judge")
    control, session = server.connect("service-0"), ControllerSession(context, asyncio.Event())
    obeying = asyncio.create_task(heed_controller(control, session))
    for _ in range(2):
        await server.send("service-0", Reregister())
        _, message = await server.receive(PATIENCE_S)
        assert isinstance(message, Hello)
        assert (message.role, message.replica, message.num_weight_ranks) == ("service", 0, 0)
    obeying.cancel()
    await asyncio.gather(obeying, return_exceptions=True)


async def test_a_judge_without_a_chat_template_does_not_start(tmp_path: Path) -> None:
    make_tokenizer_files(tmp_path / "model")
    context = context_of(tmp_path, "judge")
    with pytest.raises(ConfigError, match=r"service.path of 'helper': model.path=.* has no chat template"):
        await start_model(context.config, context.config.service[0], replica=0)


def test_a_process_without_a_service_says_which_there_are(tmp_path: Path) -> None:
    context = dataclasses.replace(context_of(tmp_path, "judge"), service="nobody")
    with pytest.raises(ConfigError, match="'nobody': this run starts no such service; legal: helper"):
        own_service(context)
