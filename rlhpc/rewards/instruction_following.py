"""Task "instruction_following": does the completion follow instructions that a program can check?

Input: a completion; reference: JSON, a list of {"id": …, "kwargs": {…}}, or an object with IFEval's own columns,
{"instruction_id_list": […], "kwargs": [{…}, …]}; other keys are ignored.  Output: a RewardOutcome, by [instructions] of
the run file.

Strict looks at the completion as it is.  Loose (arXiv:2311.07911, section 2.2) forgives a first line, a last line and
asterisks: it is enough that one of eight versions of the completion follows an instruction.  An empty one follows none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.instructions import AT_LEAST, INSTRUCTIONS, LESS_THAN, REFUSED, Arguments
from rlhpc.rewards.task_settings import task_settings

Wanted = tuple[tuple[str, Arguments], ...]  # (id, arguments) of every instruction of a record


def judge(completion: str, reference: str) -> RewardOutcome:
    """Parts: the shares followed, strictly and loosely.  Raises ValueError for the reference."""
    wanted, settings = _read(reference), task_settings().instructions
    strict, loose = followed([completion], wanted), followed(versions(completion), wanted)
    counted = loose if settings.accuracy == "loose" else strict
    shares = {"strict": sum(strict) / len(wanted), "loose": sum(loose) / len(wanted)}
    is_correct = all(counted)
    reward = shares[settings.accuracy] if settings.reward == "fraction" else float(is_correct)
    missed = [name for (name, _), is_followed in zip(wanted, counted, strict=True) if not is_followed]
    detail = f"{len(wanted) - len(missed)} of {len(wanted)}" + (f"; not: {', '.join(missed)}" if missed else "")
    return RewardOutcome(reward, is_correct, parts=shares, detail=detail)


def check_reference(reference: str) -> None:
    """Raises ValueError if it is no such list, or an instruction is unknown or lacks an argument."""
    _read(reference)


def followed(texts: Sequence[str], wanted: Wanted) -> list[bool]:
    """For each instruction: does one of the texts follow it?"""
    return [
        any(text.strip() != "" and INSTRUCTIONS[name].follows(text, arguments) for text in texts)
        for name, arguments in wanted
    ]


def versions(completion: str) -> list[str]:
    """The completion with and without its first line, its last line, and asterisks."""
    lines = completion.split("\n")
    cut = ["\n".join(lines[first : len(lines) - last]).strip() for first, last in product((0, 1), (0, 1))]
    texts = [completion, *cut[1:]]
    return [*texts, *(text.replace("*", "") for text in texts)]


# ----------------------------------------------------------------------------------------------------------- reference


@lru_cache(maxsize=1024)
def _read(reference: str) -> Wanted:
    try:
        found = json.loads(reference)
    except ValueError as error:
        raise ValueError(f"reference {reference[:80]!r} is not JSON: {error}; legal: {_LEGAL}") from error
    pairs = _pairs(found)
    if not pairs:
        raise ValueError(f"reference {reference[:80]!r} has no instruction; legal: {_LEGAL}")
    return tuple((name, _arguments(name, given)) for name, given in pairs)


_LEGAL = '[{"id": "punctuation:no_comma", "kwargs": {}}, …], or IFEval\'s {"instruction_id_list": […], "kwargs": […]}'


def _pairs(found: Any) -> list[tuple[str, dict[str, Any]]]:
    try:
        if isinstance(found, dict):
            names, given = found["instruction_id_list"], found["kwargs"]
            pairs = list(zip(names, given, strict=True))
        else:
            pairs = [(each["id"], each.get("kwargs", {})) for each in found]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"reference {str(found)[:80]}: {type(error).__name__}: {error}; legal: {_LEGAL}") from error
    for name, arguments in pairs:
        if name in REFUSED:
            raise ValueError(f"instruction {name!r}: {REFUSED[name]}; legal: {', '.join(INSTRUCTIONS)}")
        if name not in INSTRUCTIONS:
            raise ValueError(f"instruction {name!r} is unknown; legal: {', '.join(INSTRUCTIONS)}")
        if not isinstance(arguments, dict | None):
            raise ValueError(f"instruction {name!r}: kwargs is {str(arguments)[:40]!r}; legal: an object")  # noqa: TRY004
    return pairs


def _arguments(name: str, given: dict[str, Any] | None) -> Arguments:
    """The instruction's arguments; nulls, as in a table with a column for each argument, are left out."""
    given = {key: value for key, value in (given or {}).items() if value is not None}
    kinds = INSTRUCTIONS[name].arguments
    if set(given) != set(kinds):
        raise ValueError(
            f"instruction {name!r} has the arguments {', '.join(given) or 'none'}; legal: {', '.join(kinds) or 'none'}"
        )
    arguments = {key: _value(name, key, kind, given[key]) for key, kind in kinds.items()}
    if arguments.get("nth_paragraph", 0) > arguments.get("num_paragraphs", 0):
        raise ValueError(
            f"instruction {name!r}: nth_paragraph={arguments['nth_paragraph']}; legal: 1 to num_paragraphs="
            f"{arguments['num_paragraphs']}"
        )
    return arguments


def _value(name: str, key: str, kind: str, value: Any) -> Any:
    if kind in ("count", "place") and isinstance(value, float) and value.is_integer():
        value = int(value)  # as tables with missing values have them
    legal, is_legal = {
        "text": ("a text that is not empty", isinstance(value, str) and value.strip() != ""),
        "letter": ("one character", isinstance(value, str) and len(value) == 1),
        "texts": ("a list of texts", isinstance(value, list) and bool(value) and all(map(_is_text, value))),
        "relation": (f"{AT_LEAST!r} or {LESS_THAN!r}", value in (AT_LEAST, LESS_THAN)),
        "count": ("a whole number from 0", type(value) is int and value >= 0),
        "place": ("a whole number from 1", type(value) is int and value >= 1),
    }[kind]
    if not is_legal:
        raise ValueError(f"instruction {name!r}: {key}={value!r}; legal: {legal}")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""
