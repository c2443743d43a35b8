"""Every private part of submitit that the heterogeneous executor depends on, each behind our own name.

Nothing else in this package uses a submitit name that begins with an underscore, except by overriding it in a subclass
of a class defined here.  tests/unit/launch/test_het_executor_seams.py checks each seam against the installed version;
importing this module refuses any version but 1.5.
"""

from __future__ import annotations

import os
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import submitit
from submitit.core import job_environment, plugins
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm import slurm as submitit_slurm

from launch.slurm.part_states import base_id
from rlhpc.errors import ConfigError

SUPPORTED = "1.5."
Handler = Callable[[int, FrameType | None], Any]
R = TypeVar("R", covariant=True)


def check_version(version: str) -> None:
    """Raises ConfigError: private parts of another version may mean something else."""
    if not version.startswith(SUPPORTED):
        raise ConfigError(f"submitit {version}: legal: {SUPPORTED}x; pip install 'submitit==1.5.4'")


check_version(submitit.__version__)


def directives(folder: Path, parameters: Mapping[str, Any]) -> list[str]:
    """The sbatch directives for `parameters`, without `#SBATCH`: `--partition=gen`.

    Seam: `_make_sbatch_string` is the only place where submitit turns parameters into directives.
    """
    ours = {"setup": None, "teardown": None, "srun_args": None}  # these do not become directives
    text = submitit_slurm._make_sbatch_string(command="true", folder=folder, **{**parameters, **ours})
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def legal_parameters() -> set[str]:
    """Names that `directives` knows.  Seam: `_valid_parameters`."""
    return submitit_slurm.SlurmExecutor._valid_parameters()


def has_checkpoint(submission: DelayedSubmission) -> bool:
    """True if the signal handler will call `checkpoint` of the callable.

    Seam: SignalHandler.checkpoint_and_try_requeue asks for this very attribute.
    """
    return hasattr(submission.function, "checkpoint")


def sub_jobs(job: Job[R]) -> Sequence[Job[R]]:
    """One job for each task; none if there is one task.  Seam: `_sub_jobs`."""
    return job._sub_jobs


class Watcher(submitit_slurm.SlurmInfoWatcher):
    """Asks for the states of all registered jobs at once, at intervals.

    Seam: the base class keeps the ids in `_registered` and known states in `_info_dict`, and decides by
    `_last_status_check` when to call `update`.
    """

    @abstractmethod
    def ask(self, bases: set[str]) -> dict[str, dict[str, str]] | None:
        """State of jobs, of their components (J+1) and array tasks (J_1); None: no answer, known states are kept.

        bases: job ids without component or array task.
        """

    def update(self) -> None:
        """Ask for all that are not known to be final."""
        registered = {base_id(each) for each in self._registered}
        bases = {base for base in registered if not self._is_settled(base)}
        self._last_status_check = time.time()
        if bases:
            self._num_calls += 1
            self._info_dict.update(self.ask(bases) or {})

    def _is_settled(self, base: str) -> bool:
        """True if the job and all its components and tasks are known to be final: they end at different moments."""
        parts = [each for each in self._info_dict if base_id(each) == base]
        return bool(parts) and all(self.is_done(each, mode="cache") for each in parts)

    def known(self, job_id: str) -> dict[str, str]:
        """The last answer, without a call."""
        return self._info_dict.get(job_id, {})

    def look_soon(self, job_id: str) -> None:
        """Ask again at once and then often, as after a submission."""
        self.register_job(job_id)


class TaskEnvironment(submitit_slurm.SlurmJobEnvironment):
    """A task's view of its job, and the handler of its signals.

    Seams: process_job calls `_handle_signals` once before the callable; SignalHandler writes the checkpoint over the
    submitted pickle, calls `_requeue(countdown)` and exits.
    """

    @classmethod
    def name(cls) -> str:
        """Same name as submitit's own environment, which processes that a callable starts will find."""
        return "slurm"

    @abstractmethod
    def listen(self, checkpoint: Handler, ignore: Handler) -> None:
        """Bind signals.  checkpoint: stores the state, then calls ask_for_another_life, then exits; ignore: logs."""

    @abstractmethod
    def ask_for_another_life(self, countdown: int) -> None:
        """The checkpoint is stored; `countdown` more restarts may follow."""

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        handler = job_environment.SignalHandler(self, paths, submission)
        self.listen(handler.checkpoint_and_try_requeue, handler.bypass)

    def _requeue(self, countdown: int) -> None:
        self.ask_for_another_life(countdown)

    @property
    def warning_signal(self) -> signal.Signals:
        """USR2, unless $SUBMITIT_PREEMPT_SIGNAL says another."""
        return signal.Signals(self._usr_sig())


def warning_signal_name() -> str:
    """As sbatch writes it: USR2."""
    return job_environment.JobEnvironment.USR_SIG


def run_task(folder: str, environment: TaskEnvironment) -> None:
    """Load the callable of `folder`, run it, pickle its result.  Raises whatever the callable raises.

    Seam: JobEnvironment() looks into the cached dict of get_job_environments for one that is `activated`.  An entry
    point would also work, but only where this package is installed, not where it is on PYTHONPATH.
    """
    from submitit.core import submission  # imports numpy, which a login node may lack

    os.environ["SUBMITIT_EXECUTOR"] = environment.name()
    environments = plugins.get_job_environments()
    if not isinstance(environments, dict):
        raise ConfigError(f"submitit {submitit.__version__} no longer keeps its environments in a dict")
    environments[environment.name()] = environment
    submission.process_job(folder)
