"""`rlhpc run`: check everything, prepare the run directory, run all roles on this machine and watch them."""

from __future__ import annotations

import os
import sys

from launch.checks.gpus import gpus_here
from launch.checks.preflight import preflight
from launch.commands.local_executor import LocalExecutor
from launch.commands.watch import Watch
from launch.plan.gpu_map import map_gpus
from launch.plan.processes import plan_run
from launch.run_directory.checkpoint_choice import NEWEST, ResumePoint
from launch.run_directory.owner import own_run
from launch.run_directory.prepare import mint_keys, prepare_run_dir
from rlhpc.config import Config
from rlhpc.run_layout import RunLayout


def run_locally(config: Config, *, resume: bool = False, fresh: bool = False, resume_from: ResumePoint = NEWEST) -> int:
    """Check everything, prepare the run directory, run all roles here, return the exit status."""
    gpus = map_gpus(config, gpus_here(os.environ))
    preflight(config)
    layout = RunLayout(config.run_directory)
    watch = Watch(layout, sys.stderr)
    with own_run(layout, watch.tell, may_take_over=resume or fresh) as owner:
        attempt = prepare_run_dir(config, layout, resume=resume, fresh=fresh, resume_from=resume_from, tell=watch.tell)
        owner.begins(attempt.owner)
        plan = plan_run(
            config,
            layout,
            attempt=attempt.index,
            resume_step=attempt.resume_step,
            owner=attempt.owner,
            gpus=gpus,
        )
        mint_keys(plan)
        for change in attempt.changed:
            watch.tell(f"resumed with {change}")
        with LocalExecutor(plan, watch.tell, owner) as executor:
            status = executor.wait(watch.look)
        watch.close()
    return status
