"""GPUs of this machine that a run may use, as entries of CUDA_VISIBLE_DEVICES.

Input: the caller's CUDA_VISIBLE_DEVICES and the output of `nvidia-smi -L`.  Output: one entry per GPU, in CUDA's order.
The caller's entries are passed on unchanged, so that they mean the same to the processes of a run: indices, UUIDs,
parts of a GPU (MIG).  Only a shortened UUID of a GPU is completed: CUDA understands it, but NVML, which vLLM uses, does
not.  Loads no torch and initialises no CUDA.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.doctor.probe import torch_cuda
from launch.plan.gpu_map import VARIABLE, VisibleGpus
from rlhpc.protocol.errors import ConfigError

_GPU = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_QUERY_S = 60.0  # nvidia-smi takes seconds on a node whose driver has gone to sleep


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, as listed by nvidia-smi."""

    uuid: str  # "": not known
    parts: tuple[str, ...] = ()  # UUIDs of MIG instances
    memory_gib: float = 0.0  # of the whole GPU; 0: not known


def gpus_here(environment: Mapping[str, str]) -> VisibleGpus:
    """The GPUs of this machine; none if the installed torch cannot use them.  Raises ConfigError (visible_gpus)."""
    shown = environment.get(VARIABLE)
    machine = _machine() if torch_cuda() else ()
    words = visible_gpus(machine, shown)
    return VisibleGpus(words, shown, memory_of(machine, words))


def visible_gpus(machine: tuple[Gpu, ...], shown: str | None) -> tuple[str, ...]:
    """The words of CUDA_VISIBLE_DEVICES that CUDA uses: those before the first that names no device here.

    Not set: every GPU, by its index, or its MIG instances.  Raises ConfigError for a GPU named twice, for which CUDA
    shows none.
    """
    if shown is None:
        return tuple(word for index, gpu in enumerate(machine) for word in (gpu.parts or (str(index),)))
    words: list[str] = []
    for word in (word.strip() for word in shown.split(",")):
        if not _is_here(word, machine):
            break
        gpu = _by_name(word, machine)
        name = gpu.uuid if gpu else word
        if name in words:
            raise ConfigError(f"{VARIABLE}={shown!r}: {name} is named twice, so that CUDA shows no GPU at all")
        words.append(name)
    return tuple(words)


def parse_listing(listing: str) -> tuple[Gpu, ...]:
    """Parse the output of `nvidia-smi -L`."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        if gpu := _GPU.match(line):
            gpus.append(Gpu(gpu[2]))
        elif (part := _MIG.match(line)) and gpus:
            gpus[-1] = Gpu(gpus[-1].uuid, (*gpus[-1].parts, part[1]))
    return tuple(gpus)


def parse_memory(machine: tuple[Gpu, ...], listing: str) -> tuple[Gpu, ...]:
    """Add the output, in MiB, of `nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader,nounits`."""
    sizes = dict(line.split(", ", 1) for line in listing.splitlines() if ", " in line)
    known = {uuid: float(size) / 1024 for uuid, size in sizes.items() if size.strip().isdecimal()}
    return tuple(replace(gpu, memory_gib=known.get(gpu.uuid, 0.0)) for gpu in machine)


def memory_of(machine: tuple[Gpu, ...], words: tuple[str, ...]) -> dict[str, float]:
    """GiB of each GPU, by its word; not known for MIG instances.

    An index counts in CUDA's order, fastest first, unlike nvidia-smi's: the smallest GPU's memory is assumed.
    """
    smallest = min((gpu.memory_gib for gpu in machine), default=0.0)
    named = {word: _by_name(word, machine) for word in words}
    sizes = {word: smallest if word.isdecimal() else gpu.memory_gib if gpu else 0.0 for word, gpu in named.items()}
    return {word: size for word, size in sizes.items() if size}


def _by_name(word: str, machine: tuple[Gpu, ...]) -> Gpu | None:
    """The whole GPU that a UUID, or the beginning of one, names."""
    return next((gpu for gpu in machine if len(word) > len("GPU-") and gpu.uuid.startswith(word)), None)


def _is_here(word: str, machine: tuple[Gpu, ...]) -> bool:
    if word.isdecimal():
        return int(word) < len(machine)
    names = [name for gpu in machine for name in (gpu.uuid, *gpu.parts)]
    if machine and not any(names):
        return word.startswith(("GPU-", "MIG-"))  # their UUIDs are not known
    old_part = word.startswith("MIG-GPU-") and word.removeprefix("MIG-").partition("/")[0] in names
    return old_part or (len(word) > len("GPU-") and any(name.startswith(word) for name in names))


def _machine() -> tuple[Gpu, ...]:
    """All GPUs; if nvidia-smi is missing or fails, as many as there are device files, which torch may still see."""
    machine = parse_listing(_nvidia_smi("-L"))
    if not machine:
        return _device_files()
    return parse_memory(machine, _nvidia_smi("--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"))


def _nvidia_smi(*words: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi {words[0]} does not answer, so that GPUs cannot be counted: {error}") from error
    return done.stdout if done.returncode == 0 else ""


def _device_files(directory: Path = Path("/dev")) -> tuple[Gpu, ...]:
    return tuple(Gpu("") for file in directory.glob("nvidia*") if file.name.removeprefix("nvidia").isdecimal())
