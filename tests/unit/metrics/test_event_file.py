import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from rlhpc.metrics.curves import read_curves
from rlhpc.metrics.tensorboard import RunEventWriter, TensorBoardWriter
from rlhpc.protocol.errors import RunDirectoryError


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
