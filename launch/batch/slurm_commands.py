"""Call Slurm's commands, and outlast a controller that is away for a moment.

Eats words, returns what the command prints.  Raises SlurmError in the command's own words.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping

from rlhpc.errors import RlhpcError

# What Slurm says while slurmctld restarts, or is too busy to answer.  Nobody knows whether the command did anything:
# what may not be done twice is not repeated for it (sbatch.py).
_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes were transmitted")


class SlurmError(RlhpcError):
    """A Slurm command failed; the message holds what it said."""


class NoAnswer(SlurmError):
    """The command ended, or was ended, before it could say anything."""


def slurm(
    *words: str,
    timeout_s: float = 60.0,
    patience_s: float = 0.0,
    environment: Mapping[str, str] | None = None,
    hears_ctrl_c: bool = True,
) -> str:
    """Run one command and return its output.

    timeout_s: of one try.  patience_s: so long it is tried again while slurmctld does not answer; not for sbatch, which
    sbatch.py calls.  environment: instead of this process's.  hears_ctrl_c: False in a session of its own.  Raises
    SlurmError: not installed here, a status besides 0; NoAnswer: not in time, or ended by a signal.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _once(words, timeout_s, environment, hears_ctrl_c)
        except SlurmError as error:
            if not is_away(error) or time.monotonic() >= deadline:
                raise
            time.sleep(min(5.0, max(0.1, deadline - time.monotonic())))


def is_away(error: SlurmError) -> bool:
    """True if slurmctld did not answer, and may in a moment."""
    return any(saying in str(error) for saying in _AWAY)


def clean_environment() -> dict[str, str]:
    """This process's environment without what Slurm has set for the job that it runs in.

    A job submitted from inside another would take the other's sizes, and its srun the other's components, for its own.
    """
    kept = {"SLURM_CONF"}
    return {
        key: value
        for key, value in os.environ.items()
        if key in kept or not key.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI"))
    }


def _once(words: tuple[str, ...], timeout_s: float, environment: Mapping[str, str] | None, hears_ctrl_c: bool) -> str:
    try:
        done = subprocess.run(
            list(words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
            start_new_session=not hears_ctrl_c,
        )
    except FileNotFoundError:
        raise SlurmError(f"{words[0]}: no such command here; is this a login node, is Slurm's module loaded?") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{words[0]}: Socket timed out: no answer in {timeout_s:g} s") from None
    if done.returncode < 0:
        raise NoAnswer(f"{words[0]}: ended by signal {-done.returncode}")
    if done.returncode != 0:
        said = " ".join(line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip())
        raise SlurmError(f"{words[0]}: {said or f'exit status {done.returncode}'}")
    return done.stdout
