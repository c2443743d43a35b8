from __future__ import annotations

from pathlib import Path

from rlhpc.config import Config
from rlhpc.generation.engine_profile import CPU_KV_CACHE_BYTES, WORKER_EXTENSION, engine_profile


def config_with(**generation: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r", "num_steps": 1},
            "model": {"path": Path("model"), "dtype": "float32"},
            "data": {"path": Path("data"), "task": "math"},
            "generation": {"max_prompt_tokens": 100, "max_completion_tokens": 28, **generation},
            "admission": {"groups_per_step": 1, "group_size": 2},
            "trainer": {"token_budget": 256},
        }
    )


def test_on_cpu_one_worker_runs_inside_the_engine_process() -> None:
    profile = engine_profile(config_with(), seed=7, device="cpu")
    assert profile.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert profile.environment["OMP_NUM_THREADS"] == "1"
    assert profile.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert profile.engine_args["distributed_executor_backend"] == "uni"
    assert profile.engine_args["enforce_eager"] is True
    assert profile.engine_args["kv_cache_memory_bytes"] == CPU_KV_CACHE_BYTES
    assert "gpu_memory_utilization" not in profile.engine_args


def test_on_cuda_memory_is_taken_by_share_and_graphs_are_captured() -> None:
    profile = engine_profile(config_with(gpu_memory_utilization=0.4, tensor_parallel=2), seed=7, device="cuda")
    assert profile.engine_args["gpu_memory_utilization"] == 0.4
    assert profile.engine_args["tensor_parallel_size"] == 2
    assert profile.engine_args["distributed_executor_backend"] == "mp"
    assert profile.engine_args["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in profile.engine_args
    assert "OMP_NUM_THREADS" not in profile.environment
    assert "TORCH_COMPILE_DISABLE" not in profile.environment


def test_a_kv_cache_of_given_size_is_taken_on_both() -> None:
    for device in ("cpu", "cuda"):
        profile = engine_profile(config_with(kv_cache_bytes=12345), seed=0, device=device)
        assert profile.engine_args["kv_cache_memory_bytes"] == 12345


def test_several_workers_on_cpu_are_processes() -> None:
    profile = engine_profile(config_with(tensor_parallel=2), seed=0, device="cpu")
    assert profile.engine_args["distributed_executor_backend"] == "mp"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in profile.environment


def test_what_is_sampled_is_what_is_reported() -> None:
    arguments = engine_profile(config_with(), seed=7, device="cpu").engine_args
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["generation_config"] == "vllm"
    assert arguments["dtype"] == "float32"
    assert arguments["seed"] == 7
    assert arguments["max_model_len"] == 128
    assert arguments["worker_extension_cls"] == WORKER_EXTENSION


def test_nothing_is_looked_for_on_the_network() -> None:
    for device in ("cpu", "cuda"):
        environment = engine_profile(config_with(), seed=0, device=device).environment
        assert environment["HF_HUB_OFFLINE"] == environment["VLLM_NO_USAGE_STATS"] == "1"
