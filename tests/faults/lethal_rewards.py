"""A verifier that stands for a prompt on which engines die: it kills the generator that has sampled it.

Named by run files as "tests.faults.lethal_rewards:parity_unless_lethal".
"""

from __future__ import annotations

import contextlib
import os

import psutil

from rlhpc.protocol.contracts import RewardOutcome
from tests.ring.ring_rewards import parity

LETHAL = "lethal"  # the reference of the prompt
RUN_DIRECTORY = "RLHPC_TEST_LETHAL_RUN"  # environment variable: whose generators die


def parity_unless_lethal(completion: str, reference: str) -> RewardOutcome:
    """As parity; but for the lethal prompt no verdict is useful to anybody."""
    if reference == LETHAL:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "rlhpc.roles" in words and "generator" in words and os.environ[RUN_DIRECTORY] in words:
                    process.kill()
    return parity(completion, reference)
