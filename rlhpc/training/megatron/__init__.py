"""The trainer contract on Megatron-Core: every matrix, row, layer and expert may be sharded over ranks.

Importing anything of this package loads Megatron.
"""

from rlhpc.training.megatron.cpu import load_megatron

load_megatron()
