"""Task "llm_judge": a model behind an endpoint grades the completion, as [judge] of the run file specifies.

Input: a completion and a reference, a text or a whole record.  Output: a RewardOutcome from 0.0 for the worst grade to
1.0 for the best, with part `grade`.  A judge that is down, or gives no grade, is a verifier error and never a reward.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from http.client import HTTPException
from pathlib import Path
from string import Formatter
from typing import Any

from rlhpc.base.files import append_lines
from rlhpc.config.tables_services import JudgeConfig
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.outcomes import JudgedOutcome
from rlhpc.rewards.task_settings import task_settings

# ---------------------------------------------------------------------------------------------------------- judge cache
#
# Replies of a judge in the run directory, by request, so that a completion is not paid for twice.
#
# Input: digests of requests.  Output: replies.  Each worker appends JSON lines to a file of its own and reads those of
# all workers; a line that was cut off is skipped.  A worker keeps the position of a reply in memory, about 150 bytes,
# and not the reply: a node has many workers.  A cache that cannot be written only costs money.

log = logging.getLogger("rlhpc.rewards")

_BEGIN = b'{"digest": "'  # of every line
_KEY_DIGITS = 16  # of a digest's 64: enough to find a line, which has all
_READ_BYTES = 1 << 20


def digest_of(request: Mapping[str, Any]) -> str:
    """Digest of everything on which a reply depends."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """One worker's view of the directory."""

    def __init__(self, directory: Path) -> None:
        """Create no file until the first reply is kept."""
        self._directory = directory
        self._own = directory / f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        self._files: dict[str, _File] = {}  # by name
        self._unwritten: dict[str, str] = {}  # replies that could not be written, by digest

    def get(self, digest: str) -> str | None:
        """The reply to a request, also from another worker; None if there is none."""
        if digest in self._unwritten:
            return self._unwritten[digest]
        reply = self._find(digest)
        if reply is None:
            self._refresh()
            reply = self._find(digest)
        return reply

    def keep(self, digest: str, reply: str) -> None:
        """Write a reply to disk, or keep it in memory if that fails."""
        line = json.dumps({"digest": digest, "reply": reply}).encode() + b"\n"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            append_lines(self._own, line, is_synced=False)
        except OSError as error:
            self._unwritten[digest] = reply
            log.warning("%s: a judge's reply cannot be cached: %s", self._own, error.strerror)

    def _find(self, digest: str) -> str | None:
        return next((reply for file in self._files.values() if (reply := file.get(digest)) is not None), None)

    def _refresh(self) -> None:
        try:
            entries = [entry for entry in os.scandir(self._directory) if entry.name.endswith(".jsonl")]
        except OSError:
            return  # no directory yet
        for entry in entries:
            file = self._files.setdefault(entry.name, _File(Path(entry.path)))
            try:
                if entry.stat().st_size > file.read_bytes:
                    file.read_on()
            except OSError:
                continue


class _File:
    """One file, with the positions of its replies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[bytes, int] = {}  # the first digits of a digest → bytes before its line
        self.read_bytes = 0

    def read_on(self) -> None:
        """Read the appended lines, up to the last whole one.  Raises OSError."""
        with self._path.open("rb", buffering=_READ_BYTES) as file:
            file.seek(self.read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or cut off
                if line.startswith(_BEGIN):
                    self._places[line[len(_BEGIN) : len(_BEGIN) + _KEY_DIGITS]] = self.read_bytes
                self.read_bytes += len(line)

    def get(self, digest: str) -> str | None:
        """The reply; None: it is not in this file, or cannot be read."""
        place = self._places.get(digest[:_KEY_DIGITS].encode())
        if place is None:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(place)
                found = json.loads(file.readline())
            return str(found["reply"]) if found["digest"] == digest else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


# ------------------------------------------------------------------------------------------------------- judge endpoint
#
# Query an OpenAI-compatible endpoint, with retries of passing errors, within the allowed rate.
#
# Input: messages.  Output: the text of a reply, with its tokens; JudgeFailed if there is none.  Blocks: a reward worker
# judges one completion at a time.  The standard library only; a redirect is not followed, since that would pass the key
# on.

Messages = Sequence[dict[str, str]]
_MOST_BYTES = 4 << 20  # of a reply
_WORTH_ANOTHER_TRY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_SHOWN_REPLY_CHARACTERS = 160


class JudgeFailed(Exception):
    """No grade: no statement about the completion.  costs: spent nevertheless."""

    def __init__(self, why: str, costs: dict[str, float]) -> None:
        """costs: figures by name, as in outcomes.COSTS."""
        super().__init__(why)
        self.costs = costs


@dataclass(frozen=True, slots=True)
class Answer:
    """Content of a reply."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cut: bool = False  # at judge.max_tokens


class _Unusable(Exception):
    """One attempt has failed.  wait_s: wait requested by the endpoint; None: none."""

    def __init__(self, why: str, *, is_final: bool = False, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.is_final, self.wait_s = is_final, wait_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any, **_settings: Any) -> None:
        return None


@dataclass
class JudgeConnection:
    """One worker's connection, its share of the rate, and its clock."""

    settings: JudgeConfig
    requests_per_s: float = 0.0  # of this worker; 0: no limit
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _next_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Read the key.  Raises ValueError if it is missing, or others may read it."""
        self._key = read_key(self.settings)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(self, messages: Messages, usable: Callable[[str], bool], costs: dict[str, float]) -> Answer:
        """Return the first usable reply; adds to costs.  Raises JudgeFailed, after timeout_s at the latest."""
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
        if answer.is_cut:  # the grade is missing; an earlier one may be quoted from the completion, or half a number
            cut = f"the reply was cut off at judge.max_tokens={self.settings.max_tokens}; legal: more"
            raise _Unusable(f"{cut}: {answer.text[-_SHOWN_REPLY_CHARACTERS:]!r}")
        if not usable(answer.text):
            raise _Unusable(f"no grade in the reply {answer.text[-_SHOWN_REPLY_CHARACTERS:]!r}")
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
        """Wait for this worker's next slot of the rate; False at once, without using it, if it comes too late."""
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
    """The endpoint's key; "" for none.  Raises ValueError if it is missing, or readable for others than its owner."""
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
    """The body, within the deadline: a socket's own limit is per piece, so that a slow trickle would never reach it."""
    found = b""
    while piece := reply.read1(1 << 16):
        found += piece
        if len(found) > _MOST_BYTES:
            raise _Unusable(f"a reply of more than {_MOST_BYTES} bytes")
        if clock() > end:
            raise _Unusable("the reply did not end in time")
    return found


def _beginning_of(error: urllib.error.HTTPError) -> str:
    """Beginning of an error's body, its first piece; "" if none comes: the status is enough."""
    with error, suppress(OSError, HTTPException):
        return bytes(error.read1(_SHOWN_REPLY_CHARACTERS)).decode(errors="replace")
    return ""


def _answer(body: bytes) -> Answer:
    try:
        document = json.loads(body)
        choice = document["choices"][0]
        text, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        usage = document.get("usage") or {}
        num_read, num_said = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise _Unusable(f"no chat completion: {type(error).__name__}: {body[:_SHOWN_REPLY_CHARACTERS]!r}") from error
    if not isinstance(text, str):
        raise _Unusable("a chat completion without text")
    return Answer(text, num_read, num_said, is_cut)


def _retry_after(header: str | None) -> float | None:
    """Seconds to wait; None without a header, or if it is a date."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------------ llm judge

COMPLETION, REFERENCE = "completion", "reference"
_SHOWN_CHARACTERS = 120
_LIKE_AN_OBJECT = re.compile(r"\{\s*[\"}]")
_BRACES = re.compile(r'[{}]|"(?:[^"\\\n]|\\.)*+"?')
_MARKS = " \t\r*_`#>."  # of Markdown, around a grade


def llm_judge(completion: str, reference: str) -> RewardOutcome:
    """Judge a completion.  Raises ValueError for the reference and the settings, JudgeFailed without a grade."""
    return _judge_of_this_process()(completion, reference)


@cache
def _judge_of_this_process() -> LlmJudge:
    settings = task_settings()
    cache_at = Path(settings.judge_cache) if settings.judge_cache and settings.judge.cache else None
    rate = settings.judge.requests_per_s / max(1, settings.num_workers)
    return LlmJudge(settings.judge, JudgeConnection(settings.judge, rate), JudgeCache(cache_at) if cache_at else None)


class LlmJudge:
    """Template, endpoint, cache and grade."""

    def __init__(self, settings: JudgeConfig, endpoint: JudgeConnection, cached: JudgeCache | None = None) -> None:
        """Raises ValueError if the template cannot be read."""
        self._settings, self._endpoint, self._cache = settings, endpoint, cached
        self._template = template_of(settings)

    def __call__(self, completion: str, reference: str) -> RewardOutcome:
        """Judge one completion."""
        settings, costs = self._settings, dict[str, float]()
        message = self._template.format(**_fields(self._template, reference), **{COMPLETION: completion})
        messages = [{"role": "user", "content": message}]
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        sampling = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}

        def has_grade(text: str) -> bool:
            return grade_in(text, settings, completion) is not None

        digest = digest_of({"model": settings.model, "messages": messages, **sampling})
        reply = self._cache.get(digest) if self._cache else None
        if reply is not None and has_grade(reply):
            costs["judge_cached"] = 1.0
        else:
            reply = self._endpoint.ask(messages, has_grade, costs).text
            if self._cache:
                self._cache.keep(digest, reply)
        grade = grade_in(reply, settings, completion)
        assert grade is not None
        reward = (grade - settings.worst) / (settings.best - settings.worst)
        detail = f"grade {grade:g}: {' '.join(reply.split())[-_SHOWN_CHARACTERS:]}"
        return JudgedOutcome(reward, grade >= settings.correct_from, {"grade": grade}, detail, costs=costs)


def check_llm_judge(reference: str, settings: JudgeConfig) -> None:
    """Raise ValueError if the template needs a record, or a field that the record lacks, or cannot be read."""
    _fields(template_of(settings), reference)


@lru_cache(maxsize=8)
def template_of(settings: JudgeConfig) -> str:
    """The template, from the run file or from judge.template_file.  Raises ValueError if it is illegal."""
    if not settings.template_file:
        key, template = "judge.template", settings.template
    else:
        key = f"judge.template_file={settings.template_file!r}"
        try:
            template = Path(settings.template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{key} cannot be read: {error}") from error
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{key}: {error}; a literal brace is doubled") from error
    for _, name, style, conversion in parts:
        if not str(name).isidentifier() or style or conversion:
            raise ValueError(f"{key}: {{{name}}} is not the plain name of a field; a literal brace is doubled")
    if COMPLETION not in [name for _, name, _, _ in parts]:
        raise ValueError(f"{key} does not name {{{COMPLETION}}}: the judge would not see what it judges")
    return template


def _fields(template: str, reference: str) -> dict[str, str]:
    names = {str(name) for _, name, _, _ in Formatter().parse(template) if name} - {COMPLETION}
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
                f"judge.template names {{{name}}}; legal: {', '.join([COMPLETION, *has])}, and with "
                'data.reference_field = "*" the fields of the record'
            )
    return {name: value if isinstance(value := has[name], str) else json.dumps(value) for name in names}


@dataclass(frozen=True, slots=True)
class _Found:
    """A possible grade in a reply."""

    text: str
    is_quoted: bool  # it is in the completion, too
    is_alone: bool  # an object on lines of its own


def grade_in(reply: str, settings: JudgeConfig, completion: str = "") -> float | None:
    """The grade in a reply; None: none, or one outside of worst and best.

    A reply may quote the completion, in which a policy may grade itself: grades that are also in the completion count
    only if there are no others.  An object on lines of its own precedes one in a sentence; the last one counts.
    """
    found = list(
        _objects_with(reply, settings.grade_key, completion)
        if settings.grade_key
        else _matches(reply, settings.grade_pattern, completion)
    )
    best = max(found, key=lambda each: (not each.is_quoted, each.is_alone), default=None)
    same = [each for each in found if best and (each.is_quoted, each.is_alone) == (best.is_quoted, best.is_alone)]
    try:
        grade = float(same[-1].text)
    except (IndexError, ValueError):
        return None
    return grade if settings.worst <= grade <= settings.best else None


def _matches(reply: str, pattern: str, completion: str) -> Iterator[_Found]:
    for match in re.finditer(pattern, reply):
        is_quoted = match[0].strip() in completion and re.search("[^\\W\\d_]", match[0]) is not None  # no bare number
        yield _Found(match[1] or "", is_quoted, is_alone=False)


def _objects_with(reply: str, key: str, completion: str) -> Iterator[_Found]:
    """Outermost JSON objects with the key, at any depth, but not within lists, which hold grades of parts."""
    quoted = [value for _, _, value in _objects(completion)]
    for begin, end, value in _objects(reply):
        if text := _shallowest(value, key):
            is_quoted = reply[begin:end] in completion or value in quoted
            yield _Found(text, is_quoted, _is_alone(reply, begin, end))


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(begin, end, value) of the outermost JSON objects; none inside a malformed one."""
    decoder, begin = json.JSONDecoder(), text.find("{")
    while begin >= 0:
        end = begin + 1
        if _LIKE_AN_OBJECT.match(text, begin):
            try:
                value, end = decoder.raw_decode(text, begin)
                yield begin, end, value
            except (ValueError, RecursionError):
                end = _end_of_braces(text, begin)
        begin = text.find("{", end)


def _end_of_braces(text: str, begin: int) -> int:
    """Index at which the brace at `begin` is closed, or the text ends; braces in strings do not count."""
    depth = 0
    for token in _BRACES.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(text)


def _shallowest(value: dict[str, Any], key: str) -> str:
    """The value of the key at the lowest depth, "" if there is none, or more than one."""
    level: list[Any] = [value]
    while level:
        found = [each[key] for each in level if isinstance(each.get(key), int | float | str)]
        if found:
            return "" if len(found) > 1 or isinstance(found[0], bool) else str(found[0])
        level = [inner for each in level for inner in each.values() if isinstance(inner, dict)]
    return ""


def _is_alone(text: str, begin: int, end: int) -> bool:
    before, after = text[:begin].rpartition("\n")[2], text[end:].partition("\n")[0]
    return not before.strip(_MARKS) and not after.strip(_MARKS)
