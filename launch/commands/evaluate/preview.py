"""What [[evaluation]] of a run file asks for, checked before a run starts.

Input: Config.  Output: lines for people; a ConfigError for what an evaluation would fail by.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.checks.preflight import preflight_sampling
from launch.commands.evaluate.request import Request, of_run_file
from launch.commands.evaluate.settings import evaluation_config
from launch.commands.evaluate.target import Target, target_of
from launch.common.counted import counted
from rlhpc.config import Config
from rlhpc.config_data import DataConfig
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.errors import ConfigError


def preview_evaluations(config: Config, *, roles_run_here: bool = True, has_gpus: bool = True) -> list[str]:
    """A line for each table.  Raises ConfigError, whose text names the table.

    roles_run_here: False where engines run in another environment than this process.  has_gpus: where they run.
    """
    target = target_of(config)
    said = []
    for request in of_run_file(config):
        data, found = _look(target, request, roles_run_here, has_gpus)
        said.append(f"evaluation  {request.name}: {counted(found.num_records, 'record')}")
        said += [f"warning     [evaluation] {request.name}: {each}" for each in _doubts(config, request, data, found)]
    return said


def _doubts(config: Config, request: Request, data: DataConfig, found: DatasetSummary) -> Iterator[str]:
    """Yield what an evaluation would say less than it seems to by."""
    if request.prompts is not None and request.prompts > found.num_records:
        yield f"prompts={request.prompts}, and the dataset has {counted(found.num_records, 'record')}: all are taken"
    for trained in config.data:
        if data.path and trained.path and data.path.resolve() == trained.path.resolve() and data.split == trained.split:
            yield f"path={str(data.path)!r} is what data.path trains on: its figures say how well that was remembered"


def _look(target: Target, request: Request, roles_run_here: bool, has_gpus: bool) -> tuple[DataConfig, DatasetSummary]:
    try:
        settings = evaluation_config(target, request.data, request.words, has_gpus=has_gpus)
        return settings.data[0], preflight_sampling(settings, roles_run_here=roles_run_here).datasets[0]
    except ConfigError as error:
        raise ConfigError(f"[evaluation] {request.name}: {error}") from error
