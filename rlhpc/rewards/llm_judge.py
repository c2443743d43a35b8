"""Task "llm_judge": a model behind an endpoint grades the completion, as [judge] of the run file specifies.

Input: a completion and a reference, a text or a whole record.  Output: a RewardOutcome from 0.0 for the worst grade to
1.0 for the best, with part `grade`.  A judge that is down, or gives no grade, is a verifier error and never a reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from string import Formatter

from rlhpc.config_judge import JudgeConfig
from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.judge_cache import JudgeCache, digest_of
from rlhpc.rewards.judge_endpoint import Endpoint
from rlhpc.rewards.returned import JudgedOutcome
from rlhpc.rewards.task_settings import task_settings

COMPLETION, REFERENCE = "completion", "reference"
_SHOWN_CHARACTERS = 120


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
        digest = digest_of({"model": settings.model, "messages": messages, **sampling})
        reply = self._cache.get(digest) if self._cache else None
        if reply is not None and grade_in(reply, settings) is not None:
            costs["judge_cached"] = 1.0
        else:
            reply = self._endpoint.ask(messages, lambda text: grade_in(text, settings) is not None, costs).text
            if self._cache:
                self._cache.keep(digest, reply)
        grade = grade_in(reply, settings)
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


def grade_in(reply: str, settings: JudgeConfig) -> float | None:
    """The grade that a reply gives; None: none, or one outside of worst and best."""
    text = _value_of(reply, settings.grade_key) if settings.grade_key else _match(reply, settings.grade_pattern)
    try:
        grade = float(text)
    except ValueError:
        return None
    return grade if settings.worst <= grade <= settings.best else None


def _match(reply: str, pattern: str) -> str:
    found = [match[1] for match in re.finditer(pattern, reply)]
    return found[-1] or "" if found else ""


def _value_of(reply: str, key: str) -> str:
    """The key's value in the last JSON object that can be read and has it; "": there is none."""
    decoder = json.JSONDecoder()
    for begin in reversed([match.start() for match in re.finditer(r"\{", reply)]):
        try:
            found, _ = decoder.raw_decode(reply, begin)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and key in found:
            value = found[key]
            return str(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    return ""
