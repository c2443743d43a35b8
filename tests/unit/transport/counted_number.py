"""For tests of how often something is encoded."""

from __future__ import annotations

import numpy as np


class CountedNumber(np.int64):
    """An integer in a message, which knows how often the codec has turned it into bytes."""

    reads = 0

    def item(self) -> int:  # type: ignore[override]
        """What the codec asks a numpy scalar for."""
        self.reads += 1
        return int(self)
