"""Supervise a heterogeneous job whose tasks are callables: `python -m launch.submitit_hetjob.supervisor --folder F`.

Input: FOLDER/plan.json, written by script.py; runs in the batch step; FOLDER is named after the job id.
Output: one step per component; the ranks write their own results (step.py).
Guarantees: a component succeeds only with exit status 0 and a result from every rank; if an essential component fails,
the others are ended; a requested requeue is done by `scontrol requeue` from here after every srun has ended, the one
form that works on Slurm 22.05 to 26.05 (from inside a step, 25.11 cancels the job instead).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from launch.slurm.commands import SlurmError
from launch.slurm.queue import component_states, requeue
from launch.submitit_hetjob.step import RESULT_PATIENCE_S, ComponentProcess
from rlhpc.base.files import write_atomically
from rlhpc.base.patience import Deadline
from rlhpc.base.processes import name_nameless_user

POLL_S = 0.2
NOTE_POLL_S = 2.0  # notes are files on a shared filesystem
SETTLED_S = 2.0  # for a result that was written before an exit to become visible
LEAVE_S = 10.0  # from the request to exit to the kill
PUBLISH_S = 60.0  # the job may start before the submitting process knows its id
SLURM_PATIENCE_S = 60.0  # for a slurmctld that restarts


class CallablesSupervisor:
    """Supervises one life of one job: from its start to its end or requeue."""

    def __init__(self, folder: Path, job_id: str, plan: dict[str, Any]) -> None:
        """plan: of plan.json."""
        self._job_id = job_id
        self._finished_file = folder / "finished.json"
        self._steps = [ComponentProcess(each, folder, job_id) for each in plan["components"]]
        self._warning = getattr(signal, "SIG" + plan["warning"])
        self._checkpoint_s = max(plan["warn_s"] - 15.0, plan["warn_s"] / 2)
        self._is_warned = False  # by Slurm, or by scancel --batch
        self._next_look_for_notes = 0.0

    def run(self) -> int:
        """Run all components to their end, or to a requeue; returns the exit status of the batch step."""
        for signum in (self._warning, signal.SIGTERM):
            signal.signal(signum, self._hear)
        done = self._read_finished()
        for step in self._steps:
            # After a requeue only components that had not finished before the warning are started again.
            step.is_finished = step.name in done
            if step.is_finished:
                _say(f"{step.name}: finished before the job was requeued")
            else:
                step.start()
        try:
            return self._watch()
        finally:
            self._end(self._steps)

    def _watch(self) -> int:
        while not all(step.is_finished for step in self._steps):
            if self._is_warned or self._is_asked():
                return self._go_round()
            for step in self._steps:
                if not step.is_finished and step.exit_status is not None and not self._settle(step):
                    return 1
            time.sleep(POLL_S)
        return 0

    def _settle(self, step: ComponentProcess) -> bool:
        """Handle a component that has ended; False: the job has failed with it."""
        status = step.exit_status
        if status == 0 and step.has_all_results(RESULT_PATIENCE_S):
            self._finish(step)
            _say(f"{step.name}: finished")
            return True
        what = f"exit status {status}" if status else "not every rank has left a result"
        if step.is_essential:
            _say(f"{step.name}: failed ({what}); it is essential, ending all others")
            return False
        if step.restarts_left > 0:
            step.restarts_left -= 1
            _say(f"{step.name}: failed ({what}); restarted, {step.restarts_left} restarts left")
            step.start()
            return True
        _say(f"{step.name}: failed ({what}); the others continue without it")
        step.is_finished = True  # until a requeue: whatever is ending the whole job may have ended this component first
        return True

    def _finish(self, step: ComponentProcess) -> None:
        """Record success: the component is not restarted after a requeue."""
        step.is_finished = True
        with suppress(OSError):  # a full disk: it runs again after a requeue
            write_atomically(self._finished_file, json.dumps([*self._read_finished(), step.name]).encode())

    def _read_finished(self) -> list[str]:
        """Names of components that are not started again after a requeue."""
        try:
            names: list[str] = json.loads(self._finished_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        return names

    # ------------------------------------------------------------------------------------------------ another life

    def _hear(self, signum: int, _: FrameType | None) -> None:
        self._is_warned = True

    def _is_asked(self) -> bool:
        """True if a component has stored a checkpoint because a signal reached its tasks, but not this process."""
        ended = [step for step in self._steps if not step.is_finished and step.exit_status is not None]
        if time.monotonic() < self._next_look_for_notes and not ended:
            return False
        self._next_look_for_notes = time.monotonic() + NOTE_POLL_S
        asking = [step for step in self._steps if not step.is_finished and step.has_note]
        # Cancelling a single component makes it store a checkpoint too; that is no reason to requeue.
        return bool(asking) and any(self._is_running(step) for step in asking)

    def _go_round(self) -> int:
        """Let every component store its checkpoint, end all of them, and have Slurm requeue the job."""
        _say("warned: close to the time limit, or the nodes are needed by other jobs")
        late = [step for step in self._steps if not step.is_finished]
        storing = [step for step in late if step.stores_checkpoint]
        for step in storing:
            if not step.has_note:
                step.warn(self._warning)
        deadline = Deadline(self._checkpoint_s)
        deadline.wait_for(lambda: not any(step.is_alive and not step.has_note for step in storing), POLL_S)
        silent = [step for step in storing if not step.is_alive and not step.has_note]
        self._end(late)
        if self._is_over(silent):
            return 0 if all(step.is_finished for step in self._steps if step.is_essential) else 1
        for step in late:
            if not step.is_finished:
                step.forget()
        return self._requeue()

    def _is_over(self, silent: list[ComponentProcess]) -> bool:
        """True if the job must not be requeued.  silent: components that ended on their own, without a checkpoint."""
        for step in silent:
            if step.exit_status == 0 and step.has_all_results(RESULT_PATIENCE_S):
                self._finish(step)
            elif step.is_essential and step.has_result(0, SETTLED_S):  # timed out too often, or checkpoint() has failed
                _say(f"{step.name}: will not be continued, its result says why")
                return True
        if not any(step.is_essential and not step.is_finished for step in self._steps):
            _say("every essential component has finished")
            return True
        if not self._is_running(self._steps[0]):
            _say("Slurm is ending the job itself: cancelled, or already requeued")
            return True
        return False

    def _requeue(self) -> int:
        try:
            requeue(self._job_id, SLURM_PATIENCE_S)
        except SlurmError as error:
            _say(f"cannot be requeued: {error}")
            return 1
        _say("requeued")
        return 0

    def _is_running(self, step: ComponentProcess) -> bool:
        """True if Slurm says that this component is running; a requeue would revive a cancelled job."""
        try:
            states = component_states(self._job_id, SLURM_PATIENCE_S)
        except SlurmError as error:
            _say(f"Slurm did not answer: {error}")
            return False
        return states.get(step.group or 0) == "RUNNING"

    def _end(self, steps: list[ComponentProcess]) -> None:
        """End every process, gracefully if there is time."""
        for step in steps:
            step.leave()
        for patience_s in (LEAVE_S, LEAVE_S):
            if Deadline(patience_s).wait_for(lambda: not any(step.is_alive for step in steps), POLL_S):
                return
            for step in steps:
                step.kill()


def _say(what: str) -> None:
    with suppress(OSError):  # a full disk must not end the job because its log cannot be written
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}", flush=True)


def read_plan(folder: Path, patience_s: float = PUBLISH_S) -> dict[str, Any]:
    """The job's plan.  Raises SystemExit if it does not appear, or has another schema."""
    path = folder / "plan.json"
    if not Deadline(patience_s).wait_for(path.exists, POLL_S):
        raise SystemExit(f"{path}: missing after {patience_s:.0f} s; does this node see the executor's folder?")
    plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if plan.get("schema") != 1:
        raise SystemExit(f"{path}: schema={plan.get('schema')!r}: legal: 1; submitted by another version of rlhpc")
    return plan


def main() -> int:
    """Read the plan and supervise the job."""
    parser = argparse.ArgumentParser(description="Run the components of one heterogeneous job (in its batch step).")
    parser.add_argument("--folder", type=Path, required=True, help="the executor's folder")
    folder = parser.parse_args().folder
    name_nameless_user()
    job_id = os.environ["SLURM_JOB_ID"]
    _say(f"job {job_id}, life {os.environ.get('SLURM_RESTART_COUNT', '0')}, on {os.environ.get('SLURM_JOB_NODELIST')}")
    return CallablesSupervisor(folder / job_id, job_id, read_plan(folder / job_id)).run()


if __name__ == "__main__":
    sys.exit(main())
