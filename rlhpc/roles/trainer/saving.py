"""Several parts of a checkpoint that are written at the same time, as one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock


class Together(Future[dict[str, int]]):
    """Done when all of these are: with the first one's exception in their order, or the files of all.

    Cancelling it cancels them; it counts as cancelled where one of them was.
    """

    def __init__(self, parts: Sequence[Future[dict[str, int]]]) -> None:
        super().__init__()
        self._parts, self._num_left, self._lock = parts, len(parts), Lock()
        for part in parts:
            part.add_done_callback(self._one_is_done)

    def cancel(self) -> bool:
        """Abandon all that have not been written."""
        cancelled = [part.cancel() for part in self._parts]
        return any(cancelled)

    def _one_is_done(self, _: Future[dict[str, int]]) -> None:
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return
        if any(part.cancelled() for part in self._parts):
            super().cancel()
            return
        failure = next((error for part in self._parts if (error := part.exception()) is not None), None)
        if failure is not None:
            self.set_exception(failure)
        else:
            self.set_result({name: size for part in self._parts for name, size in part.result().items()})
