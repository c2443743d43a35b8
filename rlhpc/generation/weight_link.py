"""Receive weights on a thread of an engine worker.

Input: WeightGroup and WeightManifest.  Two ways to stage a version:

    shadow   it is received whole while the worker decodes, and handed out once its checksums agree
    paused   the first bucket is received while the worker decodes; then the link is READY and waits for permission.
             The engine stops sampling and permits: every bucket is loaded as it arrives, in this thread

One task at a time; a task is started, polled, and its outcome stays until the next one is started.
Guarantee: before permission nothing of the model is touched.  Knows nothing of vLLM.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

from torch import Tensor

from rlhpc.contracts import WeightReceiver
from rlhpc.deadline import Deadline
from rlhpc.errors import GroupFailed, RlhpcError, TornWeights
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.device_scope import DeviceScope
from rlhpc.weights.shadow import HostShadow, NamedTensors, fresh_blocks, named_tensors

BUSY, READY, DONE, FAILED, TORN = "busy", "ready", "done", "failed", "torn"
LOOK_S = 0.1  # between two checks of the publisher
Load = Callable[[Iterator[tuple[str, Tensor]]], None]


class WeightLink:
    """A WeightReceiver and the thread that waits for it."""

    def __init__(self, receiver: WeightReceiver, scope: DeviceScope, shadow: HostShadow, *, permit_s: float) -> None:
        """The link owns the receiver from now on; its thread works on the scope's device and stream.

        shadow: memory in which versions are received whole; it outlives the link.
        permit_s: how long a version that is ready waits for permission.
        """
        self._receiver, self._scope, self._shadow = receiver, scope, shadow
        self._permit_s = permit_s
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
        if self._thread is not None and self._thread.is_alive():
            return (READY if self._is_ready and not self._permission.is_set() else BUSY), ""
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
        if self._thread is not None and self._thread.is_alive():
            return FAILED, "the previous task of this member has not ended"  # to wait here would stop decoding
        self._outcome, self._is_ready, self._is_given_up = (BUSY, ""), False, False
        self._permission.clear()
        self._thread = threading.Thread(target=self._run, args=(task,), name="weights", daemon=True)
        self._thread.start()
        return self.poll()

    def _run(self, task: Callable[[], None]) -> None:
        try:
            with self._scope.entered():
                task()
        except TornWeights as error:
            self._outcome = (TORN, str(error))
        except RlhpcError as error:
            self._outcome = (FAILED, str(error))
        except Exception as error:  # noqa: BLE001 - whatever ends the thread must reach poll(), or its caller never ends
            self._outcome = (FAILED, repr(error))
        else:
            self._outcome = (DONE, "")
