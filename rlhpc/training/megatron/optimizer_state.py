"""Where Megatron's optimisers keep float32 main weights, moments and step counters of each parameter.

Input: a Megatron optimiser.  Output: an OptimizerShard for each parameter of which this rank keeps a part. A rank of a
distributed optimiser keeps a flat range of some of its parameters; without one it keeps all of all of them.
Names of Megatron's own that are not public are read here and nowhere else (megatron-core 0.16.1).

Our own checkpoint format over these shards avoids Megatron's state_dict and what is wrong with it outside Transformer
Engine: state_dict() before the first step, the missing "step", loads outside no_grad.  What remains: if parameters
share a `step` tensor, torch's AdamW increments it once for each of them, so every shard has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from rlhpc.training.optimizer import STATE_KINDS


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """A flat range of one parameter as this rank's optimiser sees it."""

    parameter: nn.Parameter  # of the model, in its dtype
    start: int
    end: int
    main: Tensor  # float32, as listed in the optimiser's groups; on the parameter's device
    stepped: Tensor  # `main`, or its copy in host memory that is stepped instead
    state: dict[str, Any]  # the optimiser's own, of `stepped`
    group: dict[str, Any]  # the optimiser's own

    @property
    def num_elements(self) -> int:
        """Length of the range."""
        return self.end - self.start

    def tensor(self, kind: str) -> Tensor:
        """Live float32 [num_elements], a view; `kind`: one of STATE_KINDS."""
        tensor: Tensor = self.stepped if kind == "weights" else self.state[kind]
        return tensor.detach().view(-1)

    def set_step(self, value: int) -> None:
        """Set the counter that bias correction uses."""
        if "step" in self.state:
            self.state["step"].fill_(value)
        else:
            self.group["step"] = value  # Transformer Engine counts once per group

    def publish_to_device(self) -> None:
        """After a write to tensor("weights"): copy it to where the model reads it, if that is elsewhere."""
        if self.stepped is not self.main:
            self.main.detach().copy_(self.stepped)


def shards_of(optimizer: Any) -> tuple[OptimizerShard, ...]:
    """The shards of every chained optimiser, in its own order; sets their moments to zero."""
    found = []
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        places = _places_in_groups(part.optimizer)
        for parameter, main, start, end in _main_weights(part):
            assert main.dtype == torch.float32
            assert main.numel() == end - start
            stepped, state, group = places[id(main)]
            found.append(OptimizerShard(parameter, start, end, main, stepped, state, group))
    return tuple(found)


def torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """The inner optimisers, Transformer Engine's or torch's."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield from part.optimizer.sub_optimizers
        else:
            yield part.optimizer


def _main_weights(part: Any) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """(parameter of the model, its main weight or a flat part of it, start, end)."""
    if isinstance(part, DistributedOptimizer):
        for models, mains in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for parameter, main in _zip_groups(models, mains):
                place = part._get_model_param_range_map(parameter)["param"]
                yield parameter, main, place.start, place.end
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [
            *_zip_groups(part.float16_groups, part.fp32_from_float16_groups),
            *_zip_groups(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
    else:
        pairs = [(parameter, parameter) for group in part.param_groups for parameter in group["params"]]
    for parameter, main in pairs:
        yield parameter, main, 0, parameter.numel()


def _zip_groups(models: Any, mains: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for of_model, of_main in zip(models, mains, strict=True):
        yield from zip(of_model, of_main, strict=True)


def _places_in_groups(inner: Any) -> dict[int, tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """id of a main weight → (what is stepped for it, its state, its group)."""
    if isinstance(inner, HybridDeviceOptimizer):
        # It copies each group's settings to the inner optimiser before every step.
        stepped = inner.param_to_inner_param
        states = {id(p): sub.state[p] for sub in inner.sub_optimizers for p in _fill_states(sub)}
    else:
        stepped = {}
        states = {id(p): inner.state[p] for p in _fill_states(inner)}
    return {
        id(main): (stepped.get(main, main), states[id(stepped.get(main, main))], group)
        for group in inner.param_groups
        for main in group["params"]
    }


def _fill_states(inner: Any) -> Iterator[Tensor]:
    """Create zero moments, so that a checkpoint before the first step has them too; yield the parameters."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            for kind in STATE_KINDS[1:]:
                state[kind] = torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)
            if isinstance(inner, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            yield parameter
