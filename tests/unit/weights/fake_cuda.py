"""CUDA's rules about threads, devices and streams, for a machine without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class FakeCuda:
    """Every thread begins on device 0 and the default stream, as CUDA has it; nothing is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_thread = threading.local()
        self._num_streams = 0
        self.synchronized: list[str] = []
        for name in ("set_device", "current_device", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)

    def here(self) -> tuple[int, str]:
        """Device and stream of the calling thread."""
        return self.current_device(), getattr(self._of_thread, "stream", "default")

    def set_device(self, device: torch.device) -> None:
        assert device.index is not None
        self._of_thread.device = device.index

    def current_device(self) -> int:
        return int(getattr(self._of_thread, "device", 0))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.here()[1]
        self._of_thread.stream = stream.name
        yield
        self._of_thread.stream = before

    def _new_stream(self, device: torch.device, **kwargs: Any) -> FakeStream:
        stream = FakeStream(f"stream {self._num_streams} of {device}", self)
        self._num_streams += 1
        return stream


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name, self._cuda = name, cuda

    def synchronize(self) -> None:
        self._cuda.synchronized.append(self.name)
