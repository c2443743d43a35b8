"""`rlhpc evaluate`: sample a dataset with a model, judge the samples, say how good it is and how surely.

Input: the words of the command.  Output: a directory with all samples and summary.json; figures on standard output.
The same command again draws only what is missing.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from launch.checks.site.login_checks import refuse_missing_software
from launch.checks.site.slurm_check import refuse_unfit
from launch.commands.evaluate.directory import evaluation_directory
from launch.commands.evaluate.evaluation import Evaluation, plan_evaluation
from launch.commands.evaluate.follow import follow_run, refuse_how, run_of
from launch.commands.evaluate.following_job import submit_following
from launch.commands.evaluate.job import EvaluationJob
from launch.commands.evaluate.processes import caches_on_this_node
from launch.commands.evaluate.report import Report
from launch.commands.evaluate.request import requests_of
from launch.commands.evaluate.target import find_target, target_of_run, with_settings_of
from launch.common.paths import without_dots
from launch.common.standard_output import print_or_lose, say_or_lose
from launch.common.text_table import escaped
from launch.plan.site_file import Site, load_site
from rlhpc.errors import ConfigError
from rlhpc.evaluation.settings import SUMMARY


def evaluate(options: argparse.Namespace) -> int:
    """Returns the exit status.  Raises ConfigError, CheckpointError, DataError, RunDirectoryError, RoleFailed."""
    if options.dry_run and options.site is None:
        raise ConfigError("--dry-run: prints the script of a job; use it with --site")
    refuse_how(options)
    site = None if options.site is None else load_site(options.site)
    if options.follow and site is not None:
        return _submit_following(options, site)
    if site is not None:
        return _evaluate(options, site)
    with caches_on_this_node():
        return _evaluate(options, None)


def _evaluate(options: argparse.Namespace, site: Site | None) -> int:
    if options.follow:
        return follow_run(options, partial(_show, options, indent=None), _tell)
    target = find_target(without_dots(options.model), options.step)
    if options.run is not None:
        target = with_settings_of(target, without_dots(options.run))
    if options.ema and target.checkpoint is None:
        raise ConfigError(
            f"--ema: {options.model} is an HF checkpoint; only what a run saves has an average of weights"
        )
    for evaluation in [plan_evaluation(target, each, runs_here=not site) for each in requests_of(options, target)]:
        if site is None:
            _show(options, evaluation.report(_tell, is_fresh=options.fresh), indent=1)
        else:
            _submit(evaluation, site, options)
    return 0


def _submit_following(options: argparse.Namespace, site: Site) -> int:
    layout = run_of(options)
    target = target_of_run(layout)
    requests_of(options, target)
    config = target.settings
    assert config is not None  # a run has settings
    job = EvaluationJob.following(config, site)
    if options.dry_run:
        print(job.script, end="")
        return 0
    _refuse_unfit(job, site)
    submit_following(config, layout, site, None, _tell)
    return 0


def _show(options: argparse.Namespace, report: Report, indent: int | None) -> None:
    print_or_lose(json.dumps(report.as_json(), indent=indent) if options.json else report.as_text())


def _submit(evaluation: Evaluation, site: Site, options: argparse.Namespace) -> None:
    job = EvaluationJob.of(evaluation, site)
    if options.dry_run:
        print(job.script, end="")
        return
    _refuse_unfit(job, site)
    with evaluation_directory(evaluation.directory, evaluation.settings, is_fresh=options.fresh, tell=_tell):
        submitted = job.submit()
        _tell(f"submitted job {submitted}; it says how far it is in {job.directory / f'job-{submitted}.log'}")
        _tell(f"figures come into {job.directory / SUMMARY}; the same command without --site prints them")


def _refuse_unfit(job: EvaluationJob, site: Site) -> None:
    for line in refuse_missing_software(site):
        _tell(line)
    refuse_unfit(job.jobs)


def _tell(line: str) -> None:
    say_or_lose(f"rlhpc: {escaped(line)}")
