"""Take a trained model home: the weights of a checkpoint as an HF directory."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config_file import read_resolved
from rlhpc.errors import CheckpointError
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint_directory import latest_complete
from rlhpc.training.export import export_hf


def export_run(layout: RunLayout, out: Path, step: int | None) -> str:
    """Write `out` from the checkpoint of `step`, or the newest complete one; return a line that says so.

    Raises CheckpointError if there is none, none is sound, or `out` exists.
    """
    config, _ = read_resolved(layout)
    if out.exists():
        raise CheckpointError(f"{out} exists already")
    if step is None:
        found = latest_complete(layout.checkpoints)
        if found is None:
            raise CheckpointError(f"{layout.checkpoints}: no complete checkpoint")
        step = found[0]
    export_hf(layout.checkpoint(step) / "trainer", config.model.path, out)
    return f"{out}: weights after step {step} of {config.run.name}"
