"""Turn the trainer's part of a checkpoint into an HF checkpoint that others can load.

Input: a checkpoint and the directory of the trained model.  Output: a directory with the new weights and the rest of
the old one: untrained tensors, configuration, tokenizer, chat template, licence; or, for LoRA adapters, a directory
that PEFT loads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from rlhpc.base.files import write_atomically
from rlhpc.base.hf_config import TEXT, language_model
from rlhpc.models.adapter import (
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    A,
    B,
    base_digest,
    is_quantised,
    matrices_of,
    peft_config,
    projection_of,
    settings_of,
)
from rlhpc.models.shape import INNER
from rlhpc.models.weights import read_header, weight_files
from rlhpc.protocol.contracts import TrainerBackend
from rlhpc.protocol.errors import CheckpointError, ConfigError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.backends import AVERAGE, merged
from rlhpc.training.checkpoint_tensors import INDEX_FILE, TensorSource, plan_shards, size_in_bytes, write_safetensors
from rlhpc.training.trainer_state import TrainerCheckpoint, open_checkpoint
from rlhpc.weights.four_bits import in_four_bits, unpacked

# --------------------------------------------------------------------------------------------------------------- export

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack")
CHAT_TEMPLATES = "additional_chat_templates"  # transformers keeps all but the default one there
SHARD_BYTES = 4 << 30
CONFIG_FILE = "config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")  # in config.json; the second is the older spelling
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_hf(
    checkpoint_dir: Path,
    model_dir: Path,
    out_dir: Path,
    *,
    is_average: bool = False,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write an HF checkpoint into out_dir, which must not exist; return the dtype of its weights.

    checkpoint_dir: the trainer's part, or the step directory around it.  is_average: export the moving average of its
    weights.  dtype: a key of DTYPES; None: that of model_dir's config.json.
    Reads and verifies only exported tensors, once: moments are two thirds of a checkpoint.
    Raises DamagedCheckpoint if these are damaged, CheckpointError if they cannot be read or written, there is no
    average or a weight is too large for the dtype, ConfigError if model_dir or out_dir cannot be used.  If it fails
    or is interrupted after creating out_dir, it deletes it; a killed process leaves an out_dir without config.json,
    which nothing loads.
    """
    checkpoint_dir = _part_of_trainer(checkpoint_dir)
    checkpoint, kind = _opened(checkpoint_dir, is_average=is_average)
    named = _dtype_of(model_dir / "config.json")
    dtype = dtype or named
    with ExitStack() as stack:
        if checkpoint.adapter is not None:
            source = stack.enter_context(TensorSource.of_model(model_dir))
            specs, tensors = _with_adapters(checkpoint, kind, model_dir, source, dtype)
        else:
            untrained = _untrained(model_dir, [spec.name for spec in checkpoint.specs])
            wide = _float32_in(model_dir)
            specs = [
                TensorSpec(spec.name, "float32" if spec.name in wide else dtype, spec.shape)
                for spec in checkpoint.specs
            ]
            trained = _rounded(checkpoint.verified_tensors(kind), tuple(specs))
            specs += [TensorSpec(name, _word(tensor.dtype), tuple(tensor.shape)) for name, tensor in untrained.items()]
            tensors = chain(trained, untrained.values())
        stack.enter_context(_new_directory(out_dir))
        write_hf_weights(out_dir, specs, tensors, shard_bytes=shard_bytes)
        _copy_the_rest(model_dir, out_dir, None if dtype == named else dtype)
    return dtype


def _part_of_trainer(checkpoint_dir: Path) -> Path:
    return checkpoint_dir / "trainer" if (checkpoint_dir / "trainer").is_dir() else checkpoint_dir


def _opened(checkpoint_dir: Path, *, is_average: bool) -> tuple[TrainerCheckpoint, str]:
    """The checkpoint, and the kind of tensors to export.  Raises CheckpointError if it has none of them."""
    checkpoint = open_checkpoint(checkpoint_dir)
    kind = AVERAGE if is_average else "weights"
    if kind not in checkpoint.kinds:
        raise CheckpointError(f"{checkpoint_dir}: has no weight average: trainer.ema_decay was off")
    return checkpoint, kind


@contextmanager
def _new_directory(out_dir: Path) -> Iterator[None]:
    """Make a directory, and delete it if the block raises.  Raises ConfigError if it exists, CheckpointError."""
    try:
        out_dir.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(f"{out_dir}: exists already; nothing is overwritten") from error
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, out_dir, ignore_errors=True)
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{out_dir}: cannot be written: {error}") from error
        undo.pop_all()


def _rounded(tensors: Iterator[Tensor], specs: Iterable[TensorSpec]) -> Iterator[Tensor]:
    """Round to the dtypes of specs.  Raises CheckpointError if a finite number becomes inf (float16 ends at 65504)."""
    for tensor, spec in zip(tensors, specs, strict=True):
        rounded = tensor.to(DTYPES[spec.dtype])
        if tensor.numel() and rounded.dtype != tensor.dtype:
            extremes = torch.stack(tensor.aminmax())
            lost = extremes[extremes.isfinite() & extremes.to(rounded.dtype).isinf()]
            if len(lost):
                raise CheckpointError(
                    f"{spec.name} holds {float(lost.abs().max()):.6g}, and {spec.dtype} ends at "
                    f"{torch.finfo(rounded.dtype).max:g}: it would be inf; "
                    "export with --dtype bfloat16 or --dtype float32"
                )
        yield rounded


def _dtype_of(config_file: Path) -> str:
    try:
        config = json.loads(config_file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config_file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{config_file}: holds no JSON object")
    config = language_model(config)
    dtype = next((config[key] for key in DTYPE_KEYS if config.get(key)), "float32")
    if dtype not in DTYPES:
        raise ConfigError(f"{config_file}: dtype={dtype!r}; legal: {', '.join(DTYPES)}")
    return str(dtype)


def _untrained(model_dir: Path, trained: Sequence[str]) -> dict[str, Tensor]:
    """Other tensors on disk of modules with trained ones: correction biases of routers (GLM 4.5), scales of layers.

    Also what stands beside a language model inside a larger one: what it sees by.  Without tied heads and modules
    without trained tensors, such as layers for multi-token prediction.
    Raises ConfigError.
    """
    if not any(model_dir.glob("*.safetensors")):  # deleted since
        return {}
    modules = {name[:end] for name in trained for end, sign in enumerate(name) if sign == "."}
    inner = f".{INNER}."
    around = {f"{name.partition(inner)[0]}." for name in trained if inner in name}
    with TensorSource.of_model(model_dir) as source:
        others = source.names - set(trained)
        beside = {name for name in others if inner not in name and name.startswith(tuple(around))}
        names = sorted(beside | {name for name in others if name.rpartition(".")[0] in modules})
        return {name: source.read(name).clone() for name in names if _stored_dtype(source, name) in DTYPES}


def _stored_dtype(source: TensorSource, name: str) -> str:
    return _word(source.read(name, index=(slice(0, 1),)).dtype)


def _float32_in(model_dir: Path) -> set[str]:
    """Tensors that the model has in float32, where others are narrower: they stay so (decays of Qwen3.5)."""
    if not any(model_dir.glob("*.safetensors")):
        return set()
    stored = {name: each.dtype for file in weight_files(model_dir) for name, each in read_header(file).items()}
    return {name for name, dtype in stored.items() if dtype == "F32"} if len({*stored.values()}) > 1 else set()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_hf_weights(
    out_dir: Path, specs: Sequence[TensorSpec], tensors: Iterator[Tensor], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors, which arrive in the order of specs, as the weights of an HF checkpoint.

    Raises CheckpointError, OSError.
    """
    shards = plan_shards(specs, shard_bytes)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        write_safetensors(out_dir / name, shard, tensors)
        index.update({spec.name: name for spec in shard})
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(map(size_in_bytes, specs))}, "weight_map": index}
        write_atomically(out_dir / INDEX_FILE, json.dumps(content, indent=2).encode())


def _copy_the_rest(model_dir: Path, out_dir: Path, dtype: str | None) -> None:
    """Copy all files but weights, config.json last; dtype: to be set in config.json, if it differs.

    The only directory copied is the tokenizer's: others have weights in other formats, or a cache.
    """
    if (templates := model_dir / CHAT_TEMPLATES).is_dir():
        (out_dir / CHAT_TEMPLATES).mkdir()
        for path in templates.glob("*.jinja"):
            shutil.copyfile(path, out_dir / CHAT_TEMPLATES / path.name)
    files = [path for path in model_dir.iterdir() if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES)]
    for path in sorted(files, key=lambda path: path.name == "config.json"):
        if path.name == CONFIG_FILE:
            _copy_config(path, out_dir / path.name, dtype)
        else:
            shutil.copyfile(path, out_dir / path.name)


def _copy_config(file: Path, to: Path, dtype: str | None) -> None:
    """Copy a config.json; dtype: to be set, if it differs.  What is trained is written unpacked (MXFP4)."""
    config = json.loads(file.read_bytes())
    is_packed = config.pop("quantization_config", None) is not None
    if dtype is not None:
        # Under the existing spelling: readers of the old one need not know the other.
        config |= dict.fromkeys([key for key in DTYPE_KEYS if key in config] or DTYPE_KEYS[:1], dtype)
        if TEXT in config:
            config[TEXT] |= {key: dtype for key in DTYPE_KEYS if key in config[TEXT]}
    if is_packed or dtype is not None:
        to.write_text(json.dumps(config, indent=2), encoding="utf-8")
    else:
        shutil.copyfile(file, to)


# ------------------------------------------------------------------------------------------------------------- adapters
#
# A checkpoint of LoRA adapters, exported as a PEFT adapter or added to the base weights.


def export_adapter(
    checkpoint_dir: Path, model_dir: Path, out_dir: Path, *, is_average: bool = False, dtype: str | None = None
) -> str:
    """Write a PEFT adapter directory into out_dir, which must not exist; return the dtype of its tensors.

    As export_hf; dtype: None: float32, as trained.  Also raises CheckpointError if the checkpoint has no adapters.
    """
    checkpoint_dir = _part_of_trainer(checkpoint_dir)
    checkpoint, kind = _opened(checkpoint_dir, is_average=is_average)
    if checkpoint.adapter is None:
        raise CheckpointError(
            f"{checkpoint_dir}: holds whole weights, not adapters; legal: an export without --adapter"
        )
    _refuse_other_base(checkpoint, model_dir)
    settings, layers = settings_of(checkpoint.adapter), _layers_in(checkpoint)
    if settings.rslora and any(projection_of(each).endswith(".up_proj") for each in layers):
        raise CheckpointError(
            f"{checkpoint_dir}: adapters of experts with lora.rslora=true: PEFT (0.21) joins those of gate and up into "
            "one of twice the rank, and would scale it by √2 too much; legal: an export without --adapter"
        )
    with TensorSource.of_model(model_dir) as source:
        matrices = matrices_of({name: source.shape(name) for name in source.names})
    specs = [TensorSpec(PEFT_PREFIX + spec.name, dtype or "float32", spec.shape) for spec in checkpoint.specs]
    with _new_directory(out_dir):
        tensors = _rounded(checkpoint.verified_tensors(kind), specs)
        write_safetensors(out_dir / PEFT_WEIGHTS, specs, tensors)
        content = peft_config(settings, layers, matrices, model_dir)
        write_atomically(out_dir / PEFT_CONFIG, json.dumps(content, indent=2).encode())
    return dtype or "float32"


def _with_adapters(
    checkpoint: TrainerCheckpoint, kind: str, model_dir: Path, source: TensorSource, dtype: str
) -> tuple[list[TensorSpec], Iterator[Tensor]]:
    """All tensors of the base; adapted ones as W + scale · B A, added in float32 and rounded once.

    W is the trainer's: with lora.quantization, after quantisation to 4 bits.
    Tensors that are float32 on disk beside narrower adapted weights stay so: correction biases of routers.
    """
    assert checkpoint.adapter is not None
    _refuse_other_base(checkpoint, model_dir)
    layers, settings = _layers_in(checkpoint), settings_of(checkpoint.adapter)
    weights = {f"{module}.weight": module for module in layers}
    if absent := sorted(weights.keys() - source.names):
        raise CheckpointError(
            f"{checkpoint.directory}: {absent[0]} is no tensor of {model_dir}: this head is the embedding, which has "
            "no adapter; export with --adapter"
        )
    stored = {name: _stored_dtype(source, name) for name in source.names}
    usual = stored[next(iter(weights))]
    names = sorted(name for name in stored if stored[name] in DTYPES)
    specs = [TensorSpec(name, dtype if stored[name] == usual else stored[name], source.shape(name)) for name in names]

    def tensors() -> Iterator[Tensor]:
        adapters = dict(zip((spec.name for spec in checkpoint.specs), checkpoint.verified_tensors(kind), strict=True))
        for name in names:
            weight = source.read(name)
            is_packed = settings.quantization != "off" and is_quantised(name.removesuffix(".weight"))
            if is_packed and weight.dim() == 2:  # not a bias, nor the weight of a norm
                weight = unpacked(*in_four_bits(weight))
            if (module := weights.get(name)) is not None:
                weight = merged(weight.float(), adapters[module + A], adapters[module + B], settings.scale)
            yield weight

    return specs, _rounded(tensors(), specs)


def _layers_in(checkpoint: TrainerCheckpoint) -> dict[str, tuple[int, int]]:
    shapes = {spec.name: spec.shape for spec in checkpoint.specs}
    modules = [name.removesuffix(A) for name in shapes if name.endswith(A)]
    return {module: (shapes[module + B][0], shapes[module + A][1]) for module in modules}


def _refuse_other_base(checkpoint: TrainerCheckpoint, model_dir: Path) -> None:
    assert checkpoint.adapter is not None
    was, found = checkpoint.adapter["base"], base_digest(model_dir)
    if "" not in (was, found) and was != found:
        raise CheckpointError(
            f"{model_dir}: its weights have the digest {found}, and the adapters of {checkpoint.directory} belong to "
            f"weights of the digest {was}; legal: the model that they were trained beside"
        )


# ------------------------------------------------------------------------------------------------------- held reference
#
# The reference model of a run that renews it: a separate HF checkpoint next to the trainer's part of a checkpoint.
#
# Input: a backend that holds a reference.  Output: a directory with its weights in the dtype of the forward pass, and
# config.json.  After a resume, such a backend is opened on that directory instead of model.path, and keeps the loaded
# weights as its reference: the bits are the same, whatever layout wrote them.

REFERENCE_DIRECTORY = "reference"  # beside the trainer's part of a checkpoint directory


def save_reference(backend: TrainerBackend, model_dir: Path, directory: Path) -> Future[dict[str, int]]:
    """Write the reference into `directory`; model_dir: where the model's config.json is.  A collective; training waits
    for the disk.

    The future is done: {file name: bytes} on rank 0 and {} elsewhere, or rank 0's CheckpointError.
    """
    done: Future[dict[str, int]] = Future()
    weights = backend.weights(of_reference=True)
    try:
        files = _write(backend, (tensor for _, tensor in weights), model_dir, directory) if backend.is_rank_zero else {}
    except CheckpointError as error:
        done.set_exception(error)
    else:
        done.set_result(files)
    for _ in weights:  # after an error the other ranks still send, and the end restores the policy
        pass
    return done


def _write(backend: TrainerBackend, tensors: Iterator[Tensor], model_dir: Path, directory: Path) -> dict[str, int]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_hf_weights(directory, backend.tensor_specs(), tensors)
        _copy_config(model_dir / CONFIG_FILE, directory / CONFIG_FILE, None)
    except OSError as error:
        raise CheckpointError(f"{directory}: the reference cannot be written: {error}") from error
    return {f"{directory.name}/{path.name}": path.stat().st_size for path in sorted(directory.iterdir())}
