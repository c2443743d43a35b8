"""Evaluations of checkpoints beside a run or after it: `rlhpc evaluate`."""
