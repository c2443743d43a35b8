"""`rlhpc evaluate RUN_DIR [DATA] --follow`: evaluate a run's checkpoints while it trains.

Input: a run directory, and datasets.  Output: until the run is over, evaluations of the newest checkpoint, or of all
due checkpoints of adapters by the same engines; curves for TensorBoard; the best model so far, an HF checkpoint or PEFT
adapter; a request to stop the run when it no longer improves.  A checkpoint is one weight version, and separate engines
sample it: the run is not disturbed.  All state is in the evaluations on disk.

    RUN_DIR/evaluations/tensorboard/…                  evaluation/NAME/FIGURE against the step
    RUN_DIR/evaluations/best-NAME/, rlhpc_figures.json in it
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from launch.common.text import without_dots
from launch.evaluate.evaluation import (
    DirectoryInUse,
    Evaluation,
    Report,
    delete_exports,
    plan_evaluation,
    report_together,
    side_by_side,
    unlike_samples,
)
from launch.evaluate.job import TimeIsUp, TimeWarning, go_on_later, is_following_job, look_again_later
from launch.evaluate.request import Request, checkpoint_digest, find_target, requests_of, target_of_run
from launch.run_files.records import read_job_records
from launch.run_files.run_state import is_complete, read_progress, wants_abort, wants_stop
from launch.slurm.queue import look_at_jobs
from launch.view.run import RunView
from rlhpc.base.files import write_atomically
from rlhpc.base.patience import patiently
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.tensorboard import TensorBoardWriter
from rlhpc.protocol.errors import CheckpointError, ConfigError, RoleFailed, RunDirectoryError
from rlhpc.training.checkpoint_directory import AttemptTimeline, KnownCheckpoints

FIGURES = "rlhpc_figures.json"  # in the best model's directory
LOOK_S = 5.0
ASK_S, ASK_SOON_S = 60.0, 10.0  # between two queries to Slurm; after the run was asked to stop
SURE = 2  # consecutive answers of Slurm that no job is left
MOST_FAILURES = 3  # consecutive evaluations whose engines or disk failed; then the command fails
Tell = Callable[[str], None]
Show = Callable[[Report], None]


def refuse_how(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that have no effect with, or without, --follow."""
    if options.follow:
        if options.run is not None:
            raise ConfigError(f"--run {options.run}: not with --follow, which follows a run with its own settings")
        for option, value in (("--step", options.step), ("--steps", options.steps), ("--out", options.out)):
            if value is not None:
                raise ConfigError(f"{option} {value}: not with --follow, which evaluates the newest checkpoints")
        if options.others:
            raise ConfigError(f"--with {options.others[0]}: not with --follow, which follows one run")
        if options.site is not None and options.data is not None:
            raise ConfigError(
                f"--site {options.site}: not with a dataset: a job that follows a run evaluates its [[evaluation]]"
            )
        return
    of_following = {"--every": options.every, "--keep-best": options.keep_best, "--stop-after": options.stop_after}
    for option, value in of_following.items():
        if value is not None:
            raise ConfigError(f"{option} {value}: legal with --follow only")


def run_of(options: argparse.Namespace) -> RunLayout:
    """Directory of the followed run.  Raises RunDirectoryError: there is no run."""
    layout = RunLayout(without_dots(options.model))
    layout.require_run()
    return layout


def follow_run(options: argparse.Namespace, show: Show, tell: Tell) -> int:
    """Follow a run; return 0 when it is over, 1 when it has been silent for too long.

    In the Slurm job that evaluates a run, requeues the job before its time limit.
    """
    layout = run_of(options)
    try:
        with TimeWarning(layout) as warning:
            following = partial(_follow, layout, options, show, tell, warning.remind)
            return patiently(following, layout.root)
    except TimeIsUp:
        return go_on_later(layout, tell)


def _follow(layout: RunLayout, options: argparse.Namespace, show: Show, tell: Tell, remind: Callable[[], None]) -> int:
    target = target_of_run(layout)
    takes_all = target.lora is not None
    courses = [DatasetFollower(layout, each, remind, takes_all=takes_all) for each in requests_of(options, target)]
    life = RunLife(layout, options.patience_s)
    delete_exports(layout.evaluations)
    curves = Curves(layout.evaluations / "tensorboard")
    try:
        while True:
            remind()
            is_over, has_tried = life.is_over, False
            for course in courses:
                steps = course.due(is_last=is_over)
                if steps and course.evaluate(steps, curves, show, tell):
                    has_tried = True
                    if course.is_no_better(tell) and not life.is_over:
                        write_atomically(layout.stop_request, b"")  # read by the run's launcher or supervisor
                        tell(f"{layout.root}: asked to finish its step, save and end, as `rlhpc stop` does")
                        return 0
            if has_tried:  # what was newest then is perhaps not even there any more
                continue
            if is_over and not any(course.is_waiting for course in courses):
                return 0
            if not life.shows and not (is_following_job(layout) and life.has_jobs is None):
                if life.has_jobs and is_following_job(layout):
                    return look_again_later(layout, tell)
                tell(f"{layout.root}: no sign of life for {options.patience_s:g} s; not followed any more")
                return 1
            time.sleep(LOOK_S)
    finally:
        curves.close()


class Curves:
    """Figures for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._writer = directory, TensorBoardWriter(directory)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write values at a step; in a new file if `rlhpc run --fresh` has deleted the old one."""
        if not self._writer.path.exists():
            self.close()
            self._writer = TensorBoardWriter(self._directory)
        self._writer.scalars(step, values)
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._writer.close()


class DatasetFollower:
    """Evaluates a run's checkpoints on one dataset."""

    def __init__(
        self,
        layout: RunLayout,
        request: Request,
        remind: Callable[[], None] = lambda: None,
        *,
        takes_all: bool = False,
    ) -> None:
        """remind: called while samples are drawn; its exception ends the evaluation, which can be continued.

        takes_all: evaluate every due checkpoint, not only the newest.
        """
        self._takes_all = takes_all
        self._layout, self._request, self._remind = layout, request, remind
        self._tried: set[tuple[int, str]] = set()  # (step, digest) of checkpoints
        self._failures = 0  # consecutive
        self.has_new = False  # whether there are figures that is_no_better has not seen
        self.is_waiting = False  # for another command that evaluates the same checkpoint

    def due(self, *, is_last: bool) -> list[int]:
        """Steps to evaluate, ascending, each at least `every` steps after the one before; is_last: with the newest."""
        try:
            steps = sorted(step for step, _ in KnownCheckpoints(self._layout.checkpoints).steps())
            past = RunView(self._layout).evaluations.get(self._request.name, {})
        except OSError:  # the run is being started over, or its file server does not answer
            return []
        found = list[int]()
        if self._takes_all:
            steps = [step for step in steps if step >= max(past, default=step)]
        for step in steps if self._takes_all else steps[-1:]:
            before = [each for each in (*past, *found) if each < step]
            far = 1 if is_last and step == steps[-1] else self._request.every
            if (step, self._digest(step)) not in self._tried and (not before or step >= max(before) + far):
                found.append(step)
        return found

    def evaluate(self, steps: Sequence[int], curves: Curves, show: Show, tell: Tell) -> bool:
        """Evaluate checkpoints, or report why not; False if another command does and they are to be tried again.

        Raises RoleFailed or OSError when the engines or the disk have failed several times in a row.
        """
        places = {step: (step, self._digest(step)) for step in steps}
        outcomes, planned, fresh = dict[int, Report | Exception](), dict[Path, Evaluation](), list[Path]()
        for step in steps:
            try:
                evaluation = plan_evaluation(find_target(self._layout.root, step), self._request)
                # A run resumed from an older step reaches this one again, with another model.
                unlike = unlike_samples(directory := evaluation.directory, evaluation.settings)
            except (CheckpointError, RunDirectoryError, OSError) as error:
                outcomes[step] = error
            else:
                if unlike - {"inputs.model"}:
                    outcomes[step] = RunDirectoryError(f"{directory} holds samples of other {', '.join(unlike)}")
                else:
                    planned[directory] = evaluation
                    fresh += [directory] if unlike else []
        step_in = {directory: _step_of(each) for directory, each in planned.items()}
        done = partial(self._done, curves, tell)
        for group in side_by_side(planned.values()):
            found = report_together(group, tell, fresh=fresh, done=done, remind=self._remind)
            outcomes |= {step_in[each.directory]: outcome for each, outcome in zip(group, found, strict=True)}
        for step in sorted(outcomes):
            if not isinstance(outcomes[step], DirectoryInUse):
                self._tried.add(places[step])
        return self._say(outcomes, show, tell)

    def _say(self, outcomes: Mapping[int, Report | Exception], show: Show, tell: Tell) -> bool:
        """Show figures, or tell why there are none; return False if all directories are in use."""
        was_waiting, failures = self.is_waiting, list[Exception]()
        self.is_waiting = any(isinstance(each, DirectoryInUse) for each in outcomes.values())
        for step, outcome in sorted(outcomes.items()):
            if isinstance(outcome, Report):
                show(outcome)
            elif isinstance(outcome, DirectoryInUse):
                if not was_waiting:
                    tell(f"step {step}: {outcome}; tried again until it is done")
            elif isinstance(outcome, (CheckpointError, FileNotFoundError, RunDirectoryError, RoleFailed, OSError)):
                # No failure: the run has deleted the checkpoint, or the directory holds other files.  Failures, perhaps
                # transient: a full disk, a file server, an engine.
                is_failure = not isinstance(outcome, (CheckpointError, FileNotFoundError, RunDirectoryError))
                failures += [outcome] if is_failure else []
                if not is_failure or self._failures + 1 < MOST_FAILURES:
                    tell(f"step {step} is not evaluated: {outcome}")
            else:
                raise outcome
        if failures:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise failures[0]
        elif any(isinstance(each, Report) for each in outcomes.values()):
            self._failures = 0
        return not all(isinstance(each, DirectoryInUse) for each in outcomes.values())

    def is_no_better(self, tell: Tell) -> bool:
        """Whether new figures require that the run is stopped; old ones were known when it was resumed."""
        request, has_new, self.has_new = self._request, self.has_new, False
        if not has_new or request.best is None or request.stop_after is None:
            return False
        past = RunView(self._layout).values_of(request.name, request.best)
        if not _is_no_better(past, request.stop_after):
            return False
        tell(f"{request.best} is no better than {max(past.values()):.3f} for {request.stop_after} evaluations")
        return True

    def _digest(self, step: int) -> str:
        """Digest of a checkpoint; "" if it does not exist."""
        try:
            return checkpoint_digest(self._layout.checkpoint(step))
        except OSError:
            return ""

    def _done(self, curves: Curves, tell: Tell, evaluation: Evaluation, report: Report, model: Path) -> None:
        step, name, best = _step_of(evaluation), f"evaluation/{self._request.name}", self._request.best
        curves.add(step, {f"{name}/{figure}": each.value for figure, each in report.figures.items()})
        self.has_new = True
        if best is not None and best not in report.figures:
            tell(f"step {step} has no {best}: too few samples could be judged, or no answers are named")
        elif best is not None:
            _keep_if_best(self._layout, step, evaluation, report, model, best, tell)


def _step_of(evaluation: Evaluation) -> int:
    assert evaluation.target.checkpoint is not None, "of a run that is followed"
    return int(evaluation.target.checkpoint.name.removeprefix("step_"))


def _keep_if_best(
    layout: RunLayout, step: int, evaluation: Evaluation, report: Report, model: Path, figure: str, tell: Tell
) -> None:
    name, value = evaluation.request.name, report.figures[figure].value
    place = layout.evaluations / f"best-{name}"
    old = place.with_name(f".{place.name}.old")
    if old.exists() and not place.exists():  # a command was killed between the two renames below
        old.rename(place)
    if value <= _kept_value(layout, place, figure):
        return
    document = report.as_json() | {"step": step, "attempt": evaluation.target.attempt}
    write_atomically(model / FIGURES, json.dumps(document, indent=1).encode())
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    model.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    tell(f"{place}: the best model so far, {figure} {value:.3f}")


def _kept_value(layout: RunLayout, place: Path, figure: str) -> float:
    """Figure of the best model so far; -inf if there is none, or its step was rolled back."""
    try:
        document = json.loads((place / FIGURES).read_bytes())
        is_undone = AttemptTimeline.read(layout.attempts).undone_by(document["step"], document["attempt"]) is not None
        return -math.inf if is_undone else float(document["figures"][figure]["value"])
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf


def _is_no_better(past: dict[int, float], num_evaluations: int) -> bool:
    values = list(past.values())
    if len(values) <= num_evaluations:
        return False
    return max(values[-num_evaluations:]) <= max(values[:-num_evaluations])


class RunLife:
    """Tells whether a run goes on, by the status file that its controller writes twice a second."""

    def __init__(self, layout: RunLayout, patience_s: float) -> None:
        self._layout, self._patience_s = layout, patience_s
        self._seen, self._seen_s = -1, time.monotonic()
        self._began_s = self._asked_s = self._seen_s
        self._has_jobs: bool | None = None
        self._none_left = 0  # consecutive answers of Slurm that no job is left

    @property
    def is_over(self) -> bool:
        """True once the run is complete, was stopped after we began to look, or has no Slurm jobs left."""
        if is_complete(self._layout):
            return True
        if self._jobs:  # before a time limit their controllers leave as if stopped, too
            return self.has_jobs is False and (self._was_asked or self._none_left >= SURE)
        progress = read_progress(self._layout)
        return progress is not None and progress.is_over and progress.age_s < time.monotonic() - self._began_s

    @property
    def has_jobs(self) -> bool | None:
        """Whether Slurm's last answer had jobs of the run; None: Slurm did not answer."""
        jobs = self._jobs
        if not jobs:
            return False
        if time.monotonic() - self._asked_s >= (ASK_SOON_S if self._was_asked else ASK_S):
            self._asked_s, look = time.monotonic(), look_at_jobs(jobs)
            self._has_jobs = None if look.trouble else any(row.state.is_alive for row in look.rows)
            self._none_left = self._none_left + 1 if self._has_jobs is False else 0
        return self._has_jobs

    @property
    def shows(self) -> bool:
        """False once the status file has not changed for too long."""
        now, changed = time.monotonic(), -1
        with suppress(OSError):  # no file, or a file server that does not answer
            changed = self._layout.status.stat().st_mtime_ns
        if changed != self._seen:
            self._seen, self._seen_s = changed, now
        return now - self._seen_s < self._patience_s

    @property
    def _jobs(self) -> list[int]:
        return [record.job_id for record in read_job_records(self._layout)]

    @property
    def _was_asked(self) -> bool:
        """Whether the run was asked to stop."""
        return wants_stop(self._layout) or wants_abort(self._layout)
