"""An evaluation as one Slurm job: the command itself, on a node with the GPUs of the site's [generation].

Input: settings, the directory of the evaluation, the words of the command.  Output: a script, and a job in the queue.
A job that is preempted is requeued and goes on with what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from launch.commands.evaluate.evaluation import Evaluation
from launch.common.paths import without_dots
from launch.plan.jobs import Component, Job, JobPlan, plan_jobs
from launch.plan.report import role_command, shared_layout
from launch.plan.script import component_directives, render_command
from launch.plan.site_file import load_site
from launch.slurm.sbatch import submit_once
from rlhpc.config import with_values
from rlhpc.errors import ConfigError
from rlhpc.files import write_atomically

SCRIPT = "job.sbatch"


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """A job that is ready to be submitted."""

    jobs: JobPlan
    directory: Path
    script: str

    @classmethod
    def plan(cls, evaluation: Evaluation, site_file: Path) -> Self:
        """Writes nothing.  Raises ConfigError: a fault of the site file, or replicas that do not fit one node."""
        directory = evaluation.directory
        site = load_site(site_file)
        config = with_values(evaluation.settings.config, {"run.directory": directory, "run.name": "evaluation"})
        plan = plan_jobs(config, site, shared_layout(config, site))
        component = _on_one_node(
            next(part for job in plan.jobs for part in job.components if part.name == "generation")
        )
        plan = replace(plan, jobs=(Job("evaluation", (component,)),))
        directives = [
            f"--job-name=rlhpc-evaluate-{directory.name}",
            f"--output={directory / 'job-%j.log'}",
            "--open-mode=append",
            "--requeue" if plan.cluster.continuation == "requeue" else "--no-requeue",
            *component_directives(component),
        ]
        words = [*role_command(plan, component), "-m", "launch.cli", *_words(evaluation)]
        return cls(plan, directory, render_command(plan, directives, words))

    def submit(self, tell: Callable[[str], None]) -> None:
        """Put it into the queue.  Raises SlurmError."""
        path = self.directory / SCRIPT
        write_atomically(path, self.script.encode())
        job = submit_once(path)
        tell(f"submitted job {job}; it says how far it is in {self.directory / f'job-{job}.log'}")
        tell(f"figures come into {self.directory / 'summary.json'}; the same command without --site prints them")


def _on_one_node(component: Component) -> Component:
    """All replicas as one task, whose launcher shares the GPUs out."""
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
    words += ["--samples", str(request.samples), "--temperature", f"{request.temperature:g}", "--out", str(directory)]
    return words if request.prompts is None else [*words, "--prompts", str(request.prompts)]
