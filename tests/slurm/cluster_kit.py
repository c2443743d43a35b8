"""What tests ask of a dev cluster, in one line each: submit a job, wait for its state, look at its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.processes import Process
from rlhpc.base.patience import Deadline
from rlhpc.protocol.errors import RoleFailed

PATIENCE_S = 120.0  # what takes a second on a quiet machine has come by then on one where 20 others work
MakeCluster = Callable[..., DevCluster]  # (shape: ClusterShape | None = None, installation: Installation | None = None)


def submit(cluster: DevCluster, script: str, *options: str) -> int:
    """Submit `script` (lines of sh) with sbatch's options; returns the job id.  Its output goes to job_output()."""
    out = cluster.layout.root / "out"
    out.mkdir(exist_ok=True)
    path = out / f"{time.monotonic_ns()}.sh"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    common = (f"--chdir={out}", f"--output={out}/%j.txt", "--open-mode=append", "--mem=16M")
    return int(cluster.run("sbatch", "--parsable", *common, *options, str(path)))


def job_output(cluster: DevCluster, job: int) -> str:
    """What the batch steps of a job have printed, all its lives in one."""
    path = cluster.layout.root / "out" / f"{job}.txt"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def known_jobs(cluster: DevCluster) -> set[str]:
    """Ids of all jobs that Slurm remembers, those that have ended lately included."""
    return set(cluster.run("squeue", "--noheader", "--states=all", "--format=%i").split())


def job_state(cluster: DevCluster, job: int) -> str:
    """PENDING, RUNNING, COMPLETED, …; of a heterogeneous job that of its first component."""
    return _shown(cluster, job, "%T")


def job_node(cluster: DevCluster, job: int) -> str:
    """Where it runs."""
    return _shown(cluster, job, "%N")


def _shown(cluster: DevCluster, job: int, field: str) -> str:
    lines = cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format=%i {field}").splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
    return rows.get(str(job), rows.get(f"{job}+0", "")).strip()


def wait_state(cluster: DevCluster, job: int, *states: str, patience_s: float = PATIENCE_S) -> str:
    """Wait until a job is in one of `states`."""
    wait_until(lambda: job_state(cluster, job) in states, f"job {job} {' or '.join(states)}", patience_s)
    return job_state(cluster, job)


def wait_until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> float:
    """Wait; returns the seconds it took."""
    deadline = Deadline(patience_s)
    assert deadline.wait_for(is_so, 0.1), f"not in {patience_s:.0f} s: {what}"
    return deadline.passed_s


def seconds_of(action: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


@contextmanager
def logs_shown(cluster: DevCluster) -> Iterator[None]:
    """If a command of Slurm does not answer, fail with the last lines of every daemon's log."""
    try:
        yield
    except RoleFailed as error:
        logs = sorted(cluster.layout.logs.glob("*.log"))
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]) for log in logs]
        raise RoleFailed("\n".join([str(error), *tails])) from error


def all_processes(cluster: DevCluster) -> list[Process]:
    """Daemons, helpers of steps, and processes of jobs."""
    return [*cluster.daemons.recorded().values(), *cluster.step_daemons(), *cluster.job_processes()]


def directory_of(cluster: DevCluster) -> Path:
    """Where files of a test may go that jobs shall see."""
    return cluster.layout.root / "out"
