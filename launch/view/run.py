"""A run directory for viewers: each kind of file is read here, in one way.

Input: the directory of a running, killed, damaged or copied run.  Output: RunView, for `rlhpc status`, `list`,
`report`, `metrics` and rlhpc.Run.  A file is read at its first use, and its content kept: make a new view to read it
again.  Missing, half written or malformed content counts as absent, unless stated otherwise.  Slow libraries are
imported where they are needed: `rlhpc list` needs none of them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from launch.common.text import written_unix_s
from launch.run_files.records import JobRecord, read_failures, read_job_records
from launch.run_files.run_state import (
    Event,
    event_of,
    lines_from_the_end,
    read_document,
    run_name,
    run_stage,
    saved_step,
)
from rlhpc.base.near_names import near_hint
from rlhpc.base.ownership import Launcher
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import ConfigError, SegmentError
from rlhpc.training.checkpoint_directory import AttemptTimeline, KnownCheckpoints

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlhpc.buffer.lost_leases import Suspicion
    from rlhpc.config.rules import Config
    from rlhpc.metrics.curves import Curve, CurveTable
    from rlhpc.roles.controller.guarding import GuardEntry

# Entries of a run directory besides config.json.  A single entry proves nothing: a model has config.json, another
# program checkpoints.
_MARKS = frozenset(("attempts.jsonl", "checkpoints", "jobs", "job_plan.json", "launcher.json", "rendezvous",
                    "rollouts", "status.json"))  # fmt: skip
_LOST_ITS_CONFIG = 3  # this many of them mark a run directory without config.json
_WRITTEN_BY_LIFE = ("status.json", "attempts.jsonl", "summary.json", "config.json", "launcher.json", "jobs")
_MOST_LOGS = 32
_FATAL = " rlhpc.lifecycle ERROR "  # in the log line of a role's fatal error (rlhpc/roles/lifecycle.py)
_EVALUATION = re.compile(r".*-step_(\d{6,})-(.+)")  # digits as in RunLayout.checkpoint: a name may contain "step_2"
_END_OF_TIME_S = 1e11  # the year 5138
_COLUMNS = (
    "groups/admitted_version", "groups/consumed_step", "groups/trained_version", "groups/rollout_offsets",
    "groups/drop_reason", "rollouts/token_offsets",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BegunAttempt:
    """A line of attempts.jsonl."""

    index: int
    unix_time_s: float
    resume_step: int | None
    host: str
    is_in_a_job: bool  # a Slurm job


@dataclass(frozen=True, slots=True)
class DoneEvaluation:
    """Evaluation of one step with one dataset."""

    name: str  # of the dataset
    step: int
    figures: dict[str, Any]  # each with value, low, high
    is_undone: bool  # a later attempt has undone the step: its model is no longer part of the run


@dataclass(slots=True)
class Sampled:
    """Counts of rollouts in segments: a long run has a hundred million rollouts."""

    staleness: Counter[int] = field(default_factory=Counter)  # versions → trained rollouts
    lengths_trained: Counter[int] = field(default_factory=Counter)  # tokens of completions → trained rollouts
    lengths_dropped: Counter[int] = field(default_factory=Counter)  # tokens of completions → other rollouts
    dropped: Counter[str] = field(default_factory=Counter)  # reason → groups
    num_groups: int = 0

    @property
    def num_rollouts(self) -> int:
        """Rollouts in segments, trained or not."""
        return self.lengths_trained.total() + self.lengths_dropped.total()


class RunView:
    """Content of a run directory at one moment, read file by file."""

    def __init__(self, layout: RunLayout, names: frozenset[str] | None = None) -> None:
        """names: entries of the directory, if known."""
        self.layout, self._names = layout, names

    # ------------------------------------------------------------------------------------------------- the directory

    @property
    def root(self) -> Path:
        """The run directory."""
        return self.layout.root

    @cached_property
    def names(self) -> frozenset[str]:
        """Entries of the directory."""
        with suppress(OSError):
            return frozenset(each.name for each in self.root.iterdir()) if self._names is None else self._names
        return frozenset()

    @cached_property
    def is_there(self) -> bool:
        """True if this is a run directory, by its entries; also one that has lost its config.json."""
        num_marks = len(self.names & _MARKS)
        return num_marks > 0 and (not self.damage or num_marks >= _LOST_ITS_CONFIG)

    @cached_property
    def _stat(self) -> os.stat_result:
        return self.root.stat()

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode.  Raises OSError."""
        return self._stat.st_dev, self._stat.st_ino

    @property
    def is_mine(self) -> bool:
        """False for another user's run, whose jobs are not queried.  Raises OSError."""
        return self.owner == os.geteuid()

    @property
    def owner(self) -> int:
        """User id.  Raises OSError."""
        return self._stat.st_uid

    # -------------------------------------------------------------------------------------------------------- settings

    @cached_property
    def _settings(self) -> tuple[dict[str, Any], str]:
        try:
            document = json.loads(self.layout.config.read_bytes())
        except FileNotFoundError:
            return {}, "config.json is missing"
        except OSError as error:
            return {}, f"config.json: {error.strerror}"
        except ValueError:
            return {}, "config.json is damaged"
        settings = document.get("config") if isinstance(document, dict) else None
        if not isinstance(settings, dict) or "hash" not in document:
            return {}, "config.json is not that of a run"
        return {name: keys for name, keys in settings.items() if isinstance(keys, dict | list)}, ""

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved run file, by section and key; {} if it is damaged."""
        return self._settings[0]

    @property
    def is_supervised(self) -> bool:
        """True for supervised fine-tuning."""
        return run_stage(self.settings) == "sft"

    @property
    def damage(self) -> str:
        """Damage of config.json, in words; "": none."""
        return self._settings[1]

    @property
    def name(self) -> str:
        """The name in the run file."""
        return run_name(self.settings, self.root)

    @cached_property
    def config(self) -> Config | None:
        """The validated settings; None: they cannot be read."""
        from rlhpc.config.file import read_resolved

        try:
            return read_resolved(self.layout)[0]
        except ConfigError:
            return None

    @cached_property
    def plans(self) -> list[dict[str, Any]]:
        """Plans of processes on this machine and in jobs; the plan of the latest start is last."""
        return [
            read_document(plan) for plan in sorted((self.layout.job_plan, self.layout.local_plan), key=written_unix_s)
        ]

    @property
    def was_submitted_last(self) -> bool:
        """True if the newest plan is one of jobs."""
        return written_unix_s(self.layout.job_plan) > written_unix_s(self.layout.local_plan)

    # --------------------------------------------------------------------------------------------------------- progress

    @cached_property
    def status(self) -> dict[str, Any]:
        """Content of status.json; {} before the first start."""
        return read_document(self.layout.status)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json, the figures of the whole run; {} until it is complete."""
        return read_document(self.layout.summary)

    @property
    def phase(self) -> str:
        """Last phase of the controller; "" if there was none."""
        return str(self.status.get("phase", ""))

    @cached_property
    def step(self) -> int | None:
        """Steps done; None: not known."""
        step = whole(self.status.get("step"))
        if step is None and "summary.json" in self.names:
            return whole(self.summary.get("steps"))
        return saved_step(self.layout) if step is None and "checkpoints" in self.names else step

    @property
    def num_steps(self) -> int | None:
        """Total number of steps, as configured."""
        of_run = self.settings.get("run")
        return whole(of_run.get("num_steps")) if isinstance(of_run, dict) else None

    @property
    def reward(self) -> float | None:
        """Mean reward of the last step; None before the first, and in supervised fine-tuning."""
        reward = self.status.get("reward")
        return float(reward) if self.step and is_number(reward) and not self.is_supervised else None

    @cached_property
    def attempts(self) -> list[BegunAttempt]:
        """All attempts that have begun, oldest first."""
        return [
            BegunAttempt(
                line["index"],
                line["unix_time_s"],
                whole(line.get("resume_step")),
                str(line.get("host", "")),
                bool(line.get("job_id")),  # 0: an attempt of `rlhpc run`, on one machine
            )
            for line in _objects(self.layout.attempts)
            if isinstance(line.get("index"), int) and is_time(line.get("unix_time_s"))
        ]

    @property
    def attempt(self) -> BegunAttempt | None:
        """The newest attempt; None: none has begun."""
        return self.attempts[-1] if self.attempts else None

    def read_ahead(self) -> None:
        """Read the files for a line about the run: for many runs on a slow file system, a thread each."""
        _ = self.step, self.reward, self.attempts, self._written

    @cached_property
    def _written(self) -> dict[str, float]:
        return {name: written_unix_s(self.root / name) for name in _WRITTEN_BY_LIFE if name in self.names}

    @property
    def status_unix_s(self) -> float:
        """Time of the controller's last status by the file system's clock, in Unix seconds; 0: none."""
        return self._written["status.json"] if self.status and "status.json" in self.names else 0.0

    @property
    def launcher_unix_s(self) -> float:
        """Time of the last write by a launcher of `rlhpc run`, which writes every other second."""
        return self._written.get("launcher.json", 0.0)

    @property
    def last_sign_unix_s(self) -> float:
        """Time of the last write by any process of the run."""
        return max(self._written.values(), default=0.0)

    @property
    def last_status_s(self) -> float:
        """Time of the controller's last status by its own clock; 0: none."""
        written_s = self.status.get("unix_time_s", 0.0)
        return float(written_s) if is_time(written_s) else 0.0

    # ---------------------------------------------------------------------------------------- processes, jobs, events

    @cached_property
    def launcher_pid(self) -> int | None:
        """Process id of the launcher of the run on this machine; None: not alive."""
        found = Launcher.holder(self.layout)
        return found.process.pid if found is not None and found.process.is_alive else None

    @cached_property
    def jobs(self) -> list[JobRecord]:
        """All submissions, oldest first.  Raises RunDirectoryError: a record is damaged; OSError."""
        return read_job_records(self.layout)

    @cached_property
    def job_documents(self) -> dict[str, dict[str, Any]]:
        """Job records as JSON objects, by number; unreadable ones are {}."""
        return {path.stem: read_document(path) for path in self.layout.jobs.glob("[0-9]*.json")}

    @property
    def is_slurm_run(self) -> bool:
        """True if jobs were submitted for the run, and it does not run as processes of this machine now."""
        return any(self.layout.jobs.glob("[0-9]*.json")) and self.launcher_pid is None

    @cached_property
    def events(self) -> list[Event]:
        """Events of supervisors; those of one supervisor are in order."""
        found = []
        for path in self.layout.jobs.glob("*.events.jsonl"):
            with suppress(OSError):
                name = path.name.removesuffix(".events.jsonl")
                found += [event_of(name, line) for line in path.read_bytes().splitlines()]
        return [event for event in found if event is not None and is_time(event.unix_time_s)]

    @property
    def recorded_failure(self) -> str:
        """Cause of the first failure recorded by the launcher; "" if there is none, or the launcher died, too."""
        if self.attempt is None or "logs" not in self.names:
            return ""
        failures = read_failures(self.layout, self.attempt.index)
        return failures[0].cause if failures else ""

    @property
    def fatal_error(self) -> str:
        """Earliest fatal error in logs of the newest attempt's roles, "trainer-0: …"; "" if there is none."""
        if self.attempt is None or "logs" not in self.names:
            return ""
        logs = sorted(self.layout.logs.glob(f"*/attempt_{self.attempt.index}.log"))[:_MOST_LOGS]
        said = [line for log in logs if (line := _last_fatal(log))]
        if not said:
            return ""
        _, _, role, words = min(said).split(" ", 3)  # lines begin with date and time
        return f"{role}: {words.partition(_FATAL.lstrip())[2]}"

    # ---------------------------------------------------------------------------------------- guard, prompts, models

    @cached_property
    def guard(self) -> list[GuardEntry]:
        """Entries of the guard, oldest first.  Raises OSError."""
        if not self.layout.guard.exists():
            return []
        from rlhpc.roles.controller.guarding import read_guard_file

        return read_guard_file(self.layout.guard)

    @cached_property
    def suspicions(self) -> list[Suspicion]:
        """Prompts suspected of having killed generators or verifiers.  Raises OSError."""
        if not self.layout.lost_leases.exists():
            return []
        from rlhpc.buffer.lost_leases import LostLeaseFile

        return LostLeaseFile(self.layout.lost_leases).suspicions()

    @property
    def checkpoints(self) -> list[tuple[int, Path]]:
        """Step and directory of each complete checkpoint, oldest first; without reading their files."""
        return sorted(KnownCheckpoints(self.layout.checkpoints).steps())

    @cached_property
    def done_evaluations(self) -> list[DoneEvaluation]:
        """Finished evaluations, in no order, without damaged and restarted ones.  Raises OSError."""
        if not self.layout.evaluations.is_dir():
            return []
        found, timeline = [], AttemptTimeline.read(self.layout.attempts)
        for path in self.layout.evaluations.glob("*/summary.json"):
            if match := _EVALUATION.fullmatch(path.parent.name):
                try:
                    document, step = json.loads(path.read_bytes()), int(match[1])
                    figures = {name: worth for name, worth in document["figures"].items() if _has_interval(worth)}
                    is_undone = timeline.undone_by(step, document.get("attempt")) is not None
                except (OSError, ValueError, KeyError, TypeError, AttributeError):
                    continue
                found.append(DoneEvaluation(match[2], step, figures, is_undone))
        return found

    @cached_property
    def evaluations(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Figures by dataset and step, ascending; without undone steps."""
        found: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        for each in self.done_evaluations:
            if not each.is_undone:
                found[each.name][each.step] = each.figures
        return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}

    def values_of(self, name: str, figure: str) -> dict[int, float]:
        """Values of one figure of a dataset, by step."""
        steps = self.evaluations.get(name, {})
        return {step: float(figures[figure]["value"]) for step, figures in steps.items() if figure in figures}

    # ------------------------------------------------------------------------------------------------ metrics, rollouts

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Metrics of training.  Raises OSError."""
        from rlhpc.metrics.curves import read_curves

        return read_curves(self.layout.tensorboard)

    @cached_property
    def evaluation_curves(self) -> dict[str, Curve]:
        """Metrics of evaluations, without undone steps.  Raises OSError."""
        import numpy as np

        from rlhpc.metrics.curves import Curve, read_curves

        curves = read_curves(self.layout.evaluations / self.layout.tensorboard.name)
        undone = defaultdict[str, list[int]](list)  # event files do not mark undone steps
        for each in self.done_evaluations if curves else ():
            if each.is_undone:
                for figure in each.figures:
                    undone[f"evaluation/{each.name}/{figure}"].append(each.step)
        for name in undone.keys() & curves.keys():
            curve, is_kept = curves[name], ~np.isin(curves[name].steps, undone[name])
            curves[name] = Curve(curve.steps[is_kept], curve.values[is_kept], curve.unix_times_s[is_kept])
        return {name: curve for name, curve in curves.items() if len(curve.steps)}

    def metric_table(self, patterns: Sequence[str] = ()) -> CurveTable:
        """Metrics whose names match one of the patterns (*, ?, [seq]; * also matches slashes); without patterns, all.

        Steps that a resume has undone are left out, attempts joined.  Figures of an evaluation are at the step of its
        checkpoint.
        Raises RunDirectoryError: no run is here; ConfigError: it has written nothing yet, or a pattern matches nothing;
        OSError.
        """
        from rlhpc.metrics.curves import tabulated

        self.layout.require_run()
        curves = self.curves | self.evaluation_curves
        if not curves:
            raise ConfigError(f"{self.root}: no metrics yet: the first ones are written after the first step")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in curves):
                raise ConfigError(f"{pattern!r}: no metric of this run matches{hint(pattern, curves)}")
        is_wanted = {name: not patterns or any(fnmatchcase(name, each) for each in patterns) for name in curves}
        return tabulated({name: curve for name, curve in curves.items() if is_wanted[name]})

    @property
    def num_steps_seen(self) -> int:
        """Steps done, by status and metrics."""
        told = self.status.get("step")
        return max([told if isinstance(told, int) else 0, *(int(c.steps[-1]) + 1 for c in self.curves.values())])

    def mean_of(self, name: str) -> float | None:
        """Mean of a metric over the second half of the steps, after a run has settled.  None: not written."""
        curve = self.curves.get(name)
        if curve is None:
            return None
        half = [value for value in curve.values[len(curve.values) // 2 :].tolist() if math.isfinite(value)]
        return math.fsum(half) / len(half) if half else None

    @cached_property
    def sampled(self) -> Sampled:
        """Counts from single columns of segments, read without checksums; unreadable parts are left out."""
        import numpy as np

        from rlhpc.buffer.segments import read_columns

        sampled = Sampled()
        for path in sorted(self.layout.rollouts.glob("segment_*.h5")):
            try:
                columns = read_columns(path, _COLUMNS)
            except SegmentError:
                continue
            sizes = np.diff(columns["groups/rollout_offsets"])
            lengths = np.diff(columns["rollouts/token_offsets"])
            age = columns["groups/trained_version"] - columns["groups/admitted_version"]
            has_age = columns["groups/trained_version"] >= 0  # others were not trained
            is_of_trained = np.repeat(columns["groups/consumed_step"] >= 0, sizes)
            _count(sampled.staleness, np.repeat(age[has_age], sizes[has_age]))
            _count(sampled.lengths_trained, lengths[is_of_trained])
            _count(sampled.lengths_dropped, lengths[~is_of_trained])
            sampled.dropped.update(str(reason) for reason in columns["groups/drop_reason"] if reason)
            sampled.num_groups += len(sizes)
        return sampled


# -------------------------------------------------------------------------------------------------------------- forms


def is_time(value: object) -> TypeGuard[int | float]:
    """True for seconds of the Unix clock within the range of a calendar."""
    return is_number(value) and 0 <= value < _END_OF_TIME_S


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a finite number."""
    return isinstance(value, int | float) and abs(value) < math.inf


def whole(value: object) -> int | None:
    """The value if it is a whole number, else None."""
    return value if isinstance(value, int) else None


def hint(pattern: str, names: Iterable[str]) -> str:
    """Suggestion instead of a name or pattern that matches none of `names`."""
    known = [*names]
    if not known:
        return "; it has none yet: the first step writes them"
    if f"{pattern}/mean" in known:
        return f" (did you mean {pattern}/mean?)"
    families = sorted({name.partition("/")[0] for name in known})
    return near_hint(pattern, known) or f"; it has {', '.join(f'{each}/*' for each in families)}"


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a file that are JSON objects."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                yield document


def _last_fatal(log: Path) -> str:
    lines = (line.decode(errors="replace") for line in lines_from_the_end(log))
    return next((line for line in lines if _FATAL in line and line.count(" ") > 4), "")


def _has_interval(worth: object) -> bool:
    return isinstance(worth, dict) and all(isinstance(worth.get(key), int | float) for key in ("value", "low", "high"))


def _count(how_often: Counter[int], values: NDArray[np.int64]) -> None:
    import numpy as np

    for value, number in zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True):
        how_often[value] += number
