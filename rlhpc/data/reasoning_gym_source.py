"""Records made by the library `reasoning-gym`: problems from a seed, with an answer that its own scorer knows.

    data.source = "reasoning_gym:chain_sum,leg_counting"      record i is of dataset i mod 2

Input: a table [data].  Output: Records with prompt, question, answer, dataset, level, metadata and entry, which is what
the task `reasoning_gym` judges by.  The same names, settings, seed and place give the same record, in whatever process:
they are made in a child whose sets have a fixed order (PYTHONHASHSEED), and kept in the cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from rlhpc.config_data import MADE, MOST_PROBLEMS, DataConfig
from rlhpc.data.cache import cached
from rlhpc.data.records import Record
from rlhpc.errors import DataError
from rlhpc.python_child import child_command, child_environment
from rlhpc.sandbox.values import encode

PREFIX = "reasoning_gym:"
DISTRIBUTION = "reasoning-gym"
# Kinds whose scorers, in release 0.1.25, give the whole reward to what is no answer, or none to this problem.
FLAWED = {
    "coin_flip": 'takes the beginning of a number for the whole ("0" for 0.3125)',
    "game_of_life_halting": 'takes any text for yes, "False" too',
    "puzzle24": "takes any four numbers for those of the problem, so that 6*4*1*1 solves all of them",
}
_FAULT = "fault"  # key of a line that says why there are no records


def names_of(source: str) -> list[str]:
    """Datasets of the library that data.source names.  Raises DataError for another kind of source."""
    names = [name.strip() for name in source.removeprefix(PREFIX).split(",")]
    if not source.startswith(PREFIX) or not all(names):
        raise DataError(f'data.source={source!r}; legal: "{PREFIX}NAME", or several names with commas between them')
    return names


def library_version() -> str:
    """Of reasoning-gym; "" where it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def made_records(data: DataConfig) -> list[Record]:
    """data.size records.  Raises DataError: the library is missing, has no such dataset or setting, or fails."""
    names = names_of(data.source)
    if MADE in data.all_tasks and (flawed := FLAWED.keys() & {*names}):
        name = min(flawed)
        raise DataError(
            f"data.source names {name!r}, and the scorer of {DISTRIBUTION} {FLAWED[name]}; legal: other kinds, or "
            'another data.task, which has the reference_field "answer"'
        )
    if importlib.util.find_spec("reasoning_gym") is None:
        install = "pip install 'rlhpc[reasoning-gym]'"
        raise DataError(f"data.source={data.source!r} needs the package {DISTRIBUTION}: {install}")
    wanted = {
        "names": names,
        "settings": data.settings,
        "levels": list(data.levels),
        # The library makes problem i of the seed s from s + i: seeds side by side would share nearly all of them.
        "seed": data.source_seed * MOST_PROBLEMS,
        "size": data.size,
    }
    question = json.dumps(wanted, sort_keys=True)
    kept = cached(
        "reasoning_gym",
        f"{library_version()} {question}",
        lambda: _made_in_a_child(question),
        is_whole=lambda content: content.endswith(b"\n") and content.count(b"\n") == data.size,
    )
    return [Record(json.loads(line), f"{data.source}:{number}") for number, line in enumerate(kept.splitlines())]


def _made_in_a_child(question: str) -> bytes:
    environment = child_environment(PYTHONHASHSEED="0", PYTHONWARNINGS="ignore")
    command = child_command("rlhpc.data.reasoning_gym_source")
    done = subprocess.run(command, input=question.encode(), capture_output=True, env=environment, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(f"{PREFIX[:-1]}: {last or f'exit status {done.returncode}'}")
    first = done.stdout.partition(b"\n")[0]
    if _FAULT in (said := json.loads(first)):
        raise DataError(str(said[_FAULT]))
    return done.stdout


# ------------------------------------------------------------------------------------------------------------ the child


def main() -> None:
    """Read what is wanted from standard input, write records to standard output, a line each, or one with a fault."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # datasets may print
    wanted = json.loads(sys.stdin.read())
    try:
        levels = wanted["levels"] or [None]
        datasets = [[problems_of(name, wanted, level) for level in levels] for name in wanted["names"]]
    except ValueError as error:
        out.write(json.dumps({_FAULT: str(error)}) + "\n")
        out.close()
        return
    for place in range(wanted["size"]):
        turn, which = divmod(place, len(datasets))
        level = turn % len(levels)
        settings, dataset = datasets[which][level]
        fields = _fields(wanted["names"][which], settings, levels[level], dataset[turn])
        out.write(json.dumps(fields, default=str) + "\n")
    out.close()


def problems_of(name: str, wanted: dict[str, Any], level: int | None) -> tuple[dict[str, Any], Any]:
    """Settings of a dataset of the library, and itself; wanted: see made_records.

    Raises ValueError that names key, value and what is legal.
    """
    from reasoning_gym import create_dataset  # in the child alone: it takes seconds
    from reasoning_gym.factory import CURRICULA, DATASETS

    if name not in DATASETS:
        raise ValueError(f"data.source names {name!r}, which reasoning_gym does not have; {_meant(name, DATASETS)}")
    if level is not None and name not in CURRICULA:
        raise ValueError(f"data.levels={wanted['levels']}: {name!r} of reasoning_gym has no levels; legal: none")
    settings = wanted["settings"] | ({} if level is None else _of_level(name, level, CURRICULA))
    config = DATASETS[name][1]
    for key in wanted["settings"]:
        if key not in (known := [each for each in config.__dataclass_fields__ if each not in ("seed", "size")]):
            raise ValueError(f"data.settings.{key}: {name!r} of reasoning_gym has no {key!r}; {_meant(key, known)}")
    try:
        return settings, create_dataset(name, seed=wanted["seed"], size=wanted["size"], **settings)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:  # in whatever way it refuses settings
        raise ValueError(f"data.settings={wanted['settings']}: {name!r} of reasoning_gym: {error}") from error


def _of_level(name: str, level: int, curricula: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Settings of a level, each of them at most at its highest."""
    curriculum = curricula[name]()
    for attribute, definition in curriculum.attributes.items():
        curriculum.set_attr_level(attribute, min(level, len(definition.levels) - 1))
    settings = dict(vars(curriculum.generate_configuration()))
    return {key: value for key, value in settings.items() if key not in ("seed", "size")}


def _fields(name: str, settings: dict[str, Any], level: int | None, entry: dict[str, Any]) -> dict[str, Any]:
    plain = _plain(entry)
    return {
        "prompt": plain["question"],
        "question": plain["question"],
        "answer": plain["answer"],
        "dataset": name,
        "level": level,
        "metadata": plain["metadata"],
        "entry": {"dataset": name, "settings": encode(_plain(settings)), "entry": encode(plain)},
    }


def _plain(value: Any) -> Any:
    """Of the built-in types only; anything else as text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_plain(each) for each in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def _meant(name: str, legal: Any) -> str:
    close = get_close_matches(name, legal, 3)
    names = sorted(legal)
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"legal: {shown}" + (f" (did you mean {' or '.join(close)}?)" if close else "")


if __name__ == "__main__":
    main()
