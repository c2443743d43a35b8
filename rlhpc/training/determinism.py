"""Make this process compute the same bits from the same inputs: for run.deterministic.

On CPU it does so anyway, with the same number of threads.  On CUDA some kernels add up in the order in which threads
arrive, and cuBLAS and NCCL choose algorithms as they go along.  An operation that has no deterministic implementation
raises RuntimeError, which names it.
"""

from __future__ import annotations

import os

import torch

# Read by libraries when they are first used.  What the user has set is kept: they may know their interconnect.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one of the two values that torch accepts
    "NCCL_ALGO": "Ring",  # sums in the order of ranks, whatever the size of a message
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # TransformerEngine's attention
}


def compute_deterministically() -> None:
    """Compute deterministically for the rest of this process.  Call it before anything is computed on a GPU."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
    torch.use_deterministic_algorithms(True)
