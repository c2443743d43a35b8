"""An engine without a model, for tests of everything else.

Input: RolloutRequest.  Output: Rollout.  Token t of a member is drawn from a categorical distribution that is stated
(logprob_table) and changes with the policy version, by a generator seeded with (seed, group, sample, t, row): the same
whatever runs beside it, and the same again after a prefix.  Temperature and nucleus are ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import Decode, PromptTokenizer, StopSearch, no_text
from rlhpc.generation.requests import FinishedRequest, PromptScores, piece_of, rollout_of, row_score, searched
from rlhpc.metrics.meters import BusyClock
from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.contracts import Clock, EngineStatistics, GenerationEngine, RowScore, WeightReceiver, WeightTiming
from rlhpc.protocol.errors import EngineError, GroupFailed, TornWeights
from rlhpc.protocol.types import (
    FinishReason,
    Float32,
    Int32,
    Prefix,
    Rollout,
    RolloutRequest,
    WeightGroup,
    WeightManifest,
)

# -------------------------------------------------------------------------------------------------------- engine script
#
# The settings of a scripted engine (behaviour and speed), and where a run has them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Settings of a scripted engine.  A token takes token_s + sample_s · n seconds while n rollouts are decoded."""

    seed: int = 0
    vocab_size: int = 100
    stop_token_id: int = 2
    stop_probability: float = 0.05
    token_s: float = 0.0  # both 0: as fast as the event loop turns
    sample_s: float = 0.0
    max_num_seqs: int = 256
    static_batches: bool = False  # none joins a batch after its first token; the next begins when all have ended
    drains: bool = False  # before new weights are loaded, running rollouts finish, and no others begin
    die_after_tokens: int | None = None  # the engine dies after generating this many
    reply: tuple[int, ...] = ()  # every completion, followed by the stop token; in config.json a text
    tally: str = ""  # a file that gets a line "group sample position pid" for every token drawn; "": none
    mixture: MixtureForm | None = None  # its routes are given, by rule (scripted_routes); None: none

    @classmethod
    def of(cls, config: Config, *, seed: int) -> Script:
        """The script of a run, with its model's vocabulary; only the model's config.json is read, if present.

        Its table "scripted_engine" may have the other fields.
        """
        script = cls(seed=seed, max_num_seqs=config.generation.max_num_seqs)
        path = config.model.path / "config.json"
        if not path.exists():
            return script
        model = json.loads(path.read_text())
        if config.algorithm.routing_replay:
            script = replace(script, mixture=MixtureForm.of(model))
        eos, own = model.get("eos_token_id", script.stop_token_id), dict(model.get("scripted_engine", {}))
        if "reply" in own:
            own["reply"] = tuple(PromptTokenizer(config.model.path).encode_rendered(own["reply"]).tolist())
        return replace(
            script,
            vocab_size=int(model.get("vocab_size", script.vocab_size)),
            stop_token_id=int(eos[0] if isinstance(eos, list) else eos),
            **own,
        )


def scripted_routes(form: MixtureForm, token_ids: Int32) -> NDArray[np.int64]:
    """Experts [L − 1, layers, k] of prompt and completion but for the last token, by ids and places alone."""
    tokens = token_ids[:-1].astype(np.int64)
    first = 7 * tokens[:, None] + 3 * np.arange(len(tokens))[:, None] + 5 * np.arange(len(form.layers))
    return (first[:, :, None] + np.arange(form.top_k)) % form.num_experts


# ------------------------------------------------------------------------------------------------------ scripted engine


FIRST_ORDINARY_TOKEN = 4  # below are the special tokens of a character vocabulary


@dataclass(slots=True)
class _InFlight:
    request: RolloutRequest
    is_aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def sampled(self, reason: str, first: int = 0) -> FinishedRequest:
        return FinishedRequest(
            np.asarray(self.tokens[first:], np.int32),
            np.asarray(self.logprobs[first:], np.float32),
            np.asarray(self.versions[first:], np.int32),
            reason,
        )


class ScriptedEngine(GenerationEngine):
    """Draws tokens from a table."""

    def __init__(
        self,
        script: Script,
        *,
        make_receiver: Callable[[str], WeightReceiver] | None = None,
        clock: Clock = time.monotonic,
        decode: Decode = no_text,
    ) -> None:
        """make_receiver: transport → receiver; None adopts versions without any transfer.  decode: for stop strings."""
        self.script, self._decode = script, decode
        self._make_receiver = make_receiver
        self._receiver: WeightReceiver | None = None
        self._policy_version = -1
        self._in_flight: dict[int, _InFlight] = {}
        self._newest: dict[str, int] = {}  # request id → key
        self._serial = itertools.count()
        self._places = asyncio.Semaphore(script.max_num_seqs)
        self._is_shut = self._is_draining = False  # to requests that have not begun: static batches, drains
        self._may_run = True
        self._clock, self._busy = clock, BusyClock(clock, script.max_num_seqs)
        self._num_tokens = 0
        self._num_started = 0
        self._death = ""
        self._tables: dict[int, Float32] = {}
        self._sums: dict[int, NDArray[np.float64]] = {}  # of the tables' probabilities

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        seed: int,
        make_receiver: Callable[[str], WeightReceiver] | None = None,
        decode: Decode = no_text,
    ) -> ScriptedEngine:
        """As its script says, with the vocabulary of the run's model."""
        return cls(Script.of(config, seed=seed), make_receiver=make_receiver, decode=decode)

    def logprob_table(self, policy_version: int) -> Float32:
        """Natural log-probability of every token under a version, float32 [vocab_size].

        The stop token has its probability; the k-th ordinary one in the version's order weighs 1 / (k + 1) of the rest.
        """
        if policy_version not in self._tables:
            script = self.script
            weights = np.zeros(script.vocab_size)
            ordinary = np.setdiff1d(np.arange(FIRST_ORDINARY_TOKEN, script.vocab_size), [script.stop_token_id])
            order = np.random.default_rng([policy_version + 1]).permutation(ordinary)
            weights[order] = 1 / (1 + np.arange(len(order)))
            weights *= (1 - script.stop_probability) / weights.sum()
            weights[script.stop_token_id] = script.stop_probability
            with np.errstate(divide="ignore"):  # special tokens have probability 0
                self._tables[policy_version] = np.log(weights).astype(np.float32)
        return self._tables[policy_version]

    def _summed(self, policy_version: int) -> NDArray[np.float64]:
        if policy_version not in self._sums:
            self._sums[policy_version] = np.cumsum(np.exp(self.logprob_table(policy_version))).astype(np.float64)
        return self._sums[policy_version]

    # ------------------------------------------------------------------------------------------------- sampling

    @property
    def policy_version(self) -> int:
        """The version of the weights; −1 before the first."""
        return self._policy_version

    @property
    def capacity_samples(self) -> int:
        """The script's max_num_seqs."""
        return self.script.max_num_seqs

    @property
    def weight_devices(self) -> tuple[str, ...]:
        """One worker, on CPU."""
        return ("",)

    async def generate(self, request: RolloutRequest) -> Rollout:
        """Draw token after token; see GenerationEngine."""
        self._require_life()
        request, search = searched(request, self._decode)
        if search.end is not None:
            return rollout_of(request, FinishedRequest.nothing("stop"))
        key = next(self._serial)
        flight = self._in_flight[key] = _InFlight(request)
        self._newest[request.request_id] = key
        try:
            async with self._place(flight):
                rollout = rollout_of(request, flight.sampled(await self._draw(flight, search)))
            if self.script.mixture is None or rollout.finish_reason is FinishReason.ABORT:
                return rollout
            tokens = np.concatenate([request.prompt.token_ids, rollout.token_ids])
            return replace(rollout, routes=self.script.mixture.pack(scripted_routes(self.script.mixture, tokens)))
        finally:
            del self._in_flight[key]
            if self._newest.get(request.request_id) == key:
                del self._newest[request.request_id]

    async def score(self, token_ids: Int32, top_k: int = 0) -> RowScore:
        """By the table: the tokens before have no influence; see GenerationEngine."""
        self._require_life()
        table = self.logprob_table(self._policy_version)
        if top_k > len(table):
            raise ValueError(f"{len(token_ids)} tokens, {top_k} of each place: there are {len(table)}")
        own, best = token_ids[1:, None], np.argsort(-table, kind="stable")[:top_k].astype(np.int32)
        tokens = np.concatenate([own, np.tile(best, (len(own), 1))], 1)
        scores = PromptScores(tokens, table[tokens], (table >= table[own]).sum(1, dtype=np.int32))
        return row_score(self._policy_version, scores, token_ids, top_k)

    def num_sampled(self, request_id: str) -> int:
        """See GenerationEngine."""
        flight = self._find(request_id)
        return flight.request.num_done + len(flight.tokens) if flight is not None and flight.tokens else 0

    def progress(self, request_id: str, start: int = 0) -> Prefix | None:
        """The tokens drawn so far; see GenerationEngine."""
        flight = self._find(request_id)
        if flight is None or not flight.tokens:
            return None
        return piece_of(flight.request, flight.sampled("abort", max(0, start - flight.request.num_done)), start)

    async def abort(self, request_id: str) -> None:
        """It ends before its next token, also when paused."""
        for flight in self._in_flight.values():
            if flight.request.request_id == request_id:
                flight.is_aborted = True

    async def pause(self) -> None:
        """See GenerationEngine."""
        self._require_life()
        self._may_run = False
        self._busy.pause()

    async def resume(self) -> None:
        """See GenerationEngine."""
        self._require_life()
        self._may_run = True
        self._busy.resume()

    def statistics(self) -> EngineStatistics:
        """See GenerationEngine."""
        return EngineStatistics(
            num_running=self._num_started,
            num_waiting=len(self._in_flight) - self._num_started,
            tokens_generated=self._num_tokens,
            busy_s=self._busy.seconds,
            decoding_s=self._busy.decoding_s,
        )

    # -------------------------------------------------------------------------------------------------- weights

    async def join_weights(self, group: WeightGroup, member: str) -> None:
        """Join the weight group, if there is a receiver; see GenerationEngine."""
        self._require_life()
        await self.leave_weights()
        rank = group.first_rank(member)
        if self._make_receiver is not None:
            receiver = self._make_receiver(group.transport)
            await asyncio.to_thread(receiver.join, group, rank)
            self._receiver = receiver

    async def receive_weights(self, manifest: WeightManifest) -> WeightTiming:
        """Receive and discard, then adopt the version; see GenerationEngine."""
        self._require_life()
        began = self._clock()
        if self._make_receiver is not None:
            if self._receiver is None:
                raise TornWeights("this engine is in no weight group")
            try:
                await asyncio.to_thread(_receive_for_nothing, self._receiver, manifest)
            except GroupFailed as error:
                raise TornWeights(str(error)) from error
        if self.script.drains:
            await self._drain()
            self._require_life()
        self._policy_version = manifest.policy_version
        return WeightTiming(receive_s=self._clock() - began, pause_s=0.0)

    async def leave_weights(self) -> None:
        """See GenerationEngine."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.leave()

    async def close(self) -> None:
        """Requests in flight return as aborted; see GenerationEngine."""
        await self.leave_weights()
        for flight in self._in_flight.values():
            flight.is_aborted = True
        while self._in_flight and not self._death:  # noqa: ASYNC110 - each ends within one turn of the loop
            await asyncio.sleep(0)
        self._death = self._death or "closed"

    # --------------------------------------------------------------------------------------------------- within

    def _find(self, request_id: str) -> _InFlight | None:
        return self._in_flight.get(self._newest.get(request_id, -1))

    @asynccontextmanager
    async def _place(self, flight: _InFlight) -> AsyncIterator[None]:
        """Hold one of the places for decoding.  An aborted request waits for no batch and no drain."""
        while True:
            await self._places.acquire()
            if not self._must_wait(flight):
                break
            self._places.release()
            while self._must_wait(flight):  # noqa: ASYNC110 - any of three ends it
                await asyncio.sleep(0.001)
        self._num_started += 1
        self._busy.enter()
        try:
            yield
        finally:
            self._busy.leave()
            self._num_started -= 1
            self._places.release()
            self._is_shut &= self._is_draining or self._num_started > 0

    def _must_wait(self, flight: _InFlight) -> bool:
        return self._is_shut and not flight.is_aborted and not self._death

    async def _drain(self) -> None:
        """Let no request begin until all that have begun have ended; a pause of the engine ends the wait."""
        self._is_draining = self._is_shut = True
        try:
            while self._num_started and self._may_run and not self._death:  # noqa: ASYNC110 - any of three ends it
                await asyncio.sleep(0.001)
        finally:
            self._is_draining = False
            self._is_shut = self.script.static_batches and self._num_started > 0

    async def _draw(self, flight: _InFlight, search: StopSearch) -> str:
        """Draw until the end and return why it ended."""
        request = flight.request
        stops = {self.script.stop_token_id, *request.sampling.stop_token_ids}
        for position in range(request.num_done, request.sampling.max_tokens):
            if not await self._step(flight):
                return "abort"
            where = [self.script.seed, request.group_id, request.sample_index, position]
            rng = np.random.default_rng(where + [request.row] * (request.row > 0))
            table, sums = self.logprob_table(self._policy_version), self._summed(self._policy_version)
            token = int(sums.searchsorted(rng.random() * (1 - 1e-6), side="right"))
            if self.script.reply:
                token = (*self.script.reply, self.script.stop_token_id)[min(position, len(self.script.reply))]
            flight.tokens.append(token)
            flight.logprobs.append(float(table[token]))
            flight.versions.append(self._policy_version)
            self._num_tokens += 1
            if self.script.tally:
                _append(self.script.tally, f"{request.group_id} {request.sample_index} {position} {os.getpid()}\n")
            if search.read([token]) is not None or token in stops:
                return "stop"
        return "length"

    async def _step(self, flight: _InFlight) -> bool:
        """Wait for the time of one token, and for the end of a pause.  False: aborted, which waits for neither."""
        if flight.is_aborted:
            return False
        await asyncio.sleep(self.script.token_s + self.script.sample_s * self._num_started)
        self._is_shut |= self.script.static_batches
        while not self._may_run and not flight.is_aborted and not self._death:  # noqa: ASYNC110 - any of three ends it
            await asyncio.sleep(0.001)
        limit = self.script.die_after_tokens
        if limit is not None and self._num_tokens >= limit:
            self._death = f"scripted to die after {limit} tokens"
        self._require_life()
        return not flight.is_aborted

    def _require_life(self) -> None:
        if self._death:
            raise EngineError(f"the generation engine is dead: {self._death}")


def _append(path: str, line: str) -> None:
    """One write at the end, which several processes may do and which no kill undoes."""
    with open(path, "ab", buffering=0) as file:  # noqa: PTH123 - once a token
        file.write(line.encode())


def _receive_for_nothing(receiver: WeightReceiver, manifest: WeightManifest) -> None:
    from rlhpc.weights.memory import blocks_in_turn  # loads torch, as receivers do

    for _ in receiver.receive(manifest, blocks_in_turn(manifest)):
        pass
