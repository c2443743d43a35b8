from __future__ import annotations

import numpy as np
import pytest

from rlhpc.generation.vllm_requests import FinishedRequest, rollout_of
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Prefix, Prompt, RolloutRequest, SamplingParams


def request(prefix: Prefix | None = None) -> RolloutRequest:
    prompt = Prompt(3, "math", np.asarray([5, 6], np.int32), "11")
    return RolloutRequest(9, 1, prompt, SamplingParams(max_tokens=8), prefix)


def sampled(reason: str, num_tokens: int = 2) -> FinishedRequest:
    return FinishedRequest(
        np.arange(num_tokens, dtype=np.int32), np.full(2, -1.0, np.float32), np.full(2, 4, np.int32), reason
    )


def test_a_prefix_comes_first_with_its_own_versions() -> None:
    prefix = Prefix(np.asarray([30], np.int32), np.asarray([-2.0], np.float32), np.asarray([3], np.int32))
    rollout = rollout_of(request(prefix), sampled("stop"))
    assert rollout.token_ids.tolist() == [30, 0, 1]
    assert rollout.behaviour_logprobs.tolist() == [-2.0, -1.0, -1.0]
    assert rollout.versions.tolist() == [3, 4, 4]
    assert rollout.loss_mask.tolist() == [True, True, True]
    assert rollout.finish_reason is FinishReason.STOP
    assert (rollout.group_id, rollout.sample_index) == (9, 1)
    assert [a.dtype for a in (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions)] == ["i4", "f4", "i4"]


def test_an_abort_before_the_first_token_is_empty() -> None:
    rollout = rollout_of(request(), FinishedRequest.nothing("abort"))
    assert rollout.finish_reason is FinishReason.ABORT
    assert len(rollout.token_ids) == len(rollout.loss_mask) == 0


def test_an_unknown_reason_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="'repetition'"):
        rollout_of(request(), sampled("repetition"))


def test_arrays_that_disagree_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="3 tokens, 2 log-probabilities"):
        rollout_of(request(), sampled("stop", num_tokens=3))


@pytest.mark.parametrize("absurd", [np.nan, -np.inf])
def test_a_log_probability_that_is_not_finite_is_an_engine_error(absurd: float) -> None:
    finished = sampled("stop")
    finished.logprobs[1] = absurd
    with pytest.raises(EngineError, match=rf"9:1: .* sampled token 1 is {absurd}.* version 4"):
        rollout_of(request(), finished)
