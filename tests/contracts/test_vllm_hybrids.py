"""Gated DeltaNet models in a real vLLM: their state in place of keys and values, and the names of their weights.

vLLM computes these layers on a CPU in bfloat16 only.  The reference is transformers in float32, with the same weights;
what bfloat16 costs is the floor below, whatever a version's way was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from launch.checks.memory_plan import least_cache_bytes
from rlhpc.base.hf_config import TEXT
from rlhpc.generation.vllm_engine import VllmEngine
from rlhpc.models.adapter import A, B
from rlhpc.models.shape import EMBEDDING, HEAD, INNER, WRAPPED, ModelShape
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import Prefix, Rollout, RolloutRequest
from tests.contracts.engine_subjects import LONG_PROMPT, AdapterSubject, VllmSubject, request_of, tiny_config
from tests.contracts.test_generation_engine import until_sampling
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
# Mean and largest difference of a log-probability.  Measured: 0.017 and 0.2; of a mixture, where bfloat16 sends some
# tokens to other experts, 0.09 and 1.4; of two versions 0.4 in the mean.
FLOOR_MEAN, FLOOR = 0.04, 0.6
FLOOR_MEAN_OF_EXPERTS, FLOOR_OF_EXPERTS = 0.16, 3.0
ANSWER_TOKENS = 300
FAMILIES = [
    pytest.param(("qwen3_5", True), id="inside a model that sees, tied"),
    pytest.param(("qwen3_5_moe", False), id="stacked experts", marks=pytest.mark.soak),
    pytest.param(("qwen3_next", False), id="experts apart", marks=pytest.mark.soak),
]


class HybridSubject(VllmSubject):
    """Weights in bfloat16, by their names on disk."""

    def __init__(self, publisher: Any, transport: str, model: Path, device: str) -> None:
        super().__init__(publisher, transport, model, device)
        if self._reference.config.model_type.removesuffix("_text") in WRAPPED:
            self._base = {_on_disk(name): tensor for name, tensor in self._base.items()}

    @property
    def floor(self) -> tuple[float, float]:
        """Mean and largest difference of a log-probability that bfloat16 may make."""
        has_experts = any(".experts." in name for name in self._base)
        return (FLOOR_MEAN_OF_EXPERTS, FLOOR_OF_EXPERTS) if has_experts else (FLOOR_MEAN, FLOOR)

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.bfloat16()) for name, tensor in super().weights(version)]


class HybridAdapterSubject(AdapterSubject):
    """Adapters by the names that modules have on disk."""

    def layers(self) -> dict[str, tuple[int, int]]:
        return {self._stored(name): shape for name, shape in super().layers().items()}

    def merged(self, version: int) -> dict[str, torch.Tensor]:
        """Whole weights in float64, by the reference's names."""
        whole = {name: tensor.double() for name, tensor in self._base.items()}
        whole.setdefault(HEAD, whole[EMBEDDING])
        given = {name.replace(f".{INNER}.", ".", 1): tensor.double() for name, tensor in self.weights(version)}
        for module in {name.removesuffix(B) for name in given if name.endswith(B)}:
            whole[f"{module}.weight"] += self.config.lora.scale * (given[module + B] @ given[module + A])
        return whole

    def _stored(self, name: str) -> str:
        return _on_disk(name) if json.loads((self.config.model.path / "config.json").read_bytes()).get(TEXT) else name


def _on_disk(name: str) -> str:
    return name.replace("model.", f"model.{INNER}.", 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HybridSubject]:
    family, tied = request.param
    made = await HybridSubject.start(tmp_path_factory.mktemp("engine"), family=family, tied=tied, dtype="bfloat16")
    await made.join()
    await made.update(0)
    yield made
    await made.engine.close()
    made.publisher.dissolve()


def assert_sampled_by(subject: HybridSubject, version: int, rollout: Rollout, part: slice = slice(None)) -> None:
    difference = np.abs(rollout.behaviour_logprobs - subject.expected_logprobs(version, rollout))[part]
    mean, most = subject.floor
    assert difference.mean() < mean, difference.mean()
    assert difference.max() < most, difference.max()


def asked(index: int, prefix: Prefix | None = None, max_tokens: int = ANSWER_TOKENS) -> RolloutRequest:
    return request_of(index, prompt=LONG_PROMPT[: 70 + index], max_tokens=max_tokens, prefix=prefix)


async def test_every_version_samples_by_its_own_weights(subject: HybridSubject) -> None:
    for version in (subject.engine.policy_version, *range(subject.engine.policy_version + 1, 4)):
        if version != subject.engine.policy_version:
            await subject.update(version)
        rollouts = await asyncio.gather(*(subject.engine.generate(asked(index, max_tokens=60)) for index in range(6)))
        for rollout in rollouts:
            assert_sampled_by(subject, version, rollout)
        others = subject.expected_logprobs(version + 1, rollouts[0])
        assert (
            np.abs(rollouts[0].behaviour_logprobs - others).mean() > 1.5 * subject.floor[0]
        )  # the floor tells versions apart


async def test_requests_in_flight_keep_their_state_and_go_on_by_the_new_weights(subject: HybridSubject) -> None:
    old, new = subject.engine.policy_version, subject.engine.policy_version + 1
    running = [asyncio.create_task(subject.engine.generate(asked(index))) for index in range(4)]
    await until_sampling(subject, *(asked(index) for index in range(4)))
    await subject.update(new)
    for rollout in await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S):
        assert set(rollout.versions) == {old, new}
        assert len(rollout.token_ids) == ANSWER_TOKENS
        border = int(np.argmax(rollout.versions == new))
        assert_sampled_by(subject, old, rollout, slice(0, border))
    # A state of old weights that was found in the prefix cache would show.
    assert_sampled_by(subject, new, await subject.engine.generate(asked(0)))


async def test_a_prompt_that_was_seen_is_answered_as_at_first(subject: HybridSubject) -> None:
    """Its state at a border of blocks may come from the prefix cache, which has one for each version."""
    version = subject.engine.policy_version
    for _ in range(3):
        for rollout in await asyncio.gather(*(subject.engine.generate(asked(50 + each % 2)) for each in range(4))):
            assert_sampled_by(subject, version, rollout)


async def test_the_state_of_a_prefix_is_computed_again(subject: HybridSubject) -> None:
    version = subject.engine.policy_version
    first = await subject.engine.generate(asked(7, max_tokens=90))
    kept = Prefix(first.token_ids[:80], first.behaviour_logprobs[:80], first.versions[:80])
    await subject.update(version + 1)
    rollout = await subject.engine.generate(asked(7, kept, max_tokens=160))
    assert rollout.token_ids[:80].tolist() == first.token_ids[:80].tolist()
    assert_sampled_by(subject, version, rollout, slice(0, 80))
    assert_sampled_by(subject, version + 1, rollout, slice(80, None))


@pytest.mark.soak
async def test_recompute_kv_computes_the_state_of_requests_in_flight_again(tmp_path: Path) -> None:
    subject = await HybridSubject.start(tmp_path, family="qwen3_5", tied=True, dtype="bfloat16", recompute_kv=True)
    try:
        await subject.join()
        await subject.update(0)
        running = [asyncio.create_task(subject.engine.generate(asked(index))) for index in range(4)]
        await until_sampling(subject, *(asked(index) for index in range(4)))
        await subject.update(1)
        for rollout in await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S):
            border = int(np.argmax(rollout.versions == 1))
            assert_sampled_by(subject, 1, rollout, slice(border, None))
    finally:
        await subject.engine.close()
        subject.publisher.dissolve()


@pytest.mark.parametrize(("family", "tied"), [("qwen3_5_text", False), ("qwen3_5", True)])
async def test_an_adapter_of_every_layer_is_sampled_with_as_if_it_were_merged(
    family: str, tied: bool, tmp_path: Path
) -> None:
    lora = {"rank": 8, "alpha": 16.0, "targets": ("attention", "mlp")}
    subject = await HybridAdapterSubject.start(tmp_path, family=family, tied=tied, dtype="bfloat16", lora=lora)
    try:
        await subject.join()
        for version in (0, 1):
            await subject.update(version)
            rollout = await subject.engine.generate(asked(version, max_tokens=60))
            difference = np.abs(rollout.behaviour_logprobs - subject.expected_logprobs(version, rollout))
            assert (difference.mean() < FLOOR_MEAN, difference.max() < FLOOR) == (True, True), difference
            other = np.abs(rollout.behaviour_logprobs - subject.expected_logprobs(1 - version, rollout))
            assert other.mean() > 10 * FLOOR_MEAN
    finally:
        await subject.engine.close()
        subject.publisher.dissolve()


@pytest.mark.parametrize("attending", [1, 2])
async def test_vllm_starts_with_the_least_cache_that_check_asks_for_and_not_with_less(
    attending: int, tmp_path: Path
) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"] * attending
    model = make_tiny_checkpoint(tmp_path, "qwen3_5", layers=len(kinds), layer_types=kinds)
    shape = ModelShape.of(json.loads((model / "config.json").read_bytes()))
    assert shape is not None
    least = least_cache_bytes(tiny_config(model, dtype="bfloat16"), shape)
    with pytest.raises(EngineError, match="KV cache is needed"):
        await VllmEngine.start(tiny_config(model, dtype="bfloat16", kv_cache_bytes=least - 1), seed=0)
    engine = await VllmEngine.start(tiny_config(model, dtype="bfloat16", kv_cache_bytes=least), seed=0)
    await engine.close()


@pytest.mark.parametrize(
    ("family", "settings", "dtype", "says"),
    [
        ("qwen3_5", {}, "float32", r"model\.dtype='float32'.*bfloat16"),
        ("qwen3_5_text", {"linear_key_head_dim": 32}, "bfloat16", "linear_key_head_dim=32.*64, 128"),
        ("qwen3_next", {"tie_word_embeddings": True}, "bfloat16", "tie_word_embeddings=true"),
    ],
)
async def test_models_that_vllm_would_compute_wrongly_are_refused(
    family: str, settings: dict[str, Any], dtype: str, says: str, tmp_path: Path
) -> None:
    model = make_tiny_checkpoint(tmp_path, family, **settings)
    with pytest.raises(EngineError, match=says):
        await VllmEngine.start(tiny_config(model, dtype=dtype), seed=0)
