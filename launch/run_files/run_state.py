"""State of a run for supervisors: attempt, progress, and requests by users and other jobs.

A missing or incomplete file counts as absent.  So does a file that cannot be read at the moment, if the caller reads it
again soon; with is_certain, for decisions, OSError is raised instead (rlhpc/base/patience.py).
"""

from __future__ import annotations

import enum
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from launch.common.text import as_typed, quoted
from rlhpc.base.files import append_lines, is_absent, is_listed, matching
from rlhpc.base.patience import seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_ALONE, EXIT_CONFIG, EXIT_FENCED

# --------------------------------------------------------------------------------------------------------------- events
#
# The events of each supervisor of a run: write and read jobs/NAME.events.jsonl, one JSON line per event.
#
# A file that is missing or incomplete counts as absent.

_TAIL_BYTES = 16384  # an event is a line of some hundred bytes


class Log(Protocol):
    """Receives the events of a supervisor."""

    attempt: int  # the current one

    def say(self, event: str, text: str) -> None:
        """Report one event: one word for programs, a sentence for people."""


class EventLog(Log):
    """Appends to one file, and writes the same to the batch log.

    Each job (or array task) has its own file, so that a file has only one writer.
    """

    def __init__(self, path: Path, restart: int) -> None:
        self._path, self._restart = path, restart
        self.attempt = -1

    def say(self, event: str, text: str) -> None:
        """Log an event."""
        clock = time.strftime("%H:%M:%S")
        with suppress(OSError):  # the batch log lies on the same filesystem, which may be full
            sys.stdout.write(f"{clock} rlhpc supervisor: {text}\n")
            sys.stdout.flush()
        try:
            append_event(self._path, event, text, attempt=self.attempt, restart=self._restart)
        except OSError as error:  # a full disk must not end the run because its log cannot be written
            with suppress(OSError):
                sys.stdout.write(f"{clock} rlhpc supervisor: {self._path} not written: {error.strerror or error}\n")


def append_event(path: Path, event: str, text: str, *, attempt: int, restart: int = 0) -> None:
    """Append one JSON line, whole or not at all.  Raises OSError, also if the run was moved or deleted."""
    line = {"unix_time_s": time.time(), "restart": restart, "attempt": attempt, "event": event, "text": text}
    path.parent.mkdir(exist_ok=True)
    append_lines(path, (json.dumps(line) + "\n").encode(), is_synced=False)


@dataclass(frozen=True)
class Event:
    """An event of a supervisor."""

    name: str  # of its job: JOB, or JOB_TASK
    unix_time_s: float
    event: str  # one word for programs
    text: str
    attempt: int = -1  # of the event


def event_of(name: str, line: bytes) -> Event | None:
    """Parse an event of a job's supervisor; None: the line is half written."""
    try:
        said = json.loads(line)
        attempt = said.get("attempt") if isinstance(said, dict) else None
        number = attempt if isinstance(attempt, int) else -1
        return Event(name, float(said["unix_time_s"]), str(said["event"]), str(said["text"]), number)
    except (ValueError, KeyError, TypeError):
        return None


def last_events(layout: RunLayout, most: int) -> list[Event]:
    """The last events of all supervisors, newest first: at most `most` of each."""
    found = (event for path in layout.jobs.glob("*.events.jsonl") for event in islice(_newest_first(path), most))
    return sorted(found, key=lambda event: -event.unix_time_s)


def last_outcome(layout: RunLayout, name: str) -> str:
    """Outcome of a job's last life, such as "given_up: …"; "" if it left none."""
    for said in _newest_first(layout.job_events(name)):
        if said.event in ("verdict", "life"):  # a later life has begun, and has no outcome yet
            return said.text if said.event == "verdict" else ""
    return ""


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def certain_document(path: Path) -> dict[str, Any]:
    """A JSON object for decisions: {} only if there is none.  Raises OSError."""
    try:
        document = {} if is_absent(path) else json.loads(path.read_bytes())
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _newest_first(path: Path) -> Iterator[Event]:
    """The last events of one supervisor."""
    name = path.name.removesuffix(".events.jsonl")
    yield from (event for line in lines_from_the_end(path) if (event := event_of(name, line)) is not None)


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Lines of the last 16 KiB of a file, in reverse order; the earliest may be cut; none without a file."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            yield from reversed(file.read().splitlines())
    except OSError:
        return


# -------------------------------------------------------------------------------------------------------------- outcome
#
# Outcomes of an attempt, or of one run of a job between two requeues.


class Cause(enum.Enum):
    """Causes of an end: text, consequence, and the exit status of the batch step."""

    COMPLETE = "complete", "end", 0
    UNCLEAN = "complete, but a rank did not exit cleanly", "end", 1
    STOP = "asked for by `rlhpc stop`", "end", 0
    ABORT = "asked for by `rlhpc stop --now`", "end", 1
    TIME = "this job is close to its time limit", "requeue", 0
    YIELD = "another job of the run ends, and is to find a checkpoint", "again", 0
    SIGNAL = "Slurm ended this job (scancel, preemption, node failure)", "leave", 143
    INTERRUPTED = "interrupted", "leave", 130
    FENCED = "a later attempt has taken over", "leave", EXIT_FENCED
    FAILED = "failed", "again", 1
    GIVEN_UP = "failed too often without a new checkpoint", "end", 1
    STALLED = "made no progress", "end", 1
    ALONE = "another role never connected", "end", EXIT_ALONE
    SETTINGS = "invalid settings", "end", EXIT_CONFIG
    COMPONENT = "a component was cancelled", "end", 1
    UNRECORDED = "this job has no record: its submission was abandoned", "leave", 1

    def __init__(self, words: str, follows: str, status: int) -> None:
        """follows: "end" all jobs of the run; "requeue" this job; try "again" in this job; "leave": only exit."""
        self.words, self.follows, self.status = words, follows, status


@dataclass
class Outcome:
    """End of an attempt or a job: the cause, and details for people."""

    cause: Cause
    text: str  # never empty
    status: int | None = None  # as in a shell, of the failed process, also of a controller that failed when stopped

    def __post_init__(self) -> None:
        """Use the cause's text without details."""
        self.text = self.text.strip() or self.cause.words


# ------------------------------------------------------------------------------------------------------------ run state

FIRST_SAVE_S = 60.0  # assumed for a run that has not saved yet


@dataclass(frozen=True)
class Attempt:
    """The current attempt."""

    index: int
    resume_step: int | None
    job_id: int
    restart: int
    fence: str = ""  # owner in whose name controller and trainer write to the run directory (rlhpc/base/ownership.py)

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Attempt:
        """Parse attempt.json.  Raises KeyError."""
        index, step, fence = document["attempt"], document["resume_step"], document.get("fence", "")
        return cls(index, step, document["job_id"], document["restart"], fence)

    @property
    def owner(self) -> tuple[int, int]:
        """Job and restart count that began it; a later one compares greater."""
        return self.job_id, self.restart


def read_attempt(layout: RunLayout) -> Attempt | None:
    """Read attempt.json."""
    document = read_document(layout.attempt)
    try:
        return Attempt.parse(document)
    except KeyError:
        return None


def longest_save_before_s(layout: RunLayout) -> float:
    """The longest save of the last earlier attempt that has saved, in seconds; 0: not known."""
    return float(read_document(layout.attempt).get("save_s", 0.0))


def run_name(settings: Mapping[str, Any], root: Path) -> str:
    """The run's name in its settings; the directory's name if these are damaged.

    settings: the resolved run file, by section and key.
    """
    return stated_name(settings) or root.name


def is_supervised(layout: RunLayout) -> bool:
    """True if the settings can be read, and the run is supervised fine-tuning."""
    return run_stage(read_document(layout.config).get("config")) == "sft"


def run_stage(settings: object) -> str:
    """Stage in the settings: "rl" or "sft"; "rl" if they are damaged."""
    table = settings.get("run") if isinstance(settings, Mapping) else None
    return str(table.get("stage") or "rl") if isinstance(table, Mapping) else "rl"


def stated_name(settings: object) -> str:
    """The run's name in its settings; "" if these are damaged."""
    table = settings.get("run") if isinstance(settings, Mapping) else None
    return str(table.get("name") or "") if isinstance(table, Mapping) else ""


def _exists(path: Path, is_certain: bool) -> bool:
    return not is_absent(path) if is_certain else seen(lambda: is_listed(path), False)


def is_complete(layout: RunLayout, *, is_certain: bool = False) -> bool:
    """True if the run has finished its last step."""
    return _exists(layout.summary, is_certain)


def wants_stop(layout: RunLayout, *, is_certain: bool = False) -> bool:
    """True after `rlhpc stop`."""
    return _exists(layout.stop_request, is_certain)


def wants_abort(layout: RunLayout, *, is_certain: bool = False) -> bool:
    """True after `rlhpc stop --now`."""
    return _exists(layout.abort_request, is_certain)


ENDED_BY_SLURM = "is being ended by Slurm: cancelled, preempted, or its node fails"
NEAR_ITS_LIMIT = "is close to its time limit"


def reason_to_save(request: Path) -> str:
    """The reason that a job wrote into its request to save."""
    try:
        return request.read_text() or NEAR_ITS_LIMIT
    except (OSError, UnicodeDecodeError):  # withdrawn meanwhile
        return NEAR_ITS_LIMIT


def save_requests(layout: RunLayout) -> list[Path]:
    """Requests to save, by jobs that end: by their names, reason_to_save says why."""
    return sorted(seen(lambda: matching(layout.jobs, "*.yield"), list[Path]()))  # called several times a second


def saved_step(layout: RunLayout, *, is_certain: bool = False) -> int:
    """Step of the newest complete checkpoint; 0 if there is none."""

    def complete() -> list[Path]:
        return [path for path in matching(layout.checkpoints, "step_*") if not is_absent(path / "COMPLETE")]

    steps = [path.name.rpartition("_")[2] for path in (complete() if is_certain else seen(complete, list[Path]()))]
    return max((int(step) for step in steps if step.isdigit()), default=0)


@dataclass(frozen=True)
class ReportedProgress:
    """The controller's last status of the run."""

    attempt: int
    phase: str
    step: int
    step_s: float  # the longest recent step
    save_s: float  # the longest save of this attempt; 0: none yet
    age_s: float  # by the clock of this machine
    roles: tuple[dict[str, Any], ...]
    has_told_all: bool = False  # the controller tells all roles to exit, also after a failure
    written_unix_s: float = 0.0  # by the clock of the controller's machine
    save_before_s: float = 0.0  # the longest save of an earlier attempt, if this one has not saved yet

    def waits(self) -> str:
        """Roles and their reasons for waiting, in words."""
        said = [f"{role['name']} ({role['state']}) waits for {role['waits_for'] or 'nothing'}" for role in self.roles]
        return f"phase {self.phase!r}, step {self.step}; " + ("; ".join(said) or "no role has registered")

    @property
    def is_training(self) -> bool:
        """True once all roles have met, until the run ends."""
        return self.phase == "training"

    @property
    def is_over(self) -> bool:
        """True once the controller is about to tell all roles to exit: the run is complete, or has been stopped."""
        return self.phase in ("complete", "stopped")

    @property
    def is_ending(self) -> bool:
        """True once the controller ends, for any reason: processes that exit from then on were told to."""
        return self.is_over or self.has_told_all

    def names(self, role: str) -> list[str]:
        """Names of the registered processes of a role."""
        return [each["name"] for each in self.roles if each["name"].startswith(f"{role}-")]


def read_progress(layout: RunLayout, *, is_certain: bool = False) -> ReportedProgress | None:
    """Read status.json."""
    document = certain_document(layout.status) if is_certain else read_document(layout.status)
    try:
        return ReportedProgress(
            attempt=document.get("attempt", -1),
            phase=document["phase"],
            step=document["step"],
            step_s=document.get("step_s", 0.0),
            save_s=(save_s := document.get("save_s", 0.0)),
            save_before_s=0.0 if save_s else longest_save_before_s(layout),
            age_s=max(0.0, time.time() - document["unix_time_s"]),
            roles=tuple(document["roles"]),
            has_told_all=document.get("is_ending", False),
            written_unix_s=document["unix_time_s"],
        )
    except KeyError:
        return None


def needed_to_stop_s(progress: ReportedProgress | None, life_s: float) -> float:
    """Seconds from a request to stop to the end of a job: the current step, a checkpoint, the shutdown of roles.

    Measured times get a margin, during which generators exit; times not measured yet are guessed, at most a tenth of
    the job's time limit.  A save of an earlier attempt, which may have been slow for once, takes at most half of it.
    """
    margin_s = min(30.0, life_s / 6)
    if progress is None:
        return margin_s
    save_s = 2.0 * progress.save_s or min(2.0 * progress.save_before_s, life_s / 2) or min(FIRST_SAVE_S, life_s / 10)
    return margin_s + 1.5 * progress.step_s + save_s


# ----------------------------------------------------------------------------------------------------------- last words
#
# The summary printed at the end of a run: figures, saved state, and the next command.
#
# Input: a run directory whose processes have ended.  Output: lines.

_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "optimiser steps", lambda v: f"{v:,.0f}"),
    ("skipped_steps", "skipped of these: not finite, or refused", lambda v: f"{v:,.0f}"),
    ("conversations_trained", "conversations trained", lambda v: f"{v:,.0f}"),
    ("pairs_trained", "pairs trained", lambda v: f"{v:,.0f}"),
    ("epochs", "epochs", lambda v: f"{v:.2f}"),
    ("loss_last", "loss, last step (nats)", lambda v: f"{v:.4f}"),
    ("preference_accuracy_last", "preferred answer ahead, last step", lambda v: f"{v:.0%}"),
    ("preference_margin_last", "its margin, last step (nats)", lambda v: f"{v:.4f}"),
    ("held_out_first", "held-out loss, first", lambda v: f"{v:.4f}"),
    ("held_out_best", "held-out loss, lowest", lambda v: f"{v:.4f}"),
    ("held_out_best_step", "  after step", lambda v: f"{v:,.0f}"),
    ("rollouts_trained", "rollouts trained", lambda v: f"{v:,.0f}"),
    ("reward_first_tenth", "reward, first tenth of steps", lambda v: f"{v:.3f}"),
    ("reward_last_tenth", "reward, last tenth of steps", lambda v: f"{v:.3f}"),
    ("staleness_max", "staleness, worst (versions)", lambda v: f"{v:.0f}"),
    ("staleness_bound", "staleness, bound (versions)", lambda v: f"{v:.0f}"),
    ("rollouts_spanning_update", "rollouts that span a weight update", lambda v: f"{v:.0%}"),
    ("packing_fill", "packing fill", lambda v: f"{v:.0%}"),
    ("generator_tokens_per_s", "generated tokens per second", lambda v: f"{v:,.0f}"),
    ("trainer_tokens_per_s", "trained tokens per second", lambda v: f"{v:,.0f}"),
    ("generator_idle_ratio", "generators idle", lambda v: f"{v:.0%}"),
    ("trainer_idle_ratio", "trainer idle", lambda v: f"{v:.0%}"),
    ("training_s", "training (s)", lambda v: f"{v:.0f}"),
    ("wall_s", "run, engines' start included (s)", lambda v: f"{v:.0f}"),
)


def figures_table(summary: Mapping[str, Any]) -> str:
    """A line per figure, names to the left, numbers flush right; missing figures are left out."""
    summary = {**summary, "skipped_steps": summary.get("skipped_steps") or None}
    rows = [(label, form(float(summary[key]))) for key, label, form in _ROWS if _is_number(summary.get(key))]
    left, right = max(len(label) for label, _ in rows), max(len(value) for _, value in rows)
    rule = "─" * (left + right + 3)
    return "\n".join((rule, *(f"{label:<{left}}   {value:>{right}}" for label, value in rows), rule))


@dataclass(frozen=True)
class Saved:
    """Saved state of a run that has ended before its last step, and how to continue."""

    words: str
    are_steps_lost: bool  # trained steps are in neither a checkpoint nor the journal


def what_was_saved(layout: RunLayout, command: str, *, is_refused: bool = False) -> Saved:
    """State of an interrupted run; command: continues it, as shown; is_refused: once the run file is corrected."""
    progress = read_progress(layout)
    trained, saved = progress.step if progress is not None else 0, saved_step(layout)
    if saved >= trained:
        steps = f"stopped, saved at step {saved}" if saved else "stopped before the first step"
        first = "once that is mended, " if is_refused else ""
        fresh = ", or with --fresh for --resume starts it over, where data or model change" * (is_refused and not saved)
        return Saved(f"{layout.root}: {steps}; {first}{command} continues it{fresh}", are_steps_lost=False)
    checkpoint = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint"
    if any(layout.rollouts.glob("journal_*.log")):  # a resume trains what was recorded after the checkpoint
        after = "the step" if trained - saved == 1 else f"the {trained - saved} steps"
        text = (
            f"{layout.root}: ended at step {trained}; {checkpoint}: {command} trains {after} after "
            "it again, from the journal, and samples nothing again"
        )
        return Saved(text, are_steps_lost=False)
    begins = f"continues from step {saved}" if saved else "starts over"
    text = (
        f"{layout.root}: ended at step {trained} without saving; {checkpoint}, so "
        f"{'1 step is' if trained - saved == 1 else f'{trained - saved} steps are'} lost; {command} {begins}"
    )
    return Saved(text, are_steps_lost=True)


def command_to_continue(layout: RunLayout) -> str:
    """The command that continues a run of this machine, with the options of its start, quoted for a shell."""
    plan = read_document(layout.local_plan)
    words, where = plan.get("again"), plan.get("typed_in")
    if not isinstance(words, list) or not isinstance(where, str):
        return "`rlhpc run RUN.toml --resume`"
    command = shlex.join(map(str, words))
    with suppress(FileNotFoundError):  # the current directory is gone
        if str(Path.cwd()) == where:
            return f"`{command}`"
    return f"`cd {shlex.quote(where)} && {command}`"


def last_words(layout: RunLayout, command: str, status: int = 0) -> list[str]:
    """Lines for the end of a run, complete or not.  command: continues the run.  status: the run's exit status."""
    layout = RunLayout(as_typed(layout.root))
    if not layout.summary.exists():
        is_refused = status == EXIT_CONFIG
        return [what_was_saved(layout, command, is_refused=is_refused).words] if layout.is_run else []
    summary = json.loads(layout.summary.read_bytes())
    root, lines = layout.root, [figures_table(summary)]
    if summary.get("stage") == "sft":
        early = ", where the held-out loss had not fallen for long" if summary.get("stopped_early") else ""
        return [
            *lines,
            f"{root}: complete at step {summary['steps']}{early}",
            f"  {layout.model} is the model after step {summary['model_step']}, an HF checkpoint",
            f"  `rlhpc tensorboard {quoted(root)}` shows its curves",
        ]
    means = [mean for _, mean, _ in summary.get("reward_by_version", [])]
    if summary.get("reward_last_tenth") == summary.get("reward_first_tenth") == 0 and not any(means):
        lines.append(f"every reward was 0: nothing was learnt; `rlhpc logs {quoted(root)} reward` may say why")
    return [
        *lines,
        f"{root}: complete, saved at step {saved_step(layout)}",
        f"  `rlhpc export {quoted(root)} MODEL` writes the trained model as an HF checkpoint",
        f"  `rlhpc tensorboard {quoted(root)}` shows its curves",
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
