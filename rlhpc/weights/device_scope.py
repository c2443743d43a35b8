"""Run the work of a thread on one device, and on a separate CUDA stream.

Input: a device; output: a context to work in.  A thread does not inherit the current CUDA device of the one that
started it: it begins on cuda:0 and on the legacy default stream, which waits for every other stream and makes them
wait.  Guarantee: when the context ends, everything that was launched in it has completed, so that other threads may
read its results without waiting for an event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DeviceScope:
    """One device and a stream for the thread that enters.  Kept for the life of a process.

    The caching allocator keeps freed blocks for the stream that they were allocated on: with a new stream each time
    the earlier buffers could not be reused.
    """

    def __init__(self, device: torch.device) -> None:
        """device: with its index if it is a GPU."""
        self.device = device
        self._stream: Any = None  # torch's stream classes come without types

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make device and stream the calling thread's, and wait for the stream at the end.  On CPU: nothing."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self.device)
        stream = self._own_stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _own_stream(self) -> Any:
        if self._stream is None:
            make_stream: Any = torch.cuda.Stream
            self._stream = make_stream(self.device)
        return self._stream


def indexed(device: str | torch.device) -> torch.device:
    """The device with its index: "cuda" is the calling thread's current GPU."""
    wanted = torch.device(device)
    if str(wanted) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return wanted
