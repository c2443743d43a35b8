"""HeterogeneousSlurmExecutor: submitit for jobs whose components need different nodes and run different callables.

Input: components.  Output: one sbatch, and one submitit job per component.  Guarantees: everything that a job needs is
on disk in FOLDER/JOBID before the job begins; nothing in FOLDER is overwritten; a failed submission leaves nothing
behind.  README.md beside it explains it; launch/submitit_hetjob/supervisor.py runs in the job.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor

from launch.slurm import sbatch
from launch.slurm.commands import SlurmError
from launch.submitit_hetjob.job import (
    HeterogeneousSlurmJob,
    directives,
    has_checkpoint,
    legal_parameters,
    warning_signal_name,
)
from rlhpc.protocol.errors import ConfigError, RunDirectoryError

# --------------------------------------------------------------------------------------------------------------- script
#
# The batch script and plan of a heterogeneous job of callables.  Pure.
#
# Input: components.  Output: the script's text, and the content of plan.json.

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
DEFAULT_MINUTES, DEFAULT_WARN_S = 5, 90  # submitit's time and signal_delay_s
# Options of the whole job, or set here: a component cannot set them.
_OF_THE_JOB = ("setup", "teardown", "use_srun", "array_parallelism", "signal_delay_s")
_OURS = ("output", "error", "open-mode", "signal", "requeue", "no-requeue", "array", "hetjob")
# sbatch applies them to the job, that is, only to its first component.
_FIRST_ONLY = ("dependency", "mail-type", "mail-user")


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a job: its function and its resources.

    function: called without arguments in every task; with a method `checkpoint` it can be resumed.  parameters:
    submitit's for Slurm, without `slurm_`; they override the executor's.  essential: if it fails, the job has failed.
    restarts: how often it is restarted in the same allocation.  in_batch_step: run the first component without srun;
    None: if it has one task and no GPU.
    """

    name: str
    function: Callable[[], Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    essential: bool = True
    restarts: int = 0
    in_batch_step: bool | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"component {self.name!r}: legal: letters, digits, '_', '.' and '-', 64 at most")
        if not callable(self.function):
            raise ConfigError(f"component {self.name}: function={self.function!r} cannot be called")
        if self.restarts < 0 or (self.restarts and self.essential):
            raise ConfigError(
                f"component {self.name}: restarts={self.restarts}: legal: 0, or more with essential=False"
            )
        own = sorted(set(_OF_THE_JOB) & set(self.parameters))
        if own:
            raise ConfigError(f"component {self.name}: {', '.join(own)}: only for the whole job (update_parameters)")


@dataclass(frozen=True, slots=True)
class NativeComponent:
    """A component with all its parameters, in submitit's native names."""

    component: Component
    parameters: Mapping[str, Any]

    @property
    def num_tasks(self) -> int:
        """Number of tasks on all its nodes."""
        return self.nodes * self.tasks_per_node

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.parameters.get("nodes") or 1)

    @property
    def tasks_per_node(self) -> int:
        """Number of tasks on each of its nodes."""
        return max(1, int(self.parameters.get("ntasks_per_node") or 1))

    @property
    def runs_in_batch_step(self) -> bool:
        """True if it runs in the batch step, as requested or if possible; only the first component has one."""
        wish = self.component.in_batch_step
        return (self.num_tasks == 1 and not self._has_gpus) if wish is None else wish

    @property
    def _has_gpus(self) -> bool:
        named = ("gpus_per_node", "gpus_per_task", "num_gpus", "gres")
        extra = self.parameters.get("additional_parameters") or {}
        return any(self.parameters.get(key) for key in named) or any(key.startswith(("gpus", "gres")) for key in extra)


def check_parts(parts: Sequence[NativeComponent]) -> None:
    """Raise ConfigError for requests that Slurm would refuse late, or misunderstand."""
    names = [part.component.name for part in parts]
    if not parts or len(set(names)) != len(names):
        raise ConfigError(f"components {names}: legal: at least one, each name once")
    times = {part.parameters.get("time", DEFAULT_MINUTES) for part in parts}
    if len(times) > 1:
        raise ConfigError(f"time={sorted(times)}: the components of a job end together; give all of them the same")
    for index, part in enumerate(parts):
        if part.component.in_batch_step and (index or part.num_tasks != 1):
            raise ConfigError(f"component {part.component.name}: in_batch_step: only for a first component of one task")
        if part.parameters.get("use_srun") is False or part.parameters.get("teardown"):
            raise ConfigError("use_srun and teardown: the supervisor starts the steps; see in_batch_step")
        ours = sorted(
            set(_OURS) & {key.replace("_", "-") for key in part.parameters.get("additional_parameters") or {}}
        )
        if ours:
            raise ConfigError(
                f"component {part.component.name}: additional_parameters: {', '.join(ours)}: set by rlhpc"
            )
    if not any(part.component.essential for part in parts):
        raise ConfigError("no component is essential: nothing would tell success from failure")


def script_text(parts: Sequence[NativeComponent], folder: Path, *, batch_python: str, code: Path | None) -> str:
    """The script for sbatch.  code: a directory that Python needs in order to find `launch`; None: it is installed."""
    job = parts[0].parameters
    names = ", ".join(part.component.name for part in parts)
    lines = ["#!/bin/bash", f"# {len(parts)} component(s): {names}.  Written by rlhpc."]
    for index, part in enumerate(parts):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {each}" for each in _component_directives(part, folder, is_first=index == 0)]
    lines += ["", *(job.get("setup") or [])]
    lines += [f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"] if code else []
    lines += [f"exec {batch_python} -u -m launch.submitit_hetjob.supervisor --folder {shlex.quote(str(folder))}", ""]
    return "\n".join(lines)


def plan_text(parts: Sequence[NativeComponent], *, python: str, has_checkpoint: Sequence[bool]) -> str:
    """plan.json: components for the supervisor (launch/submitit_hetjob/supervisor.py) to start.

    If no component has a checkpoint, all receive the warning, and submitit's rule decides whether they restart.
    """
    any_has = any(has_checkpoint)
    command = [*shlex.split(python), "-u", "-m", "launch.submitit_hetjob.task"]
    components = [
        {
            "name": part.component.name,
            "group": index if len(parts) > 1 else None,
            "num_tasks": part.num_tasks,
            "is_essential": part.component.essential,
            "restarts": part.component.restarts,
            "stores_checkpoint": has or not any_has,
            "in_batch_step": index == 0 and part.runs_in_batch_step,
            "stderr_to_stdout": bool(part.parameters.get("stderr_to_stdout", False)),
            "srun": list(_srun_sizes(part)),
            "command": command,
        }
        for index, (part, has) in enumerate(zip(parts, has_checkpoint, strict=True))
    ]
    plan = {"schema": 1, "warning": warning_signal_name(), "warn_s": _warn_s(parts[0]), "components": components}
    return json.dumps(plan, indent=1)


def _component_directives(part: NativeComponent, folder: Path, *, is_first: bool) -> Iterator[str]:
    for directive in directives(folder, part.parameters):
        key = directive.removeprefix("--").split("=")[0]
        if key not in _OURS and (is_first or key not in _FIRST_ONLY):
            yield directive
    yield "--requeue"
    if is_first:
        # Not into the job's own directory: it does not exist before the job has its number.
        yield shlex.quote(f"--output={folder}/%j_batch.log")
        yield "--open-mode=append"  # a requeued job continues its log
        # To the batch step alone (B:); mixed with a signal to tasks, 22.05 loses one of them.
        yield f"--signal=B:{warning_signal_name()}@{_warn_s(part)}"


def _warn_s(part: NativeComponent) -> int:
    """Seconds of warning, at most half of the time limit: a job warned right after its start would do nothing else."""
    asked_s, time_s = (
        part.parameters.get("signal_delay_s", DEFAULT_WARN_S),
        60 * part.parameters.get("time", DEFAULT_MINUTES),
    )
    return int(min(asked_s, time_s // 2))


def _srun_sizes(part: NativeComponent) -> Iterator[str]:
    """All sizes as explicit options: those in the batch step's environment are the first component's."""
    yield from ("-N", str(part.nodes), "-n", str(part.num_tasks), f"--ntasks-per-node={part.tasks_per_node}")
    for key in ("cpus_per_task", "gpus_per_node", "gpus_per_task", "gres"):
        if part.parameters.get(key):
            yield f"--{key.replace('_', '-')}={part.parameters[key]}"
    yield from part.parameters.get("srun_args") or ()


# ------------------------------------------------------------------------------------------------------------- executor

__all__ = ["Component", "HeterogeneousSlurmExecutor"]


class HeterogeneousSlurmExecutor(SlurmExecutor):
    """Submits heterogeneous jobs.  update_parameters sets parameters for all components, as in SlurmExecutor.

    folder: on a filesystem that all nodes share.  max_num_timeout: how often a timed-out job is restarted.
    python: command for the tasks, for example `apptainer exec image.sif python`.  batch_python: for the supervisor,
    which needs Slurm's commands, Python 3.9 and nothing else.  Raises ConfigError; SlurmError: there is no Slurm here.
    """

    job_class = HeterogeneousSlurmJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        batch_python: str | None = None,
    ) -> None:
        if self.affinity() <= 0:
            raise SlurmError("srun: no such command here; run this on a login node, with Slurm's module loaded")
        super().__init__(folder, max_num_timeout, max_pickle_size_gb, python)
        self.batch_python = batch_python or shlex.quote(sys.executable)
        if "%" in str(self.folder):
            raise ConfigError(
                f"folder {self.folder}: Slurm and submitit treat '%' as a pattern; legal: a path without it"
            )

    # ------------------------------------------------------------------------------------------------------- submission

    def submit_components(self, components: Sequence[Component]) -> dict[str, Job[Any]]:
        """Submit one job; returns a submitit job per component, by name.

        Raises ConfigError: contradictory components; SlurmError with sbatch's message: it refuses.
        """
        return self._submit(components, [DelayedSubmission(component.function) for component in components])

    def submit_script(
        self,
        script: Path,
        *,
        name: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        record: Callable[[int], object] = lambda job_id: None,
        hear: Callable[[str], object] = lambda remarks: None,
    ) -> Job[Any]:
        """Submit a finished script; `options` go before it, for example --dependency=afterok:12.

        The job may leave ("success", value) or ("error", text) as a pickle in FOLDER/JOBID_0_result.pkl, which becomes
        its result.  environment: None means this process's, without variables of another job.  record: called with the
        id before Ctrl-C takes effect; if it raises, the job is cancelled.  hear: called with sbatch's remarks on an
        accepted job.  Raises SlurmError, with `name` in front.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _named(name):
            job_id = sbatch.submit_script(script, options, record=record, environment=environment, hear=hear)
        return self.job_class(folder=self.folder, job_id=str(job_id))

    def _submit(self, components: Sequence[Component], calls: Sequence[DelayedSubmission]) -> dict[str, Job[Any]]:
        parts = [NativeComponent(component, self._all_parameters(component)) for component in components]
        check_parts(parts)
        self.folder.mkdir(parents=True, exist_ok=True)
        staging = self.folder / f".staging-{uuid.uuid4().hex}"
        try:
            self._write(staging, parts, calls)
            names = ", ".join(part.component.name for part in parts)
            with _named(names):
                job_id = sbatch.submit_script(staging / "submission.sh", record=partial(self._publish, staging, parts))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        is_one = len(parts) == 1
        return {
            part.component.name: self.job_class(
                folder=self.folder / "%j" / part.component.name,
                job_id=str(job_id),
                tasks=range(part.num_tasks),
                component=None if is_one else index,
            )
            for index, part in enumerate(parts)
        }

    def _write(self, staging: Path, parts: Sequence[NativeComponent], calls: Sequence[DelayedSubmission]) -> None:
        """Write everything that the job needs, under a temporary name."""
        for part, call in zip(parts, calls, strict=True):
            directory = staging / part.component.name
            directory.mkdir(parents=True)
            call.set_timeout(part.parameters.get("time", DEFAULT_MINUTES), self.max_num_timeout)
            call.dump(directory / "submitted.pkl")
        size_gb = sum(path.stat().st_size for path in staging.rglob("*.pkl")) / 1024**3
        if size_gb > self.max_pickle_size_gb:
            raise ConfigError(
                f"max_pickle_size_gb={self.max_pickle_size_gb}: the callables take {size_gb:.2f} GiB as pickles"
            )
        checkpoints = [has_checkpoint(call) for call in calls]
        plan = plan_text(parts, python=self.python, has_checkpoint=checkpoints)
        (staging / "plan.json").write_text(plan, encoding="utf-8")
        text = script_text(parts, self.folder, batch_python=self.batch_python, code=_code())
        (staging / "submission.sh").write_text(text, encoding="utf-8")

    def _publish(self, staging: Path, parts: Sequence[NativeComponent], job_id: int) -> None:
        """Rename the files, now that the job id is known; the job waits for the directory."""
        try:
            for part in parts:
                directory = staging / part.component.name
                (directory / "submitted.pkl").rename(directory / f"{job_id}_submitted.pkl")
                _link_or_copy("../submission.sh", directory / f"{job_id}_submission.sh")
            staging.rename(self.folder / str(job_id))
        except (
            OSError
        ) as error:  # Slurm restarts its numbering after losing its state: these would be another job's results
            taken = self.folder / str(job_id)
            raise RunDirectoryError(f"{taken}: cannot be created ({error}); use a new folder") from error

    # ------------------------------------------------------------------------------------------- submitit's own entries

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        """Implements submit and map_array: one single-component job each, as Slurm has no heterogeneous arrays."""
        return [self._submit([Component("task", call.function)], [call])["task"] for call in delayed_submissions]

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        super()._internal_update_parameters(**self._convert_parameters(kwargs))

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """Either of submitit's vocabularies: mem_gb=64 or mem="64GB"."""
        native = {"mem": params["mem"]} if isinstance(params.get("mem"), str) else {}
        return {**super()._convert_parameters({k: v for k, v in params.items() if k not in native}), **native}

    def _all_parameters(self, component: Component) -> dict[str, Any]:
        own = self._convert_parameters(dict(component.parameters))
        unknown = sorted(set(own) - legal_parameters())
        if unknown:
            legal = ", ".join(sorted(legal_parameters()))
            raise ConfigError(f"component {component.name}: {', '.join(unknown)}: legal: {legal}")
        return {**self.parameters, **own}


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put this name in front of SlurmErrors of the block."""
    try:
        yield
    except SlurmError as error:
        raise type(error)(f"{name}: {error}") from None


def _link_or_copy(target: str, name: Path) -> None:
    try:
        name.symlink_to(target)
    except OSError:  # a filesystem without symbolic links
        name.write_bytes((name.parent / target).read_bytes())


def _code() -> Path | None:
    """The directory that contains `launch`, if Python would not find it otherwise: a checkout."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").exists() else None
