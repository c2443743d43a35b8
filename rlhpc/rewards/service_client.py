"""Ask a model over HTTP, with retries within a limit: judges at an endpoint, and services of the run.

Input: a path and a JSON body.  Output: what its caller reads from the JSON reply, with costs; ServiceFailed if there is
none.  Blocks; threads may share a client.  The standard library only; a redirect is not followed, since that would pass
the key on.

    ask ── the place tried least ── POST ──▶ read ──▶ the answer
     ▲                               │         └ unusable: again, up to `attempts` times
     └── addresses are read again ◀──┴ no answer: again, as long as patience with the service lasts

A service restarts in minutes.  Requests wait for it, all of them together for timeout_s: one that comes when it has
been away for so long already gets one attempt, so that a queue behind a dead service ends soon after the first error.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import stat
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

from rlhpc.config.tables_models import ServiceConfig
from rlhpc.rewards.outcomes import NoVerdict
from rlhpc.transport.service_address import addresses_of

log = logging.getLogger("rlhpc.rewards")
Answer = TypeVar("Answer")

_MOST_BYTES = 4 << 20  # of a reply
_WORTH_ANOTHER_TRY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_IS_AWAY = (429, 502, 503, 504, 529)  # a service that answers so works later: it counts as one that does not answer
_FOREIGN_KEY = (401,)  # from a service of the run: it has restarted with another key, or its port is another's
_SHOWN_REPLY_CHARACTERS = 160
LONGEST_PAUSE_S = 5.0  # between two looks for a service
KNOWN_S = 30.0  # addresses are read again after so long, since there may be more replicas


# --------------------------------------------------------------------------------------------------------------- places


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A server of a model."""

    url: str  # such as "http://node7:8000/v1"
    model: str  # its name in requests; "": the first that the server lists
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request to it."""
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, slots=True)
class AskingLimits:
    """Time and attempts for an answer, with the names that messages give them."""

    name: str  # of whom it asks: "judge at http://node7:8000/v1", "service 'strict'"
    key: str  # of the limit: "judge.timeout_s"
    timeout_s: float
    attempts: int  # of them, those that were answered only, if it waits
    backoff_s: float
    waits: bool = False  # for a service that may restart
    rate: str = ""  # the setting of requests_per_s, in messages


def patience_with(service: ServiceConfig, attempts: int = 4, backoff_s: float = 0.5) -> AskingLimits:
    """Patience with a service: restarts are waited for."""
    return AskingLimits(f"service {service.name!r}", "service.timeout_s", service.timeout_s, attempts, backoff_s, True)


def places_of(service: ServiceConfig, rendezvous: str) -> Callable[[], list[ModelServer]]:
    """Return a function that lists where a service answers now: its url, or addresses in the rendezvous directory.

    Raises ValueError if the key of a url is missing, or others may read it, and for a service of a run without one.
    """
    if service.url:
        key = read_key(service.key_variable, service.key_file, f"service {service.name!r}: ")
        place = ModelServer(service.url, service.model, key)
        return lambda: [place]
    if not rendezvous:
        raise ValueError(
            f"service {service.name!r} with service.path is started by a run, and there is none here; legal: a "
            "service.url of a server that runs"
        )
    directory = Path(rendezvous)
    return lambda: [
        ModelServer(each.url, each.model, each.key)
        for each in addresses_of(directory, service.name)
        if each.url.startswith("http://")
    ]


def read_key(key_variable: str, key_file: str, place: str = "") -> str:
    """The key that a variable or a file holds; "" for none.  place: of the two settings, such as "judge.".

    Raises ValueError if it is missing, or readable for others than its owner.
    """
    if key_variable:
        if not (key := os.environ.get(key_variable, "").strip()):
            raise ValueError(f"{place}key_variable={key_variable!r} is not set in the environment of the service")
        return key
    if not key_file:
        return ""
    try:
        with Path(key_file).open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{place}key_file={key_file!r} cannot be read: {error}") from error
    if mode & 0o077:
        raise ValueError(f"{place}key_file={key_file!r} has mode {mode:04o}; legal: 0600 (chmod 600)")
    if not key:
        raise ValueError(f"{place}key_file={key_file!r} is empty; legal: a key")
    return key


# --------------------------------------------------------------------------------------------------------------- client


class ServiceFailed(NoVerdict):
    """No answer: no statement about the completion."""


class Unusable(Exception):
    """One attempt has failed."""

    def __init__(self, why: str, *, is_final: bool = False, is_away: bool = False, wait_s: float | None = None) -> None:
        """is_final: no other attempt would help.  is_away: nobody answered.  wait_s: wait that was asked for."""
        super().__init__(why)
        self.is_final, self.is_away, self.wait_s = is_final, is_away, wait_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any, **_settings: Any) -> None:
        return None


@dataclass
class ServiceClient:
    """One worker's connection to a model, its share of the rate, and its clock."""

    patience: AskingLimits
    places: Callable[[], Sequence[ModelServer]]
    is_of_run: bool = False  # addresses and keys change with every restart, and no proxy is between
    requests_per_s: float = 0.0  # of this worker; 0: no limit
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _next_at: float = field(default=0.0, init=False)
    _known: list[ModelServer] = field(default_factory=list, init=False)
    _known_until: float = field(default=-math.inf, init=False)
    _asked: Counter[str] = field(default_factory=Counter, init=False)  # requests in flight, by url
    _models: dict[str, str] = field(default_factory=dict, init=False)  # by url, of servers that were asked for it
    _away: tuple[float, float] | None = field(default=None, init=False)  # first and last attempt that nobody answered

    def __post_init__(self) -> None:
        """Open no connection yet."""
        proxies = [urllib.request.ProxyHandler({})] if self.is_of_run else []
        self._opener = urllib.request.build_opener(_NoRedirect, *proxies)

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], Answer],
        costs: dict[str, float],
        until: float | None = None,
    ) -> Answer:
        """Return what `read` makes of the first usable reply; adds to costs.

        path: "chat/completions" below the base URL, "/classify" below the server's root.  body: without the model.
        read: gets the JSON document and raises Unusable.  until: end by the clock; None: timeout_s from now.
        Raises ServiceFailed, at the end at the latest.
        """
        patience = self.patience
        end = self.clock() + patience.timeout_s if until is None else until
        wait_s, why, num_failed, tried = patience.backoff_s, "", 0, Counter[str]()
        while num_failed < patience.attempts:
            if not self._has_turn(end):
                late = f"its turn by {patience.rate} comes after the limit of {self._limit}"
                why += f"{'; ' if why else ''}{late}"
                break
            if tried:
                _add(costs, "judge_retries", 1)
            began = self.clock()
            try:
                answer = self._ask_once(path, body, read, costs, end, tried)
            except Unusable as failure:
                why = str(failure)
                is_away = failure.is_away and patience.waits
                self._note(began if is_away else None, why)
                if failure.is_final:
                    break
                num_failed += not is_away
                pause = failure.wait_s if failure.wait_s is not None else wait_s * random.uniform(0.5, 1.0)
                wait_s = min(2 * wait_s, LONGEST_PAUSE_S) if patience.waits else 2 * wait_s
                if self.clock() + pause >= min(end, self._patient_until if is_away else math.inf):
                    why += f"; the {patience.timeout_s:g} s of {patience.key} are over"
                    break
                if num_failed < patience.attempts:
                    self.sleep(pause)
            else:
                self._note(None, "")
                return answer
        raise ServiceFailed(f"{patience.name}: {why}", costs)

    @property
    def _limit(self) -> str:
        return f"{self.patience.key}={self.patience.timeout_s:g}"

    @property
    def _patient_until(self) -> float:
        """End of the patience with a service that is away."""
        with self._lock:
            return math.inf if self._away is None else self._away[0] + self.patience.timeout_s

    def _note(self, began: float | None, why: str) -> None:
        """Note an attempt that nobody answered and when it began; None: there was an answer."""
        with self._lock:
            before, self._known_until = self._away, -math.inf if why else self._known_until
            if began is None:
                self._away = None
                return
            # An absence is one as long as somebody asks: what was long ago says nothing about a service that is.
            is_same = before is not None and began - before[1] <= self.patience.timeout_s
            self._away = (before[0] if before is not None and is_same else began, self.clock())
        if not is_same:
            log.warning("%s: %s; waiting for it, for up to %s", self.patience.name, why, self._limit)

    def _ask_once(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], Answer],
        costs: dict[str, float],
        end: float,
        tried: Counter[str],
    ) -> Answer:
        place = self._choose(tried)
        tried[place.url] += 1
        began = self.clock()
        # Half of the limit, so that time is left for another replica if this one hangs.
        timeout_s = max(0.05, min(end - began, self.patience.timeout_s / 2 if self.patience.waits else math.inf))
        self._count(place, +1)
        _add(costs, "judge_requests", 1)
        try:
            model = place.model or self._model_at(place, timeout_s)
            document = self._sent(place, path, {"model": model, **body}, timeout_s)
        finally:
            self._count(place, -1)
            _add(costs, "judge_s", self.clock() - began)
        usage = document.get("usage") if isinstance(document, dict) else None
        for name in ("prompt_tokens", "completion_tokens"):
            _add(costs, f"judge_{name}", _number_of_tokens(usage, name))
        try:
            return read(document)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
            shown = json.dumps(document)[:_SHOWN_REPLY_CHARACTERS]
            raise Unusable(f"no answer in the reply: {type(error).__name__}: {error}: {shown!r}") from error

    def _choose(self, tried: Counter[str]) -> ModelServer:
        """Return the place that this request has tried least, then the one with the fewest requests of this client."""
        with self._lock:
            now = self.clock()
            if not self._known or now >= self._known_until:
                self._known, self._known_until = [*self.places()], now + KNOWN_S
            if not self._known:
                tried[""] += 1
                raise Unusable("no process of it has an address", is_away=True)
            return min(self._known, key=lambda each: (tried[each.url], self._asked[each.url], random.random()))

    def _count(self, place: ModelServer, change: int) -> None:
        with self._lock:
            self._asked[place.url] += change

    def _model_at(self, place: ModelServer, timeout_s: float) -> str:
        """Return the first model that a server lists."""
        if place.url not in self._models:
            document = self._sent(place, "models", None, timeout_s)
            try:
                self._models[place.url] = str(document["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise Unusable(f"{place.url}/models lists no model; legal: its name in service.model") from error
        return self._models[place.url]

    def _sent(self, place: ModelServer, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """Return the JSON document with which a server replies; body: None for GET.  Raises Unusable."""
        base = place.url.rstrip("/")
        url = f"{base.removesuffix('/v1')}{path}" if path.startswith("/") else f"{base}/{path}"
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), place.headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as reply:
                content = _read(reply, self.clock, self.clock() + timeout_s)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except (OSError, HTTPException) as error:  # refused, reset, timed out, half a reply
            raise Unusable(f"{type(error).__name__}: {error}", is_away=True) from error
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise Unusable(f"a reply that is no JSON: {content[:_SHOWN_REPLY_CHARACTERS]!r}") from error

    def _refused(self, error: urllib.error.HTTPError) -> Unusable:
        is_foreign = self.is_of_run and error.code in _FOREIGN_KEY
        return Unusable(
            f"status {error.code}: {_beginning_of(error)}",
            is_final=error.code not in _WORTH_ANOTHER_TRY and not is_foreign,
            is_away=error.code in _IS_AWAY or is_foreign,
            wait_s=retry_after(error.headers.get("Retry-After")),
        )

    def _has_turn(self, end: float) -> bool:
        """Wait for this worker's next slot of the rate; False at once, without using it, if it comes too late."""
        if self.requests_per_s > 0:
            with self._lock:
                now = self.clock()
                begin = max(now, self._next_at)
                if begin >= end:
                    return False
                self._next_at = begin + 1 / self.requests_per_s
            if begin > now:
                self.sleep(begin - now)
        return True


def _add(costs: dict[str, float], name: str, amount: float) -> None:
    costs[name] = costs.get(name, 0.0) + amount


def _number_of_tokens(usage: object, name: str) -> float:
    """Return a count of a reply's usage; 0 if it has none, since no verdict depends on it."""
    value = usage.get(name) if isinstance(usage, dict) else 0
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MOST_BYTES else 0.0


def _read(reply: Any, clock: Callable[[], float], end: float) -> bytes:
    """The body, within the deadline: a socket's own limit is per piece, so that a slow trickle would never reach it."""
    found = b""
    while piece := reply.read1(1 << 16):
        found += piece
        if len(found) > _MOST_BYTES:
            raise Unusable(f"a reply of more than {_MOST_BYTES} bytes")
        if clock() > end:
            raise Unusable("the reply did not end in time", is_away=True)
    return found


def _beginning_of(error: urllib.error.HTTPError) -> str:
    """Beginning of an error's body, its first piece; "" if none comes: the status is enough."""
    with error, suppress(OSError, HTTPException):
        return bytes(error.read1(_SHOWN_REPLY_CHARACTERS)).decode(errors="replace")
    return ""


def retry_after(header: str | None) -> float | None:
    """Seconds to wait; None without a header, or if it is no number: a date, or NaN."""
    try:
        wait_s = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return None if math.isnan(wait_s) else max(0.0, wait_s)


# ------------------------------------------------------------------------------------------------------------ templates
#
# Texts with {fields} of the record, and with more that the task fills in.

REFERENCE = "reference"


def parsed_template(key: str, template: str) -> frozenset[str]:
    """Return the names of a template's fields; key: the setting, in messages.  Raises ValueError if it is illegal."""
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{key}: {error}; a literal brace is doubled") from error
    for _, name, style, conversion in parts:
        if not str(name).isidentifier() or style or conversion:
            raise ValueError(f"{key}: {{{name}}} is not the plain name of a field; a literal brace is doubled")
    return frozenset(str(name) for _, name, _, _ in parts)


def fields_for(key: str, names: frozenset[str], reference: str, given: Sequence[str] = ()) -> dict[str, str]:
    """Return the values of a template's fields, from a record or, where {reference} is all it names, from a text.

    key: the setting, in messages.  given: further legal names.  Raises ValueError for a field that the record lacks.
    """
    if names <= {REFERENCE}:
        return {REFERENCE: reference}
    try:
        record = json.loads(reference)
    except ValueError:
        record = None
    has: Mapping[str, object] = record if isinstance(record, dict) else {REFERENCE: reference}
    for name in sorted(names):
        if has.get(name) is None:
            raise ValueError(
                f"{key} names {{{name}}}; legal: {', '.join([*given, *has])}, and with "
                'data.reference_field = "*" the fields of the record'
            )
    return {name: value if isinstance(value := has[name], str) else json.dumps(value) for name in names}
