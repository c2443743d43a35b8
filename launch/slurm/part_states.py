"""States of jobs, of their components and of their array tasks, by the ids that Slurm shows.

Input: job ids.  Output: a state for J, J+1 and J_1.  A job that neither squeue nor sacct knows has ended: without
accounting there is no other sign of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from launch.slurm.queue import JobRow, look_at_jobs
from launch.slurm.states import OVER

GONE = "GONE"  # neither squeue nor sacct knows the job
FINAL = OVER | {"LAUNCH_FAILED", GONE}


def ask_states(bases: set[str]) -> dict[str, dict[str, str]] | None:
    """State and nodes by shown id, and per job, however many jobs; None: Slurm does not answer."""
    look = look_at_jobs(map(int, bases), timeout_s=60.0)
    if look.trouble:
        return None
    return {**{str(job): {"State": GONE} for job in look.unknown}, **by_shown_id(look.rows)}


def base_id(job_id: str) -> str:
    """J of J, J+1 and J_1."""
    return job_id.split("+")[0].split("_")[0]


def by_shown_id(rows: Iterable[JobRow]) -> dict[str, dict[str, str]]:
    """State and nodes per shown id, and per job: those of its first component, or the state of all its array tasks."""
    found: dict[str, dict[str, str]] = {}
    states_of: dict[str, list[str]] = {}
    for row in rows:
        for shown in [f"{row.job_id}_{task}" for task in row.tasks] or [row.label]:
            found[shown] = {"JobID": shown, "State": row.state.name, "NodeList": row.nodes}
        states_of.setdefault(str(row.job_id), []).append(row.state.name)
    for base, states in states_of.items():
        whole = {"JobID": base, "State": _of_all(states), "NodeList": ""}
        found[base] = found.get(f"{base}+0") or found.get(base) or whole
    return found


def _of_all(states: list[str]) -> str:
    """State of an array: that of a live task, else that of a failed one, else COMPLETED."""
    going_on = sorted(set(states) - FINAL, key=lambda state: state != "RUNNING")
    return next(iter([*going_on, *(state for state in states if state != "COMPLETED")]), "COMPLETED")
