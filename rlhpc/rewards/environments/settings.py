"""How a reward worker learns which environments its run has: from its environment variables, as code_place.py does."""

from __future__ import annotations

import json
import os

from rlhpc.config import Config
from rlhpc.config_data import AGENT, OWN_REWARD
from rlhpc.config_environment import EnvironmentConfig
from rlhpc.rewards.environments.registry import VARIABLE


def variables_of(config: Config) -> dict[str, str]:
    """What a reward worker needs to know of the environments of a run."""
    names = list(dict.fromkeys(each.environment for each in config.data if each.environment not in ("", AGENT)))
    if not names:
        return {}
    return {VARIABLE: json.dumps({"settings": config.environment.model_dump(mode="json"), "names": names})}


def environments_here() -> tuple[EnvironmentConfig, list[str]]:
    """(settings, names of environments) of this worker's run."""
    read = json.loads(os.environ.get(VARIABLE, "{}"))
    return EnvironmentConfig.model_validate(read.get("settings", {})), read.get("names", [])


def judged_tasks(config: Config) -> tuple[str, ...]:
    """Tasks of a run that have a reward function."""
    return tuple(task for task in config.data_tasks if task != OWN_REWARD)
