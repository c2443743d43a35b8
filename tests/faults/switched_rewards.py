"""A reward function that a test turns hopeless in the middle of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rlhpc.protocol.contracts import RewardOutcome
from tests.ring.ring_rewards import nothing, parity

SWITCH = "RLHPC_TEST_SWITCH"  # names a file: from when it is there, nobody is right any more
SLOW_S = 0.02  # bounds the pace of the run from below


def parity_while_there_is_hope(completion: str, reference: str) -> RewardOutcome:
    """Right about half the time, until the file is there; then never."""
    time.sleep(SLOW_S)
    return (nothing if Path(os.environ[SWITCH]).exists() else parity)(completion, reference)
