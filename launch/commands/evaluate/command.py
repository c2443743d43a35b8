"""`rlhpc evaluate`: sample a dataset with a model, judge the samples, say how good it is and how surely.

Input: the words of the command.  Output: a directory with all samples and summary.json; figures on standard output.
The same command again draws only what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from launch.checks.gpus import gpus_here
from launch.checks.preflight import preflight_sampling
from launch.checks.site.slurm_check import refuse_unfit
from launch.commands.evaluate.directory import evaluation_directory
from launch.commands.evaluate.job import EvaluationJob
from launch.commands.evaluate.processes import sample_all
from launch.commands.evaluate.report import Report, report_of
from launch.commands.evaluate.settings import evaluation_config
from launch.commands.evaluate.target import Target, find_target
from launch.common.paths import without_dots
from launch.plan.gpu_map import GpuMap, map_gpus
from launch.run_directory.inputs import look_at_data
from rlhpc.config import with_values
from rlhpc.errors import ConfigError
from rlhpc.evaluation.samples_file import read_samples
from rlhpc.evaluation.settings import SUMMARY, EvaluationSettings
from rlhpc.files import write_atomically

MODEL = "model"  # in the directory, while samples are drawn: weights of a run's checkpoint as an HF checkpoint


def evaluate(options: argparse.Namespace) -> int:
    """Returns the exit status.  Raises ConfigError, CheckpointError, DataError, RunDirectoryError, RoleFailed."""
    target = find_target(without_dots(options.model), options.step)
    config = evaluation_config(target, options.data, options.overrides)
    if options.dry_run and options.site is None:
        raise ConfigError("--dry-run: prints the script of a job; use it with --site")
    gpus = GpuMap() if options.site else map_gpus(config, gpus_here(os.environ))
    wanted = options.prompts
    num_records = preflight_sampling(config, roles_run_here=options.site is None).dataset.num_records
    settings = EvaluationSettings(
        config=config,
        title=f"{target.title} on {config.data.path.stem}",
        samples_per_prompt=_at_least_one("--samples", options.samples),
        num_prompts=num_records if wanted is None else min(num_records, _at_least_one("--prompts", wanted)),
        temperature=_temperature(options),
        inputs={
            "model": target.digest,
            "data": [entry.digest for entry in look_at_data(config.data.path).values()],
        },
    )
    directory = without_dots(options.out or target.home / f"{target.title}-{config.data.path.stem}")
    if options.site is not None:
        job = EvaluationJob.plan(settings, target, directory, options)
        if options.dry_run:
            print(job.script, end="")
            return 0
        refuse_unfit(job.jobs)
        with evaluation_directory(directory, settings, is_fresh=options.fresh, tell=_tell):
            job.submit(_tell)
        return 0
    report = _report(directory, settings, target, gpus, is_fresh=options.fresh)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    return 0


def _report(directory: Path, settings: EvaluationSettings, target: Target, gpus: GpuMap, *, is_fresh: bool) -> Report:
    with evaluation_directory(directory, settings, is_fresh=is_fresh, tell=_tell) as lock:
        report = report_of(settings, read_samples(directory))
        if report is None:
            try:
                _draw(directory, settings, target, gpus, lock.descriptor)
            except KeyboardInterrupt:
                done = sum(1 for _ in read_samples(directory))
                raise KeyboardInterrupt(
                    f"{done} of {settings.num_samples} samples are in {directory}; the same command draws the others"
                ) from None
            report = report_of(settings, read_samples(directory))
            assert report is not None, "every process has said that it is done"
        write_atomically(directory / SUMMARY, json.dumps(report.as_json(), indent=1).encode())
        _tell(f"all samples are in {directory}")
    return report


def _draw(directory: Path, settings: EvaluationSettings, target: Target, gpus: GpuMap, descriptor: int) -> None:
    shutil.rmtree(directory / MODEL, ignore_errors=True)  # of a command that was killed
    try:
        model = target.weights(directory / MODEL)
        settings = replace(settings, config=with_values(settings.config, {"model.path": model}))
        settings.write(directory)
        sample_all(directory, settings, gpus, descriptor, _tell)
    finally:
        shutil.rmtree(directory / MODEL, ignore_errors=True)


def _at_least_one(option: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{option} {value}; legal: 1 or more")
    return value


def _temperature(options: argparse.Namespace) -> float:
    temperature: float = options.temperature
    if not 0 <= temperature <= 2:
        raise ConfigError(f"--temperature {temperature:g}; legal: 0 (the most likely token each time) to 2")
    if temperature == 0 and options.samples > 1:
        raise ConfigError(
            f"--temperature 0 with --samples {options.samples}: all samples of a prompt would be the same"
        )
    return temperature


def _tell(line: str) -> None:
    sys.stderr.write(f"rlhpc: {line}\n")
    sys.stderr.flush()
