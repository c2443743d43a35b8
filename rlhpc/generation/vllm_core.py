"""vLLM's engine core behind our interface, in processes of AsyncLLM or on a thread of this process.

On CUDA, and with several workers, the core is behind vLLM's AsyncLLM.  With one worker on CPU it runs on a thread:
AsyncLLM would send every request through a socket, and get a message with every request's newest token after every step
(docs/decisions/036-the-engine-core-in-the-generators-process.md has the cost).  Any of vLLM's model runners will do.
Undocumented interfaces of vLLM that we need are checked once, at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from rlhpc.data.tokenizer import StopSearch
from rlhpc.generation.requests import PartialCompletion, PromptScores
from rlhpc.generation.running_core import (
    CoreDied,
    CoreLimits,
    CoreRequest,
    CoreThread,
    FinishedSample,
    RunningCore,
    StepOutput,
    SteppedCore,
)
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import Float32

SCORE_PRIORITY = -1  # vLLM's smallest goes first; rollouts have 0 and go in the order of their arrival

# ----------------------------------------------------------------------------------------------------------- parameters


def params_of(asked: CoreRequest) -> Any:
    """vLLM's parameters for a request."""
    # vLLM is imported after its environment is set (vllm_start.py).
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if asked.task is not None:
        return PoolingParams(task=asked.task, use_activation=asked.use_activation)
    if asked.top_k is not None:  # the one token that vLLM samples after the row is not used
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=asked.top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        # The whole distribution: log-probabilities over a part of it would be renormalised, unlike the trainer's, and
        # every importance ratio would be too small by the factor of the kept mass.
        top_p=1.0,
        top_k=0,
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=True,  # end-of-sequence tokens are among stop_token_ids: one rule instead of two
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        seed=asked.seed,
        # Cheaper than a stream, and vLLM keeps everything until the end.
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # not shared
    )


def limits_of(vllm_config: Any) -> CoreLimits:
    """The limits of a core, from the size of its KV cache."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kv_tokens = getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size
    return CoreLimits(model.max_model_len, model.get_vocab_size(), kv_tokens, cache.block_size)


def _flat_scores(flat: Any) -> PromptScores:
    """Read vLLM's FlatLogprobs of a prompt, whose first token has none."""
    starts = flat.start_indices[1:]
    width = len(flat.token_ids) // max(1, len(starts))
    return PromptScores(
        np.asarray(flat.token_ids, np.int32).reshape(len(starts), width),
        np.asarray(flat.logprobs, np.float32).reshape(len(starts), width),
        np.asarray([flat.ranks[start] for start in starts], np.int32),
    )


def _tensor_scores(tensors: Any) -> PromptScores:
    """Read the core's own tensors, vLLM's LogprobsTensors."""
    return PromptScores(
        tensors.logprob_token_ids.numpy().astype(np.int32),
        tensors.logprobs.float().numpy(),
        tensors.selected_token_ranks.numpy().astype(np.int32),
    )


def _pooled(output: Any) -> Float32:
    """Convert the tensor that a model's pooler returns for one prompt."""
    found: Float32 = output.float().cpu().numpy()
    return found


def _adapter_of(vllm_config: Any, number: int) -> Any:
    """The adapter of a request; None: versions are whole weights."""
    if vllm_config.lora_config is None:
        return None
    from rlhpc.generation.adapter_slot import adapter_request  # as above

    return adapter_request(number)


# ------------------------------------------------------------------------------------------ required parts of vLLM

OF_ASYNC_LLM = (
    "generate abort collective_rpc pause_generation resume_generation reset_prefix_cache errored dead_error shutdown "
    "engine_core.get_output_async engine_core.outputs_queue output_processor.request_states "
    "output_processor.external_req_ids"
)
OF_DETOKENIZER = "output_token_ids"
OF_CORE = (
    "add_request preprocess_add_request abort_requests collective_rpc reset_prefix_cache step_fn post_step shutdown "
    "scheduler.has_requests scheduler.requests"
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
        from vllm import __version__  # as above

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

    @classmethod
    def of(cls, asked: CoreRequest) -> _FrontEndRequest:
        return cls(asked.search, 0 if asked.search is None else asked.search.num_tokens)

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
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # as above

        require(OF_ASYNC_LLM, of=llm, called="AsyncLLM")
        require(OF_DETOKENIZER, of=IncrementalDetokenizer, called="IncrementalDetokenizer")
        self._llm, self._vllm_config, self.limits = llm, llm.vllm_config, limits_of(llm.vllm_config)
        self._asked: dict[str, _FrontEndRequest] = {}
        self._outputs, self._next_outputs = llm.engine_core.outputs_queue, llm.engine_core.get_output_async
        self._front_end_waits = True  # for outputs: all earlier ones have been passed to their requests
        llm.engine_core.get_output_async = self._outputs_for_front_end

    async def sample(self, asked: CoreRequest) -> FinishedSample:
        """See RunningCore."""
        prompt = {"prompt_token_ids": asked.token_ids, "cache_salt": asked.salt}
        if asked.task is not None:
            return await self._pool(prompt, asked)
        params, request_id = params_of(asked), asked.request_id
        lora = _adapter_of(self._vllm_config, asked.adapter)
        flight = self._asked[request_id] = _FrontEndRequest.of(asked)
        if asked.search is not None:
            from vllm.sampling_params import RequestOutputKind  # as above

            params.output_kind = RequestOutputKind.CUMULATIVE  # an output after every step, of all tokens so far
        priority = 0 if asked.top_k is None else SCORE_PRIORITY
        try:
            answers = self._llm.generate(prompt, params, request_id, lora_request=lora, priority=priority)
            async with contextlib.aclosing(answers):  # aborts a request that has not ended
                async for answer in answers:
                    if (finished := _finished(answer, flight)) is not None:
                        return replace(finished, experts=self._experts_of(request_id, answer))
        finally:
            del self._asked[request_id]
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
        return PartialCompletion(list(token_ids[first:end]), _own_logprobs(logprobs, first, end))

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

    async def _pool(self, prompt: dict[str, Any], asked: CoreRequest) -> FinishedSample:
        nothing = PartialCompletion([], np.empty(0, np.float32), "stop")
        async with contextlib.aclosing(self._llm.encode(prompt, params_of(asked), asked.request_id)) as answers:
            async for answer in answers:
                if answer.finished:
                    return FinishedSample(len(asked.token_ids), nothing, None, _pooled(answer.outputs.data))
        raise CoreDied(f"vLLM ended {asked.request_id} without an output")

    async def _outputs_for_front_end(self) -> Any:
        self._front_end_waits = True
        outputs = await self._next_outputs()
        self._front_end_waits = False
        return outputs

    def _experts_of(self, request_id: str, answer: Any) -> Any:
        """Experts [tokens, all layers, k] of a request that has ended; None: this vLLM was not asked for them."""
        told = getattr(answer.outputs[0], "routed_experts", None)
        if told is None:  # the request ends with a stop string, of which vLLM does not know
            chunks = getattr(self._state_of(request_id), "routed_experts_chunks", None)
            told = np.concatenate(chunks) if chunks else None
        return told

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
    if end is not None:
        reason = "stop"
    if reason is None:
        return None
    token_ids = completion.token_ids if end is None else completion.token_ids[:end]  # vLLM's own list still grows
    whole = PartialCompletion(token_ids, _own_logprobs(completion.logprobs, 0, len(token_ids)), reason)
    scores = None if answer.prompt_logprobs is None else _flat_scores(answer.prompt_logprobs)
    return FinishedSample(len(answer.prompt_token_ids), whole, scores)


def _own_logprobs(flat: Any, first: int, end: int) -> Float32:
    """Log-probabilities of the tokens from `first` to before `end` in vLLM's FlatLogprobs, which may still grow."""
    if end <= first or flat is None:  # a row that is scored has none
        return np.empty(0, np.float32)
    starts = flat.start_indices[first:end]
    part = flat.logprobs[starts[0] :]  # a long completion is not copied for its last tokens
    own: Float32 = np.asarray(part, np.float32)[np.asarray(starts) - starts[0]]
    return own


# ----------------------------------------------------------------------------------------------------- core on a thread


class VllmSteps(SteppedCore):
    """vLLM's EngineCore, step by step."""

    def __init__(self, core: Any, vllm_config: Any) -> None:
        """core: unused, and used by nobody else.  Raises EngineError for a vLLM that lacks a part we need."""
        # As above.
        from vllm.renderers.registry import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        require(OF_CORE, of=core, called="EngineCore")
        self.engine_core, self.limits, self._vllm_config = core, limits_of(vllm_config), vllm_config
        self._processor = InputProcessor(vllm_config, renderer_from_config(vllm_config))

    @classmethod
    def on_a_thread(cls, engine_args: Any) -> CoreThread:
        """Make a core from vLLM's engine arguments.  Raises vLLM's errors."""
        vllm_config = engine_args.create_engine_config()
        return CoreThread(lambda: cls(_engine_core(vllm_config), vllm_config))

    def request_of(self, asked: CoreRequest) -> Any:
        """Make vLLM's EngineCoreRequest; see SteppedCore."""
        from vllm.inputs.engine import tokens_input  # as above

        priority = 0 if asked.top_k is None else SCORE_PRIORITY
        return self._processor.process_inputs(
            asked.request_id,
            tokens_input(asked.token_ids, cache_salt=asked.salt),
            params_of(asked),
            (asked.task or "generate",),
            lora_request=_adapter_of(self._vllm_config, asked.adapter),
            priority=priority,
        )

    def add(self, request: Any) -> None:
        """See SteppedCore."""
        self.engine_core.add_request(*self.engine_core.preprocess_add_request(request))

    def abort(self, request_id: str) -> bool:
        """See SteppedCore."""
        is_known = request_id in self.engine_core.scheduler.requests
        self.engine_core.abort_requests([request_id])
        return is_known

    def has_requests(self) -> bool:
        """See SteppedCore."""
        return bool(self.engine_core.scheduler.has_requests())

    def step(self) -> tuple[list[StepOutput], bool]:
        """See SteppedCore."""
        outputs, was_executed = self.engine_core.step_fn()
        self.engine_core.post_step(was_executed)
        made = [_step_output(each) for per_client in (outputs or {}).values() for each in per_client.outputs]
        return made, was_executed

    def call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """See SteppedCore."""
        result: list[Any] = self.engine_core.collective_rpc(method, args=args)
        return result

    def recompute(self) -> None:
        """See SteppedCore."""
        self.engine_core.reset_prefix_cache(True)

    def shutdown(self) -> None:
        """See SteppedCore."""
        self.engine_core.shutdown()


def _step_output(output: Any) -> StepOutput:
    """Convert vLLM's EngineCoreOutput."""
    tokens, logprobs = output.new_token_ids, output.new_logprobs
    scores, pooled = output.new_prompt_logprobs_tensors, output.pooling_output
    return StepOutput(
        output.request_id,
        tokens,  # the sampled tokens' own log-probabilities are in the first column
        logprobs.logprobs[: len(tokens), 0].tolist() if logprobs is not None and tokens else [],
        None if output.finish_reason is None else str(output.finish_reason),
        None if scores is None else _tensor_scores(scores),
        None if pooled is None else _pooled(pooled),
    )


def _engine_core(vllm_config: Any) -> Any:
    # vLLM is imported after its environment is set (vllm_start.py).
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    with _unseen("llvmlite.binding.ffi"):
        return EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)


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
