"""The model that is evaluated: an HF checkpoint, or what a run has saved.

Input: a path.  Output: a Target, which says what an evaluation of it begins with, and gives its weights as an HF
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.run_directory.inputs import look_at_model
from rlhpc.config import Config
from rlhpc.config_file import load_config, read_resolved
from rlhpc.errors import CheckpointError, ConfigError, DamagedCheckpoint
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import COMPLETE, Fate, KnownCheckpoints

_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """A model, and the settings that come with it."""

    title: str  # for people, also in the names of files
    home: Path  # directory for evaluations of it, unless the user says otherwise
    settings: Config | None  # of the run that it is from
    checkpoint: Path | None  # a step of that run; None: `model` is an HF checkpoint
    model: Path  # HF checkpoint: the model itself, or what the run began with
    is_average: bool = False  # the moving average of that step's weights
    attempt: int | None = None  # of the run, that wrote the checkpoint; None: it is none, or does not say

    @property
    def digest(self) -> Any:
        """Of everything that the model is.  Raises OSError, RunDirectoryError."""
        if self.checkpoint is None:
            return {name: entry.digest for name, entry in look_at_model(self.model).items()}
        return checkpoint_digest(self.checkpoint) + ("-average" if self.is_average else "")

    def weights(self, place: Path) -> Path:
        """An HF checkpoint with its weights, which are verified; one that has to be written is `place`.

        Raises CheckpointError, ConfigError.
        """
        if self.checkpoint is None:
            return self.model
        # Loads torch, which an evaluation of an HF checkpoint and one that is complete do not need here.
        from rlhpc.training.checkpoint.export import export_hf

        try:
            export_hf(self.checkpoint, self.model, place, is_average=self.is_average)
        except DamagedCheckpoint as error:
            raise CheckpointError(f"{error}; `rlhpc evaluate RUN_DIR DATA --step N` takes another") from error
        return place


def checkpoint_digest(checkpoint: Path) -> str:
    """Of all its files, by the record of their checksums.  Raises OSError."""
    return hashlib.blake2b((checkpoint / COMPLETE).read_bytes(), digest_size=16).hexdigest()


def find_target(path: Path, step: int | None) -> Target:
    """path: HF checkpoint, run directory, or a checkpoint in one.  step: of a run; None: the newest complete one.

    Of a checkpoint sizes are compared and nothing is read: Target.weights verifies what it needs, once, and not for
    an evaluation that is done already.  Raises ConfigError, CheckpointError.
    """
    if (match := _STEP.fullmatch(path.name)) and RunLayout(path.parent.parent).is_run:
        if step is not None:
            raise ConfigError(f"--step {step}: {path} is a step already")
        return _of_run(RunLayout(path.parent.parent), int(match[1]))
    if RunLayout(path).is_run:
        return _of_run(RunLayout(path), step)
    if step is not None:
        raise ConfigError(f"--step {step}: {path} is not a run directory")
    if not path.exists():
        raise ConfigError(
            f"{path}: no such directory; legal: an HF checkpoint, or a run directory (`rlhpc list` shows your runs)"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: neither an HF checkpoint directory (no config.json) nor a run directory")
    return Target(path.name, Path("evaluations").absolute(), None, None, path)


def with_settings_of(target: Target, run: Path) -> Target:
    """An HF checkpoint, with the settings of a run: its template, limits, reward and default datasets.

    run: a run file, or a run directory.  Raises ConfigError: also for what is of a run already.
    """
    if target.settings is not None:
        raise ConfigError(
            f"--run {run}: {target.title} is of a run, whose settings it has; legal: with an HF checkpoint"
        )
    settings = read_resolved(RunLayout(run))[0] if run.is_dir() else load_config(run)
    return replace(target, settings=settings)


def target_of(config: Config) -> Target:
    """A run as it begins."""
    return Target(config.run.name, RunLayout(config.run_directory).evaluations, config, None, config.model.path)


def target_of_run(layout: RunLayout) -> Target:
    """A run as it began, whatever it has saved.  Raises ConfigError."""
    config, _ = read_resolved(layout)
    return Target(config.run.name, layout.evaluations, config, None, config.model.path)


def _of_run(layout: RunLayout, step: int | None) -> Target:
    run, checkpoint = target_of_run(layout), _complete_checkpoint(layout, step)
    title, attempt = f"{run.title}-{checkpoint.name}", _attempt_of(checkpoint)
    return replace(run, title=title, checkpoint=checkpoint, attempt=attempt)


def _attempt_of(checkpoint: Path) -> int | None:
    """Raises OSError: the run has deleted it."""
    attempt = json.loads((checkpoint / COMPLETE).read_bytes()).get("attempt")
    return attempt if isinstance(attempt, int) else None


def _complete_checkpoint(layout: RunLayout, step: int | None) -> Path:
    known, problems = KnownCheckpoints(layout.checkpoints, read_up_to_bytes=0), []
    for state in known.newest_first(lambda at: step in (None, at)):
        if state.fate is Fate.SOUND:
            return state.path
        problems.append(f"{state.path.name}: {state.problem}")
    there = ", ".join(str(at) for at, _ in known.steps()) or "none"
    what = "no sound checkpoint" if step is None else f"no sound checkpoint of step {step}"
    raise CheckpointError("\n".join([f"{layout.checkpoints}: {what}; available steps: {there}", *problems]))
