"""LoRA adapters without torch: the layers that have one, their tensors, their PEFT directory, and their base.

Input: the table [lora] and the matrices of a model by the names of their modules, "model.layers.0.self_attn.q_proj".
Output: the layers that are adapted, names and shapes of A and B, the settings of a PEFT adapter directory, and a digest
of the frozen weights.  Used by trainers, exports and checks on a login node.

An adapted layer computes W x + scale · B A x (Hu et al. 2021, arXiv:2106.09685), A [rank, in], B [out, rank].
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.base.near_names import near_hint
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.models.shape import EMBEDDING, HEAD, INNER, num_experts
from rlhpc.models.weights import NotSafetensors, StoredTensor, is_mxfp4, object_in, read_header, weight_files
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import TensorSpec

# --------------------------------------------------------------------------------------------------------------- layers

ATTENTION, MLP, EXPERTS, OUTPUT = "attention", "mlp", "experts", "output"
ROLES = (ATTENTION, MLP, EXPERTS, OUTPUT)
HEAD_MODULE = HEAD.removesuffix(".weight")
A, B = ".lora_A.weight", ".lora_B.weight"  # suffixes to the name of the module
Matrices = Mapping[str, tuple[int, int]]  # name of the module → (out, in)

_ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of names of layers that choose experts
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<projection>(gate|up|down)_proj)")  # a matrix of one
_EMBEDDING = EMBEDDING.rpartition("model.")[2]
_NUMBER = re.compile(r"\blayers\.(\d+)\.")  # in every name but the head's


def chosen_layers(settings: LoraConfig, matrices: Matrices) -> dict[str, tuple[int, int]]:
    """The layers that lora.targets names, in the model's order.

    Raises ConfigError naming lora.targets for a target that is no layer of the model, or one expert among others.
    """
    able = {name: shape for name, shape in matrices.items() if _role(name)}
    for target in settings.targets:
        if not any(_is_meant(name, target) for name in able):
            legal = [*(role for role in ROLES if any(_role(name) == role for name in able)), *_last_parts(able)]
            raise ConfigError(
                f"lora.targets={list(settings.targets)}: no layer of the model is {target!r}"
                f"{near_hint(target, legal)}; legal: {', '.join(legal)}"
            )
    chosen = {name: shape for name, shape in able.items() if any(_is_meant(name, each) for each in settings.targets)}
    together = {of for name in chosen if (of := projection_of(name))}  # experts of a layer are one parameter
    for name in able if together else ():
        if name not in chosen and (of := projection_of(name)) in together:
            raise ConfigError(
                f"lora.targets={list(settings.targets)}: {name} has no adapter, and others of its layer have; "
                f"legal: {EXPERTS!r}, or {of.rpartition('.')[2]!r}"
            )
    return chosen


def projection_of(module: str) -> str:
    """Common name of a layer's expert matrices, "model.layers.0.mlp.experts.up_proj"; "" if not an expert's."""
    match = _EXPERT.fullmatch(module)
    return f"{match['experts']}.{match['projection']}" if match else ""


def matrices_of(tensors: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Matrices among a checkpoint's tensors; a tied head is listed under its own name, too."""
    shapes = {name: tuple(shape) for name, shape in tensors.items()}
    embedding = next((name for name in shapes if f".{INNER}." in name and name.endswith(_EMBEDDING)), EMBEDDING)
    if embedding != EMBEDDING:  # what stands beside the language model is not trained
        shapes = {name: shape for name, shape in shapes.items() if f".{INNER}." in name or name == HEAD}
    shapes.setdefault(HEAD, shapes.get(embedding, ()))
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and name != embedding
    }


def stored_matrices(model: Path) -> dict[str, tuple[int, int]]:
    """Read the matrices of a checkpoint directory from its files' headers.  Raises NotSafetensors, OSError."""
    files = weight_files(model)
    return matrices_of({name: each.shape for file in files for name, each in read_header(file).items()})


def _role(module: str) -> str:
    """Role of a layer in lora.targets; "" for a layer that cannot have an adapter."""
    *path, last = module.split(".")
    if module == HEAD_MODULE:
        return OUTPUT
    if last in _ROUTERS:
        return ""
    if ".experts." in module:
        return EXPERTS if projection_of(module) else ""
    if any("attn" in part or "attention" in part for part in path):
        return ATTENTION
    return MLP if any("mlp" in part or "feed_forward" in part or "expert" in part for part in path) else ""


def is_quantised(module: str) -> bool:
    """Whether lora.quantization applies to a layer."""
    return _role(module) in (ATTENTION, MLP)


def _is_meant(module: str, target: str) -> bool:
    """Whether a target names a module: by role, or like PEFT's target_modules by its whole name or last parts."""
    return _role(module) == target if target in ROLES else module == target or module.endswith(f".{target}")


def _last_parts(modules: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def refuse_merged_tied_head(config: Config, layers: Collection[str], *, is_tied: bool) -> None:
    """Raise ConfigError if versions would need a head of their own and the model ties it to its embedding."""
    if is_tied and HEAD_MODULE in layers and config.weights.form == "merged":
        raise ConfigError(
            f"weights.form='merged' with lora.targets={list(config.lora.targets)}: the head of this model is its "
            "embedding, which has no adapter; legal: weights.form='adapter', or other lora.targets"
        )


def refuse_packed_base(config: Config, model: Mapping[str, Any]) -> None:
    """Raise ConfigError for adapters of a checkpoint in MXFP4; model: its config.json."""
    if config.lora.rank and is_mxfp4(model):
        raise ConfigError(
            f"lora.rank={config.lora.rank} with model.path={config.model.path}, whose experts are in MXFP4: an export "
            "would add adapters to packed numbers; legal: this model in bfloat16, or lora.rank=0"
        )


ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # ranks of vLLM's slots; adapters of other ranks are padded
_MOST_TOKENS = 258048  # largest vocabulary for which vLLM supports an adapter on the head


def room_for(rank: int) -> int:
    """Rank of the slot in which vLLM keeps adapters of `rank`; the largest one if `rank` is above it."""
    return next((each for each in ENGINE_RANKS if each >= rank), ENGINE_RANKS[-1])


def sends_adapters(config: Config) -> bool:
    """Whether versions are adapters instead of whole weights."""
    return config.lora.rank > 0 and config.weights.form == "adapter"


def refuse_unserved_adapters(
    config: Config, layers: Collection[str], model: Mapping[str, Any], *, device: str = ""
) -> None:
    """Raise ConfigError, with a remedy, if versions are adapters that the engine cannot hold (vLLM 0.26 to 0.32).

    model: its config.json.  device: "cpu" or "cuda", of the engine; "": not known.
    """
    if not sends_adapters(config) or not config.generation.has_model:
        return
    if config.generation.engine == "transformers":
        if together := sorted(of for name in layers if (of := projection_of(name))):
            raise ConfigError(
                f"weights.form='adapter' with generation.engine='transformers': transformers has no layer of its own "
                f"for {together[0]}, whose experts are one tensor; legal: weights.form='merged'"
            )
        return
    vocabulary, dtype, targets = model.get("vocab_size", 0), config.model.dtype, list(config.lora.targets)
    if config.lora.rank > ENGINE_RANKS[-1]:
        why = f"lora.rank={config.lora.rank}: vLLM holds adapters up to rank {ENGINE_RANKS[-1]}; legal: up to that"
    elif HEAD_MODULE in layers and vocabulary > _MOST_TOKENS:
        why = (
            f"lora.targets={targets}: vLLM gives the head of a model no adapter that has more than {_MOST_TOKENS} "
            f"tokens, and this one has {vocabulary}; legal: other lora.targets"
        )
    elif absorbed := sorted(name for name in layers if name.endswith(".kv_b_proj")):
        why = (
            f"lora.targets={targets}: vLLM multiplies {absorbed[0]} into other matrices of latent attention when it "
            "starts, and would ignore an adapter of it; legal: other lora.targets"
        )
    elif unserved := _unserved_hybrid(targets, layers, device):
        why = unserved
    elif device == "cpu" and num_experts(model):
        why = "weights.form='adapter': with adapters vLLM has no kernel for a mixture of experts on a CPU; legal: a GPU"
    elif device == "cuda" and dtype == "float32":
        why = f"model.dtype={dtype!r}: on a GPU vLLM holds adapters of 16 bits only; legal: 'bfloat16'"
    else:
        return
    raise ConfigError(f"{why}, or weights.form='merged'")


def _unserved_hybrid(targets: Sequence[str], layers: Collection[str], device: str) -> str:
    """Reason why vLLM holds no adapters of these layers of a model with Gated DeltaNets; "" if it does."""
    if mixed := sorted(name for name in layers if name.endswith((".in_proj_qkvz", ".in_proj_ba"))):
        return (
            f"weights.form='adapter' with lora.targets={list(targets)}: the rows of {mixed[0]} are ordered by key "
            "heads, and vLLM cuts adapters of it otherwise; legal: other lora.targets"
        )
    inner = sorted(name for name in layers if f".{INNER}." in name)
    if device == "cuda" and inner:
        return (
            f"weights.form='adapter': {inner[0]} is part of a model that also sees, whose adapters were tried in vLLM "
            "on a CPU only; legal: a checkpoint of the language model alone"
        )
    return ""


def refuse_idle_stages(config: Config, layers: Collection[str], num_layers: int) -> None:
    """Raise ConfigError if a stage of Megatron's pipeline, or a chunk of its layers, would have nothing to train."""
    trainer = config.trainer
    num_blocks = trainer.pipeline_parallel * trainer.chunks_per_stage
    per_block = num_layers // num_blocks
    numbers = [_NUMBER.search(name) for name in layers]
    idle = set(range(num_blocks)) - {int(number[1]) // per_block if number else num_blocks - 1 for number in numbers}
    if idle:
        first = min(idle) * per_block
        raise ConfigError(
            f"trainer.pipeline_parallel={trainer.pipeline_parallel} with lora.targets={list(config.lora.targets)}: the "
            f"stage of layers {first} to {first + per_block - 1} would have nothing to train; legal: "
            "pipeline_parallel=1, or lora.targets in every stage, such as 'attention'"
        )


def adapter_specs(layers: Matrices, rank: int) -> tuple[TensorSpec, ...]:
    """A and B of each layer, in the order of versions, checkpoints and exports."""
    return tuple(
        spec
        for name, (rows, columns) in layers.items()
        for spec in (
            TensorSpec(name + A, "float32", (rank, columns)),
            TensorSpec(name + B, "float32", (rows, rank)),
        )
    )


def record_of(settings: LoraConfig, base: str) -> dict[str, Any]:
    """Adapter settings for a checkpoint, by key of [lora], and the digest of the base under "base"."""
    return {
        "rank": settings.rank,
        "alpha": settings.alpha,
        "rslora": settings.rslora,
        "targets": list(settings.targets),
        "quantization": settings.quantization,
        "base": base,
    }


def settings_of(record: Mapping[str, Any]) -> LoraConfig:
    """Settings with which the adapters of a checkpoint were trained: the inverse of record_of."""
    return LoraConfig.model_validate({key: record[key] for key in record if key != "base"})


# --------------------------------------------------------------------------------------------------------- PEFT's files

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # before every name in its files
_MATRIX = re.compile(r"\.lora_[AB]\.weight$")

# Settings of a PEFT adapter that change the function of its tensors, with their neutral values.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "layer_replication": ([], None),
}


def peft_config(settings: LoraConfig, layers: Matrices, matrices: Matrices, base: Path) -> dict[str, Any]:
    """Content of adapter_config.json for these layers.  matrices: the model's, all; base: its directory."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": settings.rank,
        "lora_alpha": settings.alpha if settings.alpha % 1 else int(settings.alpha),
        "use_rslora": settings.rslora,
        "lora_dropout": 0.0,
        "target_modules": sorted(_short_names(layers, matrices)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _short_names(layers: Collection[str], matrices: Matrices) -> list[str]:
    """Last parts of names; whole names if the last parts would match other matrices, too."""
    names = _last_parts(layers)
    return names if {name for name in matrices if name.rpartition(".")[2] in names} == set(layers) else [*layers]


def settings_of_peft(directory: Path, model: Path) -> LoraConfig:
    """Read the settings of a PEFT adapter directory for this model; lora.initial is left out.

    Raises ConfigError: it is damaged, or not of this model's layers; OSError.
    """
    found, file = object_in(directory / PEFT_CONFIG), directory / PEFT_WEIGHTS
    try:
        header, matrices = read_header(file), stored_matrices(model)
    except (FileNotFoundError, NotSafetensors) as error:
        raise ConfigError(f"{directory}: {error}; copy it again") from error
    size, end = file.stat().st_size, max((each.end for each in header.values()), default=0)
    if size != end:
        raise ConfigError(f"{file}: {size:,} bytes in place of {end:,}; copy it again")
    layers = dict.fromkeys(_MATRIX.sub("", name.removeprefix(PEFT_PREFIX)) for name in header)
    if strange := [name for name in layers if name not in matrices]:
        raise ConfigError(f"{directory}: has an adapter of {strange[0]}, and {model} has no such matrix")
    targets = _short_names(layers, {name: shape for name, shape in matrices.items() if _role(name)})
    try:
        lora = LoraConfig(
            rank=found["r"],
            alpha=float(found["lora_alpha"]),
            rslora=bool(found.get("use_rslora")),
            targets=tuple(targets),
            initial=directory,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{directory / PEFT_CONFIG}: not that of an adapter: {error}") from error
    refuse_other_adapter(lora, chosen_layers(lora, matrices))
    return lora.model_copy(update={"initial": None})


def refuse_other_adapter(settings: LoraConfig, layers: Matrices) -> float:
    """Raise ConfigError if the PEFT adapter at lora.initial does not have these settings and layers.

    Returns its dropout, which is not used.
    """
    assert settings.initial is not None
    directory = settings.initial
    for name in (PEFT_CONFIG, PEFT_WEIGHTS):
        if not (directory / name).is_file():
            raise ConfigError(
                f"lora.initial={str(directory)!r}: there is no {name} in it; legal: a directory that PEFT saved"
            )
    found = object_in(directory / PEFT_CONFIG)
    for key, plain in _PLAIN.items():
        if key in found and found[key] not in plain:
            raise ConfigError(f"{directory / PEFT_CONFIG}: {key}={found[key]!r}; legal: {plain[0]!r}")
    own = {"rank": settings.rank, "alpha": settings.alpha, "rslora": settings.rslora}
    there = {"rank": found.get("r"), "alpha": found.get("lora_alpha"), "rslora": bool(found.get("use_rslora"))}
    for key, value in own.items():
        if there[key] != value:
            raise ConfigError(
                f"lora.{key}={_spelt(value)}: the adapter at lora.initial={str(directory)!r} has {_spelt(there[key])}; "
                f"legal: {_spelt(there[key])}"
            )
    _refuse_other_tensors(directory / PEFT_WEIGHTS, adapter_specs(layers, settings.rank))
    return float(found.get("lora_dropout") or 0.0)


def _refuse_other_tensors(file: Path, specs: Sequence[TensorSpec]) -> None:
    try:
        header = read_header(file)
    except NotSafetensors as error:
        raise ConfigError(f"{file}: {error}; copy it again") from error
    found = {name.removeprefix(PEFT_PREFIX): tuple(tensor.shape) for name, tensor in header.items()}
    wanted = {spec.name: spec.shape for spec in specs}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                f"{file}: {name} is {found.get(name, 'absent')} there and {wanted.get(name, 'absent')} by [lora]; "
                "legal: lora.targets that name the layers of the adapter at lora.initial"
            )


def _spelt(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------------- digest of a base

_SAMPLE_BYTES = 4096


def base_digest(directory: Path) -> str:
    """Digest of weights, 16 hexadecimal digits, independent of their distribution over files; "" without safetensors.

    Covers names, types and shapes, and _SAMPLE_BYTES at beginning, middle and end of every tensor: training changes
    all of them, and 140 GB take seconds.  Raises ConfigError, OSError.
    """
    stored = {name: (tensor, file) for file in weight_files(directory) for name, tensor in read_header(file).items()}
    digest = hashlib.sha256()
    for name in sorted(stored):
        tensor, file = stored[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        with file.open("rb") as content:
            for start, length in _samples(tensor):
                content.seek(start)
                digest.update(content.read(length))
    return digest.hexdigest()[:16] if stored else ""


def base_name(settings: LoraConfig, digest: str) -> str:
    """Name of an adapter version's base: its digest, and its quantisation if any; "": not known."""
    return f"{digest}-{settings.quantization}" if digest and settings.quantization != "off" else digest


def _samples(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield offset and length in the file of a tensor's samples; the whole of a small tensor."""
    size = tensor.end - tensor.begin
    if size <= 3 * _SAMPLE_BYTES:
        yield tensor.begin, size
        return
    for start in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
        yield tensor.begin + start, _SAMPLE_BYTES
