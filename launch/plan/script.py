"""The exact batch scripts of a run.  Pure.  Input: JobPlan.  Output: text.

A script holds the directives of its components, the prologue of the site, and the start of the supervisor, which
replaces the shell (exec) so that Slurm's signals to the batch step (B:) reach it.  It is plain bash 4 and needs nothing
that is not on every node.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.common.text import aligned, counted, without_dots
from launch.plan.jobs import Job, JobComponent, JobPlan, plan_jobs
from launch.plan.processes import NO_GPU, ROLE_ENVIRONMENT, thread_defaults
from launch.plan.site_file import ClusterConfig, PrologueConfig, Site, slurm_time
from launch.run_files.plan_file import Limits, plan_text
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config

# --------------------------------------------------------------------------------------------------------------- script

SHORTEST_WARNED_S = 300  # shortest time limit of a job that gets a warning before it
_OPENING = """\
trap '' USR2  # until the supervisor listens
# What Slurm sets for component 0 would hold for the srun of every other one; the supervisor says all sizes itself.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
# Tasks that are bound to a GPU each cannot reach each other's.
unset SLURM_GPUS_PER_TASK SLURM_TRES_BIND SLURM_GPU_BIND
# Commands of Slurm on a node are for the node's own cluster.
unset RLHPC_SLURM_CLUSTER
# Steps get what is set below, also where the site submits with --export=NONE.
export SLURM_EXPORT_ENV=ALL
failed() { echo "rlhpc: prologue: '$*' failed on $(uname -n)" >&2; exit 2; }
"""
_OFFLINE = """\
# Nothing on a compute node looks for the internet; shared filesystems often have no locks.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HDF5_USE_FILE_LOCKING=FALSE
"""
_FIND_MODULE = """\
for file in /etc/profile.d/{lmod,z00_lmod,modules}.sh; do  # a batch shell does not always have them
    command -v module >/dev/null || { [ -r "$file" ] && . "$file"; }
done
"""


def render_scripts(plan: JobPlan) -> dict[str, str]:
    """Text of every script by its file name, in the order in which they are submitted."""
    return {f"{job.name}.sbatch": render_script(plan, job) for job in plan.jobs}


def render_script(plan: JobPlan, job: Job) -> str:
    """Text of one script, ready for sbatch.  The directory of its log must exist: Slurm does not make it."""
    lines = ["#!/bin/bash", f"# {plan.run_name} on {plan.cluster.name}: {_content(job)}.  Written by rlhpc."]
    lines += [f"#SBATCH {directive}" for directive in _job_directives(plan, job)]
    for index, component in enumerate(job.components):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {directive}" for directive in component_directives(component)]
    return "\n".join([*lines, "", _OPENING, *_prologue(plan.prologue), _start(plan, job), ""])


def render_command(plan: JobPlan, directives: Iterable[str], words: Sequence[str]) -> str:
    """Text of a script that runs one command after the site's prologue, without a supervisor."""
    lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives)]
    return "\n".join([*lines, "", _OPENING, *_prologue(plan.prologue), f"exec {shlex.join(words)}", ""])


def component_directives(component: JobComponent) -> Iterator[str]:
    """Yield the resource directives of one component, in a fixed order."""
    allocation = component.allocation
    named = {"partition": allocation.partition, "account": allocation.account, "qos": allocation.qos}
    named |= {"constraint": allocation.constraint, "reservation": allocation.reservation}
    yield from (f"--{key}={value}" for key, value in named.items() if value is not None)
    yield f"--time={slurm_time(allocation.time_s)}"
    yield f"--nodes={component.nodes}"
    yield f"--ntasks={component.num_tasks}"
    yield f"--ntasks-per-node={component.tasks_per_node}"
    yield f"--cpus-per-task={component.cpus_per_task}"
    yield from _generic_resources(component)
    if component.memory_gib_per_task is not None:
        whole = component.memory_gib_per_task * component.tasks_per_node
        yield f"--mem={whole}G" if whole else "--mem=0"
    if allocation.exclusive:
        yield "--exclusive"
    yield from allocation.extra


def _generic_resources(component: JobComponent) -> Iterator[str]:
    """Yield directives for GPUs in the site's form and its other gres: sbatch uses only the last --gres."""
    request, more = _gpu_request(component) if component.gpus_per_task else "", component.allocation.gres
    if more is None:
        yield from filter(None, [request])
    elif request.startswith("--gres="):
        yield f"{request},{more}"
    else:
        yield from filter(None, [request, f"--gres={more}"])


def _gpu_request(component: JobComponent) -> str:
    kind = f"{component.gres_type}:" if component.gres_type else ""
    match component.gpu_request:
        case "gres":
            return f"--gres=gpu:{kind}{component.gpus_per_node}"
        case "gpus-per-node":
            return f"--gpus-per-node={kind}{component.gpus_per_node}"
        case "gpus-per-task":
            return f"--gpus-per-task={kind}{component.gpus_per_task}"


def _job_directives(plan: JobPlan, job: Job) -> Iterator[str]:
    """Yield directives of the whole job; in a heterogeneous job they belong to component 0."""
    first, number = job.components[0], "%j" if job.array_size is None else "%A_%a"
    yield f"--job-name={plan.run_name}" + ("" if job.name == "hetjob" else f".{job.name}")
    yield f"--output={plan.log_directory / f'{job.name}-{number}.log'}"
    yield "--open-mode=append"  # a requeued job continues its log
    yield "--requeue" if plan.cluster.continuation == "requeue" else "--no-requeue"
    yield from warning(plan.cluster, first)
    if job.array_size is not None:
        yield f"--array=0-{job.array_size - 1}"
    if plan.cluster.mail is not None and first.name == "controller":  # the run ends with the controller's job
        yield f"--mail-user={plan.cluster.mail}"
        yield f"--mail-type={','.join(plan.cluster.mail_events)}"


def warning(cluster: ClusterConfig, component: JobComponent) -> Iterator[str]:
    """Yield the directive for a signal before the time limit; none in a short job, which computes its own end."""
    # B: to the batch step alone.  USR2: NCCL may catch USR1.  Slurm may send it a minute early, and a signal before the
    # script runs ends the job: so none in short jobs.
    if (time_s := component.allocation.time_s) >= SHORTEST_WARNED_S:
        yield f"--signal=B:USR2@{min(cluster.warn_s, time_s // 4)}"


def _content(job: Job) -> str:
    names = [component.name for component in job.components]
    return "component " + ", ".join(f"{k} {name}" for k, name in enumerate(names)) if len(names) > 1 else names[0]


# ------------------------------------------------------------------------------------------------------------ prologue


def _prologue(prologue: PrologueConfig) -> Iterator[str]:
    """Yield blocks of lines, each ending with a newline."""
    if prologue.modules or prologue.module_purge:
        lines = ["module purge"] if prologue.module_purge else []
        lines += [f"module load {shlex.quote(name)}" for name in prologue.modules]
        yield _FIND_MODULE + "".join(_checked(line) for line in lines)
    if prologue.venv is not None:
        yield _checked(f"source {shlex.quote(str(prologue.venv / 'bin' / 'activate'))}")
    if prologue.conda is not None:
        yield _checked(f"source {shlex.quote(str(prologue.conda / 'etc' / 'profile.d' / 'conda.sh'))}") + _checked(
            f"conda activate {shlex.quote(prologue.conda_environment or 'base')}"
        )
    yield _OFFLINE + "".join(f"{line}\n" for line in _exports(prologue))
    if prologue.commands:
        yield "".join(f"{line}\n(($? == 0)) || failed {shlex.quote(line)}\n" for line in prologue.commands)


def _exports(prologue: PrologueConfig) -> Iterator[str]:
    if prologue.image is not None:
        yield "export PYTHONNOUSERSITE=1  # else packages of ~/.local win over the image's"
    if prologue.code is not None:
        yield f"export PYTHONPATH={shlex.quote(str(prologue.code))}${{PYTHONPATH:+:$PYTHONPATH}}"
    if prologue.nccl_interface is not None:
        name = shlex.quote(prologue.nccl_interface)
        yield f"export NCCL_SOCKET_IFNAME={name} RLHPC_INTERFACE={name}"
    for key, value in prologue.environment.items():
        yield f"export {key}={_in_double_quotes(value)}"


def _in_double_quotes(value: str) -> str:
    """Quote for bash so that only $NAME is expanded."""
    quoted = re.sub(r'(["`\\]|\$(?![A-Za-z_{]))', r"\\\1", value)
    return f'"{quoted}"'


def _checked(line: str) -> str:
    return f"{line} || failed {shlex.quote(line)}\n"


def _start(plan: JobPlan, job: Job) -> str:
    root = plan.layout.root
    unsearched = [] if plan.prologue.image else ["-P"]  # beside an image it may be a Python 3.9, which knows no -P
    words = [plan.prologue.python, "-u", *unsearched, "-m", "launch.supervisor", "--run-dir", str(root)]
    words += ["--plan", str(plan.plan_file), "--job", job.name]
    return "exec " + shlex.join(words)


# --------------------------------------------------------------------------------------------------------------- report
#
# A job plan as text for people and as JSON for the supervisor.
#
# Input: JobPlan.  Output: text.  The JSON is an interface: the supervisor reads it with the standard library alone, on
# a node that may have nothing else.  launch/run_files/plan_file.py explains its fields; new ones are added at the end.


def plan_report(config: Config, site: Site) -> str:
    """Text of `rlhpc plan`: the plan, and every script under its name.  Raises ConfigError as plan_jobs."""
    return describe_with_scripts(plan_jobs(config, site, shared_layout(config, site)))


def describe_with_scripts(plan: JobPlan) -> str:
    """Text of the plan, and every script under its name."""
    scripts = [f"\n----- {name}\n{text.rstrip()}" for name, text in render_scripts(plan).items()]
    return "\n".join([describe_jobs(plan), *scripts])


def shared_layout(config: Config, site: Site) -> RunLayout:
    """The run directory by its path on compute nodes, if a symbolic link on this machine leads to it."""
    directory = without_dots(config.run_directory)  # else "shared/../elsewhere" would count as shared
    if site.cluster is None or directory.is_relative_to(site.cluster.shared_directory):
        return RunLayout(directory)
    real, shared = directory.resolve(), site.cluster.shared_directory
    is_inside = real.is_relative_to(shared.resolve())
    return RunLayout(shared / real.relative_to(shared.resolve()) if is_inside else directory)


def describe_jobs(plan: JobPlan) -> str:
    """Describe the requested resources in a few lines."""
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


def _row(job: Job, component: JobComponent) -> tuple[str, ...]:
    count = f"{job.array_size} × " if job.array_size is not None else ""
    memory = component.memory_gib_per_task
    return (
        component.name,
        count + ", ".join(share.describe() for share in component.roles),
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
    """JSON objects of one job's components."""
    return [
        {
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
        for component in job.components
    ]


def srun_sizes(component: JobComponent) -> list[str]:
    """Options with sizes for every srun of the component, overriding Slurm's environment; none in a batch step.

    No option for GPUs: a step then has all of the component's GPUs on a node, and every task sees them.
    --gpus-per-task would bind each task to its own GPU, and NCCL between confined tasks (ConstrainDevices) fails; with
    --gpu-bind=none in addition, tasks of Slurm 22.05 see no GPU at all.
    """
    if component.runs_in_batch_step:
        return []
    sizes = [f"--nodes={component.nodes}", f"--ntasks={component.num_tasks}"]
    return [*sizes, f"--ntasks-per-node={component.tasks_per_node}", f"--cpus-per-task={component.cpus_per_task}"]


def role_command(plan: JobPlan, component: JobComponent) -> list[str]:
    """Words before `-m rlhpc.roles …`: an interpreter, in an image if the site has one."""
    prologue = plan.prologue
    if prologue.image is None:
        return [prologue.python]
    shared = plan.cluster.shared_directory
    code: list[Path] = [] if prologue.code is None or prologue.code.is_relative_to(shared) else [prologue.code]
    binds = ",".join([str(shared), *map(str, code), *prologue.binds])
    gpus = ["--nv"] if component.gpus_per_task else []
    return ["apptainer", "exec", *gpus, "--bind", binds, str(prologue.image), "python3"]
