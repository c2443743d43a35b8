"""`rlhpc list`: show runs and their states.  Input: the command line.  Output: a table, or JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.commands.arguments import MOST_ROWS
from launch.common.text import aligned, as_typed, printable, span
from launch.slurm.queue import JobRow
from launch.view.run import RunView
from launch.view.standing import DEPTH, Standing, State, directories_to_search, survey
from rlhpc.protocol.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------------- table
#
# Runs as a table for people and as JSON for programs.
#
# Input: Standing.  Output: lines, dictionaries.  Pure except for the current directory, to which paths are relative.

_HEAD = ("RUN", "STATE", "STEP", "REWARD", "SEEN", "AGE", "JOBS", "WHERE", "REMARK")
_LONGEST_REMARK, _MOST_JOBS = 160, 4


def lines_of(runs: Sequence[Standing], now: float, most: int | None) -> list[str]:
    """Return a head, a line per run, and the number of runs in each state; no lines if there is no run.

    most: limit on runs shown, live ones before the others; None: all.
    """
    if not runs:
        return []
    shown = list(runs)
    if most is not None and len(runs) > most:
        first = sorted(runs, key=lambda run: not run.state.is_alive)[:most]  # stable: the newest of each kind
        shown = [run for run in runs if run in first]
    counts = Counter(run.state for run in runs)
    summary = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
    more = f"; {len(runs) - len(shown)} older ones are not shown: --all" if len(shown) < len(runs) else ""
    return [*aligned([_HEAD, *(_cells(run, now) for run in shown)]), f"{summary}{more}"]


def document_of(run: Standing) -> dict[str, Any]:
    """A run as JSON for programs; times are Unix seconds, unknown values null."""
    view = run.view
    return {
        "directory": str(view.root),
        "name": view.name,
        "state": run.state.value,
        "step": view.step,
        "num_steps": view.num_steps,
        "reward": view.reward,
        "last_sign_unix_s": view.last_sign_unix_s,
        "began_unix_s": _began(view),
        "jobs": [
            {"id": row.label, "job_id": row.job_id, "name": row.name, "state": row.state.name,
             "is_alive": row.state.is_alive, "partition": row.partition, "nodes": row.nodes, "reason": row.reason}
            for row in run.rows
        ],
        "where": run.where,
        "remark": run.remark,
        "owner": view.owner,
    }  # fmt: skip


def _cells(run: Standing, now: float) -> tuple[str, ...]:
    view = run.view
    typed, remark = as_typed(view.root), printable(run.remark)
    name = str(view.root if typed == Path() else typed) + f" ({view.name})" * (view.name != view.root.name)
    return (
        printable(name),
        run.state.value,
        f"{_or_dash(view.step)}/{_or_dash(view.num_steps)}",
        _or_dash(None if view.reward is None else f"{view.reward:.3f}"),
        _since(view.last_sign_unix_s, now),
        _since(_began(view), now),
        _jobs(run.rows) or "-",
        printable(run.where) or "-",
        remark if len(remark) <= _LONGEST_REMARK else remark[: _LONGEST_REMARK - 1] + "…",
    )


def _began(view: RunView) -> float | None:
    return view.attempts[0].unix_time_s if view.attempts else None


def _jobs(rows: Iterable[JobRow]) -> str:
    """Live jobs, as "12 running, 13 3 pending 1 running": an id, and its tasks or components by state."""
    by_id: dict[int, Counter[str]] = {}
    for row in rows:
        if row.state.is_alive:
            by_id.setdefault(row.job_id, Counter())[row.state.name.lower()] += len(row.tasks) or 1
    said = [f"{job_id} {_states_in_words(counts)}" for job_id, counts in by_id.items()]
    more = [f"and {len(said) - _MOST_JOBS} more"] if len(said) > _MOST_JOBS else []
    return ", ".join([*said[:_MOST_JOBS], *more])


def _states_in_words(counts: Counter[str]) -> str:
    if len(counts) == 1 and counts.total() == 1:
        return next(iter(counts))
    return " ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _since(moment: float | None, now: float) -> str:
    return span(max(0, round(now - moment))) if moment else "-"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


# -------------------------------------------------------------------------------------------------------------- command


def list_runs(options: argparse.Namespace) -> int:
    """Print the list; returns exit status 0.  Raises ConfigError: no such directory, no such state."""
    wanted, tops = _wanted_states(options.state), directories_to_search(options.directories)
    depth = DEPTH if options.depth is None else options.depth
    found = survey(tops, depth)
    mine = [run for run in found.runs if options.all or run.view.is_mine]
    shown = [run for run in mine if run.state in wanted]
    notes = list(found.remarks)
    if others := len(found.runs) - len(mine):
        notes.append(f"{others} {'runs' if others > 1 else 'run'} of other users: --all shows them")
    if options.json:
        print(json.dumps({"runs": [document_of(run) for run in shown], "notes": notes}, indent=1))
        return 0
    lines = lines_of(shown, found.now, None if options.all else MOST_ROWS)
    nothing = f"no run {'of that state ' if mine else ''}below {', '.join(map(str, tops))}, nor in the queue"
    print("\n".join([*(lines or [nothing]), *(f"note: {printable(note)}" for note in notes)]))
    return 0


def _wanted_states(text: str | None) -> set[str]:
    legal = [state.value for state in State]
    words = legal if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if word not in legal:
            raise ConfigError(f"--state {word!r}: legal: {', '.join(legal)}")
    return set(words)
