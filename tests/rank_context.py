"""How tests start the ranks of a trainer: forked from a server that has imported what every rank imports.

A rank that imports torch, transformers and Megatron by itself is busy for five seconds before it does anything.  The
server is one for each process of pytest, starts no thread, and ends with it.  Ranks leave by os._exit, as forked
processes do; where the interpreter's own shutdown is what is tested, start a process by "spawn".

Where there is a GPU every rank is spawned: importing Megatron asks CUDA for its devices, and what is forked from a
process that has asked cannot use them.
"""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext

import torch

RANKS: SpawnContext | ForkServerContext = (
    multiprocessing.get_context("spawn") if torch.cuda.is_available() else multiprocessing.get_context("forkserver")
)
RANKS.set_forkserver_preload(["tests.rank_preload"])


def begin_rank() -> None:
    """In a rank's process, first: one thread, and no collection looks at what the imports have left behind.

    A backend collects garbage when it is closed; among the objects of 3,800 modules that takes 0.3 s each time.
    """
    torch.set_num_threads(1)
    gc.freeze()
