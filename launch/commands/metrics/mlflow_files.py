"""A run as a run of MLflow, in one SQLite file that `mlflow ui` opens.

Input: a run and its table of metrics.  Output: DIR/mlflow.db, written by MLflow's own client; the settings are
parameters, named section.key.  The step is the optimiser step, the time of a point is when the run wrote it.
Guarantees: no network is used; of one run there is one living run in the file: an earlier one is deleted, in MLflow's
sense, when the new one is whole.

A SQLite file, since MLflow has closed its directories of plain files to writing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from launch.commands.metrics.exported import ExportedRun
from launch.common.optional_package import optional_module
from rlhpc.errors import ConfigError

EXPERIMENT = "rlhpc"
IDENTITY, RUN_DIRECTORY = "rlhpc.run", "rlhpc.run_directory"  # tags
_MOST_METRICS, _MOST_PARAMETERS = 1_000, 100  # in one request: MLflow's limits
_LONGEST_PARAMETER = 6_000  # characters of one value: a limit of MLflow, too


def write_mlflow(directory: Path, run: ExportedRun) -> str:
    """Write the run and say what comes next.  Raises ConfigError: MLflow is not installed, or cannot write; OSError."""
    # Read when it is imported: it would count its users over the network, and tell of every table that it makes.
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR"}
    mlflow = optional_module("mlflow", "mlflow")
    optional_module("sqlalchemy", "mlflow")
    directory.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{directory.resolve() / 'mlflow.db'}"
    try:
        _replace(mlflow, mlflow.MlflowClient(tracking_uri=uri), run)
    except mlflow.exceptions.MlflowException as error:
        raise ConfigError(f"--mlflow {directory}: MLflow says: {error}") from error
    return f"{directory / 'mlflow.db'}: {run.size}; `mlflow ui --backend-store-uri {uri}` shows it"


def _replace(mlflow: ModuleType, client: Any, run: ExportedRun) -> None:
    found = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
    earlier = client.search_runs([experiment], filter_string=f"tags.`{IDENTITY}` = '{run.identity}'")
    begin, end = (int(1e3 * run.table.unix_times_s[place]) for place in (0, -1))
    tags = {IDENTITY: run.identity, RUN_DIRECTORY: str(run.layout.root)}
    created = client.create_run(experiment, start_time=begin, run_name=run.name, tags=tags).info.run_id
    parameters = (mlflow.entities.Param(key, value) for key, value in parameters_of(run.settings))
    for some in _batches(parameters, _MOST_PARAMETERS):
        client.log_batch(created, params=some)
    for some in _batches(_metrics(mlflow, run), _MOST_METRICS):
        client.log_batch(created, metrics=some)
    client.set_terminated(created, "FINISHED" if run.layout.summary.exists() else "KILLED", end_time=end)
    for each in earlier:
        client.delete_run(each.info.run_id)


def _metrics(mlflow: ModuleType, run: ExportedRun) -> Iterator[Any]:
    names = legal_names([*run.table.curves])
    for step, unix_time_s, points in run.table.rows():
        for name, value in points.items():
            yield mlflow.entities.Metric(names[name], value, int(1e3 * unix_time_s), step)


def _batches(entities: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while some := list(islice(entities, size)):
        yield some


def legal_names(names: list[str]) -> dict[str, str]:
    """Our name → MLflow's, which has letters, digits and `_-. :/` only; all different.  pass@1 becomes pass_1."""
    found = dict[str, str]()
    for name in sorted(names, key=lambda name: (_legal(name) != name, name)):  # what is legal keeps its name
        legal = _legal(name)
        while legal in found.values():
            legal += "_"
        found[name] = legal
    return found


def parameters_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """section.key and its value; tables in a list as JSON.  Too long a value is cut."""
    for section, keys in settings.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else [("", keys)]:
            text = value if isinstance(value, str) else json.dumps(value)
            yield _legal(f"{section}.{key}".rstrip(".")), text[:_LONGEST_PARAMETER]


def _legal(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
