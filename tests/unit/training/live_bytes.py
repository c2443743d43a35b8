"""How many bytes of tensors live at once while some operations run: exact, the same on every machine."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make, and how many bytes of them live at once."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        if storage.data_ptr() in self._seen or not storage.nbytes():
            return
        self._seen.add(storage.data_ptr())
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())

    def _forget(self, pointer: int, num_bytes: int) -> None:
        self._seen.discard(pointer)
        self.live -= num_bytes
