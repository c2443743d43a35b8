"""What both programs need that start roles: the launcher of `rlhpc run`, and the wrapper of a Slurm task."""

from __future__ import annotations

LONGEST_TEMPORARY_PATH = 60  # a unix socket's path has 107 bytes, and vLLM's names have 36
