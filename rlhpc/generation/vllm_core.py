"""vLLM's engine core behind our interface, in processes of AsyncLLM or on a thread of this process.

Input: requests, and calls of the worker extension.  Output: one FinishedSample for each request.  On CUDA, and with
several workers, the core is behind vLLM's AsyncLLM.  With one worker on CPU it runs on a thread: AsyncLLM would send
every request through a socket, and get a message with every request's newest token after every step
(docs/decisions/036-the-engine-core-in-the-generators-process.md has the cost).

Guarantees of both.  While paused nothing is sampled, and counts() is the number of tokens of every request, for any of
vLLM's model runners: weights that are loaded before resume() sample the tokens from that number on.  Undocumented
interfaces of vLLM that we need are checked once, at the start.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from rlhpc.data.tokenizer import StopSearch
from rlhpc.generation.vllm_requests import FlatPart, PartialCompletion, PromptScores
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import Float32

YIELD_S = 0.001  # while requests wait and none can be scheduled
LAST_STEP_S = 30.0  # at the exit of the process, for the last step and vLLM's teardown
MakeRequest = Callable[[dict[str, Any], Any, str, int, int], Any]  # raises ValueError for a refused request


class CoreDied(Exception):
    """The engine core raised, or was shut down; every further call fails."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """vLLM's result for a request: its completion, or the scores of its prompt."""

    num_prompt_tokens: int
    completion: PartialCompletion  # whole
    prompt_scores: PromptScores | None  # None: not asked for
    pooled: Float32 | None = None  # of a model that pools; None: it samples


class RunningCore(ABC):
    """A running engine core.  Every method raises vLLM's errors, and CoreDied."""

    vllm_config: Any

    @abstractmethod
    async def sample(
        self,
        prompt: dict[str, Any],
        params: Any,
        request_id: str,
        *,
        priority: int = 0,
        adapter: int = 1,
        search: StopSearch | None = None,
    ) -> FinishedSample:
        """Return a request's result when it has ended; if the caller is cancelled, the request is aborted.

        prompt: "prompt_token_ids" and "cache_salt".  adapter: its number, if the core holds any.  search: for stop
        strings; it has read the prefix and is owned by the core from now on; tokens behind a stop string are not
        counted, shown or returned.  Raises ValueError if vLLM refuses the request.
        """

    @abstractmethod
    async def pool(self, prompt: dict[str, Any], params: Any, request_id: str) -> Float32:
        """Return what a model that pools makes of a prompt, [C] or [T, C]; params: vLLM's PoolingParams.

        Raises ValueError if vLLM refuses the request.
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


# ------------------------------------------------------------------------------------------ required parts of vLLM

OF_ASYNC_LLM = (
    "generate abort collective_rpc pause_generation resume_generation reset_prefix_cache errored dead_error shutdown "
    "engine_core.get_output_async engine_core.outputs_queue output_processor.request_states "
    "output_processor.external_req_ids"
)
OF_DETOKENIZER = "output_token_ids"
OF_CORE = (
    "add_request preprocess_add_request abort_requests collective_rpc reset_prefix_cache step_fn post_step shutdown "
    "scheduler.has_requests scheduler.requests scheduler.set_pause_state"
)


def require(names: str, *, of: Any, called: str) -> None:
    """Raise EngineError if a part of vLLM lacks one of the attributes.  names: separated by spaces; called: by vLLM."""
    lacking = list[str]()
    for name in names.split():
        try:
            attrgetter(name)(of)
        except AttributeError:
            lacking.append(f"{called}.{name}")
    if lacking:
        from vllm import __version__  # as in _engine_core

        raise EngineError(
            f"vLLM {__version__} has no {', '.join(lacking)}: without, nothing tells how many tokens each request has "
            "when weights change; install a version of the range that pyproject.toml names"
        )


# ---------------------------------------------------------------------------------------------------- core in processes


@dataclass(slots=True)
class _FrontEndRequest:
    """A request that AsyncLLM was given."""

    search: StopSearch | None
    num_before: int  # tokens of the prefix, which the search had read

    @property
    def num_shown(self) -> int:
        """Number of tokens that are certainly not behind a stop string."""
        return sys.maxsize if self.search is None else self.search.num_tokens - self.num_before

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        """Search the unread tokens after the prefix; return the number of tokens up to a stop string."""
        if self.search is None or self.search.read(token_ids[self.num_shown :]) is None:
            return None
        return self.num_shown


class CoreProcesses(RunningCore):
    """A vLLM AsyncLLM, whose core and workers are processes of their own.

    Its front end, in this process, collects the tokens of each request; those of a step arrive before the reply to a
    pause.
    """

    def __init__(self, llm: Any) -> None:
        """llm: an unused AsyncLLM.  Raises EngineError for a vLLM that lacks a part we need."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # as in _engine_core

        require(OF_ASYNC_LLM, of=llm, called="AsyncLLM")
        require(OF_DETOKENIZER, of=IncrementalDetokenizer, called="IncrementalDetokenizer")
        self._llm, self.vllm_config = llm, llm.vllm_config
        self._asked: dict[str, _FrontEndRequest] = {}
        self._outputs, self._next_outputs = llm.engine_core.outputs_queue, llm.engine_core.get_output_async
        self._front_end_waits = True  # for outputs: all earlier ones have been passed to their requests
        llm.engine_core.get_output_async = self._outputs_for_front_end

    async def sample(
        self,
        prompt: dict[str, Any],
        params: Any,
        request_id: str,
        *,
        priority: int = 0,
        adapter: int = 1,
        search: StopSearch | None = None,
    ) -> FinishedSample:
        """See RunningCore."""
        lora = _adapter_of(self.vllm_config, adapter)
        asked = self._asked[request_id] = _FrontEndRequest(search, 0 if search is None else search.num_tokens)
        if search is not None:
            from vllm.sampling_params import RequestOutputKind  # as in _engine_core

            params.output_kind = RequestOutputKind.CUMULATIVE  # an output after every step, of all tokens so far
        try:
            answers = self._llm.generate(prompt, params, request_id, lora_request=lora, priority=priority)
            async with contextlib.aclosing(answers):  # aborts a request that has not ended
                async for answer in answers:
                    if (finished := _finished(answer, asked)) is not None:
                        return finished
        finally:
            del self._asked[request_id]
        raise CoreDied(f"vLLM ended {request_id} without an output")

    async def pool(self, prompt: dict[str, Any], params: Any, request_id: str) -> Float32:
        """See RunningCore."""
        async with contextlib.aclosing(self._llm.encode(prompt, params, request_id)) as answers:
            async for answer in answers:
                if answer.finished:
                    return _pooled(answer.outputs.data)
        raise CoreDied(f"vLLM ended {request_id} without an output")

    async def abort(self, request_id: str) -> None:
        """See RunningCore."""
        await self._llm.abort(request_id)

    def num_tokens(self, request_id: str) -> int:
        """See RunningCore."""
        asked = self._asked.get(request_id)
        return 0 if asked is None else min(self._num_sampled(request_id), asked.num_shown)

    def sampled_so_far(self, request_id: str, first: int) -> PartialCompletion | None:
        """See RunningCore."""
        asked, state = self._asked.get(request_id), self._state_of(request_id)
        if asked is None or state is None or state.logprobs_processor.logprobs is None:
            return None
        logprobs, token_ids = state.logprobs_processor.logprobs, state.detokenizer.output_token_ids
        starts = logprobs.start_indices
        end = min(len(token_ids), len(starts), asked.num_shown)
        if end <= first:
            return None
        begin = starts[first]  # a long completion is not copied for its last tokens
        part = FlatPart(logprobs.logprobs[begin:], [start - begin for start in starts[first:end]])
        return PartialCompletion(list(token_ids[first:end]), part)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """See RunningCore."""
        result: list[Any] = await self._llm.collective_rpc(method, args=args)
        return result

    async def pause(self) -> None:
        """See RunningCore."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """See RunningCore."""
        await self._llm.resume_generation()

    async def counts(self) -> dict[str, int]:
        """See RunningCore.  Awaits outputs that left the core before it paused."""
        while not (self._front_end_waits and self._outputs.empty()):
            if self._llm.errored:
                raise self._llm.dead_error
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # callers of ended requests get their results
        found = {request_id: self._num_sampled(request_id) for request_id in self._asked}
        return {request_id: number for request_id, number in found.items() if number}

    async def recompute(self) -> None:
        """See RunningCore."""
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    def shutdown(self, timeout: float) -> None:
        """See RunningCore."""
        self._llm.shutdown(timeout=timeout)

    async def _outputs_for_front_end(self) -> Any:
        self._front_end_waits = True
        outputs = await self._next_outputs()
        self._front_end_waits = False
        return outputs

    def _num_sampled(self, request_id: str) -> int:
        state = self._state_of(request_id)
        return 0 if state is None else len(state.detokenizer.output_token_ids)

    def _state_of(self, request_id: str) -> Any:
        """vLLM's record of a request; None before it has one, and when the request has ended."""
        processor = self._llm.output_processor
        names = (request_id, *processor.external_req_ids.get(request_id, ()))  # vLLM may add a suffix
        return next((processor.request_states[name] for name in names if name in processor.request_states), None)


def _finished(answer: Any, asked: _FrontEndRequest) -> FinishedSample | None:
    """Convert vLLM's RequestOutput of a request that has ended, or has completed a stop string."""
    completion = answer.outputs[0]
    end, reason = asked.end_in(completion.token_ids), completion.finish_reason
    if end is not None:  # copied, since vLLM's own lists still grow
        part = FlatPart(completion.logprobs.logprobs[:], completion.logprobs.start_indices[:end])
        completion, reason = PartialCompletion(completion.token_ids[:end], part, "stop"), "stop"
    if reason is None:
        return None
    whole = PartialCompletion(completion.token_ids, completion.logprobs, reason)
    scores = None if answer.prompt_logprobs is None else PromptScores.of_flat(answer.prompt_logprobs)
    return FinishedSample(len(answer.prompt_token_ids), whole, scores)


# ----------------------------------------------------------------------------------------------------- core on a thread
#
# The engine is used only on its thread, between two steps, in the order of the calls.  A request that ends before a
# call is executed has ended for its caller before the call returns.


@dataclass(slots=True)
class _Sample:
    """A request that the core has or will have.  Only the engine's thread appends."""

    num_prompt_tokens: int
    ended: asyncio.Future[FinishedSample]
    search: StopSearch | None = None  # for stop strings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the sampled tokens, natural log
    prompt_scores: PromptScores | None = None
    pooled: Float32 | None = None

    def take(self, output: Any) -> str | None:
        """Add a step's output for the request, vLLM's EngineCoreOutput; return why the request has ended, if it has.

        Tokens after the one that completes a stop string are dropped.
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
            self.prompt_scores = PromptScores.of_tensors(output.new_prompt_logprobs_tensors)
        if output.pooling_output is not None:
            self.pooled = _pooled(output.pooling_output)
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
        return FinishedSample(self.num_prompt_tokens, completion, self.prompt_scores, self.pooled)


class CoreThread(RunningCore):
    """An engine core, its thread, and its requests.  Methods are called in the event loop that started it."""

    def __init__(self, vllm_config: Any, make_core: Callable[[], Any], make_request: MakeRequest) -> None:
        """Make the core on a thread of its own; blocks until it is ready.  Raises as make_core.

        make_core: vLLM's EngineCore.  make_request: (prompt, parameters, id, priority, adapter) → the core's request.
        """
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._samples: dict[str, _Sample] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._death = ""  # why every further call fails
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
        """Make a core from vLLM's engine arguments.  Raises vLLM's errors."""
        vllm_config = engine_args.create_engine_config()
        return cls(vllm_config, partial(_engine_core, vllm_config), _request_maker(vllm_config))

    # ------------------------------------------------------------------------------------------------- requests

    async def sample(
        self,
        prompt: dict[str, Any],
        params: Any,
        request_id: str,
        *,
        priority: int = 0,
        adapter: int = 1,
        search: StopSearch | None = None,
    ) -> FinishedSample:
        """See RunningCore."""
        self._require_life()
        request = self._make_request(prompt, params, request_id, priority, adapter)
        ended: asyncio.Future[FinishedSample] = self._loop.create_future()
        sample = self._samples[request_id] = _Sample(len(prompt["prompt_token_ids"]), ended, search)
        self._commands.put(partial(self._add, request))
        try:
            finished: FinishedSample = await self._answer(sample.ended)
        finally:
            del self._samples[request_id]
            if not sample.ended.done() or sample.ended.cancelled():
                self._commands.put(partial(self._abort_quietly, request_id))
        return finished

    async def pool(self, prompt: dict[str, Any], params: Any, request_id: str) -> Float32:
        """See RunningCore."""
        finished = await self.sample(prompt, params, request_id)
        if finished.pooled is None:
            raise CoreDied(f"vLLM ended {request_id} without an output")
        return finished.pooled

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
        result: list[Any] = await self._ask(lambda: self._core.collective_rpc(method, args=args))
        return result

    async def pause(self) -> None:
        """See RunningCore."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """See RunningCore."""
        await self._set_paused(False)

    async def counts(self) -> dict[str, int]:
        """See RunningCore."""
        counted: dict[str, int] = await self._ask(self._counts)
        return counted

    async def recompute(self) -> None:
        """See RunningCore."""
        await self._ask(lambda: self._core.reset_prefix_cache(True))

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
        """Run the queued commands; waits for one if there is nothing to sample."""
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
                if output.finish_reason is None:  # a stop string, unknown to the core
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
        counted = {request_id: len(sample.token_ids) for request_id, sample in self._samples.copy().items()}
        return {request_id: number for request_id, number in counted.items() if number}

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


def _pooled(output: Any) -> Float32:
    """Convert the tensor that a model's pooler returns for one prompt."""
    found: Float32 = output.float().cpu().numpy()
    return found


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # not allowed in futures
        future.set_exception(CoreDied(repr(error)))
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _engine_core(vllm_config: Any) -> Any:
    # vLLM is imported after its environment is set (vllm_start.py).
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    with _unseen("llvmlite.binding.ffi"):
        core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    require(OF_CORE, of=core, called="EngineCore")
    return core


@contextlib.contextmanager
def _unseen(module: str) -> Iterator[None]:
    """Hide a module from vLLM 0.32, which fails on it: vars() of its objects returns no dictionary.

    vLLM searches all loaded modules for kernels to replace (triton_utils/dispatcher.py).
    """
    hidden = sys.modules.pop(module, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[module] = hidden


def _request_maker(vllm_config: Any) -> MakeRequest:
    """Returns a function that makes vLLM's EngineCoreRequest; it raises ValueError if vLLM refuses the request."""
    # As above.
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.renderers.registry import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor

    processor = InputProcessor(vllm_config, renderer_from_config(vllm_config))

    def request_of(prompt: dict[str, Any], params: Any, request_id: str, priority: int, adapter: int) -> Any:
        lora = _adapter_of(vllm_config, adapter)
        tokens = tokens_input(prompt["prompt_token_ids"], cache_salt=prompt["cache_salt"])
        tasks = ("generate",) if isinstance(params, SamplingParams) else (params.task,)
        return processor.process_inputs(request_id, tokens, params, tasks, lora_request=lora, priority=priority)

    return request_of


def _adapter_of(vllm_config: Any, number: int) -> Any:
    """The adapter of a request; None: versions are whole weights."""
    if vllm_config.lora_config is None:
        return None
    from rlhpc.generation.adapter_slot import adapter_request  # as above

    return adapter_request(number)
