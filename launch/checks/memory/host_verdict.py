"""Whether the host memory that a trainer's task requests is enough for its rank, which Slurm would kill otherwise.

Input: a Config, a ModelShape and a site file.  Output: lines, or a ConfigError.  An estimate (plan.py).
"""

from __future__ import annotations

import math
from pathlib import Path

from launch.checks.memory.plan import GIB, plan_memory
from launch.plan.site_file import Site
from rlhpc.config import Config
from rlhpc.errors import ConfigError
from rlhpc.model_shape import ModelShape

# Guess: Python, torch and other libraries, the host's part of CUDA, buffers of NCCL and gloo, rows and weights on their
# way.  Imports alone took 0.4 GiB of it with torch for CPU; nothing was measured with CUDA.
PROCESS_ALLOWANCE = 8 * GIB
_FEW = 4 * GIB  # of a plan: then most of what is needed is the guess


def judge_host(config: Config, shape: ModelShape, site: Site, source: Path) -> list[str]:
    """A line, or none where little is needed and nothing said.

    Raises ConfigError: trainer.memory_gib_per_gpu is too little for the rank that needs most, without the guess.
    """
    rank = max(plan_memory(config, shape), key=lambda each: each.host)
    need = (rank.host + PROCESS_ALLOWANCE) / GIB
    given, least = site.trainer.memory_gib_per_gpu, math.ceil(need)
    moment = "loads the whole model" if rank.host_loading > rank.host_training else "trains and saves"
    words = (
        f"a rank of stage {rank.stage} needs {need:.1f} GiB of host memory while it {moment} "
        f"(estimate; {PROCESS_ALLOWANCE // GIB} of them the process)"
    )
    if given is None:
        default = f"trainer.memory_gib_per_gpu is not in {source}: the partition's default must be {least} GiB a GPU"
        return [f"warning     {default}; {words}"] if rank.host > _FEW else []
    if given == 0:
        return [f"host        trainer.memory_gib_per_gpu=0, all of a node: {words}"]
    spare = given - need
    if given * GIB < rank.host:
        raise ConfigError(
            f"trainer.memory_gib_per_gpu={given} in {source}: {words}, {-spare:.1f} GiB more; "
            f"would fit: memory_gib_per_gpu={least}"
        )
    if spare >= 0:
        return [f"host        {given} GiB of trainer.memory_gib_per_gpu: {spare:.1f} GiB to spare (an estimate)"]
    if rank.host <= _FEW:
        return [f"host        {given} GiB of trainer.memory_gib_per_gpu: not judged: {words}"]
    return [f"warning     trainer.memory_gib_per_gpu={given} in {source}: {words}; would fit: {least}"]
