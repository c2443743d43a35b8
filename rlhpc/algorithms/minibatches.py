"""Several optimiser steps on one batch: which samples each of them sees, and in which order.

Input: samples of a batch.  Output: minibatches, and the minibatch of every optimiser step.  A pure function of the seed
of the run and the step: a step that is repeated goes as it went.  Samples are dealt out at random, not by groups, since
advantages are those of the whole batch already, and a minibatch should look like it (PPO, Schulman et al. 2017,
arXiv:1707.06347).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Sample = TypeVar("Sample")


def split(samples: Sequence[Sample], num_minibatches: int, seed: tuple[int, int]) -> list[list[Sample]]:
    """Parts whose sizes differ by one at most; in each, samples keep their order.  One part: all as they are."""
    if num_minibatches == 1:
        return [list(samples)]
    shuffled = np.random.default_rng(seed).permutation(len(samples))
    return [[samples[i] for i in np.sort(part)] for part in np.array_split(shuffled, num_minibatches)]


def optimiser_steps(num_minibatches: int, num_epochs: int, seed: tuple[int, int]) -> tuple[int, ...]:
    """The minibatch of each optimiser step: in the first epoch as they come, in every further one in another order."""
    rng = np.random.default_rng((*seed, 1))
    further = [rng.permutation(num_minibatches) for _ in range(num_epochs - 1)]
    return (*range(num_minibatches), *(int(place) for epoch in further for place in epoch))
