"""HeterogeneousSlurmExecutor: submitit for jobs whose components need different nodes and run different callables.

Input: components.  Output: one sbatch, and one submitit job per component.  Guarantees: everything that a job needs is
on disk in FOLDER/JOBID before the job begins; nothing in FOLDER is overwritten; a failed submission leaves nothing
behind.  docs/executor.md explains it; launch/submitit_hetjob/supervisor.py runs in the job.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor

from launch.slurm import sbatch
from launch.slurm.commands import SlurmError
from launch.submitit_hetjob.job import HeterogeneousSlurmJob
from launch.submitit_hetjob.script import DEFAULT_MINUTES, Component, Part, check_parts, plan_text, script_text
from launch.submitit_hetjob.submitit_seams import has_checkpoint, legal_parameters
from rlhpc.errors import ConfigError, RunDirectoryError

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
        parts = [Part(component, self._all_parameters(component)) for component in components]
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

    def _write(self, staging: Path, parts: Sequence[Part], calls: Sequence[DelayedSubmission]) -> None:
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

    def _publish(self, staging: Path, parts: Sequence[Part], job_id: int) -> None:
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
    """What Slurm says, with this name in front."""
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
