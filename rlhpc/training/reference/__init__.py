"""The trainer backend in plain PyTorch, against which the others are tested."""
