"""Evaluations as Slurm jobs: the command itself, on a node with the GPUs of the site's [evaluation] or [generation].

Input: evaluations, a site file.  Output: a script, and a job in the queue.  A preempted job is requeued and continues
from the samples on disk.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

from launch.common.text import quoted, without_dots
from launch.evaluate.evaluation import Evaluation
from launch.evaluate.request import evaluation_config, of_run_file, target_of
from launch.plan.jobs import Job, JobComponent, JobPlan, plan_jobs
from launch.plan.script import component_directives, render_command, role_command, shared_layout, warning
from launch.plan.site_file import Site
from launch.slurm.commands import SlurmError
from launch.slurm.queue import PATIENCE_S, ThisJob, cancel, look_at_jobs
from launch.slurm.sbatch import submit_script
from rlhpc.base.files import PRIVATE, leave_deleted_directory, write_atomically
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config, with_values
from rlhpc.protocol.errors import ConfigError

# ------------------------------------------------------------------------------------------------------------------ job


SCRIPT = "job.sbatch"
FOLLOW_PATIENCE_S = 900.0  # with a silent run, after which the job gives its node back


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """A job that is ready to be submitted."""

    jobs: JobPlan
    directory: Path  # holds its script and log
    script: str

    @classmethod
    def of(cls, group: Sequence[Evaluation], site: Site) -> Self:
        """Plan a job for evaluations by the same engines, in the directory of the first; writes nothing.

        Raises ConfigError: a fault of the site file, or replicas that do not fit one node.
        """
        directory = group[0].directory
        plan = _plan(group[0].settings.config, directory, site)
        return cls(plan, directory, _script(plan, f"rlhpc-evaluate-{directory.name}", directory, _words(group)))

    @classmethod
    def following(cls, config: Config, site: Site) -> Self:
        """Plan a job for a run's [[evaluation]] tables, as long as the run goes on.  Raises as `of`."""
        config = with_values(config, {"run.directory": shared_layout(config, site).root})
        first, *_ = of_run_file(config)
        engines = max(table.num_replicas for table in config.evaluation)
        target = target_of(config)
        like = with_values(evaluation_config(target, first.data, first.words), {"generation.num_replicas": engines})
        plan = _plan(like, target.home, site)
        words = ["evaluate", str(config.run_directory), "--follow", "--patience-s", f"{FOLLOW_PATIENCE_S:g}"]
        directives = [*warning(plan.cluster, plan.jobs[0].components[0])]
        name = f"{config.run.name}.evaluation"
        return cls(plan, target.home, _script(plan, name, target.home, words, directives))

    def submit(self, *options: str, record: Callable[[int], object] = lambda job: None) -> int:
        """Submit and record the job; return its id.  options: for sbatch.  Raises SlurmError."""
        path = self.directory / SCRIPT
        write_atomically(path, self.script.encode(), mode=0o700)  # [prologue.environment] may be private
        return submit_script(path, options, record=record)


def _plan(config: Config, directory: Path, site: Site) -> JobPlan:
    """Plan one task for all engines; its command distributes the GPUs among them."""
    if site.evaluation is not None:
        site = site.model_copy(update={"generation": site.evaluation})
    config = with_values(config, {"run.directory": directory, "run.name": "evaluation"})
    plan = plan_jobs(config, site, shared_layout(config, site))
    component = _on_one_node(next(part for part in plan.components if part.name == "generation"))
    return replace(plan, jobs=(Job("evaluation", (component,)),))


def _script(plan: JobPlan, name: str, directory: Path, words: Sequence[str], directives: Iterable[str] = ()) -> str:
    component = plan.jobs[0].components[0]
    lines = [
        f"--job-name={name}",
        f"--output={directory / 'job-%j.log'}",
        "--open-mode=append",
        "--requeue" if plan.cluster.continuation == "requeue" else "--no-requeue",
        *directives,
        *component_directives(component),
    ]
    return render_command(plan, lines, [*role_command(plan, component), "-u", "-P", "-m", "launch.cli", *words])


def _on_one_node(component: JobComponent) -> JobComponent:
    if component.nodes > 1:
        raise ConfigError(
            f"generation.num_replicas={component.num_tasks} need {component.nodes} nodes, and an evaluation has one; "
            f"legal: at most {component.tasks_per_node}"
        )
    tasks, memory = component.tasks_per_node, component.memory_gib_per_task
    return replace(
        component,
        tasks_per_node=1,
        cpus_per_task=tasks * component.cpus_per_task,
        gpus_per_task=tasks * component.gpus_per_task,
        memory_gib_per_task=None if memory is None else tasks * memory,
    )


def _words(group: Sequence[Evaluation]) -> list[str]:
    """Words of the command on the node: with absolute paths, and the step, since the run may save another."""
    target, directory, request = group[0].target, group[0].directory, group[0].request
    words = ["evaluate", str(target.place), str(without_dots(request.data)), *request.words]
    words += ["--samples", str(request.samples), "--temperature", str(request.temperature)]
    for other in group[1:]:
        words += ["--with", str(other.target.place)]
    words += ["--out", str(directory)] if len(group) == 1 else []
    words += ["--ema"] if request.is_average else []
    words += [] if target.run is None else ["--run", str(target.run)]
    return words if request.prompts is None else [*words, "--prompts", str(request.prompts)]


# -------------------------------------------------------------------------------------------------------- following job
#
# The Slurm job that evaluates a run while it trains: submitted beside the run's own jobs, and once only.
#
# Input: settings of a run, a site file.  Output: a job that waits for the run's first one; its id in
# evaluations/job.json.  It is not one of the run's jobs: nothing waits for it, and the run ends without it.


ENDED_S = 60.0  # for a cancelled job to end
Tell = Callable[[str], None]


class TimeIsUp(BaseException):
    """Raised when this job is close to its time limit; like KeyboardInterrupt it passes `except Exception`."""


def submit_following(config: Config, layout: RunLayout, site: Site, controller_job: int | None, tell: Tell) -> None:
    """Submit the job, to start after the controller's job has; an existing one is left to go on.

    Raises ConfigError, SlurmError.
    """
    job = following_job(layout)
    if job is not None and _is_alive(job):
        tell(f"evaluation  job {job} goes on")
        return
    layout.evaluations.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    options = [] if controller_job is None else [f"--dependency=after:{controller_job}"]
    submitted = EvaluationJob.following(config, site).submit(*options, record=partial(_record, layout))
    tell(f"evaluation  job {submitted}; its figures are in {layout.evaluations}, and in TensorBoard")


def following_job(layout: RunLayout) -> int | None:
    """Id of the job submitted last; None if there is none."""
    try:
        return int(json.loads(_record_of(layout).read_bytes())["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_following_job(layout: RunLayout) -> bool:
    """Whether this process is that job."""
    return os.environ.get("SLURM_JOB_ID") == str(following_job(layout))


def end_following(layout: RunLayout, tell: Tell) -> None:
    """Cancel the job that evaluates a run, if there is one, and wait for its end.  Raises SlurmError."""
    job = following_job(layout)
    if job is None or is_following_job(layout) or not _is_alive(job):
        return
    cancel([job], patience_s=PATIENCE_S)
    deadline = Deadline(ENDED_S)
    while _is_alive(job) and not deadline.is_over:
        time.sleep(1.0)
    tell(f"cancelled    evaluation job {job}; `rlhpc evaluate {quoted(layout.root)}` evaluates the newest checkpoint")


class TimeWarning:
    """Notes Slurm's warning before the job's time limit, and raises TimeIsUp in `remind`.

    Not in the handler: pydantic and torch turn an exception of a signal handler into errors of their own, and Python
    drops one that is raised while an object is being finalised.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._has_come = False

    def __enter__(self) -> Self:
        if "SLURM_JOB_ID" in os.environ:
            self._before = signal.signal(signal.SIGUSR2, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if "SLURM_JOB_ID" in os.environ:
            signal.signal(signal.SIGUSR2, self._before)

    def remind(self) -> None:
        """Raise TimeIsUp if the warning has come; KeyboardInterrupt if the job is not the one that evaluates a run."""
        if self._has_come:
            # Checked only now: this process may have started before its job was recorded.
            raise TimeIsUp if is_following_job(self._layout) else KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True


def go_on_later(layout: RunLayout, tell: Tell) -> int:
    """Requeue the job, or submit a successor if the site forbids that.  Returns the exit status of the batch step."""
    job = ThisJob.of(os.environ)
    tell("this job is close to its time limit; it goes on after its requeue")
    try:
        job.requeue_and_end()
    except SlurmError as error:
        tell(f"not requeued ({error}); job {_succeed(layout, f'--dependency=afterany:{job.job_id}')} goes on")
    return 0


def look_again_later(layout: RunLayout, tell: Tell) -> int:
    """Free the node while the run itself waits in the queue.  Returns the exit status of the batch step."""
    tell(f"the run waits in the queue; job {_succeed(layout, '--begin=now+1hour')} looks again in an hour")
    return 0


def _succeed(layout: RunLayout, option: str) -> int:
    leave_deleted_directory(layout.root)
    return submit_script(layout.evaluations / SCRIPT, (option,), record=partial(_record, layout), patience_s=PATIENCE_S)


def _record_of(layout: RunLayout) -> Path:
    return layout.evaluations / "job.json"


def _record(layout: RunLayout, job: int) -> None:
    write_atomically(_record_of(layout), json.dumps({"job_id": job}).encode())


def _is_alive(job: int) -> bool:
    """Whether a job is alive; True also if Slurm does not answer: a second job would do the same work."""
    look = look_at_jobs([job])
    return bool(look.trouble) or any(row.state.is_alive for row in look.rows)
