"""What a controller does with a rollout between its socket and the trainer's; bench/journal.py times it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.algorithms.packing import FlopCost, pack
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.rollout_journal import RolloutJournal
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.config.rules import Config
from rlhpc.protocol.messages import Delivery
from rlhpc.protocol.types import PackedBatch, Prompt, SamplingParams
from rlhpc.transport.codec import Codec, Frame


@dataclass(frozen=True)
class Shape:
    """Of a step."""

    group_size: int
    groups_per_step: int
    num_prompt_tokens: int
    num_tokens: int


class Intake:
    """A controller's part of a rollout's way, without the socket."""

    def __init__(self, directory: Path, shape: Shape, journal: RolloutJournal | None) -> None:
        budget = max(1 << 15, shape.num_tokens + shape.num_prompt_tokens)
        config = Config.model_validate(
            {
                "run": {"name": "bench", "num_steps": 1},
                "model": {"path": "none"},
                "data": {"path": "none.jsonl", "task": "integer_arithmetic"},
                "generation": {"max_prompt_tokens": shape.num_prompt_tokens, "max_completion_tokens": shape.num_tokens},
                "admission": {"groups_per_step": shape.groups_per_step, "group_size": shape.group_size},
                "trainer": {"backend": "reference", "token_budget": budget},
            }
        )
        num_groups, clock = shape.groups_per_step, time.monotonic
        segments = SegmentWriter(
            directory, 0, run_name="bench", run_attempt=0, max_groups=num_groups, max_s=1e9, clock=clock
        )
        ledger = AdmissionLedger(
            num_slots=2 * num_groups,
            window_groups=num_groups,
            groups_per_step=num_groups,
            group_size=shape.group_size,
            sampling=lambda _: SamplingParams(max_tokens=shape.num_tokens),
            lease_deadline_s=1e9,
            max_attempts=3,
            clock=clock,
        )
        self._buffer = RolloutBuffer(ledger, segments, journal)
        self._make_samples, self._cost = SampleMaker.of(config), FlopCost(1.0, 0.0)
        self._shape, self._token_budget = shape, budget
        self._in, self._out = Codec([Delivery]), Codec([PackedBatch])
        self._step = 0

    def take_in(self, prompts: Sequence[Prompt], frames: Sequence[list[Frame]]) -> None:
        """A step's groups, from admission until their slots are free again."""
        for prompt in prompts:
            self._buffer.admit(prompt, self._step)
        while self._buffer.ledger.grant("generator-0", self._shape.group_size) is not None:
            pass
        for message in frames:
            _, delivery = self._in.decode(message, "generator-0")
            self._buffer.deliver("generator-0", delivery.scored)
        groups = self._buffer.take(self._shape.groups_per_step, self._step)
        assert groups is not None
        minibatches = tuple(
            pack(part, token_budget=self._token_budget, num_ranks=1, cost=self._cost)
            for part in self._make_samples.minibatches(groups, self._step)
        )
        self._out.encode(PackedBatch(self._step, self._step, minibatches, (0,)), 0)
        self._buffer.consume(groups, self._step, trained_version=self._step, applied=True)
        self._buffer.release([group.group_id for group in groups])
        self._step += 1
