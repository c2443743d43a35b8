"""Plan where each tensor of a version goes in vLLM's running model, so that later versions are loaded by copies alone.

vLLM's layerwise reload costs 0.3 to 0.9 ms of Python for each tensor, whatever its size, while nobody samples, and two
copies of each.  In a model that only moves its tensors (unquantised, no experts, no layer that computes something from
its weights) their places are always the same.  They are found by running the model's own loaders on meta tensors and
recording every operation; any operation other than plain data movement means no plan.

Input: a vLLM model that holds a version, and that version.  Output: a ReloadPlan, or NoPlan with the reason.
Guarantee: looking for a plan leaves the model unchanged, also when it fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rlhpc.protocol.errors import GroupFailed
from rlhpc.weights.memory import NamedTensors

# -------------------------------------------------------------------------------------------------------- expert stacks
#
# Load the experts of a mixture by three calls a layer instead of three for each expert.
#
# Input: a vLLM model and HF-named tensors; output: the tensors of no expert, for the model's own loader.
# A call of vLLM's layerwise reload costs 0.3 to 0.9 ms whatever the size, and Qwen3-30B-A3B has 18,432 such matrices.
# Its loader of a layer of experts takes all of them in one tensor [experts, …] as well.  Where a layer does not look as
# expected (a quantised layer, experts shared out over ranks, another vLLM) the tensors pass through untouched.


EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<index>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)\.weight")
PLACES = {"gate_proj": ("w13_weight", "w1"), "up_proj": ("w13_weight", "w3"), "down_proj": ("w2_weight", "w2")}


@dataclass(slots=True)
class _Stack:
    """The experts' matrices of one kind in one layer, as they arrive."""

    whole: Tensor  # [experts, …]
    missing: set[int] = field(default_factory=set)


class ExpertStacks:
    """The layers of a model whose loader accepts whole stacks of experts."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """device: where stacks are assembled, the model's."""
        self._device = device
        self._layers = {
            name.removesuffix(".routed_experts"): module
            for name, module in model.named_modules()
            if name.removesuffix(".routed_experts").endswith(".experts") and _takes_stacks(module)
        }
        self._filling: dict[tuple[str, str], _Stack] = {}

    def taken_from(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors that are not an expert's, loading the others on the way.

        Raises GroupFailed if experts of a layer are missing at the end.
        """
        for name, tensor in weights:
            match = EXPERT.fullmatch(name)
            if match is None or match["layer"] not in self._layers:
                yield name, tensor
            else:
                self._add(match["layer"], match["matrix"], int(match["index"]), tensor)
        for (layer, matrix), stack in self._filling.items():
            raise GroupFailed(f"{layer}: {matrix} of experts {sorted(stack.missing)} are missing")

    def _add(self, layer: str, matrix: str, index: int, tensor: Tensor) -> None:
        place, shard = PLACES[matrix]
        parameter = getattr(self._layers[layer], place)
        stack = self._filling.get((layer, matrix))
        if stack is None:
            shape = (parameter.shape[0], *tensor.shape)
            whole = torch.empty(shape, dtype=tensor.dtype, device=self._device)
            stack = self._filling[layer, matrix] = _Stack(whole, set(range(shape[0])))
        stack.whole[index].copy_(tensor, non_blocking=True)
        stack.missing.discard(index)
        if not stack.missing:
            del self._filling[layer, matrix]
            parameter.weight_loader(
                param=parameter,
                loaded_weight=stack.whole,
                weight_name=f"{layer}.{place}",
                shard_id=shard,
                expert_id=0,
                return_success=True,
            )


def _takes_stacks(module: Any) -> bool:
    """True for a layer whose loader copies matrices as they are, all experts on this rank."""
    method = type(getattr(module, "quant_method", None)).__name__
    counts = [getattr(getattr(module, place, None), "shape", (0,))[0] for place in ("w13_weight", "w2_weight")]
    mapped = getattr(module, "expert_map", None) is not None or getattr(module, "_expert_map", None) is not None
    wanted = getattr(module, "global_num_experts", None) or getattr(
        getattr(module, "moe_config", None), "num_experts", None
    )
    return method == "UnquantizedFusedMoEMethod" and not mapped and counts == [wanted, wanted]


# ------------------------------------------------------------------------------------------------------- direct copies
#
# Load what gpt-oss's loader in vLLM copies into parameters itself: all experts of a layer, their biases, and sinks.
#
# During a layerwise reload a parameter has no memory until its layer is complete, and layers are completed by loaders
# that the reload has wrapped: what is copied past them is lost, without a word, and the layer keeps its old tensors.


class DirectCopies:
    """The parameters of gpt-oss that its own loader does not hand to a loader."""

    def __init__(self, model: Any) -> None:
        """Finds them; other models have none."""
        self._places: dict[str, tuple[Any, str]] = {}  # by names in a version
        if getattr(getattr(model, "config", None), "model_type", "") == "gpt_oss":
            for name, module in model.named_modules():
                layer = name.removesuffix(".routed_experts")
                if layer.endswith(".experts") and hasattr(module, "w13_bias"):
                    self._places |= {f"{layer}.{mine}": (module, its) for mine, its in OF_EXPERTS.items()}
                elif "sinks" in module._parameters:
                    self._places[f"{name.replace('.attn', '.self_attn')}.sinks"] = module, "sinks"

    def taken_from(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield other tensors, loading these on the way.  Raises GroupFailed if some of them are missing at the end."""
        missing = set(self._places)
        for name, tensor in weights:
            if name in self._places:
                missing.discard(name)
                self._load(*self._places[name], tensor)
            else:
                yield name, tensor
        if missing:
            raise GroupFailed(f"{min(missing)} is missing, and {len(missing) - 1} more")

    def _load(self, module: Any, name: str, tensor: Tensor) -> None:
        parameter = getattr(module, name)
        parameter.weight_loader = _copy
        parameter.weight_loader = layerwise.make_online_process_loader(module, name)
        part = part_of_rank(name, tensor, parameter.shape, get_tensor_model_parallel_rank())
        parameter.weight_loader(parameter, part)


def with_corrections(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a version and the corrections of routers that it does not have: they are not trained (DeepSeek V3, GLM).

    A reload would complete a router without its correction, from memory that nobody has written to.  Copied when this
    is called, before layers are taken apart.
    """
    ends = ".e_score_correction_bias"
    kept = {name: each.detach().clone() for name, each in model.named_parameters() if name.endswith(ends)}

    def both() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            kept.pop(name, None)
            yield name, tensor
        yield from kept.items()

    return both()


OF_EXPERTS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


def _copy(param: Tensor, loaded_weight: Tensor) -> None:
    """A loader, whose arguments the reload knows by these names."""
    param.data.copy_(loaded_weight)


def part_of_rank(name: str, tensor: Tensor, shape: Sequence[int], rank: int) -> Tensor:
    """The part of a version's tensor that a tensor-parallel rank holds, in vLLM's form; shape: of its parameter."""
    if name == "w2_bias":  # added once
        return tensor if rank == 0 else torch.zeros_like(tensor)
    if name.endswith("_weight"):  # [experts, in, out] → [experts, out, in]
        tensor = tensor.transpose(1, 2)
    axis = next((axis for axis, size in enumerate(shape) if size != tensor.shape[axis]), 0)
    return tensor if tensor.shape == shape else tensor.narrow(axis, rank * shape[axis], shape[axis])


# --------------------------------------------------------------------------------------------------------- reload trace
#
# The copies that a model's weight loaders make of a version's tensors, traced on meta tensors.
#
# Input: parameters that loaders fill, and meta tensors of a version.  Output: the copies from tensors to parameters.
# Guarantee: anything else (arithmetic, a copy to a buffer, places filled twice or not at all) raises NoPlan: the copies
# alone would then not reproduce the loaders' result.


Parameter = tuple[nn.Module, str]  # a layer and the name that it has there


class NoPlan(Exception):
    """Reason why versions cannot be loaded by copies alone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a tensor, as torch.as_strided takes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements after the tensor's first

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> Cut:
        """The part of `whole` that is this view of it."""
        return cls(tuple(part.shape), part.stride(), int(part.storage_offset() - whole.storage_offset()))

    def from_(self, whole: Tensor) -> Tensor:
        """View this part of a tensor that has the layout of the original one."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class Copied(NamedTuple):
    """One copy that a loader made."""

    source: str  # name in the version
    to: Parameter
    place: Cut
    part: Cut  # of the source


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies while it is active, without executing them."""

    def __init__(
        self, parameters: Mapping[Parameter, Tensor], buffers: Iterable[Tensor], sources: Mapping[str, Tensor]
    ) -> None:
        """parameters: may be filled by loaders; buffers: must not; sources: the tensors of the version."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copied] = []
        self._parameters, self._sources = parameters, sources
        self._zeros: list[tuple[Parameter, Cut]] = []
        self._places = {_memory_of(tensor): place for place, tensor in parameters.items()}
        self._names = {_memory_of(tensor): name for name, tensor in sources.items()}
        self._known = {*self._places, *self._names, *map(_memory_of, buffers)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [tensor for tensor in given if _memory_of(tensor) in self._known]
        if not known:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copy(*given)
            return args[0]
        if func in (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar) and not any(args[1:]):
            self._zeros.append((self._place_of(given[0]), Cut.of(given[0], self._parameters[self._place_of(given[0])])))
            return args[0]
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or any(_memory_of(leaf) not in self._known for leaf in _tensors(made)):
            raise NoPlan(f"{func} of {self._name_of(known[0])}")
        return made

    def filled(self) -> Iterator[tuple[Parameter, bool]]:
        """Yield parameters whose elements are each filled once, and whether zeros are among them.

        Raises NoPlan for any other parameter that a copy went to.
        """
        zeros, places = {place for place, _ in self._zeros}, dict[Parameter, list[Cut]]()
        for place, cut in [*((copied.to, copied.place) for copied in self.copies), *self._zeros]:
            places.setdefault(place, []).append(cut)
        for place, cuts in places.items():
            if not _is_partition(cuts, self._parameters[place]):
                raise NoPlan(f"{self._name_of(self._parameters[place])} is not filled piece by piece")
            yield place, place in zeros

    def _copy(self, to: Tensor, source: Tensor) -> None:
        name = self._names.get(_memory_of(source))
        if name is None:
            raise NoPlan(f"what is copied to {self._name_of(to)} is no part of a tensor of the version")
        place = self._place_of(to)
        if to.shape != source.shape:
            raise NoPlan(f"{name}: {list(source.shape)} is copied to {list(to.shape)} of {self._name_of(to)}")
        cuts = Cut.of(to, self._parameters[place]), Cut.of(source, self._sources[name])
        self.copies.append(Copied(name, place, *cuts))

    def _place_of(self, tensor: Tensor) -> Parameter:
        place = self._places.get(_memory_of(tensor))
        if place is None:
            raise NoPlan(f"something is written to {self._name_of(tensor)}")
        return place

    def _name_of(self, tensor: Tensor) -> str:
        memory = _memory_of(tensor)
        if memory in self._places:
            layer, name = self._places[memory]
            return f"{name} of {type(layer).__name__}"
        return self._names.get(memory, "a buffer")


def _memory_of(tensor: Tensor) -> int:
    """Identity of the storage that views share, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def _is_partition(cuts: list[Cut], whole: Tensor) -> bool:
    """True if these are runs of the whole's memory, one after the other, from its first element to its last."""
    if not whole.is_contiguous() or any(not _is_run(cut) for cut in cuts):
        return False
    ends = sorted((cut.offset, cut.offset + _count(cut.shape)) for cut in cuts if _count(cut.shape))
    follow = all(end == begin for (_, end), (begin, _) in pairwise(ends))
    return bool(ends) and follow and ends[0][0] == 0 and ends[-1][1] == whole.numel()


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _is_run(cut: Cut) -> bool:
    """True if the cut has no gaps."""
    expected = 1
    for size, stride in zip(reversed(cut.shape), reversed(cut.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# ---------------------------------------------------------------------------------------------------------- vllm layers
#
# Layers of a vLLM model between two states: taken apart for a reload, and as its kernels read them.
#
# Complements vLLM's layerwise reload: undoes a reload that stops half-way, and on a CPU repacks two kinds of layers
# that keep repacked copies of weights without tensors of their own.


def put_back(model: Any, model_config: Any) -> None:
    """Restore the tensors of layers that initialize_layerwise_reload left unfinished.

    Tensors already received for them are views of blocks that are freed; and vLLM would call a partly loaded layer
    finished.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = info.load_numel_total = 0
    finalize_layerwise_reload(model, model_config)


def repack(model: Any) -> None:
    """Renew copies on CPU: a tied lm_head keeps one of the old embedding, a mixture's kernel one of its experts."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def unwrap_loaders(model: Any) -> None:
    """Let loaders fill parameters at once after initialize_layerwise_reload, not when a layer is complete."""
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            loader: Any = getattr(parameter, "weight_loader", None)
            while getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__
                parameter.weight_loader = loader


# ---------------------------------------------------------------------------------------------------------- reload plan


Specs = tuple[tuple[str, torch.Size, torch.dtype], ...]
KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # keep weights as they are; repack them on a CPU
# Errors of loaders that read the values of a meta tensor, or expect something else of it.
FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
PIECE = 1 << 24  # elements that are compared at once
NUM_PROBES = 4  # rows on which repacked layers are compared


@dataclass(frozen=True, slots=True)
class _Form:
    """A parameter as loaders fill it, in a layer whose kernel keeps only a repacked copy."""

    shape: torch.Size
    dtype: torch.dtype
    has_zeros: bool  # some elements have no tensor and are zero

    def made(self) -> Tensor:
        make = torch.zeros if self.has_zeros else torch.empty
        return make(self.shape, dtype=self.dtype)


def find_plan(model: Any, model_config: Any, weights: NamedTensors) -> ReloadPlan:
    """Trace a load on meta tensors.  Raises NoPlan."""
    _refuse_unknown(model)
    held, specs = dict(_parameters(model)), specs_of(weights)
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in specs}
    try:
        initialize_layerwise_reload(model)
        unwrap_loaders(model)
        traced = dict(_parameters(model))
        buffers = [buffer for layer in model.modules() for buffer in layer.buffers(recurse=False)]
        with LoadTrace(traced, buffers, sources) as trace:
            model.load_weights(iter(sources.items()))
        filled = dict(trace.filled())
        forms = dict(_forms(held, traced, filled))
    except FAILS as error:
        raise NoPlan(f"{type(error).__name__}: {error}") from error
    finally:
        put_back(model, model_config)
    return ReloadPlan(model, model_config.dtype, specs, trace.copies, forms)


def specs_of(weights: NamedTensors) -> Specs:
    """Names, shapes and dtypes of a version: versions with equal ones are loaded by the same plan."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in weights)


class ReloadPlan:
    """The plan of one model, for versions with the same tensors in the same order."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        specs: Specs,
        copies: Sequence[Copied],
        forms: Mapping[Parameter, _Form],
    ) -> None:
        """forms: forms of the parameters that are allocated again for each version."""
        self._specs, self._forms, self._dtype = specs, forms, dtype
        self._copies: dict[str, list[Copied]] = {}
        for copied in copies:
            self._copies.setdefault(copied.source, []).append(copied)
        self._num_copies = Counter(copied.to[0] for copied in copies)
        on_cpu = current_platform.is_cpu()
        self._repacked: set[Any] = {layer for layer in self._num_copies if on_cpu and _method_of(layer)}
        self._attention: list[Any] = [module for module in model.modules() if _keeps_parameters(module)]

    def __str__(self) -> str:
        return f"{len(self._specs)} tensors in {self._num_copies.total()} copies, {len(self._repacked)} layers repacked"

    def fits(self, weights: NamedTensors) -> bool:
        """True if this version has the tensors that the plan was made for."""
        return specs_of(weights) == self._specs and all(tensor.is_contiguous() for _, tensor in weights)

    def load(self, weights: NamedTensors) -> None:
        """Copy a version that fits.  On CUDA copies may still be under way on the current stream."""
        left, anew = self._num_copies.copy(), dict[Parameter, Tensor]()
        for name, tensor in weights:
            for _, to, place, part in self._copies.get(name, ()):
                place.from_(self._target(to, anew)).copy_(part.from_(tensor), non_blocking=True)
                left[to[0]] -= 1
                if not left[to[0]] and to[0] in self._repacked:
                    _repack(to[0], anew)
        for attention in self._attention:
            attention.process_weights_after_loading(self._dtype)

    def prove(self, weights: NamedTensors) -> None:
        """Load this version, which the model holds, by the plan; raise NoPlan if that changes the model."""
        for name, tensor in weights:
            for _, to, place, part in self._copies.get(name, ()):
                if to not in self._forms and not _are_equal(place.from_(_held(to)), part.from_(tensor)):
                    raise NoPlan(f"{name} is changed on its way to {to[1]} of {type(to[0]).__name__}")
        before = self._answers()
        self.load(weights)
        for layer, answer in self._answers().items():
            if not torch.equal(answer, before[layer]):
                raise NoPlan(f"a {type(layer).__name__} that is repacked answers otherwise")

    def _target(self, to: Parameter, anew: dict[Parameter, Tensor]) -> Tensor:
        form = self._forms.get(to)
        if form is None:
            return _held(to)
        if to not in anew:
            anew[to] = form.made()
        return anew[to]

    def _answers(self) -> dict[nn.Module, Tensor]:
        """Outputs of repacked layers for a few fixed rows."""
        made = {}
        for layer in self._repacked:
            form = self._forms.get((layer, "weight"))
            if form is not None and len(form.shape) == 2:
                rows = torch.linspace(-1, 1, NUM_PROBES * form.shape[1]).to(form.dtype).view(NUM_PROBES, -1)
                made[layer] = layer.quant_method.apply(layer, rows, layer._parameters.get("bias"))
        return made


def _refuse_unknown(model: nn.Module) -> None:
    """Raise NoPlan for a layer that may need more than copied tensors."""
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise NoPlan(f"not tried on {current_platform.device_name}")
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method) not in KNOWN_METHODS:
            raise NoPlan(f"{type(layer).__name__} with {type(method).__name__}")
        if hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention:
            raise NoPlan(f"{type(layer).__name__} prepares its weights itself")


def _forms(
    held: Mapping[Parameter, Tensor], traced: Mapping[Parameter, Tensor], filled: Mapping[Parameter, bool]
) -> Iterator[tuple[Parameter, _Form]]:
    """Yield parameters that a plan must allocate again.  Raises NoPlan for a parameter that could keep old values."""
    renewed = {id(held[place]) for place in filled}
    for place, kept in held.items():
        layer, name = place
        if place not in filled:
            if id(kept) not in renewed:  # not tied to one that is filled
                raise NoPlan(f"no tensor comes for {name} of {type(layer).__name__}")
            continue
        fills = traced[place]
        if (kept.shape, kept.stride(), kept.dtype) == (fills.shape, fills.stride(), fills.dtype):
            continue
        if kept.shape == fills.shape and kept.is_contiguous():  # a bias that a kernel keeps in another precision
            continue
        if not (current_platform.is_cpu() and _method_of(layer)) or kept.numel():
            raise NoPlan(f"{name} of {type(layer).__name__} has another form in its kernel")
        yield place, _Form(fills.shape, fills.dtype, filled[place])


def _repack(layer: Any, anew: dict[Parameter, Tensor]) -> None:
    """Repack the copied weights for a layer's kernel; the layer's parameter objects stay the same."""
    mine = {name: tensor for (of, name), tensor in anew.items() if of is layer}
    kept = {name: layer._parameters[name] for name in mine}
    for name, tensor in mine.items():
        layer._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        del anew[layer, name]
    try:
        layer.quant_method.process_weights_after_loading(layer)
    finally:
        layer._parameters.update(kept)


def _are_equal(held: Tensor, given: Tensor) -> bool:
    """Compare piece by piece: a GPU may have no room for a whole embedding."""
    if not held.dim():
        return torch.equal(held, given.to(held))
    num_rows = max(1, PIECE // max(1, held[:1].numel()))
    pieces = (slice(first, first + num_rows) for first in range(0, len(held), num_rows))
    return all(torch.equal(held[piece], given[piece].to(held)) for piece in pieces)


def _parameters(model: nn.Module) -> Iterator[tuple[Parameter, Tensor]]:
    for layer in model.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                yield (layer, name), parameter


def _held(place: Parameter) -> Tensor:
    layer, name = place
    parameter = layer._parameters[name]
    assert parameter is not None
    return parameter.data


def _method_of(layer: nn.Module) -> Any:
    return getattr(layer, "quant_method", None)


def _keeps_parameters(module: Any) -> bool:
    """True for attention whose kernel does something after a load: FlashInfer converts sinks."""
    return type(module) is Attention and "process_weights_after_loading" in _own_names(type(module.impl))


def _own_names(kind: type) -> set[str]:
    """Attributes of a kernel's class and its base classes, without vLLM's base."""
    return {name for each in kind.__mro__ if not each.__name__.startswith("AttentionImpl") for name in vars(each)}


# -------------------------------------------------------------------------------------------------------- weight reload
#
# Load HF-named tensors into vLLM's running model; a partial load never counts.
#
# Input: a vLLM worker's model and tensors, which may still be arriving.  The first version goes through vLLM's
# layerwise reload: a layer is put together from meta tensors when its last tensor has come, and copied to where its
# kernels look. Later ones are copied straight there, if they are whole and the model allows a plan (reload_plan.py)
# that has been checked on the first. Guarantee: whatever is raised, the model has tensors of the right shapes
# everywhere afterwards (some new, some old), so that a later version can be loaded.  Until then it would sample from no
# version's policy: the caller must prevent that.


class WeightReload:
    """Loads versions into one worker's model."""

    def __init__(self, model: Any, vllm_config: Any, model_config: Any, device: torch.device) -> None:
        self._model, self._vllm_config, self._model_config = model, vllm_config, model_config
        self._device = device
        self._plan: ReloadPlan | None = None
        self.way = ""  # how whole versions are loaded; "" before the first

    def load(self, weights: NamedTensors) -> None:
        """Load a complete version.  On CUDA copies may still be under way on the current stream."""
        if self._plan is not None and self._plan.fits(weights):
            with self._loading():
                self._plan.load(weights)
                repack(self._model)
            return
        self.load_arriving(weights)
        if not self.way:
            self._look_for_plan(weights)

    def load_arriving(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors as they arrive, by vLLM's own reload.

        Bare model.load_weights would fail on CPU, where linear weights were repacked and the originals emptied.
        """
        model = self._model
        with self._loading(), torch.device(self._device):
            try:
                # They look at layers, so before these are taken apart.
                stacks, direct = ExpertStacks(model, self._device), DirectCopies(model)
                whole = with_corrections(model, weights)
                initialize_layerwise_reload(model)
                model.load_weights(stacks.taken_from(direct.taken_from(whole)))
            except BaseException:  # nothing is survived; unfinished layers are restored first
                put_back(model, self._model_config)
                raise
            finalize_layerwise_reload(model, self._model_config)
            repack(model)

    def _look_for_plan(self, weights: NamedTensors) -> None:
        """Look for a plan while the model holds these weights."""
        plan = None
        try:
            with self._loading(), torch.device(self._device):
                plan = find_plan(self._model, self._model_config, weights)
            with self._loading():
                plan.prove(weights)
                repack(self._model)
        except (NoPlan, torch.OutOfMemoryError) as reason:  # the check holds a piece of a tensor on the GPU twice
            self.way = f"vLLM's layerwise reload, for each version: {reason}"
            if plan is not None:
                self.load_arriving(weights)  # the check has loaded them by the plan that is refused
        else:
            self._plan = plan
            self.way = f"copies to where kernels read, from the second version on: {plan}"

    @contextmanager
    def _loading(self) -> Iterator[None]:
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            yield
