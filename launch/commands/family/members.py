"""Which runs a family consists of, and their names.  Pure except that it reads the run file.

Input: run file, overrides, the values of --seeds and --sweep.  Output: one Member for each combination.  Guarantees: no
two have the same name, directory or settings.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.config import Config, with_values
from rlhpc.config_file import load_config
from rlhpc.errors import ConfigError

MOST_RUNS = 64  # a seed that is taken for a number of runs should not fill the queue
_NAMED_BY_US = ("run.name", "run.directory")


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a family."""

    config: Config
    varied: str  # "trainer.learning_rate=1e-6 run.seed=7"

    @property
    def name(self) -> str:
        """Of the run."""
        return self.config.run.name


@dataclass(frozen=True, slots=True)
class _Axis:
    """A key and its values, as they were typed; seeds as numbers, of which there may be too many for a list."""

    key: str
    values: Sequence[str | int]
    stem: str  # of names: seed7, learning_rate-1e-6

    def part(self, value: str | int) -> str:
        """Of a name."""
        return f"-{self.stem}{re.sub(r'[^A-Za-z0-9._-]', '_', str(value).strip(chr(34)))}"


def members_of(run_file: Path, overrides: Sequence[str], seeds: str | None, sweeps: Sequence[str]) -> list[Member]:
    """Every combination of swept values and seeds, seeds varying fastest.

    seeds: "3" for three from run.seed on, "7,8,9" or "7," for these.  sweeps: "key=value,value".  Each run is called
    NAME-KEY-VALUE-seedN and lies beside where NAME would.  Raises ConfigError naming key and value.
    """
    base = load_config(run_file, overrides)
    axes = _axes(sweeps) + ([_seed_axis(seeds, base.run.seed)] if seeds is not None else [])
    num_runs = math.prod(len(axis.values) for axis in axes)
    if num_runs > MOST_RUNS:
        option = f"--seeds {seeds}" if seeds is not None and not sweeps else "--seeds and --sweep"
        hint = f"; for the one seed: --seeds {seeds}," if seeds is not None and seeds.isdecimal() else ""
        raise ConfigError(f"{option}: {num_runs} runs; legal: up to {MOST_RUNS} at once{hint}")
    members = [
        _member(run_file, overrides, base, axes, values) for values in itertools.product(*(a.values for a in axes))
    ]
    _refuse_twins(members)
    return members


def _member(
    run_file: Path, overrides: Sequence[str], base: Config, axes: Sequence[_Axis], values: Sequence[str | int]
) -> Member:
    suffix = "".join(axis.part(value) for axis, value in zip(axes, values, strict=True))
    directory = base.run_directory.with_name(base.run_directory.name + suffix)
    varied = [f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)]
    own = [f"run.name={json.dumps(base.run.name + suffix)}", f"run.directory={json.dumps(str(directory))}"]
    return Member(load_config(run_file, [*overrides, *varied, *own]), " ".join(varied))


def _seed_axis(text: str, first: int) -> _Axis:
    words = [word.strip() for word in text.removesuffix(",").split(",")]
    if not all(word.isdecimal() for word in words) or (text.isdecimal() and int(text) == 0):
        raise ConfigError(f"--seeds {text!r}: legal: how many (3), or the seeds themselves (7,8,9; one alone: 7,)")
    listed = range(first, first + int(text)) if text.isdecimal() else sorted({int(word) for word in words})
    if not text.isdecimal() and len(listed) < len(words):
        raise ConfigError(f"--seeds {text!r}: a seed is listed twice")
    return _Axis("run.seed", listed, "seed")


def _axes(sweeps: Sequence[str]) -> list[_Axis]:
    parsed = [_parse(text) for text in sweeps]
    keys = [key for key, _ in parsed]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--sweep {key}: given twice; legal: once, with all its values")
    last = [key.rpartition(".")[2] for key in keys]
    return [
        _Axis(key, values, f"{name if last.count(name) == 1 else key}-")
        for (key, values), name in zip(parsed, last, strict=True)
    ]


def _parse(text: str) -> tuple[str, tuple[str, ...]]:
    key, equals, listed = text.partition("=")
    key, values = key.strip(), tuple(value.strip() for value in listed.split(","))
    if not equals or not key or not all(values):
        raise ConfigError(f"--sweep {text!r}: legal: section.key=value,value such as trainer.learning_rate=1e-6,2e-6")
    if key in _NAMED_BY_US:
        raise ConfigError(f"--sweep {text!r}: {key} follows from the values of the other keys")
    if key == "run.seed":
        raise ConfigError(f"--sweep {text!r}: legal: --seeds {','.join(values)}")
    return key, values


def _refuse_twins(members: Sequence[Member]) -> None:
    """1e-6 and 0.000001 are one value; "a b" and "a_b" give one name."""
    by_settings: dict[str, Member] = {}
    by_name: dict[str, Member] = {}
    for member in members:
        settings = with_values(member.config, {"run.name": "", "run.directory": None}).model_dump_json()
        twin = by_settings.setdefault(settings, member)
        if twin is not member:
            raise ConfigError(f"--sweep: {twin.varied} and {member.varied} are the same run")
        namesake = by_name.setdefault(member.name, member)
        if namesake is not member:
            raise ConfigError(f"--sweep: {namesake.varied} and {member.varied} would both be called {member.name}")
