"""The current status of the run, for people and the launcher: status.json, replaced about once a second.

What it was over time goes to timeline.jsonl (timeline.py).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.config import Config
from rlhpc.files import write_atomically
from rlhpc.ownership import Fence
from rlhpc.rewards.error_gate import ErrorGate
from rlhpc.rewards.failures import PREFIX, by_task
from rlhpc.roles.controller.metrics.timeline import Timeline
from rlhpc.roles.controller.process_registry import ProcessRegistry
from rlhpc.run_layout import RunLayout

log = logging.getLogger("rlhpc.status")


@dataclass(slots=True)
class LiveFigures:
    """The numbers of the progress line, and those that a supervisor plans with."""

    phase: str = "starting"
    step: int = 0
    version: int = -1
    reward: float = 0.0
    staleness_max: int = 0
    trainer_tokens_per_s: float = 0.0
    generator_tokens_per_s: float = 0.0
    eta_s: float | None = None
    step_s: float = 0.0  # longest of the last steps of this attempt, from the end of the one before; 0: none yet
    save_s: float = 0.0  # longest checkpoint of this attempt, from its request until it was complete; 0: none yet
    attempt: int = 0
    resume_step: int | None = None  # the checkpoint that the attempt resumed from
    checkpoints_failed: int = 0  # skipped since the start because they could not be written
    is_ending: bool = False  # all roles have been told to leave, or are about to be: also where the run has failed


class Writer(Protocol):
    """Somebody who writes to the run directory, and goes on where the disk refuses."""

    @property
    def disk_trouble(self) -> str:
        """Why the last write was refused, and what happens next; "": it was not."""


class StatusBoard:
    """Writes the file; a failed write is a warning and does not end the run."""

    def __init__(
        self,
        layout: RunLayout,
        config: Config,
        registry: ProcessRegistry,
        buffer: RolloutBuffer,
        fence: Fence | None = None,
        writers: Sequence[Writer] = (),
        gate: ErrorGate | None = None,
    ) -> None:
        self._path, self._config, self._registry, self._buffer = layout.status, config, registry, buffer
        self._fence, self._writers, self._gate = fence, writers, gate
        self._timeline = Timeline(layout.timeline, fence)
        self.figures = LiveFigures()

    def document(self) -> bytes:
        """The content of the file."""
        figures, now_s, roles = self.figures, time.time(), self._registry.report()
        self._timeline.look(now_s, roles, attempt=figures.attempt, step=figures.step, phase=figures.phase)
        document = {
            "name": self._config.run.name,
            "unix_time_s": now_s,
            "num_steps": self._config.run.num_steps,
            "staleness_bound": self._buffer.staleness_bound,
            "queue": self._buffer.counts() | {"oldest_in_flight_s": round(self._buffer.oldest_in_flight_age_s)},
            "roles": roles,
            "disk_troubles": [each.disk_trouble for each in self._writers if each.disk_trouble],
            "errors": self._gate.document() if self._gate is not None else {},
            "verifiers": by_task(self._registry.totals(PREFIX, "reward", "generator")),
            **{name: getattr(figures, name) for name in LiveFigures.__slots__},
        }
        return json.dumps(document).encode()

    def write(self, document: bytes) -> None:
        """Replace the file, append to the timeline.  One thread at a time, while another one calls `document`.

        Raises OwnershipLost.
        """
        try:
            if self._fence is not None:
                self._fence.write(self._path, document, is_synced=False)
            else:
                write_atomically(self._path, document)
        except OSError as error:
            log.warning("%s not written: %s", self._path, error.strerror or error)
        self._timeline.write(time.time())
