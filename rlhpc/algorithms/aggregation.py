"""Loss aggregation: how token losses become one number, as a factor for each sequence.

Input: samples of a batch.  Output: a factor for each, on all of its loss tokens.  The sum over tokens is divided by N,
the loss tokens of the batch (contracts.PolicyLoss), so that factors of 1 are a mean over tokens.  With n_i loss tokens
in a sequence, S sequences, P prompts, n_p loss tokens of a prompt, M = generation.max_completion_tokens:

    token       1               every token alike (DAPO, arXiv:2503.14476)
    sequence    N / (S · n_i)   every completion alike (GRPO, arXiv:2402.03300)
    constant    N / (S · M)     a sum over tokens by a constant: no bias by length (Dr. GRPO, arXiv:2503.20783)
    prompt      N / (P · n_p)   every prompt alike, its tokens alike

Sequences and prompts without a loss token count for none of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlhpc.types import TrainingSample


def aggregate(samples: Sequence[TrainingSample], how: str, max_completion_tokens: int) -> list[TrainingSample]:
    """Return the samples with their share in the loss of the batch that they are; `how`: algorithm.aggregation."""
    counts = np.array([np.count_nonzero(sample.loss_mask) for sample in samples], np.float64)
    prompts = np.unique([sample.group_id for sample in samples], return_inverse=True)[1]
    weights = loss_weights(counts, prompts, how, max_completion_tokens)
    return [
        sample if weight == sample.loss_weight else replace(sample, loss_weight=weight)  # most have it: a copy is dear
        for sample, weight in zip(samples, weights.tolist(), strict=True)
    ]


def loss_weights(
    counts: NDArray[np.float64], prompts: NDArray[np.int64], how: str, max_completion_tokens: int
) -> NDArray[np.float64]:
    """Factors [N] of sequences with `counts` loss tokens [N] that are completions of `prompts` [N], from 0."""
    total, is_used = counts.sum(), counts > 0
    if not total:
        return np.zeros_like(counts)
    match how:
        case "sequence":
            weights = total / (is_used.sum() * counts.clip(min=1))
        case "constant":
            weights = np.full_like(counts, total / (is_used.sum() * max_completion_tokens))
        case "prompt":
            of_prompt = np.bincount(prompts, counts)
            weights = total / ((of_prompt > 0).sum() * of_prompt.clip(min=1))[prompts]
        case _:
            weights = np.ones_like(counts)
    return np.where(is_used, weights, 0.0)
