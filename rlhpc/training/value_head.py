"""The critic's value head: one output in place of the language model's head.

Input: hidden states and the head's weight.  Output: a value per token, in the place of its log-probability.  Its weight
begins as zeros, so that a critic that has learnt nothing says 0 everywhere; its name is that of HF's heads for
classification with one label.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUE_HEAD = "score.weight"


def token_values(hidden: Tensor, head_weight: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, Tensor]:
    """Values float32 [N] of hidden [N, H] by head_weight [1, H], in float32, and entropies of 0.

    Takes the arguments of chunked_logprobs, and ignores all but the first two.
    """
    values = (hidden.float() @ head_weight.float().t())[:, 0]
    return values, torch.zeros_like(values)
