"""Record the experts that a vLLM worker's routers choose, for every place of its KV cache.

Input: top-k ids at each router, and the cache's slots of a step's tokens.  Output: ids of a request's tokens, when it
has ended.  On CPU, where vLLM's model runner fills no routed_experts of its own (on CUDA it does: vllm_core.py).

A token's ids stand where its keys and values stand: whoever shares a cached prompt has the ids of the request that
computed it.  A request that is preempted computes its tokens again, perhaps under new weights: its ids until then are
set aside, so that every token keeps those with which the token after it was sampled.
Guarantees: the ids of a request that has ended are kept until they are taken, or as many others have ended since as the
engine runs at once, twice; a place that was not recorded is never guessed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.models.routes import UNKNOWN

Ids = NDArray[np.int16]  # [tokens, mixtures, k], UNKNOWN where it was not recorded


class RouteRecord:
    """Observes a model runner (vLLM's V1) between its steps; on the worker's thread alone."""

    def __init__(self, model_runner: Any) -> None:
        """Attach to every router, and wrap execute_model.  Raises ValueError: what this vLLM or model lacks."""
        self._runner = model_runner
        self._routers = _routers_of(model_runner.get_model())
        self._group, self._block_tokens = _attention_group(model_runner.kv_cache_config)
        self._step: list[Tensor | None] = [None] * len(self._routers)  # ids [n, k] of the step under way
        self._slots: Ids | None = None  # of each slot of the cache, one more than the ids, 0: not recorded
        self._num_known: dict[str, int] = {}  # recorded tokens of each running request
        self._before: dict[str, Ids] = {}  # those of requests that were preempted since
        self._ended: dict[str, Ids] = {}  # of requests whose ids were not taken yet, in the order of their ends
        self._most_ended = 2 * model_runner.vllm_config.scheduler_config.max_num_seqs
        for place, router in enumerate(self._routers):
            router.set_capture_fn(functools.partial(self._capture, place))
        execute = model_runner.execute_model

        @functools.wraps(execute)
        def recorded(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_step(scheduler_output)
            result = execute(scheduler_output, *args, **kwargs)
            self._after_step(scheduler_output)
            return result

        model_runner.execute_model = recorded

    def take(self, request_id: str, num_tokens: int) -> Ids | None:
        """Return the ids of a request's first tokens, at most num_tokens, and forget them; None: they are not known.

        request_id: of a request that has just ended, perhaps not yet for the worker; vLLM may have added a suffix.
        """
        running = _named(request_id, self._num_known)
        if running is not None:
            self._end(running)
        if (ended := _named(request_id, self._ended)) is None:
            return None
        ids = self._ended.pop(ended)[:num_tokens]
        return None if (ids == UNKNOWN).any() else ids

    def _capture(self, place: int, ids: Tensor) -> None:
        self._step[place] = ids

    def _before_step(self, scheduler_output: Any) -> None:
        """Set aside what the step may overwrite: slots of requests that have ended or were preempted."""
        for request_id in scheduler_output.finished_req_ids:
            if request_id in self._num_known:
                self._end(request_id)
        while len(self._ended) > self._most_ended:
            del self._ended[next(iter(self._ended))]
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if request_id in self._num_known:
                self._before[request_id] = self._ids_of(request_id)
                del self._num_known[request_id]
        for request in scheduler_output.scheduled_new_reqs:  # an aborted one may have had its name
            self._ended.pop(request.req_id, None)
            self._forget(request.req_id)
        self._step = [None] * len(self._routers)

    def _after_step(self, scheduler_output: Any) -> None:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        step = [each for each in self._step if each is not None]
        if not num_tokens or len(step) != len(self._routers):
            return
        ids = torch.stack([each[:num_tokens] for each in step], 1).numpy()
        table = self._runner.input_batch.block_table.block_tables[self._group]
        slots = table.slot_mapping.gpu[:num_tokens].numpy()  # on CPU the same memory
        if self._slots is None:
            num_slots = self._runner.kv_cache_config.num_blocks * self._block_tokens
            self._slots = np.zeros((num_slots, *ids.shape[1:]), np.int16)
        self._slots[slots] = ids + 1
        for request_id, number in scheduler_output.num_scheduled_tokens.items():
            self._num_known[request_id] = self._runner.requests[request_id].num_computed_tokens + number

    def _ids_of(self, request_id: str) -> Ids:
        """Ids of a request that the model runner still knows; those of before it was preempted stay."""
        blocks = np.asarray(self._runner.requests[request_id].block_ids[self._group], np.int64)
        places = np.arange(self._num_known[request_id])
        assert self._slots is not None
        ids: Ids = self._slots[blocks[places // self._block_tokens] * self._block_tokens + places % self._block_tokens]
        ids -= 1
        before = self._before.get(request_id, ids[:0])
        return np.concatenate([before, ids[len(before) :]])

    def _end(self, request_id: str) -> None:
        self._ended[request_id] = self._ids_of(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._num_known.pop(request_id, None)
        self._before.pop(request_id, None)


def _routers_of(model: Any) -> list[Any]:
    """The routers of a model's mixtures, in its order."""
    found = []
    for module in model.modules():
        router, layer = getattr(module, "router", None), getattr(module, "layer_id", None)
        if router is not None and layer is not None:
            if not hasattr(router, "set_capture_fn"):
                raise ValueError(f"the router of layer {layer}, {type(router).__name__}, does not tell its choice")
            found.append((layer, router))
    if not found:
        raise ValueError("no router of a mixture was found")
    return [router for _, router in sorted(found, key=lambda pair: int(pair[0]))]


def _attention_group(kv_cache_config: Any) -> tuple[int, int]:
    """(index, tokens of a block) of the first cache group that keeps every token of a sequence."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        is_whole = any(name in type(spec).__name__ for name in ("FullAttention", "MLA", "Uniform"))
        if is_whole and not getattr(spec, "sliding_window", None):
            return index, int(spec.block_size)
    raise ValueError("no layer keeps the keys of a whole sequence, so that a token has no place of its own")


def _named(request_id: str, known: Iterable[str]) -> str | None:
    """The newest name that is this id, or begins with it and a hyphen."""
    return next(
        (each for each in reversed(list(known)) if each == request_id or each.startswith(f"{request_id}-")), None
    )
