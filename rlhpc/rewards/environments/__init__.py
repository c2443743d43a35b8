"""Environments of several turns, and the tools of the one that comes with rlhpc."""
