"""A vote of all ranks on whether to apply a step: if one rank's loss or norm is not finite, all skip it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_ranks_agree(answer: bool, device: torch.device) -> bool:
    """True if every rank votes True.  A collective of the default process group; without one, the vote itself.

    Ranks must not decide alone: one that steps while another skips trains a different model from then on.
    """
    if not dist.is_initialized():
        return answer
    vote = torch.tensor(int(answer), dtype=torch.int32, device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())
