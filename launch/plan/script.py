"""The exact batch scripts of a run.  Pure.  Input: JobPlan.  Output: text.

A script holds the directives of its components, the prologue of the site, and the start of the supervisor, which
replaces the shell (exec) so that Slurm's signals to the batch step (B:) reach it.  It is plain bash 4 and needs nothing
that is not on every node.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from launch.plan.jobs import Component, Job, JobPlan
from launch.plan.site_file import ClusterConfig, PrologueConfig
from launch.plan.site_values import slurm_time

SHORTEST_WARNED_S = 300  # time limit of jobs that are warned of it
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
    """One script, ready for sbatch.  The directory of its log must exist before: Slurm makes none."""
    lines = ["#!/bin/bash", f"# {plan.run_name} on {plan.cluster.name}: {_content(job)}.  Written by rlhpc."]
    lines += [f"#SBATCH {directive}" for directive in _job_directives(plan, job)]
    for index, component in enumerate(job.components):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {directive}" for directive in component_directives(component)]
    return "\n".join([*lines, "", _OPENING, *_prologue(plan.prologue), _start(plan, job), ""])


def render_command(plan: JobPlan, directives: Iterable[str], words: Sequence[str]) -> str:
    """A script that does one command after the site's prologue, without a supervisor."""
    lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives)]
    return "\n".join([*lines, "", _OPENING, *_prologue(plan.prologue), f"exec {shlex.join(words)}", ""])


def component_directives(component: Component) -> Iterator[str]:
    """What one component asks for, one directive each, in a fixed order."""
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


def _generic_resources(component: Component) -> Iterator[str]:
    """GPUs in the form of the site, and what the site file asks for beside them; sbatch heeds the last --gres alone."""
    request, more = _gpu_request(component) if component.gpus_per_task else "", component.allocation.gres
    if more is None:
        yield from filter(None, [request])
    elif request.startswith("--gres="):
        yield f"{request},{more}"
    else:
        yield from filter(None, [request, f"--gres={more}"])


def _gpu_request(component: Component) -> str:
    kind = f"{component.gres_type}:" if component.gres_type else ""
    match component.gpu_request:
        case "gres":
            return f"--gres=gpu:{kind}{component.gpus_per_node}"
        case "gpus-per-node":
            return f"--gpus-per-node={kind}{component.gpus_per_node}"
        case "gpus-per-task":
            return f"--gpus-per-task={kind}{component.gpus_per_task}"


def _job_directives(plan: JobPlan, job: Job) -> Iterator[str]:
    """What holds for the whole job; in a heterogeneous one component 0 says it."""
    first, number = job.components[0], "%j" if job.array_size is None else "%A_%a"
    yield f"--job-name={plan.run_name}" + ("" if job.name == "hetjob" else f".{job.name}")
    yield f"--output={plan.log_directory / f'{job.name}-{number}.log'}"
    yield "--open-mode=append"  # a requeued job goes on in the log that it began
    yield "--requeue" if plan.cluster.continuation == "requeue" else "--no-requeue"
    yield from warning(plan.cluster, first)
    if job.array_size is not None:
        yield f"--array=0-{job.array_size - 1}"
    if plan.cluster.mail is not None and first.name == "controller":  # its end is the end of the run
        yield f"--mail-user={plan.cluster.mail}"
        yield f"--mail-type={','.join(plan.cluster.mail_events)}"


def warning(cluster: ClusterConfig, component: Component) -> Iterator[str]:
    """The signal before the time limit, as a directive; none in a short job, which reckons its end itself."""
    # To the batch step alone (B:), and USR2: NCCL may catch USR1.  Slurm may send it a minute early, and one that comes
    # before the script runs ends the job.
    if (time_s := component.allocation.time_s) >= SHORTEST_WARNED_S:
        yield f"--signal=B:USR2@{min(cluster.warn_s, time_s // 4)}"


def _content(job: Job) -> str:
    names = [component.name for component in job.components]
    return "component " + ", ".join(f"{k} {name}" for k, name in enumerate(names)) if len(names) > 1 else names[0]


# ------------------------------------------------------------------------------------------------------------ prologue


def _prologue(prologue: PrologueConfig) -> Iterator[str]:
    """Blocks of lines, each ended by a newline of its own."""
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
    """Quote for bash so that $NAME is expanded and nothing else is."""
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
