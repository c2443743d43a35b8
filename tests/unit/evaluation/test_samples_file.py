"""Samples on disk: what a killed process leaves, and what the next one makes of it."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.metrics.evaluations import EvaluatedSample, SamplesFile, read_samples
from rlhpc.protocol.errors import DataError
from tests.full_disk import fill, small_disk


def sample(prompt: int, number: int) -> EvaluatedSample:
    return EvaluatedSample(
        prompt, number, "test.jsonl:1", "4 \n é", 3, "stop", "correct", 1.0, "4", "ok", {"right": 1.0}
    )


def write(directory: Path, index: int, *samples: EvaluatedSample) -> Path:
    with SamplesFile(directory, index) as file:
        for each in samples:
            file.append(each)
    return directory / f"samples-{index}.jsonl"


def test_samples_come_back_as_they_were_whatever_process_wrote_them(tmp_path: Path) -> None:
    written = [sample(0, 0), sample(0, 1), sample(3, 0)]
    write(tmp_path, 1, *written[2:])
    write(tmp_path, 0, *written[:2])
    assert list(read_samples(tmp_path)) == written


def test_every_sample_is_with_the_kernel_before_the_next_one(tmp_path: Path) -> None:
    with SamplesFile(tmp_path, 0) as file:
        file.append(sample(0, 0))
        assert list(read_samples(tmp_path)) == [sample(0, 0)]


def test_half_a_line_counts_for_nothing_and_is_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path, 0, sample(0, 0), sample(0, 1))
    whole = path.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert list(read_samples(tmp_path)) == [sample(0, 0)]
    write(tmp_path, 0, sample(0, 1))
    assert path.read_bytes() == whole


@pytest.mark.starts
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 1 << 20):
        write(disk, 0, sample(0, 0))
        fill(disk / "filler", 0)
        many = [sample(0, number) for number in range(1, 200)]  # the rest of a block is there already
        with pytest.raises(OSError, match=r"No space left on device: .*samples-0\.jsonl"):
            write(disk, 0, *many)
        assert sample(0, 0) in read_samples(disk)


@pytest.mark.parametrize("damage", [b"\0" * 20, b"{}", b'{"prompt": 1'])
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    path = write(tmp_path, 0, sample(0, 0))
    with path.open("ab") as file:
        file.write(damage + b"\n")
    with pytest.raises(DataError, match=r"samples-0.jsonl:2: not a sample"):
        list(read_samples(tmp_path))


def test_a_long_file_is_continued_without_being_held(tmp_path: Path) -> None:
    long = replace(sample(0, 0), completion="4 " * 50_000)
    path = write(tmp_path, 0, *(replace(long, sample=number) for number in range(50)))
    before = path.stat().st_size
    tracemalloc.start()
    try:
        write(tmp_path, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == before
    assert peak < before / 10
