from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import CheckpointError
from rlhpc.training import checkpoint_directory
from rlhpc.training.checkpoint_directory import begin, complete, describe, latest_complete, prune, verify


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


def test_a_run_without_checkpoints_has_none(layout):
    assert latest_complete(layout.checkpoints) is None
    assert describe(layout.checkpoints) == []
    layout.checkpoints.mkdir()
    assert latest_complete(layout.checkpoints) is None


def test_a_completed_checkpoint_is_found_and_says_what_it_holds(layout):
    path = save(layout, 120)
    assert latest_complete(layout.checkpoints) == (120, path)
    content = verify(path)
    assert content["step"] == 120
    assert content["files"].keys() == {"controller.json", "trainer/weights-00001.safetensors"}
    assert (path / "trainer" / "weights-00001.safetensors").read_text() == "state 120"
    assert not list(layout.checkpoints.glob(".*"))


def test_the_newest_is_found_by_number_not_by_name(layout):
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
