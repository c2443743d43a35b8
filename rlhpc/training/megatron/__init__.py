"""The trainer contract on Megatron-Core: every matrix, row, layer and expert may be shared over ranks."""
