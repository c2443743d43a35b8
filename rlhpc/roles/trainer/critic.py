"""PPO's critic: computes the advantages of a batch from its rewards, and is trained on the returns.

    batch with rewards ─▶ values ─▶ advantages, returns ─▶ batch with advantages, for the policy
                             └─────────────┴──▶ one optimiser step of the critic for each of the policy's

Input: PackedBatch, of which every rank reads the rows of its replica.  Output: the same with advantages, and figures.
With algorithm.kl_in = "reward" each token costs β · k(x), x = log π_reference − log π_behaviour (Ziegler et al. 2019,
arXiv:1909.08593, eq. 2): the mean of that over what π_behaviour samples is its own divergence from the reference,
however old it is.
The critic is a TrainerBackend with a value head (contracts.py), laid out over ranks like the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.algorithms.advantages.gae import packed_gae
from rlhpc.algorithms.losses.regularised import divergence
from rlhpc.algorithms.losses.value import ValueLoss
from rlhpc.config import Config
from rlhpc.contracts import TrainerBackend
from rlhpc.roles.trainer.batch_figures import BatchFigures
from rlhpc.types import PackedBatch, PackedMicrobatch

CRITIC_DIRECTORY = "critic"  # beside the trainer's part of a checkpoint directory


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """A batch whose rewards have become advantages, on the rows of this rank's replica."""

    batch: PackedBatch
    returns: list[list[PackedMicrobatch]]  # of each minibatch, rows with returns in the place of advantages
    values: list[list[Tensor]]  # of each minibatch and row, before the critic has learnt from them
    figures: dict[str, float]


class Critic:
    """Values, and what they learn by."""

    def __init__(self, backend: TrainerBackend, config: Config) -> None:
        self._backend, self._config = backend, config
        clip = config.critic.value_clip
        self._loss = ValueLoss(None if clip == "off" else clip)

    def judge(self, batch: PackedBatch, references: Sequence[Sequence[Tensor] | None] | None = None) -> JudgedBatch:
        """Advantages of a batch by the critic as it is, normalised over the batch if that is wanted.  A collective.

        references: of each minibatch and row of this replica, float32 [T] log-probabilities; None: there is none.
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
        """One optimiser step for each of the batch's order; returns figures.  A collective."""
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
        """By what advantages are shifted and scaled, and figures, over the loss tokens of all replicas."""
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
