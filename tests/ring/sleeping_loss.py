"""A loss that takes its time by sleeping: optimiser steps of a known length on a machine that others use, too.

For timed_runs.py: `algorithm.loss = "tests.ring.sleeping_loss:loss"`.  The clipped loss, after RLHPC_SLEEP_TOKEN_S
seconds for each token of the row; with `padded_loss` as if all sequences of the row were filled up to its longest.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import PolicyLoss, TokenRow

SLEEP = "RLHPC_SLEEP_TOKEN_S"  # a variable of the environment


class SleepingLoss:
    """A PolicyLoss."""

    def __init__(self, *, is_padded: bool) -> None:
        self._is_padded = is_padded
        self._loss = make_policy_loss(AlgorithmConfig(proximal="behaviour", importance_cap="off"), policy_version=0)

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss; without metrics, whose names are not for losses of one's own."""
        num_tokens = len(row.loss_mask)
        if self._is_padded:
            num_tokens = row.num_sequences * int(torch.bincount(row.sequence).max())
        time.sleep(float(os.environ.get(SLEEP, "0")) * num_tokens)
        return self._loss(current, row)[0], {}


loss: PolicyLoss = SleepingLoss(is_padded=False)
padded_loss: PolicyLoss = SleepingLoss(is_padded=True)
