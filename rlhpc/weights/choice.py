"""Choose the weight transport from the placement of trainer and engines, never from how many GPUs a process sees.

Input: weights.transport, the device of the trainer's rank 0, the devices of every engine's workers.  Output: gloo,
nccl or ipc.  A device is "" for the CPU, else a unique name: a GPU's UUID, or its index in CUDA_VISIBLE_DEVICES
if all names belong to one machine; behind it "@" and the process's NCCL_HOSTID, where one is set.  NCCL refuses two
ranks only if GPU and host are the same, IPC needs the same GPU whatever NCCL calls its hosts.  Pure, without torch:
launcher and controller both use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhpc.errors import ConfigError

TRANSPORTS = ("gloo", "nccl", "ipc")
CPU = ""
MIG = "MIG-"  # prefix of NVIDIA's names for GPU partitions
HOST = "@"  # between a GPU and the host of its process


def choose_transport(
    wish: str,
    trainer: str,
    engines: Mapping[str, Sequence[str]],
    *,
    is_one_host: bool = False,
    is_deterministic: bool = False,
) -> str:
    """Resolve "auto", or check the setting.

    On CUDA nccl between GPUs, ipc within one; on CPU ipc on one host, gloo between hosts.
    engines: name → devices of its workers.  is_one_host: all run on one host, and share its memory.
    is_deterministic: run.deterministic, for which vLLM and the trainer set NCCL's algorithms differently, so that a
    communicator of both would hang in its first collective (vllm.utils.nccl): gloo replaces nccl.
    Raises ConfigError, which names all devices, for a setting that cannot work there, and for "auto" if some engines
    share the trainer's GPU and others do not.
    """
    if wish not in ("auto", *TRANSPORTS):
        raise ConfigError(f"weights.transport={wish!r}; legal: auto, {', '.join(TRANSPORTS)}")
    if wish == "gloo":
        return wish
    if wish == "ipc":
        return _ipc(trainer, engines)
    if wish == "nccl":
        if is_deterministic:
            raise ConfigError(
                "weights.transport='nccl' with run.deterministic=true: vLLM's batch-invariant engine and the trainer "
                "set NCCL differently and would wait for each other; legal: auto, gloo, ipc"
            )
        return _nccl(trainer, engines)
    workers = [device for devices in engines.values() for device in devices]
    if trainer == CPU and all(device == CPU for device in workers):
        return "ipc" if is_one_host else "gloo"
    if trainer == CPU or CPU in workers:
        return "gloo"
    if _gpu(trainer) in map(_gpu, workers):
        return _ipc(trainer, engines)
    # NCCL cannot connect two partitions of one GPU, and we cannot tell whether these belong to one.
    is_by_gloo = is_deterministic or any(device.startswith(MIG) for device in (trainer, *workers))
    return "gloo" if is_by_gloo else _nccl(trainer, engines)


def _ipc(trainer: str, engines: Mapping[str, Sequence[str]]) -> str:
    trainer = _gpu(trainer)
    engines = {name: [_gpu(device) for device in devices] for name, devices in engines.items()}
    near = [name for name, devices in engines.items() if trainer in devices]
    apart = [name for name, devices in engines.items() if any(device != trainer for device in devices)]
    if apart:
        raise ConfigError(
            f"weights cannot travel by ipc to {', '.join(apart)}: {' and '.join(['trainer-0', *near])} on "
            f"{_words([trainer])}, {apart[0]} on {_words(engines[apart[0]])}, and {_legal(trainer, engines)}"
        )
    return "ipc"


def _nccl(trainer: str, engines: Mapping[str, Sequence[str]]) -> str:
    owners = {trainer: "trainer-0"}
    for name, devices in engines.items():
        for device in devices:
            if CPU in (device, trainer):
                who = name if device == CPU else "trainer-0"
                raise ConfigError(f"weights.transport='nccl', and {who} is on CPU; legal: auto, gloo")
            if device in owners:
                raise ConfigError(
                    f"weights cannot travel by nccl: {owners[device]} and {name} are both on {_words([device])}, and "
                    f"{_legal(trainer, engines)}"
                )
            owners[device] = name
    if trainer == CPU:
        raise ConfigError("weights.transport='nccl', and trainer-0 is on CPU; legal: auto, gloo")
    return "nccl"


def _legal(trainer: str, engines: Mapping[str, Sequence[str]]) -> str:
    if all(_gpu(device) == _gpu(trainer) for devices in engines.values() for device in devices):
        return "NCCL wants a GPU for each; legal: weights.transport auto, ipc, gloo"
    return (
        "NCCL wants a GPU for each, ipc the same GPU for all; legal: all engines on the trainer's GPU, or none, or "
        "weights.transport='gloo' (slower, through host memory)"
    )


def _words(devices: Sequence[str]) -> str:
    return ", ".join(f"GPU {device}" if device.isdigit() else _gpu(device) or "the CPU" for device in devices)


def _gpu(device: str) -> str:
    return device.partition(HOST)[0]
