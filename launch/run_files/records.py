"""Records of a run's jobs, and of the ends of an attempt's processes: one small file each.

Job records are written by the submitter.  Exit records are written by the wrapper of a process: srun returns one
status for all tasks, and 0 for tasks that never started.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from launch.run_files.run_state import read_document, stated_name
from rlhpc.base.files import is_absent, matching, numbered_files, write_atomically
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RunDirectoryError

# ---------------------------------------------------------------------------------------------------------- job records
#
# Records of the jobs that a run has submitted, and the replica numbers of its generators and services.
#
# Reads and writes jobs/ID.json, one file per submission, and reads the plans under which jobs were submitted.  A record
# is written once, after sbatch has returned the id, and never changed; the state of the job is always asked of Slurm.
# Python 3.9 and the standard library only, so that a supervisor can record a successor that it submits.

CONTROLLER_JOBS = ("hetjob", "controller")  # names of the jobs that host the controller
SERVICE_JOB = "service-"  # the name of a service's job begins with this


@dataclass(frozen=True)
class JobRecord:
    """A submission, with its job id."""

    job_id: int  # of the array, of the first component
    name: str  # in its plan: hetjob, trainer, generation-1
    placement: str
    array_size: int | None  # None: not an array
    plan: str  # path of the plan file
    script: str  # path of the script
    is_elastic: bool  # added to a run that had been submitted before
    first_replica: int  # of its generators, or of its service, if it has any
    replicas_per_task: int  # generators or services of one array task; of the whole job if it is not an array
    partition: str | None  # of its generators, or else of its first component; None: the default partition
    submitted_unix_s: float
    follows: int | None = None  # the job that this one succeeds or replaces
    tasks: list[int] | None = None  # array tasks that were submitted; None: all

    @property
    def hosts_controller(self) -> bool:
        """True if the controller runs in this job, which the run depends on."""
        return self.name in CONTROLLER_JOBS and not self.is_elastic

    def is_for(self, task: int | None) -> bool:
        """True if the job includes this task of its array; None: it is not an array."""
        return task is None or self.tasks is None or task in self.tasks

    def label(self, task: int | None) -> str:
        """The name as squeue writes it: JOB, or JOB_TASK."""
        return str(self.job_id) if task is None else f"{self.job_id}_{task}"

    @property
    def numbered_role(self) -> str:
        """The role of which its tasks have replicas: generator or service; "" for other jobs."""
        return role_of_job(self.name)

    def roles_of(self, task: int | None) -> list[str]:
        """Names of a task's generators or services, or of the rank or reward service that shows that it is alive."""
        if role := self.numbered_role:
            first = self.first_replica + (task or 0) * self.replicas_per_task
            return [f"{role}-{replica}" for replica in range(first, first + self.replicas_per_task)]
        return {"trainer": ["trainer-0"], "rewards": ["reward-0"]}.get(self.name, [])


def write_job_record(layout: RunLayout, record: JobRecord) -> None:
    """Record a job that is in the queue."""
    layout.jobs.mkdir(exist_ok=True)
    write_atomically(layout.job_record(record.job_id), json.dumps(asdict(record), indent=1).encode())


def read_job_records(layout: RunLayout) -> list[JobRecord]:
    """All submissions of a run, oldest first.  Raises RunDirectoryError for a damaged file, OSError."""
    files = [path for path in matching(layout.jobs, "*.json") if path.stem.isdigit()]
    return sorted(
        (_read_job_record(path) for path in files), key=lambda record: (record.submitted_unix_s, record.job_id)
    )


def name_of_jobs(layout: RunLayout) -> str:
    """The run's name, with which job names begin; "" if it cannot be read."""
    return stated_name(read_document(layout.config).get("config"))


def role_of_job(name: str) -> str:
    """The role that a job of this name has replicas of: generator or service; "" for other jobs."""
    return "generator" if name.startswith("generation") else "service" if name.startswith(SERVICE_JOB) else ""


def service_of_job(name: str) -> str:
    """The name of the service that a planned or added job of this name has replicas of; "" for other jobs."""
    return name.removeprefix(SERVICE_JOB).partition(".")[0] if name.startswith(SERVICE_JOB) else ""


def replica_numbers(layout: RunLayout, role: str) -> list[int]:
    """Replica numbers of all generators, or of the processes of all services, planned and added."""
    numbers: set[int] = set()
    for path in [layout.job_plan, *elastic_plans(layout)]:
        numbers |= set() if is_absent(path) else set(_numbers_of(path, role))
    return sorted(numbers)


def processes_of_service(layout: RunLayout, service: str) -> list[str]:
    """Names of the processes of a service, planned and added; none if the run starts no service of this name."""
    numbers: set[int] = set()
    for path in [layout.job_plan, layout.local_plan, *elastic_plans(layout)]:
        numbers |= set() if is_absent(path) else set(_numbers_of(path, "service", service))
    return [f"service-{number}" for number in sorted(numbers)]


def next_replica(layout: RunLayout, role: str) -> int:
    """A replica number that no process of this role has had in this run."""
    return max(replica_numbers(layout, role), default=-1) + 1


def next_elastic_name(layout: RunLayout, service: str = "") -> str:
    """generation-K, with K counted from 1; of a service service-NAME.K, since its name may end in a number."""
    stem = f"{SERVICE_JOB}{service}." if service else "generation-"
    plans = numbered_files(layout.scripts, re.compile(rf"{re.escape(stem)}(\d+)\.json"))
    return f"{stem}{max((number for number, _ in plans), default=0) + 1}"


def replicas_of(components: Iterable[dict[str, Any]], roles: Sequence[str]) -> tuple[int, int]:
    """First replica and number of processes (of one array task) in components of a plan file; (0, 0): none.

    roles: of which the first that a component has counts.
    """
    for component in components:
        for share in component["roles"]:
            if share["role"] in roles:
                return share["first_replica"], share["num_processes"]
    return 0, 0


def elastic_plans(layout: RunLayout) -> list[Path]:
    """Plan files of generators and services that were added."""
    plans = (*matching(layout.scripts, "generation-*.json"), *matching(layout.scripts, f"{SERVICE_JOB}*.json"))
    return [path for path in plans if re.fullmatch(r"generation-\d+|service-.+\.\d+", path.stem)]


def _numbers_of(plan: Path, role: str, service: str = "") -> Iterator[int]:
    """Replica numbers in one plan file; service: only those of this one."""
    try:
        for job in json.loads(plan.read_bytes())["jobs"]:
            shares = (share for component in job["components"] for share in component["roles"])
            for share in shares:
                if share["role"] == role and service in ("", share.get("service")):
                    first, count = share["first_replica"], share["num_processes"]
                    yield from range(first, first + count * (job["array_size"] or 1))
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{plan}: damaged: {error!r}") from error


def _read_job_record(path: Path) -> JobRecord:
    try:
        document = json.loads(path.read_bytes())
        known = {field.name for field in fields(JobRecord)}
        return JobRecord(**{key: value for key, value in document.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{path}: damaged: {error}") from error


# --------------------------------------------------------------------------------------------------------- exit records

_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class ExitRecord:
    """The end of one process."""

    name: str  # trainer-3
    status: int  # as in a shell: 128 + signal number
    last_words: str  # its last error, or the last line of its log
    starts: int  # how often it was started
    host: str
    job: str
    is_final: bool = True  # False: it is being started again

    @property
    def cause(self) -> str:
        """The cause in words.  Not every status above 128 means a signal: a container that fails ends with 255."""
        number = self.status - 128
        is_signal = number in set(signal.Signals)
        how = f"signal {signal.Signals(number).name}" if is_signal else f"exit status {self.status}"
        return f"{self.name} on {self.host} ended with {how}: {self.last_words}"


def write_exit_record(path: Path, record: ExitRecord) -> None:
    """Write one record.  Raises OSError."""
    write_atomically(path, json.dumps(asdict(record)).encode())


def read_exit_records(layout: RunLayout, role: str, attempt: int) -> dict[int, ExitRecord]:
    """All records of a role in one attempt, by replica.  Raises OSError."""
    numbers = (directory.name.rpartition("-")[2] for directory in matching(layout.logs, f"{role}-*"))
    read = {int(each): read_exit_record(layout, f"{role}-{each}", attempt) for each in numbers if each.isdigit()}
    return {replica: record for replica, record in read.items() if record is not None}


def read_exit_record(layout: RunLayout, name: str, attempt: int) -> ExitRecord | None:
    """The record of one process, by its name; None: it has not ended since its start in this attempt.

    Raises OSError.
    """
    role, _, replica = name.rpartition("-")
    path = layout.exit_record(role, int(replica), attempt)
    return None if is_absent(path) else _parsed(path.read_bytes())


def read_failures(layout: RunLayout, attempt: int) -> list[ExitRecord]:
    """Processes of one attempt, of any role, that failed and were not started again; the trainer's first.

    When a rank fails, the controller fails, too.
    """
    found = []
    for path in sorted(layout.logs.glob(f"*/attempt_{attempt}.exit.json")):
        with suppress(OSError):
            found.append(_parsed(path.read_bytes()))
    failed = [record for record in found if record is not None and record.status != 0 and record.is_final]
    return sorted(failed, key=lambda record: not record.name.startswith("trainer-"))


def last_error_in(log: Path) -> str:
    """The last error near the end of a log file, by last_error_line.  Raises OSError."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return last_error_line(file.read())


def last_error_line(log: bytes) -> str:
    """The text of the last error that a role logged, or else the last line: libraries print more after an error."""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    errors = [words for line in lines if " rlhpc." in line for _, error, words in [line.partition(" ERROR ")] if error]
    if errors or not lines:
        return errors[-1] if errors else "no output"
    ours = re.match(r".* rlhpc\.[a-z._]+ [A-Z]+ (.*)", lines[-1])  # without time, name and level
    return ours.group(1) if ours else lines[-1]


def _parsed(content: bytes) -> ExitRecord | None:
    try:
        return ExitRecord(**json.loads(content))
    except (ValueError, TypeError):
        return None
