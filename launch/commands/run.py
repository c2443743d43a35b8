"""`rlhpc run`: check everything, prepare the run directory, run all roles on this machine and watch them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Self

from launch.checks.bias import unusual
from launch.checks.memory_verdict import judge_devices
from launch.checks.own_code import try_own_code
from launch.checks.preflight import preflight
from launch.common.text import quoted
from launch.doctor.gpus import gpus_here
from launch.evaluate.evaluation import end_all, preview_evaluations
from launch.plan.gpu_map import EVALUATION, VARIABLE, GpuMap, map_gpus
from launch.plan.processes import local_plan_document, process_names
from launch.plan.site_file import ClusterConfig
from launch.run_directory.owner import RunOwner, Tell, own_run
from launch.run_directory.prepare import NEWEST, ResumePoint, mint_keys, prepare_run_dir, refuse_taken_directory
from launch.run_files.records import last_error_in
from launch.run_files.run_state import Attempt, is_complete
from launch.supervisor.local_run import LocalSignals, note_stop, supervise_locally
from launch.supervisor.processes import StopSignal
from launch.verify.audit import look_before_going_on
from launch.view.run import RunView
from launch.view.standing import lines_about
from launch.view.status import Watch
from rlhpc.base.files import write_atomically
from rlhpc.base.host_address import refuse_foreign_network
from rlhpc.base.patience import briefly, patiently, seen
from rlhpc.base.processes import die_with
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------- beside run
#
# Run the [[evaluation]] tables of a run file beside a run on this machine: `rlhpc evaluate RUN_DIR --follow`.
#
# Input: the settings and GPUs of a run.  Output: evaluations in its directory, and evaluations/follow.log.  The process
# ends with this one.  The run never waits for it, and goes on if it fails.


NICENESS = 10  # where there are no GPUs: it takes cores that the run leaves
END_S = 3.0  # for a process that was asked to end; then the kernel ends it and its engines


class EvaluationBesideRun:
    """The command, while the block runs; nothing where the run file has no [[evaluation]]."""

    def __init__(self, config: Config, layout: RunLayout, gpus: GpuMap, tell: Callable[[str], None]) -> None:
        self._is_wanted, self._layout, self._gpus, self._tell = bool(config.evaluation), layout, gpus, tell
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_all([self._process], END_S)

    @property
    def log(self) -> Path:
        """What it says."""
        return self._layout.evaluations / "follow.log"

    def start(self) -> None:
        """Once the run directory is prepared."""
        if not self._is_wanted:
            return
        environment = dict(os.environ)
        if (devices := self._gpus.variable(EVALUATION)) is not None:
            environment[VARIABLE] = devices
        words = [sys.executable, "-u", "-P", "-m", "launch.cli", "evaluate", str(self._layout.root), "--follow"]
        with patiently(self._open_log, self.log) as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which saves; this one is then ended
                preexec_fn=partial(_begin, os.getpid(), 0 if self._gpus.devices else NICENESS),
            )

    def _open_log(self) -> IO[bytes]:
        self._layout.evaluations.mkdir(exist_ok=True)
        return self.log.open("ab")

    def look(self) -> None:
        """Say once that it has failed."""
        if self._process is None or (status := self._process.poll()) is None:
            return
        self._process = None
        if status != 0:
            why = seen(lambda: last_error_in(self.log), "") or f"status {status}"
            self._tell(f"[evaluation] has failed, and the run continues without it: {why}; see {self.log}")

    def finish(self) -> None:
        """Wait for the evaluation of a complete run, and report its results."""
        if not self._is_wanted:
            return
        if self._process is not None and self._process.poll() is None:
            self._tell(f"the run is complete; its last model is evaluated now, see {self.log}")
            try:
                self._process.wait()
            except KeyboardInterrupt:
                self._tell(f"`rlhpc evaluate {quoted(self._layout.root)}` continues the evaluation")
                return
        self.look()
        for line in seen(lambda: lines_about(RunView(self._layout).evaluations), list[str]()):
            self._tell(line)


def _begin(parent: int, niceness: int) -> None:
    """Set up the child between fork and exec; this process has one thread."""
    die_with(parent)
    os.nice(niceness)


# ------------------------------------------------------------------------------------------------------------------ run


MAX_RETRIES: int = ClusterConfig.model_fields["max_retries"].default


def run_locally(
    config: Config,
    *,
    resume: bool = False,
    fresh: bool = False,
    resume_from: ResumePoint = NEWEST,
    max_retries: int = MAX_RETRIES,
    is_quiet: bool = False,
    again: Sequence[str] = (),
) -> int:
    """Check everything, prepare the run directory, run all roles here, return the exit status.

    max_retries: attempts that may follow failed ones, without a new checkpoint in between.  is_quiet: no progress.
    again: words of the command that continues the run, for whoever stops it.
    Raises StopSignal: a signal has ended it before the run directory was its own, which is as it was.
    """
    layout, signals = RunLayout(config.run_directory), LocalSignals()
    owner: RunOwner | None = None
    watch = Watch(layout, sys.stderr, expected=process_names(config), is_quiet=is_quiet)
    with signals.listening(), ExitStack() as evaluating, ExitStack() as owning:
        try:
            with signals.raising():
                gpus = _checked(config, watch.tell)
                evaluation = evaluating.enter_context(EvaluationBesideRun(config, layout, gpus, watch.tell))
                owner = owning.enter_context(own_run(layout, watch.tell, may_take_over=resume or fresh))
                how = {"resume": resume, "fresh": fresh}
                refuse_taken_directory(layout, **how)
                if resume:
                    look_before_going_on(layout, resume_from, watch.tell)
                for line in try_own_code(config):
                    if line.startswith("warning"):
                        watch.tell(f"warning: {line.removeprefix('warning').lstrip()}")
                begun = prepare_run_dir(config, layout, **how, resume_from=resume_from, tell=watch.tell)
                cores = len(os.sched_getaffinity(0))
                plan = local_plan_document(config, layout, gpus, max_retries, num_cores=cores, again=again)
                briefly(lambda: write_atomically(layout.local_plan, plan.encode()), layout.local_plan)
                briefly(lambda: mint_keys(config, layout), layout.secrets)
                for change in begun.changed:
                    watch.tell(f"resumed with {change}")
                evaluation.start()
        except StopSignal:
            if owner is None or not owner.inherited or not layout.is_run:  # nothing was begun
                raise
            note_stop(layout)
            return 0
        signals.attend([watch.look, evaluation.look, owner.renew], owner.check)
        status = supervise_locally(
            layout,
            Attempt(begun.index, begun.resume_step, job_id=0, restart=0, fence=begun.owner),
            watch.tell,
            signals,
            descriptors=owner.inherited,
            begins=owner.begins,
        )
        watch.close()
        owning.close()
        if status == 0 and is_complete(layout):
            with suppress(StopSignal), signals.raising():
                evaluation.finish()
    return status


def _checked(config: Config, tell: Tell) -> GpuMap:
    """Check everything that can be checked before a run directory is made; returns which process has which GPU."""
    refuse_foreign_network(has_cuda=config.trainer.device == "cuda", has_vllm=config.generation.engine == "vllm")
    here = gpus_here(os.environ)
    gpus = map_gpus(config, here)
    findings = preflight(config)
    preview_evaluations(config, has_gpus=bool(here.words))
    for line in unusual(config):
        tell(f"warning: {line}")
    if gpus.devices and findings.shape is not None:
        try:
            judge_devices(config, findings.model, findings.shape, gpus, here.memory_gib)
        except ConfigError as error:  # an estimate: `rlhpc check` refuses, a start only warns
            tell(f"GPU memory may not suffice, as far as an estimate says: {error}")
    return gpus
