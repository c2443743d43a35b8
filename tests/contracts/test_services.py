"""Answers of services over HTTP, with vLLM's engines, are what transformers computes from the same checkpoints."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.config.tables_models import RewardModelConfig
from rlhpc.generation.factory import service_settings
from rlhpc.generation.vllm_engine import VllmPoolingEngine
from rlhpc.protocol.errors import EngineError
from rlhpc.rewards.pool import Judgement, RewardPool
from rlhpc.rewards.task_settings import VARIABLE, TaskSettings
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.service.models import start_model
from tests import build
from tests.contracts.engine_subjects import living_children, remember_strangers
from tests.patience import PATIENCE_S
from tests.tiny_models import make_character_tokenizer, make_tiny_checkpoint, make_tiny_classifier
from tests.unit.roles.test_service import Client, client_of

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-4  # float32, another order of sums


def context_of(directory: Path, model: Path, kind: str, **table: Any) -> RoleContext:
    config = build.config(
        model={"path": str(model), "dtype": "float32"},
        generation={"max_prompt_tokens": 100, "max_completion_tokens": 200},
        trainer={"token_budget": 300},
        service=[{"name": "helper", "kind": kind, "path": str(model), "kv_cache_bytes": 32 << 20, **table}],
    )
    layout = RunLayout(directory / "run")
    return RoleContext("service", 0, 1, 0, None, "0.0.0-x", layout, config, config_hash(config), service="helper")


@asynccontextmanager
async def ready(directory: Path, model: Path, kind: str, **table: Any) -> AsyncIterator[Client]:
    async with client_of(context_of(directory, model, kind, **table)) as client:
        yield client


def texts(number: int, *, longest: int = 120) -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices("abcdef 0123456789+=", k=draw.randint(1, longest))) for _ in range(number)]


async def test_a_teacher_says_of_tokens_what_transformers_computes(tmp_path: Path) -> None:
    """Rows of all lengths at once, with as many of the likeliest tokens as each asks for; the longest row fits."""
    model, draw = make_tiny_checkpoint(tmp_path / "model", tied=False), np.random.default_rng(5)
    rows = [draw.integers(4, 100, length).tolist() for length in (2, 3, 31, 32, 33, 64, 200, 300, 17, 90)]
    most = [0, 4, 20, 0, 1, 8, 3, 2, 100, 0]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    async with ready(tmp_path, model, "teacher") as client:
        answers = await asyncio.gather(*(client.scores(row, top_k) for row, top_k in zip(rows, most, strict=True)))
    worst = 0.0
    for row, top_k, (first, *places) in zip(rows, most, answers, strict=True):
        assert first is None
        assert len(places) == len(row) - 1
        with torch.no_grad():
            tables = torch.log_softmax(reference(torch.tensor([row])).logits[0, :-1].double(), -1).numpy()
        for token, table, place in zip(row[1:], tables, places, strict=True):
            assert place is not None
            worst = max(worst, max(abs(place[name]["logprob"] - table[int(name)]) for name in place))
            assert str(token) in place
            best = sorted((its["rank"], int(name)) for name, its in place.items() if its["rank"] <= top_k)
            assert [name for _, name in best] == np.argsort(-table, kind="stable")[:top_k].tolist()
    assert worst < TOLERANCE


async def test_a_judge_replies_as_greedy_sampling_of_transformers_does(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", tied=False)
    tokenizer, reference = make_character_tokenizer(), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chats = [[{"role": "user", "content": text}] for text in texts(12, longest=60)]
    async with ready(tmp_path, model, "judge") as client:
        asked = [{"messages": chat, "temperature": 0, "max_tokens": 24} for chat in chats]
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", body) for body in asked))
        warm = await asyncio.gather(*(client.post("/v1/chat/completions", asked[0] | {"temperature": 1}) for _ in "12"))
    for chat, (status, reply) in zip(chats, replies, strict=True):
        assert status == 200, reply
        prompt = torch.tensor([tokenizer.encode(chat[0]["content"], add_special_tokens=False)])
        with torch.no_grad():
            whole = reference.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0)
        said = whole[0, prompt.shape[1] :].tolist()
        (choice,) = reply["choices"]
        assert choice["message"]["content"] == tokenizer.decode(said, skip_special_tokens=True)
        assert choice["finish_reason"] == ("stop" if said[-1] == 2 else "length")
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt.shape[1], len(said))
    assert warm[0][1]["choices"][0]["message"] != warm[1][1]["choices"][0]["message"]


@pytest.mark.parametrize("num_labels", [1, 3])
async def test_a_reward_model_scores_as_transformers_does(tmp_path: Path, num_labels: int) -> None:
    model = make_tiny_classifier(tmp_path / "model", num_labels=num_labels)
    tokenizer, given = make_character_tokenizer(), texts(200)
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        wanted = np.stack([reference(torch.tensor([tokenizer.encode(t)])).logits[0].numpy() for t in given])
    async with ready(tmp_path, model, "reward") as client:
        single = await asyncio.gather(
            *(client.post("/classify", {"input": text, "use_activation": False}) for text in given[:100])
        )
        _, batch = await client.post("/classify", {"input": given[100:]})
        _, ids = await client.post("/classify", {"input": [tokenizer.encode(text) for text in given]})
        chat = [{"role": "user", "content": given[0][:10]}, {"role": "assistant", "content": given[0][10:]}]
        _, spoken = await client.post("/classify", {"messages": chat})
        _, active = await client.post("/classify", {"input": given[0], "use_activation": True})
        _, pooled = await client.post("/pooling", {"input": given[:3], "task": "classify"})
    scores = np.asarray([reply["data"][0]["probs"] for _, reply in single] + [it["probs"] for it in batch["data"]])
    scale = wanted.max() - wanted.min()
    assert np.abs(scores - wanted).max() < 1e-3 * scale
    assert np.abs(np.asarray([it["probs"] for it in ids["data"]]) - wanted).max() < 1e-3 * scale
    assert np.abs(np.asarray([it["data"] for it in pooled["data"]]) - wanted[:3]).max() < 1e-3 * scale
    assert [it["label"] for it in batch["data"]] == [f"LABEL_{best}" for best in wanted[100:].argmax(1)]
    assert batch["data"][0]["num_classes"] == num_labels
    np.testing.assert_allclose(spoken["data"][0]["probs"], wanted[0], atol=1e-3 * scale)
    first = torch.from_numpy(wanted[0])
    activated = torch.sigmoid(first) if num_labels == 1 else torch.softmax(first, -1)
    np.testing.assert_allclose(active["data"][0]["probs"], activated.numpy(), atol=1e-3)


async def test_a_process_reward_model_scores_every_token_as_transformers_does(tmp_path: Path) -> None:
    model = make_tiny_classifier(tmp_path / "model", num_labels=2, per_token=True)
    tokenizer, given = make_character_tokenizer(), texts(40)
    reference = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float32)
    async with ready(tmp_path, model, "reward") as client:
        told = await asyncio.gather(*(client.post("/tokenize", {"prompt": text}) for text in given))
        asked = [{"input": tokens["tokens"], "task": "token_classify", "use_activation": False} for _, tokens in told]
        replies = await asyncio.gather(*(client.post("/pooling", body) for body in (*asked, *asked)))
    for text, (_, reply) in zip((*given, *given), replies, strict=True):  # the second time, they are in the cache
        with torch.no_grad():
            wanted = reference(torch.tensor([tokenizer.encode(text)])).logits[0].numpy()
        scores = np.asarray(reply["data"][0]["data"])
        assert scores.shape == (len(text), 2)
        assert np.abs(scores - wanted).max() < 1e-3 * (wanted.max() - wanted.min())


@pytest.mark.long
async def test_a_pooling_engine_in_a_process_of_its_own_scores_alike_and_ends_with_its_caller(tmp_path: Path) -> None:
    """As on CUDA."""
    model, rows = make_tiny_classifier(tmp_path / "model", num_labels=2), [[10, 11, 12], [40] * 70, [99, 4]]
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    context = context_of(tmp_path, model, "reward")
    remember_strangers()
    settings = service_settings(context.config, context.config.service[0])
    engine = await VllmPoolingEngine.start(settings, seed=0, is_apart=True)
    try:
        assert living_children()
        found = await asyncio.gather(*(engine.classify(np.asarray(row, np.int32)) for row in rows))
        places = await engine.classify_tokens(np.asarray(rows[1], np.int32))
        with pytest.raises(ValueError, match=r"length|long"):
            await engine.classify(np.full(5000, 9, np.int32))
        assert (await engine.classify(np.asarray(rows[0], np.int32))).shape == (2,)
    finally:
        await engine.close()
    assert not living_children()
    with pytest.raises(EngineError, match="closed"):
        await engine.classify(np.asarray(rows[0], np.int32))
    with torch.no_grad():
        for row, scores in zip(rows, found, strict=True):
            np.testing.assert_allclose(scores, reference(torch.tensor([row])).logits[0].numpy(), atol=TOLERANCE)
    assert places.shape == (70, 2)
    np.testing.assert_allclose(places[-1], found[1], atol=TOLERANCE)


async def test_a_reward_service_refuses_a_model_without_a_head(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model")
    context = context_of(tmp_path, model, "reward")
    with pytest.raises(EngineError, match=r"architectures=\['Qwen2ForCausalLM'\]: no reward model; legal: …ForSeq"):
        await start_model(context.config, context.config.service[0], replica=0)


async def test_a_model_whose_numbers_are_not_finite_says_so(tmp_path: Path) -> None:
    model = make_tiny_classifier(tmp_path / "model")
    broken = AutoModelForSequenceClassification.from_pretrained(model)
    with torch.no_grad():
        broken.score.weight[0, 0] = torch.nan
    broken.save_pretrained(model)
    async with ready(tmp_path, model, "reward") as client:
        status, reply = await client.post("/classify", {"input": "abc"})
    assert (status, reply["error"]["code"]) == (500, "not_finite")
    assert json.loads(json.dumps(reply))


async def judged(context: RoleContext, given: list[str], **settings: Any) -> list[Judgement]:
    """Verdicts of the task reward_model, by reward workers that find the service in the run's directory."""
    known = TaskSettings(
        reward_model=RewardModelConfig(prompt_template="{start}", use_chat_template=False, **settings),
        reward_service=context.config.service[0],
        rendezvous=str(context.layout.rendezvous),
    )
    environment, tasks = {VARIABLE: known.model_dump_json()}, ["reward_model"]
    async with RewardPool(2, PATIENCE_S, preload_tasks=tasks, environment=environment, batch_size=32) as pool:
        return await asyncio.gather(
            *(pool.judge("reward_model", text[1:], json.dumps({"start": text[0]})) for text in given)
        )


@pytest.mark.starts
async def test_rewards_of_a_run_are_the_scores_that_transformers_computes(tmp_path: Path) -> None:
    model, given = make_tiny_classifier(tmp_path / "model", num_labels=3), texts(200)
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer = make_character_tokenizer()
    with torch.no_grad():
        logits = np.stack([reference(torch.tensor([tokenizer.encode(text)])).logits[0].numpy() for text in given])
    context = context_of(tmp_path, model, "reward")
    async with client_of(context):
        found = await judged(context, given, label="LABEL_2", scale=2.0, shift=1.0)
    assert {each.failure for each in found} == {""}
    worst = np.abs(np.array([each.reward for each in found]) - (2 * logits[:, 2] + 1)).max()
    assert worst < 1e-3 * 2 * (logits[:, 2].max() - logits[:, 2].min())


@pytest.mark.starts
async def test_steps_of_a_run_earn_what_transformers_computes(tmp_path: Path) -> None:
    model = make_tiny_classifier(tmp_path / "model", num_labels=2, per_token=True)
    reference = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer, draw = make_character_tokenizer(), random.Random(7)
    given = [
        "a" + "+".join("".join(draw.choices("abc123", k=9)) for _ in range(1 + number % 4)) for number in range(40)
    ]
    context = context_of(tmp_path, model, "reward")
    how = {"label": "1", "activation": "softmax", "step_separator": "+", "step_token": "=", "step_reduction": "mean"}
    async with client_of(context):
        found = await judged(context, given, **how)
    for text, each in zip(given, found, strict=True):
        ids = tokenizer.encode(text.replace("+", "=") + "=")
        with torch.no_grad():
            scores = torch.softmax(reference(torch.tensor([ids])).logits[0], -1)[:, 1].tolist()
        steps = [scores[place] for place, token in enumerate(ids) if token == tokenizer.encode("=")[0]]
        assert each.reward == pytest.approx(sum(steps) / len(steps), abs=1e-4)
        assert sum(each.rewards_at.values()) == pytest.approx(each.reward)
        assert [*each.rewards_at] == [place for place, at in enumerate(text) if at == "+"] + [len(text) - 1]
