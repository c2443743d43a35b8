import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util import tensor_util

from rlhpc.metrics.tensorboard import CHARTS, Recorder, Sample, sample_markdown


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


def test_a_completion_cannot_break_out_of_its_block():
    shown = sample_markdown(Sample("q", "```\n# heading\n<script>\r\n\n- item", 0.0, "18"))
    completion = shown.partition("completion\n\n")[2]
    assert all(line.startswith("    ") for line in completion.splitlines())


def test_a_very_long_completion_is_cut_and_says_so():
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
