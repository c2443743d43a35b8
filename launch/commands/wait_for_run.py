"""Follow a submitted run until its jobs have ended: the progress line, and a line whenever a job changes its state.

Input: status.json and the queue.  Output: printed lines.
"""

from __future__ import annotations

import sys
import time

from launch.commands.watch import Watch
from launch.common.paths import quoted
from launch.run_files.job_records import name_of_jobs, read_records
from launch.run_files.run_state import is_complete
from launch.slurm.queue import JobRow, look_at_jobs
from rlhpc.exit_status import EXIT_INTERRUPTED
from rlhpc.patience import patiently, seen
from rlhpc.run_layout import RunLayout

ASK_SLURM_EVERY_S = 15.0  # slurmctld serves all users
NEARLY_OVER_S = 2.0  # once the result exists


def wait_for_run(layout: RunLayout) -> int:
    """Return 0 when all jobs have ended and the run is complete, 1 if it is not, 130 after Ctrl-C."""
    watch = Watch(layout, sys.stderr)
    said = ""
    try:
        while True:
            ids = patiently(lambda: [record.job_id for record in read_records(layout)], layout.jobs)
            look = look_at_jobs(ids, run_name=name_of_jobs(layout))
            living = [row for row in look.rows if row.state.is_alive]
            words = look.trouble or ", ".join(dict.fromkeys(map(_describe, living)))
            if words and words != said:
                watch.tell(words)
            said = words
            if not living and not look.trouble:
                break
            _look_on(layout, watch)
    except KeyboardInterrupt:
        watch.tell(
            f"no longer watched; the jobs continue: `rlhpc status {quoted(layout.root)}`, `rlhpc "
            f"stop {quoted(layout.root)}`"
        )
        return EXIT_INTERRUPTED
    watch.close()
    if patiently(lambda: is_complete(layout, is_certain=True), layout.root):
        watch.tell(f"{layout.root}: complete")
        return 0
    watch.tell(
        f"{layout.root}: all jobs have ended, the run is not complete; `rlhpc status {quoted(layout.root)}` says why"
    )
    return 1


def _look_on(layout: RunLayout, watch: Watch) -> None:
    began = time.monotonic()
    while time.monotonic() - began < (NEARLY_OVER_S if is_complete(layout) else ASK_SLURM_EVERY_S):
        seen(watch.look, None)
        time.sleep(0.5)


def _describe(row: JobRow) -> str:
    reason = f" ({row.reason})" if row.reason else ""
    return f"{row.name} {row.label} {row.state.name.lower()}{reason}"
