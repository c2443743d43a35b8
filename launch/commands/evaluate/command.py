"""`rlhpc evaluate`: sample a dataset with a model, judge the samples, say how good it is and how surely.

Input: the words of the command.  Output: a directory with all samples and summary.json; figures on standard output.
The same command again draws only what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

from launch.checks.site.slurm_check import refuse_unfit
from launch.commands.evaluate.directory import evaluation_directory
from launch.commands.evaluate.evaluation import Evaluation, plan_evaluation
from launch.commands.evaluate.follow import follow_run, refuse_how
from launch.commands.evaluate.job import EvaluationJob
from launch.commands.evaluate.report import Report
from launch.commands.evaluate.request import requests_of
from launch.commands.evaluate.target import find_target
from launch.common.paths import without_dots
from rlhpc.errors import ConfigError


def evaluate(options: argparse.Namespace) -> int:
    """Returns the exit status.  Raises ConfigError, CheckpointError, DataError, RunDirectoryError, RoleFailed."""
    if options.dry_run and options.site is None:
        raise ConfigError("--dry-run: prints the script of a job; use it with --site")
    refuse_how(options)
    if options.follow:
        return follow_run(options, partial(_show, options, indent=None), _tell)
    target, runs_here = find_target(without_dots(options.model), options.step), options.site is None
    for evaluation in [plan_evaluation(target, each, runs_here=runs_here) for each in requests_of(options, target)]:
        if runs_here:
            _show(options, evaluation.report(_tell, is_fresh=options.fresh), indent=1)
        else:
            _submit(evaluation, options)
    return 0


def _show(options: argparse.Namespace, report: Report, indent: int | None) -> None:
    print(json.dumps(report.as_json(), indent=indent) if options.json else report.as_text(), flush=True)


def _submit(evaluation: Evaluation, options: argparse.Namespace) -> None:
    job = EvaluationJob.plan(evaluation, options.site)
    if options.dry_run:
        print(job.script, end="")
        return
    refuse_unfit(job.jobs)
    with evaluation_directory(evaluation.directory, evaluation.settings, is_fresh=options.fresh, tell=_tell):
        job.submit(_tell)


def _tell(line: str) -> None:
    sys.stderr.write(f"rlhpc: {line}\n")
    sys.stderr.flush()
