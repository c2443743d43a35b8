"""The core of an engine behind our interface, whatever library it is of, and the thread of a core in this process.

Input: requests, and calls of a worker's methods.  Output: one FinishedSample for each request.

Guarantees of every core.  While paused nothing is sampled, and counts() is the number of tokens of every request:
weights that are loaded before resume() sample the tokens from that number on.

In this file: the interface; a core that is driven step by step on a thread (CoreThread), for any SteppedCore.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.data.tokenizer import StopSearch
from rlhpc.generation.requests import PartialCompletion, PromptScores
from rlhpc.protocol.types import Float32

YIELD_S = 0.001  # while requests wait and none can be scheduled
LAST_STEP_S = 30.0  # at the exit of the process, for the last step and the library's teardown


class CoreDied(Exception):
    """The engine core raised, or was shut down; every further call fails."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Sizes of a core."""

    longest_tokens: int  # of a prompt with its completion
    vocabulary: int
    kv_tokens: int  # in its KV cache
    block_tokens: int  # allocation unit of the cache


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request as a core is given it."""

    request_id: str
    token_ids: list[int]  # of prompt and prefix
    salt: str  # cached keys and values of a prompt are those of requests with the same salt
    max_tokens: int = 1  # to sample
    temperature: float = 1.0  # 0: the likeliest token
    stop_token_ids: tuple[int, ...] = ()  # the completion ends with the first of them
    seed: int | None = None  # None: the core's own randomness
    adapter: int = 1  # its number, if the core holds any
    search: StopSearch | None = None  # for stop strings; it has read the prefix and is owned by the core from now on
    top_k: int | None = None  # the row is scored, ahead of the queue, with so many tokens in each place; None: sampled
    task: str | None = None  # "classify" or "token_classify", of a model that pools; None: sampled or scored
    use_activation: bool = False  # of the model, for a task


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A core's result for a request: its completion, or the scores of its prompt."""

    num_prompt_tokens: int
    completion: PartialCompletion  # whole
    prompt_scores: PromptScores | None  # None: not asked for
    pooled: Float32 | None = None  # of a model that pools; None: it samples
    experts: NDArray[Any] | None = None  # [tokens, layers, k] of prompt and completion, if the core itself tells


class RunningCore(ABC):
    """A running engine core.  Every method raises its library's errors, and CoreDied."""

    limits: CoreLimits

    @abstractmethod
    async def sample(self, asked: CoreRequest) -> FinishedSample:
        """Return a request's result when it has ended; if the caller is cancelled, the request is aborted.

        Tokens behind a stop string are not counted, shown or returned.  Raises ValueError if the core refuses the
        request.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Have a request end with the tokens it has; does not wait for its end."""

    @abstractmethod
    def num_tokens(self, request_id: str) -> int:
        """Number of tokens sampled for a request so far; 0 if it has ended."""

    @abstractmethod
    def sampled_so_far(self, request_id: str, first: int) -> PartialCompletion | None:
        """A request's tokens from number `first` on; None: there is none, or the request has ended."""

    @abstractmethod
    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every worker between two steps."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop after the current step and keep requests."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume decoding."""

    @abstractmethod
    async def counts(self) -> dict[str, int]:
        """Number of tokens of each request that has one; for a core that is paused.

        A request that ends about now may be left out.
        """

    @abstractmethod
    async def recompute(self) -> None:
        """Forget cached prompts, and the keys and values of running requests, which are recomputed."""

    @abstractmethod
    def shutdown(self, timeout: float) -> None:
        """End the core; pending calls raise.  Blocks for at most `timeout`."""


def device_here() -> str:
    """ "cuda" where there is a device, else "cpu"."""
    import torch  # takes a second; a part of this module is used without

    return "cuda" if torch.cuda.is_available() else "cpu"


def num_gpus_here() -> int:
    """GPUs of this machine, those that this process may not use included: their engines share the host's memory."""
    return sum(1 for _ in Path("/proc/driver/nvidia/gpus").glob("*"))


# ----------------------------------------------------------------------------------------------------- core on a thread
#
# The core is used only on its thread, between two steps, in the order of the calls.  A request that ends before a call
# is executed has ended for its caller before the call returns.


@dataclass(slots=True)
class StepOutput:
    """A request's share of a step."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]  # of these tokens, natural log
    finish_reason: str | None = None  # None: it goes on
    prompt_scores: PromptScores | None = None
    pooled: Float32 | None = None


class SteppedCore(ABC):
    """A library's engine core, as its thread drives it.  Only request_of() is called on another one."""

    limits: CoreLimits

    @abstractmethod
    def request_of(self, asked: CoreRequest) -> Any:
        """Return the request in the library's form.  Raises ValueError if it is refused."""

    @abstractmethod
    def add(self, request: Any) -> None:
        """Queue a request that request_of() has made."""

    @abstractmethod
    def abort(self, request_id: str) -> bool:
        """Forget a request; return whether it was known."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Return whether a step may have something to do."""

    @abstractmethod
    def step(self) -> tuple[list[StepOutput], bool]:
        """Run one step; return what it has made, and False if nothing could be scheduled."""

    @abstractmethod
    def call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Call a method of every worker."""

    @abstractmethod
    def recompute(self) -> None:
        """See RunningCore."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything."""


@dataclass(slots=True)
class _Sample:
    """A request that the core has or will have.  Only the core's thread appends."""

    num_prompt_tokens: int
    ended: asyncio.Future[FinishedSample]
    search: StopSearch | None = None  # for stop strings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the sampled tokens, natural log
    prompt_scores: PromptScores | None = None
    pooled: Float32 | None = None

    def take(self, output: StepOutput) -> str | None:
        """Add a step's output for the request; return why the request has ended, if it has.

        Tokens after the one that completes a stop string are dropped.
        """
        tokens, reason = output.token_ids, output.finish_reason
        if self.search is not None:
            num_before = self.search.num_tokens
            if self.search.read(tokens) is not None:
                tokens, reason = tokens[: self.search.num_tokens - num_before], "stop"
        self.logprobs.extend(output.logprobs[: len(tokens)])
        if output.prompt_scores is not None:
            self.prompt_scores = output.prompt_scores
        if output.pooled is not None:
            self.pooled = output.pooled
        self.token_ids.extend(tokens)
        return reason

    def so_far(self, first: int) -> PartialCompletion | None:
        """The completion from token `first` on; None: there is none."""
        num_known = min(len(self.token_ids), len(self.logprobs))  # the thread may be between the two
        if num_known <= first:
            return None
        return PartialCompletion(
            self.token_ids[first:num_known], np.asarray(self.logprobs[first:num_known], np.float32)
        )

    def finished(self, reason: str) -> FinishedSample:
        completion = PartialCompletion(self.token_ids, np.asarray(self.logprobs, np.float32), reason)
        return FinishedSample(self.num_prompt_tokens, completion, self.prompt_scores, self.pooled)


class CoreThread(RunningCore):
    """A core, its thread, and its requests.  Methods are called in the event loop that started it."""

    def __init__(self, make_core: Callable[[], SteppedCore]) -> None:
        """Make the core on a thread of its own; blocks until it is ready.  Raises as make_core."""
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._samples: dict[str, _Sample] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._death = ""  # why every further call fails
        self._must_stop = False  # set on the core's thread, as the next
        self._is_paused = False
        self._core: Any = None  # a SteppedCore until the thread ends
        self._start_error: BaseException | None = None
        self._make_core = make_core
        self._request_of: Callable[[CoreRequest], Any]
        is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_ready,), name="engine", daemon=True)
        self._thread.start()
        # A thread that is inside torch when the interpreter exits ends the process with SIGABRT.
        atexit.register(self._end_before_exit)
        is_ready.wait()
        if self._start_error is not None:
            raise self._start_error

    # ------------------------------------------------------------------------------------------------- requests

    async def sample(self, asked: CoreRequest) -> FinishedSample:
        """See RunningCore."""
        self._require_life()
        request, request_id = self._request_of(asked), asked.request_id
        ended: asyncio.Future[FinishedSample] = self._loop.create_future()
        sample = self._samples[request_id] = _Sample(len(asked.token_ids), ended, asked.search)
        self._commands.put(partial(self._add, request, sample))
        try:
            finished: FinishedSample = await self._answer(sample.ended)
        finally:
            del self._samples[request_id]
            if not sample.ended.done() or sample.ended.cancelled():
                self._commands.put(partial(self._abort_quietly, request_id))
        return finished

    async def abort(self, request_id: str) -> None:
        """See RunningCore."""
        self._require_life()
        self._commands.put(partial(self._abort, request_id))

    def num_tokens(self, request_id: str) -> int:
        """See RunningCore."""
        sample = self._samples.get(request_id)
        return len(sample.token_ids) if sample is not None else 0

    def sampled_so_far(self, request_id: str, first: int) -> PartialCompletion | None:
        """See RunningCore."""
        sample = self._samples.get(request_id)
        return sample.so_far(first) if sample is not None else None

    # --------------------------------------------------------------------------------------------------- calls

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """See RunningCore."""
        result: list[Any] = await self._ask(lambda: self._core.call(method, args))
        return result

    async def pause(self) -> None:
        """See RunningCore."""
        await self._ask(partial(self._set_paused, True))

    async def resume(self) -> None:
        """See RunningCore."""
        await self._ask(partial(self._set_paused, False))

    async def counts(self) -> dict[str, int]:
        """See RunningCore."""
        counted: dict[str, int] = await self._ask(self._counts)
        return counted

    async def recompute(self) -> None:
        """See RunningCore."""
        await self._ask(lambda: self._core.recompute())

    def shutdown(self, timeout: float) -> None:
        """See RunningCore."""
        self._end(timeout)
        self._fail("it was shut down")

    def _end(self, timeout: float) -> None:
        self._commands.put(self._stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            atexit.unregister(self._end_before_exit)

    def _end_before_exit(self) -> None:
        self._end(LAST_STEP_S)

    # --------------------------------------------------------------------------------------------- on the loop

    async def _ask(self, work: Callable[[], Any]) -> Any:
        self._require_life()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put(partial(self._do, work, future))
        return await self._answer(future)

    async def _answer(self, future: asyncio.Future[Any]) -> Any:
        self._asked.add(future)
        try:
            return await future
        finally:
            self._asked.discard(future)

    def _deliver(self, ended: list[tuple[_Sample, str]]) -> None:
        for sample, reason in ended:
            if not sample.ended.done():
                sample.ended.set_result(sample.finished(reason))

    def _fail(self, why: str) -> None:
        self._death = self._death or why
        for future in list(self._asked):
            if not future.done():
                future.set_exception(CoreDied(self._death))

    def _require_life(self) -> None:
        if self._death:
            raise CoreDied(self._death)

    # -------------------------------------------------------------------------------------- on the core's thread

    def _run(self, is_ready: threading.Event) -> None:
        try:
            self._core = self._make_core()
            self.limits, self._request_of = self._core.limits, self._core.request_of
        except BaseException as error:  # noqa: BLE001 - reaches the caller of __init__
            self._start_error = error
            return
        finally:
            is_ready.set()
        try:
            while not self._must_stop:
                self._obey()
                if not self._must_stop and self._has_work():
                    self._step()
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread must reach those who wait
            self._tell(partial(self._fail, repr(error)))
        finally:
            self._core.shutdown()
            self._core = None

    def _has_work(self) -> bool:
        return not self._is_paused and bool(self._core.has_requests())

    def _obey(self) -> None:
        """Run the queued commands; waits for one if there is nothing to sample."""
        if not self._has_work():
            self._commands.get()()
        while not self._must_stop and not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        outputs, was_executed = self._core.step()
        ended = []
        for output in outputs:
            sample = self._samples.get(output.request_id)
            if sample is None or (reason := sample.take(output)) is None:
                continue
            ended.append((sample, reason))
            if output.finish_reason is None:  # a stop string, unknown to the core
                self._core.abort(output.request_id)
        if ended:
            self._tell(partial(self._deliver, ended))
        if not was_executed and self._core.has_requests():
            time.sleep(YIELD_S)

    def _add(self, request: Any, sample: _Sample) -> None:
        if not sample.ended.cancelled():
            self._core.add(request)

    def _abort(self, request_id: str) -> None:
        sample = self._samples.get(request_id)
        if self._core.abort(request_id) and sample is not None:
            self._tell(partial(self._deliver, [(sample, "abort")]))

    def _abort_quietly(self, request_id: str) -> None:
        self._core.abort(request_id)

    def _counts(self) -> dict[str, int]:
        counted = {request_id: len(sample.token_ids) for request_id, sample in self._samples.copy().items()}
        return {request_id: number for request_id, number in counted.items() if number}

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _do(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - reaches the caller
            self._tell(partial(_settle, future, None, error))
        else:
            self._tell(partial(_settle, future, result, None))

    def _stop(self) -> None:
        self._must_stop = True

    def _tell(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(callback)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # not allowed in futures
        future.set_exception(CoreDied(repr(error)))
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
