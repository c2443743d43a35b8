from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhpc.config.rules import Config, with_values
from rlhpc.generation.vllm_start import CPU_KV_CACHE_BYTES, SEVERAL_WORKERS, WORKER_EXTENSION, card_args, engine_profile
from rlhpc.protocol.errors import EngineError


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


def test_on_cpu_one_worker_runs_inside_the_engine_process_and_that_inside_the_generators() -> None:
    profile = engine_profile(config_with(), seed=7, device="cpu")
    assert profile.is_in_process
    assert not engine_profile(config_with(), seed=7, device="cpu", is_apart=True).is_in_process
    assert profile.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert profile.environment["OMP_NUM_THREADS"] == "1"
    assert profile.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert profile.engine_args["distributed_executor_backend"] == "uni"
    assert profile.engine_args["enforce_eager"] is True
    assert profile.engine_args["kv_cache_memory_bytes"] == CPU_KV_CACHE_BYTES
    assert "gpu_memory_utilization" not in profile.engine_args


@pytest.mark.parametrize("key", ["seeded_samples", "deterministic"])
def test_on_cpu_a_prompt_whose_sample_has_a_seed_is_never_split_over_steps(key: str) -> None:
    section = "run" if key == "deterministic" else "generation"
    for given, taken in ((None, 2048), (256, 256), (100, 192)):
        config = config_with(max_num_batched_tokens=given, max_num_seqs=64)
        seeded = with_values(config, {f"{section}.{key}": True})
        arguments = engine_profile(seeded, seed=7, device="cpu").engine_args
        assert arguments["enable_chunked_prefill"] is False
        assert arguments["max_num_batched_tokens"] == taken
        assert "enable_chunked_prefill" not in engine_profile(config, seed=7, device="cpu").engine_args
        assert "enable_chunked_prefill" not in engine_profile(seeded, seed=7, device="cuda").engine_args


def test_on_cuda_memory_is_taken_by_share_and_graphs_are_captured() -> None:
    profile = engine_profile(config_with(gpu_memory_utilization=0.4, tensor_parallel=2), seed=7, device="cuda")
    assert profile.engine_args["gpu_memory_utilization"] == 0.4
    assert profile.engine_args["tensor_parallel_size"] == 2
    assert not profile.is_in_process
    assert not engine_profile(config_with(), seed=7, device="cuda").is_in_process
    assert profile.engine_args["distributed_executor_backend"] == SEVERAL_WORKERS
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
    assert not profile.is_in_process
    assert profile.engine_args["distributed_executor_backend"] == SEVERAL_WORKERS
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


@pytest.mark.starts
def test_no_environment_of_a_user_makes_vllm_fork_its_engine() -> None:
    """A forked child of a process that has asked for CUDA cannot use it; on CPU vLLM spawns whatever it is told."""
    code = (
        "import logging; logging.basicConfig(format='%(message)s');"
        "from rlhpc.generation.vllm_start import COMMON_ENVIRONMENT;"
        "from rlhpc.generation.vllm_start import set_environment; set_environment(COMMON_ENVIRONMENT);"
        "from vllm.utils.system_utils import get_mp_context; print(get_mp_context().get_start_method())"
    )
    environment = os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "spawn"
    assert "VLLM_WORKER_MULTIPROC_METHOD='fork' of the environment is overridden with 'spawn'" in done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_head_computes_in_float32_as_the_trainers_does(device: str) -> None:
    assert engine_profile(config_with(), seed=0, device=device).engine_args["hf_overrides"] == {"head_dtype": "float32"}


def test_a_kv_cache_of_given_size_asks_for_no_share_of_a_gpu_that_the_trainer_may_have_filled() -> None:
    """vLLM refuses to start where less than this share is free, and uses it for nothing else then."""
    shared = engine_profile(config_with(kv_cache_bytes=1 << 30), seed=0, device="cuda").engine_args
    assert shared["gpu_memory_utilization"] <= 0.01
    alone = engine_profile(config_with(), seed=0, device="cuda").engine_args
    assert alone["gpu_memory_utilization"] == 0.9


def test_a_step_takes_eight_thousand_tokens_on_cuda_and_what_the_run_file_says_everywhere() -> None:
    def batched(device: str, **generation: object) -> object:
        arguments = engine_profile(config_with(**generation), seed=0, device=device).engine_args
        return arguments.get("max_num_batched_tokens")

    assert batched("cuda") == 8192
    assert batched("cpu") is None
    assert batched("cuda", max_num_seqs=16) == 16 * 128  # there are no more tokens in all sequences together
    assert batched("cuda", max_num_seqs=9000) == 9000  # each sequence takes one when all decode
    assert batched("cuda", max_num_batched_tokens=1024) == batched("cpu", max_num_batched_tokens=1024) == 1024


def test_a_step_that_does_not_hold_a_token_of_every_sequence_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"generation\.max_num_batched_tokens=100 .* legal: 256 or more"):
        config_with(max_num_batched_tokens=100)


def test_a_deterministic_run_has_kernels_that_do_not_see_the_rest_of_the_batch() -> None:
    config = with_values(config_with(), {"run.deterministic": True})
    assert engine_profile(config, seed=7, device="cuda").environment["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in engine_profile(config, seed=7, device="cpu").environment
    assert "VLLM_BATCH_INVARIANT" not in engine_profile(config_with(), seed=7, device="cuda").environment


def test_on_cpu_a_deterministic_run_is_refused_in_bfloat16() -> None:
    config = with_values(config_with(), {"run.deterministic": True, "model.dtype": "bfloat16"})
    with pytest.raises(EngineError, match=r"model\.dtype='bfloat16'.*legal there: model\.dtype='float32'"):
        engine_profile(config, seed=7, device="cpu")
    engine_profile(config, seed=7, device="cuda")


def test_no_kernel_is_compiled_with_nvcc_which_compute_nodes_lack() -> None:
    environment = engine_profile(config_with(), seed=0, device="cuda").environment
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert environment["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"


@pytest.mark.starts
def test_tensor_parallel_workers_do_not_sum_by_kernels_that_are_compiled_when_first_used() -> None:
    """vLLM asks for this by the variable alone: not whether there is a compiler."""
    code = (
        "from rlhpc.generation.vllm_start import CUDA_ENVIRONMENT;"
        "from rlhpc.generation.vllm_start import set_environment; set_environment(CUDA_ENVIRONMENT);"
        "import vllm.envs as envs; print(envs.VLLM_ALLREDUCE_USE_FLASHINFER, envs.VLLM_USE_FLASHINFER_SAMPLER)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["False", "False"]


def test_blackwell_does_without_the_attention_that_vllm_takes_there_if_its_kernels_cannot_be_compiled() -> None:
    profile = engine_profile(with_values(config_with(), {"model.dtype": "bfloat16"}), seed=0, device="cuda")
    exact = engine_profile(config_with(), seed=0, device="cuda")  # float32, which FlashInfer has no attention for
    assert card_args(profile, capability=10, can_compile=False) == {"attention_backend": "FLASH_ATTN"}
    assert card_args(profile, capability=10, can_compile=True) == {}
    assert card_args(exact, capability=10, can_compile=False) == {}
    for capability in (0, 7, 8, 9, 12):
        assert card_args(profile, capability=capability, can_compile=False) == {}


def test_on_ampere_a_deterministic_run_has_a_head_whose_products_do_not_see_the_rest_of_the_batch() -> None:
    """vLLM has no such product of 16-bit numbers into float32 there."""
    exact = with_values(config_with(), {"run.deterministic": True, "model.dtype": "bfloat16"})
    profile = engine_profile(exact, seed=0, device="cuda")
    assert card_args(profile, capability=8, can_compile=False) == {"hf_overrides": {"head_dtype": "model"}}
    for capability in (9, 10):  # products of cuBLAS, which vLLM keeps from splitting their sums
        assert "hf_overrides" not in card_args(profile, capability=capability, can_compile=True)
    for other in ({"run.deterministic": False}, {"model.dtype": "float32"}):
        profile = engine_profile(with_values(exact, other), seed=0, device="cuda")
        assert card_args(profile, capability=8, can_compile=True) == {}


@pytest.mark.starts
def test_batch_invariant_products_of_vllm_still_leave_out_the_one_of_16_bits_into_float32() -> None:
    """Once it has one, card_args need not change the head."""
    code = (
        "import inspect; from vllm.model_executor.determinism import batch_invariant as b;"
        "from vllm.model_executor.layers.logits_processor import LogitsProcessor as L;"
        "print('aten::mm.dtype' in inspect.getsource(b), 'out_dtype=self.head_dtype' in inspect.getsource(L))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["False", "True"]


@pytest.mark.starts
def test_vllm_takes_the_name_of_that_attention_and_asks_for_flashinfers_compiler_where_we_do(tmp_path: Path) -> None:
    code = (  # the model is a directory: another one is looked for on a hub, or refused offline
        "from vllm.engine.arg_utils import AsyncEngineArgs; from vllm.config.attention import AttentionConfig;"
        "from vllm.utils.flashinfer import has_flashinfer; from vllm.platforms import current_platform;"
        "assert not has_flashinfer() and current_platform.get_device_capability() is None;"
        f"AsyncEngineArgs(model='{tmp_path}', attention_backend='FLASH_ATTN');"
        "print(AttentionConfig(backend='FLASH_ATTN').backend.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "FLASH_ATTN"


def test_a_cpus_blocks_are_short_and_a_gpus_are_vllms_choice() -> None:
    """A CPU's kernels compute whole blocks, which short sequences would pay for."""
    config = config_with()
    assert engine_profile(config, seed=0, device="cpu").engine_args["block_size"] == 32
    assert "block_size" not in engine_profile(config, seed=0, device="cuda").engine_args
