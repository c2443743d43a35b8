"""Update an engine to a new version: receive, pause sampling, load, adopt, resume.  Both sides are here.

In this file: the link that receives on a worker's thread; the worker's extension; the switch that pauses sampling; the
choice of staging; the engine's side.

In each worker: WeightUpdateExtension, completed for the library (vllm_worker.py, transformers_core.py); it receives on
a thread, and loads.  It is called by name over collective_rpc, with JSON for arguments (tensors do not survive vLLM's
msgpack).  Beside the engine: WeightUpdates, which directs the workers.

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
import functools
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import psutil
import torch
from torch import Tensor

from rlhpc.base.patience import Deadline
from rlhpc.config.rules import Config
from rlhpc.generation.adapter_tensors import read_peft
from rlhpc.generation.running_core import RunningCore, device_here, num_gpus_here
from rlhpc.metrics.meters import BusyClock
from rlhpc.models.adapter import A
from rlhpc.models.weights import NotSafetensors
from rlhpc.protocol.contracts import Clock, WeightReceiver, WeightTiming
from rlhpc.protocol.errors import GroupFailed, RlhpcError, TornWeights
from rlhpc.protocol.types import AdapterForm, TensorSpec, WeightGroup, WeightManifest
from rlhpc.weights.buckets import make_manifest, manifest_bytes
from rlhpc.weights.checksums import checksum_of, joined
from rlhpc.weights.factory import make_receiver
from rlhpc.weights.memory import (
    DeviceScope,
    HostShadow,
    NamedTensors,
    Refuse,
    device_id,
    fresh_blocks,
    indexed,
    named_tensors,
)

# ---------------------------------------------------------------------------------------------------------- weight link
#
# Receive weights on a thread of an engine worker.
#
# Input: WeightGroup and WeightManifest.  Two ways to stage a version:
#
#     shadow   received whole while the worker decodes, and handed out once its checksums agree
#     paused   the first bucket is received while the worker decodes; then the link is READY and waits for permission.
#              The engine stops sampling and permits: every bucket is loaded as it arrives, in this thread
#
# One task at a time: it is started, gives notice when READY and when it has ended, and is then polled; its
# outcome stays until the next one is started.  Guarantee: before permission the model is not touched.


BUSY, READY, DONE, FAILED, TORN = "busy", "ready", "done", "failed", "torn"
LOOK_S = 0.1  # between two checks of the publisher
Load = Callable[[Iterator[tuple[str, Tensor]]], None]


def write_notice(pipe: str) -> None:
    """Write a byte into a named pipe, unless it has no reader, or is full of earlier notices."""
    with suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"!")
        finally:
            os.close(descriptor)


class WeightLink:
    """A WeightReceiver and its thread."""

    def __init__(
        self,
        receiver: WeightReceiver,
        scope: DeviceScope,
        shadow: HostShadow,
        *,
        permit_s: float,
        refuse: Refuse = lambda manifest: None,
        give_notice: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the receiver; the thread works on the scope's device and stream.

        shadow: memory in which versions are received whole; it outlives the link.
        permit_s: how long a version that is ready waits for permission.
        refuse: called for every version before its first bucket; its errors reach the publisher as a refusal.
        give_notice: called in the thread when there is a new state to poll.
        """
        self._receiver, self._scope, self._shadow = receiver, scope, shadow
        self._permit_s, self._refuse, self._give_notice = permit_s, refuse, give_notice
        self._thread: threading.Thread | None = None
        self._outcome: tuple[str, str] = (DONE, "")
        self._is_ready = False
        self._is_given_up = False
        self._permission = threading.Event()

    def begin_join(self, group: WeightGroup, rank: int) -> tuple[str, str]:
        """Start joining the group.  Returns the state as poll(), or FAILED if an abandoned task still runs."""
        return self._start(lambda: self._receiver.join(group, rank))

    def begin_shadow(self, manifest: WeightManifest) -> tuple[str, str]:
        """Start receiving into the shadow, as begin_join; a version not taken is dropped."""
        return self._start(lambda: self._shadow.receive(self._receiver, manifest, self._refuse))

    def begin_paused(self, manifest: WeightManifest, load: Load) -> tuple[str, str]:
        """Start receiving; `load` is called in the thread once it is permitted, and draws the tensors as they arrive.

        The iterator that it draws from raises if the version turns out to be torn.
        """
        return self._start(lambda: self._load_arriving(manifest, load))

    def permit(self) -> None:
        """Permit loading of the ready version: the engine is paused."""
        self._permission.set()

    def give_up(self) -> None:
        """Skip the rest of the version, since another worker of this engine failed."""
        self._is_given_up = True
        self._permission.set()

    def poll(self) -> tuple[str, str]:
        """(state, message): BUSY, READY, DONE, TORN (weights damaged) or FAILED (anything else)."""
        if self._outcome[0] == BUSY and self._is_ready and not self._permission.is_set():
            return READY, ""
        return self._outcome

    def take(self) -> NamedTensors:
        """Hand the shadow over.  Raises TornWeights if there is none."""
        if self.poll()[0] != DONE:
            raise TornWeights("no complete weights have been received")
        return self._shadow.take()

    def leave(self) -> None:
        """Leave the group.  A running task is abandoned: it ends by its receiver's time-out; its result is ignored."""
        self.give_up()
        self._receiver.leave()
        self._shadow.drop()

    def _load_arriving(self, manifest: WeightManifest, load: Load) -> None:
        with closing(self._receiver.receive(manifest, fresh_blocks(manifest, self._refuse))) as arriving:
            first = list(itertools.islice(arriving, 1))
            self._is_ready = True
            self._give_notice()
            self._await_permission()
            if self._is_given_up:
                raise GroupFailed("cancelled: nothing was loaded")
            tensors = named_tensors(manifest, itertools.chain(self._handed_over(first), arriving))
            load(self._unless_given_up(tensors))
            for _ in tensors:  # to the end, where checksums are compared
                raise TornWeights(f"version {manifest.policy_version}: not all of it was loaded")

    def _await_permission(self) -> None:
        """Wait for permission, and check the publisher: on a GPU the engine waits for the bucket that is under way.

        That bucket is a kernel of NCCL, which ends with the publisher's data or when this thread leaves the group.
        """
        deadline = Deadline(self._permit_s)
        while not self._permission.wait(LOOK_S):
            if lost := self._receiver.lost():
                raise GroupFailed(lost)
            if deadline.is_over:
                raise GroupFailed(f"the engine did not stop sampling within {self._permit_s:g} s")

    @staticmethod
    def _handed_over(blocks: list[Tensor]) -> Iterator[Tensor]:
        """Yield tensors without keeping them, so that their block can be freed."""
        while blocks:
            yield blocks.pop(0)

    def _unless_given_up(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for tensor in tensors:
            if self._is_given_up:  # perhaps set while this tensor was awaited, or another link was loading
                raise GroupFailed("given up")
            yield tensor

    def _start(self, task: Callable[[], None]) -> tuple[str, str]:
        if self._outcome[0] == BUSY:
            return FAILED, "the previous task of this member has not ended"  # waiting here would stop decoding
        self._outcome, self._is_ready, self._is_given_up = (BUSY, ""), False, False
        self._permission.clear()
        self._thread = threading.Thread(target=self._run, args=(task,), name="weights", daemon=True)
        self._thread.start()
        return self.poll()

    def _run(self, task: Callable[[], None]) -> None:
        self._outcome = self._done(task)
        self._give_notice()

    def _done(self, task: Callable[[], None]) -> tuple[str, str]:
        try:
            with self._scope.entered():
                task()
        except TornWeights as error:
            return TORN, str(error)
        except RlhpcError as error:
            return FAILED, str(error)
        except Exception as error:  # noqa: BLE001 - whatever ends the thread must reach poll(), or its caller never ends
            return FAILED, repr(error)
        return DONE, ""


# ----------------------------------------------------------------------------------------------------- worker extension
#
# Every name starts with rlhpc_, since vLLM refuses an extension whose names collide with the worker's.  It mixes it
# into a class of its own: methods that a library must provide raise NotImplementedError.


NO_GROUP = (FAILED, "this worker is in no weight group")


class WholeLoads(Protocol):
    """Loads whole versions into one worker's model, between two decoding steps."""

    way: str  # how; "" before the first

    def load(self, weights: NamedTensors) -> None:
        """Load a version that is there.  On CUDA copies may still be under way on the current stream."""

    def load_arriving(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors as they arrive; if the iterator raises, the model is neither old nor new."""


class AdapterLoads(Protocol):
    """Holds the adapters of one worker's model; str() says how they are loaded."""

    def refuse_unfit(self, manifest: WeightManifest) -> None:
        """Raise GroupFailed, naming the module, unless a version of this manifest can be loaded; changes nothing."""

    def load(self, weights: Iterable[tuple[str, Tensor]], manifest: WeightManifest, number: int = 1) -> None:
        """Overwrite an adapter once its last tensor has come.  Raises GroupFailed; it is then unchanged."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the policy's adapter."""


class WeightUpdateExtension:
    """Methods of an engine's worker, whatever its library.  The attributes in the first block are the worker's."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device

    _rlhpc_link: WeightLink | None = None
    _rlhpc_scope: DeviceScope | None = None  # this and the next three are made once, at the first join
    _rlhpc_shadow: HostShadow
    _rlhpc_loading: threading.Lock
    _rlhpc_reload: WholeLoads
    _rlhpc_slot: AdapterLoads | None = None  # None: versions are whole weights
    _rlhpc_manifest: WeightManifest  # of the latest version

    def rlhpc_follow_parent(self, parent_pid: int) -> None:
        """Serve the generator with this pid from now on; start counting."""
        raise NotImplementedError

    def rlhpc_hold_adapters(self, rank: int, modules: list[str], base: str, num_adapters: int) -> None:
        """Expect adapters of this rank and these modules from now on; base: digest of the weights held here."""
        raise NotImplementedError

    def rlhpc_num_preemptions(self) -> int:
        """Number of requests whose cache was taken from them, since rlhpc_follow_parent."""
        raise NotImplementedError

    def _rlhpc_parameters(self) -> Iterator[Tensor]:
        """Yield the model's parameters."""
        raise NotImplementedError

    def _rlhpc_whole_loads(self) -> WholeLoads:
        raise NotImplementedError

    def rlhpc_heed_signals(self) -> None:
        """Restore the signals that rlhpc_follow_parent ignores, if it does."""

    def rlhpc_load_adapter(self, number: int, directory: str, scale: float, base: str) -> str:
        """Load a PEFT adapter directory into a slot that no request uses; return why not, "" if it is loaded."""
        assert self._rlhpc_slot is not None
        try:
            tensors = read_peft(Path(directory))
            specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors]
            rank = next(tensor.shape[0] for name, tensor in tensors if name.endswith(A))
            manifest = make_manifest(0, 0, specs, 1 << 20, AdapterForm(rank, scale, base))
            self._rlhpc_slot.load(tensors, manifest, number)
        except (GroupFailed, NotSafetensors, OSError) as error:
            return f"{directory}: {error}"
        return ""

    def rlhpc_device_id(self) -> str:
        """Unique name of this worker's GPU; "" on CPU."""
        return device_id(self.device)

    def rlhpc_begin_join(self, group_json: str, member: str, timeout_s: float, notices: str) -> tuple[str, str]:
        """Start joining a membership epoch, after leaving the previous one.  Returns as rlhpc_poll.

        notices: a named pipe that gets a byte whenever rlhpc_poll has a new state.
        """
        self.rlhpc_leave()
        group = msgspec.json.decode(group_json, type=WeightGroup)
        if self._rlhpc_scope is None:
            self._rlhpc_scope = DeviceScope(indexed(self.device))
            self._rlhpc_shadow = HostShadow(is_pinned=self._rlhpc_scope.device.type == "cuda")
            self._rlhpc_loading = threading.Lock()
            self._rlhpc_reload = self._rlhpc_whole_loads()
        receiver = make_receiver(group.transport, device=str(self._rlhpc_scope.device), timeout_s=timeout_s)
        self._rlhpc_link = WeightLink(
            receiver,
            self._rlhpc_scope,
            self._rlhpc_shadow,
            permit_s=timeout_s,
            refuse=self._rlhpc_refuse,
            give_notice=functools.partial(write_notice, notices),
        )
        return self._rlhpc_link.begin_join(group, group.first_rank(member) + self.rank)

    def rlhpc_begin_receive(self, manifest_json: str, staging: str) -> tuple[str, str]:
        """Start receiving; staging: "shadow" or "paused".  Returns as rlhpc_poll."""
        if self._rlhpc_link is None:
            return NO_GROUP
        self._rlhpc_manifest = manifest = msgspec.json.decode(manifest_json, type=WeightManifest)
        if staging == "shadow":
            return self._rlhpc_link.begin_shadow(manifest)
        return self._rlhpc_link.begin_paused(manifest, functools.partial(self._rlhpc_load_arriving, manifest))

    def rlhpc_poll(self) -> tuple[str, str]:
        """State and message of the latest task."""
        return NO_GROUP if self._rlhpc_link is None else self._rlhpc_link.poll()

    def rlhpc_load(self) -> None:
        """Load the shadow.  Must run while nothing is sampled; if it raises, the model is neither old nor new."""
        if self._rlhpc_link is None:
            raise GroupFailed(NO_GROUP[1])
        weights = self._rlhpc_link.take()
        with self._rlhpc_loading:
            if self._rlhpc_slot is not None:
                self._rlhpc_slot.load(weights, self._rlhpc_manifest)
            else:
                self._rlhpc_reload.load(weights)
        self._rlhpc_finish_kernels()

    def rlhpc_way_of_loading(self) -> str:
        """Method by which whole versions are loaded; "" before the first."""
        return self._rlhpc_reload.way if self._rlhpc_slot is None else str(self._rlhpc_slot)

    def rlhpc_permit(self) -> None:
        """Load the ready version as it arrives: sampling has stopped."""
        self._rlhpc_finish_kernels()
        if self._rlhpc_link is not None:
            self._rlhpc_link.permit()

    def rlhpc_give_up(self) -> None:
        """Skip the rest of the version, since another worker of this engine failed."""
        if self._rlhpc_link is not None:
            self._rlhpc_link.give_up()

    def _rlhpc_refuse(self, manifest: WeightManifest) -> None:
        """Raise GroupFailed for a version in another form than this worker's, or whose adapters do not fit."""
        if self._rlhpc_slot is not None:
            self._rlhpc_slot.refuse_unfit(manifest)
        elif manifest.adapter is not None:
            raise GroupFailed(f"version {manifest.policy_version} is an adapter, and this engine holds whole weights")

    def _rlhpc_load_arriving(self, manifest: WeightManifest, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with self._rlhpc_loading:  # the next task waits for an abandoned one that has not ended
            if self._rlhpc_slot is not None:
                self._rlhpc_slot.load(weights, manifest)
            else:
                self._rlhpc_reload.load_arriving(weights)

    def _rlhpc_finish_kernels(self) -> None:
        """Wait for the GPU: decoding and loading are on different streams, and must not overlap."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rlhpc_held_checksum(self) -> tuple[int, dict[str, int]]:
        """Checksum of this worker's parameters and adapters, and numbers of each dtype (weights/checksums.py)."""
        parameters = (parameter.detach() for parameter in self._rlhpc_parameters())
        return checksum_of(itertools.chain(parameters, () if self._rlhpc_slot is None else self._rlhpc_slot.tensors()))

    def rlhpc_leave(self) -> None:
        """Leave the membership epoch, if any."""
        if self._rlhpc_link is not None:
            self._rlhpc_link.leave()
        self._rlhpc_link = None


# --------------------------------------------------------------------------------------------------------- pause switch
#
# Keep an engine's core paused while at least one holder wants it paused.
#
# Input: holds and releases, each under its holder's name.  Output: calls of pause and resume.
# Requests are kept.  Guarantee: nothing is sampled between a hold that has returned and the release of the same name.


class PauseSwitch:
    """The names of the holders that keep an engine paused."""

    def __init__(self, core: RunningCore, call: Callable[[Any], Awaitable[Any]], busy: BusyClock) -> None:
        """call: awaits a call of the core and maps its errors."""
        self._core, self._call, self._busy = core, call, busy
        self._holders: set[str] = set()
        self._is_paused = False
        self._changing = asyncio.Lock()

    async def hold(self, name: str) -> None:
        """Pause after the current step.  Idempotent."""
        async with self._changing:
            self._holders.add(name)
            if not self._is_paused:
                await self._call(self._core.pause())
                self._is_paused = True
                self._busy.pause()

    async def release(self, name: str) -> None:
        """Resume, unless there is another holder.  Idempotent."""
        async with self._changing:
            self._holders.discard(name)
            if self._is_paused and not self._holders:
                await self._call(self._core.resume())
                self._is_paused = False
                self._busy.resume()


# ------------------------------------------------------------------------------------------------------- staging choice
#
# Choose how an engine stages new weights: a shadow in host memory, or paused loading (docs/decisions/015).
#
# Pure, except free_host_bytes(), which reads the machine's state.


SHADOW_SHARE = (
    0.5  # share of free host memory for the shadows of all engines of a node; the trainer's copies come later
)
UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 where there is no limit


def choose_staging(setting: str, *, on_cpu: bool, model_bytes: int, num_shadows: int, free_bytes: int) -> str:
    """ "shadow" or "paused".

    setting: weights.staging.  num_shadows: number of workers of this node that may need a shadow.
    """
    if setting != "auto":
        return setting
    if on_cpu:
        return "shadow"  # the model is in host memory anyway
    return "shadow" if model_bytes * num_shadows <= SHADOW_SHARE * free_bytes else "paused"


def free_host_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory available to this process: the machine's, or less by its cgroup's limit."""
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
NOTICE_S = 1.0  # then workers are polled without a notice: one may have died
UPDATE = "update"  # holder name of the pause
BEGUN = [(BUSY, "")]  # the state of a worker that was just resumed

Result = TypeVar("Result")


class WorkerNotices:
    """A named pipe into which a worker writes a byte when it has a new state.

    Workers cannot be awaited: a call that does not return at once delays the next decoding step, and polling every few
    milliseconds costs each step in between.
    """

    def __init__(self) -> None:
        """Make the pipe; the running event loop reads it."""
        self._directory = Path(tempfile.mkdtemp(prefix="rlhpc-notices-"))
        self.pipe = self._directory / "pipe"
        os.mkfifo(self.pipe, 0o600)
        self._descriptor = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
        self._have_come = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)

    async def next(self) -> None:
        """Wait for a notice since the last call, for at most NOTICE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICE_S):
                await self._have_come.wait()
        self._have_come.clear()

    def close(self) -> None:
        """Remove the pipe: later notices of workers are lost."""
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
        core: RunningCore,
        call: Callable[[Any], Awaitable[Any]],
        switch: PauseSwitch,
        adopt: Callable[[int, dict[str, int]], Awaitable[None]],
        *,
        config: Config,
        clock: Clock,
    ) -> None:
        """call: awaits a call of the core; raises EngineError.

        adopt: records a loaded version, given the number of tokens of each request that has one.
        """
        self._core, self._call, self._switch, self._adopt = core, call, switch, adopt
        self._config, self._clock = config, clock
        self._updating = asyncio.Lock()
        self._staging = ""  # chosen once, when the size of the model is known
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
        """Stop reading notices: the engine ends."""
        self._notices.close()

    async def _load_shadow(self, version: int) -> float:
        """Load the version that was received whole.  Returns the seconds in which no token could be sampled."""
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
        """Stop sampling and load buckets as they arrive.  Returns the seconds in which no token could be sampled.

        Raises TornWeights; the engine then stays torn, and samples nothing.
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
        """Record the loaded version and resume; sampling has stopped."""
        self.is_torn = False
        self.num_preemptions = max(await self._rpc("rlhpc_num_preemptions"))
        if self._config.generation.recompute_kv:
            await self._call(self._core.recompute())
        await self._adopt(version, await self._call(self._core.counts()))
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
        """Wait until every worker has this state.  Raises TornWeights or GroupFailed if one failed."""
        while any(state == BUSY for state, _ in states):
            await self._notices.next()
            states = await self._rpc("rlhpc_poll")
        for state, message in states:
            if state not in (wanted, DONE):
                raise (TornWeights if state == TORN else GroupFailed)(f"{what}: {message}")

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every worker.  Its errors do not cross as classes."""
        result: list[Any] = await self._call(self._core.collective_rpc(method, args=args))
        return result


async def _undisturbed(work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work to its end, however often the caller is cancelled: weights must not be partly adopted.

    Raises CancelledError then, whatever the result: after any other error the caller would go on.
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
