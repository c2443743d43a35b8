"""How tests start the ranks of a trainer: forked from a server that has imported what every rank imports.

A rank that imports torch, transformers and Megatron by itself is busy for five seconds before it does anything.  The
server is one for each process of pytest, starts no thread, and ends with it.  Ranks leave by os._exit, as forked
processes do; where the interpreter's own shutdown is what is tested, start a process by "spawn".

Where there is a GPU every rank is spawned: importing Megatron asks CUDA for its devices, and what is forked from a
process that has asked cannot use them.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext

import torch

RANKS: SpawnContext | ForkServerContext = (
    multiprocessing.get_context("spawn") if torch.cuda.is_available() else multiprocessing.get_context("forkserver")
)
RANKS.set_forkserver_preload(["rlhpc.training.factory", "rlhpc.training.hf_model", "rlhpc.training.megatron.backend"])
