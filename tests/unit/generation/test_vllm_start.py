"""Arguments and environment that an engine is started with, and how long it is waited for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from vllm.config.lora import MaxLoRARanks

from rlhpc.config.rules import Config, with_values
from rlhpc.generation import engine
from rlhpc.generation.engine import EngineSilent, answered, comes
from rlhpc.generation.factory import engine_seed, service_settings
from rlhpc.generation.vllm_start import CPU_KV_CACHE_BYTES, SEVERAL_WORKERS, WORKER_EXTENSION, card_args, engine_profile
from rlhpc.models.adapter import ENGINE_RANKS
from rlhpc.protocol.errors import EngineError
from tests import build

# ------------------------------------------------------------------------------------------------------------- profiles


def config_with(**generation: object) -> Config:
    return build.config(
        model={"dtype": "float32"},
        generation={"max_prompt_tokens": 100, "max_completion_tokens": 28, **generation},
        admission={"groups_per_step": 1},
        trainer={"token_budget": 256},
    )


def test_on_cpu_one_worker_runs_inside_the_engine_process_and_that_inside_the_generators() -> None:
    profile = engine_profile(config_with(), seed=7, device="cpu")
    assert profile.is_in_process
    assert not engine_profile(config_with(), seed=7, device="cpu", is_apart=True).is_in_process
    assert profile.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert profile.environment["OMP_NUM_THREADS"] == "1"
    assert profile.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "gpu_memory_utilization" not in profile.engine_args


def test_an_engine_of_a_service_has_the_services_model_and_sizes_and_nothing_of_the_policys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 200}')
    sizes = {"kv_cache_bytes": 1 << 30, "tensor_parallel": 2, "max_num_seqs": 40, "dtype": "bfloat16"}
    services = [{"name": kind, "kind": kind, "path": str(tmp_path), **sizes} for kind in ("teacher", "judge", "reward")]
    config = with_values(config_with(num_replicas=3), {"lora.rank": 8, "weights.staging": "paused"})
    config = config.model_copy(update={"service": build.config(service=services).service})
    wanted = {"teacher": (129, 2048), "judge": (200, 8000), "reward": (200, 8192)}  # longest sequence, tokens of a step
    for service in config.service:
        arguments = engine_profile(service_settings(config, service), seed=7, device="cuda").engine_args
        assert (arguments["model"], arguments["dtype"]) == (str(tmp_path), "bfloat16")
        assert (arguments["max_model_len"], arguments["max_num_batched_tokens"]) == wanted[service.kind]
        assert (arguments["tensor_parallel_size"], arguments["max_num_seqs"]) == (2, 40)
        assert arguments["distributed_executor_backend"] == SEVERAL_WORKERS
        assert (arguments["kv_cache_memory_bytes"], arguments["gpu_memory_utilization"]) == (1 << 30, 0.01)
        assert arguments["max_logprobs"] == -1
        assert "enable_lora" not in arguments
        assert service_settings(config, service).weights.staging == "auto"
    given = config.service[0].model_copy(update={"max_tokens": 500, "kv_cache_bytes": None})
    arguments = engine_profile(service_settings(config, given), seed=7, device="cuda").engine_args
    assert arguments["max_model_len"] == 501  # as the run file says, whether or not the model has room
    assert arguments["gpu_memory_utilization"] == 0.9


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (200, 256), (320, 320), (512, 512)])
def test_an_engine_of_adapters_has_room_for_their_rank_in_the_layers_that_have_one(rank: int, room: int) -> None:
    config, layers = with_values(config_with(), {"lora.rank": rank}), [f"model.layers.{n}.mlp.up_proj" for n in "01"]
    assert set(ENGINE_RANKS) <= set(get_args(MaxLoRARanks))
    for device in ("cpu", "cuda"):
        arguments = engine_profile(config, seed=7, device=device, adapted=[*layers, "lm_head"]).engine_args
        assert arguments["enable_lora"] is True
        assert (arguments["max_lora_rank"], arguments["max_loras"]) == (room, 1)
        assert arguments["lora_target_modules"] == ["lm_head", "up_proj"]
        assert not any("lora" in key for key in engine_profile(config, seed=7, device=device).engine_args)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_sampled_is_what_is_reported_and_nothing_is_looked_for_on_the_network(device: str) -> None:
    profile = engine_profile(config_with(kv_cache_bytes=12345), seed=7, device=device)
    expected = {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "dtype": "float32",
        "seed": 7,
        "max_model_len": 128,
        "worker_extension_cls": WORKER_EXTENSION,
        "hf_overrides": {"head_dtype": "float32"},  # as the trainer's head computes
        "kv_cache_memory_bytes": 12345,
        "enforce_eager": device == "cpu",
        "distributed_executor_backend": "uni",
    }
    if device == "cpu":
        expected["block_size"] = 32  # its kernels compute whole blocks, which short sequences would pay for
    else:
        assert "block_size" not in profile.engine_args
        for variable in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER"):
            assert profile.environment[variable] == "0"  # compiled with nvcc, which compute nodes lack
    assert {name: profile.engine_args[name] for name in expected} == expected
    assert profile.environment["HF_HUB_OFFLINE"] == profile.environment["VLLM_NO_USAGE_STATS"] == "1"


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


def test_on_cpu_the_heads_of_models_with_latents_are_turned_by_pytorch() -> None:
    for device, model, is_so in (
        ("cpu", {"kv_lora_rank": 512}, True),
        ("cuda", {"kv_lora_rank": 512}, False),
        ("cpu", {}, False),
    ):
        arguments = engine_profile(config_with(), seed=7, device=device, model=model).engine_args
        assert ("compilation_config" in arguments) is is_so


def test_on_cuda_memory_is_taken_by_share_and_graphs_are_captured() -> None:
    profile = engine_profile(config_with(gpu_memory_utilization=0.4, tensor_parallel=2), seed=7, device="cuda")
    assert (
        engine_profile(config_with(), seed=7, device="cpu").engine_args["kv_cache_memory_bytes"] == CPU_KV_CACHE_BYTES
    )
    assert profile.engine_args["gpu_memory_utilization"] == 0.4
    assert profile.engine_args["tensor_parallel_size"] == 2
    assert not profile.is_in_process
    assert not engine_profile(config_with(), seed=7, device="cuda").is_in_process
    assert profile.engine_args["distributed_executor_backend"] == SEVERAL_WORKERS
    assert "kv_cache_memory_bytes" not in profile.engine_args
    assert "OMP_NUM_THREADS" not in profile.environment
    assert "TORCH_COMPILE_DISABLE" not in profile.environment


def test_several_workers_on_cpu_are_processes() -> None:
    profile = engine_profile(config_with(tensor_parallel=2), seed=0, device="cpu")
    assert not profile.is_in_process
    assert profile.engine_args["distributed_executor_backend"] == SEVERAL_WORKERS
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in profile.environment


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


ASK_VLLM = """
import inspect, logging, sys
logging.basicConfig(format="%(message)s")
from rlhpc.generation.vllm_start import COMMON_ENVIRONMENT, CUDA_ENVIRONMENT, set_environment
set_environment(COMMON_ENVIRONMENT | CUDA_ENVIRONMENT)
from vllm.utils.system_utils import get_mp_context
import vllm.envs as envs
from vllm.config.attention import AttentionConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer
assert not has_flashinfer() and current_platform.get_device_capability() is None
AsyncEngineArgs(model=sys.argv[1], attention_backend="FLASH_ATTN")  # a directory: another one is looked for on a hub
print(get_mp_context().get_start_method(), envs.VLLM_ALLREDUCE_USE_FLASHINFER, envs.VLLM_USE_FLASHINFER_SAMPLER,
      "aten::mm.dtype" in inspect.getsource(batch_invariant),
      "out_dtype=self.head_dtype" in inspect.getsource(LogitsProcessor),
      AttentionConfig(backend="FLASH_ATTN").backend.name)
"""


@pytest.mark.starts
def test_vllm_takes_what_we_tell_it_and_lacks_what_we_work_around(tmp_path: Path) -> None:
    """It spawns its engine whatever a user's environment says: a forked child of a process that has asked for CUDA
    cannot use it.  It sums by no kernels that are compiled when first used, and knows the attention that replaces
    FlashInfer's.  Its batch-invariant products lack the one of 16 bits into float32: else card_args need not change
    the head.
    """
    environment = os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    command = [sys.executable, "-c", ASK_VLLM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-6:] == ["spawn", "False", "False", "False", "True", "FLASH_ATTN"]
    assert "VLLM_WORKER_MULTIPROC_METHOD='fork' of the environment is overridden with 'spawn'" in done.stderr


# --------------------------------------------------------------------------------------------------------- engine seeds
#
# Engines of neighbouring runs and replicas have nothing in common.


def test_no_two_replicas_of_neighbouring_runs_share_a_seed() -> None:
    seeds = {engine_seed(run_seed, replica) for run_seed in range(100) for replica in range(64)}
    assert len(seeds) == 6400
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_never_changes_with_a_release() -> None:
    assert engine_seed(1, 0) == 282334712


# ------------------------------------------------------------------------------------------------- answers of an engine


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ANSWER_S", 0.5)


async def test_an_answer_comes_through_and_so_does_an_error() -> None:
    async def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert await answered(asyncio.sleep(0.05, "done"), 0.0) == "done"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await answered(fail(), 0.0)


async def test_who_does_not_answer_is_given_up_and_asked_no_longer() -> None:
    asked = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineSilent, match=r"no answer within 0\.5 s"):
        await answered(asked, 0.0)
    await asyncio.sleep(0)
    assert asked.cancelled()


async def test_an_engine_may_wait_as_long_as_a_broadcast_takes() -> None:
    assert await answered(asyncio.sleep(0.7, "done"), 10.0) == "done"


async def test_a_pause_of_this_process_is_no_silence_of_the_engine() -> None:
    asked = asyncio.ensure_future(answered(asyncio.sleep(0.2, "done"), 0.0))
    await asyncio.sleep(0.01)
    time.sleep(1.0)  # noqa: ASYNC251 - as after SIGSTOP: time has passed, and nothing has run
    assert await asked == "done"


async def test_who_stops_waiting_stops_asking() -> None:
    asked = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(answered(asked, 0.0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert asked.cancelled()


async def test_an_event_comes_or_not_and_a_cancellation_at_the_same_moment_is_heard() -> None:
    """A loop that had not heard it would go on for ever, and its task group wait for it."""
    event = asyncio.Event()
    assert not await comes(event, 0.01)
    waiting = asyncio.ensure_future(comes(event, 60.0))
    await asyncio.sleep(0.01)
    event.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await comes(event, 0.01)
