"""Can the GPUs of a node run the torch that is installed there?  Driver, architecture, compiler.  Pure.

Input: a probe's report.  Output: Findings.  The tables are NVIDIA's and torch's; they are consulted only where
nvidia-smi lists GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launch.checks.finding import Finding, Verdict
from launch.plan.jobs import Component
from rlhpc.config import Config

LEAST_DRIVER = {13: 580, 12: 525, 11: 450}  # by CUDA's major release, minor versions being compatible
OLDEST_ARCHITECTURE = {13: (7, 5), 12: (7, 0), 11: (5, 0)}  # what CUDA 13 still compiles for: V100 (sm_70) is out
NEWEST_ARCHITECTURE = (12, 1)
BFLOAT16_ARCHITECTURE = (8, 0)
# GeForce and TITAN cards refuse the compatibility package (error 803); all others are let through.
_CONSUMER = re.compile(r"GeForce|TITAN|\bGTX\b", re.IGNORECASE)


def judge_gpu_software(key: str, ready: dict[str, Any], component: Component, config: Config | None) -> list[Finding]:
    """Findings of one node; nothing for a CPU build of torch, which is reported elsewhere."""
    release = re.match(r"(\d+)\.", ready.get("torch_cuda") or "")
    if not ready.get("gpus") or release is None:
        return []
    cuda = int(release[1])
    dtype = config.model.dtype if config is not None else None
    return [
        *_driver(f"{key}: driver", ready, cuda),
        *_architecture(f"{key}: architecture", ready, cuda, dtype),
        *_compiler(f"{key}: compiler", ready, component, config),
    ]


def _driver(key: str, ready: dict[str, Any], cuda: int) -> Iterator[Finding]:
    needed, text = LEAST_DRIVER.get(cuda), f"{ready.get('driver') or '?'}; torch is for CUDA {ready['torch_cuda']}"
    kernel, library = _major(ready.get("driver")), _major(ready.get("cuda_library"))
    if needed is None or kernel is None:
        yield Finding(
            key,
            "",
            "warn",
            f"{text}: not known whether they are compatible",
            "try `python -c 'import torch; torch.ones(1).cuda()'`",
        )
    elif kernel >= needed:
        yield Finding(key, "", "pass", text)
    elif library is not None and library >= needed:
        text = f"{text}, which needs {needed}; LD_LIBRARY_PATH has libcuda {ready['cuda_library']} before it"
        is_told = ready.get("vllm_compatibility") == "1"
        remedy = (
            "" if is_told else 'prologue.environment.VLLM_ENABLE_CUDA_COMPATIBILITY = "1", or vLLM may take the old one'
        )
        yield Finding(key, "", "pass" if is_told else "warn", text, remedy)
    else:
        text = f"{text}, which needs {needed} or newer"
        newer = f"a driver {needed} or newer (ask the site)"
        if _CONSUMER.search(ready["gpus"][0]):
            yield Finding(key, "", "fail", text, f"legal: {newer}; or a torch and vLLM for an older CUDA")
        else:
            compatible = "CUDA's compatibility package before Python starts, docs/gpu.md, Old drivers"
            yield Finding(key, "", "fail", text, f"legal: {newer}; {compatible}")


def _architecture(key: str, ready: dict[str, Any], cuda: int, dtype: str | None) -> Iterator[Finding]:
    found = [_capability(text) for text in ready.get("compute_capabilities") or ()]
    known = sorted(each for each in found if each is not None)
    oldest = OLDEST_ARCHITECTURE.get(cuda, (0, 0))
    if not known:
        yield Finding(key, "", "warn", "not reported by nvidia-smi", f"{_sm(oldest)} or newer is needed")
        return
    text = ", ".join(dict.fromkeys(_sm(each) for each in known))
    if known[0] < oldest:
        text = f"{text}: torch for CUDA {ready['torch_cuda']} has no kernels for it"
        yield Finding(key, "", "fail", text, f"legal: {_sm(oldest)} (T4, RTX 20) or newer; V100 is {_sm((7, 0))}")
    elif known[0] < BFLOAT16_ARCHITECTURE:
        verdict: Verdict = "fail" if dtype == "bfloat16" else "warn"
        text = f"{text}: neither bfloat16 nor the flash kernels of a trainer"
        yield Finding(
            key, "", verdict, text, f"legal: {_sm(BFLOAT16_ARCHITECTURE)} (A100, RTX 30) or newer for bfloat16"
        )
    elif known[-1] > NEWEST_ARCHITECTURE:
        yield Finding(key, "", "warn", f"{text}: newer than the wheels were built for", "a newer torch and vLLM")
    else:
        yield Finding(key, "", "pass", text)


def _compiler(key: str, ready: dict[str, Any], component: Component, config: Config | None) -> Iterator[Finding]:
    compiler, has_headers = ready.get("compiler") or "", ready.get("has_python_headers", False)
    missing = ["a C compiler"] * (not compiler) + ["Python.h"] * (not has_headers)
    if not missing:
        yield Finding(key, "", "pass", f"{compiler}, Python.h")
        return
    needs = component.name == "generation" and (config is None or config.generation.engine == "vllm")
    text = f"not on {ready['node']}: {' and '.join(missing)}; Triton compiles its launchers when a kernel first runs"
    remedy = "legal: a module with gcc in [prologue]; Python's headers: python3-dev, or a Python of uv or conda"
    yield Finding(key, "", "fail" if needs else "warn", text, remedy)


def _major(version: str | None) -> int | None:
    found = re.match(r"\d+", version or "")
    return int(found[0]) if found else None


def _capability(text: str) -> tuple[int, int] | None:
    """(9, 0) of "9.0"."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text.strip())
    return (int(found[1]), int(found[2])) if found else None


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
