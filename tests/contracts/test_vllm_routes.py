"""vLLM tells the experts that its mixtures chose: those of transformers' routers, whatever came from a cache."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhpc.config.rules import Config
from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Int32, Prefix, Prompt, RolloutRequest, SamplingParams
from tests.tiny_models import make_tiny_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.long]
SHARED = np.arange(4, 40, dtype=np.int32)  # of all prompts: two blocks of the cache


def settings(model: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "routes", "num_steps": 1},
            "model": {"path": model, "dtype": "float32"},
            "data": {"path": model, "task": "none"},
            "algorithm": {"routing_replay": True},
            "generation": {
                "max_prompt_tokens": 64,
                "max_completion_tokens": 64,
                "max_num_seqs": 4,
                "kv_cache_bytes": 32 << 20,
            },
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"backend": "reference", "token_budget": 4096, "device": "cpu"},
        }
    )


def request(number: int, max_tokens: int, prefix: Prefix | None = None) -> RolloutRequest:
    own = np.random.default_rng(number).integers(4, 100, 5 + number).astype(np.int32)
    prompt = Prompt(number, "none", np.concatenate([SHARED, own]), "")
    return RolloutRequest(number, 0, prompt, SamplingParams(max_tokens=max_tokens), prefix)


@pytest.mark.parametrize("is_apart", [False, True], ids=["on a thread", "in processes"])
async def test_routes_are_those_of_transformers_for_prompts_prefixes_and_completions(tmp_path: Path, is_apart: bool):
    from rlhpc.generation.vllm_engine import VllmEngine

    model = make_tiny_checkpoint(tmp_path, "qwen3_moe", hidden=64, tied=False)
    form = MixtureForm.of_replayed(model)
    engine = await VllmEngine.start(settings(model), seed=0, is_apart=is_apart)
    try:
        first = [request(number, 10 + 7 * number) for number in range(6)]
        rollouts = await asyncio.gather(*map(engine.generate, first))
        begun = rollouts[5]
        prefix = Prefix(begun.token_ids[:9], begun.behaviour_logprobs[:9], begun.versions[:9])
        continued = request(5, 30, prefix)
        rollouts.append(await engine.generate(continued))
        cut = asyncio.ensure_future(engine.generate(request(7, 60)))
        await asyncio.sleep(0)
        await engine.abort(request(7, 60).request_id)
        aborted = await cut
        assert aborted.finish_reason is not FinishReason.ABORT or aborted.routes is None
    finally:
        await engine.close()
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    for asked, rollout in zip([*first, continued], rollouts, strict=True):
        assert rollout.routes is not None
        found = form.unpack(rollout.routes)
        tokens = np.concatenate([asked.prompt.token_ids, rollout.token_ids])
        assert len(found) == len(tokens) - 1
        differs = (found != choices(hf, tokens, form)[:-1]).any(-1)
        assert differs.mean() < 0.02  # scores that tie up to rounding


@torch.no_grad()
def choices(hf: torch.nn.Module, tokens: Int32, form: MixtureForm) -> np.ndarray:
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = hf(input_ids=row, output_router_logits=True, use_cache=False).router_logits
    return torch.stack([each.topk(form.top_k).indices.sort(-1).values for each in logits], 1).numpy()


async def test_an_engine_of_a_dense_model_says_why_it_does_not_start(tmp_path: Path) -> None:
    from rlhpc.generation.vllm_engine import VllmEngine

    model = make_tiny_checkpoint(tmp_path, "qwen3", hidden=64)
    with pytest.raises(EngineError, match=r"routing_replay=true: .* has no mixtures of experts"):
        await VllmEngine.start(settings(model), seed=0)
