"""Sample with vLLM: continuous batching, and weights that change between two decoding steps.

Eats RolloutRequest and WeightManifest, makes Rollout.  Tokens in, tokens out; one request is one vLLM request.
New weights are received by a thread of each worker while it decodes, then loaded between two steps; requests go on.
Every token's version is recorded from the number of tokens each request had at that moment, and held against vLLM's
own record.  vLLM 0.26 to 0.33: what differs between them is asked for by name, never by version number.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from rlhpc.config import Config
from rlhpc.contracts import Clock, EngineStatistics, GenerationEngine, WeightTiming
from rlhpc.errors import EngineError, GroupFailed, TornWeights
from rlhpc.generation.busy_clock import BusyClock
from rlhpc.generation.engine_profile import engine_profile
from rlhpc.generation.finished_request import FinishedRequest, prefix_of, rollout_of
from rlhpc.generation.undisturbed import undisturbed
from rlhpc.generation.version_record import VersionRecord, versions_of_spans
from rlhpc.generation.vllm_process import device_here, start_vllm, stop_vllm, window_of
from rlhpc.generation.vllm_progress import num_tokens, partial_completion
from rlhpc.generation.vllm_sampling import end_of_sequence_ids, vllm_sampling_params
from rlhpc.generation.weight_link import BUSY, DONE, TORN
from rlhpc.types import Int32, Prefix, Rollout, RolloutRequest, WeightGroup, WeightManifest

if TYPE_CHECKING:
    import psutil

NO_VERSION = -1  # of the weights an engine starts with: nobody has said what they are
POLL_S = (0.002, 0.05)  # how often a worker is asked whether it has received: at first, and at most
ABORT_ALL_S = 5.0  # at close; what has not ended by then is failed
ABORT_AGAIN_S = 0.05  # an abort may overtake the request it is for
DRAIN_S = 0.02  # outputs that left the engine before a pause reach their requests within this


@dataclass(slots=True)
class _InFlight:
    """A request vLLM has."""

    request: RolloutRequest
    record: VersionRecord
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine(GenerationEngine):
    """A vLLM AsyncLLM and its processes."""

    def __init__(self, llm: Any, processes: list[psutil.Process], config: Config, clock: Clock) -> None:
        """Use VllmEngine.start."""
        self._llm, self._processes, self._config = llm, processes, config
        self._window = window_of(llm.vllm_config, config.generation.max_num_seqs)
        self._stop_token_ids = end_of_sequence_ids(config.model.path)
        self._in_flight: dict[str, _InFlight] = {}  # by the id vLLM knows
        self._serial = itertools.count()
        self._clock, self._busy = clock, BusyClock(clock)
        self._weight_devices: tuple[str, ...] = ()
        self._policy_version = NO_VERSION
        self._num_updates = 0
        self._num_tokens = self._num_preemptions = 0
        self._is_paused = False
        self._death = ""  # why this engine is dead; "" while it lives
        self._has_spans = hasattr(llm, "update_weight_version")
        self._updating = asyncio.Lock()
        self._adopted = asyncio.Event()  # cleared while a load is under way that this side has not recorded yet
        self._adopted.set()
        self._pausing = asyncio.Lock()
        self._pauses_for_update = False

    @classmethod
    async def start(cls, config: Config, *, seed: int, clock: Clock = time.monotonic) -> VllmEngine:
        """Start vLLM on CUDA where there is a device, else on CPU.  Blocks the event loop until it is up.

        Sets environment variables of this process.  Raises EngineError; no process is left then.
        """
        engine = cls(*start_vllm(engine_profile(config, seed=seed, device=device_here())), config, clock)
        try:
            await engine._prepare()
        except BaseException:
            await engine.close()
            raise
        return engine

    # ------------------------------------------------------------------------------------------------- sampling

    @property
    def policy_version(self) -> int:
        """−1 until the first weights have been received: those of the checkpoint have no version."""
        return self._policy_version

    @property
    def capacity_samples(self) -> int:
        """Requests of such lengths as have been met that fill the KV cache, at most max_num_seqs."""
        return self._window.num_samples

    @property
    def weight_devices(self) -> tuple[str, ...]:
        """One per tensor-parallel worker."""
        return self._weight_devices

    async def generate(self, request: RolloutRequest) -> Rollout:
        """Sample one completion; see GenerationEngine.

        Raises ValueError for a prompt that leaves no room, as that is the caller's mistake and hurts no one else.
        """
        self._require_life()
        if request.prefix is not None and len(request.prefix.token_ids) >= request.sampling.max_tokens:
            return rollout_of(request, FinishedRequest.nothing("length"))
        request_id = f"{request.request_id}/{next(self._serial)}"  # a lease may come back while its old abort runs
        flight = self._in_flight[request_id] = _InFlight(request, VersionRecord(self._policy_version))
        self._busy.enter()
        try:
            output = await self._run(request_id, request)
            # What was sampled after a load may overtake the load's own answer, which says from which token on.
            await self._adopted.wait()
            return self._finish(flight, output)
        finally:
            self._busy.leave()
            del self._in_flight[request_id]
            flight.ended.set()

    def num_sampled(self, request_id: str) -> int:
        """As far as its tokens have reached us; see GenerationEngine."""
        for key, flight in self._in_flight.items():
            if flight.request.request_id == request_id and (sampled := num_tokens(self._llm, key)):
                return flight.request.num_done + sampled
        return 0

    def progress(self, request_id: str) -> Prefix | None:
        """As far as its tokens have reached us and their versions are certain; see GenerationEngine."""
        for key, flight in self._in_flight.items():
            if flight.request.request_id == request_id and self._adopted.is_set():
                partial = partial_completion(self._llm, key)
                versions = flight.record.versions(len(partial.token_ids)) if partial is not None else None
                if versions is not None:
                    return prefix_of(rollout_of(flight.request, FinishedRequest.of_vllm(partial, versions)))
        return None

    async def abort(self, request_id: str) -> None:
        """End it; returns when it has ended."""
        for key, flight in list(self._in_flight.items()):
            if flight.request.request_id == request_id:
                await self._abort(key, flight)

    async def pause(self) -> None:
        """Stop after the present step; see GenerationEngine."""
        self._require_life()
        async with self._pausing:
            if not self._is_paused:
                await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
                self._is_paused = True
                self._busy.pause()

    async def resume(self) -> None:
        """Go on; see GenerationEngine."""
        self._require_life()
        async with self._pausing:
            if self._is_paused:
                await self._call(self._llm.resume_generation())
                self._is_paused = False
                self._busy.resume()

    def statistics(self) -> EngineStatistics:
        """Tokens count when their request ends, pre-emptions with the next version; beyond max_num_seqs it waits."""
        num_running = min(len(self._in_flight), self._config.generation.max_num_seqs)
        return EngineStatistics(
            num_running=num_running,
            num_waiting=len(self._in_flight) - num_running,
            tokens_generated=self._num_tokens,
            busy_s=self._busy.seconds,
            num_preemptions=self._num_preemptions,
        )

    # -------------------------------------------------------------------------------------------------- weights

    async def join_weights(self, group: WeightGroup, member: str) -> None:
        """Meet the others while decoding goes on; see GenerationEngine."""
        self._require_life()
        async with self._updating:
            timeout_s = self._config.weights.timeout_s
            begun = await self._rpc("rlhpc_begin_join", msgspec.json.encode(group).decode(), member, timeout_s)
            await self._received(begun, f"epoch {group.epoch}")

    async def receive_weights(self, manifest: WeightManifest) -> WeightTiming:
        """Receive beside decoding, load between two steps; see GenerationEngine."""
        self._require_life()
        async with self._updating:
            began = self._clock()
            try:
                begun = await self._rpc("rlhpc_begin_receive", msgspec.json.encode(manifest).decode())
                await self._received(begun, f"version {manifest.policy_version}, epoch {manifest.epoch}")
            except GroupFailed as error:
                raise TornWeights(str(error)) from error
            received = self._clock()
            pause_s = await undisturbed(self._load(manifest.policy_version))
            return WeightTiming(receive_s=received - began, pause_s=pause_s)

    async def leave_weights(self) -> None:
        """See GenerationEngine."""
        if not self._death:
            await self._rpc("rlhpc_leave")

    async def close(self) -> None:
        """Requests in flight return what they have, then every process ends; see GenerationEngine."""
        if not self._death:
            aborts = [asyncio.ensure_future(self._abort(key, flight)) for key, flight in self._in_flight.items()]
            if aborts:
                await asyncio.wait(aborts, timeout=ABORT_ALL_S)
            with contextlib.suppress(EngineError, TimeoutError):
                await asyncio.wait_for(self._rpc("rlhpc_heed_signals"), ABORT_ALL_S)
            self._death = "closed"
        if self._llm is not None:
            stop_vllm(self._llm, self._processes)
        self._llm = None
        gc.collect()  # it is in a cycle: left alone, its finaliser runs when the interpreter has half gone

    # --------------------------------------------------------------------------------------------------- within

    async def _prepare(self) -> None:
        await self._rpc("rlhpc_follow_parent", os.getpid())
        self._weight_devices = tuple(await self._rpc("rlhpc_device_id"))
        can_count = all(await self._rpc("rlhpc_counts_tokens"))
        if not can_count and not self._has_spans:
            raise EngineError(
                "this vLLM tells neither which weights sampled a token nor how many tokens a request has; "
                "set VLLM_USE_V2_MODEL_RUNNER=0 or install vLLM 0.32"
            )
        # A step that was launched ahead would be sampled by old weights and counted for new ones; and without spans a
        # request that has ended must have reached us before the others are counted.
        scheduler = self._llm.vllm_config.scheduler_config
        self._pauses_for_update = bool(getattr(scheduler, "async_scheduling", False)) or not self._has_spans
        if self._has_spans:
            await self._call(self._llm.update_weight_version(str(self._policy_version)))

    async def _run(self, request_id: str, request: RolloutRequest) -> Any:
        """Return vLLM's only output for this request."""
        tokens = request.prompt.token_ids.tolist()
        if request.prefix is not None:
            tokens += request.prefix.token_ids.tolist()
        # New weights must not meet the KV cache of older ones in a new request.  The count, not the version: after a
        # trainer's restart the same number means other weights.
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"{self._policy_version}.{self._num_updates}"}
        try:
            async with contextlib.aclosing(
                self._llm.generate(prompt, self._sampling_params(request), request_id)
            ) as outputs:
                async for output in outputs:
                    return output
        except (asyncio.CancelledError, ValueError):
            raise
        except Exception as error:  # vLLM has several classes for a dead engine, and they differ between versions
            raise self._die(f"vLLM: {error!r}") from error
        raise self._die(f"vLLM ended {request_id} without an output")

    def _sampling_params(self, request: RolloutRequest) -> Any:
        run_seed = self._config.run.seed if self._config.generation.seeded_samples else None
        return vllm_sampling_params(request, self._stop_token_ids, run_seed)

    def _finish(self, flight: _InFlight, output: Any) -> Rollout:
        completion = output.outputs[0]
        self._num_tokens += len(completion.token_ids)
        if completion.finish_reason != "abort":
            self._window.finished(len(output.prompt_token_ids), len(completion.token_ids))
        spans = getattr(completion, "weight_versions", None)
        versions = self._versions(flight, spans, len(completion.token_ids))
        return rollout_of(flight.request, FinishedRequest.of_vllm(completion, versions))

    def _versions(self, flight: _InFlight, spans: Any, num_tokens: int) -> Int32:
        own = flight.record.versions(num_tokens)
        try:
            theirs = versions_of_spans(spans, num_tokens) if spans is not None else own
        except ValueError as error:
            raise self._die(str(error)) from error
        if theirs is None or (own is not None and not flight.record.agrees_with(theirs)):
            request_id = flight.request.request_id
            raise self._die(f"{request_id}: versions by our count {own} contradict vLLM's {theirs}")
        return theirs if own is None else own

    async def _abort(self, key: str, flight: _InFlight) -> None:
        while not flight.ended.is_set() and not self._death:
            await self._call(self._llm.abort(key))
            try:
                await asyncio.wait_for(flight.ended.wait(), ABORT_AGAIN_S)
            except TimeoutError:
                continue

    async def _received(self, states: list[Any], what: str) -> None:
        """Ask the workers until all have ended what was begun.  Raises TornWeights or GroupFailed if one failed."""
        interval, longest = POLL_S
        while any(state == BUSY for state, _ in states):
            await asyncio.sleep(interval)
            interval = min(interval * 1.5, longest)
            states = await self._rpc("rlhpc_poll")
        for state, message in states:
            if state != DONE:
                raise (TornWeights if state == TORN else GroupFailed)(f"{what}: {message}")

    async def _load(self, policy_version: int) -> float:
        """Load what was received and adopt its version.  Returns the seconds in which no token could be sampled."""
        pausing = self._pauses_for_update and not self._is_paused
        began = self._clock()
        if pausing:
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            await asyncio.sleep(DRAIN_S)
        self._adopted.clear()
        try:
            loaded = await self._load_between_steps(policy_version)
            self._adopt(policy_version, loaded[0][1])
        finally:
            self._adopted.set()
        if pausing:
            await self._call(self._llm.resume_generation())
            return self._clock() - began
        return max(float(seconds) for seconds, _ in loaded)

    async def _load_between_steps(self, policy_version: int) -> list[Any]:
        """Sent together, so that few steps if any lie between them; if one fails the engine is dead."""
        calls: list[Any] = [self._rpc("rlhpc_load"), self._rpc("rlhpc_num_preemptions")]
        if self._has_spans:
            calls.append(self._call(self._llm.update_weight_version(str(policy_version))))
        if self._config.generation.recompute_kv:
            calls.append(self._call(self._llm.reset_prefix_cache(reset_running_requests=True)))
        loaded, preemptions, *_ = await asyncio.gather(*calls)
        self._num_preemptions = max(preemptions)
        return list(loaded)

    def _adopt(self, policy_version: int, counts: dict[str, int] | None) -> None:
        self._policy_version = policy_version
        self._num_updates += 1
        if counts is not None:
            counts = {key: num_tokens for name, num_tokens in counts.items() for key in (name, name.rpartition("-")[0])}
        for key, flight in self._in_flight.items():
            num_tokens = None if counts is None else counts.get(key)
            if num_tokens is None and counts is not None and not self._has_spans:
                num_tokens = 0  # paused and drained: what the worker does not know has not begun
            flight.record.weights_changed(policy_version, num_tokens)

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every worker.  Its errors do not cross as classes."""
        result: list[Any] = await self._call(self._llm.collective_rpc(method, args=args))
        return result

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except Exception as error:
            # vLLM has several classes for a dead engine, and they differ between versions.
            raise self._die(f"vLLM: {error!r}") from error

    def _die(self, why: str) -> EngineError:
        self._death = self._death or why
        return EngineError(f"the generation engine is dead: {self._death}")

    def _require_life(self) -> None:
        if self._death:
            raise EngineError(f"the generation engine is dead: {self._death}")
