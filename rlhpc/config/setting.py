"""Marks on keys of the run file, beside their name, type, default and docstring.

A key is one field of a table:

    clip_high: Annotated[PositiveFloat, Usual(1e-5, 100, OF_A_RATIO), idle_with("algorithm.loss", "sapo")] = 0.28
    \"""The upper bound of the clipped ratio is 1 + clip_high.\"""

Usual: range of plausible values; `rlhpc check` warns of others.  only_with, idle_with: other settings with which the
key has an effect, or none; where it has none, any value but its default is refused, because whoever sets a key expects
an effect.  A rule is a method of the table whose key it checks.  Messages and configs/README.md are made from these.
Loads without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from rlhpc.config.toml import shown

if TYPE_CHECKING:
    from rlhpc.config.rules import Config

_UNSET: tuple[object, ...] = (None, "", (), {}, 0, "off")  # values that switch something off, or stand for none
_NONE: tuple[object, ...] = (None, "", (), {})
Mark = TypeVar("Mark")
Faults = Iterator[str]  # each names a key, its value, and what is legal


@dataclass(frozen=True, slots=True)
class Usual:
    """Range of plausible values of a key; one far outside is a slip of the exponent or of the unit."""

    low: float
    high: float
    why: str
    zero: bool = False  # 0 is usual, too: it switches something off

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high or (self.zero and value == 0)

    def __str__(self) -> str:
        return f"{_short(self.low)} to {_short(self.high)}{', or 0' if self.zero else ''}"


@dataclass(frozen=True, slots=True)
class AnySize:
    """Mark of a number without a usual range: every size is plausible, or another key bounds it."""


ANY_SIZE = AnySize()


@dataclass(frozen=True, slots=True)
class Idle:
    """Settings beside which a key has no effect: all of them together."""

    beside: Mapping[str, tuple[object, ...]]  # key → values; of several datasets, one with such a value suffices
    is_inverted: bool = False  # the key has an effect only with these values; (): with any value but _UNSET
    why: str = ""
    other: str = ""  # further legal settings that do not follow from the values
    accepts: tuple[object, ...] = ()  # values that are legal nevertheless, beside the default

    def holds(self, config: Config, table: Section) -> bool:
        """Whether a key of this table has no effect."""
        return all(self._matches(_found(config, table, name), values) for name, values in self.beside.items())

    def _matches(self, found: tuple[object, ...], values: tuple[object, ...]) -> bool:
        if self.is_inverted and not values:
            return not any(each not in _UNSET for each in found)
        return any(each in values for each in found) != self.is_inverted

    def in_words(self, config: Config, table: Section, place: str) -> str:
        """Describe the present settings, and why they leave the key without effect."""
        beside = " and ".join(_as_set(_placed(name, place), _found(config, table, name)) for name in self.beside)
        beside = f"without {beside[3:]}" if beside.startswith("no ") else f"with {beside}"
        return beside + (f": {self.why}" if self.why else "")

    def legal(self, config: Config, table: Section, place: str) -> str:
        """Describe the settings with which the key would have an effect."""
        if self.other:
            return self.other
        return " or ".join(
            self._legal(_placed(name, place), values, _found(config, table, name)[0])
            for name, values in self.beside.items()
        )

    def _legal(self, name: str, values: tuple[object, ...], found: object) -> str:
        if self.is_inverted and values:
            return f"no {name}" if values[0] in _NONE else f"{name}={' or '.join(map(spelt, values))}"
        if isinstance(found, bool):
            return f"{name}={spelt(not found)}"
        if isinstance(found, float) and self.is_inverted:
            return f"{name} above 0"
        if isinstance(found, int):
            return f"{name} of {max(each for each in (0, *values) if isinstance(each, int)) + 1} or more"
        article = "an" if name[0] in "aeio" else "a"
        return f"{article} {name}" if self.is_inverted else f"another {name}"


def only_with(name: str, *values: object, why: str = "", other: str = "", accepts: tuple[object, ...] = ()) -> Idle:
    """Mark a key that has an effect only if another has one of these values; without values: if that is set."""
    return Idle({name: values}, True, why, other, accepts)


def only_with_any(*names: str, why: str = "") -> Idle:
    """Mark a key that has an effect only if one of these others is set."""
    return Idle(dict.fromkeys(names, ()), True, why)


def idle_with(name: str, *values: object, why: str = "", other: str = "", accepts: tuple[object, ...] = ()) -> Idle:
    """Mark a key that has no effect if another has one of these values."""
    return Idle({name: values}, False, why, other, accepts)


class Section(BaseModel):
    """Base of every table of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    whole_table: ClassVar[tuple[Idle, ...]] = ()  # settings with which no key of the table has an effect


TOKENS, SECONDS, BYTES = "it is in tokens", "it is in seconds", "it is in bytes"
STEPS = "it is in optimiser steps"
GROUPS = "it is in groups, of admission.group_size rollouts each"
ATTEMPTS = "it is a number of attempts"
GPUS, PROCESSES = "each is a GPU", "each is a process of its own"
USUAL_TOKENS = Usual(1, 1e7, TOKENS)
RATE = "RL of pretrained models takes 1e-6 to 1e-5; above 1e-2 language models diverge, below 1e-8 none learns"
USUAL_RATE = Usual(1e-8, 1e-2, RATE)


# ------------------------------------------------------------------------------------------------------ types of keys

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Duration = Annotated[float, Field(ge=0.01)]  # seconds; nothing awaited can happen in less
Arguments = dict[str, bool | int | float | str]  # keyword arguments of the user's own code
LearningRate = Annotated[float, Field(gt=0, le=1)]


def _written_out(value: object) -> object:
    """Refuse an empty path, which would be the current directory, and ~ or $NAME, which nothing expands."""
    if isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError("legal: a path")
        if _OF_A_SHELL.search(value) and not Path(value).exists():
            raise ValueError("~ and $NAME are not expanded; legal: the path written out")
    return value


COLDEST = 0.01  # vLLM samples at this temperature for any lower one above 0
_OF_A_SHELL = re.compile(r"^~|\$[A-Za-z_{]")
LoosePath = Annotated[Path, Field(strict=False), BeforeValidator(_written_out)]  # a run file has strings


def _absolute(value: str) -> str:
    """Make a path absolute: roles may run in another directory than the command."""
    return str(Path(str(_written_out(value))).absolute()) if value else value


def _program(value: str) -> str:
    """Make a program's path absolute; a name without a directory is looked up on the node that runs it."""
    return _absolute(value) if "/" in value else value


NamedProgram = Annotated[str, AfterValidator(_program)]
NamedPath = Annotated[str, AfterValidator(_absolute)]  # "": none
NamedPaths = Annotated[
    tuple[str, ...], Field(strict=False), AfterValidator(lambda values: tuple(map(_absolute, values)))
]
Share = Annotated[float, Field(ge=0, le=1)]
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings, characters of one


def _can_be_found(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an empty text, which matches at once, and U+FFFD, which decoders emit for incomplete characters."""
    if len(texts) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP or "\ufffd" in text for text in texts):
        raise ValueError(
            f"legal: {MOST_STOPS} texts or fewer, each of 1 to {LONGEST_STOP} characters, none of them U+FFFD"
        )
    return texts


StopStrings = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_can_be_found)]


# -------------------------------------------------------------------------------------- effects and rules of a file


def _idle_keys(config: Config) -> Faults:
    for place, table in tables_of(config):
        for key, marks in _idle_marks(type(table)).items():
            value, default = getattr(table, key), type(table).model_fields[key].default
            for mark in marks if value != default else ():
                if value not in mark.accepts and mark.holds(config, table):
                    plain = "leave it out" if default in _NONE else f"{spelt(default)}, its default"
                    legal = ", ".join((plain, *map(spelt, mark.accepts), f"or {mark.legal(config, table, place)}"))
                    beside = mark.in_words(config, table, place)
                    yield f"{place}.{key}={spelt(value)} has no effect {beside}; legal: {legal}"


def rule(function: Callable[[Any, Config, Keys], Faults]) -> Callable[[Any, Config, Keys], Faults]:
    """Mark a method of a table as a rule between a key and others: it yields faults, each beginning with the key.

    Its docstring, in Markdown, is its line in configs/README.md.
    """
    vars(function)["is_rule"] = True
    return function


class Keys:
    """Keys in the form of messages: `key.num_steps` of the own table or `key.run.num_steps` is "run.num_steps=4"."""

    def __init__(self, config: Config, table: Section, place: str) -> None:
        self._config, self._table, self._place = config, table, place

    def __getattr__(self, name: str) -> Any:
        if name in type(self._table).model_fields:
            return f"{self._place}.{name}={spelt(getattr(self._table, name))}"
        return Keys(self._config, getattr(self._config, name), name)

    def __str__(self) -> str:
        return self._place


@cache
def rules_of(table: type[Section]) -> tuple[Callable[[Section, Config, Keys], Faults], ...]:
    """The rules of a table, in their order."""
    return tuple(each for each in vars(table).values() if getattr(each, "is_rule", False))


def faults(config: Config) -> Faults:
    """Yield a fault for each key that contradicts others, or has no effect beside them."""
    yield from _idle_keys(config)  # first: the value of a key without effect does not matter
    for place, table in (*tables_of(config), ("", config)):
        for each in rules_of(type(table)):
            yield from each(table, config, Keys(config, table, place))


def tables_of(config: Config) -> Iterator[tuple[str, Section]]:
    """Yield place and content of every table: several of [[data]] are data.0, data.1."""
    for section in type(config).model_fields:
        found = getattr(config, section)
        if isinstance(found, Section):
            yield section, found
        elif isinstance(found, dict):
            yield from ((f"{section}.{name}", table) for name, table in found.items())
        else:
            yield from ((f"{section}.{n}" if len(found) > 1 else section, table) for n, table in enumerate(found))


def marks_of(field: FieldInfo, kind: type[Mark]) -> tuple[Mark, ...]:
    """Marks of one kind on a key: Usual, Idle."""
    return tuple(each for each in (*field.metadata, *_within(field.annotation)) if isinstance(each, kind))


def spelt(value: object) -> str:
    """Spell the value of a key for messages."""
    if isinstance(value, float):
        return f"{value:g}"
    return repr(str(value)) if isinstance(value, Path) else shown(value)


@cache
def _idle_marks(table: type[Section]) -> Mapping[str, tuple[Idle, ...]]:
    own = {key: (*table.whole_table, *marks_of(field, Idle)) for key, field in table.model_fields.items()}
    return {key: marks for key, marks in own.items() if marks}


def _within(annotation: Any) -> Iterator[object]:
    """Yield the marks of the alternatives of a type."""
    for part in get_args(annotation):
        yield from getattr(part, "__metadata__", ())
        yield from _within(part)


def _found(config: Config, table: Section, name: str) -> tuple[object, ...]:
    """Values of a key: of this table if it is one of several of its kind, else of all tables of the section."""
    section, _, key = name.partition(".")
    if name == "data.task":
        return config.judging_tasks
    tables = getattr(config, section)
    several = tables if isinstance(tables, tuple) else (tables,)
    found = [getattr(each, key) for each in ((table,) if table in several else several)]
    if len(found) == 1 and isinstance(found[0], tuple):
        return found[0] or ((),)
    return tuple(found)


def _placed(name: str, place: str) -> str:
    """Name of a key; with the number of its table if it is in the table at `place`."""
    section, _, key = name.partition(".")
    return f"{place}.{key}" if place.partition(".")[0] == section else name


def _as_set(name: str, values: tuple[object, ...]) -> str:
    said = list(dict.fromkeys(spelt(each) for each in values if each not in _NONE))
    return f"{name}={', '.join(said)}" if said else f"no {name}"


def _short(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
