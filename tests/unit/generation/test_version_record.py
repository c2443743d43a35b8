from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rlhpc.generation.vllm_requests import VersionRecord, versions_of_spans


@dataclass
class Span:
    version: str
    start: int
    end: int


def versions(record: VersionRecord, num_tokens: int) -> list[int]:
    found = record.versions(num_tokens)
    assert found is not None
    return found.tolist()


def test_tokens_from_the_change_on_are_the_new_weights() -> None:
    record = VersionRecord(3)
    record.weights_changed(4, 2)
    record.weights_changed(5, 4)
    assert versions(record, 6) == [3, 3, 4, 4, 5, 5]


def test_a_change_after_the_last_token_leaves_no_trace() -> None:
    record = VersionRecord(3)
    record.weights_changed(4, 2)
    assert versions(record, 2) == [3, 3]


def test_two_changes_between_two_tokens_leave_the_later_one() -> None:
    record = VersionRecord(3)
    record.weights_changed(4, 1)
    record.weights_changed(5, 1)
    assert versions(record, 3) == [3, 5, 5]


def test_a_request_that_had_not_begun_is_all_new() -> None:
    record = VersionRecord(3)
    record.weights_changed(4, 0)
    assert versions(record, 2) == [4, 4]


def test_a_request_the_worker_does_not_know_cannot_be_told() -> None:
    record = VersionRecord(3)
    record.weights_changed(4, None)
    assert record.versions(2) is None


@pytest.mark.parametrize(
    ("told", "agrees"),
    [
        ([3, 3, 4, 4, 5, 5], True),  # exactly
        ([3, 3, 3, 4, 4, 5], True),  # each change a token late
        ([3, 3, 3, 3, 3, 5], True),  # so late that one was never named
        ([3, 3, 3, 3, 3, 3], True),
        ([3, 4, 4, 4, 5, 5], False),  # a token early
        ([4, 4, 4, 4, 5, 5], False),
        ([3, 3, 5, 5, 4, 4], False),  # in another order
        ([3, 3, 4, 4, 6, 6], False),  # a version nobody has loaded
        ([2, 3, 4, 4, 5, 5], False),
    ],
)
def test_spans_may_tell_of_a_change_late_but_neither_early_nor_of_another(told: list[int], agrees: bool) -> None:
    record = VersionRecord(3)
    record.weights_changed(4, 2)
    record.weights_changed(5, 4)
    assert record.agrees_with(np.array(told, np.int32)) == agrees


def test_a_late_name_for_weights_that_were_there_from_the_start_is_no_contradiction() -> None:
    record = VersionRecord(3)
    record.weights_changed(4, 0)
    assert record.agrees_with(np.array([3, 3, 4], np.int32))
    assert versions(record, 3) == [4, 4, 4]


def test_spans_become_one_version_per_token() -> None:
    assert versions_of_spans([Span("3", 0, 2), Span("4", 2, 3)], 3).tolist() == [3, 3, 4]
    assert versions_of_spans([], 0).tolist() == []


@pytest.mark.parametrize("spans", [[], [Span("3", 0, 2)], [Span("3", 1, 3)], [Span("3", 0, 1), Span("4", 2, 3)]])
def test_spans_with_a_gap_are_refused(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match="weight spans"):
        versions_of_spans(spans, 3)
