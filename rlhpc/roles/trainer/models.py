"""The models that a rank trains: the policy and, with a critic, its values.

Input: RoleContext.  Output: backends, whose ranks are connected.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.algorithms.estimators import packed_gae
from rlhpc.algorithms.objectives import ValueLoss
from rlhpc.algorithms.policy_loss import divergence
from rlhpc.base.files import is_absent
from rlhpc.base.host_address import host_address
from rlhpc.base.patience import patiently
from rlhpc.config.rules import Config
from rlhpc.protocol.contracts import StepResult, TrainerBackend
from rlhpc.protocol.types import PackedBatch, PackedMicrobatch
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.training.checkpoint_export import REFERENCE_DIRECTORY
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import LOOPBACK, RankContext

# -------------------------------------------------------------------------------------------------------- batch figures
#
# The figures of a batch from those of its optimiser steps.
#
# Input: StepResult of each.  Output: means over loss tokens, and the skipped steps.  The same on every rank.


def means_of(metrics: Mapping[str, float], grad_norm: float, num_loss_tokens: int) -> dict[str, float]:
    """Divide sums of metrics by num_loss_tokens; add the gradient norm as "grad_norm"."""
    return {name: value / num_loss_tokens for name, value in metrics.items()} | {"grad_norm": grad_norm}


@dataclass(slots=True)
class BatchFigures:
    """Adds up the figures of a batch's optimiser steps."""

    is_applied: bool = False  # whether any was applied
    refused: str = ""  # reason of the first refusal; "": none was refused
    skipped: tuple[int, ...] = ()  # indices of those that were not applied
    _parts: list[tuple[StepResult, int]] = field(default_factory=list)

    def add(self, result: StepResult, num_loss_tokens: int, refused: str) -> None:
        """Add the next optimiser step.  refused: the reason; "" if it was applied or not finite."""
        if refused:
            self.refused, self.skipped = self.refused or refused, (*self.skipped, len(self._parts))
        self.is_applied |= result.applied
        self._parts.append((result, num_loss_tokens))

    def means(self) -> dict[str, float]:
        """Means over the loss tokens of all optimiser steps, and the mean gradient norm.

        A step that was not finite counts only if no step was finite: its figures would hide those of the others.
        """
        finite = [part for part in self._parts if math.isfinite(part[0].grad_norm)] or self._parts
        total = sum(count for _, count in finite)
        sums = {name: math.fsum(result.metrics[name] for result, _ in finite) for name in finite[0][0].metrics}
        grad_norm = math.fsum(result.grad_norm for result, _ in finite) / len(finite)
        return means_of(sums, grad_norm, total)


# --------------------------------------------------------------------------------------------------------------- critic
#
# PPO's critic: computes the advantages of a batch from its rewards, and is trained on the returns.
#
#     batch with rewards ─▶ values ─▶ advantages, returns ─▶ batch with advantages, for the policy
#                              └─────────────┴──▶ one optimiser step of the critic for each of the policy's
#
# Input: PackedBatch, of which every rank reads the rows of its replica.  Output: the same with advantages, and figures.
# With algorithm.kl_in = "reward" each token costs β · k(x), x = log π_reference − log π_behaviour (Ziegler et al. 2019,
# arXiv:1909.08593, eq. 2): its mean over samples of π_behaviour is the divergence of π_behaviour from the reference,
# however stale the samples are.
# The critic is a TrainerBackend with a value head (contracts.py), laid out over ranks like the policy.

CRITIC_DIRECTORY = "critic"  # beside the trainer's part of a checkpoint directory


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """A batch whose rewards have become advantages, on the rows of this rank's replica."""

    batch: PackedBatch
    returns: list[list[PackedMicrobatch]]  # of each minibatch, rows with returns in the place of advantages
    values: list[list[Tensor]]  # of each minibatch and row, from the critic before it is trained on the batch
    figures: dict[str, float]


class Critic:
    """Computes advantages by a value model, and trains it on the returns."""

    def __init__(self, backend: TrainerBackend, config: Config) -> None:
        self._backend, self._config = backend, config
        clip = config.critic.value_clip
        self._loss = ValueLoss(None if clip == "off" else clip)

    def judge(self, batch: PackedBatch, references: Sequence[Sequence[Tensor] | None] | None = None) -> JudgedBatch:
        """Advantages of a batch by the present critic, normalised over the batch if so configured.  Collective.

        references: for each minibatch and row of this replica, float32 [T] log-probabilities; None: no reference.
        """
        mine = [list(minibatch.ranks[self._backend.dp_rank]) for minibatch in batch.minibatches]
        if self._config.algorithm.kl_in == "reward" and references is not None:
            mine = [
                [self._less_divergence(row, reference) for row, reference in zip(rows, of_rows, strict=True)]
                for rows, of_rows in zip(mine, references, strict=True)
                if of_rows is not None
            ]
        values = [self._backend.logprobs(rows) for rows in mine]
        found = [
            [self._estimate(row, value) for row, value in zip(rows, of_rows, strict=True)]
            for rows, of_rows in zip(mine, values, strict=True)
        ]
        shift, scale, figures = self._moments(mine, found)
        advantages, returns = list[list[PackedMicrobatch]](), list[list[PackedMicrobatch]]()
        for rows, of_rows in zip(mine, found, strict=True):
            pairs = list(zip(rows, of_rows, strict=True))
            advantages.append([_with(row, np.where(row.loss_mask, (a - shift) * scale, 0)) for row, (a, _) in pairs])
            returns.append([_with(row, of_row) for row, (_, of_row) in pairs])
        minibatches = (
            replace(minibatch, ranks=_put(minibatch.ranks, self._backend.dp_rank, rows))
            for minibatch, rows in zip(batch.minibatches, advantages, strict=True)
        )
        return JudgedBatch(replace(batch, minibatches=tuple(minibatches)), returns, values, figures)

    def learn(self, judged: JudgedBatch) -> dict[str, float]:
        """Take the critic's optimiser step for each minibatch of the batch's order; return figures.  Collective."""
        done = BatchFigures()
        for index in judged.batch.order:
            num_loss_tokens = judged.batch.minibatches[index].num_loss_tokens
            result = self._backend.step(
                judged.returns[index],
                self._loss,
                proximal=judged.values[index],
                num_loss_tokens=num_loss_tokens,
                learning_rate=judged.batch.critic_learning_rate,
                weight_decay=self._config.trainer.weight_decay,
                max_grad_norm=self._config.trainer.max_grad_norm,
            )
            done.add(result, num_loss_tokens, "")
        means = done.means()
        shown = {"loss": "critic/loss", "clipped": "critic/clipped_share", "grad_norm": "critic/grad_norm"}
        learnt = {name: means[figure] for figure, name in shown.items()}
        return judged.figures | learnt | {"critic/learning_rate": judged.batch.critic_learning_rate}

    def save(self, directory: Path) -> Future[dict[str, int]]:
        """See TrainerBackend; directory: of the checkpoint."""
        return self._backend.save(directory / CRITIC_DIRECTORY)

    def load(self, checkpoint: Path) -> None:
        """Continue from save().  Raises CheckpointError."""
        self._backend.load(checkpoint / CRITIC_DIRECTORY)

    def close(self) -> None:
        """Free its memory.  Idempotent."""
        self._backend.close()

    # ------------------------------------------------------------------------------------------------------- internals

    def _estimate(self, row: PackedMicrobatch, values: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        algorithm = self._config.algorithm
        return packed_gae(
            row.advantages,
            values.float().cpu().numpy(),
            row.loss_mask,
            row.cu_seqlens,
            discount=algorithm.discount,
            trace=algorithm.gae_lambda,
        )

    def _less_divergence(self, row: PackedMicrobatch, reference: Tensor) -> PackedMicrobatch:
        algorithm = self._config.algorithm
        log_ratio = reference.float().cpu() - torch.from_numpy(row.behaviour_logprobs.copy())
        costs = algorithm.kl_coefficient * divergence(log_ratio, algorithm.kl_estimator).numpy().astype(np.float64)
        return _with(row, row.advantages.astype(np.float64) - np.where(row.loss_mask, costs, 0))

    def _moments(
        self,
        rows: Sequence[Sequence[PackedMicrobatch]],
        found: Sequence[Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]],
    ) -> tuple[float, float, dict[str, float]]:
        """Shift and scale of advantages, and figures, over the loss tokens of all replicas."""
        masks = np.concatenate([row.loss_mask for of_rows in rows for row in of_rows])
        advantages, returns = (
            np.concatenate([each[part] for of_rows in found for each in of_rows])[masks] for part in (0, 1)
        )
        sums = self._backend.sum_over_replicas(
            {
                "number": float(len(advantages)),
                "advantage": float(advantages.sum()),
                "advantage_squared": float((advantages**2).sum()),
                "return": float(returns.sum()),
                "return_squared": float((returns**2).sum()),
            }
        )
        number = max(1.0, sums["number"])
        mean, mean_return = sums["advantage"] / number, sums["return"] / number
        variance = max(0.0, sums["advantage_squared"] / number - mean**2)
        variance_of_returns = max(0.0, sums["return_squared"] / number - mean_return**2)
        figures = {
            "critic/value_mean": mean_return - mean,
            "critic/return_mean": mean_return,
            "critic/advantage_std": math.sqrt(variance),
            "critic/explained_variance": 1 - variance / variance_of_returns if variance_of_returns else 0.0,
        }
        if self._config.algorithm.advantage_normalization == "off":
            return 0.0, 1.0, figures
        return mean, 1 / math.sqrt(variance) if variance else 0.0, figures


def _with(row: PackedMicrobatch, advantages: NDArray[np.float64]) -> PackedMicrobatch:
    return replace(row, advantages=advantages.astype(np.float32))


def _put(
    ranks: tuple[tuple[PackedMicrobatch, ...], ...], place: int, rows: Sequence[PackedMicrobatch]
) -> tuple[tuple[PackedMicrobatch, ...], ...]:
    return (*ranks[:place], tuple(rows), *ranks[place + 1 :])


# --------------------------------------------------------------------------------------------------------------- models

log = logging.getLogger("rlhpc.trainer")


def own_host(config: Config) -> str:
    """Address under which other hosts reach this one; "" for a run within one machine."""
    return host_address() if config.transport.kind == "tcp" else ""


def open_models(context: RoleContext, stack: ExitStack) -> tuple[TrainerBackend, Critic | None]:
    """Open the policy's backend and the critic's, if there is a critic; `stack` closes them."""
    backend = open_policy(context)
    stack.callback(backend.close)
    critic = _open_critic(context)
    if critic is not None:
        stack.callback(critic.close)
    return backend, critic


def open_policy(context: RoleContext) -> TrainerBackend:
    """Open the policy with the reference's weights: those are kept before a checkpoint's policy replaces them."""
    config = context.config
    if config.algorithm.reference_every and context.resume_step is not None:
        saved = context.layout.checkpoint(context.resume_step) / REFERENCE_DIRECTORY
        if not patiently(lambda: is_absent(saved), saved):
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": saved})})
        else:
            log.info("the checkpoint has no reference: the model at model.path is used until it is renewed")
    return open_backend(config, _ranks(context))


def _open_critic(context: RoleContext) -> Critic | None:
    """Open the critic on the ranks that the policy's backend has connected."""
    config = context.config
    if not config.has_critic:
        return None
    model = config.model.model_copy(update={"path": config.critic.path or config.model.path})
    own = config.model_copy(update={"model": model})
    return Critic(open_backend(own, _ranks(context), has_value_head=True), config)


def _ranks(context: RoleContext) -> RankContext:
    return RankContext(
        rank=context.replica,
        world_size=context.num_ranks,
        # Not a name that ends like an endpoint's, or a search for endpoints would find it.
        store_address=f"rendezvous://{context.layout.rendezvous}/trainer_{context.attempt}.meeting",
        host=own_host(context.config) or LOOPBACK,
        meet_timeout_s=context.meet_timeout_s,
    )
