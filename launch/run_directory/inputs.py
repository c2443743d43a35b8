"""The inputs of a run: digests of tokenizer, weights and dataset, recorded at the first start and verified on resume.

Input: the settings and the files they name.  Output: inputs.json in the run directory, or what differs from it.
Guarantees: files are compared by content, not by path, so that a directory may move; a file whose path, inode, size and
times are unchanged is not read again, so that a resume costs a few `stat` calls.

Of safetensors above FULL_BYTES, the header and SAMPLE_BYTES at beginning, middle and end of every tensor are read: that
detects another model, or another training of the same one, in 140 GB within seconds.  Other files are read in full.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from rlhpc.base.files import write_atomically
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.data.files import dataset_files
from rlhpc.models.adapter import PEFT_CONFIG, PEFT_WEIGHTS
from rlhpc.models.weights import NotSafetensors, read_header
from rlhpc.protocol.errors import DataError, RunDirectoryError

FORMAT_VERSION = 1
FULL_BYTES = 256 << 20
SAMPLE_BYTES = 4096
READ_BYTES = 8 << 20
NUM_READERS = 8

WEIGHTS = ".safetensors"
# Files that determine tokens and model, in addition to the weights (*.safetensors).
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt", "tokenizer.model",
    "model.safetensors.index.json")  # fmt: skip

Entries = dict[str, "InputFile"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """State of a file when it was read."""

    path: str
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int  # cannot be set by users: writing to a file in place changes it
    digest: str

    def is_untouched(self, other: InputFile) -> bool:
        """True if both are the same file, not written to in between; digests are not compared."""
        return asdict(self) | {"digest": ""} == asdict(other) | {"digest": ""}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files by name, of the model directory and of the dataset."""

    model: Entries
    data: Entries


def look_at_inputs(config: Config, known: Inputs | None = None) -> Inputs:
    """Read the files named in the settings; files in `known` that have not changed are not read again.

    A missing file has no entry.  Raises RunDirectoryError if one cannot be read.
    """
    return Inputs(
        look_at_model(config.model.path, known.model if known is not None else {}),
        _look_at_datasets(_datasets_of(config), known.data if known is not None else {}),
    )


def look_at_model(model: Path, known: Mapping[str, InputFile] = MappingProxyType({})) -> Entries:
    """Read the files of an HF checkpoint, as look_at_inputs does."""
    weights = sorted(path.name for path in model.glob(f"*{WEIGHTS}"))
    return _read_all({name: model / name for name in (*MODEL_FILES, *weights)}, known)


def look_at_adapter(directory: Path) -> Entries:
    """Read the files of a PEFT adapter directory, as look_at_inputs does."""
    return _read_all({name: directory / name for name in (PEFT_CONFIG, PEFT_WEIGHTS)}, {})


def look_at_data(data: Path, split: str = "", known: Mapping[str, InputFile] = MappingProxyType({})) -> Entries:
    """Read a dataset, as look_at_inputs does."""
    return _read_all(dict(_files_of(data, split)), known)


def _files_of(data: Path, split: str) -> list[tuple[str, Path]]:
    """Files of a dataset by name, in its order; empty if they cannot be listed."""
    try:
        files = dataset_files(data, split)
    except DataError:
        files = []
    return [(path.name if data.is_file() else path.relative_to(data).as_posix(), path) for path in files]


def _datasets_of(config: Config) -> list[tuple[Path, str]]:
    """Paths of demonstrations, or of prompts and of documents for environments, with their split.

    A generated source has none.
    """
    tables = config.demonstrations if config.is_supervised else config.data
    files = [(each.path, each.split) for each in tables if each.path is not None]
    corpus = config.environment.corpus
    return [*files, *([] if corpus is None else [(corpus, "")])]


def _look_at_datasets(datasets: Sequence[tuple[Path, str]], known: Mapping[str, InputFile]) -> Entries:
    """All datasets, as look_at_inputs does; with several, file names begin with the position of their dataset."""
    if len(datasets) == 1:
        return look_at_data(*datasets[0], known)
    named = {f"{n}/{name}": file for n, each in enumerate(datasets) for name, file in _files_of(*each)}
    return _read_all(named, known)


def read_inputs(layout: RunLayout) -> Inputs | None:
    """The recorded inputs; None if none were recorded.  Raises RunDirectoryError if the file is damaged."""
    try:
        document = json.loads(layout.inputs.read_bytes())
        if document["format_version"] != FORMAT_VERSION:
            raise RunDirectoryError(
                f"{layout.inputs}: format version {document['format_version']} is unknown to this version of rlhpc"
            )
        return Inputs(*({name: InputFile(**e) for name, e in document[part].items()} for part in ("model", "data")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{layout.inputs}: damaged ({error!r}); delete it to record the current model and data again"
        ) from error


def write_inputs(layout: RunLayout, inputs: Inputs) -> None:
    """Write inputs.json."""
    document = {"format_version": FORMAT_VERSION, **asdict(inputs)}
    write_atomically(layout.inputs, json.dumps(document, indent=1).encode())


def refuse_other_inputs(config: Config, layout: RunLayout, *, may_lack_weights: bool = False) -> Inputs:
    """Return the current inputs, after checking that the run began with the same ones.  Changes nothing.

    may_lack_weights: do not compare weights on a node that has none.  Raises RunDirectoryError naming what differs.
    """
    noted = read_inputs(layout)
    now = look_at_inputs(config, noted)
    if noted is not None and not noted.model:  # it was to be made by jobs before those of the run
        noted = Inputs(now.model, noted.data)
    different = differences(noted, now, may_lack_weights=may_lack_weights) if noted is not None else []
    if different:
        lines = [f"{layout.root}: model or data differ from those this run started with:"]
        lines += [f"  {line}" for line in different]
        lines.append("restore them; to use others, start a new run (another run.name)")
        raise RunDirectoryError("\n".join(lines))
    return now


def differences(before: Inputs, now: Inputs, *, may_lack_weights: bool = False) -> list[str]:
    """Differences, one line each, with key, file and digests."""
    model = before.model
    if may_lack_weights and not any(name.endswith(WEIGHTS) for name in now.model):
        model = {name: entry for name, entry in model.items() if not name.endswith(WEIGHTS)}
    lines = list(_differences("model.path", model, now.model))
    # Of a dataset's files the order counts, not the names.
    if [entry.digest for entry in before.data.values()] != [entry.digest for entry in now.data.values()]:
        lines += list(_differences("data.path", before.data, now.data)) or [
            "data.path: its files are in a different order"
        ]
    return lines


def _differences(key: str, before: Mapping[str, InputFile], now: Mapping[str, InputFile]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if new is None and old is not None:
            yield f"{key}: {name} is missing; it was at {old.path}"
        elif old is None and new is not None:
            yield f"{key}: {new.path} is new: it did not exist at the first start"
        elif old is not None and new is not None and old.digest != new.digest:
            yield f"{key}: {new.path} has changed ({_size(old, new)}digest {new.digest}, recorded {old.digest})"


def _size(old: InputFile, new: InputFile) -> str:
    return f"{new.num_bytes} bytes instead of {old.num_bytes}; " if new.num_bytes != old.num_bytes else ""


# ------------------------------------------------------------------------------------------------------------- reading


def _read_all(paths: Mapping[str, Path], known: Mapping[str, InputFile]) -> Entries:
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="inputs") as readers:
        found = list(readers.map(partial(_read, known), paths.items()))
    return {name: entry for name, entry in zip(paths, found, strict=True) if entry is not None}


def _read(known: Mapping[str, InputFile], named: tuple[str, Path]) -> InputFile | None:
    name, path = named
    try:
        state = path.stat()
        entry = partial(InputFile, str(path), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        if name in known and known[name].is_untouched(entry("")):
            return known[name]
        is_sampled = path.suffix == WEIGHTS and state.st_size > FULL_BYTES
        return entry(_digest(_samples_of(path) if is_sampled else _blocks_of(path)))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from error


def _digest(blocks: Iterator[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _blocks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            yield block


def _samples_of(path: Path) -> Iterator[bytes]:
    """Digest of size, header and samples of every tensor; of the whole file if it is not a safetensors file."""
    spans = _tensor_spans(path)
    if not spans:
        yield from _blocks_of(path)
        return
    with path.open("rb", buffering=0) as file:
        yield struct.pack("<q", path.stat().st_size)
        yield file.read(spans[0][0])
        for begin, end in spans:
            for place in (begin, (begin + end) // 2, end - SAMPLE_BYTES):
                file.seek(max(begin, place))
                yield file.read(min(SAMPLE_BYTES, end - max(begin, place)))


def _tensor_spans(path: Path) -> Sequence[tuple[int, int]]:
    """Begin and end of each tensor, in bytes from the beginning of the file; empty without such a header.

    The first one begins where the header ends.
    """
    try:
        return sorted((tensor.begin, tensor.end) for tensor in read_header(path).values())
    except NotSafetensors:
        return ()
