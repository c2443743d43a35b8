"""Requests: seeds, stop tokens, the version of each token, and the rollout that comes of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhpc.generation.requests import (
    FinishedRequest,
    VersionRecord,
    end_of_sequence_ids,
    rollout_of,
    sample_seed,
)
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Prefix, RolloutRequest
from tests import build

# --------------------------------------------------------------------------------------------------- versions of tokens


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(4, 2), (5, 4)], [3, 3, 4, 4, 5, 5]),
        ([(4, 2)], [3, 3]),  # after the last token
        ([(4, 1), (5, 1)], [3, 5, 5]),  # both between two tokens: the later one counts
        ([(4, 0)], [4, 4]),  # the request had not begun
    ],
)
def test_tokens_from_the_change_on_are_the_new_weights(changes: list[tuple[int, int]], expected: list[int]) -> None:
    record = VersionRecord(3)
    for version, num_before in changes:
        record.weights_changed(version, num_before)
    assert record.versions(len(expected)).tolist() == expected


# ----------------------------------------------------------------------------------------------------- finished request


def request(prefix: Prefix | None = None) -> RolloutRequest:
    return build.request(9, 1, prefix=prefix)


def sampled(reason: str, num_tokens: int = 2) -> FinishedRequest:
    return FinishedRequest(
        np.arange(num_tokens, dtype=np.int32), np.full(2, -0.5, np.float32), np.full(2, 4, np.int32), reason
    )


def test_a_prefix_comes_first_with_its_own_versions() -> None:
    prefix = build.prefix(1, version=3, first_token=30)
    rollout = rollout_of(request(prefix), sampled("stop"))
    assert rollout.token_ids.tolist() == [30, 0, 1]
    assert rollout.behaviour_logprobs.tolist() == [-1.0, -0.5, -0.5]
    assert rollout.versions.tolist() == [3, 4, 4]
    assert rollout.loss_mask.tolist() == [True, True, True]
    assert rollout.finish_reason is FinishReason.STOP
    assert (rollout.group_id, rollout.sample_index) == (9, 1)
    assert [a.dtype for a in (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions)] == ["i4", "f4", "i4"]


def test_an_abort_before_the_first_token_is_empty() -> None:
    rollout = rollout_of(request(), FinishedRequest.nothing("abort"))
    assert rollout.finish_reason is FinishReason.ABORT
    assert len(rollout.token_ids) == len(rollout.loss_mask) == 0


@pytest.mark.parametrize(
    ("finished", "says"),
    [
        (sampled("repetition"), "'repetition'"),
        (sampled("stop", num_tokens=3), "3 tokens, 2 log-probabilities"),
    ],
)
def test_what_an_engine_cannot_have_sampled_is_an_engine_error(finished: FinishedRequest, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        rollout_of(request(), finished)


@pytest.mark.parametrize("absurd", [np.nan, -np.inf])
def test_a_log_probability_that_is_not_finite_is_an_engine_error(absurd: float) -> None:
    finished = sampled("stop")
    finished.logprobs[1] = absurd
    with pytest.raises(EngineError, match=rf"9:1: .* sampled token 1 is {absurd}.* version 4"):
        rollout_of(request(), finished)


# ---------------------------------------------------------------------------------------------------------- sample seed
#
# Seeds of samples: the same for the same sample of a run, another for every other.


def request_of(group_id: int, sample_index: int, num_done: int) -> RolloutRequest:
    return build.request(group_id, sample_index, prefix=build.prefix(num_done) if num_done else None)


def test_a_seed_belongs_to_run_group_sample_and_prefix() -> None:
    where = [(r, g, s, d) for r in (0, 1) for g in range(20) for s in range(8) for d in (0, 1, 50)]
    seeds = [sample_seed(run_seed, request_of(*rest)) for run_seed, *rest in where]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [sample_seed(run_seed, request_of(*rest)) for run_seed, *rest in where]
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------------------------------------------------- stop tokens


def test_all_end_of_sequence_tokens_that_the_checkpoint_names_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert end_of_sequence_ids(tmp_path) == {2, 7}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_of_sequence_ids(tmp_path) == frozenset()
