"""Receive weights on a thread of an engine worker, while the worker goes on decoding.

Eats WeightGroup and WeightManifest, holds a shadow copy of the model until it is taken.  One task at a time; a task is
started, polled, and its outcome stays until the next one is started.  Knows nothing of vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from rlhpc.contracts import WeightReceiver
from rlhpc.errors import RlhpcError, TornWeights
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.device_scope import DeviceScope

NamedTensors = list[tuple[str, Tensor]]

BUSY, DONE, FAILED, TORN = "busy", "done", "failed", "torn"


class WeightLink:
    """A WeightReceiver and the thread that waits for it."""

    def __init__(self, receiver: WeightReceiver, scope: DeviceScope) -> None:
        """The receiver belongs to the link from now on; its thread works on the scope's device and stream."""
        self._receiver, self._scope = receiver, scope
        self._thread: threading.Thread | None = None
        self._outcome: tuple[str, str] = (DONE, "")
        self._shadow: NamedTensors | None = None

    def begin_join(self, group: WeightGroup, rank: int) -> tuple[str, str]:
        """Start meeting the others.  Returns what poll() would, or FAILED if a task that was given up still runs."""
        return self._start(lambda: self._receiver.join(group, rank))

    def begin_receive(self, manifest: WeightManifest) -> tuple[str, str]:
        """Start receiving into a shadow copy, as begin_join; a shadow not taken is dropped."""

        def receive() -> None:
            self._shadow = None
            self._shadow = self._receiver.receive(manifest)

        return self._start(receive)

    def poll(self) -> tuple[str, str]:
        """(state, message): BUSY, DONE, TORN (weights damaged) or FAILED (anything else)."""
        if self._thread is not None and self._thread.is_alive():
            return BUSY, ""
        return self._outcome

    def take(self) -> NamedTensors:
        """Hand the shadow over.  Raises TornWeights if there is none."""
        shadow, self._shadow = self._shadow, None
        if shadow is None or self.poll()[0] != DONE:
            raise TornWeights("no complete weights have been received")
        return shadow

    def leave(self) -> None:
        """Leave the group.  A task that runs is given up: it ends within its receiver's time-out, unheard."""
        self._receiver.leave()
        self._shadow = None

    def _start(self, task: Callable[[], None]) -> tuple[str, str]:
        if self._thread is not None and self._thread.is_alive():
            return FAILED, "the previous task of this member has not ended"  # to wait here would stop decoding
        self._outcome = (BUSY, "")
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
        except Exception as error:  # noqa: BLE001 - whatever ends the thread must reach whoever polls, or it waits for ever
            self._outcome = (FAILED, repr(error))
        else:
            self._outcome = (DONE, "")
