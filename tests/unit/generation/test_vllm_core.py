"""The engine core on a thread of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from vllm.v1.core.sched.interface import PauseState

from rlhpc.data.tokenizer import StopSearch
from rlhpc.generation import vllm_core
from rlhpc.generation.vllm_core import OF_ASYNC_LLM, CoreDied, CoreProcesses, CoreThread, FinishedSample, require
from rlhpc.protocol.errors import EngineError
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


class CountingCore:
    """What is called of vLLM's EngineCore.  A request's tokens are the numbers of the steps that sampled them."""

    def __init__(self) -> None:
        self.scheduler = self
        self.requests: dict[str, list[int]] = {}  # id → [tokens to go]
        self.num_steps = 0
        self.is_paused = False
        self.is_down = False
        self.thread = threading.current_thread()

    def has_requests(self) -> bool:
        return bool(self.requests) and not self.is_paused

    def set_pause_state(self, state: PauseState) -> None:
        self.is_paused = state is PauseState.PAUSED_ALL

    def preprocess_add_request(self, request: tuple[str, int]) -> tuple[tuple[str, int], int]:
        return request, 0

    def add_request(self, request: tuple[str, int], wave: int) -> None:
        self.requests[request[0]] = [request[1]]

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        assert threading.current_thread() is self.thread
        outputs = []
        for request_id, left in list(self.requests.items()):
            left[0] -= 1
            logprobs = SimpleNamespace(logprobs=np.asarray([[-0.5 * self.num_steps, -9.0]], np.float32))
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    new_token_ids=[self.num_steps],
                    new_logprobs=logprobs,
                    new_prompt_logprobs_tensors=None,
                    pooling_output=None,
                    finish_reason="length" if left[0] == 0 else None,
                )
            )
            if left[0] == 0:
                del self.requests[request_id]
        self.num_steps += 1
        return {0: SimpleNamespace(outputs=outputs)}, True

    def post_step(self, was_executed: bool) -> None:
        pass

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "fail":
            raise KeyError("no such method")
        return [self.num_steps]

    def shutdown(self) -> None:
        self.is_down = True


@pytest_asyncio.fixture
async def thread() -> AsyncIterator[CoreThread]:
    made = CoreThread(None, CountingCore, lambda prompt, params, request_id, *rest: (request_id, params))
    yield made
    made.shutdown(PATIENCE_S)


def core_of(thread: CoreThread) -> CountingCore:
    core = thread._core
    assert isinstance(core, CountingCore)
    return core


async def sample(thread: CoreThread, request_id: str, num_tokens: int) -> FinishedSample:
    prompt = {"prompt_token_ids": [1, 2], "cache_salt": ""}
    return await thread.sample(prompt, num_tokens, request_id)


def numbers(token_ids: Sequence[int]) -> str:
    return "".join(f"{token_id}." for token_id in token_ids)


async def test_of_a_step_with_several_tokens_those_behind_a_stop_string_are_dropped() -> None:
    taking = vllm_core._Sample(1, asyncio.get_running_loop().create_future(), StopSearch(numbers, ["7."]))
    logprobs = SimpleNamespace(logprobs=np.asarray([[-1.0], [-2.0], [-3.0]], np.float32))
    output = SimpleNamespace(
        new_token_ids=[6, 7, 8],
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=None,
        pooling_output=None,
        finish_reason="length",
    )
    assert taking.take(output) == "stop"
    assert (taking.token_ids, taking.logprobs) == ([6, 7], [-1.0, -2.0])


async def test_while_it_is_paused_the_tokens_of_every_request_are_counted(thread: CoreThread) -> None:
    running = [asyncio.create_task(sample(thread, f"r{n}", 1 + 37 * n % 400)) for n in range(60)]
    loads = list[tuple[int, dict[str, int]]]()  # steps before it, and what was counted
    for _ in range(40):
        await asyncio.sleep(0)
        await thread.pause()
        (before,) = await thread.collective_rpc("load")
        counts = await thread.counts()
        assert await thread.collective_rpc("load") == [before]
        loads.append((before, counts))
        await thread.resume()
    tokens = {f"r{n}": (await task).completion.token_ids for n, task in enumerate(running)}
    for num_steps, counts in loads:
        assert counts == {name: sum(step < num_steps for step in tokens[name]) for name in counts}
        for name in tokens.keys() - counts.keys():  # it has ended, or has not begun
            assert tokens[name][-1] < num_steps or tokens[name][0] >= num_steps


async def test_what_ended_before_a_call_has_ended_when_the_call_returns(thread: CoreThread) -> None:
    core = core_of(thread)
    for number in range(50):
        task = asyncio.create_task(sample(thread, f"r{number}", 3))
        await asyncio.sleep(0)
        while f"r{number}" in thread._samples and thread.num_tokens(f"r{number}") < 3:
            await thread.collective_rpc("anything")
        await thread.collective_rpc("anything")
        assert f"r{number}" not in core.requests
        assert task.done() or thread._samples[f"r{number}"].ended.done()
        await task


async def test_an_error_of_a_call_reaches_its_caller_and_nobody_else(thread: CoreThread) -> None:
    with pytest.raises(KeyError):
        await thread.collective_rpc("fail")
    assert len((await sample(thread, "r", 2)).completion.token_ids) == 2


async def test_a_step_that_fails_fails_all_that_is_asked_and_all_that_will_be(thread: CoreThread) -> None:
    core = core_of(thread)
    running = asyncio.create_task(sample(thread, "r", 10**9))
    await asyncio.sleep(0)
    core.post_step = "no function"  # type: ignore[assignment]
    with pytest.raises(CoreDied, match="not callable"):
        await asyncio.wait_for(running, PATIENCE_S)
    with pytest.raises(CoreDied):
        await sample(thread, "s", 1)
    with pytest.raises(CoreDied):
        await thread.collective_rpc("anything")
    thread._thread.join(PATIENCE_S)
    assert core.is_down


async def test_a_core_that_cannot_be_made_says_why() -> None:
    def refuse() -> None:
        raise MemoryError("the cache does not fit")

    with pytest.raises(MemoryError, match="does not fit"):
        CoreThread(None, refuse, lambda *_: None)


async def test_a_call_that_runs_out_of_items_fails_and_is_not_waited_for(thread: CoreThread) -> None:
    """next() of nothing, somewhere in vLLM: no future takes a StopIteration."""
    core_of(thread).collective_rpc = lambda method, args: next(iter(()))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(CoreDied, match="StopIteration"):
            await thread.collective_rpc("anything")


async def test_shutdown_ends_thread_and_core_and_fails_what_waits(thread: CoreThread) -> None:
    core, running = core_of(thread), asyncio.create_task(sample(thread, "r", 10**9))
    await asyncio.sleep(0)
    thread.shutdown(PATIENCE_S)
    assert core.is_down
    assert not thread._thread.is_alive()
    with pytest.raises(CoreDied):
        await running


@pytest.mark.starts
async def test_a_process_that_exits_waits_for_the_step_that_is_under_way() -> None:
    """Torch within a thread that the interpreter ends ends the process with SIGABRT."""
    script = (
        "import asyncio, time\n"
        "from tests.unit.generation.test_vllm_core import CountingCore, CoreThread\n"
        "class Slow(CountingCore):\n"
        "    def shutdown(self):\n"
        "        time.sleep(0.5)\n"
        "        print('torn down', flush=True)\n"
        "async def main():\n"
        "    thread = CoreThread(None, Slow, lambda *_: None)\n"
        "    thread.shutdown(0.0)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    said, _ = await done.communicate()
    assert (said, done.returncode) == (b"torn down\n", 0)


# ---------------------------------------------------------------------------------------------------- core in processes


class FrontEnd:
    """What is called of AsyncLLM: outputs of steps come in a queue, and a task of its own gives them to requests."""

    def __init__(self) -> None:
        self.engine_core = self.output_processor = self
        self.outputs_queue: asyncio.Queue[dict[str, list[int]]] = asyncio.Queue()
        self.request_states: dict[str, Any] = {}
        self.external_req_ids: dict[str, list[str]] = {}
        self.ended: dict[str, asyncio.Future[list[int]]] = {}
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.errored, self.dead_error = False, RuntimeError("the core is dead")
        self.handing_out: asyncio.Task[None] | None = None

    async def get_output_async(self) -> dict[str, list[int]]:
        return await self.outputs_queue.get()

    async def generate(
        self, prompt: Any, params: int, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        assert lora_request is None
        name = f"{request_id}-suffix"
        detokenizer = SimpleNamespace(output_token_ids=list[int](), limit=params)
        self.request_states[name] = SimpleNamespace(detokenizer=detokenizer)
        self.external_req_ids[request_id] = [name]
        self.ended[name] = asyncio.get_running_loop().create_future()
        self.handing_out = self.handing_out or asyncio.create_task(self._hand_out())
        flat = SimpleNamespace(logprobs=[], start_indices=[])
        completion = SimpleNamespace(token_ids=await self.ended[name], logprobs=flat, finish_reason="length")
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
    prompt = {"prompt_token_ids": [1, 2], "cache_salt": ""}
    running = [asyncio.create_task(core.sample(prompt, 3 + n, f"r{n}")) for n in range(9)]
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
