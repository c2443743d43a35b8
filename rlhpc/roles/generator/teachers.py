"""Ask the run's teachers about finished rollouts, while others are sampled.

    finished rollout ── the idlest replica ── POST completions ──▶ read ──▶ TeacherScores
                          ▲                                         │ no answer, or an unusable one
                          └── pause ── addresses are read again ◀───┘ until service.timeout_s

Input: the prompt and the tokens of a rollout.  Output: TeacherScores, or TeacherFailed, which is a verifier's error.
The request is that of vLLM's server: the log-probabilities of a prompt that holds prompt and completion.
Guarantees: a reply counts only if it names the model that was asked, and has a finite number for each token of the
completion.  Patience counts seconds in which this process was running: its own pause is not the teacher's silence.
Requests outlive sessions with controllers; a rollout that is given up takes its request with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
import numpy as np

from rlhpc.config.rules import Config
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import Int32, Prompt, Rollout, TeacherScores
from rlhpc.rewards.outcomes import INVALID, OF_TEACHERS, REFUSED, TEACHER_FIGURES, TEACHER_PREFIX, UNANSWERED
from rlhpc.rewards.service_client import ModelServer, Unusable, places_of, retry_after

log = logging.getLogger("rlhpc.generator")
Result = TypeVar("Result")

KNOWN_S = 5.0  # addresses are read again after so long: a process may have restarted elsewhere
LONGEST_LOOK_S = 1.0  # between two looks at a request under way
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # after an attempt without an answer; doubles
HANGS_AFTER = 0.25  # of the patience: a replica that is silent for so long, while another one answers
CONNECT_S = 30.0
TOLD_EVERY_S = 60.0  # that it does not answer, in the log
MOST_CONNECTIONS = 256  # of a generator; further requests wait for one
BYTES_PER_ENTRY = 1000  # of a reply, at most, for a token and its log-probability
READ_TOKENS = 1024  # of a reply are read before other tasks have their turn
MOST_LOGPROB = 1e-3  # rounding may lift a logarithm of 1 above 0
SHOWN_CHARACTERS = 160
_LASTING = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
_IS_AWAY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
# From a service of the run: it has restarted with another key, or its port is another's.
_FOREIGN = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


class TeacherFailed(Exception):
    """No answer of a teacher: no statement about the rollout."""

    def __init__(self, service: ServiceConfig, why: str, kind: str) -> None:
        """kind: UNANSWERED, REFUSED, INVALID."""
        super().__init__(f"service {service.name!r}: {why}")
        self.failure = OF_TEACHERS + kind


# ---------------------------------------------------------------------------------------------------------------- reply


class _Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    model: str = ""


_REPLY = msgspec.json.Decoder(_Reply)
_ENTRY = msgspec.json.Decoder(dict[int, _Logprob])


@dataclass(frozen=True, slots=True)
class _Question:
    """The row that a teacher is asked about."""

    prompt_ids: Int32
    completion_ids: Int32
    num_top: int

    def body(self, model: str) -> bytes:
        """JSON of the request."""
        row = [*self.prompt_ids.tolist(), *self.completion_ids.tolist()]
        return msgspec.json.encode(
            {"model": model, "prompt": row, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self.num_top}
        )

    @property
    def most_bytes(self) -> int:
        """Most bytes of a sound reply."""
        num_tokens = len(self.prompt_ids) + len(self.completion_ids)
        return (1 << 20) + BYTES_PER_ENTRY * num_tokens * (1 + self.num_top)

    async def read(self, content: bytes, is_model: Callable[[str], bool]) -> TeacherScores:
        """Return the scores in a reply.  Raises Unusable."""
        entries, num_tokens = self._entries(content, is_model), len(self.completion_ids)
        logprobs = np.empty(num_tokens, np.float32)
        top_ids = np.empty((num_tokens, self.num_top), np.int32)
        top_logprobs = np.empty((num_tokens, self.num_top), np.float32)
        for place, token_id in enumerate(self.completion_ids.tolist()):
            if place % READ_TOKENS == READ_TOKENS - 1:
                await asyncio.sleep(0)
            try:
                entry = _ENTRY.decode(entries[place])
                logprobs[place] = entry[token_id].logprob
            except msgspec.DecodeError as error:
                raise Unusable(f"token {place} of the completion: {error}") from error
            except KeyError as error:
                raise Unusable(f"token {place} of the completion is {error}, which the reply lacks there") from error
            if self.num_top:
                likely = sorted(entry.items(), key=_likeliest_first)[: self.num_top]
                if len(likely) < self.num_top:
                    few = f"{len(likely)} tokens in place of algorithm.teacher_top_k={self.num_top}"
                    raise Unusable(f"{few} at token {place} of the completion", is_final=True)
                top_ids[place] = [each for each, _ in likely]
                top_logprobs[place] = [each.logprob for _, each in likely]
        scores = TeacherScores(logprobs, top_ids.reshape(-1), top_logprobs.reshape(-1))
        if fault := scores.fault(num_tokens):
            raise Unusable(fault)
        if max(logprobs.max(initial=0.0), top_logprobs.max(initial=0.0)) > MOST_LOGPROB:
            raise Unusable("a log-probability above 0")
        return scores

    def _entries(self, content: bytes, is_model: Callable[[str], bool]) -> list[msgspec.Raw]:
        """Return the entries of the completion's tokens, not decoded.  Raises Unusable."""
        try:
            reply = _REPLY.decode(content)
        except msgspec.DecodeError as error:  # of the form, too; a NaN is no JSON
            raise Unusable(f"no completion: {error}: {content[:SHOWN_CHARACTERS]!r}") from error
        if not is_model(reply.model):
            raise Unusable(f"a reply of the model {reply.model!r}, which was not asked")
        entries = reply.choices[0].prompt_logprobs if reply.choices else None
        num_before, num_tokens = len(self.prompt_ids), len(self.completion_ids)
        if entries is None or len(entries) != num_before + num_tokens:
            found = "no" if entries is None else len(entries)
            raise Unusable(f"{found} log-probabilities for {num_before + num_tokens} tokens")
        return entries[num_before:]


def _likeliest_first(item: tuple[int, _Logprob]) -> tuple[float, float]:
    """Sorting key of an entry; a rank counts before a log-probability, of which two may be equal."""
    _, found = item
    return (math.inf if found.rank is None else found.rank, -found.logprob)


# ------------------------------------------------------------------------------------------------------------- patience


class _Patience:
    """The seconds that a request may still take, of those in which this process is running."""

    def __init__(self, limit_s: float) -> None:
        self._now = asyncio.get_running_loop().time
        self.limit_s, self.passed_s = limit_s, 0.0
        self.look_s = min(LONGEST_LOOK_S, limit_s / 20)

    @property
    def is_over(self) -> bool:
        """True if no time is left."""
        return self.passed_s >= self.limit_s

    async def wait(self, task: asyncio.Future[Any], seconds: float) -> None:
        """Wait until a task is done, or for so long; a wait that lasts twice as long counts as a pause."""
        before = self._now()
        await asyncio.wait((task,), timeout=seconds)
        self.passed_s += min(self._now() - before, 2 * seconds)

    async def pause(self, seconds: float, is_enough: Callable[[], bool]) -> None:
        """Sleep for so long, or until it is enough, or the patience is over."""
        end = self.passed_s + seconds
        nothing = asyncio.get_running_loop().create_future()
        while not self.is_over and self.passed_s < end and not is_enough():
            await self.wait(nothing, min(self.look_s, end - self.passed_s))


# -------------------------------------------------------------------------------------------------------------- teacher


class _Teacher:
    """A service that is asked, and what is known of its replicas."""

    def __init__(self, service: ServiceConfig, rendezvous: Path, max_unusable: int) -> None:
        """max_unusable: replies to a rollout, at most, that are of no use.  Raises RoleFailed: there is no key."""
        self.service, self._max_unusable = service, max_unusable
        try:
            self._places = places_of(service, str(rendezvous))
        except ValueError as error:
            raise RoleFailed(str(error)) from error
        self._now = asyncio.get_running_loop().time
        self._known: list[ModelServer] = []
        self._known_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._asked: Counter[str] = Counter()  # requests under way, by url
        self._answered_at: dict[str, float] = {}  # by url
        self._listed: dict[str, dict[str, str]] = {}  # url → name of a model → what it is made from
        self._is_away, self._told_at = False, -math.inf
        self.figures = dict.fromkeys(TEACHER_FIGURES, 0.0)

    async def ask(self, http: aiohttp.ClientSession, question: _Question) -> TeacherScores:
        """Return what the teacher says.  Raises TeacherFailed once its patience is over, or another try is useless."""
        patience = _Patience(self.service.timeout_s)
        self.figures["waiting"] += 1
        try:
            return await self._answer(http, question, patience)
        except TeacherFailed:
            self.figures["failed"] += 1
            raise
        finally:
            self.figures["waiting"] -= 1

    async def _answer(self, http: aiohttp.ClientSession, question: _Question, patience: _Patience) -> TeacherScores:
        pause_s, num_unusable, tried = FIRST_PAUSE_S, 0, Counter[str]()
        while True:
            try:
                scores = await self._attempt(http, question, patience, tried)
            except Unusable as failure:
                num_unusable += not failure.is_away
                self._look_again(str(failure) if failure.is_away else "")
                if failure.is_final:
                    raise TeacherFailed(self.service, str(failure), REFUSED) from failure
                if num_unusable >= self._max_unusable:
                    raise TeacherFailed(self.service, str(failure), INVALID) from failure
                wait_s = failure.wait_s if failure.wait_s is not None else pause_s * random.uniform(0.5, 1.0)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                await patience.pause(wait_s, partial(self._is_there_another_than, self._known))
                if patience.is_over:
                    over = f"{failure}; the {self.service.timeout_s:g} s of service.timeout_s are over"
                    raise TeacherFailed(self.service, over, UNANSWERED) from failure
                self.figures["retries"] += 1
            else:
                if self._is_away:
                    self._is_away = False
                    log.info("service %r answers", self.service.name)
                return scores

    async def _attempt(
        self, http: aiohttp.ClientSession, question: _Question, patience: _Patience, tried: Counter[str]
    ) -> TeacherScores:
        """Ask the idlest of the places that were tried least.  Raises Unusable."""
        known = self._now_known()
        if not known and self._looking is not None:
            await patience.wait(self._looking, patience.look_s)
            known = self._known
        if not known:
            raise Unusable("no process of it has an address", is_away=True)
        place = min(known, key=lambda each: (tried[each.url], self._asked[each.url], random.random()))
        tried[place.url] += 1
        self._asked[place.url] += 1
        began = self._now()
        try:
            scores = await self._unless_gone(place, patience, self._exchange(http, place, question))
        finally:
            self._asked[place.url] -= 1
        self.figures["answered"] += 1
        self.figures["seconds"] += self._now() - began
        return scores

    async def _unless_gone(
        self, place: ModelServer, patience: _Patience, exchange: Coroutine[Any, Any, Result]
    ) -> Result:
        """Return the result of an exchange with a place.  Raises Unusable if the place is gone, hangs, or is too slow.

        A process on a lost node closes no connection: that it is gone says its address, or a silence while another
        replica answers.
        """
        task, began, passed_s = asyncio.create_task(exchange), self._now(), patience.passed_s
        try:
            while not task.done():
                await patience.wait(task, patience.look_s)
                if task.done():
                    break
                if patience.is_over:
                    raise Unusable("no answer", is_away=True)
                if place not in self._now_known() and self._known_at > began:
                    raise Unusable(f"the process at {place.url} is gone", is_away=True)
                is_silent = patience.passed_s - passed_s > HANGS_AFTER * patience.limit_s
                is_silent = is_silent and self._answered_at.get(place.url, -math.inf) < began
                if is_silent and any(at > began for url, at in self._answered_at.items() if url != place.url):
                    raise Unusable(f"no answer from {place.url}, while another process answers", is_away=True)
            return task.result()
        finally:
            task.cancel()  # closes its connection, by which the server gives the request up
            with suppress(asyncio.CancelledError, Unusable):
                await task

    async def _exchange(self, http: aiohttp.ClientSession, place: ModelServer, question: _Question) -> TeacherScores:
        models = {} if place.model and not self.service.url else await self._models_at(http, place)
        model = place.model or next(iter(models), "")

        def is_model(name: str) -> bool:
            return name == model or (name in models and models[name] == models.get(model))

        url = f"{place.url.rstrip('/')}/completions"
        content = await self._sent(http, place, url, question.body(model), question.most_bytes)
        scores = await question.read(content, is_model)
        self._answered_at[place.url] = self._now()
        return scores

    async def _models_at(self, http: aiohttp.ClientSession, place: ModelServer) -> dict[str, str]:
        """Return the models that a server lists, and what each is made from: one may have several names."""
        if place.url not in self._listed:
            content = await self._sent(http, place, f"{place.url.rstrip('/')}/models", None, 1 << 20)
            try:
                cards = msgspec.json.decode(content)["data"]
                found = {str(each["id"]): str(each.get("root") or each["id"]) for each in cards}
            except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
                raise Unusable(f"{place.url}/models lists no model; legal: its name in service.model") from error
            self._listed[place.url] = found
        return self._listed[place.url]

    async def _sent(
        self, http: aiohttp.ClientSession, place: ModelServer, url: str, body: bytes | None, most_bytes: int
    ) -> bytes:
        """Return the content with which a server replies; body: None for GET.  Raises Unusable."""
        proxy = _proxy_to(url) if self.service.url else None  # between processes of a run there is none
        try:
            async with http.request(
                "GET" if body is None else "POST",
                url,
                data=body,
                headers=place.headers,
                proxy=proxy,
                allow_redirects=False,
            ) as reply:
                content = bytearray()
                async for piece in reply.content.iter_chunked(1 << 18):
                    content += piece
                    if len(content) > most_bytes:
                        raise Unusable(f"a reply of more than {most_bytes} bytes")
                if reply.status != HTTPStatus.OK:
                    raise self._refusal(reply.status, bytes(content), reply.headers.get("Retry-After"))
                return bytes(content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:  # refused, reset, half a reply
            raise Unusable(f"{place.url}: {type(error).__name__}: {error}", is_away=True) from error
        except ValueError as error:  # an address that is none
            raise Unusable(f"{place.url}: {error}", is_final=bool(self.service.url), is_away=True) from error

    def _refusal(self, status: int, content: bytes, wait: str | None) -> Unusable:
        """wait: the header Retry-After."""
        is_foreign = not self.service.url and status in _FOREIGN
        is_away = status in _IS_AWAY or status >= HTTPStatus.INTERNAL_SERVER_ERROR or is_foreign
        said = content[:SHOWN_CHARACTERS].decode(errors="replace")
        return Unusable(f"status {status}: {said}", is_final=not is_away, is_away=is_away, wait_s=retry_after(wait))

    # ---------------------------------------------------------------------------------------------------------- places

    def _look_again(self, why: str) -> None:
        """Read the addresses again soon; why: nobody has answered, "" if somebody has."""
        self._known_at = -math.inf
        self._is_away = self._is_away or bool(why)
        if why and self._now() - self._told_at > TOLD_EVERY_S:
            self._told_at = self._now()
            text = "service %r: %s; waiting for it, for up to service.timeout_s=%g"
            log.warning(text, self.service.name, why, self.service.timeout_s)

    def _is_there_another_than(self, before: Sequence[ModelServer]) -> bool:
        """Whether a process has come since."""
        return any(place not in before for place in self._now_known())

    def _now_known(self) -> list[ModelServer]:
        """Return the known places; read them again in a thread if they were read long ago."""
        is_looking = self._looking is not None and not self._looking.done()
        if not is_looking and self._now() - self._known_at > KNOWN_S:
            self._looking = asyncio.create_task(self._look())
        return self._known

    async def _look(self) -> None:
        began = self._now()
        known = await asyncio.to_thread(self._places)
        self._known, self._known_at = known, began

    async def close(self) -> None:
        """End a look at the addresses.  Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))


def _proxy_to(url: str) -> str | None:
    """The proxy that the environment names for an address; None: none."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


# ------------------------------------------------------------------------------------------------------------- teachers


class Teachers:
    """The teachers of a run, as a generator asks them."""

    def __init__(self, config: Config, rendezvous: Path) -> None:
        """rendezvous: directory of addresses of the run's services.  Opens no connection yet."""
        self._config, self._rendezvous = config, rendezvous
        algorithm = config.algorithm
        self._num_top = algorithm.teacher_top_k if algorithm.forward_kl_coefficient > 0 else 0
        self._teachers: dict[str, _Teacher] = {}
        self._http: aiohttp.ClientSession | None = None

    def are_asked(self, prompt: Prompt) -> bool:
        """Whether the prompt has a teacher."""
        return self._config.teacher_of(prompt.prompt_id) is not None

    async def scores(self, prompt: Prompt, rollout: Rollout) -> TeacherScores:
        """Return what the teacher of a prompt says of a completion, of each of its rows by itself.

        Raises TeacherFailed; RoleFailed without a key.
        """
        service = self._config.teacher_of(prompt.prompt_id)
        assert service is not None, "are_asked"
        if service.name not in self._teachers:
            max_unusable = self._config.rewards.max_attempts
            self._teachers[service.name] = _Teacher(service, self._rendezvous, max_unusable)
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        teacher, http = self._teachers[service.name], self._http
        questions = [_Question(prompt.token_ids, rollout.token_ids[row], self._num_top) for row in rollout.rows]
        asking = [asyncio.ensure_future(teacher.ask(http, question)) for question in questions]
        try:
            found = await asyncio.gather(*asking)
        finally:  # of the others, if one has failed
            for each in asking:
                each.cancel()
        if len(found) == 1:
            return found[0]
        return TeacherScores(
            np.concatenate([each.logprobs for each in found]),
            np.concatenate([each.flat_top_ids for each in found]),
            np.concatenate([each.flat_top_logprobs for each in found]),
        )

    def as_metrics(self) -> dict[str, float]:
        """Figures for a heartbeat, by "teacher:KIND:SERVICE"; kinds: TEACHER_FIGURES."""
        figures: dict[str, float] = {}
        for name, teacher in self._teachers.items():
            figures |= {f"{TEACHER_PREFIX}{kind}:{name}": teacher.figures[kind] for kind in TEACHER_FIGURES}
        return figures

    async def close(self) -> None:
        """Close all connections.  Idempotent."""
        for teacher in self._teachers.values():
            await teacher.close()
        if self._http is not None:
            await self._http.close()
