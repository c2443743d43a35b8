"""A causal language model from an HF checkpoint, cut in two: the trunk that makes hidden states, and the head.

Input: a checkpoint directory.  Output: a CausalLM.  Offline.  Logits are never made: the caller hands hidden states and
the head's weight to its head.  Works for every architecture that honours transformers' attention interface and whose
logits are a product, plain or capped; one that does not is refused when it is loaded, by a trial on two short segments
beside HF's own attention.  So is a mixture of experts whose tensors have other names on disk than hf_names knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.utils.logging import disable_progress_bar

from rlhpc.base.hf_config import TEXT
from rlhpc.config.rules import Config
from rlhpc.models.routes import MixtureForm
from rlhpc.models.shape import INNER, LAYER_TYPES, WRAPPED
from rlhpc.models.weights import is_mxfp4, object_in, refuse_other_weights
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec
from rlhpc.training.logprob import VALUE_HEAD, head_logprobs, token_values
from rlhpc.training.packed_attention import SegmentPlan, packed_attention
from rlhpc.training.packed_delta_net import by_transformers_alone, pack_delta_nets
from rlhpc.training.route_replay import HfReplay
from rlhpc.weights.hf_names import name_as_stored, name_of, on_disk, views_on_disk

# --------------------------------------------------------------------------------------------------------- hf attention
#
# Packed attention for any HF model that honours the attention interface.
#
# Importing this module registers it under the name PACKED_ATTENTION; a SegmentPlan travels to every layer through the
# model's keyword arguments.  Not in packed_attention.py, since it loads transformers' code for models.

PACKED_ATTENTION = "rlhpc_packed"


def _no_mask(*_: Any, **__: Any) -> None:
    """The plan replaces the mask: HF must not build a [T, T] mask."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)


# ------------------------------------------------------------------------------------------------------------- hf names
#
# Parameters, by their names on disk (weights/hf_names.py), as items of checkpoints.


def sharded_on_disk(spec: TensorSpec, shards: Sequence[Shard]) -> ShardedTensorSpec:
    """A parameter of these flat shards, end to end, as an item with its names on disk."""
    return ShardedTensorSpec(specs=on_disk(spec), shards=tuple(shards), join=partial(_join, spec))


def _join(spec: TensorSpec, shards: Sequence[Tensor]) -> Iterator[Tensor]:
    whole = shards[0] if len(shards) == 1 else torch.cat(list(shards))
    return views_on_disk(spec.name, whole.view(spec.shape))


# ------------------------------------------------------------------------------------------------------------- hf model

TRIAL_TOLERANCE = 1e-3  # float32 round-off is 1e-6; attending across samples shows as 1e-2 to 3
TRIAL_LENGTHS = (5, 7)
TRIAL_WINDOW = 3  # tokens: width of sliding windows in the trial, less than its segments have


@dataclass(frozen=True, slots=True)
class CausalLM:
    """Trunk and head of one model; parameters by HF name in the model's own order, a tied head not listed twice.

    A layer's experts are one parameter; on_disk has their names on disk.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    head_weight: nn.Parameter  # [V, H]; also among `parameters`, under the embedding's name if tied
    trunk: Callable[..., Any]
    head: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = head_logprobs  # or token_values, for a critic
    replay: HfReplay | None = None  # None: its routers choose

    def hidden_states(self, token_ids: Tensor, position_ids: Tensor, segments: SegmentPlan) -> Tensor:
        """Final hidden states [T, H] of one packed row; token_ids and position_ids int64 [T]."""
        # use_cache: with a cache, HF treats the row as one sequence.
        output = self.trunk(
            input_ids=token_ids[None], position_ids=position_ids[None], segments=segments, use_cache=False
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and shapes in the order of `parameters`."""
        return tuple(
            TensorSpec(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
            for name, parameter in self.parameters.items()
        )


def load_trained(
    config: Config, device: torch.device, *, has_value_head: bool, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """Load the model of a run, or its critic, as load_causal_lm."""
    model = load_causal_lm(
        config.model.path,
        device=device,
        dtype=dtype,
        recompute_activations=config.trainer.recompute_activations == "full",
        max_tokens=config.generation.max_tokens,
    )
    if has_value_head:
        return with_value_head(model)
    return _with_replay(model, config.model.path) if config.algorithm.routing_replay else model


def load_causal_lm(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    recompute_activations: bool = False,
    max_tokens: int = 0,
) -> CausalLM:
    """Load a checkpoint in `dtype` on `device`.

    max_tokens: longest sequence that the engine may sample (_rotate_as_engines).
    Raises ConfigError naming model.path if it is missing, or if the architecture cannot be trained here.
    """
    disable_progress_bar()  # it prints progress bars into the log
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _rotate_as_engines(config, max_tokens)
        document = object_in(path / "config.json")
        refuse_other_weights(path, document)
        unpacks = {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4(document) else {}
        module, loaded = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=PACKED_ATTENTION, local_files_only=True,
            output_loading_info=True, **unpacks,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:  # the last for tensors of other shapes
        raise ConfigError(f"model.path={path}: transformers cannot load this model: {error}") from error
    _refuse_made_up(loaded, path)
    if TEXT in module.config.to_dict():
        raise ConfigError(
            f"model.path={path}: {type(module).__name__} also sees, and its language model is not trained alone; "
            f"legal: a language model, or model_type {' or '.join(sorted(WRAPPED))}"
        )
    layer_types = set(getattr(module.config, "layer_types", None) or {"full_attention"})
    if unknown := layer_types - LAYER_TYPES:
        raise ConfigError(
            f"model.path={path}: layers of type {sorted(unknown)} are not supported; legal: {sorted(LAYER_TYPES)}"
        )
    if hasattr(module.config, "output_router_logits"):
        module.config.output_router_logits = False  # otherwise the trunk keeps those of every layer
    model = _without_logits(module, path)
    cast_parameters(model, dtype)  # also those that transformers keeps in float32
    _refuse_unknown_experts(model, path)
    _drop_nothing(module)
    pack_delta_nets(module)
    _refuse_unfaithful(model, path)
    module.train()  # HF recomputes activations only in training mode
    if recompute_activations:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.to(device)
    return model


def cast_parameters(model: CausalLM, dtype: torch.dtype) -> None:
    """Convert parameters to the dtype of the forward pass.  Buffers keep theirs: rotary frequencies are float32."""
    for parameter in model.parameters.values():
        parameter.data = parameter.data.to(dtype)


def with_value_head(model: CausalLM) -> CausalLM:
    """Give the trunk a value head; the module's own head is removed, unless it is also the embedding."""
    head, embedding = model.head_weight, model.module.get_input_embeddings()  # type: ignore[operator]
    weight = nn.Parameter(torch.zeros(1, head.shape[1], device=head.device, dtype=head.dtype))
    is_tied = embedding.weight is head
    kept = {name: each for name, each in model.parameters.items() if is_tied or each is not head}
    return replace(model, parameters=kept | {VALUE_HEAD: weight}, head_weight=weight, head=token_values)


def _with_replay(model: CausalLM, path: Path) -> CausalLM:
    """Attach the replay of routes.  Raises ConfigError for a model whose routers cannot be told."""
    replay, device = HfReplay(model.module, MixtureForm.of_replayed(path)), model.head_weight.device
    row = torch.arange(1, 1 + TRIAL_LENGTHS[0], device=device) % model.head_weight.shape[0]
    plan = SegmentPlan.of(np.array((0, len(row)), np.int32), device)
    positions = torch.arange(len(row), device=device)
    replay.refuse_deaf(lambda: model.hidden_states(row, positions, plan), len(row), device, path)
    return replace(model, replay=replay)


def _rotate_as_engines(config: Any, max_tokens: int) -> None:
    """Fix LongRoPE's (Phi) set of frequencies as vLLM does; transformers chooses between two for each row.

    vLLM takes the set for long sequences if it may sample one (its PR 27431): so do we, for short ones too.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_tokens > rope["original_max_position_embeddings"]:
        rope["short_factor"] = rope["long_factor"]


def _refuse_made_up(loaded: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for parameters that transformers has drawn at random; loaded: its own report."""
    if missing := sorted(loaded["missing_keys"]):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(
            f"model.path={path}: the checkpoint has no tensor {missing[0]}{more}, for which transformers makes up "
            "numbers; legal: all tensors of the model"
        )


def _without_logits(module: Any, path: Path) -> CausalLM:
    stored = names_in_files(path)
    name_as_stored(module, stored, INNER)
    softcap = getattr(module.config, "final_logit_softcapping", None)
    return CausalLM(
        module=module,
        parameters={name_of(name, stored): parameter for name, parameter in module.named_parameters()},
        head_weight=module.get_output_embeddings().weight,
        trunk=module.base_model,
        head=head_logprobs if softcap is None else partial(head_logprobs, softcap=softcap),
    )


def names_in_files(path: Path) -> frozenset[str]:
    """The tensors of a checkpoint, packed ones as they are called unpacked; none where files are not safetensors."""
    names: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names |= {name.removesuffix("_blocks") for name in tensors.keys()}  # noqa: SIM118 (not a dictionary)
    return frozenset(names)


def _drop_nothing(module: nn.Module) -> None:
    """Disable dropout, in modules and in layers that pass its probability on: the sampled policy has none."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def _refuse_unknown_experts(model: CausalLM, path: Path) -> None:
    """Raise ConfigError for experts with other names on disk: weights are exported under names that all know."""
    specs = [spec for spec in model.tensor_specs() if ".experts." in spec.name]
    stored = names_in_files(path) if specs else frozenset()
    expected = {renamed.name for spec in specs for renamed in on_disk(spec)} - stored
    if stored and expected:
        raise ConfigError(
            f"model.path={path}: the experts of {type(model.module).__name__} have other names on disk than "
            f"{min(expected)}; not supported"
        )


@torch.no_grad()
def _refuse_unfaithful(model: CausalLM, path: Path) -> None:
    """Raise ConfigError unless packed log-probabilities equal those of HF's own attention and logits, per segment.

    Catches layers that do not use the attention interface, attention with a bias, windows, soft caps or sinks that are
    not passed on, heads with a bias or a scale, and noise of layers in training mode.
    """
    device, vocabulary = model.head_weight.device, model.head_weight.shape[0]
    module: Any = model.module
    module.eval()
    row = torch.arange(1, 1 + sum(TRIAL_LENGTHS), device=device) % vocabulary
    with _narrow_windows(module), _in_float32(module), by_transformers_alone(module):
        module.set_attn_implementation("eager")
        segments = row.split_with_sizes(TRIAL_LENGTHS)
        logits = [module(input_ids=segment[None], use_cache=False).logits[0] for segment in segments]
        expected = [each.float().log_softmax(-1) for each in logits]
        module.set_attn_implementation(PACKED_ATTENTION)
        borders = np.cumsum((0, *TRIAL_LENGTHS), dtype=np.int32)
        positions = torch.cat([torch.arange(length, device=device) for length in TRIAL_LENGTHS])
        module.train()  # as in training: noise of its layers would show
        try:
            hidden = model.hidden_states(row, positions, SegmentPlan.of(borders, device))
        except TypeError as error:  # its layers do not accept the plan of the row, or do not pass it on
            raise ConfigError(
                f"model.path={path}: the layers of {type(module).__name__} do not hand the borders of packed samples "
                f"on to their attention: {error}"
            ) from error
    found, *_ = model.head(hidden, model.head_weight.float(), row, temperature=1.0, chunk_tokens=len(row))
    difference = (found - torch.cat(expected).gather(1, row[:, None])[:, 0]).abs().max().item()
    if not difference <= TRIAL_TOLERANCE:
        raise ConfigError(
            f"model.path={path}: {type(model.module).__name__} gives packed log-probabilities that differ by "
            f"{difference:.2g} from its own logits; it ignores the attention interface, changes attention scores "
            "(a bias), transforms its logits (other than by a soft cap), or draws random numbers in training"
        )


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """Compute every part of a model in float32 during the block, widening each module's parameters while it runs."""
    narrow: dict[nn.Module, list[Tensor]] = {}

    def widen(part: nn.Module, *_: Any) -> None:
        narrow[part] = [each.data for each in part.parameters(recurse=False)]
        for each in part.parameters(recurse=False):
            each.data = each.data.float()

    def restore(part: nn.Module, *_: Any) -> None:
        for each, data in zip(part.parameters(recurse=False), narrow.pop(part), strict=True):
            each.data = data

    owners = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    with ExitStack() as hooks:
        for part in owners if any(each.dtype != torch.float32 for each in module.parameters()) else ():
            hooks.callback(part.register_forward_pre_hook(widen).remove)
            hooks.callback(part.register_forward_hook(restore, always_call=True).remove)
        yield


@contextmanager
def _narrow_windows(module: nn.Module) -> Iterator[None]:
    """Set every sliding window of a model to TRIAL_WINDOW tokens during the block, wherever layers read the width."""
    places: dict[int, Any] = {}
    for part in module.modules():
        places |= {id(place): place for place in (part, getattr(part, "config", None))}
    windows = {
        key: window
        for key, place in places.items()
        if isinstance(window := getattr(place, "sliding_window", None), int)
    }
    try:
        for key in windows:
            places[key].sliding_window = TRIAL_WINDOW
        yield
    finally:
        for key, window in windows.items():
            places[key].sliding_window = window
