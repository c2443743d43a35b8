"""A version that is copied straight into vLLM's model makes the model that vLLM's own reload makes, bit for bit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from rlhpc.generation import reload_plan
from rlhpc.generation.reload_plan import NoPlan, WeightReload
from rlhpc.generation.vllm_engine import VllmEngine
from tests.contracts.engine_subjects import VllmSubject

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
ROW = np.arange(4, 40, dtype=np.int32)
FAMILIES = [
    pytest.param(("qwen2", True), id="biases, tied"),
    pytest.param(("qwen3", False), id="untied", marks=pytest.mark.long),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmSubject]:
    family, tied = request.param
    made = await VllmSubject.start(tmp_path_factory.mktemp("engine"), family=family, tied=tied)
    await made.join()
    await made.update(0)
    yield made
    await made.engine.close()
    made.publisher.dissolve()


def reload_of(subject: VllmSubject) -> WeightReload:
    """Of the engine, which runs on a thread of this process."""
    found = subject.worker._rlhpc_reload
    assert isinstance(found, WeightReload)
    return found


async def scored(subject: VllmSubject, version: int) -> Any:
    await subject.update(version)
    return (await subject.engine.score(ROW)).logprobs


async def test_both_ways_of_loading_make_the_same_model(subject: VllmSubject) -> None:
    reload = reload_of(subject)
    plan = reload._plan
    assert plan is not None, reload.way
    assert reload.way.startswith("copies to where kernels read")
    by_copies = [await scored(subject, version) for version in (1, 2, 1)]
    reload._plan = None
    by_vllm = [await scored(subject, version) for version in (1, 2)]
    reload._plan = plan
    assert np.array_equal(by_copies[0], by_vllm[0])
    assert np.array_equal(by_copies[1], by_vllm[1])
    assert np.array_equal(by_copies[2], by_copies[0])
    assert not np.array_equal(by_copies[0], by_copies[1])
    np.testing.assert_allclose(by_copies[0][1:], subject.expected_score(1, ROW), atol=1e-4)


async def test_a_version_with_other_tensors_goes_through_vllms_reload(subject: VllmSubject) -> None:
    """In another order, which is another plan; vLLM's loaders do not care."""
    reload, before = reload_of(subject), await scored(subject, 3)
    await scored(subject, 4)
    weights = subject.weights(3)
    assert reload._plan is not None
    assert reload._plan.fits(weights)
    for other in (weights[::-1], weights[1:], [(name, tensor.double()) for name, tensor in weights]):
        assert not reload._plan.fits(other)
    reload.load(weights[::-1])
    assert np.array_equal((await subject.engine.score(ROW)).logprobs, before)


async def test_a_plan_is_not_taken_that_would_make_another_model(subject: VllmSubject) -> None:
    reload = reload_of(subject)
    await subject.update(5)
    assert reload._plan is not None
    reload._plan.prove(subject.weights(5))
    with pytest.raises(NoPlan, match=r"norm.* is changed on its way to weight of RMSNorm"):
        reload._plan.prove([(name, tensor * (2 if "norm" in name else 1)) for name, tensor in subject.weights(5)])
    with pytest.raises(NoPlan, match="that is repacked answers otherwise"):
        reload._plan.prove([(name, tensor * (2 if "o_proj" in name else 1)) for name, tensor in subject.weights(5)])
    await subject.update(5)


async def test_what_the_check_of_a_refused_plan_has_loaded_is_not_kept(
    subject: VllmSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload, before, repack = reload_of(subject), await scored(subject, 8), reload_plan._repack

    def repack_the_double(layer: Any, anew: dict[Any, torch.Tensor]) -> None:
        for tensor in anew.values():
            tensor.mul_(2)
        repack(layer, anew)

    with monkeypatch.context() as patch:
        patch.setattr(reload, "_plan", None)
        patch.setattr(reload, "way", "")
        patch.setattr(reload_plan, "_repack", repack_the_double)
        reload.load(subject.weights(8))
        assert "that is repacked answers otherwise" in reload.way
        assert reload._plan is None
    assert np.array_equal((await subject.engine.score(ROW)).logprobs, before)


async def test_a_search_that_finds_no_plan_leaves_the_model_as_it_was(
    subject: VllmSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload, before = reload_of(subject), await scored(subject, 6)
    model, load = reload._model, reload._model.load_weights

    def load_and_add(weights: Any) -> Any:
        loaded = load(weights)
        model.model.norm.weight.data.add_(1)
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(model, "load_weights", load_and_add)
        patch.setattr(reload, "_plan", None)
        reload._look_for_plan(subject.weights(6))
        assert reload._plan is None
        assert "vLLM's layerwise reload, for each version: aten.add_.Tensor of weight of RMSNorm" in reload.way
    assert np.array_equal((await subject.engine.score(ROW)).logprobs, before)
    assert not np.array_equal(await scored(subject, 7), before)


@pytest.mark.long
async def test_a_mixture_goes_through_vllms_reload(tmp_path: Path) -> None:
    subject = await VllmSubject.start(tmp_path, family="qwen3_moe", tied=False, is_apart=True)
    try:
        await subject.join()
        await subject.update(0)
        assert isinstance(subject.engine, VllmEngine)
        assert "RoutedExperts with UnquantizedFusedMoEMethod" in (await subject.engine._rpc("rlhpc_way_of_loading"))[0]
        first, second = await scored(subject, 1), await scored(subject, 2)
    finally:
        await subject.engine.close()
        subject.publisher.dissolve()
    assert torch.from_numpy(first - second).abs().max() > 0.01
