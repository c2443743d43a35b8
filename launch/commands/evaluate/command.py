"""`rlhpc evaluate`: sample a dataset with a model, judge the samples, say how good it is and how surely.

Input: the words of the command.  Output: a directory with all samples and summary.json; figures on standard output.
The same command again draws only what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys

from launch.checks.site.slurm_check import refuse_unfit
from launch.commands.evaluate.directory import evaluation_directory
from launch.commands.evaluate.evaluation import Evaluation, plan_evaluation
from launch.commands.evaluate.follow import follow_run, following
from launch.commands.evaluate.job import EvaluationJob
from launch.commands.evaluate.target import find_target
from launch.common.paths import without_dots
from rlhpc.errors import ConfigError


def evaluate(options: argparse.Namespace) -> int:
    """Returns the exit status.  Raises ConfigError, CheckpointError, DataError, RunDirectoryError, RoleFailed."""
    if options.dry_run and options.site is None:
        raise ConfigError("--dry-run: prints the script of a job; use it with --site")
    how = following(options)
    if how is not None and options.site is None:
        return follow_run(options, how, _tell)
    evaluation = plan_evaluation(find_target(without_dots(options.model), options.step), options)
    if options.site is not None:
        return _submit(evaluation, options)
    report = evaluation.report(_tell, is_fresh=options.fresh)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    return 0


def _submit(evaluation: Evaluation, options: argparse.Namespace) -> int:
    job = EvaluationJob.plan(evaluation, options)
    if options.dry_run:
        print(job.script, end="")
        return 0
    refuse_unfit(job.jobs)
    with evaluation_directory(evaluation.directory, evaluation.settings, is_fresh=options.fresh, tell=_tell):
        job.submit(_tell)
    return 0


def _tell(line: str) -> None:
    sys.stderr.write(f"rlhpc: {line}\n")
    sys.stderr.flush()
