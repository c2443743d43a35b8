"""Which files a dataset consists of, and in which order.

Input: a path, a split.  Output: files.  A directory may hold files side by side, a directory for each split, or what
`datasets` wrote by save_to_disk (dataset_dict.json, state.json).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhpc.config_data import COMPRESSIONS
from rlhpc.errors import DataError

FORMS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
ALL = "all"  # as a split
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "config.json")  # as hubs have them, beside data/ too
_SHARD = re.compile(r"(\w+)-[0-9]{5}-of-[0-9]{5}\.")  # of a split, as `datasets` names its files
_SPLIT = re.compile(r"(train|training|validation|valid|val|dev|eval|test)(?![A-Za-z0-9])")
_CANONICAL = {
    "training": "train",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}


def form_of(file: Path) -> str:
    """The suffix that says how to read it, "" for another file; of a compressed one that of what is in it."""
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix
    return suffix if suffix in FORMS else ""


def split_of(file: Path) -> str:
    """The split that a shard is named after; of others "train", "validation" or "test" where their names begin so.

    "" for a name without one.  A dataset may have splits train_sft and train_prefs, which are no two parts of train.
    """
    found = _SHARD.match(file.name) or _SPLIT.match(file.name)
    return _CANONICAL.get(found[1], found[1]) if found else ""


def dataset_files(path: Path, split: str = "") -> list[Path]:
    """The files of a dataset, in the order of their names.

    Raises DataError: nothing there, no form known here, no such split, or several and none is chosen.
    """
    if path.is_dir():
        return _files_of_directory(path, split)
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.is_dir())
        raise DataError(f"data.path={path} does not exist; {_whats_in(parent)}{_meant(path, parent)}{_remedy(path)}")
    if not form_of(path):
        raise DataError(f"data.path={path}: legal: a file of {_forms()}, or a directory of them")
    if split not in ("", ALL):
        raise DataError(f"data.split={split!r}: data.path={path} is one file; legal: leave it out, or a directory")
    return [path]


def _files_of_directory(path: Path, split: str) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        return _saved_splits(path, split)
    if (path / "state.json").is_file() and "_data_files" in (state := _read_json(path / "state.json")):
        return _saved_dataset(path, state)
    there = [file for file in sorted(path.iterdir()) if form_of(file) and file.is_file() and file.name[0] not in "._"]
    found = [file for file in there if file.name not in _DESCRIPTIONS]
    # Beside data of another form, JSON documents are descriptions: dataset_infos.json, config.json.
    files = [file for file in found if form_of(file) != ".json"] or found
    if not files:
        return _deeper(path, split)
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file), []).append(file)
    return [file for name in _chosen(path, split, sorted(by_split)) for file in by_split[name]]


def _deeper(path: Path, split: str) -> list[Path]:
    """A directory for each split, or data/, as in a snapshot of a dataset from a hub."""
    splits = sorted(each for each in path.iterdir() if each.is_dir() and split_of(each))
    if splits:
        chosen = _chosen(path, split, sorted({*map(split_of, splits)}))
        return [file for each in splits if split_of(each) in chosen for file in dataset_files(each, ALL)]
    if (path / "data").is_dir():
        return _files_of_directory(path / "data", split)
    raise DataError(f"data.path={path} holds no file of {_forms()}; {_whats_in(path)}")


def _saved_splits(path: Path, split: str) -> list[Path]:
    names = [str(name) for name in _read_json(path / "dataset_dict.json").get("splits", ())]
    files = []
    for name in _chosen(path, split, names):
        state = path / name / "state.json"
        if not state.is_file():
            raise DataError(f"{path / 'dataset_dict.json'} names the split {name!r}, and {state} does not exist")
        files += _saved_dataset(state.parent, _read_json(state))
    return files


def _saved_dataset(directory: Path, state: Mapping[str, Any]) -> list[Path]:
    if state.get("_indices_data_files"):
        raise DataError(f"{directory / 'state.json'}: saved with an index of rows; save flatten_indices() of it")
    files = [directory / str(each["filename"]) for each in state["_data_files"]]
    for file in files:
        if not file.is_file():
            raise DataError(f"{directory / 'state.json'} names {file.name}, which does not exist")
    return files


def _chosen(path: Path, split: str, names: list[str]) -> list[str]:
    """Splits to be read: the only one, all, or the one that is asked for."""
    named = [name for name in names if name]
    if split == ALL:
        return names
    if not split:
        if len(named) > 1 or (named and len(names) > 1):
            others = "" if len(named) > 1 else ", and files of none"
            raise DataError(
                f"data.path={path} has the splits {', '.join(named)}{others}; data.split says which is meant, "
                f'"{ALL}" means every file'
            )
        return names
    wanted = split if split in named else _CANONICAL.get(split, split)
    if wanted not in named:
        close = get_close_matches(split, named, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        has = f"has the splits {', '.join(named)}" if named else "has no files named after a split"
        raise DataError(f"data.split={split!r}: data.path={path} {has}{hint}")
    return [wanted]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{file} does not hold a JSON object")
    return document


def _forms() -> str:
    return f"{', '.join(FORMS[:-1])} or {FORMS[-1]} (plain, {' or '.join(COMPRESSIONS)})"


def _meant(path: Path, parent: Path) -> str:
    close = get_close_matches(path.name, [entry.name for entry in parent.iterdir()], 1)
    return f" (did you mean {close[0]}?)" if close and parent == path.absolute().parent else ""


def _remedy(path: Path) -> str:
    """Return what to do about a pattern, a list, a name of a hub, or an address."""
    if set("*?[]{},") & set(str(path)):
        return (
            "; patterns and lists are not expanded; legal: one file, a directory, of which every file is read (or "
            "those of data.split), or a table [[data]] for each file"
        )
    if path.absolute().parent.is_dir():
        return ""
    return (
        "; legal: files of this machine (download a dataset of a hub first: hf download NAME --repo-type dataset "
        "--local-dir DIRECTORY)"
    )


def _whats_in(directory: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f"{directory} holds {shown or 'nothing'}"
