"""Stragglers that are cut: what is dropped, who is told, and what is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rlhpc.buffer.resolved import DropReason
from rlhpc.buffer.segment_reader import read_rollouts_directory
from rlhpc.messages import CancelGroup
from rlhpc.rewards.error_gate import ErrorGate
from rlhpc.roles.controller.cancelling import Cancelling
from rlhpc.roles.controller.metrics.step_figures import cut_figures
from rlhpc.roles.controller.rollout_sink import RolloutSink
from rlhpc.roles.controller.saved_state import Totals
from rlhpc.topology import LEASES
from rlhpc.transport.memory import MemoryServer
from rlhpc.types import Prefix
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import make_buffer, prompt, scored, small_config


class Policy:
    """Two generators, of which one may be given leases."""

    live_version = 0
    ready_members = frozenset({"generator-0"})


class Ring:
    """A buffer of six groups of two, two a step, all leased, and generators that can be told."""

    def __init__(self, directory: Path, oversample: float) -> None:
        config = small_config(oversample=oversample)
        self.buffer, self.leases = make_buffer(config, directory), MemoryServer(LEASES)
        self.sink = RolloutSink(self.buffer, ErrorGate(1.0), config.admission)
        self.generators = [self.leases.connect(f"generator-{index}") for index in range(2)]
        self.cancelling = Cancelling(self.buffer, self.sink, self.leases, Policy(), config.admission)
        while self.buffer.has_slot:
            self.buffer.admit(prompt(self.buffer.num_admitted), 0)
        while self.buffer.grant("generator-0", 2) is not None:
            pass

    def bring(self, *members: tuple[int, int]) -> None:
        for group_id, index in members:
            self.sink.receive("generator-0", scored(group_id, index))

    def has_sampled(self, group_id: int, index: int, num_tokens: int) -> None:
        """The generator has reported so much of a member that it goes on with."""
        tokens = Prefix(
            np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32), np.zeros(num_tokens, np.int32)
        )
        self.buffer.renew("generator-0", group_id, (index,), (tokens,))


async def test_a_straggler_is_cut_when_a_batch_is_there_without_it_and_whoever_samples_it_is_told(
    tmp_path: Path,
) -> None:
    ring = Ring(tmp_path, oversample=0.5)
    ring.bring((1, 0), (1, 1), (0, 0))
    assert not await ring.cancelling.cut()
    assert ring.buffer.counts()["dropped"] == 0
    ring.bring((2, 0), (2, 1))
    ring.has_sampled(0, 1, 7)
    assert await ring.cancelling.cut()
    assert (ring.buffer.counts()["dropped_cut"], ring.buffer.has_slot) == (1, True)
    assert await ring.generators[0].receive(PATIENCE_S) == CancelGroup(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ring.generators[1].receive(), 0.01)
    batch = ring.buffer.take(2, step=0)
    assert batch is not None
    assert [group.group_id for group in batch] == [1, 2]
    assert not ring.sink.receive("generator-0", scored(0, 1))  # it comes too late


async def test_what_was_sampled_in_vain_is_counted_and_recorded_with_its_reason(tmp_path: Path) -> None:
    ring = Ring(tmp_path, oversample=1.0)
    ring.bring((0, 0), (2, 0), (2, 1), (3, 0), (3, 1))
    ring.has_sampled(0, 1, 7)
    ring.has_sampled(1, 0, 5)
    await ring.cancelling.cut()
    stats = ring.sink.drain()
    assert stats.num_dropped == {"cut": 2}
    assert (sorted(stats.cut_lengths), stats.num_cut_tokens) == ([0, 5, 7], 3 + 7 + 5)
    ring.buffer.segments.seal_all()
    found = list(read_rollouts_directory(tmp_path))
    assert [(each.group.group_id, len(each.group.members), each.drop_reason) for each in found] == [
        (0, 1, DropReason.CUT),
        (1, 0, DropReason.CUT),
    ]
    totals = Totals(groups_cut=2, tokens_cut=15, completions_cut=3, running_tokens_cut=12)
    assert cut_figures(totals) == {"cut/groups_total": 2, "cut/tokens_total": 15, "cut/completion_mean": 4}
    assert cut_figures(Totals()) == {"cut/groups_total": 0, "cut/tokens_total": 0}  # none has a length


async def test_without_oversampling_nothing_is_ever_cut(tmp_path: Path) -> None:
    ring = Ring(tmp_path, oversample=0.0)
    ring.bring(*((group_id, index) for group_id in range(1, 6) for index in range(2)))
    await ring.cancelling.cut()
    assert ring.buffer.counts()["dropped"] == 0
    assert ring.buffer.take(2, step=0) is None
