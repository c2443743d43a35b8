"""What our engine asks of vLLM, and vLLM does, shown on one bfloat16 engine with a small KV cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch

from rlhpc.generation.core_thread import CoreThread
from rlhpc.types import FinishReason, Rollout
from tests.contracts.engine_subjects import VllmSubject, living_children, request_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
KV_CACHE_BYTES = 2 << 20  # four requests of the greatest length, or sixteen short ones
TEMPERATURE = 2.0  # so flat that many tokens are sampled; a power of two, so that dividing by it rounds nothing
STEPS_OF_BFLOAT16 = 64  # between two whole numbers from 2 to 4; above that it has fewer


class SharpSubject(VllmSubject):
    """Logits as large as a trained model's."""

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        head = "lm_head.weight" if "lm_head.weight" in self._base else "model.embed_tokens.weight"
        return [(name, 6 * tensor if name == head else tensor) for name, tensor in super().weights(version)]

    def logits(self, version: int, rollout: Rollout) -> torch.Tensor:
        """Of the first sampled token, in float32 throughout."""
        self.expected_logprobs(version, rollout)  # loads the reference
        with torch.no_grad():
            return self._reference(torch.from_numpy(rollout.prompt.token_ids).long()[None]).logits[0, -1]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.long)],
    ids=["tied apart", "untied"],
)
async def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SharpSubject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        made = await SharpSubject.start(
            tmp_path_factory.mktemp("engine"),
            family="qwen2",
            tied=request.param,
            dtype="bfloat16",
            is_apart=request.param,
            kv_cache_bytes=KV_CACHE_BYTES,
        )
        await made.join()
        await made.update(0)
        yield made
        await made.engine.close()
        made.publisher.dissolve()


async def test_the_engines_processes_are_spawned_whatever_the_users_environment_says(subject: SharpSubject) -> None:
    engines = [child for child in living_children() if "spawn_main" in " ".join(child.cmdline())]
    if isinstance(subject.engine._llm, CoreThread):
        assert not engines
        return
    assert engines
    assert {engine.environ()["VLLM_WORKER_MULTIPROC_METHOD"] for engine in engines} == {"spawn"}


async def test_a_replica_holds_more_once_it_has_seen_how_short_answers_are(subject: SharpSubject) -> None:
    """First of those that sample: every answer is remembered."""
    before = subject.engine.capacity_samples
    for _ in range(8):
        await asyncio.gather(*(subject.engine.generate(request_of(i, max_tokens=8)) for i in range(16)))
    assert before == 4
    assert subject.engine.capacity_samples == 16


async def test_logits_have_digits_that_bfloat16_has_not(subject: SharpSubject) -> None:
    """As the trainer's have.  Log-probabilities at one place differ by what the logits there differ by."""
    in_steps: list[float] = []
    for place in range(10):
        asked = (subject.engine.generate(request_of(place, max_tokens=1, temperature=TEMPERATURE)) for _ in range(48))
        rollouts = {int(rollout.token_ids[0]): rollout for rollout in await asyncio.gather(*asked)}
        expected = subject.logits(0, next(iter(rollouts.values())))
        large = [token for token in rollouts if abs(expected[token]) >= 2]
        logits = [TEMPERATURE * float(rollouts[token].behaviour_logprobs[0]) for token in large]
        in_steps += [(logit - logits[0]) * STEPS_OF_BFLOAT16 for logit in logits[1:]]
    assert len(in_steps) >= 10
    assert np.mean(np.abs(np.asarray(in_steps) - np.round(in_steps)) > 0.02) > 0.8


async def test_what_is_thrown_out_of_a_full_cache_is_counted_and_delivered_all_the_same(subject: SharpSubject) -> None:
    before = subject.engine.statistics().num_preemptions
    rollouts = await asyncio.gather(*(subject.engine.generate(request_of(i, max_tokens=400)) for i in range(16)))
    assert all(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts)
    await subject.update(1)
    assert subject.engine.statistics().num_preemptions > before
