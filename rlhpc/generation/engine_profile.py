"""Turn a run's configuration into vLLM's engine arguments and environment.

Input: Config.  Output: keyword arguments of AsyncEngineArgs and environment variables.  Pure: reads and sets nothing.
All differences between CPU and CUDA on vLLM's side are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhpc.config import Config
from rlhpc.errors import EngineError

WORKER_EXTENSION = "rlhpc.generation.worker_extension.WeightUpdateExtension"
SEVERAL_WORKERS = "rlhpc.generation.shielded_executor.ShieldedExecutor"
CPU_KV_CACHE_BYTES = 256 << 20
CUDA_BATCHED_TOKENS = 8192  # vLLM's default, 2,048, makes prompts of a batch wait for each other
CPU_BATCHED_TOKENS = 2048  # vLLM's default there
# Its kernels compute whole blocks, and a short sequence pays for all of vLLM's default of 128; long ones lose nothing.
CPU_BLOCK_TOKENS = 32
# vLLM refuses to start where less than gpu_memory_utilization of a GPU is free, and uses it for nothing else when the
# cache's size is given: a trainer on the same GPU may start before, after, or meanwhile.
NEXT_TO_NOTHING = 0.01

COMMON_ENVIRONMENT = {
    # A process that has queried CUDA cannot use it in a forked child.  vLLM forks unless CUDA is initialised; asking
    # whether there is a device does not initialise it.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Compute nodes have no network: fail at once instead of after retries.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    # Two OpenMP threads on a shared node made batch 1 forty times slower; replicas scale better than threads.
    "OMP_NUM_THREADS": "1",
    # vLLM pins a worker to the first core it may use: two engines of one node would fight for it.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Else the first request for log-probabilities compiles for seconds, and every new batch size again.
    "TORCH_COMPILE_DISABLE": "1",
}
CUDA_ENVIRONMENT = {
    # Its sampler is compiled with nvcc, which few nodes have, and says nothing of processed log-probabilities.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # So is its sum over tensor-parallel ranks, vLLM's first choice on Hopper and Blackwell: without nvcc the first
    # small batch ends the engine, since only the making of its memory is tried (flashinfer_all_reduce.py of 0.32).
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
# Kernels whose result for one sequence does not depend on the others of the batch, and so not on when they arrived.
BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
# Otherwise vLLM's CPU platform turns the executor "uni" into "mp", which is one process more.
ONE_WORKER_ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """How to start vLLM."""

    engine_args: dict[str, Any]  # for AsyncEngineArgs
    environment: dict[str, str]  # to be set before vllm is imported
    # Its core runs in this process (core_thread.py).  Not on CUDA: there it has not been tried.
    is_in_process: bool = False


def engine_profile(config: Config, *, seed: int, device: str, is_apart: bool = False) -> EngineProfile:
    """The profile of one replica.  device: "cpu" or "cuda".  is_apart: in processes of its own whatever the device.

    Raises EngineError if run.deterministic=true cannot be kept there.
    """
    is_cpu = device == "cpu"
    environment = dict(COMMON_ENVIRONMENT)
    if config.run.deterministic:
        if is_cpu and config.model.dtype != "float32":
            raise EngineError(
                f"run.deterministic=true with model.dtype={config.model.dtype!r}: on CPU, vLLM's log-probabilities of "
                "a sequence then depend on the others of its batch; legal there: model.dtype='float32'"
            )
        environment |= {} if is_cpu else BATCH_INVARIANT
    environment |= CPU_ENVIRONMENT if is_cpu else CUDA_ENVIRONMENT
    has_one_worker = config.generation.tensor_parallel == 1
    if is_cpu and has_one_worker:
        environment |= ONE_WORKER_ON_CPU
    engine_args = _common_args(config, seed) | (_cpu_args(config) if is_cpu else _cuda_args(config))
    return EngineProfile(engine_args, environment, is_in_process=is_cpu and has_one_worker and not is_apart)


def card_args(profile: EngineProfile, *, capability: int, can_compile: bool) -> dict[str, Any]:
    """Engine arguments in place of the profile's, for what vLLM does not do right by itself on some cards.

    capability: major number of the card's compute capability; 0: none.  can_compile: vLLM's has_flashinfer().
    """
    is_16_bit = profile.engine_args["dtype"] != "float32"
    if capability == 10 and is_16_bit and not can_compile:
        # It would take FlashInfer's attention, whose kernels cannot be had; this is the next on its list.
        return {"attention_backend": "FLASH_ATTN"}
    if capability == 8 and is_16_bit and BATCH_INVARIANT.items() <= profile.environment.items():
        # There its batch-invariant products replace those of cuBLAS, and there is none of 16 bits into float32.
        return {"hf_overrides": {"head_dtype": "model"}}
    return {}


def _common_args(config: Config, seed: int) -> dict[str, Any]:
    generation = config.generation
    args: dict[str, Any] = {
        "model": str(config.model.path.absolute()),
        "dtype": config.model.dtype,
        "seed": seed,
        "max_model_len": generation.max_tokens,
        "max_num_seqs": generation.max_num_seqs,
        "tensor_parallel_size": generation.tensor_parallel,
        # A row that is scored to compare trainer and engine must not wait behind rollouts that wait (vllm_engine.py);
        # among themselves these go in the order of their arrival, as by vLLM's default.
        "scheduling_policy": "priority",
        "enable_prefix_caching": generation.prefix_caching,
        # Tokens in, tokens out: the role handles text.
        "skip_tokenizer_init": True,
        # The distribution that was sampled from, after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        # The checkpoint's generation_config.json must not change how we sample.
        "generation_config": "vllm",
        # The trainer's logits are float32.  Those of a bfloat16 head move log-probabilities, and so every ratio.
        "hf_overrides": {"head_dtype": "float32"},
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "distributed_executor_backend": "uni" if generation.tensor_parallel == 1 else SEVERAL_WORKERS,
    }
    if generation.max_num_batched_tokens is not None:
        args["max_num_batched_tokens"] = generation.max_num_batched_tokens
    return args


def _cpu_args(config: Config) -> dict[str, Any]:
    generation = config.generation
    args: dict[str, Any] = {
        "enforce_eager": True,
        "block_size": CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": generation.kv_cache_bytes or CPU_KV_CACHE_BYTES,
    }
    if config.has_seeded_samples:
        # A prompt that is split over two steps draws a token for its first part, too.  vLLM then turns the request's
        # generator back by an offset, which those of the CPU do not have: the engine dies.  So each is taken whole,
        # and a step has room for one beside all that are running.
        longest = generation.max_tokens
        given = generation.max_num_batched_tokens or CPU_BATCHED_TOKENS
        args |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(given, longest + generation.max_num_seqs),
        }
    return args


def _cuda_args(config: Config) -> dict[str, Any]:
    generation = config.generation
    args: dict[str, Any] = {"enforce_eager": generation.enforce_eager}
    if generation.kv_cache_bytes is None:
        args["gpu_memory_utilization"] = generation.gpu_memory_utilization
    else:
        args |= {"kv_cache_memory_bytes": generation.kv_cache_bytes, "gpu_memory_utilization": NEXT_TO_NOTHING}
    if generation.max_num_batched_tokens is None:
        most = min(CUDA_BATCHED_TOKENS, generation.max_num_seqs * generation.max_tokens)
        args["max_num_batched_tokens"] = max(most, generation.max_num_seqs)
    return args
