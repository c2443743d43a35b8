"""The models of services: what each kind is asked for, and its answers.

Input: bodies of requests in the format of vLLM's HTTP API.  Output: bodies of replies.  A teacher returns
log-probabilities of given tokens (prompt_logprobs), a judge replies to chats; both have the generators' engine, with
settings of the service's own, and nothing sends it weights.  A reward model scores texts, in vLLM's pooling runner.  A
key that is not known here is refused, since what it asks for would not happen.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rlhpc.agents.openai_format import asked_limit, read_message
from rlhpc.buffer.prefixes import id_checksum
from rlhpc.config.rules import Config
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.generation.factory import engine_seed, model_number, service_settings, start_engine, start_pooling_engine
from rlhpc.models.weights import object_in
from rlhpc.protocol.contracts import GenerationEngine, PoolingEngine, RowScore
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import FinishReason, Float32, Int32, Prompt, RolloutRequest, SamplingParams
from rlhpc.transport.http_server import Refused

Score = Callable[..., Coroutine[Any, Any, Float32]]
Answer = str | Mapping[str, Any]  # JSON, as text or to be written
Route = Callable[[dict[str, Any]], Awaitable[Answer]]
LOWEST = -9999.0  # JSON has no −∞; vLLM's server writes this
MOST_INPUTS = 1024  # of a request to a reward model
MANY_ENTRIES = 20_000  # log-probabilities that are written aside, while the event loop goes on


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """Work of a model so far, and how much it does at once."""

    max_running: int  # requests that are computed at once
    num_tokens: int  # read and sampled since the start


class ServedModel(ABC):
    """A model that is ready to answer.  Routes raise Refused, and EngineError if the engine has died."""

    routes: Mapping[str, Route]  # path → what answers a POST request's body
    max_tokens: int  # of a request and its reply

    @abstractmethod
    async def compute_something(self) -> None:
        """Have the engine compute a row of a few tokens.  Raises EngineError."""

    @abstractmethod
    def load(self) -> ServiceLoad:
        """Return current figures."""

    @abstractmethod
    async def close(self) -> None:
        """End every process of the engine.  Idempotent."""


async def start_model(config: Config, service: ServiceConfig, *, replica: int) -> ServedModel:
    """Start the engine of a service; returns when it is ready.  Raises EngineError, ConfigError."""
    try:
        settings = service_settings(config, service)
        tokenizer = PromptTokenizer(settings.model.path)
        if service.kind == "judge":
            tokenizer.chat_template.render([{"role": "user", "content": "Q"}])  # else each chat would be refused
    except ConfigError as error:  # it speaks of model.path
        raise ConfigError(f"service.path of {service.name!r}: {error}") from error
    seed = engine_seed(config.run.seed, replica)
    if service.kind == "reward":
        return Classifier(await start_pooling_engine(settings, seed=seed), settings, service.name, tokenizer)
    engine = await start_engine(settings, seed=seed, make_decode=lambda: tokenizer.decode, any_stop=True)
    model = Teacher if service.kind == "teacher" else ChatModel
    return model(engine, settings, service.name, tokenizer)


# -------------------------------------------------------------------------------------------------------------- fields

_OF_CLASSIFIERS = ("input", "messages", "use_activation", "add_special_tokens", "add_generation_prompt")
# Keys that change nothing here; others than those of a route are refused unless they are null.
_IDLE = frozenset({"model", "user", "stream", "n", "seed", "metadata", "store", "service_tier", "priority", "timeout"})
_FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"n": (1,), "stream": (False,), "best_of": (1,), "echo": (False,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,),
     "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logprobs": (False,),
     "response_format": ({"type": "text"},), "detokenize": (False,), "add_special_tokens": (False,),
     "encoding_format": ("float",)}
)  # fmt: skip


def require_known(body: Mapping[str, Any], *known: str) -> None:
    """Raise Refused for a key that is not known, and for one with a value that it cannot have here."""
    for key, value in body.items():
        if value is None or key in known:
            continue
        legal = _FIXED.get(key)
        if legal is not None and any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in legal
        ):
            continue
        if legal is not None:
            said = " or ".join(json.dumps(each) for each in legal)
            raise Refused(f"{key}={json.dumps(value)[:80]}: not here; legal: {said}", code="unsupported_value")
        if key not in _IDLE:
            raise Refused(f"{key}: not known here; leave it out", code="unsupported_parameter")


def whole_number(body: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    """Return a whole number of the body, from low to high.  Raises Refused."""
    value = body.get(key)
    value = default if value is None else value
    if type(value) is not int or not low <= value <= high:
        raise Refused(f"{key}={json.dumps(value)[:80]}; legal: a whole number from {low} to {high}")
    return value


def token_row(value: object, name: str, *, vocabulary: int, longest: int) -> Int32:
    """Return a list of token ids, alone or as a batch of one, as int32 [T].  Raises Refused."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not value or not all(type(each) is int for each in value):
        raise Refused(f"{name}: a list of token ids, and not empty; one a request")
    require_room(len(value), longest, name)
    if not (min(value) >= 0 and max(value) < vocabulary):
        odd = next(each for each in value if not 0 <= each < vocabulary)
        raise Refused(f"{name}: token {odd}; legal: 0 to {vocabulary - 1}", code="unknown_token")
    return np.asarray(value, np.int32)


def require_room(num_tokens: int, longest: int, name: str) -> None:
    """Raise Refused for more tokens than fit."""
    if num_tokens > longest:
        raise Refused(f"{name}: {num_tokens} tokens; legal: {longest} at most", code="context_length_exceeded")


# ------------------------------------------------------------------------------------------------- teachers and judges


class _Sampler(ServedModel):
    """A model behind the generators' engine."""

    def __init__(self, engine: GenerationEngine, settings: Config, name: str, tokenizer: PromptTokenizer) -> None:
        self._engine, self._name, self._tokenizer = engine, name, tokenizer
        self._max_running = settings.generation.max_num_seqs
        self.max_tokens = settings.generation.max_tokens
        self._vocabulary = model_number(settings.model.path, "vocab_size") or tokenizer.vocab_size
        self._num_tokens = 0

    async def compute_something(self) -> None:
        """See ServedModel."""
        if self.max_tokens > 2:  # a row of two, and what vLLM samples behind it
            await self._engine.score(np.zeros(2, np.int32))

    def load(self) -> ServiceLoad:
        """See ServedModel."""
        return ServiceLoad(self._max_running, self._num_tokens)

    async def close(self) -> None:
        """See ServedModel."""
        await self._engine.close()

    async def _tokenize(self, body: dict[str, Any]) -> Answer:
        return tokenized(body, self._tokenizer, self.max_tokens)


class Teacher(_Sampler):
    """Returns log-probabilities of the tokens that it is sent, at temperature 1."""

    def __init__(self, engine: GenerationEngine, settings: Config, name: str, tokenizer: PromptTokenizer) -> None:
        super().__init__(engine, settings, name, tokenizer)
        self.max_tokens -= 1  # vLLM samples one token behind a row
        self.routes = {"/v1/completions": self._score, "/tokenize": self._tokenize}

    async def _score(self, body: dict[str, Any]) -> Answer:
        require_known(body, "model", "prompt", "max_tokens", "temperature", "prompt_logprobs", "top_p", "logprobs")
        whole_number(body, "max_tokens", 0, 1, 1)
        if body.get("prompt_logprobs") is None:
            raise Refused("this service is a teacher, which returns log-probabilities alone; legal: prompt_logprobs=0")
        top_k = whole_number(body, "prompt_logprobs", 0, self._vocabulary)
        row = token_row(body.get("prompt"), "prompt", vocabulary=self._vocabulary, longest=self.max_tokens)
        scores = "[null]"
        if len(row) > 1:
            score = await self._engine.score(row, top_k)
            if np.isnan(score.logprobs).any():
                raise _not_finite()
            is_large = len(row) * (1 + top_k) > MANY_ENTRIES
            scores = await asyncio.to_thread(_entries, row, score) if is_large else _entries(row, score)
        self._num_tokens += len(row)
        usage = {"prompt_tokens": len(row), "completion_tokens": 0, "total_tokens": len(row)}
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
                "model": self._name, "usage": usage}  # fmt: skip
        choice = f'{{"index":0,"text":"","logprobs":null,"finish_reason":"length","prompt_logprobs":{scores}}}'
        return f'{json.dumps(head)[:-1]},"choices":[{choice}]}}'


def _entries(row: Int32, score: RowScore) -> str:
    """Write the scores as vLLM's server does: the first token has none, others an entry each, with the likeliest."""
    own = zip(row[1:].tolist(), _finite(score.logprobs[1:]), score.ranks[1:].tolist(), strict=True)
    if score.top is None:
        return f"[null{''.join(f',{{{_entry(*each)}}}' for each in own)}]"
    best = zip(score.top.token_ids[1:].tolist(), _finite(score.top.logprobs[1:]), strict=True)
    places = []
    for (token, logprob, rank), (tokens, logprobs) in zip(own, best, strict=True):
        found = [_entry(each, its, place) for place, (each, its) in enumerate(zip(tokens, logprobs, strict=True), 1)]
        if token not in tokens:
            found.insert(0, _entry(token, logprob, rank))
        places.append(f",{{{','.join(found)}}}")
    return f"[null{''.join(places)}]"


def _entry(token: int, logprob: float, rank: int) -> str:
    return f'"{token}":{{"logprob":{logprob!r},"rank":{rank},"decoded_token":null}}'


def _finite(logprobs: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    return np.maximum(logprobs, LOWEST).tolist()


class ChatModel(_Sampler):
    """Replies to chats, each request with a temperature of its own."""

    def __init__(self, engine: GenerationEngine, settings: Config, name: str, tokenizer: PromptTokenizer) -> None:
        super().__init__(engine, settings, name, tokenizer)
        self._serial, self._is_seeded = itertools.count(), settings.has_seeded_samples
        self.routes = {"/v1/chat/completions": self._reply, "/tokenize": self._tokenize}

    async def _reply(self, body: dict[str, Any]) -> Answer:
        require_known(body, "model", "messages", "temperature", "max_tokens", "max_completion_tokens", "stop", "seed")
        tokens = chat_tokens(body, self._tokenizer, add_generation_prompt=True)
        require_room(len(tokens), self.max_tokens - 1, "messages")
        limit, room = asked_limit(body), self.max_tokens - len(tokens)
        ids, texts = self._tokenizer.ends(_stops(body))
        sampling = SamplingParams(room if limit is None else min(limit, room), _temperature(body), ids, texts)
        serial = next(self._serial)
        # A request that is seeded is answered alike by every replica, and each time.
        seed = whole_number(body, "seed", 0, 2**63 - 1, 0 if self._is_seeded else serial)
        prompt = Prompt(serial, "", tokens, "")
        rollout = await self._engine.generate(RolloutRequest(id_checksum(tokens), seed, prompt, sampling))
        if rollout.finish_reason is FinishReason.ABORT:
            raise Refused("the service is leaving; ask again", status=503, code="leaving")
        has_ended = rollout.finish_reason is FinishReason.STOP
        text = self._tokenizer.decode_completion(rollout.token_ids, has_ended=has_ended, stop_strings=texts)
        read, written = len(tokens), len(rollout.token_ids)
        self._num_tokens += read + written
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": rollout.finish_reason.value}
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [choice],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }


# ------------------------------------------------------------------------------------------------------- reward models


class Classifier(ServedModel):
    """Scores texts, token ids or chats, as a whole or in each place."""

    def __init__(self, engine: PoolingEngine, settings: Config, name: str, tokenizer: PromptTokenizer) -> None:
        self._engine, self._name, self._tokenizer = engine, name, tokenizer
        self._max_running, self.max_tokens = settings.generation.max_num_seqs, settings.generation.max_tokens
        self._vocabulary = model_number(settings.model.path, "vocab_size") or tokenizer.vocab_size
        self._labels = _labels_of(settings.model.path)
        self._num_tokens = 0
        self.routes = {"/classify": self._classify, "/pooling": self._pool, "/tokenize": self._tokenize}

    async def compute_something(self) -> None:
        """See ServedModel."""
        await self._engine.classify(np.zeros(1, np.int32))

    def load(self) -> ServiceLoad:
        """See ServedModel."""
        return ServiceLoad(self._max_running, self._num_tokens)

    async def close(self) -> None:
        """See ServedModel."""
        await self._engine.close()

    async def _classify(self, body: dict[str, Any]) -> Answer:
        require_known(body, *_OF_CLASSIFIERS)
        rows, is_activated = self._rows(body), _truth(body, "use_activation", False)
        data = []
        for index, scores in enumerate(await self._side_by_side(self._engine.classify, rows, is_activated)):
            best = int(np.argmax(scores))
            data.append(
                {"index": index, "label": self._labels.get(best, f"LABEL_{best}"), "probs": _numbers(scores),
                 "num_classes": len(scores)}
            )  # fmt: skip
        return self._reply("classify", data, rows)

    async def _pool(self, body: dict[str, Any]) -> Answer:
        require_known(body, *_OF_CLASSIFIERS, "task")
        task = body.get("task") or "token_classify"
        if task not in ("classify", "token_classify"):
            raise Refused(f"task={json.dumps(task)[:80]}; legal: classify or token_classify", code="unsupported_value")
        rows, is_activated = self._rows(body), _truth(body, "use_activation", False)
        method = self._engine.classify if task == "classify" else self._engine.classify_tokens
        scores = await self._side_by_side(method, rows, is_activated)
        data = [{"index": index, "object": "pooling", "data": _numbers(each)} for index, each in enumerate(scores)]
        return self._reply("pool", data, rows)

    async def _tokenize(self, body: dict[str, Any]) -> Answer:
        return tokenized(body, self._tokenizer, self.max_tokens)

    async def _side_by_side(self, score: Score, rows: Sequence[Int32], is_activated: bool) -> list[Float32]:
        scores = await asyncio.gather(*(score(row, use_activation=is_activated) for row in rows))
        self._num_tokens += sum(map(len, rows))
        return scores

    def _rows(self, body: Mapping[str, Any]) -> list[Int32]:
        """Return the rows of a body's messages or input: a text, token ids, or a list of either.  Raises Refused."""
        if ("input" in body) == ("messages" in body):
            raise Refused("legal: input, a text or token ids or several of them, or messages: one of both")
        if "messages" in body:
            prompted = _truth(body, "add_generation_prompt", False)
            rows = [chat_tokens(body, self._tokenizer, add_generation_prompt=prompted)]
        else:
            given, is_rendered = body["input"], not _truth(body, "add_special_tokens", True)
            is_one = isinstance(given, str) or (isinstance(given, list) and bool(given) and type(given[0]) is int)
            inputs = [given] if is_one else given
            if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_INPUTS:
                raise Refused(f"input: a text, token ids, or a list of either, of {MOST_INPUTS} at most")
            rows = [
                text_tokens(each, "input", self._tokenizer, is_rendered=is_rendered)
                if isinstance(each, str)
                else token_row(each, "input", vocabulary=self._vocabulary, longest=self.max_tokens)
                for each in inputs
            ]
        for row in rows:
            if not len(row):
                raise Refused("input: a text without a token")
            require_room(len(row), self.max_tokens, "input")
        return rows

    def _reply(self, kind: str, data: list[dict[str, Any]], rows: Sequence[Int32]) -> Answer:
        num_read = sum(map(len, rows))
        usage = {"prompt_tokens": num_read, "completion_tokens": 0, "total_tokens": num_read}
        return {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": self._name,
            "data": data,
            "usage": usage,
        }


def _numbers(scores: Float32) -> list[Any]:
    """Return scores for JSON.  Raises Refused: one is not finite."""
    if not np.isfinite(scores).all():
        raise _not_finite()
    found: list[Any] = scores.tolist()
    return found


def _not_finite() -> Refused:
    """Return the reply for numbers that no JSON holds; asking again would not help."""
    said = "the model computes numbers that are not finite, by its weights or by its device"
    return Refused(said, status=500, code="not_finite")


def _labels_of(path: Path) -> dict[int, str]:
    file = path / "config.json"
    named = (object_in(file).get("id2label") or {}) if file.is_file() else {}
    return {int(number): str(label) for number, label in named.items()}


def _truth(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{key}={json.dumps(value)[:80]}; legal: true or false")
    return default if value is None else value


# ---------------------------------------------------------------------------------------------------------------- texts


def chat_tokens(body: Mapping[str, Any], tokenizer: PromptTokenizer, *, add_generation_prompt: bool) -> Int32:
    """Return the tokens of a body's messages in the checkpoint's own chat template.  Raises Refused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: a list of at least one message")
    known = [read_message(place, message) for place, message in enumerate(messages)]
    try:
        text = tokenizer.chat_template.render(known, add_generation_prompt=add_generation_prompt)
    except ConfigError as error:
        raise Refused(str(error), code="template_refuses") from error
    return tokenizer.encode_rendered(text)


def tokenized(body: Mapping[str, Any], tokenizer: PromptTokenizer, max_tokens: int) -> Answer:
    """Return the tokens of a text or of messages, as POST /tokenize does.  Raises Refused."""
    require_known(
        body, "model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs"
    )
    if ("prompt" in body) == ("messages" in body):
        raise Refused("legal: prompt, a text, or messages: one of both")
    if "messages" in body:
        prompted = _truth(body, "add_generation_prompt", True)
        tokens = chat_tokens(body, tokenizer, add_generation_prompt=prompted)
    else:
        is_rendered = not _truth(body, "add_special_tokens", True)
        tokens = text_tokens(body["prompt"], "prompt", tokenizer, is_rendered=is_rendered)
    return {"count": len(tokens), "max_model_len": max_tokens, "tokens": tokens.tolist(), "token_strs": None}


def text_tokens(text: object, name: str, tokenizer: PromptTokenizer, *, is_rendered: bool = False) -> Int32:
    """Return the tokens of a text.  is_rendered: it spells its special tokens.  Raises Refused."""
    if not isinstance(text, str):
        raise Refused(f"{name}: a text")
    return tokenizer.encode_rendered(text) if is_rendered else tokenizer.encode(text)


def _temperature(body: Mapping[str, Any]) -> float:
    value = body.get("temperature")
    value = 1.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2:
        raise Refused(f"temperature={json.dumps(value)[:80]}; legal: 0 to 2")
    return float(value)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    found = [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise Refused("stop: a text, or a list of texts, none of them empty")
    return tuple(found)
