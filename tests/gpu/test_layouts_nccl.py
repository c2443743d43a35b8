"""Layouts of two ranks over NCCL: the same training as on one, the same weights out of it, one vote on every step, and
checkpoints that go on bit for bit and in other layouts.

On two GPUs, or on one that both share as if they were two nodes (one_card.py).
"""

from __future__ import annotations

import pytest
import torch

from tests.contracts.trainer_cluster import ClusterPool
from tests.contracts.trainer_scenarios import look, take_steps
from tests.gpu.gpu_ranks import (
    VOCABULARY,
    go_on_from,
    relative_distance,
    rows_of,
    save_and_go_on,
    save_twice,
    skip_a_nan_gradient,
)
from tests.gpu.one_card import environment_of, place, why_not
from tests.tiny_models import make_tiny_checkpoint

NOT_HERE = why_not(2)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE), pytest.mark.timeout(400)]

ON_DEVICE = {"device": place()}
ALONE = ON_DEVICE | {"backend": "megatron", "num_ranks": 1}
MEGATRON = ON_DEVICE | {"backend": "megatron", "num_ranks": 2}
DEEPSPEED = ON_DEVICE | {"backend": "deepspeed", "num_ranks": 2}
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
# Of a mixture of experts.
EXPERT_LAYOUTS = {
    "ep2": MEGATRON | {"expert_parallel": 2},
    "sp_ep2": MEGATRON | {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
}
ALL = LAYOUTS | EXPERT_LAYOUTS
STEPS = [rows_of(seed) for seed in range(5)]


@pytest.fixture(scope="module")
def clusters():
    pool = ClusterPool(environment_of)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    sizes = {"hidden": 128, "layers": 4, "vocabulary": VOCABULARY, "heads": 4}
    return {
        "qwen3": make_tiny_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3", tied=True, **sizes),
        "qwen3_moe": make_tiny_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3_moe", tied=False, **sizes),
    }


@pytest.fixture
def model(models, layout):
    return models["qwen3_moe" if layout in EXPERT_LAYOUTS else "qwen3"]


@pytest.fixture(scope="module")
def runs_alone():
    return {}


@pytest.fixture(params=["float32", "bfloat16"])
def alone(request, clusters, model, runs_alone, tmp_path_factory):
    """(dtype, first weights, results and weights of five steps) of one rank; made once for each model and dtype."""
    key = model, request.param
    if key not in runs_alone:
        cluster, dtype = clusters.cluster("dp1", ALONE), request.param
        scratch = tmp_path_factory.mktemp("alone")
        ((_, _, _, start),) = cluster.run(look, scratch / "look", model=model, rows=STEPS[0], dtype=dtype)
        ((results, weights),) = cluster.run(take_steps, scratch / "steps", model=model, steps=STEPS, dtype=dtype)
        runs_alone[key] = dtype, {name: tensor.float() for name, tensor in start}, results, weights
    return runs_alone[key]


@pytest.mark.parametrize("layout", ALL)
def test_five_steps_of_two_ranks_lead_where_one_goes(layout, clusters, model, alone, tmp_path):
    dtype, start, wanted_results, wanted = alone
    if layout in EXPERT_LAYOUTS and dtype == "bfloat16":
        pytest.skip("other sums send a token to other experts, and the course is another one")
    cluster = clusters.cluster(layout, ALL[layout])
    answers = cluster.run(take_steps, tmp_path / "steps", model=model, steps=STEPS, dtype=dtype)
    (results, weights), (other_results, nothing) = answers
    assert other_results == results
    assert nothing == {}
    norms = [[result.grad_norm for result in each] for each in (results, wanted_results)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3 if dtype == "float32" else 0.05)
    assert relative_distance(weights, wanted, start) < (1e-3 if dtype == "float32" else 0.25)


@pytest.mark.parametrize("layout", ALL)
def test_weights_leave_two_gpus_as_they_came(layout, clusters, model, alone, tmp_path):
    dtype, start, _, _ = alone
    cluster = clusters.cluster(layout, ALL[layout])
    answers = cluster.run(look, tmp_path / "look", model=model, rows=STEPS[0], dtype=dtype)
    found = {name: tensor.float() for name, tensor in answers[0][3]}
    assert list(found) == [spec.name for spec in answers[0][2]]
    assert found.keys() == start.keys()
    assert all(torch.equal(found[name], start[name]) for name in start)


@pytest.mark.parametrize("layout", ALL)
def test_a_gradient_that_is_nan_on_one_gpu_is_skipped_on_both(layout, clusters, model, tmp_path):
    cluster = clusters.cluster(layout, ALL[layout])
    settings = {"model": model, "steps": STEPS[:3], "dtype": "bfloat16"}
    answers = cluster.run(skip_a_nan_gradient, tmp_path / "skip", **settings)
    assert answers == [([True, False, True], True)] * 2


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "zero2", "zero3"])
def test_a_save_of_two_gpus_holds_the_state_of_its_call(layout, clusters, model, tmp_path):
    cluster = clusters.cluster(layout, ALL[layout])
    settings = {"model": model, "steps": STEPS, "dtype": "bfloat16"}
    assert cluster.run(save_twice, tmp_path / "saves", **settings) == [True, True]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "cp2", "ep2", "zero2", "zero3"])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(layout, clusters, model, tmp_path):
    cluster = clusters.cluster(layout, ALL[layout])
    settings = {"model": model, "steps": STEPS, "directory": tmp_path / "ckpt", "dtype": "bfloat16"}
    (files, results, weights), *others = cluster.run(save_and_go_on, tmp_path / "saved", **settings)
    assert files
    assert all(mine == {} for mine, *_ in others)
    found, again = cluster.run(go_on_from, tmp_path / "again", **settings)[0]
    assert found == results
    assert [name for name in weights if not torch.equal(again[name], weights[name])] == []


@pytest.mark.parametrize(("layout", "target"), [("tp2", "zero3"), ("zero2", "pp2"), ("cp2", "tp2"), ("ep2", "dp2")])
def test_a_run_goes_on_in_another_layout(layout, target, clusters, model, tmp_path):
    settings = {"model": model, "steps": STEPS, "directory": tmp_path / "ckpt", "dtype": "float32"}
    source = clusters.cluster(layout, ALL[layout])
    _, results, weights = source.run(save_and_go_on, tmp_path / "saved", **settings)[0]
    found, again = clusters.cluster(target, ALL[target]).run(go_on_from, tmp_path / "again", **settings)[0]
    assert [r.grad_norm for r in found] == pytest.approx([r.grad_norm for r in results], rel=1e-3)
    for name in weights:
        torch.testing.assert_close(again[name], weights[name], atol=1e-3, rtol=0, msg=name)
