"""`rlhpc data convert`: write records in another form, some of them left out, or parted into train and validation.

Input: Source, options.  Output: files, and lines that say what was written.  Who is in which part depends on the record
alone, so that it stays where it is when records are added or put in another order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from launch.commands.dataset.source import Source
from rlhpc.data.record_writer import WRITTEN, write_records
from rlhpc.data.records import Record
from rlhpc.errors import ConfigError


def convert(source: Source, out: Path, options: argparse.Namespace) -> list[str]:
    """Write the records that are wanted; return a line for each file.  Raises ConfigError, DataError, OSError."""
    parts = _files(out, options.validation)
    kept = _kept(source, options)
    if not kept:
        raise ConfigError(f"none of {len(source.records):,} records is within the bounds; nothing is written")
    lines = []
    validation = [options.validation is not None and _draw(record) < options.validation for record in kept]
    for is_validation, file in parts.items():
        chosen = [record for record, here in zip(kept, validation, strict=True) if here is is_validation]
        if not chosen:
            raise ConfigError(f"--validation {options.validation:g} of {len(kept):,} records leaves none for {file}")
        lines.append((file, chosen))
    for file, chosen in lines:
        write_records(file, [record.fields for record in chosen])
    left_out = len(source.records) - len(kept)
    said = [f"{file}: {len(chosen):,} records" for file, chosen in lines]
    return said + ([f"left out: {left_out:,}"] if left_out else [])


def _files(out: Path, validation: float | None) -> dict[bool, Path]:
    """By whether it is the part for validation.  Raises ConfigError for a file that exists, or of another form."""
    if validation is None:
        if out.suffix not in WRITTEN:
            raise ConfigError(f"{out}: legal is a {' or '.join(WRITTEN)} file")
        parts = {False: out}
    else:
        if not 0 < validation < 1:
            raise ConfigError(f"--validation {validation:g}; legal: between 0 and 1")
        if out.suffix in WRITTEN:
            raise ConfigError(f"{out}: with --validation, OUT is a directory, for train.jsonl and validation.jsonl")
        parts = {False: out / "train.jsonl", True: out / "validation.jsonl"}
    for file in parts.values():
        if file.exists():
            raise ConfigError(f"{file} exists; nothing is overwritten")
    return parts


def _kept(source: Source, options: argparse.Namespace) -> list[Record]:
    bounds = {
        "tokens": (options.min_tokens, options.max_tokens),
        "characters": (options.min_characters, options.max_characters),
    }
    given = {what: pair for what, pair in bounds.items() if pair != (None, None)}
    if not given and not options.distinct:
        return list(source.records)
    if source.form is None:
        asks = "--distinct" if options.distinct else f"bounds of {next(iter(given))}"
        raise ConfigError(f"{asks}: of prompts, which need --model DIR")
    texts, faults = source.prompts()
    if faults:
        raise ConfigError(f"{len(faults):,} records make no prompt: {faults[0]}")
    characters = [len(text[0]) for text in texts if text is not None]
    tokens = [length or 0 for length in source.lengths(texts)] if "tokens" in given else characters
    lengths = {"tokens": tokens, "characters": characters}
    places = [
        place
        for place in range(len(texts))
        if all((low or 0) <= lengths[what][place] <= _most(high) for what, (low, high) in given.items())
    ]
    if options.distinct:  # the first of each text
        places = sorted({texts[place]: place for place in reversed(places)}.values())
    return [source.records[place] for place in places]


def _most(bound: int | None) -> float:
    return float("inf") if bound is None else bound


def _draw(record: Record) -> float:
    """A number from 0 to 1 that the content of a record decides."""
    content = json.dumps(record.fields, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) / 2**64
