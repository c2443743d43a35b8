"""The only place that runs Slurm's commands, with a clean environment and retries while slurmctld does not answer.

Input: a command line.  Output: the command's output.  Guarantees: no variable of the user's shell, of a site's module
or of the surrounding job changes a command's effect, selection or output.  Raises SlurmError with the command's own
message.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rlhpc.base.patience import Deadline
from rlhpc.protocol.errors import RlhpcError

# Messages of Slurm's commands while slurmctld restarts or is overloaded.  Whether the command took effect is unknown,
# so that commands that must not run twice are not repeated (sbatch.py).
_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes were transmitted",
         "Connection timed out", "Connection reset", "controller in standby mode",
         "RESTORE SLURMCTLD DAEMON TO SERVICE",  # scontrol show config, since 24.11 with exit status 1
         # A configless client, which gets slurm.conf from slurmctld; a name server and a munged that are down.
         "Could not establish a configuration source", "Unable to establish control machine address",
         "Protocol authentication error")  # fmt: skip
# Messages of commands that find neither a slurm.conf nor slurmctld's name; libraries print four lines about it.
_NO_CLUSTER = ("Could not establish a configuration source", "DNS SRV lookup failed")
_HOW_TO_CONFIGURE = "run this on a login node with the site's module for Slurm, or set SLURM_CONF to its slurm.conf"
_NO_LIST = "slurm_load_jobs error"
PAUSE_S = 5.0  # at most, before another try

# Options of Slurm's commands that are taken from the environment.  All of these names are Slurm's own.
_INPUTS = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_", "SCONTROL_",
           "PMI")  # fmt: skip
# Variables by which commands find the cluster, and authenticate.
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
CLUSTER = "RLHPC_SLURM_CLUSTER"  # for Slurm's --clusters, in the shell of a user; job scripts unset it
# Of srun's input variables, those that Slurm itself sets in a batch step are kept: they identify job, components and
# nodes.  The following are set by users, by a site's module, or by Slurm with the sizes of component 0, and would
# change a step's size, time limit, output, directory, whether it waits for other steps, and which GPUs a task sees.
_NOT_FOR_STEPS = frozenset(
    f"SLURM_{name}"
    for name in (
        "NTASKS", "NPROCS", "NTASKS_PER_NODE", "CPUS_PER_TASK", "MEM_PER_CPU", "MEM_PER_NODE", "MEM_PER_GPU",
        "GPUS_PER_TASK", "TRES_PER_TASK", "TRES_BIND", "GPU_BIND",
        "NNODES", "JOB_NUM_NODES", "DISTRIBUTION", "THREADS_PER_CORE", "ARBITRARY_NODE_LIST",
        "TIMELIMIT", "STDINMODE", "STDOUTMODE", "STDERRMODE", "LABELIO", "UNBUFFEREDIO", "OPEN_MODE", "WORKING_DIR",
        "REMOTE_CWD", "IMMEDIATE", "EXIT_IMMEDIATE", "EXIT_ERROR", "EXCLUSIVE", "EXACT", "OVERLAP", "WHOLE", "WAIT",
        "KILL_BAD_EXIT", "NO_KILL", "DISABLE_STATUS", "TEST_EXEC", "BCAST", "PARTITION", "QOS", "ACCOUNT", "CLUSTERS",
        "CONSTRAINT", "RESERVATION", "DEPENDENCY", "BURST_BUFFER", "DEADLINE", "HOLD", "DEBUG", "TASK_PROLOG",
        "TASK_EPILOG", "PROLOG", "EPILOG", "THREADS", "USE_MIN_NODES", "WAIT4SWITCH", "REQ_SWITCH", "MULTI", "QUIET",
    )
)  # fmt: skip
# GPUs of component 0, which Slurm sets in the batch step too.  A step of the same component keeps them; srun would
# apply them to every other component.
_OF_COMPONENT_0 = frozenset(
    f"SLURM_{name}" for name in ("GPUS", "GPUS_PER_NODE", "GRES", "CPUS_PER_GPU", "NTASKS_PER_GPU", "CPU_BIND")
)


class SlurmError(RlhpcError):
    """A Slurm command failed; the message contains its error output."""


class NoAnswer(SlurmError):
    """The command timed out or was killed before it answered."""


def slurm(
    *words: str,
    timeout_s: float = 60.0,
    patience_s: float = 0.0,
    environment: Mapping[str, str] | None = None,
    hears_ctrl_c: bool = True,
    hear: Callable[[str], object] = lambda remarks: None,
) -> str:
    """Run one command and return its output.

    timeout_s: of each try.  patience_s: how long it is repeated while slurmctld does not answer; not for sbatch, which
    sbatch.py calls.  environment: instead of this process's; cleaned in either case.  hears_ctrl_c: False runs it in
    its own session.  hear: called with a successful command's output on stderr, the site's messages to its users.
    Raises SlurmError: not installed here, nonzero status; NoAnswer: timed out, or killed by a signal.
    """
    deadline = Deadline(patience_s)
    clean = clean_environment(environment)
    if words[0] == "sacct" and CLUSTER in clean:  # the only command that ignores SLURM_CLUSTERS
        words = (words[0], f"--clusters={clean[CLUSTER]}", *words[1:])
    if words[0] != "sbatch":  # its environment becomes the job's
        clean.update(SLURM_TIME_FORMAT="standard", LC_ALL="C")
    while True:
        try:
            out, remarks = _once(words, timeout_s, clean, hears_ctrl_c)
            break
        except SlurmError as error:
            if not is_away(error) or deadline.is_over:
                raise
            time.sleep(min(PAUSE_S, patience_s / 4, max(0.1, deadline.left_s)))
    if remarks:
        hear(remarks)
    return out


def is_away(error: SlurmError) -> bool:
    """True if slurmctld did not answer, which may be temporary."""
    return any(saying in str(error) for saying in _AWAY)


def unchecked(what: str, error: SlurmError) -> SlurmError:
    """The error of a check without an answer of Slurm, with advice.  what: "nothing could be checked"."""
    why = "slurmctld does not answer" if is_away(error) else "Slurm cannot be queried"
    said = f"{why}, so {what} ({error})"
    if not is_away(error) or "SLURM_CONF" in str(error):  # the message has the remedy
        return SlurmError(said)
    conf = os.environ.get("SLURM_CONF")
    which = f"SLURM_CONF={conf!r} says which one" if conf else "SLURM_CONF is not set: the one of this machine"
    return SlurmError(
        f"{said}; `scontrol ping` says whether slurmctld is up ({which}): if so, try again, else ask the site"
    )


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment, by default this process's, without variables that would change Slurm's commands.

    Otherwise a job submitted from inside another would inherit its sizes, and its srun the other's components; with
    SQUEUE_PARTITION in a shell, squeue would not show jobs on other partitions.  RLHPC_SLURM_CLUSTER names the cluster
    where one login node serves several: nobody has that in the environment by accident.
    """
    known = os.environ if environment is None else environment
    clean = {key: value for key, value in known.items() if key in _KEPT or not key.startswith(_INPUTS)}
    return clean | {"SLURM_CLUSTERS": clean[CLUSTER]} if clean.get(CLUSTER) else clean


def srun_environment(environment: Mapping[str, str] | None = None, *, any_component: bool = False) -> dict[str, str]:
    """The part of a batch step's environment, by default this process's, that an srun in its own job needs.

    The variables by which Slurm identifies the job and its components, and all variables that are not Slurm's, which
    the tasks inherit.  any_component: the step may be in another component than the batch step, with other GPUs.
    """
    known = os.environ if environment is None else environment
    others = tuple(prefix for prefix in _INPUTS if prefix not in ("SLURM_", "SLURMD_"))
    without = _NOT_FOR_STEPS | _OF_COMPONENT_0 if any_component else _NOT_FOR_STEPS
    kept = {key: value for key, value in known.items() if key not in without and not key.startswith(others)}
    return {**kept, "SLURM_EXPORT_ENV": "ALL"}  # else a site's --export=NONE would apply to steps, too


def _once(words: tuple[str, ...], timeout_s: float, environment: dict[str, str], hears_ctrl_c: bool) -> tuple[str, str]:
    """Run a command; return its output, and remarks on stderr in one line."""
    try:
        done = subprocess.run(
            list(words),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment,
            check=False,
            start_new_session=not hears_ctrl_c,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{words[0]}: no such command here; run this on a login node, with Slurm's module loaded"
        ) from None
    except subprocess.TimeoutExpired:
        # Without that file Slurm's commands search for a minute.
        conf = environment.get("SLURM_CONF", "")
        why = f"; SLURM_CONF={conf!r} is not there" if conf and not Path(conf).exists() else ""
        raise NoAnswer(f"{words[0]}: Socket timed out: no answer in {timeout_s:g} s{why}") from None
    if done.returncode < 0:
        raise NoAnswer(f"{words[0]}: ended by signal {-done.returncode}")
    if done.returncode != 0:
        said = _in_one_line(done.stderr or done.stdout)
        if all(words in said for words in _NO_CLUSTER):
            said = f"no cluster here: Slurm is installed, and not configured ({_NO_CLUSTER[0]}); {_HOW_TO_CONFIGURE}"
        raise SlurmError(f"{words[0]}: {said or f'exit status {done.returncode}'}")
    remarks = _in_one_line(done.stderr)
    if not done.stdout.strip() and _NO_LIST in remarks and "Invalid job id" not in remarks:
        raise SlurmError(f"{words[0]}: {remarks}")  # with any status: an empty list would mean that all have ended
    return done.stdout, remarks


def _in_one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
