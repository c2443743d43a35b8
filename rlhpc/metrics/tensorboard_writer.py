"""Write scalars, histograms, texts and a dashboard layout that TensorBoard shows.

Input: plain numbers and text.  Output: events.  Uses tensorboard's own message builders, which need numpy only: neither
TensorFlow nor torch is imported.  Nothing here stops a run; see event_file.py.

A resumed run repeats the steps since its last checkpoint in a new file.  TensorBoard's data server lets a later point
replace the earlier ones from its step on; its other loader does where a SessionLog says that a run starts again, which
`undo_from` writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from rlhpc.metrics.event_file import EventFile


class TensorBoardWriter:
    """Writes one run's event file of this attempt."""

    def __init__(self, directory: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Create directory and file.  Raises RunDirectoryError if that fails."""
        self._file = EventFile(directory, wall_clock)

    @property
    def path(self) -> Path:
        """The event file."""
        return self._file.path

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of many curves as one event, as float32.  Not-finite values are written as they are.

        In the older form of a scalar, a plain number: other readers of event files know this one, too.
        """
        with np.errstate(over="ignore"):  # beyond float32 numpy warns of overflow; inf is what TensorBoard shows then
            points = [Summary.Value(tag=name, simple_value=np.float32(value)) for name, value in values.items()]
        self._append(step, Summary(value=points))

    def histogram(self, name: str, step: int, values: ArrayLike, num_buckets: int = 30) -> None:
        """Write the distribution of the finite ones among `values`; nothing where there is none."""
        numbers = np.asarray(values, dtype=np.float64).ravel()
        numbers = numbers[np.isfinite(numbers)]
        if numbers.size:
            self._append(step, histogram_pb(name, numbers, buckets=num_buckets))

    def text(self, name: str, step: int, markdown: str) -> None:
        """Write a text; TensorBoard renders it as Markdown."""
        self._append(step, text_pb(name, markdown))

    def layout(self, layout: Layout) -> None:
        """Write the layout of the custom scalars dashboard.

        By hand, because tensorboard's own builder imports TensorFlow.
        """
        metadata = custom_scalar.create_summary_metadata()
        metadata.data_class = DATA_CLASS_TENSOR
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto())
        tensor.string_val.append(layout.SerializeToString())
        summary = Summary()
        summary.value.add(tag=custom_scalar.CONFIG_SUMMARY_TAG, metadata=metadata, tensor=tensor)
        self._append(0, summary)

    def undo_from(self, step: int) -> None:
        """Have the points of earlier files of this directory disregarded from this step on; before anything else.

        Twice, since the loader takes the first start that it sees in a directory for that of a new run.
        """
        for _ in range(2):
            self._file.append(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def mark_resume(self, step: int, attempt: int) -> None:
        """Record that this attempt begins at `step`, as an explanation of jumps in the curves."""
        self.text("run/resume", step, f"Attempt {attempt} goes on from step {step}.")

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything is written or lost; False if that took longer."""
        return self._file.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and close.  Idempotent."""
        self._file.close(timeout_s)

    def _append(self, step: int, summary: Summary) -> None:
        self._file.append(Event(step=step, summary=summary))
