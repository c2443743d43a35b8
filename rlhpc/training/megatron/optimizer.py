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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlhpc.training.megatron.optimizer_state import OptimizerShard, shards_of, torch_optimizers


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
        self._shards = shards_of(self._optimizer)
        self._num_steps_applied = 0
        for inner in torch_optimizers(self._optimizer):
            _make_fused(inner)
        self._refuse_other_decay()

    @property
    def shards(self) -> Sequence[OptimizerShard]:
        """What this rank keeps of the optimiser's state; write to it only before setting num_steps_applied."""
        return self._shards

    @property
    def num_steps_applied(self) -> int:
        """Counted here, because Megatron's counters are per parameter and absent on a rank that keeps none."""
        return self._num_steps_applied

    @num_steps_applied.setter
    def num_steps_applied(self, value: int) -> None:
        self._num_steps_applied = value
        for shard in self._shards:
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
        for shard in self._shards:
            shard.publish_to_device()
        for part in self._optimizer.chained_optimizers:
            if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if any(isinstance(part, DistributedOptimizer) for part in self._optimizer.chained_optimizers):
            for chunk in self._chunks:
                chunk.start_param_sync()

    def _refuse_other_decay(self) -> None:
        """Check that Megatron decays exactly the matrices, the router of a mixture included."""
        dimensions = {id(shard.main): shard.parameter.ndim for shard in self._shards}
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
