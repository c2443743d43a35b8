"""Transformers' continuous batching as an engine core: its scheduler and its paged cache, step by step on our thread.

Input: requests and versions.  Output: tokens with their log-probabilities.  Needs torch and transformers, nothing else.

Each step is asked of the library's ContinuousBatchProcessor; the model is called, and tokens are drawn, here.  The
library's manager has a thread of its own, which tells nobody between which two steps it stands: on our thread a pause
is exact, and so is each token's version.  Its sampler has one seed for everything; here every request has a stream of
random numbers, one for each token: a draw depends neither on what runs beside it nor on a cache that was full.

Guarantees.  A request that the cache has no room for any more is begun again with the tokens it has, and none is lost
or drawn again.  Keys and values of old weights, or of another adapter, are never a new request's.  With
run.deterministic requests are sampled one after the other, each by the same bits whatever else is asked for.
"""

from __future__ import annotations

import copy
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import Decode, no_text
from rlhpc.generation.cached_attention import CACHED_ATTENTION, StepPlan, buckets_of
from rlhpc.generation.engine import Engine, held_adapters, refuse_weights_it_would_make_up
from rlhpc.generation.recurrent_states import RecurrentStates
from rlhpc.generation.requests import PromptScores
from rlhpc.generation.running_core import (
    CoreLimits,
    CoreRequest,
    CoreThread,
    StepOutput,
    SteppedCore,
    device_here,
)
from rlhpc.generation.transformers_model import HookedAdapters, HookedRoutes, Rows, SampledModel
from rlhpc.generation.weight_updates import WeightUpdateExtension, WholeLoads
from rlhpc.models.layer_forms import LINEAR
from rlhpc.models.shape import FULL
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import EngineError

PAGE_TOKENS = 32  # of the cache
CPU_KV_CACHE_BYTES = 256 << 20
BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}  # of a step
SCORED_TOKENS = 256  # of a row at once: their logits are held in float32, and a copy
SHUTDOWN_S = 5.0  # for the step that is under way
STATE_SHARE = 0.5  # of the cache's bytes, for states of requests; more requests wait
ROOM = 2  # the cache is not larger than so many times what its requests fill; the rest is for prompts seen before


class TransformersWorker(WeightUpdateExtension):
    """The methods that are called of a worker; there is one, in the generator's process."""

    def __init__(self, model: SampledModel, device: torch.device, num_requests: int) -> None:
        """Hold the model of a core; num_requests: that it samples at once."""
        self.rank, self.device, self._model = 0, device, model
        self._num_requests = num_requests
        self.num_preemptions = 0
        self.routes: HookedRoutes | None = None  # None: nobody asks for them

    def rlhpc_follow_parent(self, parent_pid: int) -> None:
        """Start counting: the process is the generator's own."""
        assert parent_pid == os.getpid()
        self.num_preemptions = 0

    def rlhpc_hold_adapters(self, rank: int, modules: list[str], base: str, num_adapters: int) -> None:
        """See WeightUpdateExtension."""
        self._rlhpc_slot = HookedAdapters(self._model.module, rank, modules, base, num_adapters)

    def rlhpc_num_preemptions(self) -> int:
        """See WeightUpdateExtension."""
        return self.num_preemptions

    def rlhpc_record_routes(self) -> str:
        """Record routes from now on; return why not, "" if it does."""
        try:
            self.routes = HookedRoutes(self._model.module, self._num_requests)
        except ValueError as error:
            return str(error)
        return ""

    def rlhpc_take_routes(self, request_id: str, num_tokens: int) -> list[Any]:
        """Return tokens, mixtures, experts a token, and the ids as int16; nothing: they are not known."""
        assert self.routes is not None
        ids = self.routes.take(request_id, num_tokens)
        return [] if ids is None else [*ids.shape, ids.tobytes()]

    @property
    def adapters(self) -> HookedAdapters | None:
        """The adapters held, if any."""
        assert self._rlhpc_slot is None or isinstance(self._rlhpc_slot, HookedAdapters)
        return self._rlhpc_slot

    def _rlhpc_parameters(self) -> Iterator[Tensor]:
        parameters: Iterator[Tensor] = self._model.module.parameters()
        return parameters

    def _rlhpc_whole_loads(self) -> WholeLoads:
        return self._model


@dataclass(slots=True)
class _SeededRequest:
    """A request that the library has, and what it does not know of it."""

    asked: CoreRequest
    numbers: np.random.Generator
    is_old: bool = False  # its keys and values are partly of old weights, or not of the newest salt


class TransformersSteps(SteppedCore):
    """A model, the library's scheduler and cache, and the rows that are to be scored."""

    def __init__(self, config: Config, seed: int, device: torch.device, num_adapters: int) -> None:
        """Load the model and allocate the cache.  Raises EngineError, and errors of the libraries."""
        generation = config.generation
        self._device, self._longest = device, generation.max_tokens
        self._model = SampledModel.of_run(config, device, CACHED_ATTENTION)
        room = CacheRoom.of(self._model.module, config, device)
        self.worker = TransformersWorker(self._model, device, room.num_requests)
        self._places = {layer: place for place, layer in enumerate(room.layers)}
        self._batch = _processor(self._model.module, config, device, room, num_adapters)
        self._states = RecurrentStates(self._model.module, room.num_requests) if room.has_states else None
        self._model.refuse_deaf(room.layers, config.model.path)
        self._seeds = np.random.default_rng(seed)
        self._drawn: dict[str, _SeededRequest] = {}
        self._rows: deque[CoreRequest] = deque()
        self._salt = ""
        cache = self._batch.cache
        if (room := infer_max_single_request_tokens(cache)) < generation.max_tokens:
            raise EngineError(
                f"generation.kv_cache_bytes={generation.kv_cache_bytes}: the cache has room for one request of {room} "
                f"tokens, and a prompt with its completion may have {generation.max_tokens}"
            )
        self.limits = CoreLimits(
            self._longest, self._model.module.get_output_embeddings().weight.shape[0],
            cache.num_blocks * PAGE_TOKENS, PAGE_TOKENS,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- requests

    def request_of(self, asked: CoreRequest) -> CoreRequest:
        """See SteppedCore."""
        length, vocabulary = len(asked.token_ids), self.limits.vocabulary
        if not length or length >= self._longest:
            raise ValueError(f"a prompt of {length} tokens: its length must be from 1 to {self._longest - 1}")
        if not 0 <= min(asked.token_ids) <= max(asked.token_ids) < vocabulary:
            raise ValueError(f"a prompt with token {max(asked.token_ids)}; legal: from 0 to {vocabulary - 1}")
        return asked

    def add(self, request: CoreRequest) -> None:
        """See SteppedCore."""
        if request.top_k is not None:
            self._rows.append(request)
            return
        if request.salt != self._salt:
            self._forget_cached()
            self._salt = request.salt
        seed = int(self._seeds.integers(1 << 63)) if request.seed is None else request.seed
        if self.worker.routes is not None:
            self.worker.routes.begin(request.request_id)
        self._drawn[request.request_id] = _SeededRequest(request, np.random.Generator(np.random.Philox(seed)))
        self._batch.scheduler.add_waiting_request(
            RequestState(
                request_id=request.request_id,
                initial_tokens=list(request.token_ids),
                max_new_tokens=min(request.max_tokens, self._longest - len(request.token_ids)),
                eos_token_id=list(request.stop_token_ids),
            )
        )

    def abort(self, request_id: str) -> bool:
        """See SteppedCore."""
        for row in self._rows:
            if row.request_id == request_id:
                self._rows.remove(row)
                return True
        if request_id not in self._drawn:
            return False
        self._forget(request_id)
        scheduler = self._batch.scheduler
        scheduler.set_request_cancellation(request_id)
        scheduler.clear_cancelled_requests()
        # Set where the cache was full, until a request ends: the library does not count one that is aborted, and would
        # begin none any more if all that it waits for are.
        scheduler.block_new_requests = False
        return True

    def has_requests(self) -> bool:
        """See SteppedCore."""
        return bool(self._rows or self._drawn)

    def recompute(self) -> None:
        """See SteppedCore."""
        scheduler, begun = self._batch.scheduler, list(self._batch.scheduler.active_requests.values())
        for state in reversed(begun):  # ahead of those that wait, in their order
            anew = state.create_equivalent_initial_request()
            scheduler.finish_request(state.request_id)
            scheduler.waiting_requests[state.request_id] = anew
            scheduler.waiting_requests_order.appendleft(state.request_id)
        self._forget_cached()

    def call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """See SteppedCore."""
        return [getattr(self.worker, method)(*args)]

    def shutdown(self) -> None:
        """See SteppedCore."""
        self.worker.rlhpc_leave()
        del self._batch, self._model

    # --------------------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self) -> tuple[list[StepOutput], bool]:
        """See SteppedCore.  Rows are scored first, all that there are."""
        if self._rows:
            rows, self._rows = self._rows, deque()
            return [self._scored(row) for row in rows], True
        num_waiting = len(self._batch.scheduler.waiting_requests)
        if not self._batch.prepare_next_batch():
            return [], False
        # A request that begins leaves the queue; what comes back to it was thrown out of a full cache.
        ios = self._batch.inputs_and_outputs
        futures = ios.requests_in_batch
        self._count_thrown_out(num_waiting)
        finishing = [future for future in futures if future.has_new_token]
        tokens, logprobs = self._sample(futures, len(finishing))
        ios.output_ids[0, : len(finishing)] = tokens.to(ios.output_ids)
        ios.retrieve_device_outputs()
        for future in futures:
            if self._drawn[future.state.request_id].is_old:
                future.complete_blocks = {}  # never found by a new request
        self._batch.update_batch()
        while not self._batch.output_router.output_queue.empty():
            self._batch.output_router.output_queue.get_nowait()  # its own results, which nobody reads
        made = zip(finishing, tokens.tolist(), logprobs.tolist(), strict=True)
        return [self._output(future.state, token, logprob) for future, token, logprob in made], True

    def _count_thrown_out(self, num_waiting: int) -> None:
        """Count requests that prepare_next_batch() has thrown out; num_waiting: before it."""
        scheduler = self._batch.scheduler
        self.worker.num_preemptions += sum(
            bool(state._true_initial_tokens) and state.request_id in self._drawn
            for state in list(scheduler.waiting_requests.values())[num_waiting:]
        )

    def _output(self, state: Any, token: int, logprob: float) -> StepOutput:
        reason = None
        if state.status == RequestStatus.FINISHED:
            asked = self._forget(state.request_id).asked
            reason = "stop" if token in asked.stop_token_ids else "length"
        return StepOutput(state.request_id, [token], [logprob], reason)

    def _forget(self, request_id: str) -> _SeededRequest:
        if self.worker.routes is not None:
            self.worker.routes.end(request_id)
        return self._drawn.pop(request_id)

    def _sample(self, futures: Sequence[Any], number: int) -> tuple[Tensor, Tensor]:
        """Draw a token for each request whose prompt has been read; return (int64 [n], float32 [n])."""
        batch = self._batch.inputs_and_outputs.get_model_kwargs()
        kept = batch["logits_indices"][:number].long()
        borders = batch["cu_seq_lens_q"].tolist()
        num_queries = [end - start for start, end in pairwise(borders)]
        plan = {}
        for kind, ends in batch["cu_seq_lens_k"].items():
            listed = ends.tolist()
            num_keys = [end - start for start, end in pairwise(listed)]
            plan[kind] = buckets_of(num_queries, num_keys, self._device)
        if (adapters := self.worker.adapters) is not None:
            adapters.rows = self._rows_of(futures, borders, adapters.num_adapters)
        names, starts = [future.state.request_id for future in futures], batch["position_ids"][0, borders[:-1]].tolist()
        if self._states is not None:
            running = self._batch.scheduler.active_requests
            self._states.begin_step(running, names, num_queries, [start == 0 for start in starts])
        step = StepPlan(plan, self._places)
        logits = self._model.module(**batch, logits_to_keep=kept, step=step).logits[0].float()
        if self.worker.routes is not None:
            self.worker.routes.note(names, starts, num_queries)
        asked = [self._drawn[future.state.request_id] for future in futures if future.has_new_token]
        return draw(logits, asked)

    def _rows_of(self, futures: Sequence[Any], borders: Sequence[int], num_adapters: int) -> list[Rows]:
        """Tokens and logits of each adapter in this step; [] if there is but one."""
        if num_adapters == 1:
            return []
        tokens, logits, place = dict[int, list[int]](), dict[int, list[int]](), 0
        for future, start, end in zip(futures, borders, borders[1:], strict=False):
            number = self._drawn[future.state.request_id].asked.adapter
            tokens.setdefault(number, []).extend(range(start, end))
            logits.setdefault(number, []).extend([place] if future.has_new_token else [])
            place += future.has_new_token
        index = {number: torch.tensor(own, device=self._device) for number, own in tokens.items()}
        return [
            Rows(number, own, torch.tensor(logits[number], device=self._device, dtype=torch.long))
            for number, own in index.items()
        ]

    def _scored(self, row: CoreRequest) -> StepOutput:
        """Score a row, a part after the other, with the attention that samples."""
        assert row.top_k is not None
        if (adapters := self.worker.adapters) is not None:
            adapters.rows = ()
        module, cache = self._model.module, DynamicCache(config=self._model.module.config)
        tokens = torch.tensor(row.token_ids, device=self._device)
        ids, logprobs, ranks = list[Tensor](), list[Tensor](), list[Tensor]()
        for start in range(0, len(tokens) - 1, SCORED_TOKENS):
            part = tokens[start : min(start + SCORED_TOKENS, len(tokens) - 1)]
            places = torch.arange(start, start + len(part), device=self._device)
            inputs = {"input_ids": part[None], "position_ids": places[None], "past_key_values": cache}
            logits = module(**inputs, use_cache=True, step=StepPlan({}, {})).logits[0]
            found = logits.float().log_softmax(-1)
            following = tokens[places + 1][:, None]
            own, best = found.gather(1, following), found.topk(row.top_k, -1)
            ranks.append((found >= own).sum(1))
            ids.append(torch.cat([following, best.indices], 1))
            logprobs.append(torch.cat([own, best.values], 1))
        scores = PromptScores(
            torch.cat(ids).int().cpu().numpy(), torch.cat(logprobs).cpu().numpy(), torch.cat(ranks).int().cpu().numpy()
        )
        return StepOutput(row.request_id, [], [], "length", scores)

    def _forget_cached(self) -> None:
        """Have no later request find keys and values of the requests so far."""
        for drawn in self._drawn.values():
            drawn.is_old = True
        self._batch.cache.evict_cached_blocks()
        for allocator in self._batch.cache.cache_allocators.values():  # blocks that requests still read
            allocator.ledger.hash_to_block.clear()
            allocator.ledger.block_to_hash.clear()


def draw(logits: Tensor, requests: Sequence[_SeededRequest]) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of logits, float32 [n, V], by one random number of its request.

    Returns (int64 [n], float32 [n]): tokens, and their log-probabilities in the distribution that they are drawn from;
    at temperature 0 the likeliest token, and its log-probability at temperature 1.
    """
    if not requests:
        return torch.empty(0, dtype=torch.long), torch.empty(0)
    temperatures = torch.tensor([each.asked.temperature for each in requests], device=logits.device)
    numbers = torch.tensor([each.numbers.random() for each in requests], device=logits.device, dtype=torch.float64)
    is_greedy = temperatures == 0
    found = (logits / torch.where(is_greedy, 1.0, temperatures)[:, None]).log_softmax(-1)
    sums = found.exp().cumsum(-1, dtype=torch.float64)
    # The first token whose sum is above the number: one of probability 0 never is.
    drawn = torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)[:, 0]
    drawn = torch.where(is_greedy, found.argmax(-1), drawn.clamp(max=logits.shape[1] - 1))
    return drawn.cpu(), found.gather(1, drawn[:, None])[:, 0].cpu()


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Room for what the layers of a model keep of their tokens."""

    settings: Any  # of a model that has the layers with attention alone, for the paged cache
    layers: tuple[int, ...]  # their numbers in the model
    num_blocks: int
    num_requests: int  # at once
    has_states: bool  # of other layers

    @classmethod
    def of(cls, module: Any, config: Config, device: torch.device) -> CacheRoom:
        """Divide generation.kv_cache_bytes, or what there is."""
        generation = config.generation
        settings = copy.deepcopy(module.config.get_text_config())
        if getattr(settings, "kv_lora_rank", None):  # keys and values of each head, not the latents they are made of
            settings.num_key_value_heads = settings.num_attention_heads
            settings.head_dim = max(settings.qk_nope_head_dim + settings.qk_rope_head_dim, settings.v_head_dim)
        kinds = list(getattr(settings, "layer_types", None) or [FULL] * settings.num_hidden_layers)
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind != LINEAR)
        if len(layers) < len(kinds):
            settings.layer_types, settings.num_hidden_layers = [kinds[layer] for layer in layers], len(layers)
        given = generation.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device.type == "cpu" else _free_bytes(config))
        # Sums of a step's products are rounded otherwise beside other requests.
        num_requests = 1 if config.run.deterministic else generation.max_num_seqs
        state_bytes = RecurrentStates.bytes_of_request(module)
        if state_bytes:
            num_requests = max(1, min(num_requests, int(STATE_SHARE * given) // state_bytes))
            given -= num_requests * state_bytes
        heads, size = find_num_key_value_heads(settings), find_head_dim(settings)
        block_bytes = 2 * PAGE_TOKENS * len(layers) * heads * size * module.dtype.itemsize
        most = ROOM * num_requests * -(-generation.max_tokens // PAGE_TOKENS)
        return cls(settings, layers, max(1, min(given // block_bytes, most)), num_requests, state_bytes > 0)


def _processor(module: Any, config: Config, device: torch.device, room: CacheRoom, num_adapters: int) -> Any:
    """The library's ContinuousBatchProcessor, with explicit bounds: its own take all of a machine's memory."""
    generation, kind, own = config.generation, device.type, module.config
    # Every token of every request.
    must_compute = room.has_states or config.algorithm.routing_replay or config.run.deterministic
    settings = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=room.num_blocks,
        max_batch_tokens=max(generation.max_num_batched_tokens or BATCHED_TOKENS[kind], generation.max_num_seqs),
        max_requests_per_batch=room.num_requests,
        max_memory_percent=1.0,
        max_blocks_per_request=0,
        allow_block_sharing=generation.prefix_caching and num_adapters == 1 and not must_compute,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
    )
    sampling = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    module.config = room.settings
    try:
        module.set_attn_implementation("eager")  # which every model has; ours replaces it before anything is allocated
        manager = module.init_continuous_batching(generation_config=sampling, continuous_batching_config=settings)
        module.set_attn_implementation(CACHED_ATTENTION)
        manager.warmup()  # makes the processor; without graphs it warms nothing up
    finally:
        module.config = own
    return manager.batch_processor


def _free_bytes(config: Config) -> int:
    """Bytes for a cache on this GPU, by generation.gpu_memory_utilization."""
    free, total = torch.cuda.mem_get_info()
    return max(1, int(config.generation.gpu_memory_utilization * total) - (total - free))


class TransformersEngine(Engine):
    """GenerationEngine over transformers' continuous batching, its core on a thread of this process, on CUDA, too."""

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        seed: int,
        clock: Clock = time.monotonic,
        decode: Decode = no_text,
        num_adapters: int = 1,
    ) -> TransformersEngine:
        """Load the model, on CUDA if there is a device, else on CPU.  Blocks the event loop until it is ready.

        decode: for stop strings.  num_adapters: how many it holds at once, if [lora] says that it holds any.
        Raises EngineError.
        """
        refuse_weights_it_would_make_up(config)
        adapters = held_adapters(config, num_adapters)
        device = torch.device(device_here())
        if device.type == "cpu":
            torch.set_num_threads(1)  # as vLLM: replicas scale better than threads
        try:
            core = CoreThread(lambda: TransformersSteps(config, seed, device, num_adapters))
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            raise EngineError(f"transformers did not start: {error}") from error
        engine = cls(core, partial(core.shutdown, SHUTDOWN_S), config, clock, decode)
        await engine._prepare(adapters)
        return engine
