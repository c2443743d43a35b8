"""Export a trained model: the weights of a checkpoint as an HF directory."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config_file import read_resolved
from rlhpc.errors import CheckpointError
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import Fate, KnownCheckpoints
from rlhpc.training.checkpoint.export import export_hf


def export_run(
    layout: RunLayout, out: Path, step: int | None, *, is_average: bool = False, dtype: str | None = None
) -> str:
    """Write `out` from the checkpoint of `step`, or the newest sound one; return lines that say so.

    is_average: the moving average of its weights.  dtype: of what is written; None: that of model.path.
    Raises CheckpointError if there is none, none is sound, or `out` exists.
    """
    config, _ = read_resolved(layout)
    if out.exists():
        raise CheckpointError(f"{out} exists already")
    skipped: list[str] = []
    if step is None:
        step = _newest_sound(layout, skipped)
    elif not layout.checkpoint(step).is_dir():
        known = ", ".join(str(each) for each, _ in KnownCheckpoints(layout.checkpoints).steps())
        raise CheckpointError(f"--step {step}: {layout.root} has no such checkpoint; legal: {known or 'none is there'}")
    written = export_hf(layout.checkpoint(step) / "trainer", config.model.path, out, is_average=is_average, dtype=dtype)
    what = "average of weights" if is_average else "weights"
    rounded = "" if written == "float32" else ", rounded from float32 (--dtype float32 rounds nothing)"
    return "\n".join([*skipped, f"{out}: {what} after step {step} of {config.run.name}, {written}{rounded}"])


def _newest_sound(layout: RunLayout, skipped: list[str]) -> int:
    """Its step; a line for each newer one goes to `skipped`.  Raises CheckpointError."""
    for state in KnownCheckpoints(layout.checkpoints).newest_first():
        if state.fate is Fate.SOUND:
            return state.step
        skipped.append(f"{state.path.name} is skipped: {state.problem}")
    what = "no checkpoint is sound" if skipped else "no complete checkpoint"
    raise CheckpointError("\n".join([f"{layout.checkpoints}: {what}", *skipped]))
