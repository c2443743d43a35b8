"""Write the run's status to files, for people and the launcher: now, over time, and at its end.

In this file: summary.json, written once; timeline.jsonl; status.json, replaced about once a second.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.base.files import write_atomically
from rlhpc.base.ownership import Fence
from rlhpc.base.patience import patiently
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import LineFile
from rlhpc.buffer.segments import read_columns, segments_that_are_left
from rlhpc.config.rules import Config
from rlhpc.metrics.meters import SILENT, WORKS, TimelineEntry
from rlhpc.protocol.errors import SegmentError
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.outcomes import PREFIX, TEACHER_PREFIX, ErrorGate, by_task
from rlhpc.roles.controller.leases import ProcessRegistry
from rlhpc.roles.controller.persistence import Journaling, PatientSealing
from rlhpc.roles.controller.state import Totals

if TYPE_CHECKING:
    from rlhpc.roles.controller.checkpoints import CheckpointWriter

# -------------------------------------------------------------------------------------------------------------- summary
#
# The metrics of a whole run, written once at its end.
#
# Input: the counters and the sealed segments.  Output: summary.json.  The reward curve is read from the segments alone:
# a rollout counts for the version under which its group was admitted, whether or not it was trained on.

log = logging.getLogger("rlhpc.run_status")
_COLUMNS = (
    *("groups/group_id", "groups/admitted_version", "groups/group_size"),
    *("rollouts/group_id", "rollouts/reward", "rollouts/verdict"),
)


def reward_by_version(rollouts: Path, group_size: int) -> dict[int, tuple[float, int]]:
    """Return {admitted version: (mean reward, number of rollouts)} over all groups of which every member was scored.

    Dropped and leftover groups count as well: without zero-variance groups the curve would show which groups are
    trained on and not the policy's skill.  Damaged segments are left out, with a warning.
    """
    sums: dict[int, float] = defaultdict(float)
    counts: dict[int, int] = defaultdict(int)
    for path in segments_that_are_left(rollouts, partial(log.warning, "reward_by_version lacks a segment: %s")):
        try:
            columns = patiently(partial(read_columns, path, _COLUMNS), path)
        except SegmentError as error:  # the run has done all its steps: another attempt could not do more
            log.warning("reward_by_version lacks the groups of a segment: %s", error)
            continue
        is_judged = columns["rollouts/verdict"] != Verdict.VERIFIER_ERROR.value
        owner, reward = columns["rollouts/group_id"][is_judged], columns["rollouts/reward"][is_judged]
        sizes = np.maximum(columns["groups/group_size"], group_size)
        for group_id, version, size in zip(
            columns["groups/group_id"], columns["groups/admitted_version"].tolist(), sizes.tolist(), strict=True
        ):
            own = reward[owner == group_id]
            if len(own) == size:
                sums[version] += float(own.sum())
                counts[version] += size
    return {version: (sums[version] / counts[version], counts[version]) for version in sorted(sums)}


def tenth_means(curve: dict[int, tuple[float, int]], num_versions: int) -> tuple[float | None, float | None]:
    """Mean reward over the rollouts of the first and of the last tenth of versions; None if there are none.

    The last tenth ends with the newest trained-on version that has rollouts: the last batches may all be of earlier
    ones, and what follows the last step is nobody's batch.
    """
    tenth = max(1, num_versions // 10)
    end = 1 + max((version for version in curve if version < num_versions), default=0)
    return _mean(curve, 0, tenth), _mean(curve, end - tenth, end)


def summarise(
    layout: RunLayout, totals: Totals, staleness_bound: int, group_size: int, fence: Fence | None = None
) -> dict[str, Any]:
    """Write summary.json and return its content.  Raises OwnershipLost: only the owner may declare a run complete."""
    curve = reward_by_version(layout.rollouts, group_size)
    # A skipped step makes no version.
    first, last = tenth_means(curve, max(1, totals.steps - totals.skipped_steps))
    seconds = totals.training_s or 1.0
    summary = {
        "steps": totals.steps,
        "skipped_steps": totals.skipped_steps,
        "rollouts_trained": totals.rollouts_trained,
        "reward_first_tenth": first,
        "reward_last_tenth": last,
        "staleness_max": totals.staleness_max,
        "staleness_bound": staleness_bound,
        "rollouts_spanning_update": totals.rollouts_spanning_update / max(1, totals.rollouts_trained),
        "packing_fill": totals.packing_fill,
        "generator_tokens_per_s": totals.tokens_generated / seconds,
        "trainer_tokens_per_s": totals.tokens_trained / seconds,
        "generator_idle_ratio": totals.generator_idle_ratio,
        "trainer_idle_ratio": totals.trainer_idle_ratio,
        "zero_variance_groups": totals.zero_variance_groups,
        "groups_dropped": totals.groups_dropped,
        "leases_regranted": totals.leases_regranted,
        "tokens_lost": totals.tokens_lost,
        "training_s": totals.training_s,
        "wall_s": totals.wall_s,
        "reward_by_version": [[version, mean, count] for version, (mean, count) in curve.items()],
    }
    content = json.dumps(summary, indent=1).encode()
    if fence is not None:
        fence.write(layout.summary, content)
    else:
        write_atomically(layout.summary, content)
    return summary


def _mean(curve: dict[int, tuple[float, int]], start: int, end: int) -> float | None:
    inside = [(mean, count) for version, (mean, count) in curve.items() if start <= version < end]
    total = sum(count for _, count in inside)
    return sum(mean * count for mean, count in inside) / total if total else None


# ------------------------------------------------------------------------------------------------------------- timeline
#
# Busy and waiting time of every process over the run's lifetime: timeline.jsonl, for `rlhpc report`.
#
# Input: the registry's row of every process, twice a second.  Output: a line for each interval with the share of it
# that each process worked or waited, and a line for each arrival and loss.  Intervals grow with the number of processes
# and with the age of the run, counted from the file's first line, so that a month of a large run stays megabytes,
# however often it is requeued.  A full disk delays lines, and the file says for how long.  No decision depends on it.

SILENT_S = 3.0  # without a heartbeat
SHORTEST_S = 5.0  # shortest interval
RETRY_S = 5.0  # between two tries to write to a full disk: each logs a warning
_INTERVALS_AT_AGE = 1000  # a run of age t has intervals of t / 1000
_PROCESSES_PER_S = 16
_MOST_FIRST_LINES = 100  # empty, or damaged by a crash
_MOST_PENDING = 10_000  # lines, while the disk is full


@dataclass(slots=True)
class _Watched:
    """A process in the current interval."""

    row: Mapping[str, Any]  # as last reported
    looks: Counter[str] = field(default_factory=Counter)
    busy_s: float | None = None  # its counter when the interval began


class Timeline:
    """Observes processes and writes the timeline.  One thread may call `look` while another calls `write`."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        self._lines = LineFile(path, TimelineEntry, fence)
        self._news: SimpleQueue[TimelineEntry] = SimpleQueue()  # from `look` to `write`
        self._pending: deque[TimelineEntry] = deque(maxlen=_MOST_PENDING)  # used by `write` alone
        self._watched: dict[str, _Watched] = {}
        self._first_s = _first_line_s(path)  # of an earlier attempt, if there was one
        self._since_s = 0.0
        self._failed_since_s: float | None = None
        self._tried_s = 0.0

    def look(self, now_s: float, rows: Sequence[Mapping[str, Any]], *, attempt: int, step: int, phase: str) -> None:
        """Add the present states of all processes; now_s: the wall clock."""
        self._first_s = self._first_s or now_s
        self._since_s = self._since_s or now_s
        where = {"attempt": attempt, "step": step, "phase": phase}
        self._arrivals_and_losses(now_s, rows, where)
        for row in rows:
            what = SILENT if row["silent_s"] > SILENT_S else row["waits_for"] or WORKS
            self._watched[row["name"]].looks[what] += 1
        if now_s - self._since_s >= self._interval_s(now_s, len(rows)):
            self._close_interval(now_s, where)

    def write(self, now_s: float) -> None:
        """Append pending lines; they stay pending if that fails.  Raises OwnershipLost."""
        while not self._news.empty():
            self._pending.append(self._news.get())
        if not self._pending or now_s - self._tried_s < (RETRY_S if self._failed_since_s is not None else 0.0):
            return
        self._tried_s = now_s
        entries = [*self._pending]
        if self._failed_since_s is not None:
            text = f"the run directory could not be written for {now_s - self._failed_since_s:.0f} s"
            last = entries[-1]
            entries.append(TimelineEntry(now_s, last.attempt, last.step, last.phase, event="disk", text=text))
        if self._lines.append(entries):
            self._pending.clear()
            self._failed_since_s = None
        elif self._failed_since_s is None:
            self._failed_since_s = now_s

    def _arrivals_and_losses(self, now_s: float, rows: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> None:
        present = {row["name"]: row for row in rows}
        for name, watched in [*self._watched.items()]:
            row, known = present.get(name), watched.row
            if row is None or row["pid"] != known["pid"] or row["host"] != known["host"]:
                self._news.put(TimelineEntry(now_s, **where, **_loss(known)))
                del self._watched[name]
        for name, row in present.items():
            if name not in self._watched:
                text = f"{_service_of(row)}pid {row['pid']} on {row['host']}"
                self._news.put(TimelineEntry(now_s, **where, event="joined", name=name, text=text))
                self._watched[name] = _Watched(row, busy_s=row["metrics"].get("busy_s"))
            self._watched[name].row = row

    def _interval_s(self, now_s: float, num_processes: int) -> float:
        return max(SHORTEST_S, num_processes / _PROCESSES_PER_S, (now_s - self._first_s) / _INTERVALS_AT_AGE)

    def _close_interval(self, now_s: float, where: Mapping[str, Any]) -> None:
        seconds = now_s - self._since_s
        work = {name: _shares(watched, seconds) for name, watched in self._watched.items() if watched.looks}
        self._news.put(TimelineEntry(now_s, **where, seconds=round(seconds, 3), work=work))
        self._since_s = now_s
        for watched in self._watched.values():
            watched.looks.clear()
            watched.busy_s = watched.row["metrics"].get("busy_s")


def _first_line_s(path: Path) -> float:
    """Wall-clock time of the first whole line, in seconds; 0 if there is none."""
    with suppress(OSError), path.open("rb") as file:
        for line in islice(file, _MOST_FIRST_LINES):
            with suppress(ValueError, KeyError, TypeError):
                return float(json.loads(line)["unix_time_s"])
    return 0.0


def _loss(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["state"] == "draining":
        return {"event": "left", "name": row["name"], "text": "it had said that it leaves"}
    was = f"waited for {row['waits_for']}" if row["waits_for"] else f"was {row['state']}"
    running = row["metrics"].get("running", 0.0)
    held = f" with {running:.0f} {'requests' if 'service' in row else 'rollouts'}" if running else ""
    text = f"{_service_of(row)}no sign of life for {row['silent_s']:.1f} s; it {was}{held}"
    return {"event": "lost", "name": row["name"], "text": text}


def _service_of(row: Mapping[str, Any]) -> str:
    """ "teacher: " of a process of this service; "" of other roles."""
    return f"{row['service']}: " if "service" in row else ""


def _shares(watched: _Watched, seconds: float) -> dict[str, float]:
    """Shares of an interval by state.  Engines count their busy time: it is exact, where looks only sample it."""
    total = watched.looks.total()
    shares = {what: count / total for what, count in watched.looks.items()}
    busy_s = watched.row["metrics"].get("busy_s")
    if busy_s is not None and watched.busy_s is not None and busy_s >= watched.busy_s:
        works = min(1.0, (busy_s - watched.busy_s) / seconds)
        waits = {what: share for what, share in shares.items() if what != WORKS} or {"leases": 1.0}
        rest = (1.0 - works) / sum(waits.values())
        shares = {WORKS: works, **{what: share * rest for what, share in waits.items()}}
    return {what: round(share, 3) for what, share in shares.items() if share >= 0.0005}


# --------------------------------------------------------------------------------------------------------- status board


@dataclass(slots=True)
class HeldOutLoss:
    """Losses of supervised fine-tuning on held-out conversations; part of its checkpoints."""

    step: int = -1  # steps done when the newest was computed; -1: none was
    loss: float | None = None  # nats a token, or a pair
    first: float | None = None
    best: float | None = None
    best_step: int = -1
    num_worse: int = 0  # consecutive losses above the lowest
    figures: dict[str, float] = field(default_factory=dict)  # computed with the newest: those of preferences

    def note(self, step: int, loss: float, figures: dict[str, float]) -> bool:
        """Record a loss; return whether it is the lowest."""
        self.figures = figures
        self.step, self.loss, self.first = step, loss, loss if self.first is None else self.first
        is_best = math.isfinite(loss) and (self.best is None or loss < self.best)
        if is_best:
            self.best, self.best_step = loss, step
        self.num_worse = 0 if is_best else self.num_worse + 1
        return is_best

    def is_enough(self, early_stop: int | str) -> bool:
        """Whether early_stop consecutive losses were not the lowest, so that the run ends; "off": never."""
        return early_stop != "off" and self.num_worse >= int(early_stop)


@dataclass(slots=True)
class LiveFigures:
    """Numbers of the progress line, and durations with which a supervisor plans."""

    phase: str = "starting"
    step: int = 0
    version: int = -1
    reward: float = 0.0
    staleness_max: int = 0
    trainer_tokens_per_s: float = 0.0
    generator_tokens_per_s: float = 0.0
    eta_s: float | None = None
    step_s: float = 0.0  # longest of the last steps of this attempt, from the end of the one before; 0: none yet
    save_s: float = 0.0  # longest checkpoint of this attempt, from its request until it was complete; 0: none yet
    attempt: int = 0
    resume_step: int | None = None  # the checkpoint that the attempt resumed from
    checkpoints_failed: int = 0  # skipped since the start because they could not be written
    loss: float | None = None  # of supervised fine-tuning, at the last step; nats a token
    held_out: HeldOutLoss | None = None  # of supervised fine-tuning; None: reinforcement learning
    is_ending: bool = False  # all roles have been told to leave, or are about to be; also when the run has failed


class StatusBoard:
    """Writes status.json; a failed write is a warning and does not end the run."""

    def __init__(
        self,
        layout: RunLayout,
        config: Config,
        registry: ProcessRegistry,
        ledger: AdmissionLedger | None,
        fence: Fence | None = None,
        writers: Sequence[Journaling | PatientSealing | CheckpointWriter] = (),
        gate: ErrorGate | None = None,
    ) -> None:
        """ledger: None where nothing is admitted."""
        self._path, self._config, self._registry, self._ledger = layout.status, config, registry, ledger
        self._fence, self._writers, self._gate = fence, writers, gate
        self._timeline = Timeline(layout.timeline, fence)
        self.figures = LiveFigures()

    def document(self) -> bytes:
        """Return the content of the file."""
        figures, now_s = self.figures, time.time()
        roles = [row | self._kind_of(row) for row in self._registry.report()]
        self._timeline.look(now_s, roles, attempt=figures.attempt, step=figures.step, phase=figures.phase)
        document = {
            "name": self._config.run.name,
            "unix_time_s": now_s,
            "num_steps": self._config.run.num_steps,
            "stage": self._config.run.stage,
            "staleness_bound": 0 if self._ledger is None else self._ledger.staleness_bound,
            "queue": {} if self._ledger is None else _queue_of(self._ledger),
            "roles": roles,
            "disk_troubles": [each.disk_trouble for each in self._writers if each.disk_trouble],
            "errors": self._gate.document() if self._gate is not None else {},
            "verifiers": by_task(self._registry.totals(PREFIX, "reward", "generator")),
            "teachers": by_task(self._registry.totals(TEACHER_PREFIX, "generator"), TEACHER_PREFIX),
            **asdict(figures),
        }
        return json.dumps(document).encode()

    def _kind_of(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The kind of a row's service; {} of other roles."""
        kinds = {each.name: each.kind for each in self._config.service}
        return {"kind": kinds[row["service"]]} if row.get("service") in kinds else {}

    def write(self, document: bytes) -> None:
        """Replace status.json, append to the timeline.  One thread at a time; another may call `document` meanwhile.

        Raises OwnershipLost.
        """
        try:
            if self._fence is not None:
                self._fence.write(self._path, document, is_synced=False)
            else:
                write_atomically(self._path, document)
        except OSError as error:
            log.warning("%s not written: %s", self._path, error.strerror or error)
        self._timeline.write(time.time())


def _queue_of(ledger: AdmissionLedger) -> dict[str, int]:
    return ledger.counts() | {"oldest_in_flight_s": round(ledger.oldest_in_flight_age_s)}
