"""Megatron's AdamW, stepped by hand: norm, vote, clip and step are the backend's, in this order.

Input: the summed gradients that DistributedDataParallel holds in float32.  Output: stepped float32 main weights, copied
to the model's parameters.
Guarantees: nothing of weights, moments or step counters changes before step(); after it the model's parameters are the
new ones on every rank, at once.  That rules out Megatron's overlap_param_gather, which leaves stale parameters in
place until the next forward pass, while weights() may be asked for before that.
Weight decay acts on matrices only (two dimensions or more), not on norms and biases.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from rlhpc.training.trainer_state import STATE_KINDS

# ------------------------------------------------------------------------------------------------------ optimizer state
#
# Access to float32 main weights, moments and step counters of each parameter in Megatron's optimisers.
#
# Input: a Megatron optimiser.  Output: an OptimizerShard for each parameter of which this rank keeps a part. A rank of
# a distributed optimiser keeps a flat range of some of its parameters; without one it keeps all of all of them. Names
# of Megatron's own that are not public are read here and nowhere else (megatron-core 0.16.1).
#
# Our own checkpoint format over these shards avoids Megatron's state_dict and its faults without Transformer Engine:
# state_dict() before the first step, the missing "step", loads outside no_grad.  What remains: if parameters
# share a `step` tensor, torch's AdamW increments it once for each of them, so every shard has its own.


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
        """Copy tensor("weights"), after it was written to, to where the model reads it, if that is elsewhere."""
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
    """id of a main weight → (its stepped tensor, its state, its group)."""
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


# ------------------------------------------------------------------------------------------------------------ optimizer


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Settings that do not change between steps."""

    dtype: torch.dtype  # of the model's parameters
    betas: tuple[float, float]
    eps: float
    is_distributed: bool  # every data-parallel rank keeps and steps its own part of main weights and moments
    overlap_grad_reduce: bool  # sum over ranks while backward goes on
    is_offloaded: bool  # main weights and moments live and are stepped in host memory; CUDA, distributed only


def wrap_chunks(chunks: Sequence[Any], settings: OptimizerSettings) -> list[Any]:
    """Give every model chunk a float32 gradient buffer that is summed over the ranks with its parameters."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,  # micro-batches too are summed in float32
        use_distributed_optimizer=settings.is_distributed,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=False,
    )
    # Later chunks of a stage are not on the critical path: one bucket each.
    return [
        DistributedDataParallel(config=chunk.config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class MegatronAdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), of all chunks of one rank.

    A mixture of experts has two chained optimisers inside, because experts are summed over fewer ranks.
    """

    def __init__(self, chunks: Sequence[Any], settings: OptimizerSettings) -> None:
        """Build it over chunks from wrap_chunks; moments are zeros from the start.  A collective."""
        self._chunks = list(chunks)
        self._optimizer = _build(self._chunks, settings)
        if settings.is_offloaded:
            gc.collect()  # Megatron pins the host's copy twice, and the first is garbage in a reference cycle
        # This rank's part of the optimiser's state; write to it only before setting num_steps_applied.
        self.shards: Sequence[OptimizerShard] = shards_of(self._optimizer)
        self._num_steps_applied = 0
        for inner in torch_optimizers(self._optimizer):
            _make_fused(inner)
        self._refuse_other_decay()

    @property
    def num_steps_applied(self) -> int:
        """Counted here, because Megatron's counters are per parameter and absent on a rank that keeps none."""
        return self._num_steps_applied

    @num_steps_applied.setter
    def num_steps_applied(self, value: int) -> None:
        self._num_steps_applied = value
        for shard in self.shards:
            shard.set_step(value)

    def zero_gradients(self) -> None:
        """Zero the accumulated gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients, before gradient_norm()."""
        for chunk in self._chunks:
            chunk.scale_gradients(factor)

    def gradient_norm(self) -> float:
        """Global L2 norm of the summed gradients, each parameter counted once; not finite if they are not.

        A collective; the same on all ranks except those that hold a nan.  Call it once after every backward: it hands
        the gradients to the optimiser.
        """
        found_inf = self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        return float("nan") if found_inf else norm

    @torch.no_grad()
    def clip(self, gradient_norm: float, max_norm: float) -> None:
        """Scale the gradients to the norm max_norm if theirs, `gradient_norm`, is larger."""
        listed = [main for group in self._optimizer.param_groups for main in group["params"]]
        gradients = [main.grad for main in listed if main.grad is not None]
        if gradient_norm > max_norm and gradients:
            torch._foreach_mul_(gradients, max_norm / gradient_norm)

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """Apply the gradients and publish the new weights.  A collective."""
        for group in self._optimizer.param_groups:
            # Megatron leaves wd_mult to its scheduler, which is not used here.
            group.update(lr=learning_rate, weight_decay=weight_decay * group["wd_mult"])
        self._optimizer.step_with_ready_grads()
        self._num_steps_applied += 1

    @torch.no_grad()
    def publish(self) -> None:
        """Copy main weights that were written from outside into the model's parameters.  A collective."""
        for shard in self.shards:
            shard.publish_to_device()
        for part in self._optimizer.chained_optimizers:
            if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if any(isinstance(part, DistributedOptimizer) for part in self._optimizer.chained_optimizers):
            for chunk in self._chunks:
                chunk.start_param_sync()

    def _refuse_other_decay(self) -> None:
        """Check that Megatron decays exactly the matrices, the router of a mixture included."""
        dimensions = {id(shard.main): shard.parameter.ndim for shard in self.shards}
        for group in self._optimizer.param_groups:
            for main in group["params"]:
                assert (group["wd_mult"] == 1.0) == (dimensions[id(main)] >= 2), "has the wrong weight decay"


def _build(chunks: list[Any], settings: OptimizerSettings) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=0.0,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=0.0,
        bf16=settings.dtype == torch.bfloat16,
        params_dtype=settings.dtype,
        use_distributed_optimizer=settings.is_distributed,
        optimizer_cpu_offload=settings.is_offloaded,
        optimizer_offload_fraction=1.0 if settings.is_offloaded else 0.0,
    )
    # Without the overrides norms and biases would decay like everything else.
    overrides = get_standard_config_overrides(config)
    # Gloo groups are for its own checkpoints only.
    return get_megatron_optimizer(config, chunks, config_overrides=overrides, use_gloo_process_groups=False)


def _make_fused(inner: Any) -> None:
    """Use torch's AdamW with one kernel per device; Transformer Engine's is always fused."""
    if isinstance(inner, torch.optim.AdamW):
        for group in inner.param_groups:
            group["fused"] = True
