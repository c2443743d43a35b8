"""A transformers model that samples: its files, the places of a version's tensors in it, and adapters beside it.

Input: a checkpoint directory; versions by names on disk.  Output: a SampledModel, whose parameters a version overwrites
in place.  Offline.

Guarantees.  What is computed for a token is what the trainer computes: dtype of the model, logits in float32.  A model
whose attention does not honour transformers' attention interface, or whose layers transformers' paged cache has no
room for, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlhpc.config.rules import Config
from rlhpc.generation.adapter_tensors import POLICY, fitting_pairs, pairs_of
from rlhpc.models.adapter import HEAD_MODULE, is_quantised
from rlhpc.models.weights import read_header, weight_files
from rlhpc.protocol.errors import EngineError, GroupFailed
from rlhpc.protocol.types import TensorSpec, WeightManifest
from rlhpc.weights.four_bits import in_four_bits, unpacked
from rlhpc.weights.hf_names import name_of, named_on_disk
from rlhpc.weights.memory import NamedTensors

KINDS_OF_LAYERS = frozenset({"full_attention", "sliding_attention"})  # for which transformers has a paged cache


class SampledModel:
    """A causal language model, and the part of it that a version overwrites."""

    def __init__(self, module: Any, stored: Mapping[str, Any]) -> None:
        """module: on its device; stored: the tensors of its checkpoint, by name."""
        self.module = module
        self._head = _FloatHead.of(module)
        self._places = {
            name: view
            for parameter, tensor in module.named_parameters()
            for name, view in named_on_disk(
                TensorSpec(name_of(parameter, stored), str(tensor.dtype), tuple(tensor.shape)), tensor.data
            )
        }
        self.way = "copies to the model's own tensors"

    @classmethod
    def of_run(cls, config: Config, device: torch.device, attention: str) -> SampledModel:
        """Load the model of a run; attention: a name of transformers' attention interface.

        Raises EngineError if it cannot be loaded, or cannot be sampled here.
        """
        disable_progress_bar()  # it prints progress bars into the log
        path, dtype = config.model.path, getattr(torch, config.model.dtype)
        try:
            settings = AutoConfig.from_pretrained(path, local_files_only=True)
            _refuse_layers(settings.get_text_config(), path)
            _rotate_as_trainers(settings.get_text_config(), config.generation.max_tokens)
            module, loaded = AutoModelForCausalLM.from_pretrained(
                path, config=settings, dtype=dtype, attn_implementation=attention, local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
            stored = {name: None for file in weight_files(path) for name in read_header(file)}
        except (OSError, ValueError, RuntimeError) as error:  # the last for tensors of other shapes
            raise EngineError(f"model.path={path}: transformers cannot load this model: {error}") from error
        if not module._supports_attention_backend:
            raise EngineError(
                f"model.path={path}: {type(module).__name__} has an attention of its own, without a cache here"
            )
        if missing := sorted(loaded["missing_keys"]):
            raise EngineError(f"model.path={path}: the checkpoint has no tensor {missing[0]}; legal: all of the model")
        for parameter in module.parameters():  # also those that transformers keeps in float32, as in the trainer
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(device, dtype)
        model = cls(module.to(device).eval(), stored)
        if config.lora.quantization != "off":
            model.pack_base()
        return model

    def pack_base(self) -> None:
        """Compute with the weights that a trainer with lora.quantization computes with."""
        for name, view in self._places.items():
            if view.dim() == 2 and is_quantised(name.removesuffix(".weight")):
                view.copy_(unpacked(*in_four_bits(view)))
        self.renew_head()

    def renew_head(self) -> None:
        """Follow new weights of the head."""
        if self._head is not None:
            self._head.renew()

    # ------------------------------------------------------------------------------------------- WholeLoads

    def load(self, weights: NamedTensors) -> None:
        """Load a version that is there.  Raises GroupFailed for another set of tensors, and nothing has changed."""
        given = {name: tuple(tensor.shape) for name, tensor in weights}
        for name in sorted(given.keys() ^ self._places.keys()):
            raise GroupFailed(f"{name} is {'not in this model' if name in given else 'missing'}")
        for name, shape in given.items():
            self._refuse_shape(name, shape)
        self.load_arriving(iter(weights))

    def load_arriving(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors as they arrive; see WholeLoads."""
        missing = set(self._places)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in missing:
                    raise GroupFailed(f"{name} is not in this model, or came twice")
                self._refuse_shape(name, tuple(tensor.shape))
                self._places[name].copy_(tensor, non_blocking=True)
                missing.discard(name)
        for name in sorted(missing):
            raise GroupFailed(f"{name} is missing")
        self.renew_head()

    def _refuse_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != tuple(self._places[name].shape):
            raise GroupFailed(f"{name} is {list(shape)}, and {list(self._places[name].shape)} in this model")


@dataclass(slots=True)
class _FloatHead:
    """The product of a model's head in float32, as the trainer's: of a 16-bit head it would shift log-probabilities."""

    head: Any
    weight: Tensor  # float32 [V, H], a copy
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> _FloatHead | None:
        """Let a model of 16 bits compute its logits in float32; None: it does so by itself."""
        head = module.get_output_embeddings()
        if head.weight.dtype == torch.float32:
            return None
        made = cls(head, head.weight.float(), None if getattr(head, "bias", None) is None else head.bias.float())
        head.forward = made.logits
        return made

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.float(), self.weight, self.bias)

    def renew(self) -> None:
        self.weight.copy_(self.head.weight)
        if self.bias is not None:
            self.bias.copy_(self.head.bias)


def _refuse_layers(settings: Any, path: Path) -> None:
    """Raise EngineError for layers that transformers' paged cache has no room for."""
    kinds = set(getattr(settings, "layer_types", None) or ()) - KINDS_OF_LAYERS
    if getattr(settings, "kv_lora_rank", None):
        kinds.add("multi-head latent attention")
    if kinds:
        raise EngineError(
            f"generation.engine='transformers' with model.path={path}: transformers' paged cache has no room for "
            f"layers of type {', '.join(sorted(kinds))}; legal: generation.engine='vllm'"
        )


def _rotate_as_trainers(settings: Any, max_tokens: int) -> None:
    """Fix LongRoPE's set of frequencies as the trainer and vLLM do; transformers chooses between two for each step."""
    rope = getattr(settings, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_tokens > rope["original_max_position_embeddings"]:
        rope["short_factor"] = rope["long_factor"]


# ------------------------------------------------------------------------------------------------------------- adapters


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step that are sampled with one adapter."""

    number: int
    tokens: Any  # index of the step's tokens
    logits: Any  # index of the rows that have logits


@dataclass(slots=True)
class HookedAdapters:
    """Adapters beside a model's layers, whose products are added to the layers' own: W x + B A x, scale within B."""

    module: Any
    rank: int
    modules: Sequence[str]
    base: str  # digest of the weights that the engine holds; "": not known
    num_adapters: int
    rows: Sequence[Rows] = ()  # of the step; none: every row is of the policy's adapter
    _pairs: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with zeros: the base model.  Raises GroupFailed for a module that is no plain layer."""
        for name in self.modules:
            try:
                layer = self.module.get_submodule(name)
            except AttributeError:
                layer = None
            if not isinstance(layer, nn.Linear):
                raise GroupFailed(f"transformers has no layer {name} of its own; legal: weights.form='merged'")
            (outputs, inputs), like = layer.weight.shape, layer.weight
            for number in range(POLICY, POLICY + self.num_adapters):
                self._pairs[number, name] = like.new_zeros(self.rank, inputs), like.new_zeros(outputs, self.rank)
            layer.register_forward_hook(partial(self._add, name))

    def __str__(self) -> str:
        return f"copies to the adapters of {len(self.modules)} layers"

    def refuse_unfit(self, manifest: WeightManifest) -> None:
        """See AdapterLoads."""
        name = f"version {manifest.policy_version}"
        for module, given in fitting_pairs(manifest, self.rank, self.base, set(self.modules)).items():
            shapes = [list(each.shape) for each in (given.a, given.b)]
            wanted = [list(each.shape) for each in self._pairs[POLICY, module]]
            if shapes != wanted:
                raise GroupFailed(
                    f"{name}: A and B of {module} are {shapes[0]} and {shapes[1]}; "
                    f"this worker has room for its share, {wanted[0]} and {wanted[1]}"
                )

    def load(self, weights: Iterable[tuple[str, Tensor]], manifest: WeightManifest, number: int = POLICY) -> None:
        """See AdapterLoads."""
        self.refuse_unfit(manifest)
        form, given = manifest.adapter, pairs_of(weights)
        assert form is not None
        with torch.no_grad():
            for module, pair in given.items():
                a, b = self._pairs[number, module]
                a.copy_(pair.a)
                b.copy_(pair.b.to(b.device, torch.float32) * form.scale)

    def tensors(self) -> Iterator[Tensor]:
        """See AdapterLoads."""
        for (number, _), pair in self._pairs.items():
            if number == POLICY:
                yield from pair

    def _add(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self.rows:
            return output + self._product(POLICY, name, inputs[0], output)
        for rows in self.rows:
            index = rows.logits if name == HEAD_MODULE else rows.tokens
            output[:, index] += self._product(rows.number, name, inputs[0][:, index], output)
        return output

    def _product(self, number: int, name: str, hidden: Tensor, output: Tensor) -> Tensor:
        a, b = (each.to(output.dtype) for each in self._pairs[number, name])
        return functional.linear(functional.linear(hidden.to(output.dtype), a), b)
