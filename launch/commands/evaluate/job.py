"""Evaluations as Slurm jobs: the command itself, on a node with the GPUs of the site's [evaluation] or [generation].

Input: what is to be evaluated, a site file.  Output: a script, and a job in the queue.  A job that is preempted is
requeued and goes on with what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from launch.commands.evaluate.evaluation import Evaluation
from launch.commands.evaluate.request import of_run_file
from launch.commands.evaluate.settings import evaluation_config
from launch.commands.evaluate.target import target_of
from launch.common.paths import without_dots
from launch.plan.jobs import Component, Job, JobPlan, plan_jobs
from launch.plan.report import role_command, shared_layout
from launch.plan.script import component_directives, render_command, warning
from launch.plan.site_file import Site
from launch.slurm.sbatch import submit_script
from rlhpc.config import Config, with_values
from rlhpc.errors import ConfigError
from rlhpc.files import write_atomically

SCRIPT = "job.sbatch"
PATIENCE_S = 900.0  # with a run that shows nothing, in a job that could give its node back


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """A job that is ready to be submitted."""

    jobs: JobPlan
    directory: Path  # of its script and log
    script: str

    @classmethod
    def of(cls, evaluation: Evaluation, site: Site) -> Self:
        """One evaluation; writes nothing.

        Raises ConfigError: a fault of the site file, or replicas that do not fit one node.
        """
        plan = _plan(evaluation.settings.config, evaluation.directory, site)
        name = f"rlhpc-evaluate-{evaluation.directory.name}"
        return cls(plan, evaluation.directory, _script(plan, name, evaluation.directory, _words(evaluation)))

    @classmethod
    def following(cls, config: Config, site: Site) -> Self:
        """What [[evaluation]] of a run's settings asks for, as long as the run goes on.  Raises as `of` does."""
        config = with_values(config, {"run.directory": shared_layout(config, site).root})
        first, *_ = of_run_file(config)
        engines = max(table.num_replicas for table in config.evaluation)
        target = target_of(config)
        like = with_values(evaluation_config(target, first.data, first.words), {"generation.num_replicas": engines})
        plan = _plan(like, target.home, site)
        words = ["evaluate", str(config.run_directory), "--follow", "--patience-s", f"{PATIENCE_S:g}"]
        directives = [*warning(plan.cluster, plan.jobs[0].components[0])]
        name = f"{config.run.name}.evaluation"
        return cls(plan, target.home, _script(plan, name, target.home, words, directives))

    def submit(self, *options: str, record: Callable[[int], object] = lambda job: None) -> int:
        """Put it into the queue, have it recorded, and return its id.  options: of sbatch.  Raises SlurmError."""
        path = self.directory / SCRIPT
        write_atomically(path, self.script.encode(), mode=0o700)  # [prologue.environment] may be private
        return submit_script(path, options, record=record)


def _plan(config: Config, directory: Path, site: Site) -> JobPlan:
    """One task for all engines, whose command shares the GPUs out."""
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


def _on_one_node(component: Component) -> Component:
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


def _words(evaluation: Evaluation) -> list[str]:
    """The command on the node, where relative paths mean nothing, and when the run may have saved another step."""
    target, directory, request = evaluation.target, evaluation.directory, evaluation.request
    words = ["evaluate", str(target.checkpoint or target.model), str(without_dots(request.data)), *request.words]
    words += ["--samples", str(request.samples), "--temperature", str(request.temperature), "--out", str(directory)]
    words += ["--ema"] if request.is_average else []
    return words if request.prompts is None else [*words, "--prompts", str(request.prompts)]
