"""The work that a resume would repeat: the steps after the checkpoint that it starts from.

rollouts/events_NNNNNN.jsonl ─▶ a row of `rlhpc check RUN_DIR`
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.checks.run_rows import Row, Verdict
from rlhpc.buffer.event_log import Began, Trained, event_paths, read_events
from rlhpc.errors import JournalError
from rlhpc.run_layout import RunLayout


def replay_cost(layout: RunLayout, step: int | None) -> Iterator[Row]:
    """How many recorded steps follow the chosen checkpoint (None: the beginning), and how long their training took."""
    seconds = dict[int, float]()
    try:
        for path in event_paths(layout.rollouts) if layout.rollouts.is_dir() else []:
            for event in read_events(path).events.values():
                if isinstance(event, Began) and not event.goes_on:
                    seconds.clear()
                elif isinstance(event, Trained):
                    seconds[event.step] = event.metrics.get("step_s", 0.0)
    except (JournalError, OSError):
        return  # its row stands above
    again = sorted(done for done in seconds if done >= (step or 0))
    if again:
        since = f"the checkpoint of step {step}" if step else "the beginning"
        took_s = sum(seconds[done] for done in again)
        text = f"{len(again)} steps since {since} ({again[0]} to {again[-1]}) are trained again, from the journal"
        yield Row(
            "replay", layout.rollouts.name, Verdict.NOTE, f"{text}: {took_s:.1f} s as they took; nothing is sampled"
        )
