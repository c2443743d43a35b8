"""What [[evaluation]] of a run file asks for, checked before a run starts.

Input: Config.  Output: lines for people; a ConfigError for what an evaluation would fail by.
"""

from __future__ import annotations

from launch.checks.preflight import preflight_sampling
from launch.commands.evaluate.request import Request, of_run_file
from launch.commands.evaluate.settings import evaluation_config
from launch.commands.evaluate.target import Target, target_of
from launch.common.counted import counted
from rlhpc.config import Config
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.errors import ConfigError


def preview_evaluations(config: Config, *, roles_run_here: bool = True, has_gpus: bool = True) -> list[str]:
    """A line for each table.  Raises ConfigError, whose text names the table.

    roles_run_here: False where engines run in another environment than this process.  has_gpus: where they run.
    """
    target = target_of(config)
    return [
        f"evaluation  {request.name}: {counted(_look(target, request, roles_run_here, has_gpus).num_records, 'record')}"
        for request in of_run_file(config)
    ]


def _look(target: Target, request: Request, roles_run_here: bool, has_gpus: bool) -> DatasetSummary:
    try:
        settings = evaluation_config(target, request.data, request.words, has_gpus=has_gpus)
        return preflight_sampling(settings, roles_run_here=roles_run_here).datasets[0]
    except ConfigError as error:
        raise ConfigError(f"[evaluation] {request.name}: {error}") from error
