"""The trainer backend in plain PyTorch, by which the others are judged."""
