from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec
from rlhpc.training.trainer_state import STATE_FILE, STATE_KINDS, read_checkpoint
from tests.patience import PATIENCE_S
from tests.unit.training.rank_processes import run_ranks

CPU = torch.device("cpu")
RNG = {"cpu": "eA=="}
NUM_TENSORS, SHAPE = 6, (64, 128)


class Gate:
    """Holds the writing of one tensor until it is opened, as a slow disk would."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


def halved(index: int, world_size: int, gate: Gate | None = None) -> ShardedTensorSpec:
    """A matrix cut by rows over all ranks."""

    def join(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        if gate is not None and index == NUM_TENSORS // 2:
            gate.pass_through()
        yield torch.cat(list(pieces)).view(SHAPE)

    share = SHAPE[0] * SHAPE[1] // world_size
    pieces = tuple(Shard(rank, share) for rank in range(world_size))
    return ShardedTensorSpec((TensorSpec(f"t{index}", "float32", SHAPE),), pieces, join)


class Model:
    """State that training changes in place: every piece holds a number of its own plus the count of steps."""

    def __init__(self, rank: int = 0, world_size: int = 1, gate: Gate | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.items = [halved(index, world_size, gate) for index in range(NUM_TENSORS)]
        self.pieces = {kind: self._pieces(number) for number, kind in enumerate(STATE_KINDS)}
        self.num_steps = 0

    def _pieces(self, kind_number: int) -> list[Tensor]:
        whole = [expected(kind_number, index, 0) for index in range(NUM_TENSORS)]
        return [tensor.chunk(self.world_size)[self.rank].clone() for tensor in whole]

    def saver(self) -> BackgroundSaver:
        own = lambda kind, index: (self.pieces[kind][index],)  # noqa: E731
        return BackgroundSaver(self.items, own, device=CPU, group=open_save_group())

    def train(self) -> None:
        self.num_steps += 1
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.add_(1000)


def expected(kind_number: int, index: int, num_steps: int) -> Tensor:
    start = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    return start / 7 + 100 * kind_number + index + 1000 * num_steps


def assert_holds(directory: Path, num_steps: int) -> None:
    """The checkpoint there is the state after so many steps, bit for bit."""
    checkpoint = read_checkpoint(directory, None)
    assert (checkpoint.num_steps_applied, checkpoint.rng) == (num_steps, RNG)
    found = {(kind, name): tensor for kind, name, tensor in checkpoint.tensors()}
    assert len(found) == len(STATE_KINDS) * NUM_TENSORS
    for number, kind in enumerate(STATE_KINDS):
        for index in range(NUM_TENSORS):
            wanted = expected(number, index, 0)
            for _ in range(num_steps):
                wanted += 1000
            assert torch.equal(found[kind, f"t{index}"], wanted), (kind, index)


# ------------------------------------------------------------------------------------------------------------ one rank


def test_what_is_written_is_the_state_at_the_call_though_training_goes_on(tmp_path):
    gate = Gate()
    model = Model(gate=gate)
    saver = model.saver()
    model.train()
    future = saver.save(tmp_path / "a", num_steps_applied=1, rng=RNG)
    assert gate.reached.wait(PATIENCE_S)
    for _ in range(3):
        model.train()
    assert not future.done()
    gate.opened.set()
    files = future.result(PATIENCE_S)
    assert files == {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}
    assert_holds(tmp_path / "a", 1)
    saver.close()


def test_a_second_save_waits_for_the_first_one_to_be_written(tmp_path):
    gate = Gate()
    model = Model(gate=gate)
    saver = model.saver()
    first = saver.save(tmp_path / "a", num_steps_applied=0, rng=RNG)
    model.train()
    assert gate.reached.wait(PATIENCE_S)
    timer = threading.Timer(0.2, gate.opened.set)
    timer.start()
    second = saver.save(tmp_path / "b", num_steps_applied=1, rng=RNG)
    assert first.done()
    second.result(PATIENCE_S)
    assert_holds(tmp_path / "a", 0)
    assert_holds(tmp_path / "b", 1)
    timer.join()
    saver.close()


def test_the_copies_are_kept_from_save_to_save(tmp_path):
    saver = Model().saver()
    addresses = [copies[0][0].data_ptr() for copies in saver._copies.values()]
    for name in "ab":
        saver.save(tmp_path / name, num_steps_applied=0, rng=RNG).result(PATIENCE_S)
    assert [copies[0][0].data_ptr() for copies in saver._copies.values()] == addresses
    saver.close()


def test_a_place_that_cannot_be_written_fails_the_future_and_not_the_next_save(tmp_path):
    saver = Model().saver()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        saver.save(tmp_path / "file" / "below", num_steps_applied=0, rng=RNG).result(PATIENCE_S)
    saver.save(tmp_path / "b", num_steps_applied=0, rng=RNG).result(PATIENCE_S)
    assert_holds(tmp_path / "b", 0)
    saver.close()


def test_a_directory_that_vanishes_while_it_is_written_fails_the_future(tmp_path):
    gate = Gate()
    saver = Model(gate=gate).saver()
    future = saver.save(tmp_path / "a", num_steps_applied=0, rng=RNG)
    assert gate.reached.wait(PATIENCE_S)
    shutil.rmtree(tmp_path / "a")
    gate.opened.set()
    with pytest.raises(CheckpointError, match="cannot be written"):
        future.result(PATIENCE_S)
    saver.close()


def test_closing_waits_for_the_write(tmp_path):
    gate = Gate()
    saver = Model(gate=gate).saver()
    future = saver.save(tmp_path / "a", num_steps_applied=0, rng=RNG)
    assert gate.reached.wait(PATIENCE_S)
    timer = threading.Timer(0.2, gate.opened.set)
    timer.start()
    saver.close()
    assert future.done()
    assert_holds(tmp_path / "a", 0)
    saver.close()
    timer.join()


def test_a_save_that_is_given_up_ends_at_the_next_tensor_and_leaves_no_manifest(tmp_path):
    gate = Gate()
    saver = Model(gate=gate).saver()
    future = saver.save(tmp_path / "a", num_steps_applied=0, rng=RNG)
    assert gate.reached.wait(PATIENCE_S)
    assert future.cancel()
    gate.opened.set()
    saver.close()
    assert not (tmp_path / "a" / STATE_FILE).exists()
    with pytest.raises(CheckpointError, match=STATE_FILE):
        read_checkpoint(tmp_path / "a", None)


# ----------------------------------------------------------------------------------------------------------- two ranks


def save_while_training(rank: int, world_size: int, directory: Path) -> list[dict[str, int]]:
    model = Model(rank, world_size)
    saver = model.saver()
    results = []
    for step in range(3):
        future = saver.save(directory / str(step), num_steps_applied=step, rng=RNG)
        model.train()
        results.append(future)
    files = [future.result(PATIENCE_S) for future in results]
    saver.close()
    return files


@pytest.mark.starts
def test_two_ranks_write_one_checkpoint_of_the_state_at_the_call(tmp_path):
    lead, other = run_ranks(2, save_while_training, tmp_path, tmp_path / "out")
    assert other == [{}, {}, {}]
    for step in range(3):
        directory = tmp_path / "out" / str(step)
        assert lead[step] == {path.name: path.stat().st_size for path in directory.iterdir()}
        assert_holds(directory, step)


def fail_then_succeed(rank: int, world_size: int, directory: Path) -> str:
    model = Model(rank, world_size)
    saver = model.saver()
    (directory / "file").write_text("")
    with pytest.raises(CheckpointError) as failure:
        saver.save(directory / "file" / "below", num_steps_applied=0, rng=RNG).result(PATIENCE_S)
    saver.save(directory / "sound", num_steps_applied=0, rng=RNG).result(PATIENCE_S)
    saver.close()
    return str(failure.value)


@pytest.mark.starts
def test_a_write_that_fails_is_known_on_both_ranks_and_the_next_one_succeeds(tmp_path):
    lead, other = run_ranks(2, fail_then_succeed, tmp_path, tmp_path)
    assert "cannot be written" in lead
    assert "rank 0 could not write it" in other
    assert_holds(tmp_path / "sound", 0)


def fail_half_way(rank: int, world_size: int, directory: Path) -> str:
    """The lead's directory vanishes when half of the tensors have come: the rest is still sent and must be taken."""
    gate = Gate()
    model = Model(rank, world_size, gate)
    saver = model.saver()
    future = saver.save(directory, num_steps_applied=0, rng=RNG)
    if rank == 0:
        assert gate.reached.wait(PATIENCE_S)
        shutil.rmtree(directory)
    gate.opened.set()
    error = future.exception(PATIENCE_S)
    assert isinstance(error, CheckpointError)
    saver.close()
    return str(error)


@pytest.mark.starts
def test_a_write_that_fails_half_way_leaves_no_rank_waiting(tmp_path):
    lead, other = run_ranks(2, fail_half_way, tmp_path, tmp_path / "out")
    assert "cannot be written" in lead
    assert "rank 0 could not write it" in other


class Shortage(Gate):
    """No memory for the tensor in the middle, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def pass_through(self) -> None:
        if self.times:
            self.times -= 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def run_short_of_memory_then_succeed(rank: int, world_size: int, directory: Path) -> str:
    model = Model(rank, world_size, Shortage(times=2))  # joined on the lead alone: in the first kind and the second
    saver = model.saver()
    future = saver.save(directory / "short", num_steps_applied=0, rng=RNG)
    error = future.exception(PATIENCE_S)
    assert isinstance(error, CheckpointError)
    saver.save(directory / "sound", num_steps_applied=0, rng=RNG).result(PATIENCE_S)
    saver.close()
    return str(error)


@pytest.mark.starts
def test_a_lead_without_memory_for_a_tensor_leaves_no_rank_waiting_and_the_next_write_succeeds(tmp_path):
    lead, other = run_ranks(2, run_short_of_memory_then_succeed, tmp_path, tmp_path)
    assert "t3 cannot be put together: DefaultCPUAllocator" in lead
    assert "rank 0 could not write it" in other
    assert not (tmp_path / "short" / STATE_FILE).exists()
    assert_holds(tmp_path / "sound", 0)


def run_short_of_room_then_go_on(rank: int, world_size: int, directory: Path) -> list[str]:
    """The lead has no memory for the first piece that another rank sends; the state changes between two saves."""
    model, empty, is_short = Model(rank, world_size), torch.empty, rank == 0
    saver = model.saver()

    def short(*size: int, **options: Any) -> Tensor:
        nonlocal is_short
        if is_short and threading.current_thread() is not threading.main_thread():
            is_short = False
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*size, **options)

    torch.empty = short
    failures = []
    for number in range(3):
        future = saver.save(directory / str(number), num_steps_applied=number, rng=RNG)
        failures.append(str(future.exception(PATIENCE_S)))
        model.train()
    saver.close()
    return failures


@pytest.mark.starts
def test_when_the_lead_has_no_room_for_what_others_send_no_later_write_mixes_two_states(tmp_path):
    lead, other = run_ranks(2, run_short_of_room_then_go_on, tmp_path, tmp_path)
    assert ["can't allocate memory" in failure for failure in lead] == [True] * 3
    assert ["the state could not be gathered" in failure for failure in other] == [True] * 3
    assert not list(tmp_path.glob(f"*/{STATE_FILE}"))


def lose_the_lead(rank: int, world_size: int, directory: Path) -> str:
    saver = Model(rank, world_size).saver()
    if rank == 0:
        return "left without saving"
    future = saver.save(directory, num_steps_applied=0, rng=RNG)
    error = future.exception(PATIENCE_S)
    saver.close()
    return type(error).__name__


@pytest.mark.starts
def test_a_rank_whose_lead_is_gone_hears_of_it(tmp_path):
    assert run_ranks(2, lose_the_lead, tmp_path, tmp_path / "out")[1] == "CheckpointError"
