"""Stop a run: gracefully with a checkpoint, or at once.

Input: a run directory.  Ends the launcher on this machine or the jobs in Slurm.  Guarantees: only the recorded launcher
and recorded job ids are signalled or cancelled, nothing by name; no job of a resume that begins meanwhile.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from launch.common.text import print_or_lose, quoted
from launch.run_files.records import name_of_jobs, read_job_records
from launch.run_files.run_state import command_to_continue, what_was_saved
from launch.slurm.commands import SlurmError
from launch.slurm.queue import PATIENCE_S, JobRow, QueueLook, cancel, look_at_jobs
from launch.slurm.states import JobStage
from rlhpc.base.files import write_atomically
from rlhpc.base.ownership import Launcher, await_left_behind
from rlhpc.base.patience import Deadline
from rlhpc.base.processes import ProcessIdentity
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_INTERRUPTED, RunDirectoryError

Tell = Callable[[str], None]

ASK_S = 3.0
SAY_S = 60.0  # longest time without a line of progress
FOLLOWERS_S = 120.0  # jobs that outlive the controller by this much are taken not to end by themselves


def stop(options: argparse.Namespace) -> int:
    """Stop a run; returns the exit status."""
    return stop_run(options.layout, now=options.now, tell=print_or_lose)


def stop_run(layout: RunLayout, *, now: bool, tell: Tell) -> int:
    """Finish the step, save, and end every process of a run; returns the exit status when all have ended.

    now: do not finish the step.  A local run gets seven seconds, as after Ctrl-C; jobs are cancelled.
    Returns 1 for a run that ended with its last steps in no checkpoint and no journal.  Several callers at once are
    allowed.
    Raises RunDirectoryError: not a run directory; SlurmError: it has jobs, and Slurm does not answer.
    """
    layout.require_run()
    launcher = Launcher.alive(layout, tell)
    if launcher is not None:
        refusal = _refusal_of(layout.abort_request if now else layout.stop_request)
        by = "" if refusal is None else _signal_launcher(launcher.process, refusal, now=now)
        how = "to end at once" if now else "to finish its step and save"
        tell(f"asked        launcher pid {launcher.process.pid} on {launcher.process.host} {how}{by}")
        launcher.await_end(tell)
        return _say_outcome(layout, command_to_continue(layout), tell, now=now)
    request = layout.abort_request if now else layout.stop_request
    if layout.summary.exists() and (trouble := _look(layout).trouble):
        tell(f"{layout.root}: complete; its jobs, if there are any, end by themselves ({trouble})")
        return 0
    try:
        if not _lives(layout, request, tell):
            await_left_behind(layout, tell)
            _end_following(layout, tell)
            tell(f"{layout.root}: this run is not running")
            return 0
        refusal = _refusal_of(request)
        if refusal is not None:
            tell(f"asked        by scancel, for {refusal}" + _HOW_IT_ENDS[now])
        others = _see_to_the_end(layout, now, request, tell, is_by_signal=refusal is not None)
        if refusal is None and not request.exists():  # and a follower is the new jobs', too
            left = f"; left alone: job {', '.join(others)}" if others else ""
            tell(f"{layout.root}: stopped, and resumed since, by another command{left}")
            return 0
        _end_following(layout, tell)
    except SlurmError as error:
        ids = " ".join(str(record.job_id) for record in read_job_records(layout))
        raise SlurmError(
            f"{error}; the request {request.name} is in {layout.root}: running jobs see it and end by themselves, "
            f"pending ones when they start; repeat the command, or `scancel {ids}`, to end the rest"
        ) from error
    except KeyboardInterrupt:
        if not request.exists():
            raise
        tell(f"{layout.root}: the request stays and its jobs will end; `rlhpc status {quoted(layout.root)}` shows them")
        return EXIT_INTERRUPTED
    return _say_outcome(layout, f"`rlhpc resume {quoted(layout.root)}`", tell, now=now)


# Signals to a launcher or a job's supervisor, for when no request can be written to the run directory.
_HOW_IT_ENDS = {
    False: "; what cannot be saved there within five minutes is lost (`rlhpc stop --now` does not wait)",
    True: "",
}


def _refusal_of(request: Path) -> str | None:
    """Write a request; return the reason if that fails, else None."""
    try:
        write_atomically(request, b"")
    except OSError as error:
        return f"{request} cannot be written: {error.strerror or error}"
    return None


def _signal_launcher(launcher: ProcessIdentity, refusal: str, *, now: bool) -> str:
    """Send the launcher a signal; return a message.  Raises RunDirectoryError: on another machine, of another user."""
    number = signal.SIGINT if now else signal.SIGTERM
    if not launcher.is_here:
        command = f"`kill -{number.name.removeprefix('SIG')} {launcher.pid}`"
        raise RunDirectoryError(f"{refusal}; {command} on {launcher.host} asks the run to end")
    try:
        os.kill(launcher.pid, number)
    except ProcessLookupError:
        return ", which has ended"
    except PermissionError as error:
        raise RunDirectoryError(f"{refusal}; nor can pid {launcher.pid} be sent a signal: {error.strerror}") from error
    return f" by {number.name}, for {refusal}{_HOW_IT_ENDS[now]}"


def _lives(layout: RunLayout, request: Path, tell: Tell) -> bool:
    """Whether jobs of the run are in the queue.  While Slurm does not answer, running jobs are asked already."""
    is_new = not request.exists()
    was_silent = False

    def ask_all_the_same(trouble: str) -> None:
        nonlocal was_silent
        was_silent = True
        refusal = _refusal_of(request)
        asked = f"asked        by the file {request.name}, which running jobs see" if refusal is None else refusal
        tell(f"{asked}: {trouble}; trying again")

    if _living(layout, ask_all_the_same):
        return True
    if was_silent and is_new:
        request.unlink(missing_ok=True)
    return False


def _see_to_the_end(layout: RunLayout, now: bool, request: Path, tell: Tell, *, is_by_signal: bool) -> list[str]:
    """Wait until all jobs have ended, or until the run is resumed; returns the jobs of the resume.

    is_by_signal: no request could be written: the controller's job is sent a signal, and after its end the other jobs
    are cancelled.
    """
    said, said_at = "", 0.0
    led_at, pause_s, is_first = time.monotonic(), 0.2, True
    while rows := _living(layout):
        # A resume begins when all jobs have ended: it deletes the request, then submits jobs of its own.
        if not is_by_signal and not request.exists():
            return list(dict.fromkeys(str(row.job_id) for row in rows))
        controller_jobs = {record.job_id for record in read_job_records(layout) if record.hosts_controller}
        waiting = [row for row in rows if row.state.life in (JobStage.WAITING, JobStage.HELD)]
        if any(row.job_id in controller_jobs for row in rows):
            led_at = time.monotonic()
            if is_by_signal and is_first and not now:
                cancel(controller_jobs, "--batch", "--signal=TERM", patience_s=PATIENCE_S)
        elif is_by_signal:
            led_at = -FOLLOWERS_S
        elif is_first and controller_jobs and not now:
            tell("cancelled    what is left: the controller's job has ended before, so nothing can be saved any more")
            led_at = -FOLLOWERS_S
        is_first = False
        if now or time.monotonic() - led_at > FOLLOWERS_S:
            cancel((row.job_id for row in rows if row.state.life is not JobStage.ENDING), patience_s=PATIENCE_S)
        elif waiting:  # cancels only jobs that have not started meanwhile
            cancel((row.job_id for row in waiting), "--state=PENDING", patience_s=PATIENCE_S)
        words = ", ".join(dict.fromkeys(map(_describe, rows)))
        if words != said or time.monotonic() - said_at > SAY_S:
            tell(f"waiting for  {words}")
            said, said_at = words, time.monotonic()
        pause_s = min(2 * pause_s, ASK_S)
        time.sleep(pause_s)
    return []


def _describe(row: JobRow) -> str:
    words = f"{row.name} {row.label} {row.state.name.lower()}"
    if row.state.name != "SUSPENDED":
        return words
    return f"{words} ({row.state.what}; after `scontrol resume {row.job_id}`, or `rlhpc stop --now`, it can end)"


def _living(layout: RunLayout, on_silence: Tell | None = None) -> list[JobRow]:
    """Jobs of the run that have not ended.  on_silence: called once if Slurm does not answer.  Raises SlurmError."""
    deadline = Deadline(PATIENCE_S)
    while (look := _look(layout)).trouble:
        if on_silence is not None:
            on_silence(look.trouble)
            on_silence = None
        if deadline.is_over or "no such command" in look.trouble:
            raise SlurmError(look.trouble)
        time.sleep(ASK_S)
    return [row for row in look.rows if row.state.is_alive]


def _look(layout: RunLayout) -> QueueLook:
    return look_at_jobs([record.job_id for record in read_job_records(layout)], run_name=name_of_jobs(layout))


def _say_outcome(layout: RunLayout, command: str, tell: Tell, *, now: bool) -> int:
    """Report what was saved, and how to continue; returns 1 if steps were lost although `now` was not requested."""
    if layout.summary.exists():
        tell(f"{layout.root}: complete")
        return 0
    saved = what_was_saved(layout, command)
    tell(saved.words)
    return 1 if saved.are_steps_lost and not now else 0


def _end_following(layout: RunLayout, tell: Tell) -> None:
    if layout.evaluations.exists():
        from launch.evaluate.job import end_following  # loads as much as all the rest

        end_following(layout, tell)
