"""Our modules of Triton kernels if Triton works, else None: torch's own operations give the same results.

Input: the name of a module here, and a tensor that its kernels would read.  Only a trial shows whether Triton is
installed and can compile for this GPU, so that every module has a function try_out(device, dtype).
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("rlhpc.training")


def kernels_for(module: str, tensor: Tensor) -> Any:
    """The module, or None on CPU, and if its trial failed, which is logged once."""
    return compiled_kernels(module, tensor.device, tensor.dtype) if tensor.is_cuda else None


@cache
def compiled_kernels(module: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The module if its kernels compile for this device, else None."""
    try:
        return _tried_out(module, device, dtype)
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # nothing is lost but time
        log.warning("training without %s, since Triton does not work here: %s", module, error)
        return None


def _tried_out(module: str, device: torch.device, dtype: torch.dtype) -> Any:
    kernels = import_module(f"rlhpc.training.{module}")
    try:
        kernels.try_out(device, dtype)
    # A kernel does not compile; libcuda.so is not where Triton looks for it, as in many containers; no compiler.
    except (import_module("triton.errors").TritonError, AssertionError, SubprocessError) as error:
        raise RuntimeError(str(error)) from error
    return kernels
