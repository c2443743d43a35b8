"""Set the journal aside when a resume is not to repeat its steps; their rollouts are sampled again.

A resume trains the steps after its checkpoint again, from the journal.  A user who goes back on purpose, or has changed
how the policy is trained or sampled, wants different steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.run_directory.checkpoint_choice import ResumePoint, Tell
from rlhpc.errors import RunDirectoryError
from rlhpc.files import move_durably
from rlhpc.run_layout import RunLayout

FILES = ("journal_*.h5", "events_*.jsonl", "partials_*.bin")
SHAPES_STEPS = (
    "algorithm.",
    "critic.",
    "trainer.",
    "generation.",
    "environment.",
    "curriculum.",
    "admission.",
    "rewards.",
    "composite.",
    "instructions.",
    "shaping.",
)  # a repeated step would differ; without the curriculum, the prompts that it left out would be missed


def set_journal_aside(
    layout: RunLayout, resume_from: ResumePoint, changed: Sequence[str], attempt: int, tell: Tell
) -> None:
    """Move the journal to lost_attempt_N/ if this resume is not to repeat its steps.  N: the attempt that begins.

    changed: settings that differ from the attempt before, "key: old → new".  Raises RunDirectoryError.
    """
    why = _why_not(resume_from, changed)
    files = [path for pattern in FILES for path in sorted(layout.rollouts.glob(pattern))]
    if not why or not files:
        return
    target = layout.rollouts / f"lost_attempt_{attempt}"
    try:
        move_durably(files, target)
    except OSError as error:
        raise RunDirectoryError(f"{layout.rollouts}: its journal cannot be set aside: {error}") from error
    tell(f"{why}: steps after the checkpoint are not repeated, and their rollouts are set aside in {target.name}")


def _why_not(resume_from: ResumePoint, changed: Sequence[str]) -> str:
    """In words; "": steps are repeated."""
    if resume_from.from_start:
        return "--from-start"
    if resume_from.step is not None:
        return f"--step {resume_from.step}"
    if resume_from.no_replay:
        return "--no-replay"
    keys = [text.partition(":")[0] for text in changed if text.startswith(SHAPES_STEPS)]
    return f"{', '.join(keys)} changed" if keys else ""
