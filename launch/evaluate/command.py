"""`rlhpc evaluate`: sample a dataset with a model, judge the samples, print figures with confidence intervals.

Input: the words of the command.  Output: a directory with all samples and summary.json; figures on standard output.
The same command again draws only missing samples.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from launch.common.text import aligned, escaped, print_or_lose, say_or_lose
from launch.doctor.site import refuse_missing_software
from launch.doctor.slurm_plan import as_far_as_slurm_answers, refuse_unfit
from launch.evaluate.evaluation import (
    Evaluation,
    Report,
    caches_on_this_node,
    evaluation_directory,
    plan_evaluation,
    report_together,
    side_by_side,
    wanted_samples,
)
from launch.evaluate.follow import follow_run, refuse_how, run_of
from launch.evaluate.job import EvaluationJob, submit_following
from launch.evaluate.request import find_targets, requests_of, target_of_run
from launch.plan.site_file import Site, load_site
from rlhpc.metrics.evaluations import (
    NAME,
    SUMMARY,
    Estimate,
    EvaluatedSample,
    EvaluationSettings,
    JudgedSample,
    difference,
    of_prompts,
    read_samples,
    read_settings,
)
from rlhpc.protocol.errors import CheckpointError, ConfigError
from rlhpc.protocol.types import Verdict

# -------------------------------------------------------------------------------------------------------------- compare
#
# `rlhpc compare FIRST SECOND`: differences between two evaluated models, with confidence intervals.
#
# Input: directories of two evaluations on the same data.  Output: figures over the prompts that both have, and their
# differences, paired by prompt.


# Settings that must be equal, so that only the models differ.
ALIKE = ("inputs.data", "data.task", "data.prompt_template", "data.prompt_field", "data.system_prompt",
         "data.use_chat_template", "data.reference_field", "data.environment", "inputs.corpus",
         "generation.max_completion_tokens", "generation.stop", "temperature")  # fmt: skip
ALIKE_BELOW = ("environment.", "mcp.", "composite.", "judge.", "instructions.")
FEW = 20  # prompts; with fewer the interval is too narrow to be trusted


@dataclass(frozen=True, slots=True)
class Comparison:
    """Figures of two models on the same prompts."""

    first: str
    second: str
    num_prompts: int  # with samples of both
    figures: dict[str, tuple[float, float, Estimate]]  # name → (first, second, difference)

    def as_json(self) -> dict[str, Any]:
        """The comparison for programs."""
        figures = {
            name: {"first": one, "second": other, "difference": asdict(change)}
            for name, (one, other, change) in self.figures.items()
        }
        return {"first": self.first, "second": self.second, "num_prompts": self.num_prompts, "figures": figures}

    def as_text(self) -> str:
        """Table with a line for each figure."""
        rows = [self._row(name, *values) for name, values in self.figures.items()]
        heads = [f"first   {self.first}", f"second  {self.second}", f"{self.num_prompts} prompts that both have"]
        return "\n".join([*heads, *aligned(rows)])

    def _row(self, name: str, one: float, other: float, change: Estimate) -> tuple[str, ...]:
        interval = f"[{change.low:+.3f}, {change.high:+.3f}]"
        of = "" if change.num_prompts == self.num_prompts else f"of {change.num_prompts} prompts"
        return f"  {name}", f"{one:.3f}", f"{other:.3f}", f"{change.value:+.3f}", interval, _verdict(change), of


def compare(options: argparse.Namespace) -> int:
    """Compare two evaluations; return the exit status.  Raises ConfigError, DataError."""
    comparison = comparison_of(options.first, options.second)
    print(json.dumps(comparison.as_json(), indent=1) if options.json else comparison.as_text())
    return 0


def comparison_of(first: Path, second: Path) -> Comparison:
    """Compare.  Raises ConfigError: no evaluation, unlike settings, or no prompt that both have; DataError."""
    settings = [_settings(path) for path in (first, second)]
    _refuse_unlike(settings)
    wanted = [_wanted(path, each) for path, each in zip((first, second), settings, strict=True)]
    num_parts = 1 + any(map(_has_namesakes, wanted))
    judged = [_judged(samples, num_parts) for samples in wanted]
    common = sorted(judged[0].keys() & judged[1].keys())
    if not common:
        raise ConfigError(f"{first} and {second}: have no prompt in common")
    numbers = {each.samples_per_prompt for each in settings}
    one, other = (of_prompts([of_model[source] for source in common], min(numbers)) for of_model in judged)
    if len(numbers) > 1:  # maj@k of different k are different figures
        one.pop(f"maj@{min(numbers)}", None)
    figures = {}
    for name in (name for name in one if name in other):
        places = sorted(one[name].keys() & other[name].keys())
        values = [np.array([of_model[name][place] for place in places]) for of_model in (one, other)]
        if places:
            figures[name] = float(values[0].mean()), float(values[1].mean()), difference(*values)
    return Comparison(settings[0].title, settings[1].title, len(common), figures)


def _settings(directory: Path) -> EvaluationSettings:
    settings = read_settings(directory)
    if settings is None:
        raise ConfigError(f"{directory}: not an evaluation (no {NAME}); `rlhpc evaluate` prints where it writes one")
    return settings


def _refuse_unlike(settings: Sequence[EvaluationSettings]) -> None:
    first, second = (each.identity for each in settings)
    keys = [*ALIKE, *(key for key in dict.fromkeys((*first, *second)) if key.startswith(ALIKE_BELOW))]
    unlike = [f"{key}: {first.get(key)!r} and {second.get(key)!r}" for key in keys if first.get(key) != second.get(key)]
    if unlike:
        raise ConfigError(
            "\n".join(["the two evaluations differ in more than the model:", *map("  {}".format, unlike)])
        )


def _wanted(directory: Path, settings: EvaluationSettings) -> list[EvaluatedSample]:
    """Read all samples of an evaluation.  Raises ConfigError: some are missing."""
    wanted = wanted_samples(settings, read_samples(directory))
    if len(wanted) < settings.num_samples:  # the first samples on disk are short ones
        raise ConfigError(
            f"{directory}: {len(wanted)} of {settings.num_samples} samples are there; repeat its `rlhpc evaluate` "
            "command to draw the others"
        )
    return wanted


def _has_namesakes(samples: Sequence[EvaluatedSample]) -> bool:
    """Whether several directories have files of one name, as those of splits may."""
    files = {_file_of(each.source) for each in samples}
    return len({file.name for file in files}) < len(files)


def _judged(samples: Sequence[EvaluatedSample], num_parts: int) -> dict[str, list[JudgedSample]]:
    """Samples by their prompt's record; num_parts: last parts of the dataset's path that identify a file."""
    found: defaultdict[str, list[JudgedSample]] = defaultdict(list)
    for each in samples:
        if each.verdict != Verdict.VERIFIER_ERROR.value:
            sample = JudgedSample(each.verdict == Verdict.CORRECT.value, each.answer, each.reward)
            found["/".join(Path(each.source).parts[-num_parts:])].append(sample)
    return found


def _file_of(source: str) -> Path:
    """Path of a source, without its line number."""
    return Path(source.rpartition(":")[0])


def _verdict(change: Estimate) -> str:
    """Conclusion from the interval of a difference, in words."""
    if change.num_prompts < FEW:
        return "too few prompts"
    if change.low > 0:
        return "better"
    return "worse" if change.high < 0 else "no difference shown"


# -------------------------------------------------------------------------------------------------------------- command


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate; return the exit status.

    Raises ConfigError, CheckpointError, DataError, RunDirectoryError, RoleFailed.
    """
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
    planned, num_refused = _planned(options, runs_here=site is None)
    is_only = len({each.target.title for each in planned}) + num_refused == 1
    for group in side_by_side(planned):
        if site is None:
            num_refused += _report(group, options, is_only=is_only)
        else:
            _submit(group, site, options)
    return 1 if num_refused else 0


def _planned(options: argparse.Namespace, *, runs_here: bool) -> tuple[list[Evaluation], int]:
    """Plan a command's evaluations; return them and the number of refused models.  Raises for the only model."""
    targets, num_refused = find_targets(options, _tell)
    planned, is_only = list[Evaluation](), len(targets) + num_refused == 1
    for target in targets:
        if options.ema and target.checkpoint is None:
            raise ConfigError(f"--ema: {target.place} is an HF checkpoint; only what a run saves has an average")
        try:
            planned += [plan_evaluation(target, each, runs_here=runs_here) for each in requests_of(options, target)]
        except (ConfigError, CheckpointError) as error:
            if is_only:
                raise
            _refuse(target.title, error)
            num_refused += 1
    _refuse_one_place(options, planned, is_only=is_only)
    return planned, num_refused


def _refuse_one_place(options: argparse.Namespace, planned: Sequence[Evaluation], *, is_only: bool) -> None:
    """Raise ConfigError if samples of several models would lie in one directory."""
    if options.out is not None and not is_only:
        raise ConfigError(f"--out {options.out}: is for one model; without it each has a directory")
    for directory, number in Counter(each.directory for each in planned).items():
        if number > 1 and not is_only:
            raise ConfigError(f"{directory}: would hold the samples of {number} models of one name; legal: other names")


def _report(group: Sequence[Evaluation], options: argparse.Namespace, *, is_only: bool) -> int:
    """Draw and show; return the number of failed evaluations.  Raises the failure if the command names one model."""
    num_refused, fresh = 0, [each.directory for each in group if options.fresh]
    for evaluation, outcome in zip(group, report_together(group, _tell, fresh=fresh), strict=True):
        if isinstance(outcome, Report):
            _show(options, outcome, indent=1 if is_only else None)
        elif is_only:
            raise outcome
        else:
            _refuse(evaluation.settings.title, outcome)
            num_refused += 1
    return num_refused


def _refuse(title: str, error: Exception) -> None:
    _tell(f"{title} is not evaluated: {error}")


def _submit_following(options: argparse.Namespace, site: Site) -> int:
    layout = run_of(options)
    target = target_of_run(layout)
    requests_of(options, target)
    config = target.settings
    assert config is not None  # a run has settings
    job = EvaluationJob.following(config, site)
    _refuse_unfit(job, site, is_dry=options.dry_run)
    if options.dry_run:
        print(job.script, end="")
        return 0
    submit_following(config, layout, site, None, _tell)
    return 0


def _show(options: argparse.Namespace, report: Report, indent: int | None) -> None:
    print_or_lose(json.dumps(report.as_json(), indent=indent) if options.json else report.as_text())


def _submit(group: Sequence[Evaluation], site: Site, options: argparse.Namespace) -> None:
    job = EvaluationJob.of(group, site)
    _refuse_unfit(job, site, is_dry=options.dry_run)
    if options.dry_run:
        print(job.script, end="")
        return
    with ExitStack() as stack:
        for each in group:
            owned = evaluation_directory(each.directory, each.settings, is_fresh=options.fresh, tell=_tell)
            stack.enter_context(owned)
        submitted = job.submit()
        _tell(f"submitted job {submitted}; it says how far it is in {job.directory / f'job-{submitted}.log'}")
        _tell(f"figures come into {job.directory / SUMMARY}; the same command without --site prints them")


def _refuse_unfit(job: EvaluationJob, site: Site, *, is_dry: bool) -> None:
    def look() -> None:
        for line in [*refuse_missing_software(site), *refuse_unfit(job.jobs)]:
            _tell(line)

    if is_dry:
        as_far_as_slurm_answers(look, _tell)
    else:
        look()


def _tell(line: str) -> None:
    say_or_lose(f"rlhpc: {escaped(line)}")
