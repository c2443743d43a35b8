"""Export a trained model: the weights of a checkpoint as an HF directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from launch.checks.model_files import other_tokens
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import read_resolved
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import CheckpointError, DamagedCheckpoint
from rlhpc.training.checkpoint_directory import Fate, KnownCheckpoints
from rlhpc.training.checkpoint_export import export_adapter, export_hf


def export(options: argparse.Namespace) -> int:
    """Export a model; returns exit status 0."""
    said = export_run(
        options.layout,
        options.out,
        options.step,
        is_average=options.ema,
        dtype=options.dtype,
        is_adapter=options.adapter,
    )
    print(said)
    return 0


def export_run(
    layout: RunLayout,
    out: Path,
    step: int | None,
    *,
    is_average: bool = False,
    dtype: str | None = None,
    is_adapter: bool = False,
) -> str:
    """Write `out` from the checkpoint of `step`, or the newest sound one; return lines that describe it.

    is_average: export the moving average of its weights.  dtype: of the result; None: that of model.path, of adapters
    float32.  is_adapter: export the adapters alone, as a PEFT directory.
    A checkpoint is sound here if all its files exist and the exported ones have their checksums.
    Raises CheckpointError if there is none, none is sound, or `out` exists.
    """
    config, _ = read_resolved(layout)
    if out.exists():
        raise CheckpointError(f"{out} exists already; delete it, or name another directory")
    write = export_adapter if is_adapter else export_hf
    skipped: list[str] = []
    if step is not None and not layout.checkpoint(step).is_dir():
        known = ", ".join(str(each) for each, _ in KnownCheckpoints(layout.checkpoints).steps())
        raise CheckpointError(f"--step {step}: {layout.root} has no such checkpoint; legal: {known or 'none is there'}")
    for candidate in [step] if step is not None else _complete_ones(layout, skipped):
        place = layout.checkpoint(candidate)
        try:
            written = write(place / "trainer", config.model.path, out, is_average=is_average, dtype=dtype)
        except DamagedCheckpoint as error:
            if step is not None:
                raise
            skipped.append(f"{place.name} is skipped: {error}")
            continue
        kind = "adapters" if is_adapter else "weights"
        what = f"average of {kind}" if is_average else kind
        rounded = "" if written == "float32" else ", rounded from float32 (--dtype float32 rounds nothing)"
        said = f"{out}: {what} after step {candidate} of {config.run.name}, {written}{rounded}"
        told = [] if is_adapter else other_tokens(out, PromptTokenizer(out))
        return "\n".join([*skipped, said, *told])
    what = "no usable checkpoint" if skipped else "no complete checkpoint"
    raise CheckpointError("\n".join([f"{layout.checkpoints}: {what}", *skipped]))


def _complete_ones(layout: RunLayout, skipped: list[str]) -> Iterator[int]:
    """Yield steps with files of the right sizes, newest first; append a line on each other step to `skipped`."""
    for state in KnownCheckpoints(layout.checkpoints, read_up_to_bytes=0).newest_first():
        if state.fate is Fate.SOUND:
            yield state.step
        else:
            skipped.append(f"{state.path.name} is skipped: {state.problem}")
