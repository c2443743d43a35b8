"""A run directory as an object: figures, rollouts, checkpoints, evaluations.

Input: a run directory, also of a running run.  Output: arrays and frames.  Nothing is cached: each call reads the disk.
`stop` ends the run.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from launch.commands.stop import stop_run
from launch.common.text import optional_module, without_dots
from launch.run_files.run_state import run_name
from launch.view.rollouts import RunRollouts, SeenRollout, Selection
from launch.view.run import RunView, hint
from launch.view.standing import standing_now
from rlhpc.base.files import write_atomically
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, settled
from rlhpc.config.rules import Config
from rlhpc.config.toml import toml_value
from rlhpc.metrics.curves import Curve
from rlhpc.protocol.errors import EXIT_INTERRUPTED, CheckpointError, ConfigError, RlhpcError, RoleFailed
from rlhpc.training.checkpoint_directory import policy_version_of

# ------------------------------------------------------------------------------------------------------------ arguments
#
# Convert arguments of the Python API to those of commands, and options in errors of commands to Python arguments.
#
# run file or Config, overrides as texts or a dict   →   Config, run file, words of a command
# the import path of this session                    →   PYTHONPATH of its processes
# "use --resume to continue it"                      →   "use resume=True to continue it"

Overrides = Sequence[str] | Mapping[str, Any]  # ["run.name=x"] or {"run.name": "x"}
Tell = Callable[[str], None]
P = ParamSpec("P")
R = TypeVar("R")

_FORMS = "['run.name=x'], or a dict such as {'run.name': 'x'}"
_OPTION = re.compile(r"--(?P<name>[a-z][a-z-]*)(?: (?P<value>'[^']*'|\S+?)(?=[;:,.)]*(?:\s|$)))?")


def say_nothing(line: str) -> None:
    """Default `tell`: drop the line."""


def words_of(overrides: Overrides) -> list[str]:
    """Overrides in the form of commands, "section.key=value".  Raises ConfigError: neither texts nor a dict."""
    if isinstance(overrides, str | bytes) or not isinstance(overrides, Sequence | Mapping):
        raise ConfigError(f"overrides={overrides!r}: legal: a list of texts such as {_FORMS}")
    if not isinstance(overrides, Mapping):
        for word in overrides:
            if not isinstance(word, str):
                raise ConfigError(f"overrides: {word!r}: legal: a text such as 'run.name=x'; or a dict for all of them")
        return list(overrides)
    return [_word(key, value) for key, value in _by_key(overrides).items()]


def _by_key(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a dict of sections, {"run": {"name": "x"}}, to one of keys."""
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        is_section = isinstance(value, Mapping) and "." not in str(key)
        found |= {f"{key}.{inner}": each for inner, each in value.items()} if is_section else {key: value}
    return found


def _word(key: object, value: object) -> str:
    try:
        return f"{key}={toml_value(value)}"
    except ConfigError as error:
        raise ConfigError(f"overrides: {key}={error}") from None


def settings_of(config: str | Path | Config, overrides: Overrides = ()) -> Config:
    """Settings from a run file or a Config, and overrides.  Raises ConfigError."""
    words = words_of(overrides)
    if isinstance(config, Config):
        return settled(_said(config), words, "config", "overrides") if words else config
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config={config!r}: legal: a run file, or a Config from rlhpc.config.file.load_config; settings in a dict "
            "are overrides of a run file"
        )
    return load_config(Path(config), words, "overrides")


def command_words(config: str | Path | Config, overrides: Overrides, known: Config, file: Path) -> list[str]:
    """Run file and overrides as words of a command.

    known: result of settings_of for both.  file: written for a Config, which has none.
    """
    if not isinstance(config, Config):
        return [str(config), *words_of(overrides)]
    lines = [f"{key} = {toml_value(value)}\n" for key, value in _said(known).items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(lines).encode())
    return [str(file)]


def _said(config: Config) -> dict[str, Any]:
    """Tables with only the keys that were set: a rule may refuse others, which would have no effect."""
    return config.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def refuse_both(*, resume: bool, fresh: bool) -> None:
    """Raise ConfigError for both resume and fresh."""
    if resume and fresh:
        raise ConfigError("resume=True and fresh=True: legal: one of them")


# --------------------------------------------------------------------------------------------------------- import path


def import_path() -> str:
    """PYTHONPATH for another process: this session's directories that a new interpreter would not search."""
    given = {_absolute(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    places = sysconfig.get_paths()
    installed = {*places.values(), *site.getsitepackages(), site.getusersitepackages()}
    installed |= {f"{places['platstdlib']}/lib-dynload", str(Path(__file__).parents[1])}
    found = dict.fromkeys(map(_absolute, sys.path))  # in a notebook the first is "": the current directory
    own = (entry for entry in found if entry in given or (entry not in installed and Path(entry).is_dir()))
    return os.pathsep.join(own)


def _absolute(entry: str) -> str:
    return str(Path(entry).absolute())


@contextmanager
def import_path_exported() -> Iterator[None]:
    """Set PYTHONPATH during the block, so that submitted jobs find this session's modules: sbatch passes it on."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = import_path()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


# -------------------------------------------------------------------------------------------------------------- errors


def speaks_python(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function: options of commands in its errors become Python arguments.

    Commands between backticks are not changed: they are to be typed.
    """
    arguments = signature(function).parameters

    @wraps(function)
    def speaking(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RlhpcError as error:
            error.args = tuple(in_python(each, arguments) if isinstance(each, str) else each for each in error.args)
            raise

    return speaking


def in_python(text: str, arguments: Mapping[str, Parameter]) -> str:
    """Replace options by arguments: --fresh by fresh=True, --samples 0 by samples=0."""

    def argument(option: re.Match[str]) -> str:
        name, value = option["name"].replace("-", "_"), option["value"]
        if name not in arguments:
            return option[0]
        if isinstance(arguments[name].default, bool):
            return f"{name}=True" + option[0].removeprefix(f"--{option['name']}")
        return f"{name}={value}" if value else name

    parts = text.split("`")
    return "`".join(each if place % 2 else _OPTION.sub(argument, each) for place, each in enumerate(parts))


# ------------------------------------------------------------------------------------------------------------------ run


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.  Its files are not read: `rlhpc check RUN_DIR` does."""

    step: int
    policy_version: int
    path: Path


class Run:
    """A run, by its directory: `Run("runs/first")`, or `Run.load("runs/first")`."""

    def __init__(self, directory: str | Path | Run) -> None:
        """Raises RunDirectoryError if there is no run in this directory."""
        self._layout = RunLayout(without_dots(Path(directory)))
        self._planned: Config | None = None
        self._layout.require_run()

    @classmethod
    def load(cls, directory: str | Path) -> Run:
        """Return Run(directory)."""
        return cls(directory)

    @classmethod
    def _to_begin(cls, config: Config) -> Run:
        """Run whose directory may not exist yet."""
        made = cls.__new__(cls)
        made._layout, made._planned = RunLayout(config.run_directory), config
        return made

    def __fspath__(self) -> str:
        """The run directory, for every function that takes a path."""
        return str(self._layout.root)

    def __repr__(self) -> str:
        return f"Run({str(self._layout.root)!r}, step {self.step} of {self.num_steps}, {self.phase})"

    @property
    def _view(self) -> RunView:
        """Read the run directory."""
        return RunView(self._layout)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._layout.root

    @property
    def name(self) -> str:
        """The name in the run file."""
        return run_name(self.settings, self.directory)

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved run file, by section and key.  Raises ConfigError: config.json is damaged."""
        if self._planned is not None and not self._layout.is_run:
            return self._planned.model_dump(mode="json")
        if (view := self._view).damage:
            raise ConfigError(f"{self._layout.config}: damaged")
        return view.settings

    @property
    def status(self) -> dict[str, Any]:
        """status.json: phase, step, roles; {} before the first start."""
        return self._view.status

    @property
    def summary(self) -> dict[str, Any] | None:
        """summary.json, the figures of the whole run; None until it is complete."""
        return self._view.summary or None

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
        """Phase of the controller ("starting", "training", …), "new" before, and in the end how it ended.

        That is "complete", "stopped", "failed", or "lost": nothing is alive, and nothing says why.  Of a submitted run
        that has been silent for a minute Slurm is asked.
        """
        view = self._view
        standing = standing_now(view) if view.is_there else None
        if standing is None or standing.state.is_alive:
            return view.phase or "new"
        return str(standing.state)

    @property
    def figures(self) -> Mapping[str, Curve]:
        """Metrics by name (`rlhpc schema metrics`), each with `steps`, `values`, `unix_times_s`.  Raises OSError."""
        return _Figures(self._view.curves)

    @property
    def evaluations(self) -> Mapping[str, Mapping[int, Mapping[str, Any]]]:
        """Dataset → step → figure → {"value", "low", "high"}."""
        return self._view.evaluations

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        found = []
        for step, path in self._view.checkpoints:
            try:
                found.append(Checkpoint(step, policy_version_of(path), path))
            except CheckpointError:  # pruned meanwhile
                continue
        return found

    def stop(self, *, now: bool = False, tell: Tell | None = None) -> None:
        """Finish the step, save, and end the run, on this machine or in Slurm; returns when it has ended.

        now: do not finish the step.  tell: called with the lines that `rlhpc stop` prints.  Does nothing if the run
        does not run.  Raises RoleFailed: steps were lost; RunDirectoryError: it cannot be stopped from this machine;
        SlurmError: Slurm does not answer; KeyboardInterrupt: the request was made, and the run ends by itself.
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
        dataset: str | None = None,
        verdict: Literal["correct", "wrong", "verifier_error"] | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        grep: str | None = None,
        tokenizer: str | Path | None = None,
        tell: Tell | None = None,
    ) -> Iterator[SeenRollout]:
        """Yield every selected rollout that is on disk, as `rlhpc rollouts` shows them.

        steps: first and last.  dataset: its name.  grep: a regular expression.  tell: called with a line about rollouts
        that cannot be shown.  Raises ConfigError: grep without a tokenizer, or an invalid selection.
        """
        pair = None if steps is None else _pair_of(steps)
        for name, bound in (("min_reward", min_reward), ("max_reward", max_reward)):
            if bound is not None and not _is_number(bound):
                raise ConfigError(f"{name}={bound!r}; legal: a number")
        chosen = Selection.of(pair, task, verdict, min_reward, max_reward, grep, dataset)
        directory = None if tokenizer is None else Path(tokenizer)
        return RunRollouts(self._layout, tokenizer_dir=directory, tell=tell or say_nothing).each(chosen)

    def frame(self, library: Literal["pandas", "polars"] = "pandas", **selection: Any) -> Any:
        """A frame with one row per rollout, without token arrays; parts of rewards are columns part_NAME.

        selection: as for `rollouts`.  Raises ConfigError: the library is not installed.
        """
        return _frame(library, lambda: _columns(self.rollouts(**selection)))

    def metrics_frame(self, library: Literal["pandas", "polars"] = "pandas", *patterns: str) -> Any:
        """The metrics as a frame, one row per step: `step`, `unix_time_s`, all metrics including those of evaluations.

        patterns: of names, such as "reward/*"; default: all.  The same table as of `rlhpc metrics`.
        Raises ConfigError: no metrics yet, a pattern matches none, the library is not installed; OSError.
        """
        if self._planned is not None and not self._layout.is_run:
            raise ConfigError(f"{self.directory}: no metrics yet: the run has not begun")
        return _frame(library, self._view.metric_table(patterns).columns)


def _pair_of(steps: object) -> tuple[int, int]:
    """First and last step, from a tuple or a list.  Raises ConfigError."""
    match steps:
        case [int(first), int(last)] if first <= last:
            return first, last
    raise ConfigError(f"steps={steps!r}; legal: (first, last)")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # of numpy, too


class _Figures(dict[str, Curve]):
    """Curves by name; the KeyError of a missing name suggests similar ones."""

    def __missing__(self, name: str) -> Curve:
        raise KeyError(f"{name!r}: not a metric of this run{hint(name, list(self))}")


def _frame(library: str, columns: Callable[[], Mapping[str, list[Any]]]) -> Any:
    """Make a frame; columns: called once the library is known to be installed."""
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


# Columns that are fields of a rollout, and those that are derived from fields.
_FRAME: dict[str, Callable[[SeenRollout], Any]] = {
    **{
        name: attrgetter(name)
        for name in ("group_id", "sample_index", "prompt_id", "dataset", "record", "task", "standing", "drop_reason",
                     "step", "admitted_version", "trained_version", "staleness", "attempts", "reward", "verdict",
                     "advantage", "teacher_logprob", "num_tokens", "num_rows", "finish_reason", "prompt", "completion",
                     "reference", "detail")
    },
    "drop_reason": lambda seen: seen.drop_reason or None,
    "step": lambda seen: seen.step if seen.step >= 0 else None,
    "trained_version": lambda seen: seen.trained_version if seen.trained_version >= 0 else None,
    "num_tokens": lambda seen: len(seen.token_ids),
    "num_rows": lambda seen: 1 + len(seen.row_starts),
}  # fmt: skip


def _storable(value: Any) -> Any:
    """Text with a lone surrogate as its escape: frames hold UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
