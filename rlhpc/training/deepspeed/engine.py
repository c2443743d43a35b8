"""The only module that imports DeepSpeed: an engine that shards a model over the ranks of the default group, and its
end.

Input: a module and [trainer].  Output: a DeepSpeed engine of ZeRO stage 1, 2 or 3 around torch's AdamW.
Guarantees: nothing is compiled when it starts, DeepSpeed logs errors only, and engines may be opened and closed in one
process any number of times.
Import and use it under accelerator_environment: DeepSpeed chooses its accelerator on import, once for the process, and
reads this rank's device from the environment in every pass of stage 3.
"""

from __future__ import annotations

import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
from torch import Tensor, nn

from rlhpc.base.processes import variables_set
from rlhpc.config.tables import TrainerConfig
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec
from rlhpc.training.hf_model import CausalLM, sharded_on_disk
from rlhpc.training.logprob import SoftTargets
from rlhpc.training.packed_attention import SegmentPlan
from rlhpc.training.trainer_state import STATE_KINDS

# ---------------------------------------------------------------------------------------------------------- environment
#
# The environment variables that DeepSpeed requires, set while it reads them.

SET_BY_IMPORT = "PYTORCH_NVML_BASED_CUDA_CHECK"  # by deepspeed; it changes how torch looks for GPUs


def accelerator_environment(device: torch.device) -> AbstractContextManager[None]:
    """Set the variables for DeepSpeed's accelerator and this rank's device; restore them afterwards."""
    wanted = {"LOCAL_RANK": str(device.index or 0)}
    if device.type == "cpu":
        wanted["DS_ACCELERATOR"] = "cpu"  # also where there is a GPU
    return variables_set(wanted, SET_BY_IMPORT)


# --------------------------------------------------------------------------------------------------------------- policy
#
# A causal language model as one module whose parameters may be sharded over ranks.
#
# Input: a packed row and the tokens wanted of it.  Output: their log-probabilities or values.  ZeRO-3 gathers a
# parameter when the module that owns it is called, so the head is a module of its own here, tied to the embedding or
# not.


class ZeroPolicy(nn.Module):
    """Trunk and head of a CausalLM, called as a whole."""

    def __init__(self, model: CausalLM, *, temperature: float, chunk_tokens: int) -> None:
        """Share the model's parameters; its module is not to be called any more."""
        super().__init__()
        assert isinstance(model.trunk, nn.Module)
        self.trunk = model.trunk
        self.head = _Head(model.head, model.head_weight, temperature, chunk_tokens)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        segments: SegmentPlan,
        tokens: Tensor,
        want_entropy: bool,
        has_entropy_gradient: bool = False,
        temperature: float | None = None,
        soft: SoftTargets | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the tokens at the places `tokens` [N], and their entropies if wanted, float32 [N].

        temperature: None for that of the run.  With soft targets [2, N] and [N]: theirs are the second row, since stage
        3 waits for the gradient of every tensor that is returned, also of one that the loss has no use for.
        token_ids, position_ids and tokens int64; tokens may be empty, but never holds the first place of a row.
        """
        # use_cache: with a cache, HF believes that the row is one sequence.
        output: Any = self.trunk(
            input_ids=token_ids[None], position_ids=position_ids[None], segments=segments, use_cache=False
        )
        # The state before a token predicts it; only wanted tokens pass through the head.
        before = output.last_hidden_state[0].index_select(0, tokens - 1)
        targets = token_ids.index_select(0, tokens)
        logprobs, entropy = self.head(before, targets, want_entropy, has_entropy_gradient, temperature, soft)
        return logprobs, entropy


class _Head(nn.Module):
    def __init__(
        self, function: Callable[..., Any], weight: nn.Parameter, temperature: float, chunk_tokens: int
    ) -> None:
        super().__init__()
        self.weight, self._function = weight, function
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        want_entropy: bool,
        has_entropy_gradient: bool,
        temperature: float | None,
        soft: SoftTargets | None,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy, of_soft = self._function(
            hidden,
            self.weight,
            targets,
            temperature=self._temperature if temperature is None else temperature,
            chunk_tokens=self._chunk_tokens,
            want_entropy=want_entropy,
            has_entropy_gradient=has_entropy_gradient,
            soft=soft,
        )
        return logprobs if of_soft is None else torch.stack([logprobs, of_soft]), entropy


# ---------------------------------------------------------------------------------------------------------------- state
#
# Access to ZeRO's masters, moments and parameters by HF name.
#
# Input: DeepSpeed's optimiser of stage 1, 2 or 3.  Output: a table of fragments that every rank computes alike without
# communication, views of this rank's numbers, and the items that gather_stream and checkpoints are made of.
#
# Stages 1 and 2 lay a group of parameters end to end and cut the whole into one partition for each rank, so that a
# parameter may lie on several; stage 3 cuts each parameter by itself.  Either way a rank has at most one run of a
# parameter.
# Moments exist from the start, as zeros.  Each flat tensor has its own step counter.


# (kind, HF parameter as in memory, start, stop) → float32 numbers [start, stop) of it, flat, on the host
ReadRange = Callable[[str, TensorSpec, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Numbers [start, stop) of one flattened parameter, as they lie on one rank."""

    rank: int
    start: int
    stop: int
    flat: int  # index among the flat tensors of that rank
    offset: int  # offset in it

    @property
    def num_elements(self) -> int:
        """Length of the run."""
        return self.stop - self.start


class ZeroState:
    """Masters, moments and step counters of one model on one rank."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter], *, stage: int) -> None:
        """Add zero moments to a fresh DeepSpeed optimiser.  parameters: the optimiser's, in the model's order."""
        self._optimizer, self._stage = optimizer, stage
        self._parameters: dict[str, Any] = dict(parameters)
        self._rank = dist.get_rank()
        table = _fragments_of_stage_3(optimizer) if stage == 3 else _fragments_of_stages_1_and_2(optimizer)
        self.fragments = {name: table[id(parameter)] for name, parameter in parameters.items()}
        self.specs = tuple(TensorSpec(name, "float32", _shape(p)) for name, p in parameters.items())
        self._flats: list[Tensor] = (
            optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        )
        for flat in self._flats:
            assert flat.dtype == torch.float32
            optimizer.optimizer.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
            }

    @property
    def device(self) -> torch.device:
        """Device of masters and moments: the host, if they are offloaded."""
        return self._flats[0].device

    @property
    def num_steps_applied(self) -> int:
        """Steps applied so far."""
        return int(self._optimizer.optimizer.state[self._flats[0]]["step"].item())

    @num_steps_applied.setter
    def num_steps_applied(self, value: int) -> None:
        for flat in self._flats:
            self._optimizer.optimizer.state[flat]["step"].fill_(value)

    def items(self, dtype: str = "float32") -> list[ShardedTensorSpec]:
        """Items, one per parameter, in the model's order."""
        return [
            sharded_on_disk(
                TensorSpec(spec.name, dtype, spec.shape),
                [Shard(f.rank, f.num_elements) for f in self.fragments[spec.name]],
            )
            for spec in self.specs
        ]

    def own(self, kind: str, index: int) -> tuple[Tensor, ...]:
        """This rank's live run of parameter `index`, or nothing; `kind`: one of STATE_KINDS."""
        return tuple(
            self._flat(kind, fragment.flat).narrow(0, fragment.offset, fragment.num_elements)
            for fragment in self.fragments[self.specs[index].name]
            if fragment.rank == self._rank
        )

    def own_parameter(self, index: int, device: torch.device) -> tuple[Tensor, ...]:
        """This rank's run of parameter `index` in the dtype of the forward pass, on `device`.  Stage 3 only."""
        name = self.specs[index].name
        partition: Tensor = self._parameters[name].ds_tensor
        return tuple(
            partition.detach().narrow(0, 0, fragment.num_elements).to(device)
            for fragment in self.fragments[name]
            if fragment.rank == self._rank
        )

    @torch.no_grad()
    def fill(self, read: ReadRange, *kinds: str) -> None:
        """Load this rank's numbers of these kinds, or of all, from `read`.  publish() updates the parameters."""
        for kind in kinds or STATE_KINDS:
            for index, spec in enumerate(self.specs):
                mine = (fragment for fragment in self.fragments[spec.name] if fragment.rank == self._rank)
                for target, fragment in zip(self.own(kind, index), mine, strict=True):
                    target.copy_(read(kind, spec, fragment.start, fragment.stop))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the parameters of the forward pass, on all ranks.  A collective."""
        if self._stage < 3:
            self._optimizer.update_lp_params()
            return
        with self.partitioned():
            for flat in range(len(self._flats)):
                self._optimizer._reassign_or_swap_out_partitioned_parameters(flat)

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """A block in which this rank's runs of the parameters may be written to, since none of them is gathered.

        A collective of stage 3; in stages 1 and 2 a rank has all of them anyway.
        """
        if self._stage < 3:
            yield
            return
        self._optimizer._partition_all_parameters()
        yield
        persistent = self._optimizer.persistent_parameters  # small ones that are never released between steps
        if persistent:
            persistent[0].all_gather(persistent)

    def own_parameters(self) -> list[Tensor]:
        """This rank's part of the forward pass's parameters, padding included; live."""
        parameters = self._parameters.values()
        return [p.ds_tensor.detach() if self._stage == 3 else p.detach() for p in parameters]

    def _flat(self, kind: str, flat: int) -> Tensor:
        if kind == "weights":
            return self._flats[flat].detach()
        tensor: Tensor = self._optimizer.optimizer.state[self._flats[flat]][kind]
        return tensor


def frozen_items(specs: Iterable[TensorSpec], parameters: Mapping[str, Any]) -> list[ShardedTensorSpec]:
    """Items, one per frozen parameter that stage 3 has sharded.  specs: of the whole parameters."""
    return [
        sharded_on_disk(
            spec,
            [
                Shard(rank, min(size, parameters[spec.name].ds_numel - start))
                for size in [parameters[spec.name].partition_numel()]
                for rank, start in enumerate(range(0, parameters[spec.name].ds_numel, size))
            ],
        )
        for spec in specs
    ]


def own_frozen(parameter: Any, shards: Iterable[Shard], device: torch.device) -> tuple[Tensor, ...]:
    """This rank's run of a frozen parameter, or nothing, on `device`."""
    rank, partition = dist.get_rank(), parameter.ds_tensor.detach()
    return tuple(partition.narrow(0, 0, shard.num_elements).to(device) for shard in shards if shard.rank == rank)


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _fragments_of_stages_1_and_2(optimizer: Any) -> dict[int, tuple[Fragment, ...]]:
    """Fragments by id of the parameter."""
    table: dict[int, tuple[Fragment, ...]] = {}
    for flat, group in enumerate(optimizer.round_robin_bit16_groups):
        size = int(optimizer.partition_size[flat])
        for parameter, begin in zip(group, optimizer.round_robin_bit16_offsets[flat], strict=True):
            end = begin + parameter.numel()
            cuts = [begin, *range((begin // size + 1) * size, end, size), end]
            table[id(parameter)] = tuple(
                Fragment(start // size, start - begin, stop - begin, flat, start % size)
                for start, stop in pairwise(cuts)
            )
    return table


def _fragments_of_stage_3(optimizer: Any) -> dict[int, tuple[Fragment, ...]]:
    """Fragments by id of the parameter.  The last ranks' runs may be shorter than their partitions, or left out."""
    table: dict[int, tuple[Fragment, ...]] = {}
    for flat, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for parameter in group:
            size, total = parameter.partition_numel(), parameter.ds_numel
            table[id(parameter)] = tuple(
                Fragment(rank, start, min(start + size, total), flat, offset)
                for rank, start in enumerate(range(0, total, size))
            )
            offset += size
    return table


# --------------------------------------------------------------------------------------------------------------- engine

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
        """Use `allows` as the gate in the block; it is called on every rank with the same finite norm, or on none.

        scale: divisor of the gradients, applied before their norm is checked and clipped.
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

    parameters: those of policy's that are trained, on the host, like all others already of `dtype`; matrices make the
    optimiser's first group, the rest its second.  The step's options (learning rate, weight decay, clipping) are the
    caller's to set before each step.
    """
    accelerator = get_accelerator().device_name()
    if accelerator != device.type:  # fixed by the first import in a process
        raise ConfigError(f"trainer.device={device.type}: DeepSpeed works on {accelerator} in this process already")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated", FutureWarning)
    # Otherwise the group's wrapper compiles C++ when it is made: minutes, or an error without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    options = engine_options(trainer, dtype=dtype, num_elements=sum(p.numel() for p in policy.parameters()))
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
    """Drop gradients accumulated since the last step, and those that DeepSpeed 0.19 keeps after a skipped step if the
    optimiser is in host memory.

    They would otherwise be part of the next step, finite or not.  zero: the optimiser of an engine.
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
