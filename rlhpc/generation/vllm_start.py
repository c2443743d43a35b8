"""Start and end vLLM with every process that belongs to it.

Input: an EngineProfile.  Output: a RunningCore (running_core.py), and the list of its processes.
Nothing survives stop_processes().
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from rlhpc.base.native import loading_libraries
from rlhpc.config.rules import Config
from rlhpc.generation.running_core import RunningCore, device_here
from rlhpc.generation.text_models import text_args
from rlhpc.generation.vllm_core import CoreProcesses, VllmSteps
from rlhpc.models.adapter import projection_of, room_for
from rlhpc.models.weights import is_mxfp4
from rlhpc.protocol.errors import EngineError

# ------------------------------------------------------------------------------------------------------- engine profile
#
# Turn a run's configuration into vLLM's engine arguments and environment.
#
# Input: Config.  Output: keyword arguments of AsyncEngineArgs and environment variables.  Pure: reads and sets nothing.
# All differences between CPU and CUDA in vLLM's settings are here.


WORKER_EXTENSION = "rlhpc.generation.vllm_worker.VllmWorkerExtension"
FOUR_BITS, MXFP4 = "rlhpc_nf4", "rlhpc_mxfp4"  # load formats of adapter_slot.py
SEVERAL_WORKERS = "rlhpc.generation.vllm_worker.ShieldedExecutor"
CPU_KV_CACHE_BYTES = 256 << 20
CUDA_BATCHED_TOKENS = 8192  # vLLM's default, 2,048, makes prompts of a batch wait for each other
CPU_BATCHED_TOKENS = 2048  # vLLM's default there
# CPU kernels compute whole blocks: a short sequence pays for all of vLLM's default of 128; long ones lose nothing.
CPU_BLOCK_TOKENS = 32
# vLLM refuses to start if less than gpu_memory_utilization of a GPU is free, and uses the value for nothing else if the
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
    # FlashInfer's sampler needs nvcc, which few nodes have, and does not return processed log-probabilities.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # So does its all-reduce, vLLM's first choice on Hopper and Blackwell: without nvcc the first small batch ends the
    # engine, since vLLM only tries to allocate its workspace (flashinfer_all_reduce.py of 0.32).
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
# Kernels whose result for a sequence does not depend on the rest of the batch, and so not on arrival times.
BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
# Otherwise vLLM's CPU platform turns the executor "uni" into "mp", which is one process more.
ONE_WORKER_ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """vLLM's engine arguments and environment."""

    engine_args: dict[str, Any]  # for AsyncEngineArgs
    environment: dict[str, str]  # to be set before vllm is imported
    # The core runs in this process (vllm_core.py).  Not on CUDA, where it has not been tried.
    is_in_process: bool = False


def engine_profile(
    config: Config,
    *,
    seed: int,
    device: str,
    is_apart: bool = False,
    adapted: Iterable[str] = (),
    num_adapters: int = 1,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> EngineProfile:
    """The profile of one replica.  device: "cpu" or "cuda".  is_apart: in processes of its own on any device.

    adapted: modules with adapters, of which it holds num_adapters at once.  model: content of config.json.
    Raises EngineError if run.deterministic=true is impossible on the device.
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
    if names := sorted({(projection_of(name).rpartition(".")[0] or name).rpartition(".")[2] for name in adapted}):
        engine_args |= _adapter_args(config, names, num_adapters)
        if config.lora.quantization != "off":
            engine_args["load_format"] = FOUR_BITS
    if is_cpu and model.get("kv_lora_rank"):
        # vLLM's kernel for CPUs turns the wrong numbers of queries that are a part of each head, as beside latents.
        engine_args["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    if is_mxfp4(model):
        engine_args["load_format"] = MXFP4
        engine_args["hf_overrides"] = {**engine_args["hf_overrides"], "quantization_config": None}
    return EngineProfile(engine_args, environment, is_in_process=is_cpu and has_one_worker and not is_apart)


def card_args(profile: EngineProfile, *, capability: int, can_compile: bool) -> dict[str, Any]:
    """Engine arguments that correct vLLM's own choices on some cards.

    capability: major number of the card's compute capability; 0: none.  can_compile: vLLM's has_flashinfer().
    """
    is_16_bit = profile.engine_args["dtype"] != "float32"
    if capability == 10 and is_16_bit and not can_compile:
        # vLLM would take FlashInfer's attention, whose kernels cannot be compiled here; this is the next on its list.
        return {"attention_backend": "FLASH_ATTN"}
    if capability == 8 and is_16_bit and BATCH_INVARIANT.items() <= profile.environment.items():
        # On these cards batch-invariant products replace those of cuBLAS, and none multiplies 16 bits into float32.
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
        # A row that is scored to compare trainer and engine must not wait behind queued rollouts (vllm_engine.py);
        # rollouts keep the order of their arrival, vLLM's default.
        "scheduling_policy": "priority",
        "enable_prefix_caching": generation.prefix_caching,
        # Tokens in, tokens out: the role handles text.
        "skip_tokenizer_init": True,
        # Log-probabilities of the sampling distribution, after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        # The checkpoint's generation_config.json must not change how we sample.
        "generation_config": "vllm",
        # The trainer's logits are float32.  Those of a bfloat16 head would shift log-probabilities, and so every ratio.
        "hf_overrides": {"head_dtype": "float32"},
        "worker_extension_cls": WORKER_EXTENSION,
        # A teacher is asked for as many as the run wants.
        "max_logprobs": -1,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "distributed_executor_backend": "uni" if generation.tensor_parallel == 1 else SEVERAL_WORKERS,
    }
    if generation.max_num_batched_tokens is not None:
        args["max_num_batched_tokens"] = generation.max_num_batched_tokens
    return args


def _adapter_args(config: Config, names: list[str], num_adapters: int) -> dict[str, Any]:
    """Engine arguments for adapters; names: last parts of adapted layers' names in vLLM; no other layer pays."""
    rank = room_for(config.lora.rank)
    return {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": rank, "lora_target_modules": names}


def _cpu_args(config: Config) -> dict[str, Any]:
    generation = config.generation
    args: dict[str, Any] = {
        "enforce_eager": True,
        "block_size": CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": generation.kv_cache_bytes or CPU_KV_CACHE_BYTES,
    }
    if config.has_seeded_samples:
        # vLLM draws a token also for the first part of a prompt that is split over two steps, and then rewinds the
        # request's random generator by an offset, which CPU generators lack: the engine dies.  So prompts are not
        # split, and a step has room for one beside all running requests.
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
    if config.algorithm.routing_replay:
        args["enable_return_routed_experts"] = True
    if generation.kv_cache_bytes is None:
        args["gpu_memory_utilization"] = generation.gpu_memory_utilization
    else:
        args |= {"kv_cache_memory_bytes": generation.kv_cache_bytes, "gpu_memory_utilization": NEXT_TO_NOTHING}
    if generation.max_num_batched_tokens is None:
        most = min(CUDA_BATCHED_TOKENS, generation.max_num_seqs * generation.max_tokens)
        args["max_num_batched_tokens"] = max(most, generation.max_num_seqs)
    return args


# --------------------------------------------------------------------------------------------------------- vllm process


log = logging.getLogger("rlhpc.generation")

SHUTDOWN_S = 2.0  # an engine on a GPU takes longer, but has nothing to save; Ctrl-C must end everything within ten
# The one of vLLM 0.26's two model runners that was tried on GPUs; later vLLMs have versions of weights.
TRIED_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SAFE_PATH = "PYTHONSAFEPATH"


def start_vllm(profile: EngineProfile) -> tuple[RunningCore, list[psutil.Process]]:
    """Start an engine; blocks for seconds (CPU) to minutes (CUDA).  Sets the profile's variables in os.environ.

    The engine has processes of its own, unless profile.is_in_process.

    Must run on the main thread: the engine's process is set to die with the thread that started it.
    Raises EngineError if the engine does not start; its processes are gone then.
    """
    set_environment(profile.environment)
    before = set(psutil.Process().children(recursive=True))
    try:
        with _children_search_no_directory():
            return _start(profile, before)
    except Exception as error:  # any error at all leaves an engine process without an owner
        stop_processes(_started_since(before))
        raise EngineError(f"vLLM did not start: {error}") from error


def _start(profile: EngineProfile, before: set[psutil.Process]) -> tuple[RunningCore, list[psutil.Process]]:
    # vLLM reads its environment while it is imported.
    with loading_libraries():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    if profile.is_in_process:
        with loading_libraries():  # vLLM loads most of itself while it starts, then collects
            import torch._dynamo.config  # may have read its environment already

            torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
            return VllmSteps.on_a_thread(AsyncEngineArgs(**_with_text_alone(profile).engine_args)), []
    if not hasattr(AsyncLLM, "update_weight_version"):
        set_environment(TRIED_RUNNER)
    # Never a local variable: failed imports that vLLM keeps hold this frame, and through it the engine,
    # permanently.
    profile = _with_text_alone(_for_the_card_here(profile))
    return CoreProcesses(AsyncLLM.from_engine_args(AsyncEngineArgs(**profile.engine_args))), _started_since(before)


@contextlib.contextmanager
def _children_search_no_directory() -> Iterator[None]:
    """Keep child Pythons from importing a random.py of this directory: vLLM inspects a model by `python -m`."""
    theirs = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if theirs is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = theirs


def set_environment(environment: Mapping[str, str]) -> None:
    """Set what an engine needs, whatever the user's shell has set; each overridden variable is logged."""
    for name, value in environment.items():
        theirs = os.environ.get(name)
        if theirs not in (None, value):
            log.warning("%s=%r of the environment is overridden with %r for the engine", name, theirs, value)
        os.environ[name] = value


def stop_vllm(llm: RunningCore, processes: list[psutil.Process]) -> None:
    """End the engine: by shutdown, then by force.  Blocks for at most a few seconds."""
    try:
        llm.shutdown(timeout=SHUTDOWN_S)
    except Exception:  # any error: its processes are then ended by force
        log.warning("vLLM did not shut down cleanly", exc_info=True)
    stop_processes(processes)


def stop_processes(processes: list[psutil.Process]) -> None:
    """Terminate, then kill, by process id (and start time: a reused id is not ours)."""
    for process in processes:
        _signal(process, "terminate")
    _, alive = psutil.wait_procs(processes, timeout=SHUTDOWN_S)
    for process in alive:
        _signal(process, "kill")
    psutil.wait_procs(alive, timeout=SHUTDOWN_S)


def _for_the_card_here(profile: EngineProfile) -> EngineProfile:
    # As in start_vllm.  Uses NVML: no CUDA context is created in this process.
    from vllm.platforms import current_platform
    from vllm.utils.flashinfer import has_flashinfer

    card = current_platform.get_device_capability()
    others = card_args(profile, capability=card.major if card else 0, can_compile=has_flashinfer())
    return replace(profile, engine_args=profile.engine_args | others)


def _with_text_alone(profile: EngineProfile) -> EngineProfile:
    given = profile.engine_args
    args = text_args(
        Path(given["model"]), dtype=given["dtype"], device=device_here(), is_in_process=profile.is_in_process
    )
    overrides = profile.engine_args.get("hf_overrides", {}) | args.get("hf_overrides", {})
    return replace(profile, engine_args=profile.engine_args | args | {"hf_overrides": overrides})


def _started_since(before: set[psutil.Process]) -> list[psutil.Process]:
    """New descendants of this process, without Python's resource tracker, which serves the whole process."""
    return [child for child in set(psutil.Process().children(recursive=True)) - before if not _is_tracker(child)]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return True  # has ended already


def _signal(process: psutil.Process, how: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        getattr(process, how)()
