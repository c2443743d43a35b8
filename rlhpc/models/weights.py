"""Check by their headers that the weight files of an HF checkpoint hold the model that its config.json describes.

Input: a checkpoint directory and the content of its config.json.  Output: a ConfigError that names the file, the tensor
and the remedy.  Loaders invent missing tensors: transformers draws random numbers, an engine leaves its memory as it
is.  Reads no tensor data, and needs no torch: used on login nodes, in the trainer and in the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.base.files import is_lfs_pointer
from rlhpc.models.shape import EMBEDDING, FAMILIES, HEAD, ModelShape
from rlhpc.protocol.errors import ConfigError

# --------------------------------------------------------------------------------------------------- safetensors header
#
# The header of a safetensors file: its tensors and their positions.
#
# Input: a file.  Output: shapes, dtypes and byte ranges by name.  The numbers are not read.

REAL_DTYPES = ("F64", "F32", "F16", "BF16")  # of weights that are trained; others are packed or scaled numbers
_MAX_HEADER_BYTES = 100 << 20  # what the safetensors library accepts


class NotSafetensors(Exception):
    """Fault of a file, without its name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, at its bytes begin … end − 1."""

    shape: list[int]
    dtype: str  # as the file spells it: F32, BF16, I8, …
    begin: int
    end: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors by name, in the order of the header.  Raises NotSafetensors, OSError."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise NotSafetensors(f"{size:,} bytes that are not a safetensors file")
        header = content.read(length)
    try:
        entries = {str(name): entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return {name: _stored(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise NotSafetensors(f"its header is not that of a safetensors file: {error!r}") from error


def _stored(entry: dict[str, Any], data_begin: int) -> StoredTensor:
    begin, end = (data_begin + int(offset) for offset in entry["data_offsets"])
    return StoredTensor([*map(int, entry["shape"])], str(entry["dtype"]), begin, end)


# -------------------------------------------------------------------------------------------------------- model weights

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_COMPUTED = ".rotary_emb.inv_freq"  # older transformers stored it; every loader computes it
# Parts of names that wrappers leave in saved tensors, and the way to save the inner model.
_WRAPPERS: Mapping[str, str] = {
    "base_model.model.": "PEFT wraps the model in this: save what merge_and_unload() returns",
    ".base_layer.": "PEFT wraps the model in this: save what merge_and_unload() returns",
    ".lora_": "an adapter inside the model: save what merge_and_unload() returns",
    "_orig_mod.": "torch.compile wraps the model in this: save the model that was compiled",
    "_fsdp_wrapped_module.": "FSDP wraps the model in this: save the model inside",
    "_checkpoint_wrapped_module.": "a wrapper for recomputation: save the model inside",
    "_forward_module.": "a wrapper: save the model inside",
    ".qweight": "GPTQ or AWQ: quantised weights are not trained; take the checkpoint in bfloat16 or float32",
}
StoredTensors = dict[str, tuple[StoredTensor, Path]]


def is_mxfp4(model: Mapping[str, Any]) -> bool:
    """True for a checkpoint whose experts are in MXFP4, which is read as bfloat16 (gpt-oss); model: config.json."""
    quantised = model.get("quantization_config")
    return isinstance(quantised, Mapping) and quantised.get("quant_method") == "mxfp4"


def refuse_other_weights(
    directory: Path, model: Mapping[str, Any], others: Mapping[str, Sequence[int]] | None = None
) -> None:
    """model: config.json.  others: shapes by name, if known, of a family that ModelShape does not know.

    Raises ConfigError for damaged files, and for tensors that do not form this model.
    """
    files = weight_files(directory)
    stored = {name: (tensor, file) for file in files for name, tensor in _tensors_in(file).items()}
    _refuse_wrong_index(directory, stored)
    if model.get("quantization_config"):  # scales and packed matrices, which an engine may support
        return
    own = _tensors_of(model)
    wanted = own or others or {}
    if not wanted:
        _refuse_other_embedding(directory, model, stored)
        _refuse_missing_layers(directory, model, files, stored)
        refuse_integers(stored, [name for name in stored if name.endswith("weight") and len(stored[name][0].shape) > 1])
        return
    missing = [name for name in wanted if name not in stored]
    if not own:  # such as gpt2, whose loaders all accept the names of the model without its head
        missing = [name for name in missing if name.partition(".")[2] not in stored]
    if missing:
        raise ConfigError(_missing(directory, model, files, stored, missing))
    refuse_integers(stored, [name for name in wanted if name in stored])
    for name, shape in wanted.items():
        if name in stored:
            _refuse_other_shape(directory, stored, name, list(shape))
    if own:
        _refuse_what_nobody_loads(directory, model, stored, own)


def refuse_integers(stored: Mapping[str, tuple[StoredTensor, Path]], names: Iterable[str]) -> None:
    """Raise ConfigError for weights that are not floating-point numbers: loaders would train them unchanged."""
    for name in names:
        tensor, file = stored[name]
        if tensor.dtype not in REAL_DTYPES:
            raise ConfigError(
                f"{file}: {name} is stored as {tensor.dtype}: quantised weights are not trained; legal: the checkpoint "
                f"in {', '.join(REAL_DTYPES)}"
            )


def weight_files(directory: Path) -> list[Path]:
    """Weight files that trainer and engine both load.  Raises ConfigError if they differ, or a file is missing."""
    index, one = directory / INDEX, directory / ONE_FILE
    there = sorted(directory.glob("*.safetensors"))
    if not index.is_file():
        others = [file.name for file in there if file != one]
        if there and not one.is_file():
            raise ConfigError(
                f"{directory}: {_names(there)} without {INDEX}, by which loaders find them; legal: {ONE_FILE}, or "
                "shards with their index (copy it from where the shards are from, or load and save the model again)"
            )
        if others:
            raise ConfigError(
                f"{directory / others[0]}: beside {ONE_FILE}, without an index: trainers take the one, engines both; "
                f"legal: {ONE_FILE} alone, or shards with {INDEX}"
            )
        return there
    named = object_in(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ConfigError(f"{index}: no weight_map; legal: the index that save_pretrained writes")
    files = [directory / str(name) for name in sorted({*map(str, named.values())})]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} does not exist, and {index.name} names it; legal: all files of the checkpoint")
    if one.is_file() and one not in files:
        raise ConfigError(
            f"{one}: beside {index.name}, which names other files: trainers take the one, engines the others; legal: "
            "the files of one checkpoint"
        )
    return files


def _refuse_wrong_index(directory: Path, stored: StoredTensors) -> None:
    index = directory / INDEX
    for name, file in object_in(index)["weight_map"].items() if index.is_file() else ():
        if name not in stored or stored[name][1].name != file:
            raise ConfigError(f"{index}: {name} is not in {file}, as it says; legal: the index of these files")


def _tensors_of(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by name; {} for a family that transformers is asked about, or if a size is missing, refused elsewhere."""
    if model.get("model_type") not in FAMILIES:  # others have tensors beside the model's: those they see by, MTP
        return {}
    try:
        shape = ModelShape.of(model)
    except KeyError:
        return {}
    return {} if shape is None else shape.tensors


# ----------------------------------------------------------------------------------------------------- missing tensors


def _missing(
    directory: Path, model: Mapping[str, Any], files: list[Path], stored: StoredTensors, missing: list[str]
) -> str:
    """Error text for missing tensors, with the reason if the names show it."""
    place = f"{directory}: {_names(files)}"
    more = f" (and {len(missing) - 1} more of {model.get('model_type')})" if len(missing) > 1 else ""
    lacking = f"{place} has no tensor {missing[0]}{more}, for which loaders would make up numbers"
    for part, what in _WRAPPERS.items():
        if found := next((name for name in stored if part in name), ""):
            return f"{lacking}; it has {found}: {what}"
    if missing == [HEAD]:
        return (
            f"{lacking}; tie_word_embeddings is false in {directory / 'config.json'}; legal: a checkpoint with its "
            "head, or tie_word_embeddings=true for a model that was trained so"
        )
    if prefix := _prefix(stored, missing):
        return f"{lacking}; every name has {prefix!r} in front: save the model again without it"
    if all(name.removeprefix("model.") in stored for name in missing if name != HEAD):
        return (
            f"{lacking}; it has {next(iter(stored))}: a model that was saved without its head (AutoModel); load it "
            "with AutoModelForCausalLM, and save that"
        )
    if whole := _missing_layer(model, stored):
        return f"{directory}: {whole.format(files=_names(files))}"
    return f"{lacking}; legal: all tensors of the model"


def _prefix(stored: StoredTensors, missing: list[str]) -> str:
    """Common prefix of all missing names in the files; "" if there is none."""
    for name in stored:
        prefix = name.removesuffix(missing[0])
        if prefix != name and all(prefix + each in stored for each in missing):
            return prefix
    return ""


def _missing_layer(model: Mapping[str, Any], stored: StoredTensors) -> str:
    """Error text for the first layer without any tensor, if other layers have some; {files} is to be filled in."""
    layers = {int(found[1]) for name in stored if (found := _LAYER.match(name))}
    absent = sorted({*range(model.get("num_hidden_layers", 0))} - layers) if layers else []
    if not absent:
        return ""
    return (
        f"num_hidden_layers={model['num_hidden_layers']} in config.json, and {{files}} has no tensor of "
        f"model.layers.{absent[0]}.; legal: all files of one checkpoint"
    )


def _refuse_missing_layers(directory: Path, model: Mapping[str, Any], files: list[Path], stored: StoredTensors) -> None:
    if whole := _missing_layer(model, stored):
        raise ConfigError(f"{directory}: {whole.format(files=_names(files))}")


# ------------------------------------------------------------------------------------------------------- other tensors


def _refuse_other_embedding(directory: Path, model: Mapping[str, Any], stored: StoredTensors) -> None:
    wanted = [model.get("vocab_size"), model.get("hidden_size")]
    if EMBEDDING in stored and None not in wanted:
        _refuse_other_shape(directory, stored, EMBEDDING, wanted)


def _refuse_other_shape(directory: Path, stored: StoredTensors, name: str, wanted: list[Any]) -> None:
    tensor, file = stored[name]
    if tensor.shape != wanted:
        raise ConfigError(
            f"{file}: {name} has the shape {tensor.shape}, and by the sizes in {directory / 'config.json'} it is "
            f"{wanted}: they belong to different models"
        )


def _refuse_what_nobody_loads(
    directory: Path, model: Mapping[str, Any], stored: StoredTensors, wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ConfigError for a tensor of another model: trainers would ignore it, and engines would end."""
    for name, (_, file) in stored.items():
        if name in wanted or name == HEAD or name.endswith(_COMPUTED):
            continue
        found = _LAYER.match(name)
        layers = model.get("num_hidden_layers", 0)
        if found and int(found[1]) >= layers:
            why = f"num_hidden_layers={layers}"
        else:
            why = f"model_type={model.get('model_type')!r}, whose layers have no such tensor with the settings there"
        raise ConfigError(
            f"{file}: {name}, and {directory / 'config.json'} has {why}: they belong to different models, or another "
            "head was saved with it; legal: the tensors of this model alone"
        )


def _names(files: list[Path]) -> str:
    if not files:
        return ONE_FILE
    return files[0].name if len(files) == 1 else f"{files[0].name} to {files[-1].name}"


def _tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Tensors of a file by name.  Raises ConfigError if it is damaged."""
    if is_lfs_pointer(file):
        raise ConfigError(f"{file}: a pointer of Git LFS, not the weights; fetch them: git lfs pull")
    try:
        tensors = read_header(file)
    except NotSafetensors as error:
        raise ConfigError(f"{file}: {error}; copy it again") from error
    size, end = file.stat().st_size, max((tensor.end for tensor in tensors.values()), default=0)
    if size < end:
        raise ConfigError(f"{file}: cut off: {size:,} of {end:,} bytes; copy it again")
    return tensors


def object_in(file: Path) -> dict[str, Any]:
    """Read a file with a JSON object.  Raises ConfigError for anything else."""
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:  # of json, or not UTF-8
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: a {type(document).__name__}; legal: a JSON object")
    return document
