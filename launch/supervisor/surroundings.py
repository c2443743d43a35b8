"""What a role finds in its environment: its GPUs, its name as a host, and where compilers write.  Python 3.9."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from launch.run_files.plan_file import Part
from rlhpc.errors import RlhpcError

# Compilers write thousands of small files: on the node, not in a home directory on NFS with a quota of inodes.  Numba
# writes only a few files, beside our source; without them every controller would compile for ten seconds on one core.
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
# Of other vendors: on some sites Slurm sets them along with CUDA_VISIBLE_DEVICES, and libraries obey them.
_FOREIGN = ("ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


class TaskError(RlhpcError):
    """This task cannot start its role."""


def caches_below(directory: Path) -> dict[str, str]:
    """Variable → place, for what compilers write and read again."""
    return {variable: str(directory / name) for variable, name in _CACHES.items()}


def choose_gpus(environment: dict[str, str], part: Part, is_step: bool) -> None:
    """Restrict a task to its share of its component's GPUs on the node.  Raises TaskError if there are too few."""
    for variable in _FOREIGN:
        environment.pop(variable, None)
    if not is_step or part.gpus_per_task == 0:
        return
    shown = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    first = int(environment["SLURM_LOCALID"]) * part.gpus_per_task
    mine = shown[first : first + part.gpus_per_task]
    if len(mine) < part.gpus_per_task:
        raise TaskError(
            f"task {environment['SLURM_LOCALID']} of {part.name} on {socket.gethostname()} needs GPUs {first} to "
            f"{first + part.gpus_per_task - 1} of those that Slurm shows, "
            f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES')!r}"
        )
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def name_host(environment: dict[str, str], job_id: int, component: str) -> None:
    """Make NCCL treat this component's processes on this node as a separate host, unless NCCL_HOSTID is set.

    Where Slurm confines jobs to their GPUs (ConstrainDevices), NCCL would try direct access to a GPU of another job or
    component on the node, and fail; over the network it reaches all.  Empty: NCCL's own way to tell hosts apart.
    """
    # The component too: all of a heterogeneous job have the SLURM_JOB_ID of its leader.
    if not environment.setdefault("NCCL_HOSTID", f"{node_name(environment)}.{job_id}.{component}"):
        del environment["NCCL_HOSTID"]  # as a name, it would make one host of all nodes


def node_name(environment: Mapping[str, str]) -> str:
    """Of this node, as Slurm calls it."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()
