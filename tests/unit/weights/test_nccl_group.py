"""How an NCCL group of ours is made, met and left, on a machine without GPUs."""

from __future__ import annotations

import datetime
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.group import WITHOUT_WATCHDOG, Lifeline, SideGroup
from rlhpc.weights.publisher import GroupPublisher
from tests.patience import PATIENCE_S

GPU = torch.device("cuda", 3)


class FakeNccl:
    """ProcessGroupNCCL as far as its constructor and abort() are concerned.

    torch 2.13: the watchdog is started unless TORCH_NCCL_BLOCKING_WAIT is set when the group is made.
    """

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    made: list[FakeNccl]
    connects = True
    has_communicator = True  # an abort finds none that is still being made
    may_go_on: threading.Event

    def __init__(self, store: object, rank: int, world_size: int, options: Any) -> None:
        self.has_watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "1"
        self.rethrows = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in ("1", "3")
        self.timeout = options._timeout
        self.has_stream_of_its_own = options.is_high_priority_stream
        self.is_aborted = threading.Event()
        type(self).made.append(self)

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> FakeNccl:
        if not self.has_communicator:
            assert self.may_go_on.wait(PATIENCE_S)
            self.has_communicator = True
        if not self.connects:
            assert self.is_aborted.wait(PATIENCE_S)
            raise RuntimeError("NCCL communicator was aborted")
        return self

    def wait(self, timeout: datetime.timedelta) -> None:
        pass

    def abort(self) -> None:
        if self.has_communicator:
            self.is_aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    """torch as it is on a GPU machine, for these few calls."""

    class Fake(FakeNccl):
        made: list[FakeNccl] = []  # noqa: RUF012 - one list a test

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Fake, raising=False)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(SideGroup, "total", lambda self, value: self._group.allreduce([], None) and value)
    return Fake


def side_group(tmp_path: Path, timeout_s: float = 60.0) -> SideGroup:
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    return SideGroup("nccl", store, 0, 2, timeout_s, device=GPU)


def test_a_group_for_weights_has_no_watchdog_that_could_end_the_process(tmp_path: Path, nccl: type[FakeNccl]) -> None:
    side_group(tmp_path)
    assert [(group.has_watchdog, group.rethrows) for group in nccl.made] == [(False, False)]


def test_other_groups_of_the_process_keep_theirs(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    side_group(tmp_path)
    options = nccl.Options()
    options._timeout = None
    training = nccl(None, 0, 1, options)
    assert training.has_watchdog
    assert training.rethrows
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_a_rendezvous_that_nccl_waits_in_for_ever_ends_and_is_aborted(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "connects", False)
    with pytest.raises(GroupFailed, match="NCCL did not connect to all ranks"):
        side_group(tmp_path, timeout_s=0.1)
    assert nccl.made[0].is_aborted.wait(PATIENCE_S)


def test_a_communicator_that_is_made_after_it_was_given_up_is_aborted(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first collective would stay on the GPU for ever, and whoever waits for the device with it."""
    monkeypatch.setattr(nccl, "has_communicator", False)
    monkeypatch.setattr(nccl, "may_go_on", threading.Event(), raising=False)
    with pytest.raises(GroupFailed, match="NCCL did not connect to all ranks"):
        side_group(tmp_path, timeout_s=0.1)
    assert not nccl.made[0].is_aborted.is_set()
    nccl.may_go_on.set()
    assert nccl.made[0].is_aborted.wait(PATIENCE_S)


def test_an_abort_that_fails_is_no_failure_of_who_leaves(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = side_group(tmp_path)

    def fail(self: FakeNccl) -> None:
        raise RuntimeError("aborting took 120 s")

    monkeypatch.setattr(nccl, "abort", fail)
    group.close()
    assert "aborting took 120 s" in caplog.text


def test_a_broadcast_never_shares_the_stream_of_an_engines_kernels(tmp_path: Path, nccl: type[FakeNccl]) -> None:
    side_group(tmp_path)
    assert nccl.made[0].has_stream_of_its_own


def test_a_rendezvous_ends_when_a_receiver_dies_in_it(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "connects", False)
    other_end = distributed.FileStore(str(tmp_path / "store"), 2)
    reaching = threading.Thread(target=lambda: Lifeline.reach(other_end).close())
    reaching.start()
    with pytest.raises(GroupFailed, match="did not connect to all ranks: a receiver is gone"):
        side_group(tmp_path, timeout_s=10 * PATIENCE_S)
    reaching.join()
    assert nccl.made[0].is_aborted.wait(PATIENCE_S)


def test_tensors_of_a_collective_live_on_the_ranks_own_gpu(tmp_path: Path, nccl: type[FakeNccl]) -> None:
    assert side_group(tmp_path).device == GPU


def test_nccl_finds_the_memory_that_the_trainers_allocator_does_not_use(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups_before: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: groups_before.append(len(nccl.made)))
    publisher = GroupPublisher("nccl", tmp_path, 60.0, device=GPU)
    for epoch in range(2):
        publisher.open(WeightGroup(epoch, "nccl", "", ("generator-0",), (1,)))
        publisher.form()
    publisher.dissolve()
    assert groups_before == [0, 1]


def test_a_group_that_is_closed_is_aborted_once(tmp_path: Path, nccl: type[FakeNccl]) -> None:
    group = side_group(tmp_path)
    group.close()
    assert nccl.made[0].is_aborted.is_set()
    group.close()


def test_several_threads_may_ask_who_is_lost_at_once(tmp_path: Path) -> None:
    """While a group connects two do, and Python refuses a second poll as long as the first has not returned."""
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    line, before = Lifeline.listen(store, ""), sys.getswitchinterval()

    def ask(_: int) -> set[str]:
        return {line.lost() for _ in range(3_000)}

    sys.setswitchinterval(1e-6)  # each gives way all the time
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(4))) == [{""}] * 4
    finally:
        sys.setswitchinterval(before)
        line.close()


@pytest.mark.parametrize("variable", WITHOUT_WATCHDOG)
def test_torch_still_knows_the_variable(variable: str) -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert f'"{variable}"' in header.read_text()
