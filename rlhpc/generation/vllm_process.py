"""Start and end vLLM with every process that belongs to it.

Input: an EngineProfile.  Output: an AsyncLLM, or the CoreThread used in its place, and the list of its processes.
Nothing survives stop_processes().
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rlhpc.errors import EngineError
from rlhpc.generation.engine_profile import EngineProfile, card_args
from rlhpc.generation.sample_window import SampleWindow
from rlhpc.loading import loading_libraries

log = logging.getLogger("rlhpc.generation")

SHUTDOWN_S = 2.0  # an engine on a GPU takes longer, but has nothing to save; Ctrl-C must end everything within ten
# Of vLLM 0.26's two model runners the one that knows how many tokens each request has.
COUNTING_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SAFE_PATH = "PYTHONSAFEPATH"


def start_vllm(profile: EngineProfile) -> tuple[Any, list[psutil.Process]]:
    """Start an engine; blocks for seconds (CPU) to minutes (CUDA).  Sets the profile's variables in os.environ.

    It has processes of its own, unless the profile says that its core runs in this one (core_thread.py).

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


def _start(profile: EngineProfile, before: set[psutil.Process]) -> tuple[Any, list[psutil.Process]]:
    # vLLM reads its environment while it is imported.
    with loading_libraries():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    if profile.is_in_process:
        with loading_libraries():  # vLLM loads most of itself while it starts, then collects
            import torch._dynamo.config  # has read its environment if somebody has compiled here

            from rlhpc.generation.core_thread import CoreThread

            torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
            return CoreThread.of_vllm(AsyncEngineArgs(**profile.engine_args)), []
    if not hasattr(AsyncLLM, "update_weight_version"):
        set_environment(COUNTING_RUNNER)
    # Never a local variable: failed imports that vLLM keeps hold this frame, and through it the engine,
    # permanently.
    profile = _for_the_card_here(profile)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**profile.engine_args)), _started_since(before)


@contextlib.contextmanager
def _children_search_no_directory() -> Iterator[None]:
    """Of Pythons that start meanwhile: vLLM looks at a model by `python -m`, which would import a random.py here."""
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


def stop_vllm(llm: Any, processes: list[psutil.Process]) -> None:
    """End the engine: by shutdown, then by force.  Blocks for at most a few seconds."""
    try:
        llm.shutdown(timeout=SHUTDOWN_S)
    except Exception:  # whatever it raises, its processes are ended by force
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


def device_here() -> str:
    """ "cuda" where there is a device, else "cpu"."""
    import torch  # takes a second; a part of this module is used without

    return "cuda" if torch.cuda.is_available() else "cpu"


def num_gpus_here() -> int:
    """GPUs of this machine, those that this process may not use included: their engines share the host's memory."""
    return sum(1 for _ in Path("/proc/driver/nvidia/gpus").glob("*"))


def window_of(vllm_config: Any, max_num_seqs: int) -> SampleWindow:
    """The sample window of an engine that has sized its KV cache."""
    cache = vllm_config.cache_config
    return SampleWindow(
        kv_tokens=getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size,
        longest_tokens=vllm_config.model_config.max_model_len,
        max_num_seqs=max_num_seqs,
        block_tokens=cache.block_size,
    )


def _for_the_card_here(profile: EngineProfile) -> EngineProfile:
    # As in start_vllm.  NVML is asked: no CUDA context comes into being in this process.
    from vllm.platforms import current_platform
    from vllm.utils.flashinfer import has_flashinfer

    card = current_platform.get_device_capability()
    others = card_args(profile, capability=card.major if card else 0, can_compile=has_flashinfer())
    return replace(profile, engine_args=profile.engine_args | others)


def _started_since(before: set[psutil.Process]) -> list[psutil.Process]:
    """New descendants of this process; python's resource tracker serves the whole process and stays."""
    return [child for child in set(psutil.Process().children(recursive=True)) - before if not _is_tracker(child)]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return True  # has ended already


def _signal(process: psutil.Process, how: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        getattr(process, how)()
