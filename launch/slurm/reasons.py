"""Why a job is pending, in words: Slurm's reason, what it means, and what can be done about it.

Input: the reason that squeue prints.  Output: a sentence.  Pure.  Names of limits number some two hundred and have four
parts (whose, which kind, of what, for whom); they are parsed instead of listed.
"""

from __future__ import annotations

import re

_SLURMS_OWN = "waits for the scheduler to consider it again"

# Reasons by their exact name.
REASONS = {
    "None": _SLURMS_OWN,
    "Resources": "next in line; waits for nodes to become free",
    "Priority": "jobs of higher priority are before it",
    "Dependency": "waits for another job, as requested",
    "DependencyNeverSatisfied": "its dependency can no longer be satisfied, so it never starts; end it with `rlhpc "
    "stop`, and submit again",
    "BeginTime": "may not start yet: a job that was requeued waits some minutes",
    "JobHeldUser": "held by you (or a coordinator of the account); `scontrol release JOB` releases it",
    "JobHeldAdmin": "held by an administrator, and only they can release it: ask them",
    "JobHoldMaxRequeue": "held: it has been requeued too often (max_batch_requeue); see its logs, then `scontrol "
    "release JOB`",
    "JobLaunchFailure": "could not be started on its nodes (prolog, file system, a missing program), and has "
    "no log of it",
    "JobArrayTaskLimit": "the limit of running tasks of the array is reached",
    "PartitionDown": "the partition is down; waits for an administrator",
    "PartitionInactive": "the partition accepts no jobs now",
    "PartitionNodeLimit": "requests more nodes than the partition allows for one job, or has up; a smaller size, or "
    "another `partition`",
    "PartitionTimeLimit": "requests more time than the partition allows; lower `time` in the site file, or another "
    "`partition`",
    "PartitionConfig": "requests more than the partition allows; a smaller size, or another `partition`",
    "AccountNotAllowed": "the account may not use this partition; another `account` or `partition`",
    "AccountingPolicy": "over a limit of the account or QOS; `sacctmgr show assoc` lists them",
    "AssociationJobLimit": "the limit of running jobs of this account is reached",
    "AssociationResourceLimit": "the limit of resources of this account is reached",
    "AssociationTimeLimit": "this account has used up its time; ask its coordinator",
    "QOSJobLimit": "the limit of running jobs of this QOS is reached",
    "QOSResourceLimit": "the limit of resources of this QOS is reached",
    "QOSTimeLimit": "this QOS has used up its time; another `qos`, or ask the site",
    "QOSNotAllowed": "the account or the partition may not use this QOS; another `qos`",
    "QOSUsageThreshold": "too little of the account's share is left for this QOS; another `qos`",
    "InvalidAccount": "Slurm does not know the account, or you are not in it; correct `account` in the site file",
    "InvalidQOS": "Slurm does not know the QOS, or you may not use it; correct `qos` in the site file",
    "BadConstraints": "no node can ever satisfy its request; correct `constraint`, `gres_type` or sizes in the site "
    "file",
    "Constraints": "nodes that satisfy its constraints are not available now",
    "Licenses": "waits for a licence",
    "NodeDown": "a node that it needs is down",
    "ReqNodeNotAvail": "nodes that it needs are down, drained, or reserved, for maintenance perhaps; a shorter `time` "
    "may fit before it",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation has been deleted; correct `reservation` in the site file",
    "RequiresReservation": "the partition accepts only jobs with a reservation; set `reservation` in the site file",
    "MaxMemPerLimit": "requests more memory per core or node than allowed; lower `memory_gib_per_gpu` or "
    "`memory_gib_per_task`",
    "DeadLine": "cannot end before its deadline",
    "Cleaning": "was requeued, and Slurm is still cleaning up after its last run",
    "Prolog": "the site's prolog prepares its nodes",
    "BurstBufferOperation": "the burst buffer failed; ask the site",
    "BurstBufferResources": "waits for space in the burst buffer",
    "BurstBufferStageIn": "files are being copied into the burst buffer",
    "FedJobLock": "the clusters of the federation agree on where it runs",
    "FrontEndDown": "no front end is up; waits for an administrator",
    "SchedDefer": _SLURMS_OWN,
    "SystemFailure": "Slurm itself, a file system or the network failed; ask the site if it lasts",
    "InactiveLimit": "was idle for longer than the site allows",
    # of jobs that have ended
    "TimeLimit": "reached its time limit",
    "NonZeroExitCode": "ended with an exit status other than 0",
    "RaisedSignal": "was ended by a signal",
    "OutOfMemory": "used more memory than it had requested",
}

# With these reasons a job stays in the queue until a person acts.
_STUCK = {
    "AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "JobHeldAdmin",
    "JobHeldUser", "JobHoldMaxRequeue", "PartitionTimeLimit", "QOSNotAllowed", "RequiresReservation",
    "ReservationDeleted",
}  # fmt: skip

# Longer texts that Slurm puts in the reason's place, by a part of them.
_TEXTS = (
    ("launch failed requeued held", "could not be started on its nodes (prolog, file system), has no log of it, and is "
     "held; `scontrol release JOB` releases it when they are repaired"),
    ("job requeued in held state", "was requeued, and is held; `scontrol release JOB` releases it"),
    ("Nodes required for job are DOWN", REASONS["ReqNodeNotAvail"]),
    ("Reserved for maintenance", "its nodes are reserved for maintenance; a shorter `time` may fit before it"),
)  # fmt: skip

_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS)?(?P<kind>Grp|Max|Min)"
    r"(?P<what>BB|Billing|CPU|Cpu|Energy|GRES|License|Memory|Mem|Nodes?|Unknown|SubmitJobs?|Jobs|WallDuration|Wall)"
    r"(?P<run>Run)?(?P<minutes>Minutes)?(?:Per(?P<each>Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)
_WHOSE = {"Assoc": "this account", "QOS": "this QOS", "": "this account"}
_WHAT = {
    "BB": "burst buffer", "Billing": "billing units", "CPU": "cores", "Energy": "energy", "GRES": "GPUs",
    "License": "licences", "Mem": "memory", "Memory": "memory", "Node": "nodes", "Nodes": "nodes",
    "Unknown": "some resource", "SubmitJob": "submitted jobs", "SubmitJobs": "submitted jobs", "Jobs": "running jobs",
    "WallDuration": "time", "Wall": "time",
}  # fmt: skip


def reason_in_words(reason: str) -> str:
    """A sentence for squeue's reason; the reason itself if there is nothing to add, "" for none."""
    text = reason.strip().strip("()")
    if not text:
        return ""
    for part, sentence in _TEXTS:
        if part.lower() in text.lower():
            return sentence
    name, _, rest = text.partition(",")
    sentence = REASONS.get(name) or _limit_in_words(name) or name.replace("_", " ")
    return f"{sentence} ({rest.strip()})" if rest.strip() else sentence


def is_stuck(reason: str) -> bool:
    """True if a job with this reason never starts unless a person acts.

    A job that was requeued and held is PENDING again a moment later, and only its reason shows it.
    """
    name = reason.strip().strip("()").partition(",")[0]
    return name in _STUCK or "held" in name.lower() or _is_beyond_a_limit_of_jobs(name)


def _is_beyond_a_limit_of_jobs(name: str) -> bool:
    """True of a limit for each job, such as QOSMaxGRESPerJob: jobs that end make no room for this one."""
    found = _LIMIT.fullmatch(name)
    return found is not None and (found["kind"] == "Min" or found["each"] in ("Job", "Node"))


def _limit_in_words(name: str) -> str:
    found = _LIMIT.fullmatch(name)
    if found is None:
        return ""
    what = _WHAT["CPU" if found["what"] == "Cpu" else found["what"]]
    owner = _WHOSE[found["whose"] or ""]
    if found["minutes"]:
        what = f"minutes of {what}"
    if found["kind"] == "Min":
        return f"requests fewer {what} than the minimum of {owner}; another `qos`"
    each = found["each"]
    # The QOS may be the user's default or the partition's, which no key of the site file names.
    if each in ("Job", "Node"):
        smaller = "lower `time` in the site file" if what == "time" else "a smaller size"
        return f"requests more {what} than {owner} allows per {each.lower()}; {smaller}, or another `qos` or `account`"
    if found["minutes"] and not found["run"]:
        return f"{owner} has used up its {what}; another `account`, or ask its coordinator"
    of = f" per {each.lower()}" if each else ""
    waits = f"{owner} has as many {what} in use as it allows{of}: waits for its other jobs to end"
    return (
        waits
        if what.endswith("jobs")
        else f"{waits}; if none of them runs, this one alone is beyond the limit: a smaller size, or another `qos`"
    )
