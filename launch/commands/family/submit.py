"""Submit the runs of a family: all are checked before the first is submitted.

Input: members, a site file.  Output: jobs.  Guarantees: if one run is refused, none is submitted and nothing is
written; if submission fails midway, the error says which runs are queued, how to stop them, and how to submit the rest.
With `resume` the same command can be repeated: runs that are alive or complete are left alone.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.commands.arguments import continued
from launch.commands.family.members import Member, members_of
from launch.commands.overview.standing import State
from launch.commands.overview.survey import survey
from launch.commands.submit import Submission, Tell, check, dependency, describe_record, prepare, submit_checked
from launch.common.counted import counted
from launch.common.paths import quoted
from launch.plan.report import describe_jobs
from launch.run_directory.prepare import refuse_run_dir_for_jobs
from launch.run_files.job_records import JobRecord, read_records
from rlhpc.config import with_values
from rlhpc.errors import ConfigError, RlhpcError, RunDirectoryError


class FamilyCutShort(RlhpcError):
    """A submission failed after others had succeeded; the message says what is in the queue and what to do."""


@dataclass(frozen=True, slots=True)
class How:
    """What the command line asks for."""

    resume: bool = False  # begin, or go on; leave alone what lives or is complete
    fresh: bool = False
    chain: bool = False  # one after the other
    after: str | None = None
    again: str = "the same command with --resume instead of --fresh"


@dataclass(frozen=True, slots=True)
class _Run:
    member: Member
    submission: Submission
    resume: bool = False
    left_alone: str = ""  # why; "" if it is to be submitted
    controller_job: int | None = None  # job with the controller of one that lives

    @property
    def root(self) -> Path:
        return self.submission.layout.root


def submit_family_of(options: argparse.Namespace, tell: Tell) -> int:
    """The command: submit, or with --dry-run print; returns exit status 0.  Raises as submit_family does."""
    if options.wait:
        raise ConfigError("--wait: only for a single run; `rlhpc list` shows several")
    members = members_of(options.run_file, options.overrides, options.seeds, options.sweep)
    if options.dry_run:
        dependency(options.after)
        tell(describe_family(members, options.site_file, options.chain))
        return 0
    again = f"`{shlex.join(continued(options.typed))}`"
    how = How(options.resume, options.fresh, options.chain, options.after, again)
    roots = submit_family(members, options.site_file, how, tell)
    tell(f"next        rlhpc list {roots[0].parent}\n            rlhpc stop {roots[0]}")
    return 0


def describe_family(members: Sequence[Member], site_file: Path, chain: bool) -> str:
    """What would be submitted: a line a run, and the jobs, once if they are the same for all.  Raises ConfigError."""
    submissions = [prepare(member.config, site_file) for member in members]
    _refuse_chain(submissions[0], chain)
    lines = [
        f"{member.name}: {member.varied} in {submission.layout.root}"
        for member, submission in zip(members, submissions, strict=True)
    ]
    order = "one after the other" if chain else "side by side"
    plans = [describe_jobs(submission.plan).splitlines() for submission in submissions]
    same = all(plan[1:] == plans[0][1:] for plan in plans)
    shown = [["each", *plans[0][1:]]] if same else plans
    return "\n".join(
        [f"{counted(len(members), 'run')} {order}", *lines, *(line for plan in shown for line in ["", *plan])]
    )


def submit_family(members: Sequence[Member], site_file: Path, how: How, tell: Tell) -> list[Path]:
    """Check all, submit all; returns their directories, also of those that were left alone.

    Raises ConfigError, RunDirectoryError, SlurmError: refused, nothing was made.  FamilyCutShort, or KeyboardInterrupt
    with a text, once a run has been submitted.
    """
    dependency(how.after)
    submissions = [prepare(member.config, site_file) for member in members]
    _refuse_chain(submissions[0], how.chain)
    runs = [_Run(member, submission) for member, submission in zip(members, submissions, strict=True)]
    if how.resume:
        runs = _where_they_stand(runs)
    wanted = [run for run in runs if not run.left_alone]
    for run in wanted:
        refuse_run_dir_for_jobs(run.submission.config, run.submission.layout, resume=run.resume, fresh=how.fresh)
    _check_each_kind(wanted, tell)
    for run in runs:
        if run.left_alone:
            tell(f"left alone  {run.member.name}: {run.left_alone}")
    _submit(runs, how, tell)
    return [run.root for run in runs]


# ------------------------------------------------------------------------------------------------------------ refusals


def _refuse_chain(submission: Submission, chain: bool) -> None:
    if chain and submission.plan.cluster.continuation == "successor":
        raise ConfigError(
            "--chain with cluster.continuation='successor': then a run is a sequence of jobs, and the next run would "
            "begin when the first of them ends; legal: continuation='requeue', or no --chain"
        )


def _check_each_kind(runs: Sequence[_Run], tell: Tell) -> None:
    """Runs that differ in name and seed alone have the same model, data, sizes and jobs: one of them is checked."""
    checked: set[str] = set()
    for run in runs:
        nameless = {"run.name": "", "run.directory": None, "run.seed": 0}
        kind = with_values(run.submission.config, nameless).model_dump_json()
        if kind not in checked:
            checked.add(kind)
            check(run.submission, tell)


def _where_they_stand(runs: Sequence[_Run]) -> list[_Run]:
    """Which are resumed, which begin, which are left alone.  Raises RunDirectoryError: one is not what it should be."""
    there = [run.root for run in runs if run.root.is_dir()]
    standing = {each.files.root: each for each in survey(there, depth=0).runs}
    judged = []
    for run in runs:
        found = standing.get(run.root)
        if found is None or found.state is State.NEW:
            judged.append(run)
        elif found.state is State.DAMAGED:
            raise RunDirectoryError(f"{run.root}: {found.remark}")
        elif found.state is State.UNKNOWN:
            raise RunDirectoryError(f"{run.root}: jobs of this run may be queued or running: Slurm does not answer")
        elif found.state.is_alive:
            judged.append(replace(run, left_alone=f"{found.state} already", controller_job=_controller_job_of(run)))
        elif found.state is State.COMPLETE and run.member.config.run.num_steps <= (found.figures.num_steps or 0):
            judged.append(replace(run, left_alone="complete"))
        else:
            judged.append(replace(run, resume=True))
    return judged


def _controller_job_of(run: _Run) -> int | None:
    controller_jobs = [record.job_id for record in read_records(run.submission.layout) if record.hosts_controller]
    return controller_jobs[-1] if controller_jobs else None


# ---------------------------------------------------------------------------------------------------------- submission


def _submit(runs: Sequence[_Run], how: How, tell: Tell) -> None:
    done: list[tuple[_Run, list[JobRecord]]] = []
    before: int | None = None  # the job after whose end the next run of a chain begins
    for run in runs:
        if run.left_alone:
            before = run.controller_job if run.controller_job is not None else before
            continue
        after = f"afterany:{before}" if how.chain and before is not None else how.after
        try:
            records = submit_checked(run.submission, dependency(after), resume=run.resume, fresh=how.fresh, tell=tell)
        except (RlhpcError, OSError) as error:
            raise FamilyCutShort(f"{run.member.name}: {error}{_what_stands(done, len(runs), how.again)}") from error
        except KeyboardInterrupt as interrupt:
            text = str(interrupt) or "interrupted"
            raise KeyboardInterrupt(f"{run.member.name}: {text}{_what_stands(done, len(runs), how.again)}") from None
        done.append((run, records))
        before = next((record.job_id for record in records if record.hosts_controller), before)


def _what_stands(done: Sequence[tuple[_Run, list[JobRecord]]], num_runs: int, again: str) -> str:
    """Said after what went wrong."""
    rest = f"{again} submits the rest"
    if not done:
        return f"\nnone of the {num_runs} runs has been submitted; {rest}, once this is fixed"
    lines = [f"  {', '.join(map(describe_record, records))}: `rlhpc stop {quoted(run.root)}`" for run, records in done]
    head = f"{len(done)} of {num_runs} runs are submitted and stay queued or running; to stop each:"
    return "\n".join(["", head, *lines, f"{rest}, once this is fixed"])
