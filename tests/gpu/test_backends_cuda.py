"""Megatron and DeepSpeed on one GPU: bfloat16 beside the float32 reference, offload, saves while training goes on."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.reference_scenarios import ask_a_reference
from tests.contracts.trainer_cluster import ClusterPool
from tests.contracts.trainer_scenarios import look, take_steps
from tests.gpu.gpu_ranks import (
    VOCABULARY,
    ask_the_same,
    masters_after,
    masters_after_parts,
    relative_distance,
    rows_of,
    save_twice,
    skip_a_nan_gradient,
)
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import dummy_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]

ON_GPU = {"num_ranks": 1, "device": "cuda"}
REFERENCE = ON_GPU | {"backend": "reference"}
BACKENDS = {
    "megatron": ON_GPU | {"backend": "megatron"},
    "megatron_replicated": ON_GPU | {"backend": "megatron", "distributed_optimizer": False},
    "zero2": ON_GPU | {"backend": "deepspeed", "zero_stage": 2},
    "zero3": ON_GPU | {"backend": "deepspeed", "zero_stage": 3},
}
OFFLOADED = ("megatron", "zero2", "zero3")
ROWS = rows_of(0, count=3)


@pytest.fixture(scope="module")
def clusters():
    pool = ClusterPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    # Logits of a spread of about one nat: the bars of log-probabilities are in nats, and errors grow with the spread.
    return make_tiny_checkpoint(directory, "qwen3", hidden=128, layers=4, tied=False, vocabulary=VOCABULARY, heads=4)


@pytest.fixture(scope="module")
def reference(clusters, model, tmp_path_factory):
    """Of the reference backend in float32: log-probabilities, first weights, results and weights of five steps."""
    cluster = clusters.cluster("reference", REFERENCE)
    scratch = tmp_path_factory.mktemp("reference")
    ((_, logprobs, _, start),) = cluster.run(look, scratch / "look", model=model, rows=[*ROWS, dummy_row()])
    steps = [rows_of(seed) for seed in range(5)]
    ((results, weights),) = cluster.run(take_steps, scratch / "steps", model=model, steps=steps)
    return logprobs, dict(start), results, weights


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_logprobs_are_near_those_of_the_reference_in_float32(backend, clusters, model, reference, tmp_path):
    cluster = clusters.cluster(backend, BACKENDS[backend])
    ((_, found, _, _),) = cluster.run(look, tmp_path / "look", model=model, rows=[*ROWS, dummy_row()], dtype="bfloat16")
    difference = torch.cat(found) - torch.cat(reference[0])
    assert difference.abs().mean() <= 2e-2
    assert difference.square().mean().sqrt() <= 0.03


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_logprobs_are_those_of_the_reference(backend, clusters, model, reference, tmp_path):
    cluster = clusters.cluster(backend, BACKENDS[backend])
    ((_, found, _, weights),) = cluster.run(look, tmp_path / "look", model=model, rows=[*ROWS, dummy_row()])
    torch.testing.assert_close(torch.cat(found), torch.cat(reference[0]), atol=1e-4, rtol=0)
    assert {name for name, _ in weights} == reference[1].keys()
    assert all(torch.equal(tensor, reference[1][name]) for name, tensor in weights)


@pytest.mark.parametrize(("dtype", "distance"), [("float32", 1e-3), ("bfloat16", 0.25)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_five_steps_lead_where_the_reference_goes(backend, dtype, distance, clusters, model, reference, tmp_path):
    _, start, wanted_results, wanted = reference
    cluster = clusters.cluster(backend, BACKENDS[backend])
    steps = [rows_of(seed) for seed in range(5)]
    ((results, weights),) = cluster.run(take_steps, tmp_path / "steps", model=model, steps=steps, dtype=dtype)
    norms = [[result.grad_norm for result in each] for each in (results, wanted_results)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3 if dtype == "float32" else 0.1)
    assert relative_distance(weights, wanted, start) < distance


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_in_parts_is_the_step_on_all_of_them(backend, is_offloaded, clusters, model, tmp_path):
    if is_offloaded and backend not in OFFLOADED:
        pytest.skip("its optimizer stays on the device")
    cluster = clusters.cluster(backend, BACKENDS[backend])
    settings = {"model": model, "dtype": "bfloat16", "optimizer_offload": is_offloaded}
    rows = rows_of(0, count=4)
    ((whole, wanted),) = cluster.run(masters_after, tmp_path / "whole", steps=[rows], **settings)
    ((norms, found),) = cluster.run(
        masters_after_parts, tmp_path / "parts", parts=[rows[:1], rows[1:3], rows[3:]], **settings
    )
    assert norms == pytest.approx(whole, rel=2e-2)  # losses are divided by other numbers, and rounded in bfloat16
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert (found[key] - wanted[key]).norm() <= 4e-2 * wanted[key].norm(), key


@pytest.mark.parametrize("backend", OFFLOADED)
def test_an_optimizer_in_host_memory_takes_the_same_step(backend, clusters, model, tmp_path):
    """To the last bit but one.  Later steps cannot be compared like this: a weight or two of a million are rounded to
    the other neighbour in bfloat16, and the norm of the next gradient differs by 0.2 %.
    """
    cluster = clusters.cluster(backend, BACKENDS[backend])
    settings = {"model": model, "steps": [rows_of(0)], "dtype": "bfloat16"}
    ((norms, here),) = cluster.run(masters_after, tmp_path / "here", **settings)
    ((host_norms, host),) = cluster.run(masters_after, tmp_path / "host", optimizer_offload=True, **settings)
    assert host_norms == pytest.approx(norms, rel=1e-6)
    assert here
    assert host.keys() == here.keys()
    for key in here:
        torch.testing.assert_close(
            host[key], here[key], atol=1e-7, rtol=3e-7, msg=lambda story, key=key: f"{key} {story}"
        )


@pytest.mark.parametrize("backend", ["megatron", "zero2"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_save_holds_the_state_of_its_call_while_training_goes_on(backend, is_offloaded, clusters, model, tmp_path):
    cluster = clusters.cluster(backend, BACKENDS[backend])
    steps = [rows_of(seed) for seed in range(5)]
    settings = {"dtype": "bfloat16", "optimizer_offload": is_offloaded}
    assert cluster.run(save_twice, tmp_path / "saves", model=model, steps=steps, **settings) == [True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(backend, is_offloaded, clusters, model, tmp_path):
    if is_offloaded and backend not in OFFLOADED:
        pytest.skip("refused: offload needs an optimiser that is shared out")
    cluster = clusters.cluster(backend, BACKENDS[backend])
    steps = [rows_of(seed) for seed in range(3)]
    settings = {"dtype": "bfloat16", "optimizer_offload": is_offloaded}
    (answer,) = cluster.run(skip_a_nan_gradient, tmp_path / "skip", model=model, steps=steps, **settings)
    assert answer == ([True, False, True], True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reference_in_host_memory_gives_the_bits_of_one_on_the_gpu(backend, clusters, model, tmp_path):
    """And those of the policy at the start; asking it changes no bit of the policy."""
    cluster = clusters.cluster(backend, BACKENDS[backend])
    rows, seen = [*ROWS, dummy_row()], {}
    for memory in ("device", "host"):
        settings = {"model": model, "rows": rows, "memory": memory, "dtype": "bfloat16"}
        (seen[memory],) = cluster.run(ask_the_same, tmp_path / memory, **settings)
        for name in sorted(path.name for path in (tmp_path / memory / "before").iterdir()):
            before, after = (tmp_path / memory / when / name for when in ("before", "after"))
            assert before.read_bytes() == after.read_bytes(), name
    for name in seen["host"]:
        for here, there in zip(seen["host"][name], seen["device"][name], strict=True):
            assert torch.equal(here, there), name
    for here, there in zip(seen["host"]["reference"], seen["host"]["start"], strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("backend", ["zero2", "zero3"])
def test_a_reference_beside_parameters_in_host_memory_is_there_too(backend, clusters, model, tmp_path):
    cluster = clusters.cluster(backend, BACKENDS[backend])
    settings = {"optimizer_offload": True, "parameter_offload": backend == "zero3", "dtype": "bfloat16"}
    (seen,) = cluster.run(ask_a_reference, tmp_path / "host", model=model, rows=ROWS, memory="host", **settings)
    for here, there in zip(seen["reference again"], seen["start"], strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("backend", ["megatron", "zero2"])
def test_activations_computed_anew_lead_to_the_same_state(backend, recompute, clusters, model, tmp_path):
    if backend == "zero2" and recompute == "selective":
        pytest.skip("Megatron's alone")
    cluster = clusters.cluster(backend, BACKENDS[backend])
    settings = {"model": model, "steps": [rows_of(0), rows_of(1)], "dtype": "bfloat16"}
    ((norms, kept),) = cluster.run(masters_after, tmp_path / "kept", **settings)
    ((again_norms, again),) = cluster.run(
        masters_after, tmp_path / "again", recompute_activations=recompute, **settings
    )
    assert again_norms == pytest.approx(norms, rel=1e-3)
    assert kept
    assert again.keys() == kept.keys()
    for key in kept:
        torch.testing.assert_close(again[key], kept[key], atol=1e-5, rtol=0)
