"""vLLM's engine core in processes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from rlhpc.generation.running_core import CoreRequest
from rlhpc.generation.vllm_core import OF_ASYNC_LLM, CoreProcesses, require
from rlhpc.protocol.errors import EngineError


class FrontEnd:
    """What is called of AsyncLLM: outputs of steps come in a queue, and a task of its own gives them to requests."""

    def __init__(self) -> None:
        self.engine_core = self.output_processor = self
        self.outputs_queue: asyncio.Queue[dict[str, list[int]]] = asyncio.Queue()
        self.request_states: dict[str, Any] = {}
        self.external_req_ids: dict[str, list[str]] = {}
        self.ended: dict[str, asyncio.Future[list[int]]] = {}
        model = SimpleNamespace(max_model_len=99, get_vocab_size=lambda: 99)
        cache = SimpleNamespace(num_gpu_blocks=9, block_size=8)
        self.vllm_config = SimpleNamespace(lora_config=None, model_config=model, cache_config=cache)
        self.errored, self.dead_error = False, RuntimeError("the core is dead")
        self.handing_out: asyncio.Task[None] | None = None

    async def get_output_async(self) -> dict[str, list[int]]:
        return await self.outputs_queue.get()

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        assert lora_request is None
        name = f"{request_id}-suffix"
        detokenizer = SimpleNamespace(output_token_ids=list[int](), limit=params.max_tokens)
        self.request_states[name] = SimpleNamespace(detokenizer=detokenizer)
        self.external_req_ids[request_id] = [name]
        self.ended[name] = asyncio.get_running_loop().create_future()
        self.handing_out = self.handing_out or asyncio.create_task(self._hand_out())
        tokens = await self.ended[name]
        flat = SimpleNamespace(logprobs=[-1.0] * len(tokens), start_indices=list(range(len(tokens))))
        completion = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason="length")
        yield SimpleNamespace(outputs=[completion], prompt_token_ids=[1, 2], prompt_logprobs=None)

    async def _hand_out(self) -> None:
        while True:
            for name, tokens in (await self.engine_core.get_output_async()).items():
                await asyncio.sleep(0)  # as between vLLM's chunks
                detokenizer = self.request_states[name].detokenizer
                detokenizer.output_token_ids.extend(tokens)
                if len(detokenizer.output_token_ids) >= detokenizer.limit:
                    del self.request_states[name], self.external_req_ids[name.removesuffix("-suffix")]
                    self.ended[name].set_result(detokenizer.output_token_ids)

    abort = collective_rpc = pause_generation = resume_generation = reset_prefix_cache = shutdown = None


async def test_what_left_the_core_before_a_pause_is_counted_though_the_front_end_has_not_seen_it_yet() -> None:
    llm = FrontEnd()
    core = CoreProcesses(llm)
    assert await core.counts() == {}
    running = [asyncio.create_task(core.sample(CoreRequest(f"r{n}", [1, 2], "", 3 + n))) for n in range(9)]
    await asyncio.sleep(0)
    for num_steps in range(1, 12):
        llm.outputs_queue.put_nowait({name: [num_steps] for name in llm.request_states})
        left = [task for n, task in enumerate(running) if 3 + n > num_steps]
        assert await core.counts() == {f"r{9 - len(left) + n}": num_steps for n in range(len(left))}
        assert [task for task in running if not task.done()] == left
    assert [len((await task).completion.token_ids) for task in running] == list(range(3, 12))
    assert core.num_tokens("r0") == 0
    llm.outputs_queue.put_nowait({})
    llm.errored = True
    with pytest.raises(RuntimeError, match="the core is dead"):
        await core.counts()


async def test_a_vllm_that_lacks_something_is_refused_by_version_and_name() -> None:
    llm = FrontEnd()
    require(OF_ASYNC_LLM, of=llm, called="AsyncLLM")
    del llm.external_req_ids, llm.outputs_queue
    with pytest.raises(EngineError, match=r"vLLM 0\.\S+ has no .*outputs_queue, AsyncLLM.*external_req_ids: without"):
        CoreProcesses(llm)
