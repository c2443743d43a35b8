"""Task "llm_judge": a model at an endpoint, or a service of the run, grades the completion, as [judge] specifies.

Input: a completion and a reference, a text or a whole record.  Output: a RewardOutcome from 0.0 for the worst grade to
1.0 for the best, with part `grade`.  A judge that is down, or gives no grade, is a verifier error and never a reward.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rlhpc.base.files import append_lines
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.config.tables_services import JudgeConfig
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.outcomes import JudgedOutcome
from rlhpc.rewards.service_client import (
    AskingLimits,
    ModelServer,
    ServiceClient,
    Unusable,
    fields_for,
    parsed_template,
    patience_with,
    places_of,
    read_key,
)
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


# ------------------------------------------------------------------------------------------------------ judge's answers


@dataclass(frozen=True, slots=True)
class _Replies:
    """Reads chat completions, and refuses those without a grade."""

    settings: JudgeConfig
    has_grade: Callable[[str], bool]

    def __call__(self, document: Any) -> str:
        """Return the text of a chat completion.  Raises Unusable; KeyError and the like for other documents."""
        choice = document["choices"][0]
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise Unusable("a chat completion without text")
        shown = repr(text[-_SHOWN_REPLY_CHARACTERS:])
        if choice.get("finish_reason") == "length":
            # The grade is missing; an earlier one may be quoted from the completion, or half a number.
            cut = f"the reply was cut off at judge.max_tokens={self.settings.max_tokens}; legal: more"
            raise Unusable(f"{cut}: {shown}")
        if not self.has_grade(text):
            raise Unusable(f"no grade in the reply {shown}")
        return text


def judge_client(
    settings: JudgeConfig,
    service: ServiceConfig | None = None,
    rendezvous: str = "",
    requests_per_s: float = 0.0,
    **clock: Any,
) -> ServiceClient:
    """Return a client of the judge at judge.endpoint, or of the service that judge.service names.

    requests_per_s: of this worker.  clock: clock and sleep of the client, if not the usual ones.
    Raises ValueError if a key is missing, or others may read it, and as places_of.
    """
    rate = f"judge.requests_per_s={settings.requests_per_s:g}"
    if service is not None:
        patience = replace(patience_with(service, settings.attempts, settings.backoff_s), rate=rate)
        places, is_of_run = places_of(service, rendezvous), not service.url
        return ServiceClient(patience, places, is_of_run, requests_per_s, **clock)
    place = ModelServer(settings.endpoint, settings.model, read_key(settings.key_variable, settings.key_file, "judge."))
    named = f"judge at {settings.endpoint}"
    patience = AskingLimits(
        named, "judge.timeout_s", settings.timeout_s, settings.attempts, settings.backoff_s, rate=rate
    )
    return ServiceClient(patience, lambda: [place], requests_per_s=requests_per_s, **clock)


# ------------------------------------------------------------------------------------------------------------ llm judge

COMPLETION = "completion"
_SHOWN_CHARACTERS = 120
_SHOWN_REPLY_CHARACTERS = 160
_LIKE_AN_OBJECT = re.compile(r"\{\s*[\"}]")
_BRACES = re.compile(r'[{}]|"(?:[^"\\\n]|\\.)*+"?')
_MARKS = " \t\r*_`#>."  # of Markdown, around a grade


def llm_judge(completion: str, reference: str) -> RewardOutcome:
    """Judge a completion.  Raises ValueError for the reference and the settings, ServiceFailed without a grade."""
    return _judge_of_this_process()(completion, reference)


@cache
def _judge_of_this_process() -> LlmJudge:
    settings = task_settings()
    cache_at = Path(settings.judge_cache) if settings.judge_cache and settings.judge.cache else None
    rate, service = settings.judge.requests_per_s / max(1, settings.num_workers), settings.judge_service
    client = judge_client(settings.judge, service, settings.rendezvous, rate)
    model = settings.judge.model if service is None else service.identity
    return LlmJudge(settings.judge, client, JudgeCache(cache_at) if cache_at else None, model)


class LlmJudge:
    """Template, client, cache and grade."""

    def __init__(
        self, settings: JudgeConfig, client: ServiceClient, cached: JudgeCache | None = None, model: str = ""
    ) -> None:
        """model: its identity in the cache; default: judge.model.

        Raises ValueError if the template cannot be read.
        """
        self._settings, self._client, self._cache = settings, client, cached
        self._model, self._template = model or settings.model, template_of(settings)

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

        digest = digest_of({"model": self._model, "messages": messages, **sampling})
        reply = self._cache.get(digest) if self._cache else None
        if reply is not None and has_grade(reply):
            costs["judge_cached"] = 1.0
        else:
            body = {"messages": messages, **sampling}
            reply = self._client.ask("chat/completions", body, _Replies(settings, has_grade), costs)
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
    if COMPLETION not in parsed_template(key, template):
        raise ValueError(f"{key} does not name {{{COMPLETION}}}: the judge would not see what it judges")
    return template


def _fields(template: str, reference: str) -> dict[str, str]:
    names = parsed_template("judge.template", template) - {COMPLETION}
    return fields_for("judge.template", names, reference, [COMPLETION])


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
