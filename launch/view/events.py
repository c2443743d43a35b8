"""The events of a run in order of time, from the records of supervisors, controllers, launchers and the guard.

Input: jobs/*.events.jsonl, timeline.jsonl, attempts.jsonl, guard.jsonl, jobs/*.json of a run directory.
Output: Happening, oldest first, and each process's work and waiting over time.  Unreadable lines are skipped: this is
for viewing only.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.common.text import counted, written_unix_s
from launch.run_files.run_state import Cause
from launch.view.run import RunView, is_number, is_time
from rlhpc.base.ownership import Launcher
from rlhpc.buffer.lost_leases import LineFile
from rlhpc.config.rules import obeys_rules, with_values
from rlhpc.metrics.curves import Curve
from rlhpc.metrics.meters import WORKS, TimelineEntry

# --------------------------------------------------------------------------------------------------------------- advice
#
# Recommendations from the figures of a run, with the numbers behind them.
#
# Input: RunView.  Output: sentences, the most important first.  Figures are means over the second half of the
# steps; a run that is too young gets no recommendations.

FEWEST_STEPS = 10
IDLE = 0.15  # of the time: below it nothing is recommended
_OTHER = 0.10  # a neighbour idle for less is the bottleneck


def advice_for(view: RunView) -> list[str]:
    """Recommendations; none if all is well."""
    steps = view.curves.get("time/step_s")
    if steps is None or len(steps.steps) < FEWEST_STEPS:
        return [f"Too early to recommend anything: fewer than {FEWEST_STEPS} steps are done."]
    rules = (_balance, _rollouts, _batches, _services, _steps)
    return [said for rule in rules for said in rule(view, lambda name: view.mean_of(name) or 0.0)]


Reader = Callable[[str], float]  # the mean of a metric; 0 where it was not written


def _balance(view: RunView, mean: Reader) -> Iterator[str]:
    """Generators and trainer should wait for each other as little as possible."""
    generators, trainer = mean("generator/idle_ratio"), mean("trainer/idle_ratio")
    number = max(1, round(mean("generator/live")))
    if generators > IDLE and trainer < _OTHER:
        enough = max(1, math.ceil(number * (1 - generators) / 0.95))
        fewer = f"{enough} instead of {number} would do" if enough < number else "fewer would not do"
        more = "" if _no_room_for(view, 1, 1) else "; or give the trainer more GPUs (trainer.num_ranks)"
        yield (
            f"Generators idle {generators:.0%}, trainer {trainer:.0%}: a step waits for the trainer. Generators: "
            f"{fewer}{more}."
        )
    planned = view.config.generation.num_replicas if view.config is not None else 0
    if trainer > IDLE and mean("generator/live") < planned - 0.2:
        yield (
            f"Trainer idle {trainer:.0%}: of {planned} generators {mean('generator/live'):.1f} were alive on average; "
            "the list of events shows when the others were lost."
        )
    elif trainer > IDLE and generators < _OTHER:
        wanted = math.ceil(number / max(0.05, 1 - trainer))
        per_engine = view.config.generation.tensor_parallel if view.config is not None else 1
        if taken := _no_room_for(view, wanted - number, per_engine):
            yield (
                f"Trainer idle {trainer:.0%}, generators {generators:.0%}: batches wait for rollouts, and {taken}: "
                "more generators would only share it. Shorter completions, or a larger machine, would help."
            )
            return
        how = f"generation.num_replicas={wanted}"
        if view.layout.job_plan.exists() and not view.summary:  # submitted and still running
            how = f"`rlhpc scale RUN_DIR --generators +{wanted - number}`"
        yield (
            f"Trainer idle {trainer:.0%}, generators {generators:.0%}: batches wait for rollouts. {wanted} generators "
            f"instead of {number} would feed it at this speed ({how})."
        )
    elif trainer > IDLE and generators > IDLE:
        yield _both_wait(view, mean, generators, trainer)


def _no_room_for(view: RunView, num_processes: int, gpus_each: int) -> str:
    """Reason why a run without Slurm has no room for num_processes more on its machine; "": there is room."""
    if view.was_submitted_last:
        return ""  # the site decides
    machine = view.plans[-1].get("machine")
    if not isinstance(machine, dict) or view.config is None:
        return ""
    if machine.get("uses_gpus"):
        left, needed = machine.get("num_gpus_left", 0), num_processes * gpus_each
        has = "no GPU" if not left else counted(left, "GPU")
        return "" if left >= needed else f"this machine has {has} left"
    cores, busy = machine.get("num_cores", 0), view.config.trainer.num_ranks + view.config.generation.num_replicas
    if busy + num_processes <= cores:
        return ""
    return f"{busy} busy processes have this machine's {counted(cores, 'core')}"


def _both_wait(view: RunView, mean: Reader, generators: float, trainer: float) -> str:
    bound, step_s = mean("staleness/bound"), mean("time/step_s") or 1.0
    said = f"Generators idle {generators:.0%} and trainer {trainer:.0%}: they wait for each other in turn."
    weights = mean("time/wait_for_weights_s") / step_s
    if weights > 0.2:
        return f"{said} {weights:.0%} of a step passes until new weights are live (docs/operating.md)."
    parts = ", or admission.step_parts=4 at the same bound" if _can_be_in_parts(view, mean) else ""
    return f"{said} admission.max_staleness={bound:.0f} leaves too little in flight: try {bound + 1:.0f}{parts}."


def _can_be_in_parts(view: RunView, mean: Reader) -> bool:
    """True if batches can come in parts and do not: by default a part has to fill the rows of all ranks."""
    config = view.config
    if config is None or config.admission.step_parts not in ("auto", 1) or mean("trainer/step_parts") > 1:
        return False
    return obeys_rules(with_values(config, {"admission.step_parts": 4}))


def _rollouts(view: RunView, mean: Reader) -> Iterator[str]:
    """Rewards without variance, and completions that are cut off."""
    share, easy = mean("reward/zero_variance_share"), mean("group/all_correct_share")
    why = "too easy" if easy > share / 2 else "too hard"
    if share >= 0.4:
        yield (
            f"{share:.0%} of finished groups have zero reward variance and teach nothing, mostly because prompts are "
            f"{why}: [curriculum] rests such prompts, which would save up to {share:.0%} of sampling."
        )
    share, longest = mean("length/truncated_share"), mean("length/completion_max")
    if share >= 0.1:
        yield (
            f"{share:.0%} of completions are cut off at {longest:.0f} tokens: raise generation.max_completion_tokens, "
            "or mask them ([shaping])."
        )


def _batches(view: RunView, mean: Reader) -> Iterator[str]:
    """Micro-batches with unused room, and ranks with more micro-batches than others."""
    fill, rows = mean("packing/fill"), mean("packing/num_microbatches")
    budget = view.config.trainer.token_budget if view.config is not None else 0
    if 0 < fill < 0.6:
        yield (
            f"Micro-batches are {fill:.0%} full ({rows:.1f} per rank and step): trainer.token_budget={budget} is more "
            "than a rank can fill; use more groups per step, or a smaller budget, which saves memory."
        )
    slowdown = mean("packing/lockstep_slowdown")
    if slowdown >= 1.15:
        yield (
            f"The slowest rank has {slowdown - 1:.0%} more work than the mean, and the others wait for it: more groups "
            "per step (admission.groups_per_step) would even that out."
        )


def _services(view: RunView, mean: Reader) -> Iterator[str]:
    """Engines short of cache, verifiers that fail or are too few."""
    curve = view.curves.get("generator/preemptions")
    total = curve.growth if curve is not None else 0.0  # each generator counts from its own start
    if total > 0.02 * max(1, view.sampled.num_rollouts):
        yield (
            f"Engines have preempted {total:.0f} rollouts for lack of KV cache and recomputed them: lower "
            "generation.max_num_seqs, or give the cache more memory."
        )
    share, queued = mean("reward/verifier_error_share"), mean("reward/queued")
    if share > 0.01:
        yield (
            f"{share:.1%} of verdicts are verifier errors, whose groups are dropped: "
            "`rlhpc rollouts RUN_DIR --verdict verifier_error` shows why."
        )
    if queued > 100:
        yield f"{queued:.0f} completions are queued at the reward services: raise rewards.workers_per_replica."


def _steps(view: RunView, mean: Reader) -> Iterator[str]:
    """A policy that changes too fast, checkpoints that take too long, and tokens lost with generators."""
    ess, clipped = view.mean_of("policy/ess"), mean("policy/clip_high_share")
    if ess is not None and ess < 0.3:
        yield f"The effective sample size is {ess:.0%}: lower admission.max_staleness or the learning rate."
    if clipped > 0.3:
        yield f"{clipped:.0%} of tokens are clipped from above: the learning rate is too high for this batch."
    blocked, step_s = mean("time/checkpoint_s"), mean("time/step_s") or 1.0
    every = view.config.checkpoint.every_steps if view.config is not None else 0
    if every and blocked >= 1.0 and (share := blocked / (every * step_s)) >= 0.02:
        yield (
            f"Checkpoints block training for {blocked:.1f} s each, {share:.0%} of the time: raise "
            f"checkpoint.every_steps={every}."
        )
    lost, kept = map(view.curves.get, ("generator/tokens_lost_total", "tokens/generated_total"))
    if lost is not None and kept is not None and lost.last > 0.01 * kept.last:
        yield (
            f"{lost.last / (lost.last + kept.last):.1%} of tokens were lost with generators: lower "
            "buffer.partial_interval_tokens or partial_interval_s."
        )


# --------------------------------------------------------------------------------------------------------------- spells
#
# Work and waiting of each process over time, from timeline.jsonl; intervals of a long run are merged.
#
# Input: the file, which may still be growing.  Output: Recorded.  A month of 512 generators is 2.8 million shares of
# intervals in 150 MB: lines are read one by one, and neighbours merged as a chart would do.

MOST_STRETCHES = 900  # of the file, or few more: twice what a chart has columns for
_GAP_S = 1.0  # between two intervals: the process was absent


@dataclass(frozen=True, slots=True)
class Spell:
    """Work and waiting of a process in one or several consecutive intervals."""

    process: str
    begin_s: float
    end_s: float
    shares: dict[str, float]  # "works", or the reason for waiting → share of the time
    phase: str  # of the run


@dataclass(slots=True)
class Recorded:
    """The content of a timeline."""

    spells: list[Spell] = field(default_factory=list)  # of each process, oldest first
    events: list[TimelineEntry] = field(default_factory=list)  # arrivals and losses, unchanged
    times: list[float] = field(default_factory=list)  # earliest and latest of all lines; [] without lines


@dataclass(slots=True)
class _Stretch:
    """Intervals of a process that become one spell."""

    number: int  # of the stretch in the file
    phase: str
    begin_s: float
    end_s: float
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def goes_on(self, number: int, entry: TimelineEntry) -> bool:
        """True if an interval continues this stretch: not across a time when the process was absent."""
        is_next = entry.unix_time_s - entry.seconds - self.end_s <= _GAP_S
        return is_next and number == self.number and entry.phase == self.phase

    def add(self, process: str, entry: TimelineEntry) -> None:
        """Add an interval to the mean over time."""
        of_entry = entry.work[process]
        self.seconds += entry.seconds
        self.end_s = entry.unix_time_s
        weight = entry.seconds / self.seconds
        for what in {**self.shares, **of_entry}:
            share = self.shares.get(what, 0.0)
            self.shares[what] = share + (of_entry.get(what, 0.0) - share) * weight

    def spell(self, process: str) -> Spell:
        return Spell(process, self.begin_s, self.end_s, self.shares, self.phase)


def read_timeline(path: Path) -> Recorded:
    """Read a timeline; lines that cannot be read are skipped.  Raises OSError."""
    recorded, begun, num_intervals = Recorded(), dict[str, _Stretch](), 0
    every = max(1, -(-_num_lines(path) // MOST_STRETCHES))
    for entry in filter(_can_be_read, LineFile(path, TimelineEntry).each()):
        recorded.times = [min([entry.unix_time_s, *recorded.times]), max([entry.unix_time_s, *recorded.times])]
        recorded.events += [entry] if entry.event else []
        if entry.seconds <= 0:
            continue
        number = num_intervals // every
        num_intervals += 1
        for process in entry.work:
            stretch = begun.get(process)
            if stretch is None or not stretch.goes_on(number, entry):
                recorded.spells += [] if stretch is None else [stretch.spell(process)]
                begin_s = entry.unix_time_s - entry.seconds
                stretch = begun[process] = _Stretch(number, entry.phase, begin_s, entry.unix_time_s)
            stretch.add(process, entry)
    recorded.spells += [stretch.spell(process) for process, stretch in begun.items()]
    return recorded


def _can_be_read(entry: TimelineEntry) -> bool:
    """True if the fields of an entry have the right types."""
    works = [entry.work, *entry.work.values()] if isinstance(entry.work, dict) else [None]
    return (
        is_time(entry.unix_time_s)
        and is_time(entry.seconds)
        and isinstance(entry.attempt, int)
        and all(isinstance(text, str) for text in (entry.phase, entry.event, entry.name, entry.text))
        and all(isinstance(each, dict) for each in works)
        and all(is_number(share) for shares in entry.work.values() for share in shares.values())
    )


def _num_lines(path: Path) -> int:
    """Number of lines that are not empty."""
    try:
        with path.open("rb") as file:
            return sum(line != b"\n" for line in file)
    except FileNotFoundError:
        return 0


# ----------------------------------------------------------------------------------------------------------- happenings


# Events of supervisors and controllers that are not faults and follow from another event that is shown.
_AS_PLANNED = {"life", "part_left", "part_end", "start", "sbatch", "end", "submit"}
_LONGEST, _HEAD = 240, 170  # characters of a shown text, and of its beginning
# Counters whose growth is an event, with its text in the singular.
_COUNTERS = {
    "checkpoint/failed_total": ("checkpoint", "checkpoint could not be written"),
    "trainer/skipped_steps": ("skipped", "step was skipped: not finite, or refused by the guard"),
    "weights/canary_failed_total": ("canary", "generator had other weights than the trainer, and was quarantined"),
    "transport/denied_total": ("denied", "connection with a key that is not of this run was refused"),
}
_ASKED_FOR = (Cause.STOP, Cause.ABORT, Cause.INTERRUPTED)
_WELL = (Cause.COMPLETE, *_ASKED_FOR, Cause.TIME, Cause.YIELD)
_GOOD_ENDS = {cause.name.lower() for cause in _WELL}
_FAULTS = {
    *(kind for kind, _ in _COUNTERS.values()),
    "restart",
    "retry",
    "kill",
    "lost",
    "disk",
    "left_away",
    "killed",
    "not_submitted",
    "not_loaded",
    "guard",
    "part_missed",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """An event of a run."""

    unix_time_s: float
    who: str  # a process, a job, or "run"
    kind: str  # one word
    text: str
    attempt: int = -1

    @property
    def brief(self) -> str:
        """The text, without its middle if it is long: a process's last error may be a page, and the end matters."""
        text = " ".join(self.text.split())
        return text if len(text) <= _LONGEST else f"{text[:_HEAD]} … {text[_HEAD - _LONGEST :]}"

    @property
    def is_fault(self) -> bool:
        """True if something failed or was undone."""
        if self.kind == "verdict":
            return self.text.partition(":")[0] not in _GOOD_ENDS
        if self.kind == "guard":
            return not self.text.startswith("warn:")  # a figure was out of bounds, without consequences
        return self.kind in _FAULTS

    @property
    def is_planned(self) -> bool:
        """True if it is routine."""
        return self.kind in _AS_PLANNED


@dataclass(slots=True)
class Story:
    """All events of a run, and the work of its processes over time."""

    happenings: list[Happening] = field(default_factory=list)  # oldest first
    spells: list[Spell] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def processes(self) -> list[str]:
        """Names of the processes, by role and number."""
        return sorted({spell.process for spell in self.spells}, key=place_of)

    @property
    def faults(self) -> list[Happening]:
        """Events that are faults."""
        return [each for each in self.happenings if each.is_fault]


def place_of(process: str) -> tuple[int, int]:
    """Sort key of processes: trainers, generators, reward services, services."""
    role, _, number = process.rpartition("-")
    order = {"controller": 0, "trainer": 1, "generator": 2, "reward": 3, "service": 4}
    return order.get(role, 9), int(number) if number.isdigit() else 0


def read_story(view: RunView) -> Story:
    """All events of a run.  Raises OSError."""
    recorded = read_timeline(view.layout.timeline)
    found = [
        *_of_killed_launchers(view),
        *_of_supervisors(view),
        *_of_attempts(view),
        *_of_guard(view),
        *_of_jobs(view),
        *_of_counters(view.curves),
    ]
    words = {"joined": "has joined: ", "lost": "is lost: ", "left": "has left: "}
    found += [
        Happening(each.unix_time_s, each.name or "run", each.event, words.get(each.event, "") + each.text, each.attempt)
        for each in recorded.events
    ]
    story = Story(sorted(found, key=lambda each: each.unix_time_s), recorded.spells)
    times = [each.unix_time_s for each in found] + recorded.times
    times += [spell.begin_s for spell in story.spells]
    if times:
        story.begin_s, story.end_s = min(times), max(*times, view.last_status_s)
    return story


def _of_counters(curves: Mapping[str, Curve]) -> Iterator[Happening]:
    """An event for each step in which a counter grew; an attempt may reset the counter."""
    for name, (kind, words) in _COUNTERS.items():
        if (curve := curves.get(name)) is not None:
            growth = np.diff(np.nan_to_num(curve.values), prepend=0.0)
            for place in np.flatnonzero(growth > 0).tolist():
                count = f"{growth[place]:.0f} times: " if growth[place] > 1 else ""
                text = f"{count}{words} (step {curve.steps[place]})"
                yield Happening(float(curve.unix_times_s[place]), "run", kind, text)


def _of_supervisors(view: RunView) -> Iterator[Happening]:
    for each in view.events:
        if each.event != "attempt":  # of attempts.jsonl
            who = "run" if each.name == "local" else f"job {each.name}"
            yield Happening(each.unix_time_s, who, each.event, each.text, each.attempt)


def _of_killed_launchers(view: RunView) -> Iterator[Happening]:
    """Ends of attempts on this machine whose supervisor was killed: these begin, and no end is recorded.

    Their time is the start of the next attempt, or else the last sign of life.
    """
    open_attempts: dict[int, float] = {}
    for each in view.events:
        if each.name == "local" and each.event == "attempt":
            open_attempts[each.attempt] = each.unix_time_s
        elif each.name == "local" and each.event in ("attempt_end", "retry", "verdict"):
            open_attempts.pop(each.attempt, None)  # an attempt that could not start has only the latter two
    launcher = Launcher.holder(view.layout) if open_attempts else None
    for attempt, began_s in open_attempts.items():
        later = [begun.unix_time_s for begun in view.attempts if begun.index > attempt]
        if later or launcher is None or launcher.is_stale:
            alive_s = max(began_s, written_unix_s(view.layout.launcher), view.last_status_s)
            when = min(later, default=alive_s)
            text = f"attempt {attempt} ended without a word: its launcher was killed, or the machine went down"
            yield Happening(when, "run", "killed", text, attempt)


def _of_attempts(view: RunView) -> Iterator[Happening]:
    for each in view.attempts:
        begins = "from the beginning" if each.resume_step is None else f"from the checkpoint of step {each.resume_step}"
        yield Happening(each.unix_time_s, "run", "attempt", f"attempt {each.index} begins {begins}", each.index)


def _of_guard(view: RunView) -> Iterator[Happening]:
    for entry in view.guard:
        if is_time(entry.unix_time_s) and isinstance(entry.attempt, int):
            yield Happening(entry.unix_time_s, "run", "guard", f"{entry.action}: {entry.text}", entry.attempt)


def _of_jobs(view: RunView) -> Iterator[Happening]:
    for record in view.job_documents.values():
        if {"name", "job_id"} <= record.keys() and is_time(record.get("submitted_unix_s")):
            text = f"{record['name']} submitted"
            yield Happening(record["submitted_unix_s"], f"job {record['job_id']}", "submitted", text)


# ---------------------------------------------------------------------------------------------------------------- hours
#
# GPU-hours of a run by use, and by job.
#
# Input: Story, settings, plans of jobs.  Output: rows of a table.  Without GPUs, hours of processes are counted.
# Intervals that the timeline did not record do not count.

_DOES = {"trainer": "training", "generator": "generating"}
_TOKENS = ("tokens/generated_total", "generator/tokens_lost_total")
_BEFORE_TRAINING = ("starting", "waiting for generators")


@dataclass(slots=True)
class Hours:
    """Hours by use and by job."""

    unit: str  # "GPU-hours", "process-hours"
    by_use: dict[str, float] = field(default_factory=dict)  # training, generating, waiting …
    by_job: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Hours of all uses."""
        return sum(self.by_use.values())


def hours_of(view: RunView, story: Story) -> Hours:
    """Hours of trainers and generators."""
    each = gpus_of(view)
    unit = "GPU-hours" if any(each.values()) else "process-hours"
    weights = each if any(each.values()) else dict.fromkeys(each, 1)
    uses = defaultdict[str, float](float)
    for spell in story.spells:
        role = spell.process.rpartition("-")[0]
        hours = weights.get(role, 0) * (spell.end_s - spell.begin_s) / 3600
        if not hours:
            continue
        if spell.phase in _BEFORE_TRAINING:
            uses["starting: engines and trainer load"] += hours
        elif spell.phase == "replaying" and role == "trainer":
            uses["training recorded steps again"] += hours
        else:
            works = min(1.0, spell.shares.get(WORKS, 0.0))
            uses[_DOES[role]] += hours * works
            uses[f"{role}s wait"] += hours * (1 - works)
    _set_lost_apart(uses, view.curves)
    return Hours(unit, {use: hours for use, hours in uses.items() if hours > 0}, _by_job(view, story))


def gpus_of(view: RunView) -> dict[str, int]:
    """GPUs of one process of each role, by the run's newest plan; 0 without a plan or if its form is unknown."""
    found = {"trainer": 0, "generator": 0}
    for plan in view.plans:
        with suppress(KeyError, TypeError, AttributeError):
            for job in plan.get("jobs", []):
                for part in job["components"]:
                    found |= {role: gpus for role, gpus in _gpus_in(part).items() if role in found}
    return found


def _gpus_in(part: Mapping[str, Any]) -> dict[str, int]:
    """GPUs of one process of each role of a plan."""
    shown = [devices.count(",") + 1 for devices in part.get("visible_devices", {}).values() if devices]
    gpus = int(part["gpus_per_task"]) or max(shown, default=0)
    return {share["role"]: gpus for share in part["roles"]}


def _set_lost_apart(uses: dict[str, float], curves: Mapping[str, Curve]) -> None:
    """Split the hours of generating: the share of tokens lost with their generators is apart."""
    kept, lost = (curves[name].last if name in curves else 0.0 for name in _TOKENS)
    if lost > 0 and "generating" in uses:
        share = lost / (lost + kept)
        uses["generating what was lost with generators"] = uses["generating"] * share
        uses["generating"] *= 1 - share


def _by_job(view: RunView, story: Story) -> dict[str, float]:
    """GPU-hours allocated to each job, from the first to the last event of each of its lives.

    A life without a recorded end lasts until the last sign of the run, or until another job takes its place.
    """
    lives = defaultdict[str, list[list[Happening]]](list)
    for each in story.happenings:
        if each.who.startswith("job ") and each.kind != "submitted":
            of_job = lives[each.who.removeprefix("job ")]
            if each.kind == "life" or not of_job:  # it was requeued: while it waited, it had no GPUs
                of_job.append([])
            of_job[-1].append(each)
    parts = {label: label.partition("_") for label in lives}
    planned = {label: job for label, (number, _, _) in parts.items() if (job := _planned_job(view, number))}
    begins = defaultdict[tuple[str, str], list[float]](list)  # by planned job and array task
    for label, job in planned.items():
        begins[job.name, parts[label][2]] += [life[0].unix_time_s for life in lives[label]]
    found = {}
    for label, job in sorted(planned.items()):
        seconds = sum(life[-1].unix_time_s - life[0].unix_time_s for life in lives[label])
        last = lives[label][-1][-1].unix_time_s
        if all(each.kind != "verdict" for each in lives[label][-1]):
            later = (begin for begin in begins[job.name, parts[label][2]] if begin > last)
            seconds += min(later, default=story.end_s) - last
        found[f"{label} ({job.name}, {job.gpus} GPUs)"] = job.gpus * seconds / 3600
    return found


@dataclass(frozen=True, slots=True)
class _PlannedJob:
    """A job in the plan; one task if the job is an array."""

    name: str
    gpus: int


def _planned_job(view: RunView, number: str) -> _PlannedJob | None:
    """Read the plan of a job; None if it can no longer be read."""
    try:
        record = view.job_documents[number]
        jobs = json.loads(Path(record["plan"]).read_bytes())["jobs"]
        job = next(each for each in jobs if each["name"] == record["name"])
        gpus = sum(part["nodes"] * part["tasks_per_node"] * part["gpus_per_task"] for part in job["components"])
        return _PlannedJob(str(job["name"]), int(gpus))
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
