"""GPU-hours of a run, by use and by job.

Input: Story, settings, plans of jobs.  Output: rows of a table.  Without GPUs, hours of processes are counted.
Intervals that the timeline did not record do not count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.common.paths import written_unix_s
from launch.reading.happenings import Happening, Story
from launch.run_files.events import read_document
from rlhpc.metrics.curves import Curve
from rlhpc.roles.controller.metrics.timeline import WORKS
from rlhpc.run_layout import RunLayout

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


def hours_of(layout: RunLayout, story: Story, curves: Mapping[str, Curve]) -> Hours:
    """The hours of trainers and generators."""
    each = gpus_of(layout)
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
    _set_lost_apart(uses, curves)
    return Hours(unit, {use: hours for use, hours in uses.items() if hours > 0}, _by_job(layout, story))


def gpus_of(layout: RunLayout) -> dict[str, int]:
    """GPUs of one process of each role, by the run's newest plan; 0 where it is of another form, or none is there."""
    found = {"trainer": 0, "generator": 0}
    for plan in sorted((layout.job_plan, layout.local_plan), key=written_unix_s):
        with suppress(KeyError, TypeError, AttributeError):
            for job in read_document(plan).get("jobs", []):
                for part in job["components"]:
                    found |= {role: gpus for role, gpus in _gpus_in(part).items() if role in found}
    return found


def _gpus_in(part: Mapping[str, Any]) -> dict[str, int]:
    """Of one process of each of its roles."""
    shown = [devices.count(",") + 1 for devices in part.get("visible_devices", {}).values() if devices]
    gpus = int(part["gpus_per_task"]) or max(shown, default=0)
    return {share["role"]: gpus for share in part["roles"]}


def _set_lost_apart(uses: dict[str, float], curves: Mapping[str, Curve]) -> None:
    """Split the hours of generating by the share of tokens that were lost with their generators."""
    kept, lost = (curves[name].last if name in curves else 0.0 for name in _TOKENS)
    if lost > 0 and "generating" in uses:
        share = lost / (lost + kept)
        uses["generating what was lost with generators"] = uses["generating"] * share
        uses["generating"] *= 1 - share


def _by_job(layout: RunLayout, story: Story) -> dict[str, float]:
    """GPU-hours of what was allocated to each job in its lives, from the first to the last event of each.

    One that has not said how it ended is at work, until the last sign of the run, or until another does its work.
    """
    lives = defaultdict[str, list[list[Happening]]](list)
    for each in story.happenings:
        if each.who.startswith("job ") and each.kind != "submitted":
            of_job = lives[each.who.removeprefix("job ")]
            if each.kind == "life" or not of_job:  # it was requeued: before, it had nothing
                of_job.append([])
            of_job[-1].append(each)
    parts = {label: label.partition("_") for label in lives}
    planned = {label: job for label, (number, _, _) in parts.items() if (job := _planned_job(layout, number))}
    begins = defaultdict[tuple[str, str], list[float]](list)  # by what is planned, and the task of an array
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
    """What the plan says of a job; of one task where it is an array."""

    name: str
    gpus: int


def _planned_job(layout: RunLayout, number: str) -> _PlannedJob | None:
    """The plan of a job; None if it can no longer be read."""
    try:
        record = json.loads((layout.jobs / f"{number}.json").read_bytes())
        jobs = json.loads(Path(record["plan"]).read_bytes())["jobs"]
        job = next(each for each in jobs if each["name"] == record["name"])
        gpus = sum(part["nodes"] * part["tasks_per_node"] * part["gpus_per_task"] for part in job["components"])
        return _PlannedJob(str(job["name"]), int(gpus))
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
