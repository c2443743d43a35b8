"""What TensorBoard shows of a run, in files that it reads."""

import errno
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util import tensor_util

from rlhpc.metrics.curves import read_curves
from rlhpc.metrics.tensorboard import CHARTS, Recorder, RunEventWriter, Sample, TensorBoardWriter, sample_markdown
from rlhpc.protocol.errors import RunDirectoryError

# ------------------------------------------------------------------------------------------------------------ recorder


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path, wall_clock=lambda: 1000.0)
    yield recorder
    recorder.close()


def read(tmp_path) -> EventAccumulator:
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    return accumulator


def points(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def text(accumulator: EventAccumulator, tag: str) -> str:
    return accumulator.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def test_a_run_has_one_directory_of_events(recorder, tmp_path):
    recorder.step(3, {"reward/mean": 0.5})
    recorder.close()
    assert [path.is_file() for path in tmp_path.iterdir()] == [True]  # TensorBoard shows a run for each directory
    assert points(read(tmp_path), "reward/mean") == [(3, 0.5)]


def test_an_unknown_name_is_refused_and_nothing_of_its_step_is_written(recorder, tmp_path):
    with pytest.raises(KeyError, match="reward/meen"):
        recorder.step(3, {"reward/mean": 0.5, "reward/meen": 0.5})
    with pytest.raises(KeyError, match="reward/mean"):
        recorder.histogram("reward/mean", 0, [1.0])
    recorder.close()
    assert "reward/mean" not in read(tmp_path).Tags()["scalars"]


def test_numbers_that_are_not_finite_are_written_as_they_are(recorder, tmp_path):
    recorder.step(0, {"trainer/grad_norm": float("nan"), "trainer/loss": float("inf"), "wall_s": 1e300})
    recorder.close()
    written = read(tmp_path)
    assert np.isnan(points(written, "trainer/grad_norm")[0][1])
    assert points(written, "trainer/loss")[0][1] == float("inf")
    assert points(written, "wall_s")[0][1] == float("inf")


def test_a_histogram_leaves_out_what_is_not_finite(recorder, tmp_path):
    recorder.histogram("reward/histogram", 2, [0.0, 1.0, 1.0, float("nan"), float("inf")])
    recorder.histogram("reward/histogram", 3, [])
    recorder.close()
    (written,) = read(tmp_path).Tensors("reward/histogram")
    buckets = tensor_util.make_ndarray(written.tensor_proto)
    assert written.step == 2
    assert buckets[:, 2].sum() == 3
    assert buckets[0, 2] == 1


def test_samples_config_and_the_seam_of_a_resume_are_text(recorder, tmp_path):
    recorder.config('name = "a"')
    recorder.resumed(120, 1)
    recorder.samples(10, [Sample("1+1", "2", 1.0, "2"), ("2+2", "5", 0.0, "4")])
    recorder.close()
    written = read(tmp_path)
    assert 'name = "a"' in text(written, "run/config")
    assert "step 120" in text(written, "run/resume")
    assert "reward 1" in text(written, "samples/0")
    assert "    5" in text(written, "samples/1")


def test_a_completion_cannot_break_out_of_its_block_and_a_very_long_one_is_cut():
    shown = sample_markdown(Sample("q", "```\n# heading\n<script>\r\n\n- item", 0.0, "18"))
    completion = shown.partition("completion\n\n")[2]
    assert all(line.startswith("    ") for line in completion.splitlines())
    shown = sample_markdown(Sample("q", "x" * 100_000, 0.0, "18"))
    assert len(shown) < 5_000
    assert "(100000 characters)" in shown


def test_the_dashboard_is_in_every_run(recorder, tmp_path):
    recorder.close()
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(CHARTS)


def attempt(directory, steps, seam=None) -> None:
    """The value says which attempt wrote it."""
    recorder = Recorder(directory, seam=seam, wall_clock=lambda: 1000.0)
    for step in steps:
        recorder.step(step, {"reward/mean": float(seam is not None)})
    recorder.close()


def test_two_attempts_write_two_files_of_one_run(tmp_path):
    attempt(tmp_path, [0])
    attempt(tmp_path, [1], 1)
    assert len(list(tmp_path.glob("events.*"))) == 2
    assert points(read(tmp_path), "reward/mean") == [(0, 0.0), (1, 1.0)]


def test_steps_that_a_resume_undoes_are_shown_once(tmp_path):
    attempt(tmp_path, range(8))
    attempt(tmp_path, range(4, 6), 4)
    kept = [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0)]
    assert points(read(tmp_path), "reward/mean") == kept


def test_a_run_that_begins_once_more_shows_nothing_of_what_was_before(tmp_path):
    attempt(tmp_path, range(3))
    attempt(tmp_path, range(2), 0)
    assert points(read(tmp_path), "reward/mean") == [(0, 1.0), (1, 1.0)]
    assert read(tmp_path).Tensors("custom_scalars__config__")


@pytest.mark.starts
def test_writing_metrics_imports_neither_tensorflow_nor_torch():
    code = (
        "import sys, tempfile; from pathlib import Path\n"
        "from rlhpc.metrics.tensorboard import Recorder\n"
        "recorder = Recorder(Path(tempfile.mkdtemp()))\n"
        "recorder.step(0, {'reward/mean': 1.0}); recorder.histogram('reward/histogram', 0, [1.0])\n"
        "recorder.close(); assert not {'tensorflow', 'torch', 'zmq'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---------------------------------------------------------------------------------------------------------- event file


def event(step: int) -> Event:
    return Event(step=step, summary=Summary(value=[Summary.Value(tag="x", simple_value=1.0)]))


def steps_in(path: Path) -> list[int]:
    events = [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]
    return [event.step for event in events if event.HasField("summary")]


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Files of this process may not grow beyond num_bytes: write() fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_events_are_read_back_in_order(tmp_path):
    file = RunEventWriter(tmp_path / "a" / "b", lambda: 1000.0)
    for step in range(100):
        file.append(event(step))
    assert file.flush()
    assert steps_in(file.path) == list(range(100))
    file.close()


def test_close_writes_what_is_queued_and_later_calls_do_nothing(tmp_path):
    file = RunEventWriter(tmp_path, lambda: 1000.0)
    file.append(event(1))
    file.close()
    file.append(event(2))
    assert file.flush()
    file.close()
    assert steps_in(file.path) == [1]


def test_two_files_that_begin_in_the_same_second_do_not_overwrite_each_other(tmp_path):
    files = [RunEventWriter(tmp_path, lambda: 1000.0) for _ in range(3)]
    assert len({file.path for file in files}) == 3
    for file in files:
        file.close()


def test_an_attempt_whose_clock_is_behind_that_of_the_one_before_undoes_its_points_and_not_the_other_way_round(
    tmp_path,
):
    """The clock was set back, or the controller is on another node now: files are read in the order of their names."""
    for clock, value in ((5000.0, 1.0), (4000.0, 2.0), (4000.0, 3.0)):
        writer = TensorBoardWriter(tmp_path, lambda clock=clock: clock)
        writer.undo_from(2)
        for step in range(2 if value > 1 else 0, 4):
            writer.scalars(step, {"x": value})
        writer.close()
    assert read_curves(tmp_path)["x"].values.tolist() == [1.0, 1.0, 3.0, 3.0]
    loader = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in loader.Scalars("x")] == [(0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0)]


def test_a_quota_that_refuses_only_when_bytes_go_to_the_server_costs_the_events_of_that_moment(tmp_path, monkeypatch):
    """As on NFS, where zeros remain of what was taken and refused later; every reader would stop there."""
    file, real = RunEventWriter(tmp_path, lambda: 1000.0), os.fdatasync
    file.append(event(0))
    assert file.flush()
    whole = file.path.stat().st_size

    def over_quota(descriptor: int) -> None:
        os.pwrite(descriptor, bytes(file.path.stat().st_size - whole), whole)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fdatasync", over_quota)
    file.append(event(1))
    assert file.flush()
    assert (file.is_failing, file.num_lost) == (True, 1)
    monkeypatch.setattr(os, "fdatasync", real)
    file.append(event(2))
    file.close()
    assert steps_in(file.path) == [0, 2]


def test_a_directory_that_cannot_be_made_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot create an event file"):
        RunEventWriter(tmp_path / "file" / "tensorboard", lambda: 1000.0)


def test_a_full_disk_costs_the_events_of_that_moment_and_one_warning(tmp_path, caplog):
    file = RunEventWriter(tmp_path, lambda: 1000.0)
    file.append(event(0))
    assert file.flush()
    # Room for a part of the next record, which must not stay in the file.
    with caplog.at_level(logging.WARNING), full_disk(file.path.stat().st_size + 10):
        for step in (1, 2, 3):
            file.append(event(step))
            assert file.flush()
        assert file.is_failing
    assert len(caplog.records) == 1
    assert "the run goes on" in caplog.text
    file.append(event(4))
    assert file.flush()
    assert not file.is_failing
    assert file.num_lost == 3
    assert steps_in(file.path) == [0, 4]
    file.close()
