"""Run vLLM's engine core on a thread of this process, with one notification per request: when it ends.

Input: requests, and calls of the worker extension.  Output: one FinishedSample for each request.  Where there is one
worker on CPU this replaces AsyncLLM, and has those of its methods that we call.  AsyncLLM has a process for the
core, sends it every request through a socket, and gets a message with every request's newest token after every step
(docs/decisions/036-the-engine-core-in-the-generators-process.md has the cost).

Guarantees.  The engine is used only on its thread, between two steps, in the order of the calls.  A request that ends
before a call is executed has ended for its caller before the call returns.  The tokens of each request are counted on
that thread: a call that loads weights knows exactly which tokens are older than the weights.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhpc.data.tokenizer import StopSearch
from rlhpc.generation.vllm_requests import FlatPart, PartialCompletion
from rlhpc.protocol.types import Float32

YIELD_S = 0.001  # where requests wait and none can be scheduled
LAST_STEP_S = 30.0  # at the exit of the process, for the step and what vLLM tears down
MakeRequest = Callable[[dict[str, Any], Any, str, int], Any]  # raises ValueError for what is refused


class CoreDied(Exception):
    """The engine core raised, or was shut down; nothing more can be asked of it."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """The fields of vLLM's RequestOutput that we read."""

    prompt_token_ids: list[int]
    outputs: list[PartialCompletion]  # one
    prompt_logprobs: Float32 | None  # [T − 1], of every token of the prompt but the first


@dataclass(slots=True)
class _Sample:
    """A request that the core has or will have.  Only the engine's thread appends."""

    prompt_token_ids: list[int]
    ended: asyncio.Future[FinishedSample]
    search: StopSearch | None = None  # for stop strings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the sampled tokens, natural log
    prompt_logprobs: Float32 | None = None

    def take(self, output: Any) -> str | None:
        """Add what a step made for it, vLLM's EngineCoreOutput; return why it has ended, if it has.

        Nothing is added after the token that completes a stop string.
        """
        tokens, logprobs = output.new_token_ids, output.new_logprobs
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if self.search is not None:
            num_before = self.search.num_tokens
            if self.search.read(tokens) is not None:
                tokens, reason = tokens[: self.search.num_tokens - num_before], "stop"
        if logprobs is not None and tokens:  # the sampled token's own are in the first column
            self.logprobs.extend(logprobs.logprobs[: len(tokens), 0].tolist())
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors.logprobs[:, 0].float().numpy()
        self.token_ids.extend(tokens)
        return reason

    def so_far(self, first: int, reason: str = "abort") -> PartialCompletion | None:
        """The completion from token `first` on; None: there is none."""
        num_known = min(len(self.token_ids), len(self.logprobs))  # the thread may be between the two
        if num_known <= first and reason == "abort":
            return None
        part = FlatPart(self.logprobs[first:num_known], range(num_known - first))
        return PartialCompletion(self.token_ids[first:num_known], part, reason)

    def finished(self, reason: str) -> FinishedSample:
        completion = PartialCompletion(self.token_ids, FlatPart(self.logprobs, range(len(self.logprobs))), reason)
        return FinishedSample(self.prompt_token_ids, [completion], self.prompt_logprobs)


class CoreThread:
    """An engine core, its thread, and the requests it has.  Methods are for the event loop it was started in."""

    def __init__(self, vllm_config: Any, make_core: Callable[[], Any], make_request: MakeRequest) -> None:
        """Make the core on a thread of its own; blocks until it is ready.  Raises what make_core raises.

        make_core: vLLM's EngineCore.  make_request: (prompt, parameters, id, priority) → what the core takes.
        """
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._samples: dict[str, _Sample] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._death = ""  # why nothing can be asked any more
        self._must_stop = False  # set on the engine's thread
        self._core: Any = None
        self._start_error: BaseException | None = None
        self.vllm_config, self._make_core, self._make_request = vllm_config, make_core, make_request
        is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_ready,), name="engine", daemon=True)
        self._thread.start()
        # A thread that is inside torch when the interpreter exits ends the process with SIGABRT.
        atexit.register(self._end_before_exit)
        is_ready.wait()
        if self._start_error is not None:
            raise self._start_error

    @classmethod
    def of_vllm(cls, engine_args: Any) -> CoreThread:
        """A core by vLLM's engine arguments.  Raises what vLLM raises."""
        vllm_config = engine_args.create_engine_config()
        return cls(vllm_config, partial(_engine_core, vllm_config), _request_maker(vllm_config))

    # ------------------------------------------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: dict[str, Any],
        params: Any,
        request_id: str,
        *,
        priority: int = 0,
        search: StopSearch | None = None,
    ) -> AsyncIterator[FinishedSample]:
        """Yield the request's one output, when it has ended.  Closed or cancelled before, it is aborted.

        prompt: "prompt_token_ids" and "cache_salt".  search: for stop strings; the engine's thread has it from now on.
        Raises ValueError for what vLLM refuses; CoreDied.
        """
        self._require_life()
        request = self._make_request(prompt, params, request_id, priority)
        ended: asyncio.Future[FinishedSample] = self._loop.create_future()
        sample = self._samples[request_id] = _Sample(prompt["prompt_token_ids"], ended, search)
        self._commands.put(partial(self._add, request))
        try:
            yield await self._answer(sample.ended)
        finally:
            del self._samples[request_id]
            if not sample.ended.done() or sample.ended.cancelled():
                self._commands.put(partial(self._abort_quietly, request_id))

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens it has; returns once that has been requested."""
        self._require_life()
        self._commands.put(partial(self._abort, request_id))

    def num_tokens(self, request_id: str) -> int:
        """Tokens sampled for it so far."""
        sample = self._samples.get(request_id)
        return len(sample.token_ids) if sample is not None else 0

    def sampled_so_far(self, request_id: str, first: int) -> PartialCompletion | None:
        """Its tokens from number `first` on; None: there is none, or the request has ended."""
        sample = self._samples.get(request_id)
        return sample.so_far(first) if sample is not None else None

    # --------------------------------------------------------------------------------------------------- calls

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of the worker between two steps.  Raises what it raises, and CoreDied."""
        result: list[Any] = await self._ask(lambda: self._core.collective_rpc(method, args=args))
        return result

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool = False) -> None:
        """Stop after the current step and keep requests; the arguments are AsyncLLM's."""
        assert mode == "keep"
        assert not clear_cache
        await self._set_paused(True)

    async def resume_generation(self) -> None:
        """Resume decoding."""
        await self._set_paused(False)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached prompts; reset_running_requests: also recompute those of running requests."""
        return bool(await self._ask(lambda: self._core.reset_prefix_cache(reset_running_requests)))

    async def count_for(self, register: str) -> None:
        """Give `register`, a method of the worker, the function that counts every request's tokens."""
        await self.collective_rpc(register, args=(self._counts,))

    def shutdown(self, timeout: float) -> None:
        """End the thread, and with it the engine; pending calls raise CoreDied.  Blocks for at most `timeout`."""
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

    async def _set_paused(self, is_paused: bool) -> None:
        from vllm.v1.core.sched.interface import PauseState  # vLLM is imported after its environment is set

        state = PauseState.PAUSED_ALL if is_paused else PauseState.UNPAUSED
        await self._ask(lambda: self._core.scheduler.set_pause_state(state))

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

    # ------------------------------------------------------------------------------------ on the engine's thread

    def _run(self, is_ready: threading.Event) -> None:
        try:
            self._core = self._make_core()
        except BaseException as error:  # noqa: BLE001 - reaches the caller of __init__
            self._start_error = error
            return
        finally:
            is_ready.set()
        try:
            while not self._must_stop:
                self._obey()
                if not self._must_stop and self._core.scheduler.has_requests():
                    self._step()
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread must reach those who wait
            self._tell(partial(self._fail, repr(error)))
        finally:
            self._core.shutdown()
            self._core = None

    def _obey(self) -> None:
        """Run the commands in the queue; waits for one if there is nothing to sample."""
        if not self._core.scheduler.has_requests():
            self._commands.get()()
        while not self._must_stop and not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        outputs, was_executed = self._core.step_fn()
        self._core.post_step(was_executed)
        ended = []
        for per_client in (outputs or {}).values():
            for output in per_client.outputs:
                sample = self._samples.get(output.request_id)
                if sample is None or (reason := sample.take(output)) is None:
                    continue
                ended.append((sample, reason))
                if output.finish_reason is None:  # a stop string, of which the core knows nothing
                    self._core.abort_requests([output.request_id])
        if ended:
            self._tell(partial(self._deliver, ended))
        if not was_executed and self._core.scheduler.has_requests():
            time.sleep(YIELD_S)

    def _add(self, request: Any) -> None:
        self._core.add_request(*self._core.preprocess_add_request(request))

    def _abort(self, request_id: str) -> None:
        sample, is_known = self._samples.get(request_id), request_id in self._core.scheduler.requests
        self._core.abort_requests([request_id])
        if sample is not None and is_known:
            self._tell(partial(self._deliver, [(sample, "abort")]))

    def _abort_quietly(self, request_id: str) -> None:
        self._core.abort_requests([request_id])

    def _counts(self) -> dict[str, int]:
        return {request_id: len(sample.token_ids) for request_id, sample in self._samples.copy().items()}

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
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            self._loop.call_soon_threadsafe(callback)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _engine_core(vllm_config: Any) -> Any:
    # vLLM is imported after its environment is set (vllm_start.py).
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    with _unseen("llvmlite.binding.ffi"):
        return EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)


@contextlib.contextmanager
def _unseen(module: str) -> Iterator[None]:
    """Hide a module from vLLM 0.32: for its objects vars() returns no dictionary.

    vLLM searches all loaded modules for kernels to replace (triton_utils/dispatcher.py).
    """
    hidden = sys.modules.pop(module, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[module] = hidden


def _request_maker(vllm_config: Any) -> MakeRequest:
    """Makes vLLM's EngineCoreRequest; raises ValueError for what vLLM refuses."""
    # As above.
    from vllm.inputs.engine import tokens_input
    from vllm.renderers.registry import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor

    processor = InputProcessor(vllm_config, renderer_from_config(vllm_config))

    def request_of(prompt: dict[str, Any], params: Any, request_id: str, priority: int) -> Any:
        tokens = tokens_input(prompt["prompt_token_ids"], cache_salt=prompt["cache_salt"])
        return processor.process_inputs(request_id, tokens, params, ("generate",), priority=priority)

    return request_of
