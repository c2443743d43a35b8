"""A transformers model that samples: its files, the places of a version's tensors in it, adapters, and routes.

Input: a checkpoint directory; versions by names on disk.  Output: a SampledModel, whose parameters a version overwrites
in place.  Offline.

Guarantees.  What is computed for a token is what the trainer computes: dtype of the model, logits in float32.  A model
whose attention does not honour transformers' attention interface, or with layers of another kind that remember tokens,
is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.utils.logging import disable_progress_bar

from rlhpc.config.rules import Config
from rlhpc.generation.adapter_tensors import POLICY, fitting_pairs, pairs_of
from rlhpc.generation.cached_attention import KeyPadding, StepPlan
from rlhpc.models.adapter import HEAD_MODULE, is_quantised
from rlhpc.models.layer_forms import LINEAR, is_delta_net
from rlhpc.models.shape import INNER, LAYER_TYPES
from rlhpc.models.weights import is_mxfp4, object_in, read_header, weight_files
from rlhpc.protocol.errors import EngineError, GroupFailed
from rlhpc.protocol.types import TensorSpec, WeightManifest
from rlhpc.weights.four_bits import in_four_bits, unpacked
from rlhpc.weights.hf_names import name_as_stored, name_of, named_on_disk
from rlhpc.weights.memory import NamedTensors

TRIAL_TOKENS = 3


class SampledModel:
    """A causal language model, and the part of it that a version overwrites."""

    def __init__(self, module: Any, stored: Collection[str]) -> None:
        """module: on its device; stored: names of the tensors of its checkpoint."""
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
            is_packed = is_mxfp4(object_in(path / "config.json"))
            unpacks = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed else {}
            module, loaded = AutoModelForCausalLM.from_pretrained(
                path, config=settings, dtype=dtype, attn_implementation=attention, local_files_only=True,
                output_loading_info=True, **unpacks,
            )  # fmt: skip
            headers = (name for file in weight_files(path) for name in read_header(file))
            stored = frozenset(name.removesuffix("_blocks") for name in headers)  # as they are called unpacked
        except (OSError, ValueError, RuntimeError) as error:  # the last for tensors of other shapes
            raise EngineError(f"model.path={path}: transformers cannot load this model: {error}") from error
        if missing := sorted(loaded["missing_keys"]):
            raise EngineError(f"model.path={path}: the checkpoint has no tensor {missing[0]}; legal: all of the model")
        _refuse_states(module, path)
        name_as_stored(module, stored, INNER)
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

    def refuse_deaf(self, layers: Sequence[int], path: Path) -> None:
        """Raise EngineError unless each of these layers asks our attention once, for a row of a few tokens."""
        row, heard = torch.arange(TRIAL_TOKENS, device=self.module.device)[None], list[int]()
        try:
            with torch.no_grad():
                self.module(input_ids=row, position_ids=row, use_cache=False, step=_Listener({}, {}, heard))
        except TypeError as error:  # some are called without the plan of a step
            raise EngineError(f"model.path={path}: {type(self.module).__name__} has no cache here: {error}") from error
        if sorted(heard) != list(layers):
            raise EngineError(
                f"model.path={path}: {type(self.module).__name__} has an attention of its own, without a cache here"
            )

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


@dataclass(frozen=True, slots=True)
class _Listener(StepPlan):
    """The plan of a row, which notes what layers ask for it."""

    heard: list[int]

    def of_layer(self, module: Any, *of_call: Any) -> list[KeyPadding]:
        self.heard.append(module.layer_idx)
        return StepPlan.of_layer(self, module, *of_call)


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
    """Raise EngineError for layers of a kind that is not known here."""
    if kinds := set(getattr(settings, "layer_types", None) or ()) - LAYER_TYPES:
        raise EngineError(
            f"generation.engine='transformers' with model.path={path}: layers of type {', '.join(sorted(kinds))} "
            "remember tokens in a way of their own; legal: generation.engine='vllm'"
        )


def _refuse_states(module: Any, path: Path) -> None:
    """Raise EngineError for layers of linear attention that are no Gated DeltaNets."""
    kinds = list(getattr(module.config.get_text_config(), "layer_types", None) or ())
    if kinds.count(LINEAR) != sum(map(is_delta_net, module.modules())):
        raise EngineError(
            f"generation.engine='transformers' with model.path={path}: the linear attention of {type(module).__name__} "
            "is no Gated DeltaNet; legal: generation.engine='vllm'"
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
            if self.num_adapters > 1 and is_delta_net(self.module.get_submodule(name.rpartition(".")[0])):
                # Such layers see the tokens of a step in another order (recurrent_states.py).
                raise GroupFailed(f"{name} is held for one adapter at once; legal: one, or weights.form='merged'")
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
            output[..., index, :] += self._product(rows.number, name, inputs[0][..., index, :], output)
        return output

    def _product(self, number: int, name: str, hidden: Tensor, output: Tensor) -> Tensor:
        a, b = (each.to(output.dtype) for each in self._pairs[number, name])
        return functional.linear(functional.linear(hidden.to(output.dtype), a), b)


# --------------------------------------------------------------------------------------------------------------- routes
#
# The experts that a model's mixtures choose, for every token of the requests that it samples.
#
# Input: what each layer of experts is given in a step, by a hook.  Output: ids of a request's tokens, when it has
# ended.  A request whose tokens are computed again, perhaps under new weights, keeps the ids of the first time: every
# token has those with which the token after it was sampled.  No request reads what another computed (the core sees to
# it).  Guarantee: the ids of a request that has ended are kept until they are taken, or as many others have ended since
# as the engine runs at once, twice.


Ids = NDArray[np.int16]  # [tokens, mixtures, k]


class HookedRoutes:
    """Listens to every mixture of a model."""

    def __init__(self, module: nn.Module, num_requests: int) -> None:
        """num_requests: that run at once.  Raises ValueError for a model without mixtures."""
        held = (getattr(part, "experts", None) for part in module.modules())
        mixtures = [experts for experts in held if isinstance(experts, nn.Module)]
        if not mixtures:
            raise ValueError(f"{type(module).__name__} has no mixtures of experts")
        self._step: list[Tensor | None] = [None] * len(mixtures)  # ids [T, k] of the latest step
        self._running = dict[str, list[Ids]]()
        self._ended = dict[str, list[Ids]]()  # in the order of their ends
        self._most_ended = 2 * num_requests
        for place, experts in enumerate(mixtures):
            experts.register_forward_pre_hook(partial(self._hear, place))

    def begin(self, request_id: str) -> None:
        """Listen to a request; an aborted one may have had its name."""
        self._ended.pop(request_id, None)
        self._running[request_id] = []

    def note(self, requests: Sequence[str], starts: Sequence[int], num_queries: Sequence[int]) -> None:
        """Add the latest step to its requests, in the order of their tokens; starts: place of each one's first."""
        step = torch.stack([each for each in self._step if each is not None], 1).to(torch.int16).cpu().numpy()
        first = 0
        for request_id, start, number in zip(requests, starts, num_queries, strict=True):
            parts = self._running[request_id]
            num_known = sum(map(len, parts)) - start  # of these tokens
            if num_known < number:
                parts.append(step[first + num_known : first + number])
            first += number

    def end(self, request_id: str) -> None:
        """Keep what is known of a request that goes on no more."""
        if (parts := self._running.pop(request_id, None)) is not None:
            self._ended[request_id] = parts
        while len(self._ended) > self._most_ended:
            del self._ended[next(iter(self._ended))]

    def take(self, request_id: str, num_tokens: int) -> Ids | None:
        """Return the ids of a request's first tokens, at most num_tokens, and forget them; None: they are not known."""
        self.end(request_id)
        parts = self._ended.pop(request_id, None)
        return np.concatenate(parts)[:num_tokens] if parts else None

    def _hear(self, place: int, experts: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Layers of experts are given hidden states, ids of experts [T, k], and their weights."""
        self._step[place] = inputs[1]
