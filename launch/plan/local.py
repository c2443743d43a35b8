"""What `rlhpc run` starts on this machine, as the JSON that its supervisor reads (launch/run_files/plan_file.py).

Input: Config, the map of GPUs.  Output: text.  The same components as a Slurm job has, each process beside the
supervisor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.plan.gpu_map import GpuMap
from launch.plan.processes import NO_GPU, ROLE_ENVIRONMENT, process_names, shares_of, thread_defaults, trainer_threads
from launch.plan.site_file import ClusterConfig
from launch.run_files.plan_file import LOCAL, Limits, Share, plan_text
from rlhpc.config import Config
from rlhpc.run_layout import RunLayout

STALL_S = 6 * 3600.0  # without a step: a large model on one GPU takes more than an hour for one, and a user is watching


def local_plan_document(
    config: Config,
    layout: RunLayout,
    gpus: GpuMap,
    max_retries: int,
    num_cores: int,
    *,
    again: Sequence[str] = (),
) -> str:
    """The plan as JSON text.  max_retries: of attempts, without a new checkpoint in between; num_cores: of the machine.

    again: words of the command that continues the run; it is kept with the directory in which they were typed.
    What the machine has, and how much of it the run leaves, is kept for whoever reads figures of the run later.  Ranks
    get their share of the cores where they can use it.
    """
    meet_s = ClusterConfig.model_fields["meet_s"].default
    limits = Limits(meet_s, STALL_S, max_retries, config.transport.dead_after_s, config.run.log_bytes, is_attended=True)
    controller, rewards, trainer, generation = shares_of(config)
    each = num_cores // len(process_names(config))
    threads = trainer_threads(config, each) if "trainer-0" in gpus.devices else 1
    components = [
        _component("controller", [controller, rewards], gpus),
        _component("trainer", [trainer], gpus, hides_gpus=config.trainer.device == "cpu", num_threads=threads),
        _component("generation", [generation], gpus),
    ]
    job = {"name": LOCAL, "array_size": None, "components": components}
    machine = {"num_cores": num_cores, "num_gpus_left": len(gpus.spare), "uses_gpus": bool(gpus.devices)}
    typed = {"again": [*again], "typed_in": str(Path.cwd())} if again else {}
    return plan_text(layout.root, LOCAL, [job], "requeue", limits, machine=machine, **typed)


def _component(
    name: str, shares: list[Share], gpus: GpuMap, *, hides_gpus: bool = False, num_threads: int = 1
) -> dict[str, Any]:
    names = [f"{share.role}-{k}" for share in shares for k in range(share.num_processes)]
    return {
        "name": name,
        "runs_in_batch_step": True,
        "roles": [asdict(share) for share in shares],
        "gpus_per_task": 0,
        "srun": [],
        "python": [sys.executable],
        "environment": ROLE_ENVIRONMENT | (NO_GPU if hides_gpus else {}),
        "defaults": thread_defaults(num_threads),
        "visible_devices": {name: shown for name in names if (shown := gpus.variable(name)) is not None},
    }
