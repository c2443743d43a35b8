"""One component of a heterogeneous job as the batch step runs it: a local process, or an srun with its tasks.

Input: one component of plan.json.  Output: processes that write JOB_RANK_result.pkl and, to ask for a requeue,
JOB_requeue.json.  An srun is not sent SIGTERM while there is time left, because it would kill its tasks at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.slurm.commands import srun_environment
from rlhpc.base.files import is_listed, leave_deleted_directory
from rlhpc.base.patience import Deadline

LEAVE_SIGNAL = signal.SIGUSR1  # srun forwards it, and Slurm itself never sends it
LEAVES_VARIABLE = "RLHPC_HET_LEAVES"  # set for a component that stores no checkpoint while others do
UNFINISHED = ".save_tmp"  # the suffix that submitit appends to a file while writing it
NAME_VARIABLE = "RLHPC_HET_COMPONENT"
RESULT_PATIENCE_S = 15.0  # a shared filesystem may show a file some seconds after it was written on another node
# A task opens its own log: the %t of srun's --output counts from -1 in a heterogeneous group since Slurm 24.11.
_INTO_OWN_LOG = 'exec >> "$1${SLURM_PROCID}_log.out" 2>> "$1${SLURM_PROCID}_log.$2"; shift 2; exec "$@"'


def note_path(folder: Path, job_id: str) -> Path:
    """The file by which rank 0 reports that its checkpoint is stored, and asks for a requeue."""
    return folder / f"{job_id}_requeue.json"


class ComponentProcess:
    """A component and its current process."""

    def __init__(self, plan: Mapping[str, Any], job_folder: Path, job_id: str) -> None:
        """plan: one entry of plan.json's components."""
        self.name: str = plan["name"]
        self.is_essential: bool = plan["is_essential"]
        self.stores_checkpoint: bool = plan["stores_checkpoint"]
        self.restarts_left: int = plan["restarts"]
        self.group: int | None = plan["group"]
        self.is_finished = False
        self._plan = plan
        self._job_id = job_id
        self._folder: Path = job_folder / self.name
        self._process: subprocess.Popen[bytes] | None = None

    # -------------------------------------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Start all its ranks; earlier results are removed, or they would be taken for those of this start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        leave_deleted_directory(self._folder)
        self._clean_partial_files()
        self.forget()
        if self._plan["in_batch_step"]:
            self._process = self._start_here()
        else:
            words = [*self._srun_words(), *self._plan["command"], str(self._folder)]
            self._process = subprocess.Popen(words, env=self._environment(srun_environment(any_component=True)))

    def forget(self) -> None:
        """Remove results and the note."""
        for rank in range(self._plan["num_tasks"]):
            self._result(rank).unlink(missing_ok=True)
        note_path(self._folder, self._job_id).unlink(missing_ok=True)

    def warn(self, warning: signal.Signals) -> None:
        """Ask rank 0 to store its checkpoint and to exit."""
        self._send(warning)

    def leave(self) -> None:
        """Ask every rank to exit now."""
        self._send(LEAVE_SIGNAL)

    def kill(self) -> None:
        """Kill every rank."""
        if self._process is None or self._process.poll() is not None:
            return
        if self._plan["in_batch_step"]:
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.send_signal(signal.SIGTERM)  # "srun: forcing job termination": SIGKILL for its tasks

    # ---------------------------------------------------------------------------------------------------------- state

    @property
    def is_alive(self) -> bool:
        """True while its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Exit status of its last process; None: it runs, or there was none."""
        return None if self._process is None else self._process.poll()

    @property
    def has_note(self) -> bool:
        """True if rank 0 asks for a requeue."""
        return is_listed(note_path(self._folder, self._job_id))

    def has_all_results(self, patience_s: float = 0.0) -> bool:
        """True if every rank has left a result.  An srun whose tasks never began may nevertheless exit with 0."""
        deadline = Deadline(patience_s)
        return all(self.has_result(rank, deadline.left_s) for rank in range(self._plan["num_tasks"]))

    def has_result(self, rank: int, patience_s: float = 0.0) -> bool:
        """True if a rank has left a result, good or bad."""
        return Deadline(patience_s).wait_for(lambda: is_listed(self._result(rank)), 0.2)

    # --------------------------------------------------------------------------------------------------------- inside

    def _clean_partial_files(self) -> None:
        """Remove files left by a kill in the middle of writing; submitit refuses to write while such a file exists.

        It removes the old checkpoint before it renames the new one: if the old one is missing, the new one is complete.
        """
        for half in self._folder.glob(f"*{UNFINISHED}"):
            whole = half.with_name(half.name[: -len(UNFINISHED)])
            if whole.name == f"{self._job_id}_submitted.pkl" and not whole.exists():
                half.rename(whole)
            else:
                half.unlink()

    def _result(self, rank: int) -> Path:
        return self._folder / f"{self._job_id}_{rank}_result.pkl"

    def _log(self, rank: str, ending: str) -> Path:
        return self._folder / f"{self._job_id}_{rank}_log.{ending}"

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        # LEAVES_VARIABLE is set if another component has submitted this job.
        kept = {key: value for key, value in inherited.items() if key != LEAVES_VARIABLE}
        leaves = {} if self.stores_checkpoint else {LEAVES_VARIABLE: "1"}
        return {**kept, NAME_VARIABLE: self.name, "SLURM_EXPORT_ENV": "ALL", **leaves}

    def _srun_words(self) -> list[str]:
        group = [] if self.group is None else [f"--het-group={self.group}"]
        # --wait=0: ranks may end at very different times.  A failing rank ends the others, which may wait for it.
        common = ["--wait=0", "--kill-on-bad-exit=1"]
        # Output of slurmstepd, and of sh before it has a log, goes through srun into the log of the batch step.
        ending = "out" if self._plan["stderr_to_stdout"] else "err"
        logged = ["/bin/sh", "-c", _INTO_OWN_LOG, "rlhpc", str(self._folder / f"{self._job_id}_"), ending]
        return ["srun", *group, *common, *self._plan["srun"], *logged]

    def _start_here(self) -> subprocess.Popen[bytes]:
        out = self._log("0", "out").open("ab")
        err = out if self._plan["stderr_to_stdout"] else self._log("0", "err").open("ab")
        variables = {**self._environment(os.environ), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        words = [*self._plan["command"], str(self._folder)]
        with out, err:
            return subprocess.Popen(words, env=variables, stdout=out, stderr=err, start_new_session=True)

    def _send(self, signum: signal.Signals) -> None:
        if self.is_alive:
            assert self._process is not None
            self._process.send_signal(signum)
