"""States of jobs, of their components and of their array tasks: squeue first, then sacct for what squeue has forgotten.

Input: job ids.  Output: a state for J, J+1 and J_1.  A job that neither knows has ended: without accounting there is
no other sign of it.
"""

from __future__ import annotations

from launch.slurm.commands import SlurmError, slurm
from launch.slurm.states import OVER

GONE = "GONE"  # neither squeue nor sacct knows the job
FINAL = OVER | {"LAUNCH_FAILED", GONE}


def ask_states(bases: set[str]) -> dict[str, dict[str, str]]:
    """States by shown id; two calls at most, however many jobs.  Raises SlurmError: Slurm does not answer."""
    found = parse_states(_squeue(bases))
    missing = {each for each in bases if each not in found}
    if missing:
        found.update({key: {"State": GONE} for key in missing})
        found.update(parse_states(_sacct(missing)))
    return found


def base_id(job_id: str) -> str:
    """J of J, J+1 and J_1."""
    return job_id.split("+")[0].split("_")[0]


def parse_states(lines: str) -> dict[str, dict[str, str]]:
    """Lines `own id|shown id|state|nodes` to a state per shown id, and per job."""
    found: dict[str, dict[str, str]] = {}
    states_of: dict[str, list[str]] = {}
    for line in lines.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 4 or "." in fields[1]:
            continue
        own, shown, state, nodes = fields
        state = state.split()[0] if state else "UNKNOWN"  # sacct: CANCELLED by 1000
        found[shown] = {"JobID": own, "State": state, "NodeList": nodes}
        states_of.setdefault(base_id(shown), []).append(state)
    for base, states in states_of.items():
        found[base] = {**found.get(f"{base}+0", found.get(base, {"JobID": base, "NodeList": ""}))}
        found[base]["State"] = found[base].get("State") or _of_all(states)
    return found


def _of_all(states: list[str]) -> str:
    """State of an array: that of a live task, else that of a failed one, else COMPLETED."""
    going_on = sorted(set(states) - FINAL, key=lambda state: state != "RUNNING")
    return next(iter([*going_on, *(state for state in states if state != "COMPLETED")]), "COMPLETED")


def _squeue(bases: set[str]) -> str:
    words = ("squeue", "--all", "--noheader", "--states=all", "--format=%A|%i|%T|%N")
    try:
        return slurm(*words, f"--jobs={','.join(sorted(bases))}")
    except SlurmError as error:
        if "Invalid job id" in str(error):  # it was asked for one job, and that one is forgotten
            return ""
        raise


def _sacct(bases: set[str]) -> str:
    words = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=JobIDRaw,JobID,State,NodeList")
    try:
        return slurm(*words, f"--jobs={','.join(sorted(bases))}")
    except SlurmError:  # no accounting here
        return ""
