"""Query an OpenAI-compatible endpoint, with retries where they may help, within the allowed rate.

Input: messages.  Output: the text of a reply, with its tokens; JudgeFailed if there is none.  Blocks: a reward worker
judges one completion at a time.  The standard library only; a redirect is not followed, since that would pass the key
on.
"""

from __future__ import annotations

import json
import os
import random
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rlhpc.config_judge import JudgeConfig

Messages = Sequence[dict[str, str]]
_MOST_BYTES = 4 << 20  # of a reply
_WORTH_ANOTHER_TRY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_SHOWN_CHARACTERS = 160


class JudgeFailed(Exception):
    """No grade: says nothing about the completion.  costs: what was spent nevertheless."""

    def __init__(self, why: str, costs: dict[str, float]) -> None:
        """costs: figures by name, as failures.COSTS has them."""
        super().__init__(why)
        self.costs = costs


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reply says."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cut: bool = False  # at judge.max_tokens


class _Unusable(Exception):
    """One attempt has failed.  wait_s: what the endpoint asks for; None: nothing."""

    def __init__(self, why: str, *, is_final: bool = False, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.is_final, self.wait_s = is_final, wait_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any, **_settings: Any) -> None:
        return None


@dataclass
class Endpoint:
    """One worker's connection, its share of the rate, and its clock."""

    settings: JudgeConfig
    requests_per_s: float = 0.0  # of this worker; 0: no limit
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _next_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Read the key.  Raises ValueError if it is not there, or others may read it."""
        self._key = read_key(self.settings)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(self, messages: Messages, usable: Callable[[str], bool], costs: dict[str, float]) -> Answer:
        """Return the first reply that is usable; adds to costs.  Raises JudgeFailed, after timeout_s at the latest."""
        judge, end = self.settings, self.clock() + self.settings.timeout_s
        wait_s, why = judge.backoff_s, ""
        for attempt in range(judge.attempts):
            if not self._has_turn(end):
                late = f"its turn by judge.requests_per_s={judge.requests_per_s:g} comes after the limit"
                why += f"{'; ' if why else ''}{late} of judge.timeout_s={judge.timeout_s:g}"
                break
            if attempt:
                costs["judge_retries"] = costs.get("judge_retries", 0.0) + 1
            try:
                return self._ask_once(messages, usable, costs, end - self.clock())
            except _Unusable as failure:
                why = str(failure)
                if failure.is_final:
                    break
                pause = failure.wait_s if failure.wait_s is not None else wait_s * random.uniform(0.5, 1.0)
                wait_s *= 2
                if self.clock() + pause >= end:
                    why += f"; the {judge.timeout_s:g} s of judge.timeout_s are over"
                    break
                if attempt + 1 < judge.attempts:
                    self.sleep(pause)
        raise JudgeFailed(f"judge at {judge.endpoint}: {why}", costs)

    def _ask_once(
        self, messages: Messages, usable: Callable[[str], bool], costs: dict[str, float], timeout_s: float
    ) -> Answer:
        began = self.clock()
        costs["judge_requests"] = costs.get("judge_requests", 0.0) + 1
        try:
            answer = self._post(messages, max(0.05, timeout_s))
        finally:
            costs["judge_s"] = costs.get("judge_s", 0.0) + self.clock() - began
        costs["judge_prompt_tokens"] = costs.get("judge_prompt_tokens", 0.0) + answer.prompt_tokens
        costs["judge_completion_tokens"] = costs.get("judge_completion_tokens", 0.0) + answer.completion_tokens
        if answer.is_cut:  # its grade was to come; one before may be quoted from what is judged, or half a number
            cut = f"the reply was cut off at judge.max_tokens={self.settings.max_tokens}; legal: more"
            raise _Unusable(f"{cut}: {answer.text[-_SHOWN_CHARACTERS:]!r}")
        if not usable(answer.text):
            raise _Unusable(f"no grade in the reply {answer.text[-_SHOWN_CHARACTERS:]!r}")
        return answer

    def _post(self, messages: Messages, timeout_s: float) -> Answer:
        judge = self.settings
        body = {"model": judge.model, "messages": [*messages], "temperature": judge.temperature,
                "max_tokens": judge.max_tokens}  # fmt: skip
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        url = f"{judge.endpoint.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as reply:
                return _answer(_read(reply, self.clock, self.clock() + timeout_s))
        except urllib.error.HTTPError as error:
            said = _beginning_of(error)
            is_final = error.code not in _WORTH_ANOTHER_TRY
            wait_s = _retry_after(error.headers.get("Retry-After"))
            raise _Unusable(f"status {error.code}: {said}", is_final=is_final, wait_s=wait_s) from error
        except (OSError, HTTPException) as error:  # refused, reset, timed out, half a reply
            raise _Unusable(f"{type(error).__name__}: {error}") from error

    def _has_turn(self, end: float) -> bool:
        """Wait for this worker's turn by the rate; False at once if it comes too late: it is left for the next one."""
        if self.requests_per_s > 0:
            now = self.clock()
            begin = max(now, self._next_at)
            if begin >= end:
                return False
            self._next_at = begin + 1 / self.requests_per_s
            if begin > now:
                self.sleep(begin - now)
        return True


def read_key(judge: JudgeConfig) -> str:
    """The endpoint's key; "" for none.  Raises ValueError if it is not there, or others than its owner may read it."""
    if judge.key_variable:
        if not (key := os.environ.get(judge.key_variable, "").strip()):
            raise ValueError(f"judge.key_variable={judge.key_variable!r} is not set in the environment of the service")
        return key
    if not judge.key_file:
        return ""
    try:
        with Path(judge.key_file).open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read().strip()
    except OSError as error:
        raise ValueError(f"judge.key_file={judge.key_file!r} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ValueError(f"judge.key_file={judge.key_file!r} has mode {mode:04o}; legal: 0600 (chmod 600)")
    if not key:
        raise ValueError(f"judge.key_file={judge.key_file!r} is empty; legal: a key")
    return key


def _read(reply: Any, clock: Callable[[], float], end: float) -> bytes:
    """The body.  A socket's time limit is for each piece of it, so that a slow trickle would never reach it."""
    found = b""
    while piece := reply.read1(1 << 16):
        found += piece
        if len(found) > _MOST_BYTES:
            raise _Unusable(f"a reply of more than {_MOST_BYTES} bytes")
        if clock() > end:
            raise _Unusable("the reply did not end in time")
    return found


def _beginning_of(error: urllib.error.HTTPError) -> str:
    """What an error says, as far as its first piece goes; "" if none comes: the status counts without it."""
    with error, suppress(OSError, HTTPException):
        return bytes(error.read1(_SHOWN_CHARACTERS)).decode(errors="replace")
    return ""


def _answer(body: bytes) -> Answer:
    try:
        document = json.loads(body)
        choice = document["choices"][0]
        text, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        usage = document.get("usage") or {}
        num_read, num_said = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise _Unusable(f"no chat completion: {type(error).__name__}: {body[:_SHOWN_CHARACTERS]!r}") from error
    if not isinstance(text, str):
        raise _Unusable("a chat completion without text")
    return Answer(text, num_read, num_said, is_cut)


def _retry_after(header: str | None) -> float | None:
    """Seconds to wait; None without a header, or if it is a date."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
