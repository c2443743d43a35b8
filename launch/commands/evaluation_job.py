"""The job that evaluates a run while it trains, in a line of `rlhpc status`: it is none of the run's own.

Input: evaluations/job.json and squeue.  Output: a line where somebody may have to act; none of a job that runs.
"""

from __future__ import annotations

from launch.common.paths import quoted
from launch.run_files.events import read_document
from launch.slurm.queue import look_at_jobs
from launch.slurm.reasons import reason_in_words
from launch.slurm.states import Life
from rlhpc.run_layout import RunLayout


def lines_about_evaluation_job(layout: RunLayout) -> list[str]:
    """Of a run whose own jobs live.  None: it has no such job, or that one runs, or Slurm does not answer."""
    number = read_document(layout.evaluations / "job.json").get("job_id")
    if not isinstance(number, int):
        return []
    look = look_at_jobs([number])
    living = [row for row in look.rows if row.state.is_alive]
    if look.trouble or any(row.state.life in (Life.ON_NODES, Life.ENDING) for row in living):
        return []
    if living:
        why = reason_in_words(living[0].reason).replace("JOB", str(number))
        return [f"evaluation  job {number} is {living[0].state.name}{f': {why}' if why else ''}"]
    return [
        f"evaluation  job {number} has ended, and nothing evaluates this run any more: "
        f"{layout.evaluations}/job-{number}.log; "
        f"`rlhpc evaluate {quoted(layout.root)} --follow --site SITE.toml` submits it "
        "again"
    ]
