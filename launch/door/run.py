"""A run directory as an object: figures, rollouts, checkpoints, evaluations.

Input: a run directory, also of a running run.  Output: arrays and frames.  Nothing is cached: each call reads what is
on disk at that moment.  `stop` ends the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from launch.commands.evaluate.past import past_evaluations
from launch.commands.stop import stop_run
from launch.common.optional_package import optional_module
from launch.common.paths import without_dots
from launch.door.arguments import Tell, say_nothing, speaks_python
from launch.reading.metric_table import hint, metric_table
from launch.reading.rollouts import RunRollouts, SeenRollout, Selection
from launch.run_files.events import read_document
from launch.run_files.run_state import run_name
from rlhpc.config import Config
from rlhpc.errors import CheckpointError, ConfigError, RoleFailed
from rlhpc.exit_status import EXIT_INTERRUPTED
from rlhpc.metrics.curves import Curve, read_curves
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import KnownCheckpoints, policy_version_of
from rlhpc.types import Verdict


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.  Its files are not read: `rlhpc check RUN_DIR` does."""

    step: int
    policy_version: int
    path: Path


class Run:
    """One run, by its directory: `Run("runs/first")`, or `Run.load("runs/first")`."""

    def __init__(self, directory: str | Path) -> None:
        """Raises RunDirectoryError: no run is in this directory."""
        self._layout = RunLayout(without_dots(Path(directory)))
        self._planned: Config | None = None
        self._layout.require_run()

    @classmethod
    def load(cls, directory: str | Path) -> Run:
        """The same as Run(directory)."""
        return cls(directory)

    @classmethod
    def _to_begin(cls, config: Config) -> Run:
        """One whose directory may not be there yet."""
        made = cls.__new__(cls)
        made._layout, made._planned = RunLayout(config.run_directory), config
        return made

    def __repr__(self) -> str:
        return f"Run({str(self._layout.root)!r}, step {self.step} of {self.num_steps}, {self.phase})"

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._layout.root

    @property
    def name(self) -> str:
        """As in the run file."""
        return run_name(self.settings, self.directory)

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved run file, by section and key.  Raises ConfigError: config.json is damaged."""
        if self._planned is not None and not self._layout.is_run:
            return self._planned.model_dump(mode="json")
        settings = read_document(self._layout.config).get("config")
        if not isinstance(settings, dict):
            raise ConfigError(f"{self._layout.config}: damaged")
        return settings

    @property
    def status(self) -> dict[str, Any]:
        """status.json: phase, step, roles; {} before the first start."""
        return read_document(self._layout.status)

    @property
    def summary(self) -> dict[str, Any] | None:
        """summary.json, the figures of the whole run; None until it is complete."""
        return read_document(self._layout.summary) or None

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.status.get("step", 0))

    @property
    def num_steps(self) -> int:
        """Total number of steps, as configured."""
        return int(self.settings["run"]["num_steps"])

    @property
    def phase(self) -> str:
        """ "complete", or the last phase of its controller: "training", "stopped", …; "new": it has not begun."""
        return "complete" if self.summary is not None else str(self.status.get("phase", "new"))

    @property
    def figures(self) -> Mapping[str, Curve]:
        """Metrics by their names in docs/metrics.md, each with `steps`, `values`, `unix_times_s`.  Raises OSError."""
        return _Figures(read_curves(self._layout.tensorboard))

    @property
    def evaluations(self) -> Mapping[str, Mapping[int, Mapping[str, Any]]]:
        """Dataset → step → figure → {"value", "low", "high"}."""
        return past_evaluations(self._layout) if self._layout.evaluations.is_dir() else {}

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        found = []
        for step, path in KnownCheckpoints(self._layout.checkpoints).steps():
            try:
                found.append(Checkpoint(step, policy_version_of(path), path))
            except CheckpointError:  # pruned meanwhile
                continue
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def stop(self, *, now: bool = False, tell: Tell | None = None) -> None:
        """Finish the step, save, and end the run, on this machine or in Slurm; returns when it has ended.

        now: do not finish the step.  tell: called with the lines that `rlhpc stop` prints.  One that does not run is
        left as it is.  Raises RoleFailed: steps were lost; RunDirectoryError: it cannot be asked from this machine;
        SlurmError: Slurm does not answer; KeyboardInterrupt: the run was asked, and ends by itself.
        """
        said: list[str] = []

        def hear(line: str) -> None:
            said.append(line)
            (tell or say_nothing)(line)

        status = stop_run(self._layout, now=now, tell=hear)
        if status == EXIT_INTERRUPTED:
            raise KeyboardInterrupt(said[-1])
        if status != 0:
            raise RoleFailed(said[-1])

    @speaks_python
    def rollouts(
        self,
        *,
        steps: Sequence[int] | None = None,
        task: str | None = None,
        verdict: Literal["correct", "wrong", "verifier_error"] | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        grep: str | None = None,
        tokenizer: str | Path | None = None,
        tell: Tell | None = None,
    ) -> Iterator[SeenRollout]:
        """Yield every selected rollout that is on disk, as `rlhpc rollouts` shows them.

        steps: first and last.  grep: a regular expression.  tell: called with a line for what cannot be shown.
        Raises ConfigError: grep without a tokenizer, or an invalid selection.
        """
        pair = None if steps is None else _pair_of(steps)
        for name, bound in (("min_reward", min_reward), ("max_reward", max_reward)):
            if bound is not None and not _is_number(bound):
                raise ConfigError(f"{name}={bound!r}; legal: a number")
        if min_reward is not None and max_reward is not None and min_reward > max_reward:
            raise ConfigError(f"min_reward={min_reward:g} is above max_reward={max_reward:g}: nothing is between them")
        if verdict is not None and verdict not in (legal := [each.value for each in Verdict]):
            raise ConfigError(f"verdict={verdict!r}; legal: {', '.join(legal)}")
        try:
            pattern = None if grep is None else re.compile(grep)
        except re.error as error:
            raise ConfigError(f"grep={grep!r}: not a regular expression: {error}") from error
        chosen = Selection(pair, task, verdict, min_reward, max_reward, pattern)
        directory = None if tokenizer is None else Path(tokenizer)
        return RunRollouts(self._layout, tokenizer_dir=directory, tell=tell or say_nothing).each(chosen)

    def frame(self, library: Literal["pandas", "polars"] = "pandas", **selection: Any) -> Any:
        """The same as a frame, one row per rollout, without token arrays; parts of rewards are columns part_NAME.

        selection: as for `rollouts`.  Raises ConfigError: the library is not installed.
        """
        return _frame(library, lambda: _columns(self.rollouts(**selection)))

    def metrics_frame(self, library: Literal["pandas", "polars"] = "pandas", *patterns: str) -> Any:
        """The metrics as a frame, one row per step: `step`, `unix_time_s`, all metrics including those of evaluations.

        patterns: of names, such as "reward/*"; default: all.  The same as `rlhpc metrics` writes.
        Raises ConfigError: no metrics yet, a pattern matches none, the library is not installed; OSError.
        """
        return _frame(library, metric_table(self._layout, patterns).columns)


def _pair_of(steps: object) -> tuple[int, int]:
    """A first and a last step, of a tuple or a list.  Raises ConfigError."""
    match steps:
        case [int(first), int(last)] if first <= last:
            return first, last
    raise ConfigError(f"steps={steps!r}; legal: (first, last)")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # of numpy, too


class _Figures(dict[str, Curve]):
    """Curves by name, of which one that is not there is answered with those that may be meant."""

    def __missing__(self, name: str) -> Curve:
        raise KeyError(f"{name!r}: not a metric of this run{hint(name, list(self))}")


def _frame(library: str, columns: Callable[[], Mapping[str, list[Any]]]) -> Any:
    """columns: called once the library is known to be installed."""
    if library not in ("pandas", "polars"):
        raise ConfigError(f"library={library!r}; legal: pandas, polars")
    return optional_module(library, "frames").DataFrame(columns())


def _columns(rollouts: Iterator[SeenRollout]) -> dict[str, list[Any]]:
    """A list for each column; a part of rewards that a rollout lacks is None."""
    rows, parts = list[dict[str, Any]](), dict[str, None]()
    for seen in rollouts:
        of_parts = {_storable(f"part_{name}"): value for name, value in seen.reward_parts.items()}
        parts |= dict.fromkeys(of_parts)
        rows.append({name: _storable(value(seen)) for name, value in _FRAME.items()} | of_parts)
    return {name: [row.get(name) for row in rows] for name in (*_FRAME, *parts)}


_FRAME: dict[str, Callable[[SeenRollout], Any]] = {
    "group_id": lambda seen: seen.group_id,
    "sample_index": lambda seen: seen.sample_index,
    "prompt_id": lambda seen: seen.prompt_id,
    "task": lambda seen: seen.task,
    "standing": lambda seen: seen.standing,
    "drop_reason": lambda seen: seen.drop_reason or None,
    "step": lambda seen: seen.step if seen.step >= 0 else None,
    "admitted_version": lambda seen: seen.admitted_version,
    "trained_version": lambda seen: seen.trained_version if seen.trained_version >= 0 else None,
    "staleness": lambda seen: seen.staleness,
    "attempts": lambda seen: seen.attempts,
    "reward": lambda seen: seen.reward,
    "verdict": lambda seen: seen.verdict,
    "advantage": lambda seen: seen.advantage,
    "num_tokens": lambda seen: len(seen.token_ids),
    "finish_reason": lambda seen: seen.finish_reason,
    "prompt": lambda seen: seen.prompt,
    "completion": lambda seen: seen.completion,
    "reference": lambda seen: seen.reference,
    "detail": lambda seen: seen.detail,
}


def _storable(value: Any) -> Any:
    """Of text, a lone surrogate as its escape: frames hold UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
