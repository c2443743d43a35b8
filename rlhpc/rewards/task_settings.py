"""The run file's settings for tasks, passed to reward workers in an environment variable (VARIABLE) by the service."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from rlhpc.config.setting import Section
from rlhpc.config.tables_models import RewardModelConfig, ServiceConfig
from rlhpc.config.tables_services import CompositeConfig, InstructionsConfig, JudgeConfig, MathConfig, TextConfig
from rlhpc.rewards import code_place

if TYPE_CHECKING:
    from rlhpc.config.rules import Config

ARGUMENTS = "RLHPC_TASK_ARGUMENTS"  # of a reward worker: rewards.task_arguments of its run, JSON
VARIABLE = "RLHPC_TASKS"


class TaskSettings(Section):
    """Settings passed to a reward worker."""

    composite: dict[str, CompositeConfig] = Field(default={})
    instructions: InstructionsConfig = InstructionsConfig()
    math: MathConfig = MathConfig()
    text: TextConfig = TextConfig()
    judge: JudgeConfig = JudgeConfig()
    judge_service: ServiceConfig | None = None  # none: judge.endpoint
    reward_model: RewardModelConfig = RewardModelConfig()
    reward_service: ServiceConfig | None = None
    rendezvous: str = ""  # directory with addresses of the run's services; "": there is no run
    judge_cache: str = ""  # directory; "": no reply is kept
    num_workers: int = 1  # of all services: they share the judge's rate


def worker_environment(
    config: Config, judge_cache: Path | None = None, rendezvous: Path | None = None
) -> dict[str, str]:
    """Environment variables with which reward workers judge as configured.

    rendezvous: directory with addresses of the run's services; None: there is no run.
    """
    settings = TaskSettings(
        composite=config.composite,
        instructions=config.instructions,
        math=config.math,
        text=config.text,
        judge=config.judge,
        judge_service=config.service_asked_by("llm_judge"),
        reward_model=config.reward_model,
        reward_service=config.service_asked_by("reward_model"),
        rendezvous=str(rendezvous or ""),
        judge_cache=str(judge_cache or ""),
        num_workers=config.rewards.num_replicas * config.rewards.workers_per_replica,
    )
    arguments = {ARGUMENTS: json.dumps(config.rewards.task_arguments)} if config.rewards.task_arguments else {}
    return {VARIABLE: settings.model_dump_json(), **arguments, **code_place.environment_of(config.sandbox)}


@cache
def task_settings() -> TaskSettings:
    """The settings of this process; the defaults outside of a run."""
    return TaskSettings.model_validate(json.loads(os.environ.get(VARIABLE, "{}")))
