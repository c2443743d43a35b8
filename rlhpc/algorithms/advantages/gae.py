"""Advantages from a critic: generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    δ_t = r_t + γ · V_{t+1} − V_t          A_t = Σ_k (γλ)^k · δ_{t+k}          R_t = A_t + V_t, which the critic learns

t counts the loss tokens of a completion; V_t is the critic's value of what stands before token t.  A completion ends
with its last token: V is 0 after it, also where it was cut off.  λ = 1: A_t is the discounted sum of rewards less V_t.

Input: arrays of a packed row.  Output: arrays like them.  float64 inside.  Loads without torch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlhpc.types import Bool, Float32, Int32

BLOCK = 128  # tokens


def packed_gae(
    rewards: Float32, values: Float32, loss_mask: Bool, cu_seqlens: Int32, *, discount: float, trace: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages and returns of a packed row of T tokens in S sequences, float64 [T] each, 0 off the loss mask.

    rewards [T] of tokens; values [T] of the state before each; cu_seqlens [S + 1]; discount is γ, trace is λ.
    """
    places = _loss_tokens(loss_mask, cu_seqlens)
    is_there = places >= 0
    value, reward = (np.where(is_there, each[places], 0).astype(np.float64) for each in (values, rewards))
    later_value = np.pad(value, ((0, 0), (0, 1)))[:, 1:]
    advantage = discounted_sums(reward + discount * later_value - value, discount * trace)
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    advantages[places[is_there]] = advantage[is_there]
    returns[places[is_there]] = (advantage + value)[is_there]
    return advantages, returns


def discounted_sums(terms: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Σ_k discount^k · terms[:, t + k] for every t, of terms [S, T]; discount from 0 to 1.

    By blocks: a loop over single tokens takes half a second for a row of 16,384.
    """
    num_rows, length = terms.shape
    num_blocks = -(-length // BLOCK)
    sums = np.zeros((num_rows, num_blocks, BLOCK))
    sums.reshape(num_rows, -1)[:, :length] = terms
    ahead = np.arange(BLOCK)[None, :] - np.arange(BLOCK)[:, None]  # [t, t + k]: k
    sums = sums @ np.where(ahead >= 0, discount ** np.maximum(ahead, 0).astype(np.float64), 0.0).T
    to_next = discount ** np.arange(BLOCK, 0, -1, dtype=np.float64)  # of each token, to the next block's first
    for block in range(num_blocks - 2, -1, -1):
        sums[:, block] += to_next * sums[:, block + 1, :1]
    return sums.reshape(num_rows, -1)[:, :length]


def _loss_tokens(loss_mask: Bool, cu_seqlens: Int32) -> NDArray[np.int64]:
    """Places of the loss tokens of every sequence, [S, longest], at the right end of its line; −1 before them."""
    own = [first + np.flatnonzero(loss_mask[first:last]) for first, last in pairwise(cu_seqlens)]
    longest = max(map(len, own))
    return np.stack([np.concatenate([np.full(longest - len(places), -1), places]) for places in own]).astype(np.int64)
