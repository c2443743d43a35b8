"""Write and read job_plan.json: the processes that each job of a run starts.

Input: the file written by launch/plan/script.py.  Output: JobPart.  A job's batch step reads it,
`PYTHON -u -P -m launch.supervisor --run-dir RUN_DIR --plan RUN_DIR/job_plan.json --job JOB`; `rlhpc run` has
local_plan.json; generators and services that are added later have scripts/generation-K.json, service-NAME.K.json.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RlhpcError

SCHEMA = 1
LOCAL = "local"  # placement of a run without Slurm
EVALUATOR = "evaluator"  # the role that evaluates a run while it trains: `rlhpc evaluate RUN_DIR --follow`


class PlanFileError(RlhpcError):
    """A plan file is missing, has another schema, or does not contain the job."""


@dataclass(frozen=True)
class Share:
    """Processes of one role in one component (per array task, if the job is an array)."""

    role: str  # for `python -m rlhpc.roles`, or EVALUATOR
    num_processes: int
    first_replica: int = 0  # of the whole job; numbers continue over array tasks
    service: str = ""  # name of the [[service]] whose processes these are

    @property
    def names(self) -> list[str]:
        """Names of its processes; of an array, those of its first task."""
        return [f"{self.role}-{self.first_replica + index}" for index in range(self.num_processes)]

    def describe(self) -> str:
        """Number and role of the processes, with the name of their service: "2 service (teacher)"."""
        return f"{self.num_processes} {self.role}" + (f" ({self.service})" if self.service else "")


@dataclass(frozen=True)
class Part:
    """A component of a job."""

    name: str
    shares: tuple[Share, ...]
    runs_in_batch_step: bool
    srun: tuple[str, ...]  # size options
    gpus_per_task: int
    python: tuple[str, ...]  # words before `-m rlhpc.roles`
    environment: dict[str, str]  # set for its processes
    defaults: dict[str, str]  # set unless already set
    visible_devices: dict[str, str] = field(default_factory=dict)  # CUDA_VISIBLE_DEVICES by process; absent: unchanged

    def share_of(self, role: str) -> Share:
        """The processes of a role.  Raises PlanFileError if it has none here."""
        for share in self.shares:
            if share.role == role:
                return share
        raise PlanFileError(f"component {self.name} has no {role}")


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds, the number of retries, and the size of logs."""

    meet_s: float  # for another role
    stall_s: float  # without an optimiser step
    max_retries: int  # consecutive failed attempts without a new checkpoint
    dead_after_s: float = 60.0  # a process that a signal has stopped for this long is killed and restarted
    log_bytes: int = 1 << 27  # of one process in one attempt; longer logs lose their middle
    is_attended: bool = False  # a user waits for the message of a failed start: it is not retried


@dataclass(frozen=True)
class JobPart:
    """Processes of one job, and the run that it belongs to."""

    layout: RunLayout
    path: Path  # of the plan file
    placement: str
    name: str
    is_array: bool
    parts: tuple[Part, ...]
    limits: Limits
    continuation: str  # "requeue" or "successor"
    other_jobs: tuple[str, ...]  # names of the run's other planned jobs

    @property
    def is_local(self) -> bool:
        """True without Slurm: every process beside the supervisor, on one machine."""
        return self.placement == LOCAL

    @property
    def hosts_controller(self) -> bool:
        """True if the controller runs in this job."""
        return any(share.role == "controller" for part in self.parts for share in part.shares)


def plan_text(
    root: Path, placement: str, jobs: list[dict[str, Any]], continuation: str, limits: Limits, **more: object
) -> str:
    """The JSON that read_plan reads.  more: fields that only some plans have."""
    document = {
        "schema": SCHEMA,
        "run_directory": str(root),
        "placement": placement,
        "jobs": jobs,
        "continuation": continuation,
        "limits": asdict(limits),
        **more,
    }
    return json.dumps(document, indent=1) + "\n"


def read_plan(path: Path, job: str) -> JobPart:
    """Read one job of a plan.  Raises PlanFileError with the file and the problem."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PlanFileError(f"{path}: {error}") from error
    if document.get("schema") != SCHEMA:
        raise PlanFileError(f"{path}: schema {document.get('schema')!r}; this supervisor reads {SCHEMA}")
    jobs = {each["name"]: each for each in document["jobs"]}
    if job not in jobs:
        raise PlanFileError(f"{path}: no job {job!r}; legal: {', '.join(jobs)}")
    try:
        return JobPart(
            layout=RunLayout(Path(document["run_directory"])),
            path=path,
            placement=document["placement"],
            name=job,
            is_array=jobs[job]["array_size"] is not None,
            parts=tuple(_part(each) for each in jobs[job]["components"]),
            limits=Limits(**document["limits"]),
            continuation=document["continuation"],
            other_jobs=tuple(name for name in jobs if name != job),
        )
    except (KeyError, TypeError) as error:
        raise PlanFileError(f"{path}: {error!r} missing or unknown") from error


def _part(document: dict[str, Any]) -> Part:
    return Part(
        name=document["name"],
        shares=tuple(Share(**share) for share in document["roles"]),
        runs_in_batch_step=document["runs_in_batch_step"],
        srun=tuple(document["srun"]),
        gpus_per_task=document["gpus_per_task"],
        python=tuple(document["python"]),
        environment=dict(document["environment"]),
        defaults=dict(document["defaults"]),
        visible_devices=dict(document.get("visible_devices", {})),
    )
