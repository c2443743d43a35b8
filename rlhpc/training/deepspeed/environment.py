"""The environment variables that DeepSpeed insists on, for as long as it reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SET_BY_IMPORT = "PYTORCH_NVML_BASED_CUDA_CHECK"  # by deepspeed; it changes how torch looks for GPUs


@contextmanager
def accelerator_environment(device: torch.device) -> Iterator[None]:
    """Set the variables for DeepSpeed's accelerator and this rank's device; restore them afterwards."""
    wanted = {"LOCAL_RANK": str(device.index or 0)}
    if device.type == "cpu":
        wanted["DS_ACCELERATOR"] = "cpu"  # also where there is a GPU
    before = {name: os.environ.get(name) for name in (*wanted, SET_BY_IMPORT)}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
