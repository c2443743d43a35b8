"""Task "llm_judge": a model behind an endpoint grades the completion, as [judge] of the run file specifies.

Input: a completion and a reference, a text or a whole record.  Output: a RewardOutcome from 0.0 for the worst grade to
1.0 for the best, with part `grade`.  A judge that is down, or gives no grade, is a verifier error and never a reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

from rlhpc.config_judge import JudgeConfig
from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.judge_cache import JudgeCache, digest_of
from rlhpc.rewards.judge_endpoint import Endpoint
from rlhpc.rewards.returned import JudgedOutcome
from rlhpc.rewards.task_settings import task_settings

COMPLETION, REFERENCE = "completion", "reference"
_SHOWN_CHARACTERS = 120
_LIKE_AN_OBJECT = re.compile(r"\{\s*[\"}]")
_BRACES = re.compile(r'[{}]|"(?:[^"\\\n]|\\.)*+"?')
_MARKS = " \t\r*_`#>."  # of Markdown, around a grade


def judge(completion: str, reference: str) -> RewardOutcome:
    """Raises ValueError for the reference and the settings, JudgeFailed if there is no grade."""
    return _judge_of_this_process()(completion, reference)


@cache
def _judge_of_this_process() -> LlmJudge:
    settings = task_settings()
    cache_at = Path(settings.judge_cache) if settings.judge_cache and settings.judge.cache else None
    rate = settings.judge.requests_per_s / max(1, settings.num_workers)
    return LlmJudge(settings.judge, Endpoint(settings.judge, rate), JudgeCache(cache_at) if cache_at else None)


class LlmJudge:
    """Template, endpoint, cache and grade."""

    def __init__(self, settings: JudgeConfig, endpoint: Endpoint, cached: JudgeCache | None = None) -> None:
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


def check_reference(reference: str, settings: JudgeConfig) -> None:
    """Raises ValueError if the template asks for more than a text, or than the record has; or cannot be read."""
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
    """A place in a reply that may be its grade."""

    text: str
    is_quoted: bool  # it stands in the completion, too
    is_alone: bool  # an object on lines of its own


def grade_in(reply: str, settings: JudgeConfig, completion: str = "") -> float | None:
    """The grade that a reply gives; None: none, or one outside of worst and best.

    A reply may quote the completion, in which a policy may grade itself: what stands there, too, counts only if nothing
    else does.  Of the rest, an object on lines of its own precedes one within a sentence, and the last one counts.
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
    """Outermost JSON objects that have the key, or hold an object that has it; what is in a list is one part's."""
    quoted = [value for _, _, value in _objects(completion)]
    for begin, end, value in _objects(reply):
        if text := _shallowest(value, key):
            is_quoted = reply[begin:end] in completion or value in quoted
            yield _Found(text, is_quoted, _is_alone(reply, begin, end))


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(begin, end, value) of the outermost JSON objects; what is in one that is malformed is none."""
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
    """Where the brace at `begin` is closed, or where the text ends; braces in strings do not count."""
    depth = 0
    for token in _BRACES.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(text)


def _shallowest(value: dict[str, Any], key: str) -> str:
    """The value that fewest objects surround, "" where there is none, or more than one."""
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
