"""Load what a trainer would send into vLLM's own model of a large run, on the meta device: names and shapes.

Arguments: run files of configs, without .toml.  Prints one line of JSON for each: parameters of vLLM's model that
nothing was loaded into, with all tensors and with the last one left out.  A shape that vLLM does not expect raises in
its loaders, but for q, k and v, of which it takes the rows that it wants: they are compared with transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from rlhpc.protocol.types import TensorSpec
from rlhpc.training.megatron.hf_layout import tensor_specs
from tests.unit.launch.public_models import CONFIGS, LARGE_RUNS, make_model_directory
from tests.unit.training.megatron.test_megatron_weights import META, maps_of


def not_loaded(directory: Path, specs: Sequence[TensorSpec]) -> list[str]:
    config = config_of(directory)  # anew: layers are entered in it by name
    with set_current_vllm_config(config), META:
        model: Any = initialize_model(config)
        loaded: set[str] = model.load_weights(tensors(specs))
    assert all(parameter.is_meta for parameter in model.parameters())
    return sorted({name for name, _ in model.named_parameters()} - loaded)


def tensors(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    for spec in specs:
        yield spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=META)


def config_of(directory: Path) -> VllmConfig:
    return EngineArgs(
        model=str(directory), dtype="bfloat16", max_model_len=2048, enforce_eager=True
    ).create_engine_config()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        places = {name: make_model_directory(Path(scratch) / name, CONFIGS[LARGE_RUNS[name]]) for name in sys.argv[1:]}
        mixture = next(name for name in places if "num_experts" in CONFIGS[LARGE_RUNS[name]])
        with set_current_vllm_config(config_of(places[mixture])):  # only for a mixture vLLM opens all its groups
            init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        for name, directory in places.items():
            specs = tensor_specs(maps_of(name), "bfloat16")
            print(json.dumps([name, not_loaded(directory, specs), not_loaded(directory, specs[:-1])]), flush=True)


if __name__ == "__main__":
    main()
