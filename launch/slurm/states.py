"""The meaning of each Slurm job state for a run: is it alive, who ended it, does it come back, what to do.

Input: the states printed by squeue and sacct (22.05 to 26.05).  Output: values.  Pure.  States and flags are one list
here, because squeue prints one word: a flag, if there is one, in place of the state below it.  A word that is not in
the table counts as alive, so that nothing is submitted twice by mistake, and is reported as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Life(Enum):
    """Stage of a job."""

    WAITING = "waiting"  # in the queue
    HELD = "held"  # in the queue until it is released
    ON_NODES = "on nodes"
    ENDING = "ending"  # its processes are being ended; it may be requeued afterwards
    OVER = "over"
    UNKNOWN = "unknown"


class EndedBy(Enum):
    """Who ended a job."""

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
    life: Life
    ended_by: EndedBy
    is_restarted_by_slurm: bool  # it restarts or continues automatically
    is_worth_resuming: bool  # it has ended, and a resume from the last checkpoint can be expected to get further
    what: str  # for people
    remedy: str = ""  # how to continue a run whose jobs have all ended; "" if `what` says everything

    @property
    def sentence(self) -> str:
        """What it is, and the remedy."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what

    @property
    def is_alive(self) -> bool:
        """True while it runs or may still run under this id."""
        return self.life is not Life.OVER

    @property
    def is_known(self) -> bool:
        """False for a word that is not in the table."""
        return self.life is not Life.UNKNOWN


def _waiting(name: str, code: str, sentence: str) -> JobState:
    return JobState(name, code, Life.WAITING, EndedBy.NOBODY, True, False, sentence)


def _held(name: str, code: str, sentence: str) -> JobState:
    return JobState(name, code, Life.HELD, EndedBy.NOBODY, False, False, sentence)


def _on_nodes(name: str, code: str, sentence: str, goes_on: bool = True) -> JobState:
    return JobState(name, code, Life.ON_NODES, EndedBy.NOBODY, goes_on, False, sentence)


def _ending(name: str, code: str, sentence: str) -> JobState:
    return JobState(name, code, Life.ENDING, EndedBy.NOBODY, False, False, sentence)


def _over(name: str, code: str, ended_by: EndedBy, what: str, remedy: str = "", resume: bool = False) -> JobState:
    return JobState(name, code, Life.OVER, ended_by, False, resume, what, remedy)


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
        Life.UNKNOWN,
        EndedBy.NOBODY,
        False,
        False,
        f"is in a state unknown to rlhpc ({word.strip() or 'none'}), treated as alive; see `squeue --jobs=JOB`",
    )
