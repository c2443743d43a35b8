"""`rlhpc run`: check everything, prepare the run directory, run all roles on this machine and watch them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from launch.checks.bias import unusual
from launch.checks.memory_verdict import judge_devices
from launch.checks.own_code import try_own_code
from launch.checks.preflight import (
    doubts_of_demonstrations,
    has_stage_before,
    preflight,
    refuse_heads_of_gpus,
    stage_of,
)
from launch.commands.arguments import continued, resume_point
from launch.common.text import print_or_lose
from launch.doctor.gpus import gpus_here
from launch.evaluate.evaluation import preview_evaluations
from launch.plan.gpu_map import GpuMap, map_gpus
from launch.plan.processes import expected_processes, local_plan_document
from launch.plan.site_file import ClusterConfig
from launch.run_directory.prepare import (
    NEWEST,
    ResumePoint,
    mint_keys,
    prepare_run_dir,
    refuse_other_lessons,
    refuse_taken_directory,
)
from launch.run_files.run_state import Attempt, is_complete, last_words
from launch.supervisor.local_run import LocalSignals, note_stop, supervise_locally
from launch.supervisor.processes import StopSignal
from launch.verify.audit import look_before_going_on
from launch.view.run import RunView
from launch.view.standing import lines_about
from launch.view.status import Watch
from rlhpc.base.files import write_atomically
from rlhpc.base.host_address import refuse_foreign_network
from rlhpc.base.ownership import RunOwner, Tell
from rlhpc.base.patience import briefly, seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config, with_values
from rlhpc.protocol.errors import ConfigError

MAX_RETRIES: int = ClusterConfig.model_fields["max_retries"].default


def run(options: argparse.Namespace) -> int:
    """Do a run, and print how it ended; return the exit status."""
    config = load_config(options.run_file, options.overrides)
    if has_stage_before(config):
        preflight(config)  # refuses faults of the RL stage before hours of fine-tuning
        stage = stage_of(config)
        status = _stage_first(stage, options)
        if status or not is_complete(RunLayout(stage.run_directory)):  # it was stopped
            return status
        taught = with_values(config, {"model.path": RunLayout(stage.run_directory).model})
        return _run(taught, options, may_begin=True)
    return _run(stage_of(config) if config.is_supervised else config, options)


def _stage_first(stage: Config, options: argparse.Namespace) -> int:
    """Do or continue the supervised fine-tuning before an RL run; return its exit status.

    Raises RunDirectoryError: it is complete, with other settings or demonstrations.
    """
    layout = RunLayout(stage.run_directory)
    if not options.fresh and is_complete(layout):
        refuse_other_lessons(stage, layout)
        return 0
    return _run(stage, options, may_begin=True)


def sft(options: argparse.Namespace) -> int:
    """Run only the supervised fine-tuning of a run file, here or as jobs; return the exit status."""
    stage = stage_of(load_config(options.run_file, options.overrides))
    if options.site is None:
        if options.after or options.wait:
            raise ConfigError(f"{'--after' if options.after else '--wait'} is for jobs: use it with --site SITE.toml")
        return _run(stage, options)
    from launch.commands.submit import submit_here  # with what a run on this machine does not need

    return submit_here(stage, options.site, options)


def _run(config: Config, options: argparse.Namespace, *, may_begin: bool = False) -> int:
    """Run a stage.  may_begin: --resume begins it if it has no directory, as the stage before may have been stopped."""
    resume_from, layout = resume_point(options), RunLayout(config.run_directory)
    again = continued(options.typed)
    how = {} if options.max_retries is None else {"max_retries": options.max_retries}
    resume = options.resume and (layout.is_run or not may_begin)
    how |= {"resume": resume, "fresh": options.fresh, "is_quiet": options.quiet, "again": again}
    status = run_locally(config, resume_from=resume_from, **how)
    unseen = [f"{layout.root}: cannot be read at the moment; `rlhpc status` says later how it ended"]
    if not options.quiet:
        for line in seen(lambda: last_words(layout, f"`{shlex.join(again)}`", status), unseen):
            print_or_lose(line)
    return status


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

    max_retries: consecutive failed attempts that are retried; a checkpoint resets it.  is_quiet: show no progress.
    again: words of the command that continues the run, shown when it is stopped.
    Raises StopSignal: a signal came before the run directory was owned; it is unchanged.
    """
    layout, signals = RunLayout(config.run_directory), LocalSignals()
    owner: RunOwner | None = None
    watch = Watch(layout, sys.stderr, expected=expected_processes(config), is_quiet=is_quiet)
    with signals.listening(), ExitStack() as owning:
        try:
            with signals.raising():
                gpus = _checked(config, watch.tell)
                owner = owning.enter_context(RunOwner.take(layout, watch.tell, may_take_over=resume or fresh))
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
        except StopSignal:
            if owner is None or not owner.inherited or not layout.is_run:  # nothing was begun
                raise
            note_stop(layout)
            return 0
        signals.attend([watch.look, owner.renew], owner.check)
        status = supervise_locally(
            layout,
            Attempt(begun.index, begun.resume_step, job_id=0, restart=0, fence=begun.owner),
            watch.tell,
            signals,
            descriptors=owner.inherited,
            begins=owner.begins,
        )
        watch.close()
    if status == 0 and config.evaluation and is_complete(layout):
        for line in seen(lambda: lines_about(RunView(layout).evaluations), list[str]()):
            watch.tell(line)
    return status


def _checked(config: Config, tell: Tell) -> GpuMap:
    """Check everything that can be checked before a run directory is made; return the GPUs of processes."""
    refuse_foreign_network(has_cuda=config.trainer.device == "cuda", has_vllm=config.generation.engine == "vllm")
    here = gpus_here(os.environ)
    gpus = map_gpus(config, here)
    findings = preflight(config)
    if not here.words:
        refuse_heads_of_gpus(config, findings.model)
    preview_evaluations(config, has_gpus=bool(here.words))
    for line in (*unusual(config), *doubts_of_demonstrations(config, findings)):
        tell(f"warning: {line}")
    if gpus.devices and findings.shape is not None:
        try:
            judge_devices(config, findings.model, findings.shape, gpus, here.memory_gib)
        except ConfigError as error:  # only an estimate: `rlhpc check` refuses, a start warns
            tell(f"GPU memory may not suffice, as far as an estimate says: {error}")
    return gpus
