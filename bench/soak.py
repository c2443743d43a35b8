"""Time limits, again and again: a run whose jobs are far too short for it, on a private Slurm, until it is complete.

Prints a line per life and, at the end, what was lost: steps that a later attempt had to do again, batches that were not
whole, rollouts that were trained twice.  Exit status 1 if there was any.

    python -m bench.soak --cycles 100        about a minute each
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import obtain
from launch.private_slurm.shape import default_shape
from launch.run_files.run_state import saved_step
from tests.ring.run_kit import make_lab
from tests.slurm.cluster_run import LASTING, SlurmRun, assert_whole, trained_in_vain

LIFE_S = 110.0  # a minute's limit, the requeue delay, and a busy machine


def main() -> int:
    """Run until so many lives have ended; then let the run end by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100, help="lives of the job (100)")
    parser.add_argument("--placement", choices=("hetjob", "jobs"), default="hetjob")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rlhpc-soak-", dir="/tmp"))
    try:
        return _soak(root, options.cycles, options.placement)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _soak(root: Path, cycles: int, placement: str) -> int:
    lab = make_lab(root / "lab")
    cluster = DevCluster.create(root / "slurm", default_shape(1, 1, 1), obtain(), dies_with_parent=True)
    with cluster:
        run = SlurmRun(
            cluster,
            lab,
            "soak",
            placement,
            run={"num_steps": 1_000_000},
            checkpoint={"every_steps": 1_000_000},
            site={"common": {"time": "0:01:00"}},
            **LASTING,
        )
        run.submit()
        began, seen = time.monotonic(), 0
        while len(run.attempts() if run.layout.attempts.exists() else []) <= cycles:
            if time.monotonic() - began > LIFE_S * cycles + 120:
                print(run.story())
                return 1
            seen = _show(run, seen, began)
            time.sleep(1.0)
        run.cli("stop", str(run.layout.root), timeout_s=200.0)
        last = saved_step(run.layout)
        run.cli("resume", str(run.layout.root), f"run.num_steps={last + 5}", *_long_enough(run))
        run.wait_complete()
    return _verdict(run, last + 5)


def _long_enough(run: SlurmRun) -> list[str]:
    """A site file with time for the last attempt."""
    path = run.site_file.with_name("long.site.toml")
    path.write_text(run.site_file.read_text(encoding="utf-8").replace("0:01:00", "0:20:00"), encoding="utf-8")
    return [str(path)]


def _show(run: SlurmRun, seen: int, began: float) -> int:
    ended = run.events("attempt_end")
    for event in ended[seen:]:
        print(f"{time.monotonic() - began:7.0f} s  life {event['restart']:>3}  {event['text']}", flush=True)
    return len(ended)


def _verdict(run: SlurmRun, num_steps: int) -> int:
    lost = trained_in_vain(run)
    attempts = run.attempts()
    print(json.dumps({"attempts": len(attempts), "steps": num_steps, "rollouts_trained_in_vain": lost}))
    try:
        assert_whole(run, num_steps)
    except AssertionError as error:
        print(error)
        return 1
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
