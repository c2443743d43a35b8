"""The summary printed at the end of a run: figures, what was saved, and the next command.

Input: a run directory whose processes have ended.  Output: lines.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.common.paths import as_typed, quoted
from launch.run_files.events import read_document
from launch.run_files.run_state import read_progress, saved_step
from rlhpc.exit_status import EXIT_CONFIG
from rlhpc.run_layout import RunLayout

_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "optimiser steps", lambda v: f"{v:,.0f}"),
    ("skipped_steps", "skipped of these: not finite, or refused", lambda v: f"{v:,.0f}"),
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
    """One line a figure, names to the left, numbers flush right; figures that are missing are left out."""
    summary = {**summary, "skipped_steps": summary.get("skipped_steps") or None}
    rows = [(label, form(float(summary[key]))) for key, label, form in _ROWS if _is_number(summary.get(key))]
    left, right = max(len(label) for label, _ in rows), max(len(value) for _, value in rows)
    rule = "─" * (left + right + 3)
    return "\n".join((rule, *(f"{label:<{left}}   {value:>{right}}" for label, value in rows), rule))


@dataclass(frozen=True)
class Saved:
    """What is left of a run that has ended before its last step, and how to go on."""

    words: str
    are_steps_lost: bool  # trained, and in no checkpoint and no journal


def what_was_saved(layout: RunLayout, command: str, *, is_refused: bool = False) -> Saved:
    """command: that continues the run, as it is shown.  is_refused: after what the run file names has been mended."""
    progress = read_progress(layout)
    trained, saved = progress.step if progress is not None else 0, saved_step(layout)
    if saved >= trained:
        steps = f"stopped, saved at step {saved}" if saved else "stopped before the first step"
        first = "once that is mended, " if is_refused else ""
        return Saved(f"{layout.root}: {steps}; {first}{command} continues it", are_steps_lost=False)
    checkpoint = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint"
    if any(layout.rollouts.glob("journal_*.h5")):  # a resume trains what was recorded after the checkpoint
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
    """The command that continues a run of this machine, with all that was typed at its start, to be typed here."""
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
    """Lines for the end of a run, complete or not.  command: that continues it.  status: that the run ends with."""
    layout = RunLayout(as_typed(layout.root))
    if not layout.summary.exists():
        is_refused = status == EXIT_CONFIG
        return [what_was_saved(layout, command, is_refused=is_refused).words] if layout.is_run else []
    summary = json.loads(layout.summary.read_bytes())
    root, lines = layout.root, [figures_table(summary)]
    if summary.get("reward_last_tenth") == summary.get("reward_first_tenth") == 0:
        lines.append(f"every reward was 0: nothing was learnt; `rlhpc logs {quoted(root)} reward` may say why")
    return [
        *lines,
        f"{root}: complete, saved at step {saved_step(layout)}",
        f"  `rlhpc export {quoted(root)} MODEL` writes the trained model as an HF checkpoint",
        f"  `rlhpc tensorboard {quoted(root)}` shows its curves",
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
