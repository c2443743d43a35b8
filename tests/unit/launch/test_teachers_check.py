"""A teacher reads the tokens that the policy writes: otherwise the run is refused before it starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from aiohttp import web

from launch.checks.preflight import preflight_sampling
from launch.checks.teachers import asked_teachers, refuse_unfit_teachers, teacher_warnings
from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import ConfigError
from tests import build
from tests.patience import PATIENCE_S
from tests.unit.launch.public_models import CONFIGS, make_model_directory


def config_with(root: Path, *services: dict[str, Any], **changes: Any) -> Config:
    """A run with datasets for as many teachers."""
    names = [each["name"] for each in services]
    data = [{"path": f"{name}.jsonl", "task": "exact_match", "teacher": name, "name": name} for name in names]
    return build.config(
        model={"path": str(root / "policy")},
        service=[{"kind": "teacher"} | each for each in services],
        data=data,
        algorithm={"advantage": "distillation"},
        admission={"active_sampling": False},
        **changes,
    )


def make_policy(root: Path) -> PromptTokenizer:
    return PromptTokenizer(make_model_directory(root / "policy", CONFIGS["Qwen2.5-0.5B"]))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def add_token(document: dict[str, Any], number: int, content: str) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"] += [{"id": number, "content": content, "special": True, **flags}]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_teacher_with_the_same_tokens_is_accepted_and_may_have_more_of_them_and_more_padding(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    larger = make_model_directory(tmp_path / "larger", CONFIGS["Qwen2.5-7B"])
    edit(larger / "tokenizer.json", lambda document: add_token(document, 2, "<tool>"))
    config = config_with(tmp_path, {"name": "larger", "path": str(larger)})
    assert list(asked_teachers(config)) == ["service"]
    refuse_unfit_teachers(config, policy)


def test_a_teacher_that_no_dataset_asks_is_not_looked_at(tmp_path: Path) -> None:
    make_policy(tmp_path)
    config = build.config(
        model={"path": str(tmp_path / "policy")}, service=[{"name": "x", "kind": "teacher", "path": "/nowhere"}]
    )
    assert asked_teachers(config) == {}


def _renamed(document: dict[str, Any]) -> None:
    document["model"]["vocab"] = {"<unk>": 0, "sub": 1}


def _without(document: dict[str, Any]) -> None:
    del document["model"]["vocab"]["add"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_renamed, r"token 1 is 'sub', and 'add' of the policy"),
        (_without, r"token 1 is none, and 'add' of the policy"),
    ],
)
def test_a_teacher_with_other_tokens_is_refused_with_the_first_that_differs(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    policy = make_policy(tmp_path)
    other = make_model_directory(tmp_path / "other", CONFIGS["Qwen2.5-7B"])
    edit(other / "tokenizer.json", change)
    config = config_with(
        tmp_path, {"name": "same", "path": str(tmp_path / "policy")}, {"name": "other", "path": str(other)}
    )
    with pytest.raises(
        ConfigError, match=rf"service\.1\.path='{other}' has another tokenizer than model\.path='.*{why}"
    ):
        refuse_unfit_teachers(config, policy)


def test_added_tokens_are_compared_too(tmp_path: Path) -> None:
    make_policy(tmp_path)
    edit(tmp_path / "policy/tokenizer.json", lambda document: add_token(document, 2, "<think>"))
    other = make_model_directory(tmp_path / "other", CONFIGS["Qwen2.5-7B"])
    edit(other / "tokenizer.json", lambda document: add_token(document, 2, "<reason>"))
    config = config_with(tmp_path, {"name": "other", "path": str(other)})
    with pytest.raises(ConfigError, match="token 2 is '<reason>', and '<think>' of the policy"):
        refuse_unfit_teachers(config, PromptTokenizer(tmp_path / "policy"))


def test_a_teacher_with_fewer_logits_than_tokens_is_refused(tmp_path: Path) -> None:
    make_policy(tmp_path)
    edit(tmp_path / "policy/tokenizer.json", lambda document: document["model"]["vocab"].update(think=151_900))
    other = make_model_directory(tmp_path / "other", CONFIGS["Qwen2.5-0.5B"] | {"vocab_size": 151_665})
    edit(other / "tokenizer.json", lambda document: document["model"]["vocab"].update(think=151_900))
    config = config_with(tmp_path, {"name": "other", "path": str(other)})
    with pytest.raises(ConfigError, match=r"vocab_size=151665, and the tokenizer of .* has token 151900"):
        refuse_unfit_teachers(config, PromptTokenizer(tmp_path / "policy"))


def test_a_teacher_with_less_context_than_a_rollout_and_a_token_is_refused(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    longest = build.config().generation.max_tokens
    for positions in (longest + 1, longest):
        short = make_model_directory(
            tmp_path / str(positions), CONFIGS["Qwen2.5-0.5B"] | {"max_position_embeddings": positions}
        )
        config = config_with(tmp_path, {"name": "short", "path": str(short)})
        if positions > longest:
            refuse_unfit_teachers(config, policy)
            continue
        with pytest.raises(
            ConfigError, match=rf"{longest} tokens at most .* the longest row of this run has {longest + 1}"
        ):
            refuse_unfit_teachers(config, policy)


def test_the_check_before_a_run_looks_at_its_teachers(tmp_path: Path) -> None:
    make_policy(tmp_path)
    config = config_with(tmp_path, {"name": "gone", "path": str(tmp_path / "gone")}, generation={"engine": "scripted"})
    with pytest.raises(ConfigError, match=r"service\.path='.*gone': no such directory"):
        preflight_sampling(config, roles_run_here=False)


# ---------------------------------------------------------------------------------------------------- servers of others


@contextmanager
def tokenizing(answer: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """A server, in a thread, that answers POST /tokenize; its url."""
    loop, ready, found = asyncio.new_event_loop(), Event(), list[str]()

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "larger"}]})

    async def open_it() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/tokenize", tokenize)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(open_it())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_a_server_with_the_same_tokens_gives_no_warning(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)

    def answer(body: dict[str, Any]) -> Any:
        assert (body["model"], body["add_special_tokens"]) == ("larger", False)
        return {"tokens": policy.encode_rendered(body["prompt"]).tolist(), "max_model_len": 4096, "count": 0}

    with tokenizing(answer) as url:
        assert list(teacher_warnings(config_with(tmp_path, {"name": "far", "url": url}), policy)) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": [0, 7]}, r"token 1 is 7, and 0 of the policy; legal: a teacher with the policy's tokens"),
        ({"tokens": []}, r"token 0 is None, and 0 of the policy"),
        ({"max_model_len": 7}, r"7 tokens at most \(max_model_len of POST /tokenize\)"),
    ],
)
def test_a_server_with_other_tokens_or_too_little_context_is_refused(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    policy = make_policy(tmp_path)

    def answer(body: dict[str, Any]) -> Any:
        return {"tokens": policy.encode_rendered(body["prompt"]).tolist(), "max_model_len": 4096} | change

    with tokenizing(answer) as url, pytest.raises(ConfigError, match=rf"service\.url='{url}'.*{why}"):
        list(teacher_warnings(config_with(tmp_path, {"name": "far", "url": url}), policy))


@pytest.mark.parametrize("reply", [{"tokens": ["a"]}, {}, [], None])
def test_a_server_that_says_no_tokens_is_a_warning(tmp_path: Path, reply: Any) -> None:
    policy = make_policy(tmp_path)
    with tokenizing(lambda body: reply) as url:
        (warning,) = teacher_warnings(config_with(tmp_path, {"name": "far", "url": url}), policy)
    assert warning.startswith(f"service.url={url!r}: its tokens were not compared with the policy's: service 'far': ")


def test_a_server_that_is_not_reachable_from_here_or_has_no_key_here_is_a_warning(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    nowhere = {"name": "far", "url": "http://127.0.0.1:9/v1"}
    (warning,) = teacher_warnings(config_with(tmp_path, nowhere), policy)
    assert "refused" in warning
    (warning,) = teacher_warnings(config_with(tmp_path, nowhere | {"key_variable": "NO_SUCH_KEY"}), policy)
    assert "key_variable='NO_SUCH_KEY' is not set" in warning
