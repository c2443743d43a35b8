"""Turn arguments of the Python API into those of the commands, and the errors of commands into Python's words.

run file or Config, overrides as texts or a dict   →   Config, run file, words of a command
the import path of this session                    →   PYTHONPATH of what it starts
"use --resume to continue it"                      →   "use resume=True to continue it"
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rlhpc.config import Config
from rlhpc.config_file import load_config, settled
from rlhpc.errors import ConfigError, RlhpcError
from rlhpc.files import write_atomically
from rlhpc.toml_text import toml_value

Overrides = Sequence[str] | Mapping[str, Any]  # ["run.name=x"] or {"run.name": "x"}
Tell = Callable[[str], None]
P = ParamSpec("P")
R = TypeVar("R")

_FORMS = "['run.name=x'], or a dict such as {'run.name': 'x'}"
_OPTION = re.compile(r"--(?P<name>[a-z][a-z-]*)(?: (?P<value>'[^']*'|\S+?)(?=[;:,.)]*(?:\s|$)))?")


def say_nothing(line: str) -> None:
    """A `tell` for whoever has given none."""


def words_of(overrides: Overrides) -> list[str]:
    """Overrides as a command takes them, "section.key=value".  Raises ConfigError: neither texts nor a dict."""
    if isinstance(overrides, str | bytes) or not isinstance(overrides, Sequence | Mapping):
        raise ConfigError(f"overrides={overrides!r}: legal: a list of texts such as {_FORMS}")
    if not isinstance(overrides, Mapping):
        for word in overrides:
            if not isinstance(word, str):
                raise ConfigError(f"overrides: {word!r}: legal: a text such as 'run.name=x'; or a dict for all of them")
        return list(overrides)
    return [_word(key, value) for key, value in _by_key(overrides).items()]


def _by_key(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of sections, {"run": {"name": "x"}}, as one of keys."""
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
    """Settings from a run file, or from what load_config has returned, and overrides.  Raises ConfigError."""
    words = words_of(overrides)
    if isinstance(config, Config):
        return settled(_said(config), words, "config", "overrides") if words else config
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config={config!r}: legal: a run file, or a Config from rlhpc.config_file.load_config; settings in a dict "
            "are overrides of a run file"
        )
    return load_config(Path(config), words, "overrides")


def command_words(config: str | Path | Config, overrides: Overrides, known: Config, file: Path) -> list[str]:
    """Run file and overrides as a command takes them.

    known: what settings_of returns for both.  file: written for a Config, which has none.
    """
    if not isinstance(config, Config):
        return [str(config), *words_of(overrides)]
    lines = [f"{key} = {toml_value(value)}\n" for key, value in _said(known).items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(lines).encode())
    return [str(file)]


def _said(config: Config) -> dict[str, Any]:
    """Tables with the keys that somebody has set: a rule may refuse others, which would have no effect."""
    return config.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def refuse_both(*, resume: bool, fresh: bool) -> None:
    """Raises ConfigError: a run cannot go on and start over."""
    if resume and fresh:
        raise ConfigError("resume=True and fresh=True: legal: one of them")


# --------------------------------------------------------------------------------------------------------- import path


def import_path() -> str:
    """PYTHONPATH for another process: directories that this session searches and a new interpreter would not."""
    given = {_absolute(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    places = sysconfig.get_paths()
    installed = {*places.values(), *site.getsitepackages(), site.getusersitepackages()}
    installed |= {f"{places['platstdlib']}/lib-dynload", str(Path(__file__).parents[2])}
    found = dict.fromkeys(map(_absolute, sys.path))  # of a notebook the first is "": the current directory
    own = (entry for entry in found if entry in given or (entry not in installed and Path(entry).is_dir()))
    return os.pathsep.join(own)


def _absolute(entry: str) -> str:
    return str(Path(entry).absolute())


@contextmanager
def import_path_exported() -> Iterator[None]:
    """Jobs that are submitted meanwhile find the modules that this session finds: sbatch passes its environment on."""
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
    """The same function; what its errors call an option of a command is the argument of that name.

    Commands between backticks are left as they are: they are to be typed.
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
    """Options as arguments: --fresh as fresh=True, --samples 0 as samples=0."""

    def argument(option: re.Match[str]) -> str:
        name, value = option["name"].replace("-", "_"), option["value"]
        if name not in arguments:
            return option[0]
        if isinstance(arguments[name].default, bool):
            return f"{name}=True" + option[0].removeprefix(f"--{option['name']}")
        return f"{name}={value}" if value else name

    parts = text.split("`")
    return "`".join(each if place % 2 else _OPTION.sub(argument, each) for place, each in enumerate(parts))
