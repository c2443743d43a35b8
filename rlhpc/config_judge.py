"""[judge]: the model that the task llm_judge asks (docs/rewards.md).  Loads without torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from rlhpc.config_sections import Duration, NamedPath, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from rlhpc.config import Config

TASK = "llm_judge"
TEMPLATE = (
    "Compare an answer with a reference.\n\nReference:\n{reference}\n\nAnswer:\n{completion}\n\n"
    "How well does the answer agree with the reference? Give reasons in one or two sentences. End with a line "
    '"Grade: N", where N is a whole number from 0 (wrong) to 10 (right).'
)


class JudgeConfig(Section):
    """[judge]: an OpenAI-compatible endpoint, what it is asked, and how its grade is read."""

    endpoint: str = ""
    """Base URL such as "http://node7:8000/v1"; requests go to POST endpoint/chat/completions. Required by the task
    llm_judge."""
    model: str = ""
    """Name of the model at the endpoint. Required."""
    system: str = ""
    """System message; default: none."""
    template: str = TEMPLATE
    """User message, filled with completion and reference, or with the fields of the record if data.reference_field =
    "*"; a literal brace is doubled."""
    template_file: NamedPath = ""
    """A file with the template instead."""
    grade_pattern: str = r"(?i)\bgrade:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match in the reply, group 1, is the grade; a match that the completion has, too,
    counts only if there is no other."""
    grade_key: str = ""
    """Instead: the reply is or has a JSON object, and this key of the outermost one is the grade."""
    worst: float = 0.0
    """Grade that gives reward 0; a grade outside worst to best is no grade."""
    best: float = 10.0
    """Grade that gives reward 1; grades in between are interpolated."""
    correct_from: float = 7.0
    """Minimum grade of a completion that counts as correct."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of the judge."""
    max_tokens: Positive = 512
    """Maximum tokens of its reply."""
    timeout_s: Duration = 8.0
    """Limit for all attempts on one completion. Less than rewards.timeout_s, or task_timeout_s of the task."""
    attempts: Positive = 4
    """Requests for one completion before its verifier has failed: endpoint down, 429, 5xx, or no grade in the reply."""
    backoff_s: PositiveFloat = 0.5
    """Wait before the second attempt, doubled before each further one; Retry-After from the endpoint takes
    precedence."""
    requests_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Maximum rate of all workers of all services together; 0: no limit. Each worker has two turns in timeout_s."""
    key_variable: str = ""
    """Environment variable of the reward service that holds the endpoint's API key; default: no key is sent."""
    key_file: NamedPath = ""
    """Instead: a file that holds it, readable only by its owner. Never put keys in run files."""
    cache: bool = True
    """Cache replies in the run directory, by model, messages and sampling settings, so that the same completion is
    judged once."""

    @model_validator(mode="after")
    def _grades_can_be_read(self) -> Self:
        if self.best <= self.worst:
            raise ValueError(f"judge.best={self.best:g} is not above judge.worst={self.worst:g}")
        if not self.worst <= self.correct_from <= self.best:
            raise ValueError(f"judge.correct_from={self.correct_from:g}; legal: {self.worst:g} to {self.best:g}")
        try:
            groups = re.compile(self.grade_pattern).groups
        except re.error as error:
            pattern = f"judge.grade_pattern={self.grade_pattern!r}"
            raise ValueError(f"{pattern} is not a regular expression: {error}") from error
        if groups < 1:
            raise ValueError(f"judge.grade_pattern={self.grade_pattern!r} has no group; legal: one around the grade")
        if self.key_variable and self.key_file:
            raise ValueError(f"judge.key_variable={self.key_variable!r} beside judge.key_file; legal: one of them")
        return self


def judge_can_be_asked(config: Config) -> None:
    """Who names the task needs an endpoint, and time for it."""
    if TASK not in config.judging_tasks:
        return
    judge = config.judge
    for key in ("endpoint", "model"):
        if not getattr(judge, key):
            raise ValueError(f"judge.{key} is missing, which the task {TASK!r} needs")
    if not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", judge.endpoint):
        said = "…" if re.search("[@?]", judge.endpoint) else repr(judge.endpoint)  # there may be a key in it
        raise ValueError(f"judge.endpoint={said}; legal: http://HOST:PORT/v1 or https://…, without a key in it")
    for task in config.data_tasks:
        limit_s = config.rewards.timeout_of(task)
        if TASK in config.parts_of(task) and judge.timeout_s >= limit_s:
            raise ValueError(
                f"judge.timeout_s={judge.timeout_s:g} is not below the {limit_s:g} s that {task!r} has "
                "(rewards.timeout_s, rewards.task_timeout_s): its worker would be killed before the judge times out"
            )
    _turns_come_in_time(config)


def _turns_come_in_time(config: Config) -> None:
    """A worker has a turn by the rate at least twice in its time, or it would often wait for nothing."""
    judge, rewards = config.judge, config.rewards
    num_workers, longest_s = rewards.num_replicas * rewards.workers_per_replica, judge.timeout_s / 2
    if judge.requests_per_s and (turn_s := num_workers / judge.requests_per_s) > longest_s:
        raise ValueError(
            f"judge.requests_per_s={judge.requests_per_s:g} gives each of rewards.num_replicas={rewards.num_replicas} "
            f"times rewards.workers_per_replica={rewards.workers_per_replica} workers a turn every {turn_s:g} s; "
            f"legal: every {longest_s:g} s or more often, half of judge.timeout_s={judge.timeout_s:g}, "
            "or 0 for no limit"
        )
