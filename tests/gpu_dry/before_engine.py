"""What happens before vLLM starts must leave CUDA alone, or vLLM must be told to spawn.

Runs under an interpreter with a CUDA build of torch, on a machine with or without a GPU:
    PYTHONPATH=CHECKOUT python -m tests.gpu_dry.before_engine
Prints what it saw; exit status 1 if CUDA was initialised, or if a forked engine process could not use it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import warnings

import torch

import launch
import rlhpc
from tests.gpu_dry.receivers import dry_config


def main() -> int:
    """Import all of ours, make the engine's profile and arguments as the generator does, look."""
    if torch.version.cuda is None:
        print(f"torch {torch.__version__} is no CUDA build")
        return 1
    warnings.simplefilter("ignore")
    trouble = []
    for package in (rlhpc, launch):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    print(f"torch {torch.__version__}; after all imports: {_state()}")
    trouble += ["an import initialises CUDA"] * torch.cuda.is_initialized()
    from rlhpc.generation.running_core import device_here
    from rlhpc.generation.vllm_start import engine_profile

    device = device_here()
    profile = engine_profile(dry_config(), seed=0, device="cuda")
    os.environ.update(profile.environment)
    from vllm.engine.arg_utils import AsyncEngineArgs

    AsyncEngineArgs(**profile.engine_args)
    method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    print(f"device here: {device}; before the engine starts: {_state()}; vLLM will {method}")
    trouble += ["CUDA is initialised before the engine starts"] * torch.cuda.is_initialized()
    if _is_bad_fork() and method != "spawn":
        trouble.append("a forked engine process could not use CUDA: VLLM_WORKER_MULTIPROC_METHOD must be spawn")
    print("\n".join(f"failed: {each}" for each in trouble) or "passed")
    return int(bool(trouble))


def _state() -> str:
    return f"CUDA initialised {torch.cuda.is_initialized()}, a fork could not use it {_is_bad_fork()}"


def _is_bad_fork() -> bool:
    """What a forked child says of itself."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


if __name__ == "__main__":
    sys.exit(main())
