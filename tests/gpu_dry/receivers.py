"""Classes of foreign objects that our source handles without an annotation, file by file.

An entry that its file does not hold any more is an error (uses.py): the list cannot go stale unseen.
"""

from __future__ import annotations

from typing import Any

from rlhpc.config.rules import Config, with_values
from rlhpc.generation.vllm_start import card_args, engine_profile
from tests.gpu_dry.uses import Receivers

LLM = ("vllm.v1.engine.async_llm.AsyncLLM",)
COMPLETION = ("vllm.outputs.CompletionOutput",)
WORKER = ("vllm.v1.worker.gpu_worker.Worker",)
RUNNERS = ("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "vllm.v1.worker.gpu.model_runner.GPUModelRunner")


def receivers() -> dict[str, Receivers]:
    """By file."""
    nothing: dict[str, Any] = {}
    return {
        "rlhpc/generation/adapter_slot.py": Receivers(
            {
                "runner": RUNNERS,
                "runner.lora_manager": ("vllm.lora.worker_manager.LRUCacheWorkerLoRAManager",),
                "manager": ("vllm.lora.model_manager.LRUCacheLoRAModelManager",),
                "layer": ("vllm.lora.layers.ColumnParallelLinearWithLoRA", "vllm.lora.layers.LogitsProcessorWithLoRA"),
            },
            nothing,
        ),
        "rlhpc/generation/vllm_core.py": Receivers(
            {
                "self._llm": LLM,
                "answer": ("vllm.outputs.RequestOutput",),
                "completion": COMPLETION,
                "flat": ("vllm.logprobs.FlatLogprobs",),
                "vllm_config": ("vllm.config.VllmConfig",),
                "model": ("vllm.config.ModelConfig",),
                "cache": ("vllm.config.CacheConfig",),
            },
            nothing,
        ),
        "rlhpc/generation/vllm_start.py": Receivers({}, {"profile.engine_args": engine_arguments()}),
        "rlhpc/generation/vllm_worker.py": Receivers({"self.model_runner": RUNNERS}, nothing),
        "rlhpc/training/deepspeed/engine.py": Receivers(
            {"get_accelerator()": ("deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator",)}, nothing
        ),
    }


def engine_arguments() -> frozenset[str]:
    """Every keyword that AsyncEngineArgs is given on CUDA."""
    exact = with_values(dry_config(), {"run.deterministic": True})
    profiles = [
        engine_profile(config, seed=0, device="cuda")
        for config in (dry_config(), dry_config(kv_cache_bytes=1 << 30), exact)
    ]
    profiles.append(
        engine_profile(with_values(dry_config(), {"lora.rank": 8}), seed=0, device="cuda", adapted=["lm_head"])
    )
    cards = [card_args(each, capability=major, can_compile=False) for each in profiles for major in range(13)]
    return frozenset(key for given in (*(each.engine_args for each in profiles), *cards) for key in given)


def dry_config(**generation: Any) -> Config:
    """A run that is never started: its model and data are not there."""
    return Config.model_validate(
        {
            "run": {"name": "dry", "directory": "runs/dry", "num_steps": 1},
            "model": {"path": "model"},
            "data": {"path": "data.jsonl", "task": "integer_arithmetic"},
            "admission": {"groups_per_step": 1, "group_size": 2},
            "generation": {"max_prompt_tokens": 8, "max_completion_tokens": 8, "tensor_parallel": 2, **generation},
            "trainer": {"token_budget": 16},
        }
    )
