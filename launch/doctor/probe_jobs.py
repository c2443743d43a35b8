"""Tiny jobs of all components at once, which report the state of compute nodes and the hosts they can reach.

Input: a JobPlan.  Output: Reports: results of the probes, and reasons for missing ones.  Communicates with the probes
through files in a directory below the shared one, as a run does.  Guarantees: in any case the jobs are cancelled and
the directory is deleted; a job that starts after that finds nothing and ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.doctor.channel_probe import ROLES, channel_layout
from launch.doctor.probe import write
from launch.plan.jobs import JobComponent, JobPlan
from launch.plan.script import component_directives, render_command, role_command, srun_sizes
from launch.slurm.commands import SlurmError
from launch.slurm.queue import cancel, look_at_my_jobs
from launch.slurm.sbatch import submit_once
from launch.slurm.states import OVER
from rlhpc.base.patience import Deadline
from rlhpc.transport.security import mint_run_keys

JOB_S = 120
LINGER_S = 40.0  # wait for the others once the first probe is ready, which lives two minutes
NETWORK_S = 90.0  # for the tests between nodes
ENDED_S = 5.0  # after the end of its job, for a probe's files to appear
_POLL_S, _QUEUE_S = 0.05, 4.0


@dataclass(slots=True)
class Reports:
    """Reports of the probes."""

    known_sha256: str
    ready: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the name of the probe
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # why a job has not started
    failed: dict[str, str] = field(default_factory=dict)  # why a job could not be submitted, or ended without a report
    left_behind: str = ""


@dataclass(slots=True)
class _Probe:
    """The job of a probe."""

    component: JobComponent
    job_id: str
    state: str = "PENDING"
    reason: str = "None"
    ended_at: float | None = None  # of time.monotonic

    @property
    def names(self) -> list[str]:
        """Names of its nodes' probes."""
        name = self.component.name
        return [name if rank == 0 else f"{name}-{rank}" for rank in range(self.component.nodes)]


def probe_nodes(plan: JobPlan, timeout_s: float) -> Reports:
    """Run a probe on a node of every component, on two of the trainer's if it has them.

    timeout_s: for all probes.  Raises OSError: the shared directory cannot be written.
    """
    directory = plan.cluster.shared_directory / f".rlhpc-doctor-{secrets.token_hex(4)}"
    reports = Reports(_prepare(directory))
    probes: list[_Probe] = []
    try:
        for component in plan.components:
            part = probe_component(component)
            script = directory / f"{part.name}.sbatch"
            script.write_text(probe_script(plan, part, directory), encoding="utf-8")
            try:
                probes.append(_Probe(part, submit_once(script)))
            except SlurmError as error:
                reports.failed[part.name] = str(error)
        _attend(_Round(directory, probes, reports, Deadline(timeout_s)))
    finally:
        reports.left_behind = _clean_up(directory, [part.name for part in plan.components])
    return reports


def probe_component(component: JobComponent) -> JobComponent:
    """Component of a probe job: the component's directives on one node, or two of the trainer, for two minutes."""
    nodes = min(component.nodes, 2) if component.name == "trainer" else 1
    return replace(component, nodes=nodes, allocation=replace(component.allocation, time_s=JOB_S))


def job_name(directory: Path, component: str) -> str:
    """Name of one probe's job; unique, since the directory's name is random."""
    return f"{directory.name.removeprefix('.')}.{component}"


def probe_script(plan: JobPlan, component: JobComponent, directory: Path) -> str:
    """The script of the run with its prologue, and the probe in the supervisor's place."""
    directives = [
        f"--job-name={job_name(directory, component.name)}",
        f"--output={directory / component.name}.log",
        f"--chdir={directory}",
        "--no-requeue",
        *component_directives(component),
    ]
    step = [] if component.runs_in_batch_step else ["srun", "--kill-on-bad-exit=0", *srun_sizes(component)]
    words = [*step, *role_command(plan, component), str(directory / "probe.py"), str(directory), component.name]
    return render_command(plan, directives, words)


def _prepare(directory: Path) -> str:
    """Make the probes' directory and files; returns the digest of a file that all nodes must see alike."""
    directory.mkdir(mode=0o700)
    for name in ("probe.py", "broadcast_probe.py"):
        shutil.copyfile(Path(__file__).with_name(name), directory / name)
    known = secrets.token_bytes(1 << 16)
    (directory / "known.bin").write_bytes(known)
    mint_run_keys(channel_layout(directory).secrets, [f"{role}-0" for role in ROLES.values()])
    return hashlib.sha256(known).hexdigest()


# --------------------------------------------------------------------------------------------------------------- rounds


@dataclass(slots=True)
class _Round:
    """Communication with the probes, until all have reported or time is up."""

    directory: Path
    probes: list[_Probe]
    reports: Reports
    deadline: Deadline
    first_ready_at: float | None = None  # of time.monotonic, as all below
    introduced_at: float | None = None
    introduced: frozenset[str] = frozenset()
    asked_queue_at: float = 0.0

    def step(self) -> bool:
        """Read and answer new files; False when there is nothing more to wait for."""
        now = time.monotonic()
        for path in sorted(self.directory.iterdir()):
            self._take(path, now)
        if now - self.asked_queue_at > _QUEUE_S:
            self.asked_queue_at = now
            _ask_queue(self.probes, now)
        if self.introduced_at is None and self._is_complete(now):
            self.introduced = frozenset(self.reports.ready)
            write(self.directory / "peers.json", _introduction(self.reports.ready, self.introduced))
            self.introduced_at = now
        return not self.deadline.is_over and any(self._is_awaited(probe, now) for probe in self.probes)

    def _take(self, path: Path, now: float) -> None:
        name, _, kind = path.name.partition(".")
        ready, results = self.reports.ready, self.reports.results
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if kind.startswith("call.") and not kind.endswith(".partial"):
                answer = self.directory / f"{name}.answer.{kind.removeprefix('call.')}"
                if not answer.exists():
                    write(answer, {"time": time.time()})
            elif kind == "ready.json" and name not in ready:
                ready[name] = json.loads(path.read_bytes())
                self.first_ready_at = self.first_ready_at or now
            elif kind == "result.json" and name not in results:
                results[name] = json.loads(path.read_bytes())

    def _is_complete(self, now: float) -> bool:
        """All probes that can be expected have reported."""
        if self.first_ready_at is None:
            return False
        awaited = [name for probe in self.probes if probe.ended_at is None for name in probe.names]
        return set(awaited) <= set(self.reports.ready) or now - self.first_ready_at > LINGER_S

    def _is_awaited(self, probe: _Probe, now: float) -> bool:
        if all(name in self.reports.results for name in probe.names):
            return False
        if probe.ended_at is not None:
            return now - probe.ended_at < ENDED_S
        is_late = self.introduced_at is not None and now - self.introduced_at > NETWORK_S
        return not (is_late and set(probe.names) <= self.introduced)


def _attend(talk: _Round) -> None:
    while talk.step():
        time.sleep(_POLL_S)
    write(talk.directory / "done", {})
    for probe in talk.probes:
        absent = [name for name in probe.names if name not in talk.reports.ready]
        if absent and probe.ended_at is None and probe.state in ("PENDING", "CONFIGURING"):
            talk.reports.missing[probe.component.name] = f"{probe.state} ({probe.reason})"
        elif absent:
            log = talk.directory / f"{probe.component.name}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
            said = last_error(lines) or "nothing in its log"
            talk.reports.failed[probe.component.name] = f"job {probe.job_id} {probe.state}: {said}"


def last_error(lines: list[str]) -> str:
    """The last line of a program's output, without srun's line after it, which only says that there was an error."""
    own = [line for line in lines if not line.startswith(("srun:", "slurmstepd:"))]
    return (own or lines or [""])[-1].strip()


def _introduction(ready: dict[str, dict[str, Any]], names: frozenset[str]) -> dict[str, Any]:
    """The nodes that reported, and which pairs run which test."""
    there = [probe for name in sorted(names) if (probe := ready[name])["address"]]
    by_name = {probe["name"]: probe for probe in there}
    pairs = [pair for pair in (("trainer", "generation"), ("trainer", "trainer-1")) if set(pair) <= set(by_name)]
    with_torch = [list(pair) for pair in pairs if all("torch" in by_name[name]["versions"] for name in pair)]
    has_gpus = all(by_name[name]["gpus"] and by_name[name]["torch_cuda"] for pair in with_torch for name in pair)
    channel = [name for name in ROLES if name in by_name and by_name[name]["has_rlhpc"]]
    return {
        "probes": there,
        "streams": [list(pair) for pair in pairs],
        "broadcasts": with_torch,
        "backend": "nccl" if has_gpus else "gloo",
        "channel": channel if "controller" in channel and len(channel) > 1 else [],
    }


# ---------------------------------------------------------------------------------------------------------------- jobs


def _ask_queue(probes: list[_Probe], now: float) -> None:
    """Update the states of our jobs; a job missing in the queue has ended.  Without an answer nothing changes."""
    look = look_at_my_jobs()
    rows = {str(job.row.job_id): job.row for job in look.jobs}
    for probe in probes if not look.trouble else ():
        if probe.ended_at is None:
            row = rows.get(probe.job_id)
            probe.state, probe.reason = ("COMPLETED", "") if row is None else (row.state.name, row.reason or "None")
            probe.ended_at = now if probe.state in OVER else None


def _clean_up(directory: Path, components: list[str]) -> str:
    """Cancel the jobs and delete the directory; return its path if something is left, else ""."""
    names, num_empty = {job_name(directory, component) for component in components}, 0
    for _ in Deadline(10.0).polls(0.2):
        with contextlib.suppress(SlurmError):
            # By name and twice: an interrupted sbatch has not reported its id, and slurmctld may still be reading it.
            look = look_at_my_jobs()
            if look.trouble:
                continue
            ids = [job.row.job_id for job in look.jobs if job.row.name in names and job.row.state.is_alive]
            num_empty = 0 if ids else num_empty + 1
            if num_empty == 2:  # before that, a job may hold files open, which NFS does not delete
                break
            cancel(ids)
    for _ in Deadline(5.0).polls(0.2):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return ""
    return str(directory)
