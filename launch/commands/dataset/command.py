"""`rlhpc data head|stats|convert`.

Input: options.  Output: lines, or files.  A plain file shows its fields; with a model, or keys of [data], its prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from launch.commands.dataset.convert import convert
from launch.commands.dataset.examples import first_records
from launch.commands.dataset.figures import figures
from launch.commands.dataset.source import Source, sources_of
from launch.common.text_table import escaped
from rlhpc.errors import ConfigError

_ONLY_CONVERT = ("min_tokens", "max_tokens", "min_characters", "max_characters", "distinct", "validation")
SHOWN = 3  # records of `head`


def look_at_dataset(options: argparse.Namespace) -> int:
    """Print or write what is asked for.  Raises ConfigError, DataError."""
    overrides = [word for word in options.words if "=" in word]
    outputs = [Path(word) for word in options.words if "=" not in word]
    _refuse_options(options, outputs)
    sources = sources_of(options.data, options.model, overrides)
    if options.action == "convert":
        if len(sources) > 1:
            raise ConfigError(f"{options.data} has {len(sources)} datasets; give the file of one")
        print("\n".join(convert(sources[0], outputs[0], options)))
        return 0
    for source in sources:
        _print(source, SHOWN if options.records is None else options.records, options.action, len(sources) > 1)
    return 0


def _print(source: Source, number: int, action: str, is_one_of_several: bool) -> None:
    lines = first_records(source, number) if action == "head" else figures(source)
    head = [f"== {source.data.title}"] * is_one_of_several
    print(escaped("\n".join([*head, *lines])))  # names of fields are foreign, too


def _refuse_options(options: argparse.Namespace, outputs: list[Path]) -> None:
    """An option of another action is a misunderstanding."""
    if options.action == "convert" and len(outputs) != 1:
        raise ConfigError("convert needs one OUT: a .jsonl or .parquet file, or with --validation a directory")
    if options.action != "convert":
        given = [name for name in _ONLY_CONVERT if getattr(options, name) not in (None, False)]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')}: for convert, and this is {options.action}")
        if outputs:
            raise ConfigError(f"{str(outputs[0])!r}: only convert has an OUT; a setting has the form data.key=value")
    if options.action != "head" and options.records is not None:
        raise ConfigError(f"--records {options.records}: for head, and this is {options.action}")
