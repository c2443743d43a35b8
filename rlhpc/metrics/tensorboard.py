"""Append events to one TensorBoard event file, from a thread, without ever stopping the run.

Input: serialised tensorboard Event messages.  Output: events.out.tfevents.*.  A slow file system does not block the
caller; a full one loses the current events and logs one warning; later events are written once there is space.  The
file is valid at every moment: a record that did not fit is cut off again, since readers would stop at it.  Events are
synced, because NFS and Lustre may take bytes that their quota refuses later, and leave zeros in their place.

Why not tensorboard's EventFileWriter: its thread ends at the first error, which it then raises from every later call,
and the half-written record stays.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from rlhpc.base.files import numbered_files
from rlhpc.metrics.names import HISTOGRAMS, Metric, find_metric
from rlhpc.protocol.errors import RunDirectoryError

# --------------------------------------------------------------------------------------------------------------- layout
#
# The custom scalars dashboard: the most important curves, several per chart.
#
# Input: metric names.  Output: TensorBoard's Layout message.


# category → chart title → metrics
CHARTS: Mapping[str, Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "Reward": {
            "Reward": ("reward/mean", "reward/correct_share"),
            "Zero-variance groups, verifier errors": ("reward/zero_variance_share", "reward/verifier_error_share"),
            "Completion length": ("length/completion_mean", "length/completion_max"),
            "Truncated": ("length/truncated_share",),
            "Prompts": ("prompt/known_share", "prompt/solved_share", "prompt/hopeless_share", "prompt/pass_rate_mean"),
        },
        "Staleness": {
            "Versions behind": ("staleness/mean", "staleness/max", "staleness/bound", "staleness/token_mean"),
            "Rollouts that span an update": ("rollout/spanning_update_share",),
        },
        "Idle": {
            "Idle ratios": ("trainer/idle_ratio", "generator/idle_ratio"),
            "Waits": ("time/wait_for_batch_s", "time/wait_for_groups_s", "time/wait_for_weights_s"),
            "Groups": ("queue/slots_free", "queue/in_flight", "queue/finished", "queue/taken"),
        },
        "Policy": {
            "Loss": ("trainer/loss",),
            "Entropy": ("trainer/entropy",),
            "Gradient norm": ("trainer/grad_norm",),
            "Clipped": ("policy/clip_low_share", "policy/clip_high_share", "policy/importance_capped_share"),
            "KL": ("policy/kl_k1", "policy/kl_k3", "policy/mismatch_kl"),
            "KL from the reference": ("policy/kl_reference",),
            "KL and the teacher": ("teacher/kl", "policy/forward_kl"),
            "Importance weights": ("policy/importance_weight_mean", "policy/ess"),
            "Masked": ("policy/importance_masked_share",),
        },
        "Age of tokens": {
            title: tuple(f"{name}/{age}" for age in range(5))
            for title, name in (
                ("Effective sample size", "age_ess"),
                ("KL from the sampler", "age_mismatch_kl"),
                ("Clipped", "age_clipped_share"),
                ("Share of the batch", "age_tokens_share"),
            )
        },
        "Throughput": {
            "Tokens per second": ("trainer/tokens_per_s", "generator/tokens_per_s"),
            "Step": ("time/step_s", "trainer/step_s"),
            "Weight update": ("weights/publish_s", "weights/receive_s", "weights/pause_s"),
            "Packing": ("packing/fill", "packing/lockstep_slowdown"),
            "Event loop lag": ("event_loop/lag_s",),
        },
    }
)


def dashboard() -> Layout:
    """Build the layout.  Tags are anchored: TensorBoard takes them for regular expressions."""
    return Layout(
        category=[
            Category(
                title=category,
                chart=[
                    Chart(title=title, multiline=MultilineChartContent(tag=[f"^{re.escape(name)}$" for name in names]))
                    for title, names in charts.items()
                ],
            )
            for category, charts in CHARTS.items()
        ]
    )


# ----------------------------------------------------------------------------------------------------------- event file

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
_MAX_QUEUED = 10_000  # events; a few hundred steps, for a file system that hangs
_Item = bytes | threading.Event | None  # a serialised event, a flush to be answered, or the end


class RunEventWriter:
    """Writer of an attempt's event file; a later attempt makes a later file in the same directory."""

    def __init__(self, directory: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Create directory and file.  Raises RunDirectoryError if that fails."""
        self._wall_clock = wall_clock
        try:
            directory.mkdir(parents=True, exist_ok=True)
            now = _later_than_all(directory, int(wall_clock()))
            self.path = directory / f"events.out.tfevents.{now:010d}.{socket.gethostname()}.{os.getpid()}"
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            raise RunDirectoryError(f"cannot create an event file in {directory}: {error}") from error
        self._queue: queue.Queue[_Item] = queue.Queue(_MAX_QUEUED)
        self._is_closed = False
        self.is_failing = False  # the last write failed; written by the thread only
        self.num_lost = 0  # events that could not be written so far
        self._thread = threading.Thread(target=self._write_until_closed, name="event-file", daemon=True)
        self._thread.start()
        source = SourceMetadata(writer="rlhpc")
        self.append(Event(file_version="brain.Event:2", source_metadata=source))

    def append(self, event: Event) -> None:
        """Stamp and queue an event; returns at once.  No effect after close()."""
        event.wall_time = self._wall_clock()
        if self._is_closed:
            return
        try:
            self._queue.put_nowait(event.SerializeToString())
        except queue.Full:
            self.num_lost += 1

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until what was queued is written or lost; False if that took longer than `timeout_s`."""
        if self._is_closed:
            return True
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and close; give up after `timeout_s`, since a file system may hang.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write_until_closed(self) -> None:
        while True:
            first = self._queue.get()
            items = [first, *self._take_the_rest()]
            self._write([item for item in items if isinstance(item, bytes)])
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                self._file.close()
                return

    def _take_the_rest(self) -> list[_Item]:
        items: list[_Item] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items

    def _write(self, events: list[bytes]) -> None:
        """Write whole records or none."""
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(event)
        end = self._file.tell()
        try:
            _write_all(self._file, records.getbuffer())
            os.fdatasync(self._file.fileno())
        except OSError as error:
            self.num_lost += len(events)
            self._cut_off(end)
            if not self.is_failing:
                _logger.warning("metrics: cannot write %s (%s); the run goes on, metrics are lost", self.path, error)
            self.is_failing = True
        else:
            self.is_failing = False

    def _cut_off(self, end: int) -> None:
        try:
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            # Readers will stop at the torn record; nothing better can be done.
            _logger.warning("metrics: cannot cut %s back to %d bytes: %s", self.path, end, error)


def _write_all(file: io.FileIO, data: memoryview) -> None:
    """A raw write may take only a part, just before the disk is full."""
    while data:
        data = data[file.write(data) or 0 :]


def _later_than_all(directory: Path, now: int) -> int:
    """Now, or a second after the newest file's time, if the clock was set back, or another node's is ahead.

    Readers take files in the order of their names, and TensorBoard ignores one that sorts before what it has read.
    """
    files = numbered_files(directory, _NAME)
    return max(now, files[-1][0] + 1 if files else 0)


# --------------------------------------------------------------------------------------------------- tensorboard writer
#
# Write scalars, histograms, texts and a dashboard layout that TensorBoard shows.
#
# Input: plain numbers and text.  Output: events.  Uses tensorboard's own message builders, which need numpy only:
# neither TensorFlow nor torch is imported.  Nothing here stops a run.
#
# A resumed run repeats the steps since its last checkpoint in a new file.  TensorBoard's data server lets a later
# point replace the earlier ones from its step on; its other loader does where a SessionLog says that a run starts
# again, which `undo_from` writes.


class TensorBoardWriter(RunEventWriter):
    """Writes one run's event file of this attempt."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of many curves as one event, as float32.  Not-finite values are written as they are.

        In the older form of a scalar, a plain number: other readers of event files know this one, too.
        """
        with np.errstate(over="ignore"):  # beyond float32 numpy warns of overflow; inf is what TensorBoard shows then
            points = [Summary.Value(tag=name, simple_value=np.float32(value)) for name, value in values.items()]
        self._append(step, Summary(value=points))

    def histogram(self, name: str, step: int, values: ArrayLike, num_buckets: int = 30) -> None:
        """Write the distribution of the finite `values`, if there are any."""
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
        """Have readers ignore points of earlier files of this directory from this step on; to be written first.

        Written twice, since the loader takes the first start that it sees in a directory for that of a new run.
        """
        for _ in range(2):
            self.append(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def resumed(self, step: int, attempt: int) -> None:
        """Record that this attempt begins at `step`, as an explanation of jumps in the curves."""
        self.text("run/resume", step, f"Attempt {attempt} goes on from step {step}.")

    def _append(self, step: int, summary: Summary) -> None:
        self.append(Event(step=step, summary=summary))


# ------------------------------------------------------------------------------------------------------------- recorder
#
# Write a step's metrics under their stable names, over optimiser steps.
#
# Input: named numbers and sampled texts.  Output: events.  An unknown name is a bug and is refused.

_LONGEST_TEXT = 4_000  # characters of a sample that are shown


class Sample(NamedTuple):
    """One completion to show; a plain tuple of the same four fields works as well."""

    prompt: str
    completion: str
    reward: float
    reference: str


class Recorder(TensorBoardWriter):
    """Checks metric names, and writes the dashboard and texts of a run."""

    def __init__(
        self,
        directory: Path,
        *,
        seam: int | None = None,
        find: Callable[[str], Metric] = find_metric,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create event files and write the dashboard's layout.

        seam: the step at which a later attempt continues; points from this step on are undone.
        `find` returns a metric's row or raises KeyError.  Raises RunDirectoryError if a file cannot be created.
        """
        super().__init__(directory, wall_clock)
        self._find = find
        if seam is not None:
            self.undo_from(seam)
        self.layout(dashboard())

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the metrics of one optimiser step.

        Raises KeyError naming a metric that is not in the table; nothing is written then.
        """
        for name in scalars:
            self._find(name)
        self.scalars(step, scalars)

    def histogram(self, name: str, step: int, values: ArrayLike, num_buckets: int = 30) -> None:
        """Write a distribution.  Raises KeyError if the name is not among names.HISTOGRAMS."""
        if name not in HISTOGRAMS:
            raise KeyError(f"histogram {name!r} is not in rlhpc/metrics/names.py")
        super().histogram(name, step, values, num_buckets)

    def samples(self, step: int, samples: Sequence[tuple[str, str, float, str]]) -> None:
        """Write completions as text, one tag for each place in the list."""
        for index, sample in enumerate(samples):
            self.text(f"samples/{index}", step, sample_markdown(Sample(*sample)))

    def guard(self, step: int, text: str) -> None:
        """Write the guard's action at a step, as text."""
        self.text("guard/event", step, _verbatim(text))

    def config(self, text: str) -> None:
        """Write the resolved configuration as text."""
        self.text("run/config", 0, _verbatim(text))


def sample_markdown(sample: Sample) -> str:
    """Format a sample so that nothing in it is read as Markdown."""
    blocks = [f"**reward {sample.reward:g}**"]
    for title in ("reference", "prompt", "completion"):
        blocks += [title, _verbatim(getattr(sample, title))]
    return "\n\n".join(blocks)


def _verbatim(text: str) -> str:
    """An indented block: unlike a fence, no text can end it."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}… ({len(text)} characters)"
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
