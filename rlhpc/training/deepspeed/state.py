"""Where ZeRO keeps masters, moments and parameters, and how to read and write them by HF name.

Input: DeepSpeed's optimiser of stage 1, 2 or 3.  Output: a table of fragments that every rank computes alike without
communication, views of this rank's numbers, and the items that gather_stream and checkpoints are made of.

Stages 1 and 2 lay a group of parameters end to end and cut the whole into one partition for each rank, so that a
parameter may lie on several; stage 3 cuts each parameter by itself.  Either way a rank has at most one run of a
parameter.
Moments exist from the start, as zeros.  Each flat tensor has its own step counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhpc.training.hf_names import sharded_on_disk
from rlhpc.training.optimizer import STATE_KINDS
from rlhpc.training.sharded_tensors import Shard, ShardedTensorSpec
from rlhpc.types import TensorSpec

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
        """One item for each parameter, in the model's order."""
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
        """A block in which this rank's runs of the parameters may be written to: none of them is gathered meanwhile.

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
        """What this rank holds of the parameters of the forward pass, padding included; live."""
        parameters = self._parameters.values()
        return [p.ds_tensor.detach() if self._stage == 3 else p.detach() for p in parameters]

    def _flat(self, kind: str, flat: int) -> Tensor:
        if kind == "weights":
            return self._flats[flat].detach()
        tensor: Tensor = self._optimizer.optimizer.state[self._flats[flat]][kind]
        return tensor


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
