"""run.deterministic on a GPU: vLLM's batch-invariant kernels, Megatron in bfloat16, and a run that is killed."""

from __future__ import annotations

import pytest
import torch

from tests.faults.test_exact_restart import NUM_STEPS, Course, run_killed_three_times, settings
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, make_lab, run_to_the_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KV_CACHE_BYTES = 1 << 28


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_a_run_killed_on_a_gpu_ends_with_the_bits_of_one_that_was_not(lab: Lab, is_eager: bool) -> None:
    sections = settings("cuda", 1, backend="megatron", device="cuda")
    sections["model"] = {"dtype": "bfloat16"}
    engine = {"engine": "vllm", "num_replicas": 1, "kv_cache_bytes": KV_CACHE_BYTES, "enforce_eager": is_eager}
    sections["generation"] |= engine
    name = "eager" if is_eager else "graphs"
    whole = Course.of(run_to_the_end(lab, f"{name}-whole", **sections))
    layout = run_killed_three_times(lab, f"{name}-killed", 1, **sections)
    killed = Course.of(layout)
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
    assert sorted(whole.steps) == sorted(killed.steps) == list(range(NUM_STEPS))
    assert [step for step in whole.steps if whole.steps[step] != killed.steps[step]] == []
    assert whole.rollouts == killed.rollouts
    assert whole.trainer == killed.trainer
