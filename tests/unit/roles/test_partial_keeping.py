"""What the controller does with reports of running rollouts: kept in memory at once, on disk soon, in nobody's way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.prefixes import (
    PartialIntake,
    PartialLog,
    PartialRollout,
    encode_partials,
    partial_paths,
    read_partials,
)
from rlhpc.protocol.messages import LEASES, CancelGroup, LeaseProgress, LeaseReturn, ShowWhole
from rlhpc.protocol.types import Prefix, SamplingParams
from rlhpc.roles.controller import persistence
from rlhpc.roles.controller.persistence import DiskLane, PartialKeeping
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.buffer.partial_samples import make_draft, part_of, piece_of
from tests.unit.buffer.rollout_samples import ManualClock, make_ledger, make_prompt
from tests.unit.roles.small_ring import make_buffer, small_config

DRAFT = make_draft(0, 120)
NEWEST = 6


def report_of(*pieces: PartialRollout) -> LeaseProgress:
    data, num_bytes = encode_partials(pieces)
    return LeaseProgress(np.frombuffer(data, np.uint8), num_bytes, 0)


class Controller:
    """Its part that has to do with partial rollouts; group 0 is granted to generator-0, with two members."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "rollouts"
        self.directory.mkdir()
        PartialLog(self.directory, 0).begin([piece_of(DRAFT, 0, 30, member=(7, 1))])  # left by the attempt before
        ledger = make_ledger(ManualClock(), sampling=lambda _: SamplingParams(max_tokens=200))
        self.buffer = make_buffer(small_config(), root, ledger)
        self.buffer.admit(make_prompt(0), 4)
        self.buffer.grant("generator-0", 2)
        self.leases, self.num_commits = MemoryServer(LEASES), 0
        self.generator = self.leases.connect("generator-0")
        self.keeping = PartialKeeping(
            PartialIntake(self.buffer, 200),
            PartialLog(self.directory, 1),
            self.leases,
            DiskLane("partials"),
            timeline=0,
            newest_version=lambda: NEWEST,
            commit_groups=self.commit_groups,
        )

    def commit_groups(self) -> None:
        self.num_commits += 1

    async def takes(self, *pieces: PartialRollout) -> None:
        await self.keeping.receive("generator-0", report_of(*pieces))

    def on_disk(self, index: int = 0) -> int:
        """Tokens of a member of group 0."""
        known, problems = read_partials(self.directory)
        assert problems == []
        return known[0, index].end if (0, index) in known else 0

    async def until_on_disk(self, num_tokens: int, index: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.on_disk(index) != num_tokens:  # noqa: ASYNC110 - a thread writes it
                await asyncio.sleep(0.01)


@pytest.fixture
async def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Controller]:
    monkeypatch.setattr(persistence, "BATCH_S", 0.01)
    monkeypatch.setattr(persistence, "REFUSED_PAUSE_S", 0.02)
    controller = Controller(tmp_path)
    running = asyncio.create_task(controller.keeping.run())
    yield controller
    running.cancel()
    await controller.keeping.close(is_complete=False)


async def test_reports_are_on_disk_soon_and_so_are_the_admissions_that_they_need(it: Controller) -> None:
    await it.takes(piece_of(DRAFT, 0, 50))
    assert it.num_commits == 1
    await it.until_on_disk(50)
    await it.takes(piece_of(DRAFT, 50, 80))
    await it.takes(piece_of(DRAFT, 80, 90), piece_of(DRAFT, 0, 10, member=(0, 1)))
    await it.until_on_disk(90)
    await it.until_on_disk(10, index=1)


async def test_what_this_attempt_did_not_take_up_is_gone_at_once(it: Controller) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while [path.name for path in partial_paths(it.directory)] != ["partials_000001.bin"]:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.01)
    assert read_partials(it.directory) == ({}, [])


async def test_a_generator_whose_beginning_is_not_known_is_asked_for_the_whole(it: Controller) -> None:
    await it.takes(piece_of(DRAFT, 30, 50))
    assert await it.generator.receive(PATIENCE_S) == ShowWhole(((0, 0),))
    await it.takes(piece_of(DRAFT, 0, 60))
    await it.until_on_disk(60)


@pytest.mark.parametrize(
    "message",
    [
        LeaseProgress(np.frombuffer(b"nothing of ours", np.uint8), 100, 0),
        LeaseProgress(np.empty(0, np.uint8), 0, 0),
        LeaseProgress(report_of(piece_of(DRAFT, 0, 50)).pieces, 1 << 40, 0),
        report_of(PartialRollout(0, 0, 7, 0, 0, part_of(DRAFT, 0, 50))),
        report_of(
            PartialRollout(0, 0, 0, 0, 0, Prefix(DRAFT.token_ids, DRAFT.behaviour_logprobs * np.nan, DRAFT.versions))
        ),
    ],
    ids=["not ours", "empty", "too large", "another prompt", "not a number"],
)
async def test_an_odd_report_is_refused_and_told_once(
    it: Controller, caplog: pytest.LogCaptureFixture, message: LeaseProgress
) -> None:
    for _ in range(3):
        await it.keeping.receive("generator-0", message)
    (record,) = caplog.records
    assert "generator-0: its reports of running rollouts are refused" in record.message
    assert it.on_disk() == 0


async def test_a_report_of_weights_that_do_not_count_changes_nothing(
    it: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    it.buffer.forget_holder("generator-0")
    await it.keeping.receive("generator-0", replace(report_of(piece_of(DRAFT, 0, 50)), timeline=3))
    assert it.buffer.outstanding("generator-0") == 0
    assert it.num_commits == 0
    assert not caplog.records


async def test_a_generator_that_goes_on_with_what_nobody_wants_is_told(it: Controller) -> None:
    it.buffer.drop(0, DropReason.POISON)
    await it.takes(piece_of(DRAFT, 0, 50))
    assert await it.generator.receive(PATIENCE_S) == CancelGroup(0)


async def test_what_a_leaving_generator_hands_back_is_on_disk_too(it: Controller) -> None:
    await it.takes(piece_of(DRAFT, 0, 50))
    message = LeaseReturn(0, (0, 1), (part_of(DRAFT, 0, 70), None), "leaving", 0)
    it.buffer.hand_back("generator-0", message.group_id, message.sample_indices, message.prefixes)
    it.keeping.handed_back(message)
    await it.until_on_disk(70)


async def test_a_disk_that_refuses_costs_one_warning_and_later_all_is_there_again(
    it: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await it.takes(piece_of(DRAFT, 0, 50))
    await it.until_on_disk(50)
    num_refused = 0

    def refuse(*_: Any) -> None:
        nonlocal num_refused
        num_refused += 1
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("rlhpc.buffer.prefixes.write_at", refuse)
        full.setattr("rlhpc.buffer.prefixes.make_file", refuse)
        for start in range(50, 80, 10):
            await it.takes(piece_of(DRAFT, start, start + 10))
        async with asyncio.timeout(PATIENCE_S):
            while num_refused < 3:  # noqa: ASYNC110 - a thread counts
                await asyncio.sleep(0.01)
        assert it.on_disk() == 50
    await it.until_on_disk(80)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "No space left on device" in record.message
    assert "nothing else is lost" in record.message


async def test_a_run_that_is_complete_leaves_none(it: Controller) -> None:
    await it.takes(piece_of(DRAFT, 0, 50))
    await it.until_on_disk(50)
    await it.keeping.close(is_complete=True)
    assert partial_paths(it.directory) == []
