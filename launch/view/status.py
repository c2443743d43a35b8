"""Current activity of a run, read from its directory: for the progress line and `rlhpc status`.

Input: status.json, which the controller replaces about once a second, and, for a run under Slurm, the job view of
launch/view/jobs.py.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from launch.common.text import counted, escaped, json_text, printable, quoted, shortened
from launch.run_files.records import name_of_jobs, read_job_records
from launch.run_files.run_state import certain_document, is_complete, read_document, saved_step
from launch.slurm.queue import JobRow, look_at_jobs
from launch.slurm.states import JobStage, reason_in_words
from launch.view.jobs import SlurmView, document_of, lines_of, look_at_run
from launch.view.run import RunView
from launch.view.standing import Queue, State, lines_about, standing_of
from rlhpc.base.files import write_synced
from rlhpc.base.patience import patiently, seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_INTERRUPTED, RunDirectoryError

if TYPE_CHECKING:
    from rlhpc.buffer.lost_leases import Suspicion
    from rlhpc.metrics.meters import ProgressLine
    from rlhpc.protocol.contracts import Clock


# -------------------------------------------------------------------------------------------------------- disk troubles
#
# Reasons why a run cannot write: from its status, or from a test of its disk.
#
# On a full disk status.json cannot be written either: an old status may mean that.

OLD_S = 10.0  # age of a status from which on its controller counts as unable to write
_PROBE_BYTES = 16 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_troubles(view: RunView) -> Sequence[str]:
    """Troubles of the disk, in words.  Writes and deletes a file if the status is old."""
    layout, status = view.layout, view.status
    said: Sequence[str] = status.get("disk_troubles", ())
    is_over = view.phase == "stopped" or layout.summary.exists()
    if said or is_over or not time.time() - status.get("unix_time_s", time.time()) > OLD_S:
        return said
    full = _is_full(layout)
    return [f"{full} in {layout.root}, where the run can write nothing any more, its status neither"] if full else ()


def _is_full(layout: RunLayout) -> str:
    """The system's error on writing a file, "" if there is room.  Not by statvfs, which ignores quotas."""
    probe = layout.root / f".probe.{uuid.uuid4().hex[:12]}.tmp"
    try:
        write_synced(probe, bytes(_PROBE_BYTES))
    except OSError as error:  # no conclusion from another user's directory
        return os.strerror(error.errno) if error.errno in _FULL else ""
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""


# ------------------------------------------------------------------------------------------------------- evaluation job
#
# The job that evaluates a run during training, in a line of `rlhpc status`: it is not one of the run's jobs.
#
# Input: evaluations/job.json and squeue.  Output: a line if somebody may have to act; none for a running job.


def lines_about_evaluation_job(layout: RunLayout) -> list[str]:
    """Lines on the evaluation job of a run whose jobs live.  None: no such job, it runs, or Slurm does not answer."""
    number = read_document(layout.evaluations / "job.json").get("job_id")
    if not isinstance(number, int):
        return []
    look = look_at_jobs([number])
    living = [row for row in look.rows if row.state.is_alive]
    if look.trouble or any(row.state.life in (JobStage.ON_NODES, JobStage.ENDING) for row in living):
        return []
    if living:
        why = reason_in_words(living[0].reason).replace("JOB", str(number))
        return [f"evaluation  job {number} is {living[0].state.name}{f': {why}' if why else ''}"]
    return [
        f"evaluation  job {number} has ended, and nothing evaluates this run any more: "
        f"{layout.evaluations}/job-{number}.log; "
        f"`rlhpc evaluate {quoted(layout.root)} --follow --site SITE.toml` submits it "
        "again"
    ]


# --------------------------------------------------------------------------------------------------------- status notes
#
# Lines of `rlhpc status` about the guard, quarantined prompts, and evaluations.
#
# Input: guard.jsonl, lost_leases.jsonl, jobs/failures.json, evaluations/ of a run directory.  Output: lines, or JSON.
# Imports nothing if none of these files exists.

NUM_SHOWN = 5  # prompts


@dataclass(frozen=True)
class Notes:
    """Remarks of a status."""

    guard: Sequence[dict[str, Any]]  # entries of guard.jsonl, oldest first
    quarantined: Sequence[Suspicion]  # prompts that are no longer given to generators
    suspects: Sequence[Suspicion]  # prompts suspected of a death, which may still be completed
    evaluations: dict[str, dict[int, dict[str, Any]]]  # figures by dataset and step
    retries: Mapping[str, Any] = field(default_factory=dict)  # failures.json, if there is no newer checkpoint

    def lines(self) -> list[str]:
        """Lines for people; none if there is nothing to report."""
        found = []
        if self.retries:
            tries, most = counted(self.retries["failures"], "attempt"), self.retries.get("max_retries")
            limit = "" if most is None else f", of at most {most + 1} (cluster.max_retries={most})"
            why = f": {shortened(said)}" if (said := self.retries.get("why")) else ""
            found.append(f"retries   {tries} without a checkpoint beyond step {self.retries['saved_step']}{limit}{why}")
        if self.quarantined:
            more = [f"and {len(self.quarantined) - NUM_SHOWN} more"] * (len(self.quarantined) > NUM_SHOWN)
            shown = "; ".join([*(shortened(each.text) for each in self.quarantined[:NUM_SHOWN]), *more])
            found.append(
                f"quarantined prompts   {len(self.quarantined)}: {shown}; "
                "a resume with --lift-quarantine samples them again"
            )
        if self.suspects:
            found.append(f"suspect prompts   {len(self.suspects)}; generators or reward workers died with them")
        if self.guard:
            last = self.guard[-1]
            number = f"{len(self.guard)} {'action' if len(self.guard) == 1 else 'actions'}"
            found.append(
                f"guard   {number}, the last one: {last['action']} (attempt {last['attempt']}), {last['text']}"
            )
        return found + lines_about(self.evaluations)

    def as_document(self) -> dict[str, Any]:
        """The remarks as a JSON object."""
        return {
            "guard": [*self.guard],
            "quarantined": [asdict(each) for each in self.quarantined],
            "suspects": [asdict(each) for each in self.suspects],
            "retries": dict(self.retries),
            "evaluations": self.evaluations,
        }


def read_notes(view: RunView) -> Notes:
    """Read the remarks from a run's files.  Raises RunDirectoryError if one cannot be read."""
    try:
        known = view.suspicions if view.suspicions and view.config is not None else []  # else `rlhpc check` reports it
        max_attempts = view.config.admission.max_attempts if known and view.config is not None else 0
        quarantined = [each for each in known if each.is_quarantined(max_attempts)]
        suspects = [each for each in known if not each.is_quarantined(max_attempts)]
        return Notes(
            [asdict(entry) for entry in view.guard], quarantined, suspects, view.evaluations, _retries(view.layout)
        )
    except OSError as error:
        raise RunDirectoryError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _retries(layout: RunLayout) -> dict[str, Any]:
    """Failures since the last checkpoint; {} if there is a newer one, or the run is complete."""
    document = read_document(layout.failures)
    numbers = document.get("failures"), document.get("saved_step")
    if not all(isinstance(number, int) for number in numbers) or layout.summary.exists():
        return {}
    return document if saved_step(layout) <= document["saved_step"] else {}


# --------------------------------------------------------------------------------------------------------------- status

NUM_FIGURES = 2  # lines of figures at the head of a status
WIDTH = 80  # columns, of counts
MOST_NAMES = 4  # of processes, in one line
_OVER = ("admitted", "released", "dropped")  # counts since the start of the run


def show_status(options: argparse.Namespace) -> int:
    """Print the status; returns exit status 0."""
    print(render_status(options.layout, as_json=options.json))
    return 0


def render_status(layout: RunLayout, as_json: bool = False) -> str:
    """Return a table of every role, and of every job under Slurm.  as_json: as a JSON document.

    Raises RunDirectoryError if this is no run directory.
    """
    layout.require_run()
    view = RunView(layout)
    status = view.status or certain_document(layout.status)  # else an unreadable one would count as absent
    slurm = look_at_run(view) if view.is_slurm_run else None
    if status:
        status["disk_troubles"] = disk_troubles(view)
    notes = read_notes(view)
    if as_json:
        document = {"status": status or None, "slurm": None if slurm is None else document_of(slurm)}
        return json_text(document | notes.as_document(), indent=1)
    return escaped("\n".join(_lines(view, slurm, notes)))


def _lines(view: RunView, slurm: SlurmView | None, notes: Notes) -> list[str]:
    status = view.status
    if slurm is None:
        pid = view.launcher_pid
        if not status:
            is_asked = view.layout.stop_request.exists() or view.layout.abort_request.exists()
            ended = f"{'stopped' if is_asked else 'ended'} before its controller started"
            said = f"starting (launcher pid {pid})" if pid else ended
            return [f"{view.root}: {said}"]
        if pid:
            return [*_run_lines(status, f"launcher pid {pid}", expected_of(view)), *notes.lines()]
        status, why = _as_it_ended(view)
        lines = _without_roles(status, _run_lines(status, "not running on this machine"))
        return [*lines, *why, *notes.lines()]
    life = "under Slurm" if slurm.is_alive else "none of its jobs is alive"
    if not status:
        head = [f"{view.root}: {life}, no controller yet"]
    elif slurm.is_alive:
        head = _run_lines(status, life, expected_of(view), absence="absent")
    else:
        head = _without_roles(status, _run_lines(status, life))
    evaluating = lines_about_evaluation_job(view.layout) if slurm.is_alive else []
    return [*head, *notes.lines(), *evaluating, "", *lines_of(slurm)]


def _as_it_ended(view: RunView) -> tuple[dict[str, Any], list[str]]:
    """Correct the status of a run of which nothing is alive by the state in `rlhpc list`.

    The last status of a killed controller is "training".
    """
    standing = standing_of(view, Queue(), time.time()) if view.is_there else None
    if standing is None or standing.state not in (State.FAILED, State.LOST):
        return view.status, []
    why = [f"{standing.state}: {printable(standing.remark)}"] if standing.remark else []
    phase = view.status["phase"]  # "stopped": the controller has ended properly
    words = standing.state if phase == "stopped" else f"{standing.state} while {phase}"
    return {**view.status, "phase": words}, why


def waiting_for(status: dict[str, Any], expected: Sequence[str]) -> str:
    """Processes that have not connected yet, as text; "": all have connected."""
    shown, more = _missing(status, expected)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _missing(status: dict[str, Any], expected: Sequence[str]) -> tuple[list[str], int]:
    """Expected processes that have not connected: some names, and the number of others.  None at the end of a run."""
    there = {role["name"] for role in status["roles"]}
    is_over = status.get("is_ending") or status["phase"] in ("complete", "stopped")
    wanted = () if is_over else expected
    names = [each for each in wanted if each.partition(" ")[0] not in there and not each.startswith("controller")]
    return names[:MOST_NAMES], max(0, len(names) - MOST_NAMES)


def expected_of(view: RunView) -> Sequence[str]:
    """Processes in the run's plan, as `expected_processes`; none if its settings cannot be read."""
    from launch.plan.processes import expected_processes  # slow to import, and needed for live runs only

    return () if view.config is None else expected_processes(view.config)


def _run_lines(
    status: dict[str, Any], life: str, expected: Sequence[str] = (), *, absence: str = "starting"
) -> list[str]:
    """absence: text about expected processes that have not connected."""
    in_flight, so_far = _counts_of_groups(status["queue"])
    age = max(time.time() - status["unix_time_s"], 0.0)  # the clock of its node may be ahead of this one
    missing, more = _missing(status, expected)
    return [
        f"{status['name']}: {status['phase']}, step {status['step']}/{status['num_steps']}, policy version "
        f"{status['version']}, {life}, as of {age:.0f} s ago",
        _figures(status),
        *verifier_lines(status.get("verifiers", {})),
        *error_lines(status.get("errors", {})),
        *teacher_lines(status.get("teachers", {})),
        *(f"disk    {trouble}" for trouble in status.get("disk_troubles", ())),
        *in_flight,
        *so_far,
        "",
        f"{'ROLE':<14}{'STATE':<12}{'VERSION':>8}  {'HOLDS':>6}  {'SILENT':>7}  WAITS FOR",
        *(_row(role) for role in status["roles"]),
        *(f"{name:<14}{absence}" if " " not in name else f"{name} {absence}" for name in missing),
        *([f"and {more} more {absence}"] if more else []),
    ]


def _figures(status: dict[str, Any]) -> str:
    """Second line of a status: loss or reward, and speed."""
    trainer = f"trainer {status['trainer_tokens_per_s']:.0f} tokens/s"
    if status.get("stage") == "sft":
        held_out = status["held_out"] or {}
        loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
        best = f" (lowest {held_out['best']:.4f} at step {held_out['best_step']})" if held_out.get("best") else ""
        said = f"   held out {held_out['loss']:.4f}{best}" if held_out.get("loss") is not None else ""
        return f"supervised fine-tuning   loss {loss}{said}   {trainer}"
    reward = f"{status['reward']:.3f}" if status["step"] else "-"
    return (
        f"reward {reward}   generators {status['generator_tokens_per_s']:.0f} tokens/s   {trainer}   "
        f"staleness {status['staleness_max']} of at most {status['staleness_bound']}"
    )


def _without_roles(status: dict[str, Any], lines: list[str]) -> list[str]:
    """Keep the lines that hold for a run that is over: without states of its queue and roles."""
    num_errors = len(verifier_lines(status.get("verifiers", {}))) + len(error_lines(status.get("errors", {})))
    return [*lines[: NUM_FIGURES + num_errors], *_counts_of_groups(status["queue"])[1]]


def _counts_of_groups(queue: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lines about groups in flight and before, and about finished ones; reasons with a count of 0 are left out."""
    over = {name: count for name, count in queue.items() if name in _OVER or name.startswith("dropped_")}
    now = {name: count for name, count in queue.items() if name not in over}
    shown = {name: count for name, count in over.items() if count or not name.startswith("dropped_")}
    return _counted("queue", now) if now else [], _counted("so far", shown) if shown else []


def _counted(title: str, counts: Mapping[str, Any]) -> list[str]:
    """Wrap counts into lines of 80 columns; a count stays with its name."""
    lines = [f"{title:<8}"]
    for name, count in counts.items():
        part = f"{name} {count}"
        if len(lines[-1]) + len(part) > WIDTH:
            lines.append(" " * 8)
        lines[-1] += f"{part}   "
    return [line.rstrip() for line in lines]


def verifier_lines(verifiers: dict[str, dict[str, float]]) -> list[str]:
    """Failures of verifiers by kind, and verdicts that take long, a line for each task with such."""
    if not verifiers:
        return []
    from rlhpc.rewards.outcomes import BATCH_FAILED, FAILURES, FORKED, JUDGED, LONG_S, WAITING  # slow to import

    lines, ways = [], (*FAILURES, BATCH_FAILED, FORKED)
    for task, figures in sorted(verifiers.items()):
        if failed := [f"{way.replace('_', ' ')} {figures[way]:.0f}" for way in ways if figures.get(way)]:
            judged = f"judged {figures.get(JUDGED, 0):.0f}, without a verdict: {', '.join(failed)}"
            lines.append(f"verifier {task}   {judged}")
        if waiting := figures.get(WAITING):
            why = "does a service restart? `rlhpc logs RUN_DIR reward` says why"
            lines.append(f"verifier {task}   {waiting:.0f} wait for a verdict for {LONG_S:g} s or more: {why}")
    return lines


def teacher_lines(teachers: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Rollouts that wait for a teacher, a line for each teacher."""
    lines = []
    for name, figures in sorted(teachers.items()):
        if waiting := figures.get("waiting"):
            waits = "1 rollout waits" if waiting == 1 else f"{waiting:.0f} rollouts wait"
            mean = f"; {figures['seconds'] / figures['answered']:.1f} s a request" if figures.get("answered") else ""
            failed = f"; {figures['failed']:.0f} had no answer" if figures.get("failed") else ""
            lines.append(f"teacher  {waits} for teacher {name}{mean}{failed}")
    return lines


def error_lines(errors: Mapping[str, Any]) -> list[str]:
    """Return lines on rollouts without a verdict in this attempt, by cause, with the last error."""
    causes = [f"{cause.replace('_', ' ')} {number}" for cause, number in errors.get("causes", {}).items()]
    if not causes:
        return []
    paused = [f"nothing but errors on {', '.join(names)}"] if (names := errors.get("paused")) else []
    notes = [f"the last: {shortened(errors['latest'])}", *paused]
    if "waited_s" in errors:
        notes.append(f"waiting for verdicts since {errors['waited_s']:.0f} s, at most {errors['patience_s']:.0f} s")
    return [f"errors   {', '.join(causes)}; {'; '.join(notes)}"]


def _row(role: dict[str, Any]) -> str:
    metrics = role["metrics"]
    if "service" in role:
        return _row_of_service(role)
    holds = int(metrics.get("running", 0) + metrics.get("waiting", 0) + metrics.get("queued", 0))
    version = role["version"] if role["version"] >= 0 else "-"
    return (
        f"{role['name']:<14}{role['state']:<12}{version:>8}  {holds:>6}  {role['silent_s']:>6.1f}s  "
        f"{role['waits_for'] or '-'}"
    )


def _row_of_service(role: dict[str, Any]) -> str:
    """Row of a process of a service, with its load: its weights have no version."""
    running, waiting, answered = (int(role["metrics"].get(each, 0)) for each in ("running", "waiting", "answered"))
    kind = f" ({role['kind']})" if role.get("kind", role["service"]) != role["service"] else ""
    load = f"{role['service']}{kind}: {waiting} waiting, {answered} answered"
    waits_for = f"; waits for {role['waits_for']}" if role["waits_for"] else ""
    holds = running + waiting
    return f"{role['name']:<14}{role['state']:<12}{'-':>8}  {holds:>6}  {role['silent_s']:>6.1f}s  {load}{waits_for}"


# ---------------------------------------------------------------------------------------------------------------- watch
#
# Show a run's progress: one updated line on a terminal, a line from time to time elsewhere.
#
#     starting | waits for trainer-0, generator-0 | 31 s
#     step 120/2000 | 3 h 05 min left | reward 0.412 | staleness 1.2 | …
#
# Input: status.json.  Output: printed lines.  Groups dropped because their rewards cannot be computed, or because they
# kill generators, are reported when that happens, and again whenever their number has doubled.

_TOLD = {
    "dropped_verifier_error": "no verifier could judge them; `rlhpc rollouts {root} --verdict verifier_error` says why",
    "dropped_poison": "their leases were lost, or their prompts are quarantined: `rlhpc status {root}` lists these",
}
LOOK_AT_DISK_S = 2.0  # if the status has no disk trouble
BEFORE = ("starting", "replaying", "waiting for generators")  # phases without training of new steps
_ON_THEIR_WAY = {"waiting for generators": "the first weights are on their way | "}  # once all processes are there
# Of status.json, in the order of the fields of Progress.
_OF_PROGRESS = (
    "step", "num_steps", "reward", "trainer_tokens_per_s", "generator_tokens_per_s", "staleness_max", "eta_s"
)  # fmt: skip


class Watch:
    """Follows one run directory."""

    def __init__(
        self,
        layout: RunLayout,
        stream: TextIO = sys.stderr,
        *,
        expected: Sequence[str] = (),
        is_quiet: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """expected: processes that the run needs (expected_processes).  is_quiet: print only lines of `tell`."""
        self._layout, self._stream, self._is_quiet, self._clock = layout, stream, is_quiet, clock
        self._expected, self._began_s = tuple(expected), clock()
        self._line: ProgressLine | None = None
        self._last_step = 0
        self._attempt: int | None = None  # as last seen
        self._told = dict.fromkeys(_TOLD, 0)  # number of groups at the last warning
        self._has_disk_trouble, self._saw_disk_s = False, -math.inf  # as last told
        self._waits_in: int | None = None  # attempt that waits for verdicts, as last told

    def look(self) -> None:
        """Show what has changed since the last call."""
        from rlhpc.metrics.meters import (  # slow to import: `rlhpc status` needs none
            Progress,
            ProgressLine,
            format_duration,
        )

        view = RunView(self._layout)
        status = view.status
        if not status or self._is_quiet:
            return
        self._warn(status["queue"], status.get("errors", {}).get("latest", ""))
        self._warn_of_errors(status)
        self._warn_of_disk(view)
        if self._line is None:
            self._line = ProgressLine(self._stream, self._stream.isatty(), status["num_steps"], self._clock)
        if self._attempt not in (None, attempt := status.get("attempt")):
            self._began_s = self._clock()  # another attempt starts
        self._attempt = attempt
        if status["phase"] in BEFORE:
            self._last_step = status["step"]  # a resume begins with it
            waits_for = waiting_for(status, self._expected)
            what = f"waits for {waits_for} | " if waits_for else _ON_THEIR_WAY.get(status["phase"], "")
            self._line.wait(status["phase"], what + format_duration(self._clock() - self._began_s))
        elif status["step"] != self._last_step:
            self._last_step = status["step"]
            progress = Progress(*map(status.__getitem__, _OF_PROGRESS))
            held_out = (status.get("held_out") or {}).get("loss")
            self._line.update(replace(progress, loss=status.get("loss"), held_out=held_out))

    def _warn(self, queue: dict[str, Any], latest: str) -> None:
        for reason, words in _TOLD.items():
            count = int(queue.get(reason, 0))
            if count >= max(1, 2 * self._told[reason]):
                self._told[reason] = count
                groups = "1 group is" if count == 1 else f"{count} groups are"
                last = f"; the last error: {shortened(latest)}" if latest else ""
                self.tell(f"{groups} dropped: {words.format(root=quoted(self._layout.root))}{last}")

    def _warn_of_errors(self, status: dict[str, Any]) -> None:
        errors, attempt = status.get("errors", {}), status.get("attempt")
        told, self._waits_in = self._waits_in, attempt if "waited_s" in errors else None
        if self._waits_in == told:
            return
        if self._waits_in is not None:
            self.tell(
                f"too many errors in place of verdicts: the run waits for up to {errors['patience_s']:.0f} s until "
                f"there are some again (rewards.error_patience_s); the last error: {shortened(errors['latest'])}"
            )
        elif told == attempt and not status.get("is_ending"):
            self.tell("there are verdicts again")

    def _warn_of_disk(self, view: RunView) -> None:
        if not view.status.get("disk_troubles") and self._clock() - self._saw_disk_s < LOOK_AT_DISK_S:
            return
        troubles, self._saw_disk_s = disk_troubles(view), self._clock()
        if bool(troubles) == self._has_disk_trouble:
            return
        self._has_disk_trouble = bool(troubles)
        self.tell(f"the disk refuses: {'; '.join(troubles)}" if troubles else "the disk takes what is written again")

    def tell(self, text: str) -> None:
        """Print a separate line, unless the output fails: its terminal or pipe may be closed, its disk full."""
        self.close()
        with suppress(OSError):
            self._stream.write(f"rlhpc: {escaped(text)}\n")  # a process's last error may quote sampled text
            self._stream.flush()

    def close(self) -> None:
        """End the live line, if there is one."""
        if self._line is not None:
            self._line.finish()


# --------------------------------------------------------------------------------------------------------- wait for run
#
# Follow a submitted run until its jobs have ended: the progress line, and a line whenever a job changes its state.
#
# Input: status.json and the queue.  Output: printed lines.

ASK_SLURM_EVERY_S = 15.0  # slurmctld serves all users
NEARLY_OVER_S = 2.0  # once the result exists


def wait_for_run(layout: RunLayout) -> int:
    """Return 0 when all jobs have ended and the run is complete, 1 if it is not, 130 after Ctrl-C."""
    watch = Watch(layout, sys.stderr, expected=seen(lambda: expected_of(RunView(layout)), ()))
    said = ""
    try:
        while True:
            ids = patiently(lambda: [record.job_id for record in read_job_records(layout)], layout.jobs)
            look = look_at_jobs(ids, run_name=name_of_jobs(layout))
            living = [row for row in look.rows if row.state.is_alive]
            words = look.trouble or ", ".join(dict.fromkeys(map(_describe, living)))
            if words and words != said:
                watch.tell(words)
            said = words
            if not living and not look.trouble:
                break
            _look_on(layout, watch)
    except KeyboardInterrupt:
        watch.tell(
            f"no longer watched; the jobs continue: `rlhpc status {quoted(layout.root)}`, `rlhpc "
            f"stop {quoted(layout.root)}`"
        )
        return EXIT_INTERRUPTED
    watch.close()
    if patiently(lambda: is_complete(layout, is_certain=True), layout.root):
        watch.tell(f"{layout.root}: complete")
        return 0
    watch.tell(
        f"{layout.root}: all jobs have ended, the run is not complete; `rlhpc status {quoted(layout.root)}` says why"
    )
    return 1


def _look_on(layout: RunLayout, watch: Watch) -> None:
    began = time.monotonic()
    while time.monotonic() - began < (NEARLY_OVER_S if is_complete(layout) else ASK_SLURM_EVERY_S):
        seen(watch.look, None)
        time.sleep(0.5)


def _describe(row: JobRow) -> str:
    reason = f" ({row.reason})" if row.reason else ""
    return f"{row.name} {row.label} {row.state.name.lower()}{reason}"
