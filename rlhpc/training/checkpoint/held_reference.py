"""The reference model of a run that renews it: a separate HF checkpoint next to the trainer's part of a checkpoint.

Input: a backend that holds a reference.  Output: a directory with its weights in the dtype of the forward pass, and
config.json.  After a resume, such a backend is opened on that directory instead of model.path, and keeps the loaded
weights as its reference: the bits are the same, whatever layout wrote them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from rlhpc.contracts import TrainerBackend
from rlhpc.errors import CheckpointError
from rlhpc.training.checkpoint.export import write_hf_weights

REFERENCE_DIRECTORY = "reference"  # beside the trainer's part of a checkpoint directory
CONFIG_FILE = "config.json"


def save_reference(backend: TrainerBackend, model_dir: Path, directory: Path) -> Future[dict[str, int]]:
    """Write the reference into `directory`; model_dir: where the model's config.json is.  A collective; training waits
    for the disk.

    The future is done: {file name: bytes} on rank 0 and {} elsewhere, or rank 0's CheckpointError.
    """
    done: Future[dict[str, int]] = Future()
    weights = backend.weights(of_reference=True)
    try:
        files = _write(backend, (tensor for _, tensor in weights), model_dir, directory) if backend.is_rank_zero else {}
    except CheckpointError as error:
        done.set_exception(error)
    else:
        done.set_result(files)
    for _ in weights:  # after an error the other ranks still send, and the end puts the policy back
        pass
    return done


def _write(backend: TrainerBackend, tensors: Iterator[Tensor], model_dir: Path, directory: Path) -> dict[str, int]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_hf_weights(directory, backend.tensor_specs(), tensors)
        shutil.copyfile(model_dir / CONFIG_FILE, directory / CONFIG_FILE)
    except OSError as error:
        raise CheckpointError(f"{directory}: the reference cannot be written: {error}") from error
    return {f"{directory.name}/{path.name}": path.stat().st_size for path in sorted(directory.iterdir())}
