"""A job plan as text for people and as JSON for the supervisor.

Input: JobPlan.  Output: text.  The JSON is an interface: the supervisor reads it with the standard library alone, on a
node that may have nothing else.  docs/slurm.md lists the fields; new fields are added at the end.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.common.counted import counted
from launch.common.paths import without_dots
from launch.common.text_table import aligned
from launch.plan.jobs import Component, Job, JobPlan, plan_jobs
from launch.plan.processes import NO_GPU, ROLE_ENVIRONMENT, thread_defaults
from launch.plan.script import render_scripts
from launch.plan.site_file import Site
from launch.plan.site_values import slurm_time
from launch.run_files.plan_file import Limits, plan_text
from rlhpc.config import Config
from rlhpc.run_layout import RunLayout


def plan_report(config: Config, site: Site) -> str:
    """What `rlhpc plan` prints: the plan, and every script under its name.  Raises ConfigError as plan_jobs does."""
    return describe_with_scripts(plan_jobs(config, site, shared_layout(config, site)))


def describe_with_scripts(plan: JobPlan) -> str:
    """The plan in words, and every script under its name."""
    scripts = [f"\n----- {name}\n{text.rstrip()}" for name, text in render_scripts(plan).items()]
    return "\n".join([describe_jobs(plan), *scripts])


def shared_layout(config: Config, site: Site) -> RunLayout:
    """The run directory by the name that compute nodes know, where a symbolic link here gives it another."""
    directory = without_dots(config.run_directory)  # or "shared/../elsewhere" would count as shared
    if site.cluster is None or directory.is_relative_to(site.cluster.shared_directory):
        return RunLayout(directory)
    real, shared = directory.resolve(), site.cluster.shared_directory
    is_inside = real.is_relative_to(shared.resolve())
    return RunLayout(shared / real.relative_to(shared.resolve()) if is_inside else directory)


def describe_jobs(plan: JobPlan) -> str:
    """Describe in a few lines what will be requested."""
    nodes = sum(c.nodes * (job.array_size or 1) for job in plan.jobs for c in job.components)
    gpus = sum(c.num_tasks * c.gpus_per_task * (job.array_size or 1) for job in plan.jobs for c in job.components)
    is_heterogeneous = any(len(job.components) > 1 for job in plan.jobs)
    number = f"{len(plan.jobs)} jobs" if len(plan.jobs) > 1 else "one job"
    jobs = "one heterogeneous job" if is_heterogeneous else number
    rows: list[tuple[str, ...]] = [("", "processes", "nodes", "tasks", "CPUs", "GPUs", "GiB", "time", "partition")]
    rows += [_row(job, component) for job in plan.jobs for component in job.components]
    return "\n".join(
        [
            f"run         {plan.run_name} in {plan.layout.root}",
            f"jobs        {jobs} on {plan.cluster.name}: {counted(nodes, 'node')}, {counted(gpus, 'GPU')}",
            *(f"  {line}" for line in aligned(rows)),
            "            tasks: on a node; CPUs, GPUs: of a task; GiB: host memory of a task",
        ]
    )


def _row(job: Job, component: Component) -> tuple[str, ...]:
    count = f"{job.array_size} × " if job.array_size is not None else ""
    memory = component.memory_gib_per_task
    return (
        component.name,
        count + ", ".join(f"{share.num_processes} {share.role}" for share in component.roles),
        str(component.nodes),
        str(component.tasks_per_node),
        str(component.cpus_per_task),
        str(component.gpus_per_task or "-"),
        "default" if memory is None else str(memory or "all"),
        slurm_time(component.allocation.time_s),
        component.allocation.partition or "(default)",
    )


def plan_document(plan: JobPlan) -> str:
    """The plan as JSON text."""
    cluster = plan.cluster
    limits = Limits(cluster.meet_s, cluster.stall_s, cluster.max_retries, plan.dead_after_s, plan.log_bytes)
    jobs = [
        {"name": job.name, "array_size": job.array_size, "components": component_documents(plan, job)}
        for job in plan.jobs
    ]
    return plan_text(plan.layout.root, plan.placement, jobs, cluster.continuation, limits)


def component_documents(plan: JobPlan, job: Job) -> list[dict[str, Any]]:
    """The part of the JSON that is about one job's components."""
    return [_component_document(plan, component) for component in job.components]


def _component_document(plan: JobPlan, component: Component) -> dict[str, Any]:
    return {
        "name": component.name,
        "runs_in_batch_step": component.runs_in_batch_step,
        "roles": [asdict(share) for share in component.roles],
        "nodes": component.nodes,
        "tasks_per_node": component.tasks_per_node,
        "cpus_per_task": component.cpus_per_task,
        "gpus_per_task": component.gpus_per_task,
        "srun": srun_sizes(component),
        "time_s": component.allocation.time_s,
        "python": role_command(plan, component),
        "environment": ROLE_ENVIRONMENT | (NO_GPU if component.hides_gpus else {}),
        "defaults": thread_defaults(component.num_threads),
    }


def srun_sizes(component: Component) -> list[str]:
    """Sizes given to every srun of the component, whatever Slurm has put into the environment; none in a batch step.

    No GPUs: a step then has all of the component's on a node, and every task sees them.  --gpus-per-task would bind
    each task to its own, and NCCL between confined tasks (ConstrainDevices) fails; with --gpu-bind=none beside it,
    tasks of Slurm 22.05 see no GPU at all.
    """
    if component.runs_in_batch_step:
        return []
    sizes = [f"--nodes={component.nodes}", f"--ntasks={component.num_tasks}"]
    return [*sizes, f"--ntasks-per-node={component.tasks_per_node}", f"--cpus-per-task={component.cpus_per_task}"]


def role_command(plan: JobPlan, component: Component) -> list[str]:
    """The words before `-m rlhpc.roles …`: an interpreter, in an image if the site has one."""
    prologue = plan.prologue
    if prologue.image is None:
        return [prologue.python]
    shared = plan.cluster.shared_directory
    code: list[Path] = [] if prologue.code is None or prologue.code.is_relative_to(shared) else [prologue.code]
    binds = ",".join([str(shared), *map(str, code), *prologue.binds])
    gpus = ["--nv"] if component.gpus_per_task else []
    return ["apptainer", "exec", *gpus, "--bind", binds, str(prologue.image), "python3"]
