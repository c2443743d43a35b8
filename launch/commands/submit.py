"""Submit the jobs of a run, after all checks that can refuse it.

Input: Config and a site file.  Output: the run directory with plan, scripts and site file, and jobs in the queue.
Guarantees: all jobs of a run are submitted, or none; a job that is alive is never submitted a second time.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.checks.bias import unusual
from launch.checks.memory_verdict import judge_host, judge_memory
from launch.checks.model_files import refuse_made_up_tensors
from launch.checks.preflight import Findings, doubts_of_demonstrations, has_stage_before, preflight, stage_of
from launch.commands.arguments import refuse_resume_point, refuse_without_predict, resume_point
from launch.common.text import file_and_settings, print_or_lose, quoted, span
from launch.doctor.site import refuse_missing_software, software_not_here
from launch.doctor.slurm_plan import as_far_as_slurm_answers, refuse_unfit
from launch.evaluate.evaluation import preview_evaluations
from launch.evaluate.job import EvaluationJob, end_following, following_job, submit_following
from launch.plan.jobs import Job, JobPlan, plan_jobs
from launch.plan.script import component_documents, plan_document, plan_report, render_scripts, shared_layout
from launch.plan.site_file import PrologueConfig, Site, load_site, slurm_time
from launch.run_directory.prepare import (
    NEWEST,
    ResumePoint,
    prepare_run_dir_for_jobs,
    refuse_other_lessons,
    refuse_run_dir_for_jobs,
)
from launch.run_files.records import JobRecord, read_job_records, replicas_of, role_of_job, write_job_record
from launch.run_files.run_state import command_to_continue, is_complete, last_words, read_progress
from launch.slurm.commands import SlurmError
from launch.slurm.queue import PATIENCE_S, cancel, look_at_jobs
from launch.slurm.sbatch import MayBeQueued
from launch.verify.audit import look_before_going_on
from rlhpc.base.files import write_atomically
from rlhpc.base.ownership import SubmissionLock
from rlhpc.base.patience import seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, override, read_resolved
from rlhpc.config.rules import Config, rates_of_run_files, with_values
from rlhpc.protocol.errors import EXIT_INTERRUPTED, ConfigError, RlhpcError

# ------------------------------------------------------------------------------------------------------------ show jobs
#
# `rlhpc plan`: the jobs of a run, and their scripts.
#
# Input: run file and site file.  Output: text.  Does not query Slurm.


def show_plan(options: argparse.Namespace) -> int:
    """Print the jobs of a run, or a prediction of its speed.  Raises ConfigError."""
    if not options.predict:
        refuse_without_predict(options)
        config, site = load_config(options.run_file, options.overrides), load_site(options.site_file)
        print("\n".join([*software_not_here(site), *_jobs(config, site)]))
        return 0
    from launch.commands.predict import predict  # loads numpy

    print(predict(load_config(options.run_file, options.overrides), load_site(options.site_file), options))
    return 0


def _jobs(config: Config, site: Site) -> list[str]:
    """Lines of the plan, and every script under its name."""
    lines = [plan_report(config, site)]
    if config.evaluation:
        lines.append(f"\n----- evaluation.sbatch\n{EvaluationJob.following(config, site).script.rstrip()}")
    return lines


# --------------------------------------------------------------------------------------------------------------- submit

Tell = Callable[[str], None]
_ON_JOBS = r"after(?:any|corr|notok|ok)?(?::\d+(?:_\d+)?(?:\+\d+)?)+"
_DEPENDENCY = re.compile(rf"{_ON_JOBS}(?:,{_ON_JOBS})*|{_ON_JOBS}(?:\?{_ON_JOBS})*")


@dataclass(frozen=True, slots=True)
class Submission:
    """A run that is about to be submitted."""

    config: Config
    site_file: Path
    site: Site
    plan: JobPlan

    @property
    def layout(self) -> RunLayout:
        """The run directory, by the path that compute nodes use."""
        return self.plan.layout


def submit(options: argparse.Namespace) -> int:
    """Submit a run, or several that differ in a few settings; returns the exit status."""
    resume_from = resume_point(options)
    if options.seeds is not None or options.sweep:
        from launch.commands.sweep import submit_sweep

        refuse_resume_point(options)
        return submit_sweep(options, print_or_lose)
    config = load_config(options.run_file, options.overrides)
    if options.dry_run:
        how = {"resume": options.resume, "fresh": options.fresh, "resume_from": resume_from}
        dependency(options.after)
        run = prepare(config, options.site_file)
        as_far_as_slurm_answers(lambda: check(run, print_or_lose), print_or_lose)
        warn_of_unknown_jobs(options.after, print_or_lose)
        as_far_as_slurm_answers(lambda: refuse_run_dir_for_jobs(run.config, run.layout, **how), print_or_lose)
        print("\n".join(_jobs(config, run.site)))
        return 0
    return submit_here(config, options.site_file, options)


def submit_here(config: Config, site_file: Path, options: argparse.Namespace) -> int:
    """Submit one run, and follow it with --wait; return the exit status."""
    how = {"resume": options.resume, "fresh": options.fresh, "resume_from": resume_point(options)}
    return wait_if_asked(submit_run(config, site_file, **how, after=options.after, tell=print_or_lose), options)


def wait_if_asked(layout: RunLayout, options: argparse.Namespace) -> int:
    """Follow a run if --wait is given, and print its outcome like `rlhpc run`; return the exit status."""
    if not options.wait:
        return 0
    from launch.view.status import wait_for_run

    status = wait_for_run(layout)
    if status != EXIT_INTERRUPTED:  # else the jobs go on
        for line in seen(lambda: last_words(layout, f"`rlhpc resume {quoted(layout.root)}`"), list[str]()):
            print_or_lose(line)
    return status


def submit_run(
    config: Config,
    site_file: Path,
    *,
    resume: bool,
    fresh: bool,
    after: str | None,
    tell: Tell,
    resume_from: ResumePoint = NEWEST,
) -> RunLayout:
    """Check everything, prepare the run directory, submit every job, print the next commands.

    after: a job id, or a dependency in sbatch's syntax.  Raises ConfigError, RunDirectoryError: refused, nothing was
    written.  Raises SlurmError: sbatch failed; no job is left in the queue, or the message names those that may be.
    """
    options, run = dependency(after), prepare(config, site_file)
    check(run, tell)
    warn_of_unknown_jobs(after, tell)
    if has_stage_before(run.config):
        run, options = _after_stage(run, options, resume=resume, fresh=fresh, tell=tell)
        resume = resume and run.layout.is_run  # the stage before may have been interrupted
    submit_checked(run, options, resume=resume, fresh=fresh, tell=tell, resume_from=resume_from)
    root = run.layout.root
    tell(f"next        rlhpc status {root}\n            rlhpc logs {root} -f\n            rlhpc stop {root}")
    return run.layout


def _after_stage(
    run: Submission, options: list[str], *, resume: bool, fresh: bool, tell: Tell
) -> tuple[Submission, list[str]]:
    """Submit the supervised fine-tuning before an RL run, unless it is complete; returns the run on its model.

    Also returns options of sbatch by which the run's jobs wait for those of the stage.  Raises as submit_run.
    """
    stage = prepare(stage_of(run.config), run.site_file)
    later = replace(run, config=with_values(run.config, {"model.path": stage.layout.model}))
    if is_complete(stage.layout) and not fresh:
        refuse_other_lessons(stage.config, stage.layout)
        return later, options
    if stage.plan.cluster.continuation == "successor":
        raise ConfigError(
            "cluster.continuation='successor': a job that ends may not be the last of the stage [sft], so that nothing "
            f"can wait for its end; legal: `rlhpc sft {quoted(run.site_file)}` first, or continuation='requeue'"
        )
    check(stage, tell)
    resume = resume and stage.layout.is_run
    records = submit_checked(stage, options, resume=resume, fresh=fresh, tell=tell)
    job = next(record.job_id for record in records if record.hosts_controller)
    return later, [f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes"]


def prepare(config: Config, site_file: Path) -> Submission:
    """Plan the jobs of a run; writes nothing.  Raises ConfigError as load_site and plan_jobs do."""
    site = load_site(site_file)
    layout, kind = shared_layout(config, site), config.transport.kind
    if config.is_supervised:
        config = stage_of(config)
    # Settings as they apply to jobs: the directory's path on compute nodes, and the kind of sockets.
    of_jobs = {"run.directory": layout.root, "transport.kind": "tcp" if kind == "auto" else kind}
    config = with_values(config, of_jobs)
    return Submission(config, site_file, site, plan_jobs(config, site, layout))


def check(run: Submission, tell: Tell) -> None:
    """Check model, data, memory, and the cluster's limits.  Raises ConfigError; SlurmError: Slurm does not answer."""
    run_here = roles_run_here(run.site.prologue)
    for line in refuse_missing_software(run.site):
        tell(line)
    findings = preflight(run.config, roles_run_here=run_here)
    if run_here:
        refuse_made_up_tensors(run.config.model.path, findings.model)
    preview_evaluations(run.config, roles_run_here=run_here)
    for line in (*unusual(run.config), *doubts_of_demonstrations(run.config, findings)):
        tell(f"warning     {line}")
    refuse_small_memory(run.config, findings, run.site, run.site_file, tell)
    for line in short_times(run):
        tell(f"warning     {line}")
    doubts = refuse_unfit(run.plan)
    if run.config.evaluation:
        doubts += refuse_unfit(EvaluationJob.following(run.config, run.site).jobs)
    for line in dict.fromkeys(doubts):
        tell(line)


def short_times(run: Submission) -> list[str]:
    """Warn of time limits into which no step fits, by the known rates: such jobs end without progress, repeatedly."""
    from launch.commands.predict import first_save_s  # loads numpy

    measured = read_progress(run.layout)
    if measured is not None and measured.step_s:
        first_s: float | None = measured.step_s + (measured.save_s or measured.save_before_s)
        source = "as measured in this run"
    else:
        first_s, source = first_save_s(run.config, run.site), "by the rates of `rlhpc plan --predict`"
    parts = [part for part in run.plan.components if part.name in ("controller", "trainer")]
    part = min(parts, key=lambda part: part.allocation.time_s)
    if first_s is None or first_s < part.allocation.time_s:
        return []
    key, limit = part.allocation.key(part.section, "time"), slurm_time(part.allocation.time_s)
    return [
        f"{key}={limit!r}: a step and its checkpoint take {span(round(first_s))}, {source}, besides the start of "
        "engines and trainer: the job may end before it has saved anything; a longer time, or smaller steps"
    ]


def submit_checked(
    run: Submission, options: Sequence[str], *, resume: bool, fresh: bool, tell: Tell, resume_from: ResumePoint = NEWEST
) -> list[JobRecord]:
    """Prepare the run directory and submit every job.  options: of sbatch.  Raises as submit_run does."""
    layout = run.layout
    site_mode = run.site_file.stat().st_mode & 0o644 | 0o600  # it may hold secrets in [prologue.environment]
    site_text = run.site_file.read_bytes()
    with SubmissionLock(layout.root.with_name(f".{layout.root.name}.submitting"), tell):
        is_new = not layout.root.exists()
        if fresh and following_job(layout) is not None:
            refuse_run_dir_for_jobs(run.config, layout, resume=resume, fresh=fresh, resume_from=resume_from)
            end_following(layout, tell)  # that job writes to the directory, which is deleted next
        if resume:
            look_before_going_on(layout, resume_from, lambda line: tell(f"audit       {line.removeprefix('audit: ')}"))
        changed = prepare_run_dir_for_jobs(
            run.config,
            layout,
            resume=resume,
            fresh=fresh,
            resume_from=resume_from,
            tell=lambda line: tell(f"checkpoint  {line}"),
        )
        for change in changed:
            tell(f"changed     {change}")
        write_atomically(layout.site, site_text, mode=site_mode)
        write_plan(run.plan)
        try:
            records = submit_jobs(run.plan, options, tell)
        except MayBeQueued:
            raise
        except SlurmError:  # nothing was submitted: leave no directory behind
            if is_new and not read_job_records(layout):
                shutil.rmtree(layout.root, ignore_errors=True)
            raise
    tell(f"submitted   {', '.join(map(describe_record, records))}: {run.plan.run_name} in {layout.root}")
    _submit_evaluation(run, records, tell)
    return records


def _submit_evaluation(run: Submission, records: Sequence[JobRecord], tell: Tell) -> None:
    """Submit the job of [[evaluation]]; if that fails the run goes on without it."""
    if not run.config.evaluation:
        return
    controller = next((record.job_id for record in records if record.hosts_controller), None)
    try:
        submit_following(run.config, run.layout, run.site, controller, tell)
    except RlhpcError as error:
        again = f"`rlhpc evaluate {quoted(run.layout.root)} --follow --site {quoted(run.site_file)}` tries again"
        tell(f"evaluation  NOT submitted: {error}; {again}")


def dependency(after: str | None) -> list[str]:
    """Options of sbatch for --after.  Raises ConfigError if `after` is neither a job id nor a dependency."""
    if after is None:
        return []
    if after.isdecimal():
        return [f"--dependency=afterok:{after}"]
    if after == "singleton":
        raise ConfigError("--after singleton: every run has its own job names; legal: afterany:JOB")
    if not _DEPENDENCY.fullmatch(after):
        raise ConfigError(f"--after {after!r}: legal: a job id, or a dependency of sbatch such as afterany:123")
    return [f"--dependency={after}"]


def warn_of_unknown_jobs(after: str | None, tell: Tell) -> None:
    """Warn of jobs in --after that Slurm does not know: sbatch takes them, and waits for none."""
    jobs = [int(number) for number in re.findall(r":(\d+)", f":{after or ''}")]
    if unknown := look_at_jobs(jobs).unknown:
        names = ", ".join(map(str, unknown))
        tell(f"warning     --after {after}: Slurm knows no job {names}: another id is meant, or it ended long ago")


# ------------------------------------------------------------------------------------------------------------ refusals


def roles_run_here(prologue: PrologueConfig) -> bool:
    """True if the roles run in the environment of this process, by the site file."""
    if prologue.image is not None:
        return False
    if prologue.conda is not None:
        name = prologue.conda_environment or "base"
        own = prologue.conda if name == "base" else prologue.conda / "envs" / name  # an absolute name wins in a join
        return own.resolve() == Path(sys.prefix).resolve()
    return prologue.venv is None or prologue.venv.resolve() == Path(sys.prefix).resolve()


def refuse_small_memory(config: Config, findings: Findings, site: Site, site_file: Path, tell: Tell) -> None:
    """Refuse too little host or GPU memory, as `rlhpc check --site`.  Raises ConfigError."""
    if findings.shape is None or config.trainer.device == "cpu":
        return
    judge_memory(config, findings.model, findings.shape, site, site_file)
    for line in judge_host(config, findings.shape, site, site_file):
        if line.startswith("warning"):
            tell(line)


# ---------------------------------------------------------------------------------------------------------- submission


def write_plan(plan: JobPlan) -> None:
    """Write the files that jobs need: scripts, the plan, and the directory for their logs."""
    for directory in (plan.layout.scripts, plan.log_directory, plan.layout.jobs):
        directory.mkdir(parents=True, exist_ok=True)
    for name, text in render_scripts(plan).items():
        write_atomically(plan.layout.scripts / name, text.encode(), mode=0o700)  # [prologue.environment] may be private
    write_atomically(plan.plan_file, plan_document(plan).encode())


def submit_jobs(plan: JobPlan, options: Sequence[str] = (), tell: Tell = lambda remarks: None) -> list[JobRecord]:
    """Submit the scripts of a plan, the controller's first, and record them.  tell: called with sbatch's messages.

    Raises SlurmError with sbatch's error; jobs submitted before it are cancelled, or named if even that failed.
    """
    records: list[JobRecord] = []
    try:
        for job in plan.jobs:
            _submit(plan, job, options, records, tell)
    except MayBeQueued as error:
        lost = f"{error}; if so, it exits a minute after its start"
        raise MayBeQueued("; ".join(filter(None, (lost, _withdraw(plan.layout, records))))) from error
    except RlhpcError as error:
        raise SlurmError(f"{error}; {_withdraw(plan.layout, records) or 'nothing was submitted'}") from error
    except KeyboardInterrupt as interrupt:
        told = filter(None, (str(interrupt) or "interrupted", _withdraw(plan.layout, records)))
        raise KeyboardInterrupt("; ".join(told)) from None
    except BaseException:  # nothing is survived; after any failure (a full disk) no part of a run stays queued
        _withdraw(plan.layout, records)
        raise
    return records


def describe_record(record: JobRecord) -> str:
    """ "generation 12 (4 tasks)"."""
    plural = "" if record.array_size == 1 else "s"
    tasks = f" ({record.array_size} task{plural})" if record.array_size is not None else ""
    return f"{record.name} {record.job_id}{tasks}"


def _submit(plan: JobPlan, job: Job, options: Sequence[str], records: list[JobRecord], tell: Tell) -> None:
    """Submit one job, then at once write its record to disk and append it to `records`."""
    script = plan.layout.scripts / f"{job.name}.sbatch"
    # Loads submitit, which is not needed before.
    from launch.submitit_hetjob.executor import HeterogeneousSlurmExecutor

    def record(job_id: int) -> None:
        records.append(_record(plan, job, job_id, script))
        write_job_record(plan.layout, records[-1])

    # The executor cleans the environment: SBATCH_PARTITION and the like would override the script.
    executor = HeterogeneousSlurmExecutor(plan.log_directory)
    executor.submit_script(
        script,
        name=job.name,
        options=options,
        record=record,
        hear=lambda remarks: tell(f"sbatch      {job.name}: {remarks.removeprefix('sbatch: ')}"),
    )


def _record(plan: JobPlan, job: Job, job_id: int, script: Path) -> JobRecord:
    first, count = replicas_of(component_documents(plan, job), [role_of_job(job.name) or "generator"])
    component = next((each for each in job.components if each.name == "generation"), job.components[0])
    return JobRecord(
        job_id=job_id,
        name=job.name,
        placement=plan.placement,
        array_size=job.array_size,
        plan=str(plan.plan_file),
        script=str(script),
        is_elastic=plan.is_elastic,
        first_replica=first,
        replicas_per_task=count,
        partition=component.allocation.partition,
        submitted_unix_s=time.time(),
    )


def _withdraw(layout: RunLayout, records: Sequence[JobRecord]) -> str:
    """Cancel jobs and delete their records; return a message about it, "" if there are none."""
    if not records:
        return ""
    names = ", ".join(map(describe_record, records))
    try:
        cancel((record.job_id for record in records), patience_s=PATIENCE_S)
    except SlurmError as error:
        return f"CANCEL BY HAND {names}: {error}"
    for record in records:
        layout.job_record(record.job_id).unlink(missing_ok=True)
    return f"cancelled again: {names}"


# --------------------------------------------------------------------------------------------------------------- resume
#
# Resume a run by its directory alone, which holds settings and site file.
#
# Input: a run directory.  Submits its jobs again (submit.py), to continue from the last complete checkpoint.


def resume(options: argparse.Namespace) -> int:
    """Resume a run; returns the exit status."""
    how = {"after": options.after, "tell": print_or_lose, "resume_from": resume_point(options)}
    return wait_if_asked(resume_run(options.layout, options.words, **how), options)


def resume_run(
    layout: RunLayout, words: Sequence[str], *, after: str | None, tell: Tell, resume_from: ResumePoint = NEWEST
) -> RunLayout:
    """Submit the jobs of a run again.

    words: overrides key=value, and at most one site file, which replaces the old one.  Raises RunDirectoryError: not a
    run, complete, or still running; ConfigError and SlurmError as submit_run does.
    """
    layout.require_run()
    given, overrides = file_and_settings(words, "site file, and overrides (key=value)")
    site_file = given or layout.site
    if given is None and not site_file.exists():
        raise ConfigError(
            f"{site_file}: missing, because this run was never submitted; `rlhpc resume RUN_DIR SITE.toml` continues "
            f"it under Slurm, {command_to_continue(layout)} on this machine"
        )
    old, _ = read_resolved(layout)
    kept = {"run.directory": layout.root} | (rates_of_run_files() if old.is_supervised else {})
    config = override(with_values(old, kept), overrides)
    if config.run_directory != layout.root:
        raise ConfigError(f"run.directory={str(config.run_directory)!r}: a resume cannot leave {layout.root}")
    return submit_run(config, site_file, resume=True, fresh=False, after=after, tell=tell, resume_from=resume_from)
