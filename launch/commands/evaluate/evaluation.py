"""One evaluation on this machine: everything checked, samples drawn, figures written.

Input: a target and a request.  Output: Report, and the files of the evaluation's directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launch.checks.gpus import gpus_here
from launch.checks.other_loaders import refuse_made_up_tensors
from launch.checks.preflight import preflight_sampling
from launch.commands.evaluate.directory import evaluation_directory
from launch.commands.evaluate.processes import sample_all
from launch.commands.evaluate.report import Report, report_of
from launch.commands.evaluate.request import Request
from launch.commands.evaluate.settings import evaluation_config
from launch.commands.evaluate.target import Target
from launch.common.paths import without_dots
from launch.plan.gpu_map import map_gpus
from launch.run_directory.directory_lock import LockHeld, lock_directory
from launch.run_directory.inputs import look_at_data
from rlhpc.config import Config, with_values
from rlhpc.errors import ConfigError, DataError, RoleFailed
from rlhpc.evaluation.samples_file import read_samples
from rlhpc.evaluation.settings import NAME, SUMMARY, EvaluationSettings
from rlhpc.files import write_atomically
from rlhpc.run_layout import RunLayout

MODEL = "model"  # in the directory, while samples are drawn: weights of a run's checkpoint as an HF checkpoint
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is to be evaluated, on what, and where samples go."""

    target: Target
    request: Request
    settings: EvaluationSettings
    directory: Path

    def report(
        self,
        tell: Tell,
        *,
        is_fresh: bool = False,
        done: Callable[[Report, Path], None] = lambda report, model: None,
        remind: Callable[[], None] = lambda: None,
    ) -> Report:
        """The figures; draws what is missing.

        done: called with new figures and the HF checkpoint of the model, which it may move away.
        remind: called twice a minute while samples are drawn, and then alone; it may raise.
        Raises CheckpointError, RunDirectoryError, RoleFailed; KeyboardInterrupt that says how far it has got.
        """
        directory, settings, attempt = self.directory, self.settings, self.target.attempt
        with evaluation_directory(directory, settings, is_fresh=is_fresh, tell=tell) as lock:
            report = report_of(settings, read_samples(directory))
            if report is None or not (directory / SUMMARY).exists():  # then `done` has not been called to its end
                try:
                    report = self._draw(tell, lock.descriptor, done, remind)
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(self._how_far()) from None
                finally:
                    shutil.rmtree(directory / MODEL, ignore_errors=True)
            document = report.as_json() | ({} if attempt is None else {"attempt": attempt})
            write_atomically(directory / SUMMARY, json.dumps(document, indent=1).encode())
            tell(f"all samples are in {directory}")
        return report

    def _how_far(self) -> str:
        """For whoever has interrupted it; nothing that is wrong with the samples may come between."""
        try:
            number = sum(1 for _ in read_samples(self.directory))
        except (DataError, OSError):
            return f"{self.directory}: its samples cannot be counted"
        where = f"{number} of {self.settings.num_samples} samples are in {self.directory}"
        return f"{where}; the same command draws the others"

    def _draw(
        self, tell: Tell, descriptor: int, done: Callable[[Report, Path], None], remind: Callable[[], None]
    ) -> Report:
        directory = self.directory

        def tell_in_time(line: str) -> None:
            remind()
            tell(line)

        gpus = map_gpus(self.settings.config, gpus_here(os.environ))
        shutil.rmtree(directory / MODEL, ignore_errors=True)  # of a command that was killed
        model = self.target.weights(directory / MODEL)
        settings = replace(self.settings, config=with_values(self.settings.config, {"model.path": model}))
        settings.write(directory)
        sample_all(directory, settings, gpus, descriptor, tell_in_time)
        report = report_of(settings, read_samples(directory))
        if report is None:
            raise RoleFailed(f"{directory}: its processes were asked to end; the same command draws the other samples")
        done(report, model)
        return report


def plan_evaluation(target: Target, request: Request, *, runs_here: bool = True) -> Evaluation:
    """Everything that is asked for, checked; writes nothing.  Raises ConfigError, DataError.

    runs_here: False where its processes run on another machine.
    """
    target = replace(target, is_average=request.is_average)
    gpus = gpus_here(os.environ) if runs_here else None
    config = evaluation_config(target, request.data, request.words, has_gpus=gpus is None or bool(gpus.words))
    if gpus is not None:
        map_gpus(config, gpus)
    findings = preflight_sampling(config, roles_run_here=runs_here)
    refuse_made_up_tensors(config.model.path, findings.model)
    num_records = findings.datasets[0].num_records
    settings = EvaluationSettings(
        config=config,
        title=f"{target.title} on {request.name}",
        samples_per_prompt=request.samples,
        num_prompts=min(num_records, request.prompts or num_records),
        temperature=request.temperature,
        inputs={
            "model": target.digest,
            "data": [entry.digest for entry in look_at_data(request.data, config.data[0].split).values()],
            **_corpus(config),
            **_judge_template(config),
        },
    )
    directory = request.out or target.home / f"{target.title}-{request.name}"
    return Evaluation(target, request, settings, without_dots(directory))


def delete_exports(evaluations: Path) -> None:
    """Weights that killed commands have left below this directory; nothing that a command of now is at work with."""
    for model in evaluations.glob(f"*/{MODEL}"):
        if (model.parent / NAME).exists():
            with suppress(LockHeld):
                lock = lock_directory(RunLayout(model.parent))
                shutil.rmtree(model, ignore_errors=True)
                lock.close()


def _corpus(config: Config) -> dict[str, list[str]]:
    """The digest of what environments search, if anything."""
    corpus = config.environment.corpus
    return {} if corpus is None else {"corpus": [entry.digest for entry in look_at_data(corpus).values()]}


def _judge_template(config: Config) -> dict[str, str]:
    """The digest of the file that says what the judge is asked, if one does.  Raises ConfigError."""
    file = config.judge.template_file
    if not file or not any("llm_judge" in config.parts_of(task) for task in config.data_tasks):
        return {}
    try:
        return {"judge.template_file": hashlib.sha256(Path(file).read_bytes()).hexdigest()}
    except OSError as error:
        raise ConfigError(f"judge.template_file={file!r} cannot be read: {error.strerror}") from error
