"""Checkpoints as directories: written beside the training, verified, and read several files at once."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training import checkpoint_directory, trainer_state
from rlhpc.training.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint_directory import begin, complete, describe, latest_complete, prune, verify
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec
from rlhpc.training.trainer_state import STATE_FILE, STATE_KINDS, read_checkpoint, write_checkpoint
from tests.patience import PATIENCE_S
from tests.unit.training.rank_processes import run_ranks


def write_parts(directory: Path, text: str) -> None:
    (directory / "trainer").mkdir()
    (directory / "trainer" / "weights-00001.safetensors").write_text(text)
    (directory / "controller.json").write_text(text)


def save(layout: RunLayout, step: int, text: str = "state") -> Path:
    temporary = begin(layout.checkpoint(step))
    write_parts(temporary, f"{text} {step}")
    complete(temporary, layout.checkpoint(step), {"step": step})
    return layout.checkpoint(step)


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path)


def test_a_completed_checkpoint_is_found_by_number_and_says_what_it_holds(layout):
    assert latest_complete(layout.checkpoints) is None
    assert describe(layout.checkpoints) == []
    layout.checkpoints.mkdir()
    assert latest_complete(layout.checkpoints) is None
    path = save(layout, 120)
    assert latest_complete(layout.checkpoints) == (120, path)
    content = verify(path)
    assert content["step"] == 120
    assert content["files"].keys() == {"controller.json", "trainer/weights-00001.safetensors"}
    assert (path / "trainer" / "weights-00001.safetensors").read_text() == "state 120"
    assert not list(layout.checkpoints.glob(".*"))
    for step in (999_999, 1_000_000, 5):
        save(layout, step)
    assert latest_complete(layout.checkpoints) == (1_000_000, layout.checkpoint(1_000_000))


def test_what_was_never_completed_is_ignored_and_described(layout):
    older = save(layout, 1)
    write_parts(begin(layout.checkpoint(2)), "x")
    save(layout, 3)
    (layout.checkpoint(3) / "COMPLETE").unlink()
    assert latest_complete(layout.checkpoints) == (1, older)
    assert [(state.step, bool(state.problem)) for state in describe(layout.checkpoints)] == [(1, False), (3, True)]


@pytest.mark.parametrize("damage", ["flip", "shorten", "remove", "garble COMPLETE"])
def test_a_damaged_checkpoint_is_ignored_and_the_file_is_named(layout, damage):
    older, newer = save(layout, 1), save(layout, 2)
    victim = newer / ("COMPLETE" if damage.startswith("garble") else "trainer/weights-00001.safetensors")
    match damage:
        case "flip":
            victim.write_text("statE 2")
        case "shorten":
            victim.write_text("state")
        case "remove":
            victim.unlink()
        case _:
            victim.write_text("{")
    assert latest_complete(layout.checkpoints) == (1, older)
    assert str(victim) in describe(layout.checkpoints)[1].problem
    with pytest.raises(CheckpointError, match=victim.name):
        verify(newer)


def test_a_complete_step_is_not_written_twice_but_a_damaged_one_is_replaced(layout):
    path = save(layout, 1)
    with pytest.raises(CheckpointError, match="exists already"):
        begin(path)
    (path / "controller.json").write_text("broken")
    save(layout, 1, "better")
    assert (path / "controller.json").read_text() == "better 1"
    verify(path)


def test_a_save_that_comes_too_late_leaves_a_sound_checkpoint_of_its_step_alone(layout):
    late = begin(layout.checkpoint(1), layout.root)
    write_parts(late, "of one that was thought dead")
    save(layout, 1)
    with pytest.raises(CheckpointError, match="has appeared meanwhile"):
        complete(late, layout.checkpoint(1), {"step": 1})
    assert (layout.checkpoint(1) / "controller.json").read_text() == "state 1"
    assert latest_complete(layout.checkpoints) == (1, layout.checkpoint(1))


@pytest.mark.parametrize("trouble", ["a name that no disk takes", "a list of attempts that cannot be read"])
def test_a_checkpoint_that_the_disk_does_not_let_begin_is_one_that_failed(layout, trouble):
    """The train loop leaves it out, and tries another soon."""
    final = save(layout, 1)
    if trouble == "a name that no disk takes":
        final = layout.checkpoints / ("x" * 300) / final.name
    else:
        layout.attempts.mkdir()
    with pytest.raises(CheckpointError, match=r"\.step_000001\.tmp: cannot be created"):
        begin(final)


def test_where_none_is_sound_all_are_named(layout):
    for step in (1, 2):
        (save(layout, step) / "controller.json").write_text("broken")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint: .*step_000002/controller.json.*step_000001/"):
        latest_complete(layout.checkpoints)


def test_pruning_keeps_the_newest_complete_ones(layout):
    for step in (1, 2, 3, 4):
        save(layout, step)
    assert prune(layout.checkpoints, 2) == [layout.checkpoint(1), layout.checkpoint(2)]
    assert [state.step for state in describe(layout.checkpoints)] == [3, 4]
    assert prune(layout.checkpoints, 2) == []


def test_pruning_leaves_a_directory_of_the_users_own(layout):
    """A copy, or a link, whose name only looks like a checkpoint's."""
    copy = layout.checkpoints / "step_1"
    copy.mkdir(parents=True)
    for step in (1, 2, 3, 4):
        save(layout, step)
    assert prune(layout.checkpoints, 2) == [layout.checkpoint(1), layout.checkpoint(2)]
    assert copy.exists()
    save(layout, 1234567)
    assert [state.step for state in describe(layout.checkpoints)] == [3, 4, 1234567]


def test_pruning_counts_complete_ones_only_and_removes_what_unfinished_ones_left(layout):
    for step in (1, 2, 3, 4):
        save(layout, step)
    for step in (2, 3):
        (layout.checkpoint(step) / "COMPLETE").unlink()
    unfinished = begin(layout.checkpoint(0))
    prune(layout.checkpoints, 2)
    assert [state.step for state in describe(layout.checkpoints)] == [1, 4]
    assert not unfinished.exists()


def test_pruning_leaves_a_checkpoint_that_is_being_written(layout):
    save(layout, 1)
    writing = begin(layout.checkpoint(2))
    prune(layout.checkpoints, 2)
    assert writing.exists()


def test_pruning_without_a_complete_one_deletes_nothing(layout):
    path = save(layout, 1)
    (path / "COMPLETE").unlink()
    assert prune(layout.checkpoints, 2) == []
    assert path.exists()


def test_fewer_than_two_are_never_kept(layout):
    with pytest.raises(CheckpointError, match="keep=1"):
        prune(layout.checkpoints, 1)


class KilledError(BaseException):
    """The process ends here."""


class Killer:
    """Lets so many file operations pass, then kills; counts them."""

    OPERATIONS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, survive: int) -> None:
        self.survive, self.count = survive, 0
        for name in self.OPERATIONS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, operation):
        def call(*args, **kwargs):
            if self.count == self.survive:
                raise KilledError
            self.count += 1
            return operation(*args, **kwargs)

        return call


def survive(operations: int, layout: RunLayout) -> bool:
    """Save step 3 (over a broken one) and prune, killed after so many operations.  True if it was not killed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        Killer(monkeypatch, operations)
        try:
            save(layout, 3)
            prune(layout.checkpoints, 2)
        except KilledError:
            return False
        return True


def test_killed_after_any_file_operation_the_run_goes_on_from_the_previous_or_the_new_checkpoint(tmp_path):
    found = []
    for operations in range(1000):
        layout = RunLayout(tmp_path / str(operations))
        for step in (1, 2):
            save(layout, step)
        save(layout, 3, "of a lost timeline")
        (layout.checkpoint(3) / "controller.json").unlink()
        was_finished = survive(operations, layout)
        assert all("has no COMPLETE" not in state.problem for state in describe(layout.checkpoints))
        step, path = latest_complete(layout.checkpoints)
        assert (path / "controller.json").read_text() == f"state {step}"
        found.append(step)
        if step == 2:  # the next attempt is not hindered by what the last one left
            save(layout, 3)
            assert latest_complete(layout.checkpoints) == (3, layout.checkpoint(3))
        prune(layout.checkpoints, 2)
        assert [state.step for state in describe(layout.checkpoints)] == [2, 3]
        assert not list(layout.checkpoints.glob(".*"))
        if was_finished:
            break
    assert found == sorted(found)  # once the new one counts it goes on counting
    assert found[0] == 2
    assert found[-1] == 3
    assert len(found) > 20


@pytest.mark.starts
def test_the_module_loads_without_torch():
    code = "import sys, rlhpc.training.checkpoint_directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkpoint_whose_name_may_not_be_on_disk_does_not_count_and_is_made_again(layout, monkeypatch):
    """Reported as failed and found as complete, it stood in its own way: a run that was done could not end."""
    temporary, final = begin(layout.checkpoint(3)), layout.checkpoint(3)
    write_parts(temporary, "x")
    sync = checkpoint_directory.sync_directory

    def refuse(path):
        if path == layout.checkpoints and final.exists():
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_directory, "sync_directory", refuse)
        with pytest.raises(CheckpointError, match="cannot be completed"):
            complete(temporary, final, {"step": 3})
    assert not final.exists()
    checkpoint_directory.discard(temporary)
    assert save(layout, 3) == final


# ----------------------------------------------------------------------------------------------------- background save

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


# ----------------------------------------------------------------- Files of a large checkpoint are read several at once

SPECS = (TensorSpec("t", "float32", (3,)),)
FILES = ("exp_avg-00001.safetensors", "exp_avg_sq-00001.safetensors", "weights-00001.safetensors")


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_directory, "MANY_BYTES", 0)


def write(place: Path) -> None:
    def tensors_of(_: str):
        return iter([torch.ones(3)])

    write_checkpoint(place, SPECS, tensors_of, num_steps_applied=1, rng={})


def two_at_once(read: Callable[..., object], names: list[str]) -> Callable[..., object]:
    """`read`, of which two have begun before either goes on; notes the names."""
    both = threading.Barrier(2)

    def meet(path: Path, *words: object, **options: object) -> object:
        names.append(path.name)
        if len(names) <= 2:
            both.wait(PATIENCE_S)
        return read(path, *words, **options)

    return meet


@pytest.mark.usefixtures("_large")
def test_a_trainers_files_are_checked_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    names: list[str] = []
    monkeypatch.setattr(trainer_state, "check_file", two_at_once(trainer_state.check_file, names))
    checkpoint = read_checkpoint(tmp_path, SPECS)
    assert sorted(names) == sorted(checkpoint.shards) == sorted(FILES)


@pytest.mark.usefixtures("_large")
def test_files_of_a_new_checkpoint_are_read_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "checkpoints" / "step_000003"
    temporary = begin(final)
    write(temporary)
    names: list[str] = []
    monkeypatch.setattr(checkpoint_directory, "record_of", two_at_once(checkpoint_directory.record_of, names))
    complete(temporary, final, {})
    assert sorted(names) == sorted([*FILES, "trainer.json"])
    assert verify(final)["files"].keys() == set(names)


@pytest.mark.usefixtures("_large")
def test_the_first_damaged_file_is_named_whichever_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    first, *others = trainer_state.read_manifest(tmp_path / trainer_state.STATE_FILE)["files"]
    for name in (first, *others):
        (tmp_path / name).write_bytes(b"short")
    found = threading.Event()
    check = trainer_state.check_file

    def last_file_first(path: Path, *words: object, **options: object) -> None:
        if path.name == first:
            assert found.wait(PATIENCE_S)
        try:
            check(path, *words, **options)
        finally:
            if path.name == others[-1]:
                found.set()

    monkeypatch.setattr(trainer_state, "check_file", last_file_first)
    with pytest.raises(CheckpointError, match=f"{first}: 5 bytes"):
        read_checkpoint(tmp_path, SPECS)
