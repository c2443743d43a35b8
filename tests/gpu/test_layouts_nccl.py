"""Layouts over two GPUs and NCCL: the same training as on one, the same weights out of it, one vote on every step."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.trainer_cluster import ClusterPool
from tests.contracts.trainer_scenarios import look, take_steps
from tests.gpu.gpu_ranks import VOCABULARY, relative_distance, rows_of, save_twice, skip_a_nan_gradient
from tests.tiny_models import make_tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one device"),
    pytest.mark.timeout(400),
]

ON_GPU = {"device": "cuda"}
ALONE = ON_GPU | {"backend": "megatron", "num_ranks": 1}
MEGATRON = ON_GPU | {"backend": "megatron", "num_ranks": 2}
DEEPSPEED = ON_GPU | {"backend": "deepspeed", "num_ranks": 2}
LAYOUTS = {
    "dp2": MEGATRON,
    "dp2_overlapped": MEGATRON | {"overlap_grad_reduce": True},
    "tp2": MEGATRON | {"tensor_parallel": 2},
    "sp": MEGATRON | {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": MEGATRON | {"pipeline_parallel": 2},
    "vpp2": MEGATRON | {"pipeline_parallel": 2, "chunks_per_stage": 2},
    "cp2": MEGATRON | {"context_parallel": 2},
    "zero2": DEEPSPEED | {"zero_stage": 2},
    "zero3": DEEPSPEED | {"zero_stage": 3},
}
STEPS = [rows_of(seed) for seed in range(5)]


@pytest.fixture(scope="module")
def clusters():
    pool = ClusterPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return make_tiny_checkpoint(directory, "qwen3", hidden=128, layers=4, tied=True, vocabulary=VOCABULARY, heads=4)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request, clusters, model, tmp_path_factory):
    """(dtype, first weights, results and weights of five steps) of one rank."""
    cluster, dtype = clusters.cluster("dp1", ALONE), request.param
    scratch = tmp_path_factory.mktemp("alone")
    ((_, _, _, start),) = cluster.run(look, scratch / "look", model=model, rows=STEPS[0], dtype=dtype)
    ((results, weights),) = cluster.run(take_steps, scratch / "steps", model=model, steps=STEPS, dtype=dtype)
    return dtype, {name: tensor.float() for name, tensor in start}, results, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_of_two_ranks_lead_where_one_goes(layout, clusters, model, alone, tmp_path):
    dtype, start, wanted_results, wanted = alone
    cluster = clusters.cluster(layout, LAYOUTS[layout])
    answers = cluster.run(take_steps, tmp_path / "steps", model=model, steps=STEPS, dtype=dtype)
    (results, weights), (other_results, nothing) = answers
    assert other_results == results
    assert nothing == {}
    norms = [[result.grad_norm for result in each] for each in (results, wanted_results)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3 if dtype == "float32" else 0.05)
    assert relative_distance(weights, wanted, start) < (1e-3 if dtype == "float32" else 0.25)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_leave_two_gpus_as_they_came(layout, clusters, model, alone, tmp_path):
    dtype, start, _, _ = alone
    cluster = clusters.cluster(layout, LAYOUTS[layout])
    answers = cluster.run(look, tmp_path / "look", model=model, rows=STEPS[0], dtype=dtype)
    found = {name: tensor.float() for name, tensor in answers[0][3]}
    assert list(found) == [spec.name for spec in answers[0][2]]
    assert found.keys() == start.keys()
    assert all(torch.equal(found[name], start[name]) for name in start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_nan_on_one_gpu_is_skipped_on_both(layout, clusters, model, tmp_path):
    cluster = clusters.cluster(layout, LAYOUTS[layout])
    settings = {"model": model, "steps": STEPS[:3], "dtype": "bfloat16"}
    answers = cluster.run(skip_a_nan_gradient, tmp_path / "skip", **settings)
    assert answers == [([True, False, True], True)] * 2


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "zero2", "zero3"])
def test_a_save_of_two_gpus_holds_the_state_of_its_call(layout, clusters, model, tmp_path):
    cluster = clusters.cluster(layout, LAYOUTS[layout])
    settings = {"model": model, "steps": STEPS, "dtype": "bfloat16"}
    assert cluster.run(save_twice, tmp_path / "saves", **settings) == [True, True]
