from __future__ import annotations

import asyncio
import dataclasses
import stat
import time
from pathlib import Path

import pytest

from rlhpc.base.patience import Deadline
from rlhpc.protocol.errors import ChannelTimeout, ProtocolError
from rlhpc.transport.open import Endpoint, await_endpoint, await_endpoint_blocking, find, publish, successor, withdraw
from tests.patience import PATIENCE_S

FIRST = Endpoint("leases", "controller", 0, "tcp://10.0.0.1:4000", "first", 12, "node-1")
SECOND = dataclasses.replace(FIRST, address="tcp://10.0.0.2:5000", incarnation="second", pid=13, host="node-2")


def test_what_is_published_is_found_and_is_private(tmp_path: Path):
    directory = tmp_path / "rendezvous"
    assert find(directory, "leases") is None
    publish(directory, FIRST)
    assert find(directory, "leases") == FIRST
    assert find(directory, "leases", replica=1) is None
    assert find(directory, "control") is None
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()] == [0o600]


def test_a_newer_incarnation_overwrites_and_is_not_withdrawn_by_the_older(tmp_path: Path):
    publish(tmp_path, FIRST)
    publish(tmp_path, SECOND)
    withdraw(tmp_path, FIRST)
    assert find(tmp_path, "leases") == SECOND
    for _ in range(2):
        withdraw(tmp_path, SECOND)
    assert find(tmp_path, "leases") is None
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_endpoint_is_named(tmp_path: Path):
    (tmp_path / "leases-0.json").write_text('{"channel": "leases"}')
    with pytest.raises(ProtocolError, match=r"leases-0\.json: endpoint"):
        find(tmp_path, "leases")


def test_a_successor_is_another_incarnation_and_none_of_an_earlier_start(tmp_path: Path):
    ours = dataclasses.replace(FIRST, incarnation="5.1.0-a")
    assert successor(tmp_path / "nowhere", ours) is None
    publish(tmp_path, ours)
    assert successor(tmp_path, ours) is None
    for incarnation, follows in (("5.0.9-z", False), ("5.1.0-b", True), ("5.1.1-a", True), ("by-hand", True)):
        other = dataclasses.replace(SECOND, incarnation=incarnation)
        publish(tmp_path, other)
        assert successor(tmp_path, ours) == (other if follows else None)
    (tmp_path / "leases-0.json").write_text("{")
    assert successor(tmp_path, ours) is None


async def test_who_is_gone_for_good_is_not_waited_for(tmp_path: Path):
    publish(tmp_path, FIRST)
    with pytest.raises(ChannelTimeout, match="controller-0 has not opened channel 'leases'"):
        await await_endpoint(tmp_path, "leases", "controller", deadline=Deadline(0.06), gone="first")
    waiting = asyncio.create_task(
        await_endpoint(tmp_path, "leases", "controller", deadline=Deadline(PATIENCE_S), gone="first")
    )
    await asyncio.sleep(0.01)
    publish(tmp_path, SECOND)
    assert await waiting == SECOND


async def test_one_waits_until_the_server_is_there(tmp_path: Path):
    waiting = asyncio.create_task(await_endpoint(tmp_path, "leases", "controller", deadline=Deadline(PATIENCE_S)))
    await asyncio.sleep(0.01)
    publish(tmp_path, FIRST)
    assert await waiting == FIRST
    assert await_endpoint_blocking(tmp_path, "leases", "controller", deadline=Deadline(0)) == FIRST


async def test_the_error_says_who_is_missing_after_how_long(tmp_path: Path):
    began = time.monotonic()
    with pytest.raises(ChannelTimeout, match=r"controller-0 has not opened channel 'leases' after 0.1 s"):
        await await_endpoint(tmp_path, "leases", "controller", deadline=Deadline(0.1))
    assert 0.09 < time.monotonic() - began < PATIENCE_S
    with pytest.raises(ChannelTimeout, match="reward-3 has not opened channel 'rewards'"):
        await_endpoint_blocking(tmp_path, "rewards", "reward", 3, deadline=Deadline(0.01))
