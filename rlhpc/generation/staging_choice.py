"""Choose how an engine stages new weights: a shadow in host memory, or paused loading (docs/decisions/015).

Pure but for free_host_bytes(), which asks the machine.
"""

from __future__ import annotations

from pathlib import Path

import psutil

SHADOW_SHARE = (
    0.5  # of free host memory that shadows of all engines of a node may take; the trainer's copies come later
)
UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 where there is no limit


def choose_staging(setting: str, *, on_cpu: bool, model_bytes: int, num_shadows: int, free_bytes: int) -> str:
    """ "shadow" or "paused".

    setting: weights.staging.  num_shadows: how many workers of this node may each need one.
    """
    if setting != "auto":
        return setting
    if on_cpu:
        return "shadow"  # the model is in host memory anyway
    return "shadow" if model_bytes * num_shadows <= SHADOW_SHARE * free_bytes else "paused"


def free_host_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory still available to this process: of the machine, or of its cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    for limit, used in _cgroup_limits(proc, groups):
        free = min(free, max(0, limit - used))
    return free


def _cgroup_limits(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """(limit, used) of this process's memory cgroup and of every one above it: Slurm limits the job, not the task."""
    found: list[tuple[int, int]] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        directory = root / path.lstrip("/")
        for each in (directory, *directory.parents):
            if not each.is_relative_to(root):
                break
            found += _limit(each, *names)
    return found


def _limit(directory: Path, limit_name: str, used_name: str) -> list[tuple[int, int]]:
    try:
        limit, used = (directory / limit_name).read_text().strip(), (directory / used_name).read_text().strip()
    except OSError:
        return []
    if not limit.isdigit() or int(limit) > UNLIMITED:
        return []
    return [(int(limit), int(used))]
