"""The meaning of each Slurm job state for a run: alive or not, who ended it, whether it restarts, the remedy.

Input: the states printed by squeue and sacct (22.05 to 26.05).  Output: values.  Pure.  States and flags are one list
here, because squeue prints one word: a flag, if there is one, in place of the state below it.  A word that is not in
the table counts as alive, so that nothing is submitted twice by mistake, and is reported as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

# -------------------------------------------------------------------------------------------------------------- reasons
#
# Reasons of pending jobs in words: Slurm's reason, its meaning, and the remedy.
#
# Input: squeue's reason.  Output: a sentence.  Pure.  There are some two hundred names of limits, with four parts
# (owner, kind, resource, scope); they are parsed instead of listed.

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

# Longer texts of Slurm in place of a reason, by a part of them.
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
    limit = _LIMIT.fullmatch(name)
    # A limit per job, such as QOSMaxGRESPerJob: ended jobs make no room for this one.
    is_of_each = limit is not None and (limit["kind"] == "Min" or limit["each"] in ("Job", "Node"))
    return name in _STUCK or "held" in name.lower() or is_of_each


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


# --------------------------------------------------------------------------------------------------------------- values
#
# Values printed by Slurm's commands: durations and array tasks.
#
# Input: text.  Output: numbers.  Pure; Python 3.9 and the standard library.

_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def duration_s(text: str) -> int | None:
    """Seconds of [DAYS-][HOURS:]MINUTES:SECONDS; None for UNLIMITED, INVALID, NOT_SET, N/A."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def is_unlimited(text: str) -> bool:
    """True if Slurm says that there is no limit; INVALID and NOT_SET mean unknown."""
    return text.strip() == "UNLIMITED"


def task_numbers(text: str) -> list[int]:
    """Array tasks of "0,2-4,8-12:2%2": 0, 2, 3, 4, 8, 10, 12.  Slurm may cut a long list, with or without "...".

    Cut tasks are missing here; if every task counts, use squeue with --array.
    """
    tasks: list[int] = []
    for part in text.partition("%")[0].split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is not None:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            tasks += range(first, last + 1, step)
    return tasks


def tasks_in_words(tasks: Iterable[int]) -> str:
    """The inverse: "0,2-4" for 0, 2, 3, 4."""
    spans: list[list[int]] = []
    for task in sorted(set(tasks)):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


# --------------------------------------------------------------------------------------------------------------- states


class JobStage(Enum):
    """Stage of a job."""

    WAITING = "waiting"  # in the queue
    HELD = "held"  # in the queue until it is released
    ON_NODES = "on nodes"
    ENDING = "ending"  # its processes are being ended; it may be requeued afterwards
    OVER = "over"
    UNKNOWN = "unknown"


class EndedBy(Enum):
    """The agent that ended a job."""

    NOBODY = "nobody"  # it has not ended
    SUCCESS = "success"
    WORLD = "Slurm's world"  # a node, a more important job
    PERSON = "the user or an administrator"
    RUN = "the run itself"
    SITE = "a limit of the site"


@dataclass(frozen=True)
class JobState:
    """A job state of Slurm, and what follows from it."""

    name: str
    code: str  # squeue's short form; "" if it has none
    life: JobStage
    ended_by: EndedBy
    is_restarted_by_slurm: bool  # it restarts or continues automatically
    is_worth_resuming: bool  # it has ended, and a resume from the last checkpoint can be expected to get further
    what: str  # description, for people
    remedy: str = ""  # how to continue a run whose jobs have all ended; "" if `what` says everything

    @property
    def sentence(self) -> str:
        """Description and remedy."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what

    @property
    def is_alive(self) -> bool:
        """True while it runs or may still run under this id."""
        return self.life is not JobStage.OVER

    @property
    def is_known(self) -> bool:
        """False for a word that is not in the table."""
        return self.life is not JobStage.UNKNOWN


def _waiting(name: str, code: str, sentence: str) -> JobState:
    return JobState(name, code, JobStage.WAITING, EndedBy.NOBODY, True, False, sentence)


def _held(name: str, code: str, sentence: str) -> JobState:
    return JobState(name, code, JobStage.HELD, EndedBy.NOBODY, False, False, sentence)


def _on_nodes(name: str, code: str, sentence: str, goes_on: bool = True) -> JobState:
    return JobState(name, code, JobStage.ON_NODES, EndedBy.NOBODY, goes_on, False, sentence)


def _ending(name: str, code: str, sentence: str) -> JobState:
    return JobState(name, code, JobStage.ENDING, EndedBy.NOBODY, False, False, sentence)


def _over(name: str, code: str, ended_by: EndedBy, what: str, remedy: str = "", resume: bool = False) -> JobState:
    return JobState(name, code, JobStage.OVER, ended_by, False, resume, what, remedy)


_RELEASE = "`scontrol release JOB` releases it"

STATES = (
    _waiting("PENDING", "PD", "waits in the queue"),
    _on_nodes("RUNNING", "R", "runs"),
    _on_nodes("SUSPENDED", "S", "is suspended for a higher-priority job or by an administrator, and continues later"),
    _over("COMPLETED", "CD", EndedBy.SUCCESS, "has ended with exit status 0"),
    _over("CANCELLED", "CA", EndedBy.PERSON,
          "has been cancelled by you or an administrator, or by Slurm because it could not be requeued",
          "`rlhpc resume RUN_DIR` continues"),
    _over("FAILED", "F", EndedBy.RUN, "has ended with an error", "`rlhpc logs RUN_DIR slurm` shows which"),
    _over("TIMEOUT", "TO", EndedBy.SITE,
          "reached its time limit before the run had saved and ended: the save took longer than earlier ones, or the "
          "supervisor was dead", "a longer `time` or `cluster.warn_s` in the site file, then "
          "`rlhpc resume RUN_DIR`", resume=True),
    _over("NODE_FAIL", "NF", EndedBy.WORLD,
          "has lost a node, and Slurm may not requeue it", "`rlhpc resume RUN_DIR` continues", resume=True),
    _over("PREEMPTED", "PR", EndedBy.WORLD,
          "was preempted by a higher-priority job, and this partition cancels instead of requeueing",
          "`rlhpc resume RUN_DIR` continues, or `rlhpc scale` adds another generator", resume=True),
    _over("BOOT_FAIL", "BF", EndedBy.WORLD, "was given a node that did not boot", "`rlhpc resume RUN_DIR` continues",
          resume=True),
    _over("DEADLINE", "DL", EndedBy.SITE,
          "could not end before its deadline (`--deadline` in a key `extra` of the site file, or from the site)",
          "remove it, then `rlhpc resume RUN_DIR`"),
    _over("OUT_OF_MEMORY", "OOM", EndedBy.RUN,
          "used more host memory than it had requested", "raise `memory_gib_per_gpu` (trainer, generation) or "
          "`memory_gib_per_task` (controller, rewards) in the site file, then `rlhpc resume RUN_DIR`"),
    _ending("COMPLETING", "CG",
            "is ending: its processes or the site's epilog are still running; if that lasts, a node hangs"),
    _on_nodes("CONFIGURING", "CF", "has its nodes, which boot or are prepared"),
    _on_nodes("POWER_UP_NODE", "", "has its nodes, which are being powered up"),
    _on_nodes("RESIZING", "RS", "is being given another size"),
    _on_nodes("SIGNALING", "SI", "is being sent a signal"),
    _on_nodes("STOPPED", "ST", "has been stopped with SIGSTOP and keeps its nodes; `scancel --signal=CONT JOB` "
              "continues it", goes_on=False),
    _ending("STAGE_OUT", "SO", "has ended and copies files out of a burst buffer"),
    _ending("UPDATE_DB", "", "is being written into the accounting database"),
    _waiting("REQUEUED", "RQ", "goes back into the queue under the same id, and runs again"),
    _waiting("REQUEUE_FED", "RF", "goes back into the queue of its federation"),
    _waiting("EXPEDITING", "", "goes back into the queue, with the highest priority"),
    _waiting("RECONFIG_FAIL", "", "was given nodes that could not be configured, and goes back into the queue"),
    _held("REQUEUE_HOLD", "RH", f"is back in the queue, held; {_RELEASE}"),
    _held("SPECIAL_EXIT", "SE", "has ended with an exit status that the site treats specially, and is held in the "
          f"queue; {_RELEASE}"),
    _held("RESV_DEL_HOLD", "RD", "is held because its reservation has been deleted: end it with `rlhpc stop`, change "
          "`reservation` in the site file, and submit again"),
    _held("LAUNCH_FAILED", "", f"could not be started on its nodes (prolog, file system), and is held; {_RELEASE}"),
    _over("REVOKED", "RV", EndedBy.WORLD, "runs on another cluster of the federation under the same id"),
)  # fmt: skip

# Every other state counts as alive, even one that a later Slurm adds: a live job must not be submitted a second time.
OVER = frozenset(state.name for state in STATES if not state.is_alive)
_BY_WORD = {word: state for state in STATES for word in (state.name, state.code) if word}


def state_of(word: str) -> JobState:
    """The state of a word of squeue or sacct, long or short, with additions ("CANCELLED by 1000", "PREEMPTED+").

    Never fails: an unknown word counts as alive and is reported as unknown.
    """
    first = (word.split() or [""])[0].rstrip("+").upper()
    return _BY_WORD.get(first) or JobState(
        first or "UNKNOWN",
        "",
        JobStage.UNKNOWN,
        EndedBy.NOBODY,
        False,
        False,
        f"is in a state unknown to rlhpc ({word.strip() or 'none'}), treated as alive; see `squeue --jobs=JOB`",
    )
