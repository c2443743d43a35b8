"""Job objects of the heterogeneous executor, and how they find out their state.

submitit's SlurmJob asks only sacct: without accounting a cancelled job never ends, and it does not know components.
Here squeue is asked first, then sacct for jobs that squeue no longer lists; a job that neither knows has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import submitit
from submitit.core import job_environment, plugins
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm import slurm as submitit_slurm
from submitit.slurm.slurm import SlurmJob

from launch.slurm.commands import SlurmError
from launch.slurm.queue import FINAL, ask_states, base_id, cancel
from launch.submitit_hetjob.step import LEAVE_SIGNAL, LEAVES_VARIABLE, note_path
from rlhpc.base.files import is_listed, write_atomically
from rlhpc.protocol.errors import ConfigError

# ------------------------------------------------------------------------------------------------------- submitit seams
#
# Every private part of submitit that the heterogeneous executor depends on, each behind our own name.
#
# Nothing else in this package uses a submitit name that begins with an underscore, except by overriding it in a
# subclass of a class defined here.  tests/unit/launch/test_executor_parts.py checks each seam against the
# installed version; importing this module refuses any version but 1.5.

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
    """Jobs, one per task; none if there is only one task.  Seam: `_sub_jobs`."""
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
        """Query all jobs that are not known to be final."""
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
    """The warning signal's name as sbatch writes it: USR2."""
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


# ---------------------------------------------------------------------------------------------------------- environment
#
# Reaction of a task of a heterogeneous job to signals.
#
# There are three signals.  The warning (USR2): rank 0 stores its checkpoint, writes a note and exits; the other ranks
# continue, because rank 0 may need them.  SIGTERM, which Slurm sends before it takes nodes away: the same.  USR1, sent
# by the supervisor: exit. submitit would requeue the job from inside the task; that cancels a heterogeneous job on
# Slurm 25.11 and newer, so the note asks the supervisor to do it from the batch step once every task has ended
# (launch/submitit_hetjob/supervisor.py).


class HeterogeneousSlurmJobEnvironment(TaskEnvironment):
    """submitit.JobEnvironment() inside a component: job id of the whole, ranks and nodes of the component."""

    def listen(self, checkpoint: Handler, ignore: Handler) -> None:
        """Bind the three signals, and deliver those that have arrived since the process started."""
        warning = self.warning_signal
        signal.signal(signal.SIGCONT, ignore)  # Slurm sends it before every SIGTERM
        signal.signal(LEAVE_SIGNAL, _leave)
        if os.environ.get(LEAVES_VARIABLE):  # others store checkpoints; this component is simply run again
            signal.signal(signal.SIGTERM, self._be_taken_away)
            signal.signal(warning, ignore)
        elif self.global_rank == 0:
            once = _Once(checkpoint, ignore)
            signal.signal(signal.SIGTERM, once)
            signal.signal(warning, once)
        else:
            signal.signal(signal.SIGTERM, partial(self._follow_rank_0, ignore))
            signal.signal(warning, checkpoint)  # which logs that only rank 0 handles it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {warning, signal.SIGTERM, LEAVE_SIGNAL})

    def ask_for_another_life(self, countdown: int) -> None:
        """Leave the note that the supervisor looks for when this component has ended."""
        _let_finish()
        note = note_path(self.paths.folder, self.job_id)
        write_atomically(note, json.dumps({"remaining_timeouts": int(countdown)}).encode())
        for number in (self.warning_signal, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # an interpreter that exits removes handlers, but not this

    def _follow_rank_0(self, ignore: Handler, signum: int, frame: FrameType | None) -> None:
        # Rank 0 may need this rank for its checkpoint; staying after that would cost the job KillWait seconds.
        if note_path(self.paths.folder, self.job_id).exists():
            _leave(signum, frame)
        ignore(signum, frame)

    def _be_taken_away(self, signum: int, frame: FrameType | None) -> None:
        # Slurm wants the nodes.  Without a note the supervisor, which may have got no signal, would see a failure.
        if self.global_rank == 0:
            self.ask_for_another_life(0)
        _leave(signum, frame)

    def hold_signals(self) -> None:
        """Block signals until `listen`: before it, they would end the process without a checkpoint."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {self.warning_signal, signal.SIGTERM, LEAVE_SIGNAL})


class _Once:
    """The first signal stores the checkpoint; a later one must not start a second write into the same file."""

    def __init__(self, checkpoint: Handler, ignore: Handler) -> None:
        self._checkpoint, self._ignore = checkpoint, ignore
        self._has_begun = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._has_begun:
            self._ignore(signum, frame)
            return
        self._has_begun = True
        self._checkpoint(signum, frame)


def _leave(signum: int, frame: FrameType | None) -> None:
    _let_finish()
    sys.exit(128 + signum)


def _let_finish() -> None:
    """Let the supervisor's request to exit no longer interrupt cleaning up; after a while it kills."""
    signal.signal(LEAVE_SIGNAL, signal.SIG_IGN)


# ------------------------------------------------------------------------------------------------------------------ job


class StateWatcher(Watcher):
    """States of jobs J, components J+1 and array tasks J_1.  One for all jobs; limits how often Slurm is asked."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Slurm's word for the state; GONE; or UNKNOWN while Slurm does not answer."""
        if mode != "cache":
            self.get_info(base_id(job_id), mode=mode)
        info = self.known(job_id) or self.known(base_id(job_id))
        return info.get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """True if the job is over for good; a requeued job is not, squeue shows it as PENDING."""
        return self.get_state(job_id, mode=mode) in FINAL

    def ask(self, bases: set[str]) -> dict[str, dict[str, str]] | None:
        """Two calls at most, however many jobs."""
        return ask_states(bases)


class HeterogeneousSlurmJob(SlurmJob[R]):
    """A component of a job, or a whole job.  `results()`, `task(i)`, `stdout()`, … as of any submitit job."""

    watcher = StateWatcher(delay_s=60)

    def __init__(
        self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,), component: int | None = None
    ) -> None:
        """component: its number in a heterogeneous job; None: the whole job."""
        super().__init__(folder, job_id, tasks)
        self.component = component
        for task in sub_jobs(self):
            assert isinstance(task, HeterogeneousSlurmJob)  # submitit makes them of our own class
            task.component = component

    @property
    def slurm_id(self) -> str:
        """Slurm's id: 12, or 12+1."""
        return self.job_id if self.component is None else f"{self.job_id}+{self.component}"

    @property
    def state(self) -> str:
        """State of this component, as of the last look at Slurm."""
        return self.watcher.get_state(self.slurm_id)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """State and nodes of this component."""
        self.watcher.get_info(self.job_id, mode=mode)
        return self.watcher.known(self.slurm_id) or self.watcher.known(self.job_id)

    def done(self, force_check: bool = False) -> bool:
        """True if every task has a result, or the component has ended without one."""
        if self.num_tasks > 1:
            return all(task.done(force_check) for task in sub_jobs(self))
        if self._has_result():
            return True
        return self.watcher.is_done(self.slurm_id, mode="force" if force_check else "standard")

    def cancel(self, check: bool = True) -> None:
        """Cancel the whole job: its components live and die together.  check: raise SlurmError if that fails."""
        try:
            cancel([self.job_id])
        except SlurmError:
            if check:
                raise
        self.watcher.look_soon(self.job_id)

    def _has_result(self) -> bool:
        try:
            return is_listed(self.paths.result_pickle)
        except FileNotFoundError:
            return False
