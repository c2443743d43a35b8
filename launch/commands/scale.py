"""Add generators, or replicas of a service, to a running run, and retire them again.

Input: a run directory and +N or -N.  Output: one array job for each addition, with scripts/generation-K.json or
service-NAME.K.json as its plan.  Guarantees: replica numbers are never reused within a run; only what was added is
retired, the newest first, pending ones before running ones.
"""

from __future__ import annotations

import argparse
import json
import re
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from launch.commands.submit import Tell, describe_record, submit_jobs, write_plan
from launch.common.text import print_or_lose, quoted
from launch.doctor.site import refuse_missing_software
from launch.doctor.slurm_plan import as_far_as_slurm_answers, refuse_unfit
from launch.plan.jobs import Elastic, plan_elastic
from launch.plan.script import describe_with_scripts
from launch.plan.site_file import load_site, walltime_s
from launch.run_files.records import (
    JobRecord,
    name_of_jobs,
    next_elastic_name,
    next_replica,
    read_job_records,
    service_of_job,
)
from launch.run_files.run_state import is_supervised
from launch.slurm.commands import SlurmError
from launch.slurm.queue import PATIENCE_S, cancel, look_at_jobs
from rlhpc.base.ownership import SubmissionLock
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import read_resolved
from rlhpc.protocol.errors import ConfigError, RunDirectoryError


@dataclass(frozen=True, slots=True)
class Addition:
    """Options for what is added; None: as in the site file."""

    site_file: Path | None = None  # None: the run's
    partition: str | None = None
    time: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A number of generators, or of replicas of a service, to add or to retire."""

    number: int  # below 0: to retire
    service: str = ""  # name of the [[service]]; "": generators

    @property
    def role(self) -> str:
        """Role of the processes."""
        return "service" if self.service else "generator"

    def option(self, number: int) -> str:
        """Option of `rlhpc scale` for this number of the same."""
        return f"--service {self.service} {number:+d}" if self.service else f"--generators {number:+d}"


@dataclass(frozen=True, slots=True)
class _Added:
    """An added process that is running, or a pending task that will continue it."""

    replica: int
    slurm_id: str  # JOB_TASK
    has_begun: bool
    state: str


def scale(options: argparse.Namespace) -> int:
    """Scale a run; returns exit status 0."""
    if len(options.words) > 1:
        raise ConfigError(f"{options.words[1]!r}: at most one site file; other arguments are options (`--help`)")
    how = Addition(Path(options.words[0]) if options.words else None, options.partition, options.time)
    service, number = options.service or ("", options.generators)
    scale_run(options.layout, number, how, service=service, dry_run=options.dry_run, tell=print_or_lose)
    return 0


def scale_run(layout: RunLayout, number: str, how: Addition, *, service: str = "", dry_run: bool, tell: Tell) -> None:
    """Add (+N) or retire (-N) generators, or replicas of a service.

    Raises ConfigError: neither +N nor -N, no such service, or more than the site can hold; RunDirectoryError: the run
    was never submitted, is complete or not running, has fewer than N to retire, or is being scaled by another process;
    SlurmError.
    """
    if not re.fullmatch(r"[+-]0*[1-9]\d{0,3}", number):
        option = f"--service {service} {number!r}" if service else f"--generators {number!r}"
        raise ConfigError(f"{option}: legal: +N to add, -N to retire, such as +2 or -1")
    layout, placement = _submitted(layout)
    change = Change(int(number), service)
    if service:
        _refuse_other_service(layout, service)
    # Under a lock: otherwise two callers could use the same numbers.
    with nullcontext() if dry_run else SubmissionLock(layout.jobs / ".scaling", tell):
        records = read_job_records(layout)
        if dry_run:
            as_far_as_slurm_answers(lambda: _refuse_lifeless(layout, records), tell)
        else:
            _refuse_lifeless(layout, records)
        if change.number > 0:
            _add(layout, change, placement, how, dry_run=dry_run, tell=tell)
        else:
            _retire(layout, change, records, dry_run=dry_run, tell=tell)


def _submitted(layout: RunLayout) -> tuple[RunLayout, str]:
    """Return the run directory by its path on compute nodes, and the placement of the run."""
    layout.require_run()
    if is_supervised(layout):
        raise RunDirectoryError(f"{layout.root}: supervised fine-tuning, which has neither generators nor services")
    if layout.summary.exists():
        raise RunDirectoryError(f"{layout.root}: the run is complete")
    try:
        document = json.loads(layout.job_plan.read_bytes())
    except FileNotFoundError:
        raise RunDirectoryError(f"{layout.root}: not submitted to Slurm; submit it with `rlhpc submit`") from None
    return RunLayout(Path(document["run_directory"])), document["placement"]


def _refuse_other_service(layout: RunLayout, name: str) -> None:
    """Raise ConfigError unless the run starts a service of this name."""
    config, _ = read_resolved(layout)
    started = [each.name for each in config.started_services]
    if any(each.name == name for each in config.service if each.name not in started):
        raise ConfigError(f"--service {name}: has a url, and is not started by the run; others run it")
    if name not in started:
        legal = ", ".join(started) or "none: the run starts no services"
        raise ConfigError(f"--service {name}: this run has no such service; legal: {legal}")


def _refuse_lifeless(layout: RunLayout, records: list[JobRecord]) -> None:
    look = look_at_jobs(
        (record.job_id for record in records if record.hosts_controller),
        patience_s=PATIENCE_S,
        run_name=name_of_jobs(layout),
    )
    if look.trouble:
        raise SlurmError(look.trouble)
    if not any(row.state.is_alive for row in look.rows):
        raise RunDirectoryError(
            f"{layout.root}: the controller's job is not in the queue; "
            f"`rlhpc resume {quoted(layout.root)}` continues the run"
        )


# -------------------------------------------------------------------------------------------------------------- adding


def _add(layout: RunLayout, change: Change, placement: str, how: Addition, *, dry_run: bool, tell: Tell) -> None:
    config, _ = read_resolved(layout)
    site = load_site(how.site_file or layout.site)
    count, first = change.number, next_replica(layout, change.role)
    wanted = Elastic(
        name=next_elastic_name(layout, change.service),
        num_replicas=count,
        first_replica=first,
        placement="hetjob" if placement == "hetjob" else "jobs",
        partition=_word(how.partition),
        time_s=_time_s(how.time),
        service=change.service,
    )
    plan = plan_elastic(config, site, layout, wanted)
    total, samples = config.generation.num_replicas + count, config.admission.num_slots * config.admission.group_size
    if total > samples and not change.service:
        tell(
            f"warning     --generators +{count}: {total} generators share {samples} rollouts in flight (slots × "
            f"admission.group_size): {total - samples} or more have none"
        )

    def check() -> None:
        for line in [*refuse_missing_software(site), *refuse_unfit(plan)]:
            tell(line)

    if dry_run:
        as_far_as_slurm_answers(check, tell)
        tell(describe_with_scripts(plan))
        return
    check()
    from rlhpc.transport.security import mint_run_keys

    write_plan(plan)  # before the keys: an attempt that begins now makes keys for every planned process
    names = [f"{change.role}-{replica}" for replica in range(first, first + count)]
    mint_run_keys(layout.secrets, names)
    try:
        (record,) = submit_jobs(plan, (), tell)
    except BaseException:  # survived: nothing; a plan without a job must not stay
        for path in (plan.plan_file, layout.scripts / f"{wanted.name}.sbatch"):
            path.unlink(missing_ok=True)
        raise
    tell(
        f"submitted   {describe_record(record)}: {' to '.join(dict.fromkeys((names[0], names[-1])))}; "
        f"`rlhpc scale {quoted(layout.root)} {change.option(-count)}` retires"
    )


def _word(partition: str | None) -> str | None:
    if partition is not None and not re.fullmatch(r"[^\s\"'\\#-][^\s\"'\\#]*", partition):
        raise ConfigError(f"--partition {partition!r}: legal: the name of a partition, or several with commas")
    return partition


def _time_s(time: str | None) -> int | None:
    try:
        return walltime_s(time) if time is not None else None
    except ValueError as error:
        raise ConfigError(f"--time {time!r}: {error}") from None


# ------------------------------------------------------------------------------------------------------------ retiring


def _retire(layout: RunLayout, change: Change, records: list[JobRecord], *, dry_run: bool, tell: Tell) -> None:
    count = -change.number
    elastic = {
        record.job_id: record
        for record in records
        if record.is_elastic and record.numbered_role == change.role and service_of_job(record.name) == change.service
    }
    look = look_at_jobs(elastic, patience_s=PATIENCE_S)
    if look.trouble:
        raise SlurmError(look.trouble)
    tasks = [(row, task) for row in look.rows if row.state.is_alive for task in row.tasks]
    added: dict[int, list[_Added]] = {}  # a running one may already have a pending successor
    for row, task in tasks:
        replica = elastic[row.job_id].first_replica + task
        has_begun, state = row.array_task is not None and row.state.name != "PENDING", row.state.name.lower()
        added.setdefault(replica, []).append(_Added(replica, f"{row.job_id}_{task}", has_begun, state))
    if count > len(added):
        raise RunDirectoryError(
            f"{layout.root}: {change.option(-count)}: only added {change.role}s can be retired, and there are "
            f"{len(added) or 'none'}; those of the run's own plan stay"
        )
    order = sorted(added, key=lambda replica: (any(each.has_begun for each in added[replica]), -replica))
    retired = [each for replica in order[:count] for each in added[replica]]
    for each in retired:
        said = f"{change.role}-{each.replica} (job {each.slurm_id}, {each.state})"
        tell(f"{'would retire' if dry_run else 'retires'}   {said}")
    if not dry_run:  # pending ones first: none may start in place of one that ends
        cancel((each.slurm_id for each in sorted(retired, key=lambda each: each.has_begun)), patience_s=PATIENCE_S)
        with suppress(OSError):  # on a full disk: `rlhpc status` then says that somebody has cancelled them
            for each in retired:
                layout.retired(each.slurm_id).touch()
