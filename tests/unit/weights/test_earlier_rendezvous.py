"""A member that still waits for an epoch of an earlier attempt does not disturb one of the same number."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.group import file_of
from rlhpc.weights.ipc import IpcPublisher
from rlhpc.weights.publisher import GroupPublisher
from rlhpc.weights.receiver import GroupReceiver
from tests.patience import PATIENCE_S

CPU = torch.device("cpu")
EPOCH = WeightGroup(1, "gloo", "", ("generator-0", "generator-1"), (1, 1))
LATE_S = 5.0


@pytest.mark.waits
def test_a_member_that_waits_in_an_epoch_of_a_dead_trainer_is_no_member_of_the_next_one(tmp_path: Path) -> None:
    """With one path for both it would be taken for the member of its rank, and connected to."""
    dead = GroupPublisher("gloo", tmp_path, LATE_S, device=CPU)
    opened = dead.open(EPOCH)
    late = GroupReceiver("gloo", CPU, LATE_S)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(late.join, opened, 2)
        alive = GroupPublisher("gloo", tmp_path, PATIENCE_S, device=CPU)
        again = alive.open(EPOCH)
        receivers = [GroupReceiver("gloo", CPU, PATIENCE_S) for _ in EPOCH.members]
        forming = pool.submit(alive.form)
        first = pool.submit(receivers[0].join, again, 1)
        with pytest.raises(GroupFailed):
            waiting.result(PATIENCE_S)
        assert not forming.done()
        receivers[1].join(again, 2)
        forming.result(PATIENCE_S)
        first.result(PATIENCE_S)
    assert [receiver.lost() for receiver in receivers] == ["", ""]
    for receiver in receivers:
        receiver.leave()
    alive.dissolve()


def test_a_rendezvous_that_the_filesystem_does_not_let_go_is_no_obstacle_to_the_next_epoch(tmp_path: Path) -> None:
    """The trainer would end where an epoch was to be dissolved because a member has failed."""
    publisher = IpcPublisher(tmp_path, CPU, LATE_S)
    first = file_of(publisher.open(EPOCH).address)
    first.unlink()
    first.mkdir()
    second = file_of(publisher.open(replace(EPOCH, epoch=2)).address)
    assert second != first
    publisher.dissolve()
    assert not second.exists()
