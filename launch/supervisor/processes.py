"""The processes that one job of a run starts: the controller, and everything that serves it.

Generators and reward services keep running from one attempt to the next; a trainer belongs to one attempt.
"""

from __future__ import annotations

from launch.run_files.events import Log
from launch.run_files.exit_records import read_record
from launch.run_files.plan_file import JobPart, Part
from launch.run_files.run_state import Attempt, read_progress
from launch.slurm.this_job import ThisJob
from launch.supervisor.signals import Signals
from launch.supervisor.steps import Step, Tether, start_beside, start_part
from rlhpc.deadline import Deadline
from rlhpc.patience import seen

POLL_S = 0.1


class Processes:
    """Starts, watches and ends them.  `controller` is the one of the current attempt."""

    def __init__(self, plan: JobPart, job: ThisJob, log: Log, signals: Signals, tether: Tether | None) -> None:
        self._plan, self._job, self._log, self._signals, self._tether = plan, job, log, signals, tether
        self.controller: Step | None = None
        self._steps: dict[str, Step] = {}  # everything else, by name
        self._starts: dict[str, int] = {}  # number of starts of each, in this life
        self._ends: dict[str, int] = {}  # how often each has ended and was started again by its task, as far as seen
        self._reported: set[str] = set()  # those whose end was returned by ended()

    @property
    def has_controller(self) -> bool:
        """True while the controller runs."""
        return self.controller is not None and self.controller.status() is None

    def start(self, attempt: Attempt) -> None:
        """Start the controller, and every component that is not still running from the previous attempt."""
        self._reported.clear()
        for group, part in enumerate(self._plan.parts):
            if not part.runs_in_batch_step:
                self._start_part(part, group, attempt)
                continue
            for share in part.shares:
                for index in range(share.num_processes):
                    self._start_beside(part, share.role, index, attempt)

    def ended(self) -> list[Step]:
        """Components that ended unasked, each once per attempt; also reports processes that their task restarts."""
        found = []
        for name, step in self._steps.items():
            if step.status() is None:
                self._report_restart(name, step)
            elif not step.asked and name not in self._reported:
                self._reported.add(name)
                found.append(step)
        return found

    def others_serve(self, role: str) -> bool:
        """True if processes of this role run in this job, or are registered by others."""
        steps = self._of(role)
        if any(step.status() is None for step in steps):
            return True
        own = {name for step in steps for name in step.processes}
        progress = read_progress(self._plan.layout)
        return progress is not None and any(name not in own for name in progress.names(role))

    def end_trainer(self, patience_s: float) -> None:
        """Wait for all ranks; kill those that do not end in time."""
        deadline = Deadline(patience_s)
        for step in self._of("trainer"):
            step.asked = True
            if not step.wait(deadline.left_s, self._signals.sleep):
                step.kill()

    def ask_all_to_leave(self) -> list[Step]:
        """Ask everything but the controller to exit; returns what is running."""
        left = [step for step in self._steps.values() if step.status() is None]
        for step in left:
            if not step.asked:
                step.ask_to_leave()
        return left

    def end_all(self, grace_s: float, *, is_wanted: bool) -> None:
        """End every process of this job; generators hand back their leases, unless Ctrl-C is pressed meanwhile.

        is_wanted: somebody has asked for it, so that a process that has to be killed is no fault of the run.
        """
        if self.controller is not None:
            self.controller.kill()
        left, interrupts = self.ask_all_to_leave(), self._signals.interrupts

        def is_over() -> bool:
            return self._signals.interrupts > interrupts or all(step.status() is not None for step in left)

        Deadline(grace_s).wait_for(is_over, POLL_S, self._signals.sleep)
        for step in left:
            if step.status() is None:
                self._log.say("stop" if is_wanted else "kill", f"{step.name} is killed: it did not exit in time")
                step.kill()

    # ------------------------------------------------------------------------------------------------------- internals

    def _of(self, role: str) -> list[Step]:
        return [step for step in self._steps.values() if step.role == role]

    def _start_beside(self, part: Part, role: str, index: int, attempt: Attempt) -> None:
        name = f"{role}-{part.share_of(role).first_replica + index}"
        if self._is_running(name):
            return
        self._ends[name] = 0
        step = start_beside(self._plan, part, role, index, attempt, self._count(name), self._tether)
        if role == "controller":
            self.controller = step
        else:
            self._steps[name] = step

    def _start_part(self, part: Part, group: int, attempt: Attempt) -> None:
        if not self._is_running(part.name):
            het_group = group if self._job.is_heterogeneous else None
            start = self._count(part.name)
            self._steps[part.name] = start_part(self._plan, part, het_group, attempt, start)

    def _is_running(self, name: str) -> bool:
        return name in self._steps and self._steps[name].status() is None

    def _count(self, name: str) -> int:
        self._starts[name] = self._starts.get(name, -1) + 1
        return self._starts[name]

    def _report_restart(self, name: str, step: Step) -> None:
        """Report that a process beside the supervisor has ended, and that its task restarts it."""
        if step.is_srun:
            return
        record = seen(lambda: read_record(self._plan.layout, name, step.attempt.index), None)
        if record is None:
            return
        if record.starts > self._ends[name] and not record.is_final:
            self._ends[name] = record.starts
            self._log.say("restart", f"{record.cause}; it is restarted")
