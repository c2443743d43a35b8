"""Sample with a library's engine core: continuous batching, and weights that change while requests are running.

Input: RolloutRequest and WeightManifest; output: Rollout.  Tokens in, tokens out; one request is one of the core's.
Weight updates: weight_updates.py.  Sampling stops while weights are loaded, and every token's version follows from the
number of tokens that its request had then.  What differs between libraries is in their cores (running_core.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import Decode, StopSearch, no_text
from rlhpc.generation.requests import (
    FinishedRequest,
    InFlight,
    VersionRecord,
    end_of_sequence_ids,
    piece_of,
    rollout_of,
    row_score,
    sample_seed,
    searched,
)
from rlhpc.generation.running_core import CoreRequest, FinishedSample, RunningCore, device_here
from rlhpc.generation.weight_updates import PauseSwitch, WeightUpdates
from rlhpc.metrics.meters import BusyClock, SampleWindow
from rlhpc.models.adapter import (
    base_digest,
    base_name,
    chosen_layers,
    refuse_unserved_adapters,
    sends_adapters,
    stored_matrices,
)
from rlhpc.models.routes import MixtureForm
from rlhpc.models.weights import object_in, refuse_other_weights
from rlhpc.protocol.contracts import Clock, EngineStatistics, GenerationEngine, RowScore, WeightTiming
from rlhpc.protocol.errors import ConfigError, EngineError, GroupFailed
from rlhpc.protocol.types import Int32, Prefix, Rollout, RolloutRequest, Routes, WeightGroup, WeightManifest

# -------------------------------------------------------------------------------------------------------- engine answer
#
# Wait for an engine's answer to a call, and give up an engine that does not answer.
#
# Input: a call of a core.  Output: its result.  A kernel that never ends raises nothing: the engine's processes and its
# generator would live on, hold the GPU, and break every weight group until the run ends.  vLLM's own limit, 300 s,
# covers only the workers of tensor parallelism.


Result = TypeVar("Result")

ANSWER_S = 300.0  # below the time in which the controller gives the run up (weight_sync.py: 8 broadcasts)
SLICES = 10


class EngineSilent(Exception):
    """The engine has not answered in time."""


async def answered(call: Awaitable[Result], broadcast_s: float) -> Result:
    """Await a call; a pause of this process, however long, counts for at most a tenth of the limit.

    broadcast_s: extra time, for an engine that waits for the bucket that is under way.  Raises EngineSilent, and errors
    of the call.
    """
    limit_s, task = max(ANSWER_S, 2 * broadcast_s), asyncio.ensure_future(call)
    try:
        for _ in range(SLICES):
            done, _ = await asyncio.wait({task}, timeout=limit_s / SLICES)
            if done:
                return task.result()
        raise EngineSilent(f"no answer within {limit_s:g} s")
    finally:
        task.cancel()


async def in_our_errors(call: Awaitable[Result], die: Callable[[str], EngineError]) -> Result:
    """Await a request.  Raises ValueError if it is refused, and the error that `die` returns if the core is dead."""
    try:
        return await call
    except (asyncio.CancelledError, ValueError):
        raise
    except Exception as error:  # vLLM has several classes for a dead engine, and they differ between versions
        if any(cls.__name__ == "VLLMClientError" for cls in type(error).__mro__):  # since 0.32 no ValueError
            raise ValueError(str(error)) from error
        raise die(repr(error)) from error


async def unless(event: asyncio.Event, ask: Callable[[], Awaitable[None]]) -> None:
    """Make the call unless the event is set by then: `answered` starts it later than it is called."""
    if not event.is_set():
        await ask()


async def comes(event: asyncio.Event, limit_s: float) -> bool:
    """Wait for an event; returns whether it is set within limit_s.  Never swallows a cancellation."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


# --------------------------------------------------------------------------------------------------------------- engine


CALLER = "caller"  # holder name of pause()
NO_VERSION = -1  # of the weights an engine starts with, whose version is unknown
ABORT_ALL_S = 5.0  # at close; requests that have not ended by then fail
ABORT_AGAIN_S = 0.05  # an abort may overtake its request


class Engine(GenerationEngine):
    """GenerationEngine over a core of any library (running_core.py)."""

    def __init__(
        self, core: RunningCore, end_core: Callable[[], None], config: Config, clock: Clock, decode: Decode = no_text
    ) -> None:
        """Use the start() of a library's engine.  end_core: ends the core and its processes; blocks."""
        self._core, self._end_core, self._config, self._decode = core, end_core, config, decode
        self._window = SampleWindow(
            kv_tokens=core.limits.kv_tokens,
            longest_tokens=core.limits.longest_tokens,
            max_num_seqs=config.generation.max_num_seqs,
            block_tokens=core.limits.block_tokens,
        )
        self._stop_token_ids = end_of_sequence_ids(config.model.path)
        self._in_flight: dict[str, InFlight] = {}  # by the id that the core knows
        self._newest: dict[str, str] = {}  # request id → the id that the core knows
        self._serial = itertools.count()
        self._clock, self._busy = clock, BusyClock(clock, config.generation.max_num_seqs)
        self._weight_devices: tuple[str, ...] = ()
        self._policy_version = NO_VERSION
        self._num_updates = 0
        self._num_loads: Counter[int] = Counter()  # of each adapter from files
        self._num_tokens = 0
        self._death = ""  # why this engine is dead; "" while it is alive
        self._is_closed = False
        self._mixture: MixtureForm | None = None  # None: rollouts tell no routes
        self._switch = PauseSwitch(core, self._call, self._busy)
        self._weights = WeightUpdates(core, self._call, self._switch, self._adopt, config=config, clock=clock)

    # ------------------------------------------------------------------------------------------------- sampling

    @property
    def policy_version(self) -> int:
        """−1 while torn, and before the first weights are received, since those of the checkpoint have no version."""
        return NO_VERSION if self._weights.is_torn else self._policy_version

    @property
    def capacity_samples(self) -> int:
        """Number of requests that fill the KV cache, by the lengths seen so far, at most max_num_seqs; 0 while torn."""
        return 0 if self._weights.is_torn else self._window.num_samples

    @property
    def weight_devices(self) -> tuple[str, ...]:
        """Devices of the tensor-parallel workers."""
        return self._weight_devices

    async def generate(self, request: RolloutRequest) -> Rollout:
        """Sample one completion; see GenerationEngine.

        Raises ValueError for a prompt that leaves no room: the caller's mistake, which affects no other request.
        """
        self._require_life()
        request, search = searched(request, self._decode)
        if search.end is not None:
            return rollout_of(request, FinishedRequest.nothing("stop"))
        if request.prefix is not None and len(request.prefix.token_ids) >= request.sampling.max_tokens:
            return rollout_of(request, FinishedRequest.nothing("length"))
        request_id = f"{request.request_id}/{next(self._serial)}"  # a lease may come back while its old abort runs
        flight = self._in_flight[request_id] = InFlight(request, VersionRecord(self._policy_version))
        self._newest[request.request_id] = request_id
        self._busy.enter()
        try:
            output = await self._run(request_id, flight, search)
            if output is None:
                return rollout_of(request, FinishedRequest.nothing("abort"))
            flight.has_output = True
            return replace(self._finish(flight, output), routes=await self._routes_of(request_id, output))
        finally:
            self._busy.leave()
            del self._in_flight[request_id]
            if self._newest.get(request.request_id) == request_id:
                del self._newest[request.request_id]
            flight.end()

    async def score(self, token_ids: Int32, top_k: int = 0) -> RowScore:
        """Score a row ahead of the queue; see GenerationEngine.

        Raises ValueError for a row that leaves no room for the one token that vLLM samples after it, and for more
        tokens in a place than there are.
        """
        self._require_life()
        limits = self._core.limits
        if len(token_ids) >= limits.longest_tokens or top_k > limits.vocabulary:
            raise ValueError(f"{len(token_ids)} tokens, {top_k} of each place: more than the engine has room for")
        request_id, version, num_updates = f"score/{next(self._serial)}", self._policy_version, self._num_updates
        asked = CoreRequest(request_id, token_ids.tolist(), self._salt_of(1), temperature=0.0, top_k=top_k)
        output = await self._output_of(asked)
        version = version if self._num_updates == num_updates else NO_VERSION
        return row_score(version, output.prompt_scores, token_ids, top_k)

    def num_sampled(self, request_id: str) -> int:
        """Number of tokens received so far; see GenerationEngine."""
        key = self._newest.get(request_id)
        sampled = 0 if key is None else self._core.num_tokens(key)
        return self._in_flight[key].request.num_done + sampled if key is not None and sampled else 0

    def progress(self, request_id: str, start: int = 0) -> Prefix | None:
        """The tokens received so far; see GenerationEngine."""
        key = self._newest.get(request_id)
        if key is None or (flight := self._in_flight[key]).begins_anew:
            return None
        first = max(0, start - flight.request.num_done)
        part = self._core.sampled_so_far(key, first)
        if part is None:
            return None
        versions = flight.record.versions(first + len(part.token_ids))
        return piece_of(flight.request, FinishedRequest.of_part(part, versions[first:]), start)

    async def abort(self, request_id: str) -> None:
        """Abort a request; returns when it has ended."""
        for key, flight in list(self._in_flight.items()):
            if flight.request.request_id == request_id:
                await self._abort(key, flight)

    async def pause(self) -> None:
        """Pause after the current step; see GenerationEngine."""
        self._require_life()
        await self._switch.hold(CALLER)

    async def resume(self) -> None:
        """Resume, if the weights are torn only once they are whole; see GenerationEngine."""
        self._require_life()
        await self._switch.release(CALLER)

    def statistics(self) -> EngineStatistics:
        """Statistics; tokens count when their request ends, pre-emptions at the next version."""
        num_running = min(len(self._in_flight), self._config.generation.max_num_seqs)
        return EngineStatistics(
            num_running=num_running,
            num_waiting=len(self._in_flight) - num_running,
            tokens_generated=self._num_tokens,
            busy_s=self._busy.seconds,
            decoding_s=self._busy.decoding_s,
            num_preemptions=self._weights.num_preemptions,
        )

    # -------------------------------------------------------------------------------------------------- weights

    async def join_weights(self, group: WeightGroup, member: str) -> None:
        """Join a membership epoch while decoding continues; see GenerationEngine."""
        self._require_life()
        await self._weights.join(group, member)

    async def receive_weights(self, manifest: WeightManifest) -> WeightTiming:
        """See GenerationEngine; weight_updates.py has the states."""
        self._require_life()
        return await self._weights.receive(manifest)

    async def load_adapter(self, number: int, directory: Path, scale: float, base: str) -> None:
        """See GenerationEngine."""
        self._require_life()
        for refusal in await self._rpc("rlhpc_load_adapter", number, str(directory), scale, base):
            if refusal:
                raise GroupFailed(refusal)
        self._num_loads[number] += 1

    async def leave_weights(self) -> None:
        """See GenerationEngine."""
        if not self._death:
            await self._weights.leave()

    async def close(self) -> None:
        """Return the requests in flight with their tokens so far, then end every process; see GenerationEngine."""
        if not self._death:
            aborts = [asyncio.ensure_future(self._abort(key, flight)) for key, flight in self._in_flight.items()]
            if aborts:
                await asyncio.wait(aborts, timeout=ABORT_ALL_S)
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ABORT_ALL_S):
                    await self._rpc("rlhpc_heed_signals")
            self._death = "closed"
        if not self._is_closed:
            self._is_closed = True
            self._weights.close()
            self._end_core()
            del self._core, self._end_core
        gc.collect()  # it is in a reference cycle: otherwise its finaliser runs while the interpreter shuts down

    # --------------------------------------------------------------------------------------------------- within

    async def _prepare(self, adapters: HeldAdapters | None) -> None:
        """Tell the workers whom they serve, and what they will hold; close the engine if they cannot."""
        try:
            await self._rpc("rlhpc_follow_parent", os.getpid())
            self._weight_devices = tuple(await self._rpc("rlhpc_device_id"))
            if adapters is not None:
                rank = self._config.lora.rank
                await self._rpc("rlhpc_hold_adapters", rank, adapters.modules, adapters.base, adapters.number)
            if self._config.algorithm.routing_replay:
                await self._record_routes()
        except BaseException:  # nothing is survived, but no process of an engine may be left behind
            await self.close()
            raise

    async def _run(self, request_id: str, flight: InFlight, search: StopSearch) -> FinishedSample | None:
        """Return the core's output for this request, the last one if it began anew; None: aborted without a token."""
        request = flight.request
        tokens = request.prompt.token_ids.tolist()
        if request.prefix is not None:
            tokens += request.prefix.token_ids.tolist()
        while True:
            flight.submit(self._policy_version)
            output = await self._output_of(self._asked(request_id, tokens, request, search))
            is_kept = flight.may_keep()
            if is_kept or flight.is_aborted:
                return output if is_kept else None
            _, search = searched(request, self._decode)

    def _asked(self, request_id: str, tokens: list[int], request: RolloutRequest, search: StopSearch) -> CoreRequest:
        sampling = request.sampling
        return CoreRequest(
            request_id,
            tokens,
            self._salt_of(request.adapter),
            max_tokens=sampling.max_tokens - request.num_done,
            temperature=sampling.temperature,
            stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *self._stop_token_ids})),
            seed=sample_seed(self._config.run.seed, request) if self._config.has_seeded_samples else None,
            adapter=request.adapter,
            search=search if sampling.stop_strings else None,
        )

    def _salt_of(self, adapter: int) -> str:
        # A new request must not combine new weights with the KV cache of older ones.  The count, not the version: after
        # a restart the same number means other weights.  The core itself tells adapters apart by their numbers.
        return f"{self._policy_version}.{self._num_updates}.{self._num_loads[adapter]}"

    async def _output_of(self, asked: CoreRequest) -> FinishedSample:
        return await in_our_errors(self._core.sample(asked), self._die)

    async def _record_routes(self) -> None:
        """Have rollouts tell their routes from now on.  Raises EngineError: the engine cannot."""
        try:
            self._mixture = MixtureForm.of_replayed(self._config.model.path)
        except (ConfigError, OSError) as error:
            raise EngineError(str(error)) from error
        for refusal in filter(None, await self._rpc("rlhpc_record_routes")):
            raise EngineError(f"algorithm.routing_replay=true: {refusal}; legal: false")

    async def _routes_of(self, request_id: str, output: FinishedSample) -> Routes | None:
        """Routes of prompt and completion but for the last token; None: not wanted, or the core does not know them."""
        if self._mixture is None or output.completion.finish_reason == "abort":
            return None
        num_tokens, experts = output.num_prompt_tokens + len(output.completion.token_ids) - 1, output.experts
        if experts is None:
            told = next(filter(None, await self._rpc("rlhpc_take_routes", request_id, num_tokens)), None)
            if told is None:
                return None
            experts = np.frombuffer(told[3], np.int16).reshape(told[:3])
        try:
            return await asyncio.to_thread(self._mixture.pack, self._mixture.of_layers(experts)[:num_tokens])
        except (ValueError, IndexError) as error:
            raise self._die(f"{request_id}: its routes are not those of the model: {error}") from error

    def _finish(self, flight: InFlight, output: FinishedSample) -> Rollout:
        completion, num_tokens = output.completion, len(output.completion.token_ids)
        if completion.finish_reason != "abort":
            self._window.finished(output.num_prompt_tokens, num_tokens)
        self._num_tokens += num_tokens
        return rollout_of(flight.request, FinishedRequest.of_part(completion, flight.record.versions(num_tokens)))

    async def _abort(self, key: str, flight: InFlight) -> None:
        flight.is_aborted = True
        await self._abort_until(flight.ended, key)

    async def _abort_until(self, is_over: asyncio.Event, key: str) -> None:
        while not is_over.is_set() and not self._death:  # a restarted request may have the same key
            await self._call(unless(is_over, lambda: self._core.abort(key)))
            await comes(is_over, ABORT_AGAIN_S)

    async def _adopt(self, policy_version: int, counts: dict[str, int]) -> None:
        """Record the loaded version; requests without a token are submitted again.

        counts: tokens of each request when sampling stopped.  A core finds a prompt in its cache by the prompt's salt:
        a waiting request would begin on keys and values of old weights, and all its tokens would count as new.
        """
        self._policy_version = policy_version
        self._num_updates += 1
        waiting = list[tuple[str, InFlight]]()
        for key, flight in self._in_flight.items():
            if not flight.is_submitted or flight.has_output:
                continue  # it is not submitted yet, or had ended when the weights were loaded
            if num_tokens := counts.get(key, 0):
                flight.record.weights_changed(policy_version, num_tokens)
            else:
                flight.begin_anew()
                waiting.append((key, flight))
        for key, flight in waiting:
            await self._call(self._core.abort(key))
            flight.aborting = asyncio.ensure_future(self._abort_until(flight.came_back, key))  # it may not be there yet

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every worker.  Its exceptions arrive as EngineError."""
        result: list[Any] = await self._call(self._core.collective_rpc(method, args=args))
        return result

    async def _call(self, call: Any) -> Any:
        try:
            return await answered(call, self._config.weights.timeout_s)
        except Exception as error:  # vLLM has several classes for a dead engine, and they differ between versions
            raise self._die(repr(error)) from error

    def _die(self, why: str) -> EngineError:
        self._death = self._death or why
        return EngineError(f"the generation engine is dead: {self._death}")

    def _require_life(self) -> None:
        if self._death:
            raise EngineError(f"the generation engine is dead: {self._death}")


# --------------------------------------------------------------------------------------------------- before the start


@dataclass(frozen=True, slots=True)
class HeldAdapters:
    """The adapters that an engine will hold."""

    modules: list[str]  # that have one
    base: str  # digest of the weights that they are for
    number: int  # how many at once


def held_adapters(config: Config, number: int) -> HeldAdapters | None:
    """Adapters by the run's settings; None: versions are whole weights.  Raises EngineError if they are not served."""
    if not sends_adapters(config):
        return None
    path = config.model.path
    try:
        layers = chosen_layers(config.lora, stored_matrices(path))
        refuse_unserved_adapters(config, layers, object_in(path / "config.json"), device=device_here())
        return HeldAdapters(list(layers), base_name(config.lora, base_digest(path)), number)
    except (ConfigError, OSError) as error:
        raise EngineError(f"the engine is not started: {error}") from error


def refuse_weights_it_would_make_up(config: Config) -> None:
    """Raise EngineError for incomplete weight files.

    vLLM takes a fused matrix for loaded once one of its parts is; transformers draws what lacks at random.
    """
    path = config.model.path
    try:
        refuse_other_weights(path, object_in(path / "config.json"))
    except (ConfigError, OSError) as error:
        raise EngineError(f"the engine is not started: {error}") from error
