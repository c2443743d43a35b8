"""The trainer contract on Megatron-Core: every matrix, row, layer and expert may be sharded over ranks."""
