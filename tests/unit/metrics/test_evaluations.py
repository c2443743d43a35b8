"""The figures of an evaluation, against counting everything out, and its samples on disk."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.metrics.evaluations import (
    EvaluatedSample,
    JudgedSample,
    SamplesFile,
    estimates,
    majority,
    mean,
    pass_at_k,
    read_samples,
    share,
)
from rlhpc.protocol.errors import DataError
from tests.full_disk import fill, small_disk

# ----------------------------------------------------------------------------------------- The figures of an evaluation

RIGHT, WRONG = JudgedSample(True, "4", 1.0), JudgedSample(False, "5", 0.0)
ANSWERS = st.sampled_from([("4", True), ("4.0", True), ("5", False), ("6", False), ("", False)])


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_sets_of_k_samples_with_a_correct_one(verdicts: list[bool], k: int) -> None:
    k = min(k, len(verdicts))
    sets = list(itertools.combinations(verdicts, k))
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(sum(map(any, sets)) / len(sets), abs=1e-12)


@given(st.lists(ANSWERS, max_size=7))
def test_a_majority_is_right_as_often_as_drawing_among_the_most_frequent_answers(
    given_: list[tuple[str, bool]],
) -> None:
    spelt = [("4" if right else answer) for answer, right in given_ if answer]
    most = max(Counter(spelt).values(), default=0)
    best = [answer for answer in ("4", "5", "6") if most and spelt.count(answer) == most]
    expected = best.count("4") / len(best) if best else 0.0
    assert majority([JudgedSample(right, answer, 0.0) for answer, right in given_]) == expected


def test_who_votes_and_what_could_not_be_judged_counts_nowhere() -> None:
    assert majority([JudgedSample(True, "", 1.0), WRONG]) == 0.5
    found = estimates([[RIGHT], [RIGHT, WRONG], []], 2)
    assert (found["pass@1"].value, found["pass@1"].num_prompts) == (0.75, 2)
    assert (found["pass@2"].value, found["pass@2"].num_prompts) == (1.0, 1)
    assert (found["maj@2"].value, found["maj@2"].num_prompts) == (0.5, 1)
    assert estimates([[], []], 2) == {}
    assert "maj@1" not in estimates([[RIGHT]], 1)
    assert "maj@2" not in estimates([[JudgedSample(True, "", 1.0), JudgedSample(False, "", 0.0)]], 2)


@pytest.mark.parametrize(("number", "expected"), [(10, 0.278), (100, 0.037)])
def test_where_all_prompts_are_alike_the_interval_is_wilsons(number: int, expected: float) -> None:
    for value, bounds in ((0.0, (0.0, expected)), (1.0, (1 - expected, 1.0))):
        found = share(np.full(number, value))
        assert (found.value, found.num_prompts) == (value, number)
        assert (found.low, found.high) == pytest.approx(bounds, abs=5e-4)


@pytest.mark.parametrize("number", [3, 7, 10, 20, 100])
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.5, 0.7, 0.9])
def test_prompts_that_are_alike_to_a_fraction_leave_as_much_doubt_as_so_many_trials(number: int, value: float) -> None:
    """Their mean is rounded, and a variance that is nothing but rounding is no measurement."""
    found = share(np.full(number, value))
    assert found.high - found.low > math.sqrt(value * (1 - value) / number)


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("spread", ["alike", "easy and hard prompts"])
def test_an_interval_holds_the_truth_as_often_as_it_says(chance: float, num_samples: int, spread: str) -> None:
    rng, num_prompts, num_draws = np.random.default_rng(7), 80, 2000
    chances = np.full((num_draws, num_prompts), chance)
    if spread != "alike":
        chances = rng.beta(chance / 2, (1 - chance) / 2, (num_draws, num_prompts))  # mean: chance
    values = rng.binomial(num_samples, chances) / num_samples
    found = [share(row) for row in values]
    assert 0.925 < np.mean([each.low <= chance <= each.high for each in found]) < 0.995


def test_intervals_count_prompts_and_not_samples() -> None:
    ones_and_zeros = np.repeat([0.0, 1.0], 20)  # forty prompts; 100 samples of each would not tell more
    width = share(ones_and_zeros)
    assert width.high - width.low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 40), rel=0.06)
    found = mean(np.array([-1.0, 0.0, 4.0]))
    half = 1.959964 * np.std([-1, 0, 4], ddof=1) / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1 - half, 1 + half))
    found = estimates([[RIGHT, WRONG] * 3, [WRONG] * 6], 6)
    assert list(found) == ["pass@1", "pass@2", "pass@4", "pass@6", "maj@6", "reward"]
    assert [each.value for each in found.values()] == pytest.approx([0.25, 0.4, 0.5, 0.5, 0.25, 0.25])


# ------------------------------------ Samples on disk: what a killed process leaves, and what the next one makes of it


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
