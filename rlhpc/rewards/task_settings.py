"""What tasks learn of the run file: a reward worker has it in its environment (VARIABLE), which the service sets."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import TYPE_CHECKING

from rlhpc.config_tasks import TaskSettings
from rlhpc.rewards import code_place

if TYPE_CHECKING:
    from rlhpc.config import Config

VARIABLE = "RLHPC_TASKS"


def worker_environment(config: Config) -> dict[str, str]:
    """What reward workers need to judge as the run file says."""
    settings = TaskSettings(instructions=config.instructions, composite=config.composite)
    return {VARIABLE: settings.model_dump_json(), **code_place.environment_of(config.sandbox)}


@cache
def task_settings() -> TaskSettings:
    """Those of this process; the defaults where there is no run."""
    return TaskSettings.model_validate(json.loads(os.environ.get(VARIABLE, "{}")))
