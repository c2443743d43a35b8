"""Update a vLLM engine to a new version: receive, pause sampling where needed, load, adopt, resume.

Input: WeightGroup and WeightManifest; output: WeightTiming.  States of an engine's weights:

    whole ──── a version is received whole during decoding, and loaded while sampling stops ("shadow") ─▶ whole
    whole ──── the first buckets are here: sampling stops, buckets are loaded as they arrive ("paused") ▶ arriving
    arriving ─ the last bucket is loaded and every checksum agrees: sampling resumes ─────────────────▶ whole
    arriving ─ anything else ────────────────────────────────────────────────────────────────────────▶ torn
    torn ───── the next version, received in either way, loaded whole ───────────────────────────────▶ whole

Guarantee: no token is sampled while weights are loaded, arriving or torn.  Requests are kept throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from rlhpc.config.rules import Config
from rlhpc.generation.vllm_core import RunningCore
from rlhpc.generation.vllm_start import device_here, num_gpus_here
from rlhpc.generation.worker_extension import BUSY, DONE, READY, TORN
from rlhpc.metrics.meters import BusyClock
from rlhpc.protocol.contracts import Clock, WeightTiming
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.buckets import manifest_bytes
from rlhpc.weights.checksums import joined

# --------------------------------------------------------------------------------------------------------- pause switch
#
# Keep vLLM paused while at least one holder wants it paused.
#
# Input: holds and releases, each under its holder's name.  Output: calls of pause and resume.
# Requests are kept.  Guarantee: nothing is sampled between a hold that has returned and the release of the same name.


class PauseSwitch:
    """The names of the holders that keep an engine paused."""

    def __init__(self, llm: RunningCore, call: Callable[[Any], Awaitable[Any]], busy: BusyClock) -> None:
        """call: awaits a call of vLLM and maps its errors."""
        self._llm, self._call, self._busy = llm, call, busy
        self._holders: set[str] = set()
        self._is_paused = False
        self._changing = asyncio.Lock()

    async def hold(self, name: str) -> None:
        """Pause after the current step.  Idempotent."""
        async with self._changing:
            self._holders.add(name)
            if not self._is_paused:
                await self._call(self._llm.pause())
                self._is_paused = True
                self._busy.pause()

    async def release(self, name: str) -> None:
        """Resume, unless there is another holder.  Idempotent."""
        async with self._changing:
            self._holders.discard(name)
            if self._is_paused and not self._holders:
                await self._call(self._llm.resume())
                self._is_paused = False
                self._busy.resume()


# ------------------------------------------------------------------------------------------------------- staging choice
#
# Choose how an engine stages new weights: a shadow in host memory, or paused loading (docs/decisions/015).
#
# Pure but for free_host_bytes(), which asks the machine.


SHADOW_SHARE = (
    0.5  # of free host memory that shadows of all engines of a node may take; the trainer's copies come later
)
UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 where there is no limit


def choose_staging(setting: str, *, on_cpu: bool, model_bytes: int, num_shadows: int, free_bytes: int) -> str:
    """ "shadow" or "paused".

    setting: weights.staging.  num_shadows: how many workers of this node may each need one.
    """
    if setting != "auto":
        return setting
    if on_cpu:
        return "shadow"  # the model is in host memory anyway
    return "shadow" if model_bytes * num_shadows <= SHADOW_SHARE * free_bytes else "paused"


def free_host_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory still available to this process: of the machine, or of its cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    for limit, used in _cgroup_limits(proc, groups):
        free = min(free, max(0, limit - used))
    return free


def _cgroup_limits(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """(limit, used) of this process's memory cgroup and of every one above it: Slurm limits the job, not the task."""
    found: list[tuple[int, int]] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        directory = root / path.lstrip("/")
        for each in (directory, *directory.parents):
            if not each.is_relative_to(root):
                break
            found += _limit(each, *names)
    return found


def _limit(directory: Path, limit_name: str, used_name: str) -> list[tuple[int, int]]:
    try:
        limit, used = (directory / limit_name).read_text().strip(), (directory / used_name).read_text().strip()
    except OSError:
        return []
    if not limit.isdigit() or int(limit) > UNLIMITED:
        return []
    return [(int(limit), int(used))]


# ------------------------------------------------------------------------------------------------------- weight updates


log = logging.getLogger("rlhpc.generation")
NOTICE_S = 1.0  # then workers are asked though none has given notice: one may have died
UPDATE = "update"  # holder name of the pause
BEGUN = [(BUSY, "")]  # the state of a worker that was just resumed

Result = TypeVar("Result")


class WorkerNotices:
    """A named pipe into which a worker writes a byte when it has something new to say.

    Workers cannot be awaited: a call of one that does not return at once stands in the way of the next decoding step,
    and one that is repeated every few milliseconds costs each step in between.
    """

    def __init__(self) -> None:
        """Make the pipe; the event loop that runs reads it."""
        self._directory = Path(tempfile.mkdtemp(prefix="rlhpc-notices-"))
        self.pipe = self._directory / "pipe"
        os.mkfifo(self.pipe, 0o600)
        self._descriptor = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
        self._have_come = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)

    async def next(self) -> None:
        """Return when one has come since the last call, or after NOTICE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICE_S):
                await self._have_come.wait()
        self._have_come.clear()

    def close(self) -> None:
        """Notices of workers go nowhere from now on."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.pipe.unlink()
        self._directory.rmdir()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 4096)
        self._have_come.set()


class WeightUpdates:
    """Weight updates of one engine."""

    def __init__(
        self,
        llm: RunningCore,
        call: Callable[[Any], Awaitable[Any]],
        switch: PauseSwitch,
        adopt: Callable[[int, dict[str, int]], Awaitable[None]],
        *,
        config: Config,
        clock: Clock,
    ) -> None:
        """call: awaits a call of vLLM; raises EngineError.

        adopt: records a version that is loaded from now on, given the number of tokens of each request that has one.
        """
        self._llm, self._call, self._switch, self._adopt = llm, call, switch, adopt
        self._config, self._clock = config, clock
        self._updating = asyncio.Lock()
        self._staging = ""  # chosen when the size of the model is known, and kept
        self._notices = WorkerNotices()
        self._has_told_way = False
        self.num_preemptions = 0  # of requests, up to the last version
        self.is_torn = False  # the model is neither an old version nor a new one

    async def join(self, group: WeightGroup, member: str) -> None:
        """Join the group while decoding continues.  Raises GroupFailed."""
        async with self._updating:
            encoded, timeout_s = msgspec.json.encode(group).decode(), self._config.weights.timeout_s
            begun = await self._rpc("rlhpc_begin_join", encoded, member, timeout_s, str(self._notices.pipe))
            await self._reached(DONE, begun, f"epoch {group.epoch}")

    async def receive(self, manifest: WeightManifest) -> WeightTiming:
        """See GenerationEngine.receive_weights."""
        async with self._updating:
            began = self._clock()
            staging = self._chosen_staging(manifest)
            version, name = manifest.policy_version, f"version {manifest.policy_version}, epoch {manifest.epoch}"
            try:
                encoded = msgspec.json.encode(manifest).decode()
                begun = await self._rpc("rlhpc_begin_receive", encoded, staging)
                await self._reached(DONE if staging == "shadow" else READY, begun, name)
            except (GroupFailed, TornWeights) as error:
                await self._rpc("rlhpc_give_up")
                raise TornWeights(self._with_state(error)) from error
            received = self._clock()
            load = self._load_shadow(version) if staging == "shadow" else self._load_arriving(version, name)
            pause_s = await _undisturbed(load)
            held = joined(await self._rpc("rlhpc_held_checksum"), device_here())
            return WeightTiming(receive_s=received - began, pause_s=pause_s, held=held)

    async def leave(self) -> None:
        """Leave the group; a version that is arriving is abandoned."""
        await self._rpc("rlhpc_leave")

    def close(self) -> None:
        """The engine ends."""
        self._notices.close()

    async def _load_shadow(self, version: int) -> float:
        """Load what was received whole.  Returns the seconds in which no token could be sampled."""
        began = self._clock()
        await self._switch.hold(UPDATE)
        await self._rpc("rlhpc_load")  # if it fails the engine is dead
        await self._become(version)
        pause_s = self._clock() - began
        if not self._has_told_way:
            self._has_told_way = True
            log.info("weights are loaded by %s", "; ".join(sorted(set(await self._rpc("rlhpc_way_of_loading")))))
        return pause_s

    async def _load_arriving(self, version: int, name: str) -> float:
        """Stop sampling and load what arrives.  Returns the seconds in which no token could be sampled.

        Raises TornWeights; then the engine stays as it is, and samples nothing.
        """
        began = self._clock()
        await self._switch.hold(UPDATE)
        self.is_torn = True
        try:
            await self._rpc("rlhpc_permit")
            await self._reached(DONE, BEGUN, name)
        except (TornWeights, GroupFailed) as error:
            raise TornWeights(self._with_state(error)) from error
        await self._become(version)
        return self._clock() - began

    async def _become(self, version: int) -> None:
        """Sampling has stopped and the version is loaded: record it and go on."""
        self.is_torn = False
        self.num_preemptions = max(await self._rpc("rlhpc_num_preemptions"))
        if self._config.generation.recompute_kv:
            await self._call(self._llm.recompute())
        await self._adopt(version, await self._call(self._llm.counts()))
        await self._switch.release(UPDATE)

    def _chosen_staging(self, manifest: WeightManifest) -> str:
        if not self._staging:
            self._staging = choose_staging(
                self._config.weights.staging,
                on_cpu=device_here() == "cpu",
                model_bytes=manifest_bytes(manifest),
                num_shadows=max(num_gpus_here(), self._config.generation.tensor_parallel),
                free_bytes=free_host_bytes(),
            )
        return self._staging

    def _with_state(self, error: Exception) -> str:
        return f"{error}; no token is sampled before a whole version has arrived" if self.is_torn else str(error)

    async def _reached(self, wanted: str, states: list[Any], what: str) -> None:
        """Await the state on every worker.  Raises TornWeights or GroupFailed if one failed."""
        while any(state == BUSY for state, _ in states):
            await self._notices.next()
            states = await self._rpc("rlhpc_poll")
        for state, message in states:
            if state not in (wanted, DONE):
                raise (TornWeights if state == TORN else GroupFailed)(f"{what}: {message}")

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every worker.  Its errors do not cross as classes."""
        result: list[Any] = await self._call(self._llm.collective_rpc(method, args=args))
        return result


async def _undisturbed(work: Coroutine[Any, Any, Result]) -> Result:
    """Await to the end even if the caller is cancelled, and again: weights must not be partly adopted.

    Raises CancelledError then, whatever became of the work: the caller would go on with any other error.
    """
    task, cancellation = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.warning("nobody waits for an update that has failed: %s", failure)
    raise cancellation
