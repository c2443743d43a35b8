"""What the loss of a process costs, and that it is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.protocol.messages import Heartbeat, Hello, Reregister
from rlhpc.roles.controller.controller import RunProcesses
from rlhpc.roles.controller.dispatcher import ProcessRegistry
from rlhpc.roles.controller.persistence import DiskLane
from rlhpc.roles.controller.state import ControllerState, Totals
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.weights.choice import Membership
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.roles.small_ring import prompt, small_config, small_ring


def hello(incarnation: str, role: str = "generator") -> Hello:
    settings, devices = config_hash(small_config()), ("",) if role == "generator" else ()
    return Hello(role, 0, incarnation, settings, 100, "here", num_weight_ranks=len(devices), weight_devices=devices)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_what_a_generator_had_not_reported_when_it_was_lost_is_counted(tmp_path: Path, is_silent: bool) -> None:
    config, clock, totals = small_config(), ManualClock(), Totals()
    async with small_ring(config, tmp_path) as ring:
        context = RoleContext("controller", 0, 1, 0, None, "first", RunLayout(tmp_path), config, config_hash(config))
        registry = ProcessRegistry(config_hash(config), 15.0, clock)
        buffer: Any = ring.buffer
        state: Any = ControllerState(Any, None, buffer.segments, buffer.journal, buffer, Membership(), totals, 0, 0)
        processes = RunProcesses(context, ring.control, registry, ring.weight_sync, state, DiskLane("notes"))
        await processes.greet("generator-0", hello("0.0.0-first"))
        for unreported in (900.0, 70.0):
            await processes.beat("generator-0", Heartbeat("running", "", 3, 8, {"tokens_unreported": unreported}))
        if is_silent:
            clock.advance(16.0)
            await processes.lose_silent()
        else:
            await processes.greet("generator-0", hello("0.0.1-second"))
        assert totals.tokens_lost == 70


async def test_a_generator_that_connects_again_has_lost_nothing(tmp_path: Path) -> None:
    """One of its channels had failed; its process goes on with what it samples."""
    config, totals = small_config(), Totals()
    async with small_ring(config, tmp_path) as ring:
        context = RoleContext("controller", 0, 1, 0, None, "first", RunLayout(tmp_path), config, config_hash(config))
        registry = ProcessRegistry(config_hash(config), 15.0, ManualClock())
        buffer: Any = ring.buffer
        state: Any = ControllerState(Any, None, buffer.segments, buffer.journal, buffer, Membership(), totals, 0, 0)
        processes = RunProcesses(context, ring.control, registry, ring.weight_sync, state, DiskLane("notes"))
        buffer.admit(prompt(0), 0)
        await processes.greet("generator-0", hello("0.0.0-first"))
        lease = buffer.grant("generator-0", 2)
        await processes.beat("generator-0", Heartbeat("running", "", 3, 8, {"tokens_unreported": 70.0}))
        assert await processes.greet("generator-0", hello("0.0.0-second"))
        assert (totals.tokens_lost, totals.leases_regranted, buffer.outstanding("generator-0")) == (0, 0, 0)
        assert lease is not None
        record = buffer.open_record(lease.group_id)
        assert record is not None
        assert record.attempts == 1
        assert all(member.is_free for member in record.members)


@pytest.mark.parametrize("role", ["generator", "reward"])
async def test_who_was_taken_for_dead_and_is_heard_again_is_asked_to_register(tmp_path: Path, role: str) -> None:
    """Else `rlhpc status` never shows it again, and nobody tells it that the run is over."""
    config, clock, name = small_config(), ManualClock(), f"{role}-0"
    async with small_ring(config, tmp_path) as ring:
        context = RoleContext("controller", 0, 1, 0, None, "first", RunLayout(tmp_path), config, config_hash(config))
        registry, client = ProcessRegistry(config_hash(config), 15.0, clock), ring.control.connect(name)
        buffer: Any = ring.buffer
        state: Any = ControllerState(Any, None, buffer.segments, buffer.journal, buffer, Membership(), Totals(), 0, 0)
        processes = RunProcesses(context, ring.control, registry, ring.weight_sync, state, DiskLane("notes"))
        await processes.greet(name, hello("0.0.0-first", role))
        clock.advance(16.0)
        await processes.lose_silent()
        assert registry.names() == []
        await processes.beat(name, Heartbeat("running", "", -1))
        assert await client.receive(1.0) == Reregister()
        await processes.greet(name, hello("0.0.0-first", role))
        await processes.beat(name, Heartbeat("running", "", -1))
        assert registry.names() == [name]


@pytest.mark.parametrize("state_of_it", ["running", "draining"])
async def test_a_lease_on_its_way_to_one_that_leaves_is_nobodys_fault(tmp_path: Path, state_of_it: str) -> None:
    """It is granted again; only of one that died the prompt may be the cause."""
    config, clock = small_config(), ManualClock()
    async with small_ring(config, tmp_path) as ring:
        context = RoleContext("controller", 0, 1, 0, None, "first", RunLayout(tmp_path), config, config_hash(config))
        registry = ProcessRegistry(config_hash(config), 15.0, clock)
        buffer: Any = ring.buffer
        state: Any = ControllerState(Any, None, buffer.segments, buffer.journal, buffer, Membership(), Totals(), 0, 0)
        processes = RunProcesses(context, ring.control, registry, ring.weight_sync, state, DiskLane("notes"))
        buffer.admit(prompt(0), 0)
        await processes.greet("generator-0", hello("0.0.0-first"))
        lease = buffer.grant("generator-0", 2)
        assert lease is not None
        await processes.beat("generator-0", Heartbeat(state_of_it, "", 3, 0, {}))
        clock.advance(16.0)
        assert await processes.lose_silent()
        record = buffer.open_record(lease.group_id)
        assert record is not None
        assert all(member.is_free for member in record.members)
        assert state.totals.leases_regranted == 1
        assert {member.lost_leases for member in record.members} == {int(state_of_it == "running")}
