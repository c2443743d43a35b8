"""The core of an engine on a thread of its own, whatever library it is of."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rlhpc.data.tokenizer import StopSearch
from rlhpc.generation import running_core
from rlhpc.generation.running_core import (
    CoreDied,
    CoreLimits,
    CoreRequest,
    CoreThread,
    FinishedSample,
    StepOutput,
    SteppedCore,
)
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


class CountingCore(SteppedCore):
    """A request's tokens are the numbers of the steps that sampled them."""

    limits = CoreLimits(1 << 20, 1 << 20, 1 << 20, 1)

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}  # id → [tokens to go]
        self.num_steps = 0
        self.is_down = False
        self.thread = threading.current_thread()

    def request_of(self, asked: CoreRequest) -> tuple[str, int]:
        return asked.request_id, asked.max_tokens

    def add(self, request: tuple[str, int]) -> None:
        self.requests[request[0]] = [request[1]]

    def abort(self, request_id: str) -> bool:
        return self.requests.pop(request_id, None) is not None

    def has_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> tuple[list[StepOutput], bool]:
        assert threading.current_thread() is self.thread
        outputs = []
        for request_id, left in list(self.requests.items()):
            left[0] -= 1
            reason = "length" if left[0] == 0 else None
            outputs.append(StepOutput(request_id, [self.num_steps], [-0.5 * self.num_steps], reason))
            if reason:
                del self.requests[request_id]
        self.num_steps += 1
        return outputs, True

    def call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "fail":
            raise KeyError("no such method")
        return [self.num_steps]

    def recompute(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_down = True


@pytest_asyncio.fixture
async def thread() -> AsyncIterator[CoreThread]:
    made = CoreThread(CountingCore)
    yield made
    made.shutdown(PATIENCE_S)


def core_of(thread: CoreThread) -> CountingCore:
    core = thread._core
    assert isinstance(core, CountingCore)
    return core


async def sample(thread: CoreThread, request_id: str, num_tokens: int) -> FinishedSample:
    return await thread.sample(CoreRequest(request_id, [1, 2], "", num_tokens))


def numbers(token_ids: Sequence[int]) -> str:
    return "".join(f"{token_id}." for token_id in token_ids)


async def test_of_a_step_with_several_tokens_those_behind_a_stop_string_are_dropped() -> None:
    taking = running_core._Sample(1, asyncio.get_running_loop().create_future(), StopSearch(numbers, ["7."]))
    output = StepOutput("r", [6, 7, 8], [-1.0, -2.0, -3.0], "length")
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
    core.step = "no function"  # type: ignore[assignment]
    with pytest.raises(CoreDied, match="not callable"):
        await asyncio.wait_for(running, PATIENCE_S)
    with pytest.raises(CoreDied):
        await sample(thread, "s", 1)
    with pytest.raises(CoreDied):
        await thread.collective_rpc("anything")
    thread._thread.join(PATIENCE_S)
    assert core.is_down


async def test_a_core_that_cannot_be_made_says_why() -> None:
    def refuse() -> SteppedCore:
        raise MemoryError("the cache does not fit")

    with pytest.raises(MemoryError, match="does not fit"):
        CoreThread(refuse)


async def test_a_call_that_runs_out_of_items_fails_and_is_not_waited_for(thread: CoreThread) -> None:
    """next() of nothing, somewhere in the library: no future takes a StopIteration."""
    core_of(thread).call = lambda method, args: next(iter(()))  # type: ignore[method-assign]
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
        "from tests.unit.generation.test_running_core import CountingCore, CoreThread\n"
        "class Slow(CountingCore):\n"
        "    def shutdown(self):\n"
        "        time.sleep(0.5)\n"
        "        print('torn down', flush=True)\n"
        "async def main():\n"
        "    thread = CoreThread(Slow)\n"
        "    thread.shutdown(0.0)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    said, _ = await done.communicate()
    assert (said, done.returncode) == (b"torn down\n", 0)
