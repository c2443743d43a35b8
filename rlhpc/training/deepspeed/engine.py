"""The only module that imports DeepSpeed: an engine that shards a model over the ranks of the default group, and its
end.

Input: a module and [trainer].  Output: a DeepSpeed engine of ZeRO stage 1, 2 or 3 around torch's AdamW.
Guarantees: nothing is compiled when it starts, DeepSpeed logs errors only, and engines may be opened and closed in one
process any number of times.
Import and use it under accelerator_environment: DeepSpeed chooses its accelerator while it is imported, once for the
process, and looks into the environment for this rank's device in every pass of stage 3.
"""

from __future__ import annotations

import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # takes seconds; else within the first step of stages 1 and 2
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import nn

from rlhpc.config_sections import TrainerConfig
from rlhpc.errors import ConfigError

BUCKET_ELEMENTS = 64 << 20  # of gradients reduced, or parameters gathered, at once
NEVER = 1 << 60


class ZeroEngine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine with one class of optimiser for every dtype.

    Stage 1 in bfloat16 with float32 gradient sums would otherwise get an optimiser of another kind, whose state lies
    elsewhere and whose steps skip by other rules.
    """

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        return ZERO_OPTIMIZATION


class NormGate:
    """Makes DeepSpeed's optimiser skip a step whose gradient norm is not allowed, as if the norm were not finite."""

    def __init__(self, zero: Any) -> None:
        """zero: the optimiser of an engine; stages 1 and 2 measure in one place, stage 3 in another."""
        self._zero = zero
        self._allows: Callable[[float], bool] = lambda _: True
        self.norm = math.nan  # of the last step, before clipping; nan where it was not finite
        place = "_get_norm_groups" if hasattr(zero, "_get_norm_groups") else "scaled_global_norm"
        setattr(zero, place, partial(self._measured, getattr(zero, place)))
        self.leave: Callable[[], None] = partial(delattr, zero, place)  # once; each keeps the other alive

    @contextmanager
    def asking(self, allows: Callable[[float], bool], *, scale: float) -> Iterator[None]:
        """Ask `allows` while the block runs; it is called on every rank with the same finite norm, or on none.

        scale: what the step divides the gradients by, before their norm is asked about and clipped.
        """
        self._allows, self.norm = allows, math.nan
        self._zero.loss_scale = scale
        try:
            yield
        finally:
            self._zero.loss_scale = 1.0
            self._allows = lambda _: True  # it may keep the step's batch alive

    def _measured(self, measure: Callable[[], Any]) -> Any:
        measured = measure()
        total = combine_grad_norm_groups(measured) if isinstance(measured, list) else measured
        norm = float(total) / self._zero.loss_scale
        if not math.isfinite(norm):
            return measured
        self.norm = norm
        if self._allows(norm):
            return measured
        return [torch.full_like(total, math.inf)] if isinstance(measured, list) else torch.full_like(total, math.inf)


_OPEN: set[int] = set()  # ids of the open engines, which share DeepSpeed's process groups


def open_engine(
    policy: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    trainer: TrainerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ZeroEngine:
    """Shard `policy` over the ranks of the default process group.  A collective.

    parameters: all of policy's, on the host, already of `dtype`; matrices make the optimiser's first group, the rest
    its second.  The step's options (learning rate, weight decay, clipping) are the caller's to set before each step.
    """
    accelerator = get_accelerator().device_name()
    if accelerator != device.type:  # fixed by the first import in a process
        raise ConfigError(f"trainer.device={device.type}: DeepSpeed works on {accelerator} in this process already")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated", FutureWarning)
    # Otherwise the group's wrapper compiles C++ when it is made: minutes, or an error without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    options = engine_options(trainer, dtype=dtype, num_elements=sum(p.numel() for p in parameters.values()))
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in (matrices, vectors) if group],
        lr=0.0,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        eps=trainer.adam_eps,
        weight_decay=0.0,
        fused=True,
    )
    for group in optimizer.param_groups:
        group["decays"] = group["params"][0].ndim >= 2
    comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    if trainer.zero_stage == 3:
        # Parameter by parameter: the whole model is never on the device.
        deepspeed.zero.Init(module=policy, config_dict_or_path=options, dtype=dtype)
        for buffer in policy.buffers():
            buffer.data = buffer.data.to(device)
    engine = ZeroEngine(
        args=None, model=policy, optimizer=optimizer, config=options, config_class=DeepSpeedConfig(options, None)
    )
    _OPEN.add(id(engine))
    return engine


def engine_options(trainer: TrainerConfig, *, dtype: torch.dtype, num_elements: int) -> dict[str, Any]:
    """DeepSpeed's own configuration.  Gradients are averaged over ranks and never divided by micro-batches."""
    bucket = min(BUCKET_ELEMENTS, num_elements + num_elements % 2)
    zero: dict[str, Any] = {
        "stage": trainer.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if trainer.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            "memory_efficient_linear": False,  # it replaces torch.nn.functional.linear for the whole process
        }
    if trainer.optimizer_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if trainer.parameter_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,  # set before each step
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own is compiled when it is first used
        "steps_per_print": NEVER,
    }


def forget_gradients(zero: Any, stage: int) -> None:
    """Drop what backward passes have added up since the last step, and what DeepSpeed 0.19 keeps after a skipped one if
    the optimiser is in host memory.

    Otherwise they are part of the next step, finite or not.  zero: the optimiser of an engine.
    """
    zero.zero_grad()  # in stage 3 that is all: the next backward overwrites its sums
    if stage < 3:
        zero.micro_step_id = INITIAL_MICRO_STEP_ID  # the next backward overwrites sums in host memory
        for sums in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in sums:
                sums[group] = None


def close_engine(engine: ZeroEngine) -> None:
    """Take the engine's hooks off its module and, with the last one, forget DeepSpeed's groups.

    Call it before leaving the default group.
    """
    engine.destroy()
    _OPEN.discard(id(engine))
    if not _OPEN:  # a critic's engine closes while the policy's still communicates
        comm.comm.cdb = None
        deepspeed.utils.groups._release_process_group_references()
    gc.collect()
