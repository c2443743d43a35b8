"""The worker extension that vLLM mixes into each worker: receive weights during decoding, load them while paused.

Called by name over collective_rpc, with JSON for arguments (tensors do not survive vLLM's msgpack).  Every name starts
with rlhpc_, since vLLM refuses an extension whose names collide with the worker's.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from rlhpc.base.patience import Deadline
from rlhpc.generation.reload_plan import WeightReload
from rlhpc.generation.vllm_start import SignalShield
from rlhpc.protocol.contracts import WeightReceiver
from rlhpc.protocol.errors import GroupFailed, RlhpcError, TornWeights
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.checksums import checksum_of
from rlhpc.weights.factory import make_receiver
from rlhpc.weights.memory import DeviceScope, HostShadow, NamedTensors, device_id, fresh_blocks, indexed, named_tensors

# ----------------------------------------------------------------------------------------------------- preemption count
#
# Count requests that vLLM's scheduler throws out of a full KV cache.
#
# Input: what the scheduler tells a model runner before each step.  vLLM's own statistics hold the number too, but cost
# its front end 14 % of its time on a small model, since they look at every token of every request.


class PreemptionCount:
    """Observes a model runner."""

    def __init__(self, model_runner: Any) -> None:
        """Wrap execute_model of the worker's model runner."""
        self.total = 0
        execute = model_runner.execute_model

        @functools.wraps(execute)
        def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.total += len(getattr(scheduler_output, "preempted_req_ids", None) or ())
            return execute(scheduler_output, *args, **kwargs)

        model_runner.execute_model = counted


# ---------------------------------------------------------------------------------------------------------- weight link
#
# Receive weights on a thread of an engine worker.
#
# Input: WeightGroup and WeightManifest.  Two ways to stage a version:
#
#     shadow   it is received whole while the worker decodes, and handed out once its checksums agree
#     paused   the first bucket is received while the worker decodes; then the link is READY and waits for permission.
#              The engine stops sampling and permits: every bucket is loaded as it arrives, in this thread
#
# One task at a time; a task is started, gives notice when it is READY and when it has ended, is polled then, and its
# outcome stays until the next one is started.  Guarantee: before permission nothing of the model is touched.  Knows
# nothing of vLLM.


BUSY, READY, DONE, FAILED, TORN = "busy", "ready", "done", "failed", "torn"
LOOK_S = 0.1  # between two checks of the publisher
Load = Callable[[Iterator[tuple[str, Tensor]]], None]


def write_notice(pipe: str) -> None:
    """Write a byte into a named pipe, unless nobody reads it any more or it is full: then there are others in it."""
    with suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"!")
        finally:
            os.close(descriptor)


class WeightLink:
    """A WeightReceiver and the thread that waits for it."""

    def __init__(
        self,
        receiver: WeightReceiver,
        scope: DeviceScope,
        shadow: HostShadow,
        *,
        permit_s: float,
        give_notice: Callable[[], None] = lambda: None,
    ) -> None:
        """The link owns the receiver from now on; its thread works on the scope's device and stream.

        shadow: memory in which versions are received whole; it outlives the link.
        permit_s: how long a version that is ready waits for permission.
        give_notice: called in the thread when there is something new to poll.
        """
        self._receiver, self._scope, self._shadow = receiver, scope, shadow
        self._permit_s, self._give_notice = permit_s, give_notice
        self._thread: threading.Thread | None = None
        self._outcome: tuple[str, str] = (DONE, "")
        self._is_ready = False
        self._is_given_up = False
        self._permission = threading.Event()

    def begin_join(self, group: WeightGroup, rank: int) -> tuple[str, str]:
        """Start joining the group.  Returns what poll() would, or FAILED if an abandoned task still runs."""
        return self._start(lambda: self._receiver.join(group, rank))

    def begin_shadow(self, manifest: WeightManifest) -> tuple[str, str]:
        """Start receiving into the shadow, as begin_join; a version not taken is dropped."""
        return self._start(lambda: self._shadow.receive(self._receiver, manifest))

    def begin_paused(self, manifest: WeightManifest, load: Load) -> tuple[str, str]:
        """Start receiving; `load` is called in the thread once it is permitted, and draws the tensors as they arrive.

        The iterator that it draws from raises if the version turns out to be torn.
        """
        return self._start(lambda: self._load_arriving(manifest, load))

    def permit(self) -> None:
        """The engine is paused: the version that is ready may be loaded."""
        self._permission.set()

    def give_up(self) -> None:
        """Another worker of this engine failed: let the rest of the version pass without loading it."""
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
        with closing(self._receiver.receive(manifest, fresh_blocks(manifest))) as arriving:
            first = list(itertools.islice(arriving, 1))
            self._is_ready = True
            self._give_notice()
            self._await_permission()
            if self._is_given_up:
                raise GroupFailed("cancelled: nothing was loaded")
            tensors = named_tensors(manifest, itertools.chain(self._handed_over(first), arriving))
            load(self._unless_given_up(tensors))
            for _ in tensors:  # the end of it, where checksums are compared, must be reached
                raise TornWeights(f"version {manifest.policy_version}: not all of it was loaded")

    def _await_permission(self) -> None:
        """Check the publisher meanwhile: on a GPU the engine waits for the bucket that is under way.

        That is a kernel of NCCL, which ends with its publisher's data or when this thread leaves the group.
        """
        deadline = Deadline(self._permit_s)
        while not self._permission.wait(LOOK_S):
            if lost := self._receiver.lost():
                raise GroupFailed(lost)
            if deadline.is_over:
                raise GroupFailed(f"the engine did not stop sampling within {self._permit_s:g} s")

    @staticmethod
    def _handed_over(blocks: list[Tensor]) -> Iterator[Tensor]:
        """Yield them without keeping them: a block is freed when its tensors are."""
        while blocks:
            yield blocks.pop(0)

    def _unless_given_up(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for tensor in tensors:
            if self._is_given_up:  # perhaps while this one was awaited, or while another link was loading
                raise GroupFailed("given up")
            yield tensor

    def _start(self, task: Callable[[], None]) -> tuple[str, str]:
        if self._outcome[0] == BUSY:
            return FAILED, "the previous task of this member has not ended"  # to wait here would stop decoding
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


NO_GROUP = (FAILED, "this worker is in no weight group")


class WeightUpdateExtension:
    """Methods of a vLLM worker process.  The attributes below are the worker's."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device
        model_runner: Any
        model_config: Any
        vllm_config: Any

    _rlhpc_preemptions: PreemptionCount | None = None
    _rlhpc_link: WeightLink | None = None
    _rlhpc_scope: DeviceScope | None = None  # this and the next three are made once, at the first join
    _rlhpc_shadow: HostShadow
    _rlhpc_loading: threading.Lock
    _rlhpc_reload: WeightReload
    _rlhpc_shield: SignalShield | None = None

    def rlhpc_follow_parent(self, parent_pid: int) -> None:
        """Follow the generator, which has this pid (vllm_start.py); start counting.

        Where it has several workers their core obeys, too (vllm_start.py).
        """
        self._rlhpc_preemptions = PreemptionCount(self.model_runner)
        self._rlhpc_shield = SignalShield()
        self._rlhpc_shield.follow(parent_pid)

    def rlhpc_heed_signals(self) -> None:
        """Restore the signals that rlhpc_follow_parent ignores, so that vLLM can end its processes."""
        if self._rlhpc_shield is not None:
            self._rlhpc_shield.heed()

    def rlhpc_device_id(self) -> str:
        """Unique name of this worker's GPU; "" on CPU."""
        return device_id(self.device)

    def rlhpc_num_preemptions(self) -> int:
        """Requests that were thrown out of the KV cache since rlhpc_follow_parent."""
        return self._rlhpc_preemptions.total if self._rlhpc_preemptions is not None else 0

    def rlhpc_begin_join(self, group_json: str, member: str, timeout_s: float, notices: str) -> tuple[str, str]:
        """Start joining a membership epoch, after leaving the previous one.  Returns what rlhpc_poll would.

        notices: a named pipe for a byte whenever rlhpc_poll has something new to say.
        """
        self.rlhpc_leave()
        group = msgspec.json.decode(group_json, type=WeightGroup)
        if self._rlhpc_scope is None:
            self._rlhpc_scope = DeviceScope(indexed(self.device))
            self._rlhpc_shadow = HostShadow(is_pinned=self._rlhpc_scope.device.type == "cuda")
            self._rlhpc_loading = threading.Lock()
            model = self.model_runner.get_model()
            self._rlhpc_reload = WeightReload(model, self.vllm_config, self.model_config, self.device)
        receiver = make_receiver(group.transport, device=str(self._rlhpc_scope.device), timeout_s=timeout_s)
        self._rlhpc_link = WeightLink(
            receiver,
            self._rlhpc_scope,
            self._rlhpc_shadow,
            permit_s=timeout_s,
            give_notice=functools.partial(write_notice, notices),
        )
        return self._rlhpc_link.begin_join(group, group.first_rank(member) + self.rank)

    def rlhpc_begin_receive(self, manifest_json: str, staging: str) -> tuple[str, str]:
        """Start receiving, into a "shadow" or "paused".  Returns what rlhpc_poll would."""
        if self._rlhpc_link is None:
            return NO_GROUP
        manifest = msgspec.json.decode(manifest_json, type=WeightManifest)
        if staging == "shadow":
            return self._rlhpc_link.begin_shadow(manifest)
        return self._rlhpc_link.begin_paused(manifest, self._rlhpc_load_arriving)

    def rlhpc_poll(self) -> tuple[str, str]:
        """State and message of what was begun last."""
        return NO_GROUP if self._rlhpc_link is None else self._rlhpc_link.poll()

    def rlhpc_load(self) -> None:
        """Load the shadow.  Must run while nothing is sampled; if it raises the model is neither old nor new."""
        if self._rlhpc_link is None:
            raise GroupFailed(NO_GROUP[1])
        weights = self._rlhpc_link.take()
        with self._rlhpc_loading:
            self._rlhpc_reload.load(weights)
        self._rlhpc_finish_kernels()

    def rlhpc_way_of_loading(self) -> str:
        """How versions are loaded that come whole; "" before the first."""
        return self._rlhpc_reload.way

    def rlhpc_permit(self) -> None:
        """Sampling has stopped: load what is ready as it arrives."""
        self._rlhpc_finish_kernels()
        if self._rlhpc_link is not None:
            self._rlhpc_link.permit()

    def rlhpc_give_up(self) -> None:
        """Another worker of this engine failed: let the rest of the version pass."""
        if self._rlhpc_link is not None:
            self._rlhpc_link.give_up()

    def _rlhpc_load_arriving(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with self._rlhpc_loading:  # an abandoned task may not have ended: the next one waits for it
            self._rlhpc_reload.load_arriving(weights)

    def _rlhpc_finish_kernels(self) -> None:
        """Decoding and loading are on different streams: neither may begin before the other has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rlhpc_held_checksum(self) -> tuple[int, dict[str, int]]:
        """Checksum of this worker's parameters, and numbers of each dtype (weights/checksums.py)."""
        return checksum_of(parameter.detach() for parameter in self.model_runner.get_model().parameters())

    def rlhpc_leave(self) -> None:
        """Leave the membership epoch, if any."""
        if self._rlhpc_link is not None:
            self._rlhpc_link.leave()
        self._rlhpc_link = None
