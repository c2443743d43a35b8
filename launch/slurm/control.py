"""Cancel and requeue jobs, and ask for the states of this user's own jobs.

Input: ids as squeue writes them.  Output: states in Slurm's words.  Raises SlurmError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from launch.slurm.commands import SlurmError, slurm
from launch.slurm.states import OVER

PATIENCE_S = 60.0  # for a slurmctld that is away, where somebody waits for the answer
SOON_S = 12.0  # for an answer to somebody who asks again soon and has other things to look after meanwhile
MIN_JOB_AGE_S = 300.0  # Slurm's own default
_MIN_JOB_AGE = re.compile(r"^MinJobAge\s*=\s*(\d+)", re.MULTILINE)
_SHOWN = re.compile(r"(\d+)(?:_(\d+))?")  # 12, 12_3; 12+1 is a component of 12
_OF_A_COMPONENT = re.compile(r"\s*\d+(?:\+(\d+))? ([A-Z_]+)\s*")
_IS_PENDING = "Job is pending execution"
_IS_OVER = ("Invalid job id specified", "already completing or completed")
_OF_EACH = "scancel: error: "

TaskStates = dict["int | None", str]  # of one job; by task where it is an array


def cancel(jobs: Iterable[int | str], *options: str, patience_s: float = 0.0) -> None:
    """Run scancel if there is anything to cancel; jobs that have already ended are not an error."""
    listed = list(dict.fromkeys(map(str, jobs)))
    if not listed:
        return
    try:
        slurm("scancel", *options, *listed, patience_s=patience_s)
    except SlurmError as error:
        said = str(error).split(_OF_EACH)[1:] or [str(error)]  # of one job that is over, and of another that is not
        if not all(any(words in each for words in _IS_OVER) for each in said):
            raise


def requeue(job: str, patience_s: float) -> None:
    """Put a job, or by JOB_TASK a task of an array, back into the queue.  SlurmError: also if the site forbids it.

    Call it only when no srun of the job is alive: Slurm 25.11 and later cancels instead of requeueing a job whose first
    component has a live step.
    """
    try:
        slurm("scontrol", "requeue", job, patience_s=patience_s)
    except SlurmError as error:
        if _IS_PENDING not in str(error):  # it is there: the answer to an earlier try was lost
            raise


def component_states(job_id: int | str, patience_s: float) -> dict[int, str]:
    """Slurm's state of every component of a heterogeneous job; other jobs have only component 0."""
    words = ("squeue", "--all", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%i %T")
    rows = map(_OF_A_COMPONENT.fullmatch, slurm(*words, patience_s=patience_s).splitlines())
    return {int(row[1] or 0): row[2] for row in rows if row}  # else a word of the site to its users


def own_jobs(patience_s: float, timeout_s: float = 60.0) -> dict[int, TaskStates]:
    """States of this user's jobs; of a heterogeneous job the most active state of its components.

    timeout_s: of each try.
    """
    # --all: otherwise jobs on hidden partitions are not listed.
    words = ("squeue", "--me", "--all", "--array", "--noheader", "--states=all", "--format=%i|%T")
    states: dict[int, TaskStates] = {}
    for line in slurm(*words, timeout_s=timeout_s, patience_s=patience_s).splitlines():
        shown, _, state = line.strip().partition("|")
        found = _SHOWN.match(shown)
        if found is None or not state:
            continue
        tasks, task = states.setdefault(int(found[1]), {}), None if found[2] is None else int(found[2])
        tasks[task] = most_active((tasks.get(task, ""), state))
    return states


def most_active(states: Iterable[str]) -> str:
    """The most active state: one that may still run before a waiting one before a final one; "" if there is none."""
    return max(states, key=_activity, default="")


def min_job_age_s() -> float:
    """How long Slurm remembers a job after its end, at least; if it does not say, its default."""
    found = _MIN_JOB_AGE.search(slurm("scontrol", "show", "config", timeout_s=SOON_S))
    return float(found[1]) if found is not None and int(found[1]) else MIN_JOB_AGE_S  # 0: jobs are never purged


def _activity(state: str) -> int:
    return 0 if not state else 1 if state in OVER else 2 if state == "PENDING" else 3
