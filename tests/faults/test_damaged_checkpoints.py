"""What a resume makes of checkpoints that are damaged, or that come back after their steps were undone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhpc.base.run_directory import RunLayout
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab, rlhpc, run_to_the_end, summary_of

pytestmark = pytest.mark.ring
GROUPS, GROUP_SIZE = 4, 4
SECTIONS = {"run": {"num_steps": 12}, "checkpoint": {"every_steps": 2, "keep": 3}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def done(lab: Lab) -> RunLayout:
    """A run of 12 steps with checkpoints of steps 8, 10 and 12."""
    return run_to_the_end(lab, "done", **SECTIONS)


@pytest.fixture
def layout(done: RunLayout, tmp_path: Path) -> RunLayout:
    """A copy of it, to do harm to."""
    shutil.copytree(done.root, tmp_path / "run", symlinks=True)
    return RunLayout(tmp_path / "run")


def resume(lab: Lab, layout: RunLayout, num_steps: int, *words: str) -> str:
    """Go on to that step, which must succeed; returns what was printed."""
    settings = (f"run.directory={layout.root}", f"run.num_steps={num_steps}")
    with Run(lab.root / "done.toml", layout, "--resume", *words, *settings) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        return run.output


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def weights_of(checkpoint: Path) -> Path:
    return checkpoint / "trainer" / "weights-00001.safetensors"


def names_below(layout: RunLayout) -> list[Path]:
    """All but the places in which owners of the directory prepare files."""
    return sorted(path for path in layout.root.rglob("*") if not path.name.startswith(".owner_"))


def resume_steps(layout: RunLayout) -> list[int | None]:
    return [json.loads(line)["resume_step"] for line in layout.attempts.read_text().splitlines()]


@pytest.mark.long
def test_a_damaged_checkpoint_that_is_mended_later_never_mixes_timelines(lab: Lab, layout: RunLayout) -> None:
    for step in (10, 12):
        flip_one_bit(weights_of(layout.checkpoint(step)))
    output = resume(lab, layout, 10)
    assert resume_steps(layout) == [None, 8]
    for step in (10, 12):
        assert f"step_{step:06d}.damaged" in output
        assert "weights-00001.safetensors" in output

    mended = layout.checkpoint(12)
    damaged = mended.with_name(f"{mended.name}.damaged")
    flip_one_bit(weights_of(damaged))  # as it was
    damaged.rename(mended)
    output = resume(lab, layout, 13)
    assert resume_steps(layout) == [None, 8, 10]
    assert "step_000012.undone" in output
    assert_full_batches_trained_once(layout.rollouts, 13, GROUPS, GROUP_SIZE)
    assert summary_of(layout)["rollouts_trained"] == 13 * GROUPS * GROUP_SIZE


@pytest.mark.long
def test_without_a_sound_checkpoint_nothing_is_resumed_unless_from_the_start(lab: Lab, layout: RunLayout) -> None:
    for step in (8, 10, 12):
        flip_one_bit(weights_of(layout.checkpoint(step)))
    before = names_below(layout)
    words = (f"run.directory={layout.root}", "run.num_steps=14")
    refused = rlhpc("run", str(lab.root / "done.toml"), "--resume", *words)
    assert refused.returncode == 2
    assert all(f"step_{step:06d}/trainer/weights-00001.safetensors" in refused.stderr for step in (8, 10, 12))
    assert "--from-start" in refused.stderr
    assert names_below(layout) == before

    output = resume(lab, layout, 4, "--from-start")
    assert resume_steps(layout) == [None, None]
    assert "step_000012.undone" in output
    names = {path.name for path in layout.checkpoints.iterdir() if not path.name.startswith(".")}
    assert {f"step_{step:06d}.undone" for step in (8, 10, 12)} | {"step_000002", "step_000004"} == names
    assert (layout.rollouts / "lost_attempt_1" / "segment_000000.h5").exists()
    assert_full_batches_trained_once(layout.rollouts, 4, GROUPS, GROUP_SIZE)


def test_another_tokenizer_of_the_same_vocabulary_is_refused_before_anything_moves(lab: Lab, layout: RunLayout) -> None:
    tokenizer = lab.model / "tokenizer.json"
    content = tokenizer.read_bytes()
    before = names_below(layout)
    settings = layout.config.read_bytes()
    try:
        tokenizer.write_text(json.dumps(json.loads(content) | {"padding": None}, indent=1))  # it loads as well
        words = (f"run.directory={layout.root}", "run.num_steps=14")
        refused = rlhpc("run", str(lab.root / "done.toml"), "--resume", *words)
    finally:
        tokenizer.write_bytes(content)
    assert refused.returncode == 2
    assert f"model.path: {tokenizer} has changed" in refused.stderr
    assert names_below(layout) == before
    assert layout.config.read_bytes() == settings


@pytest.mark.long
def test_a_check_beside_a_living_run_finds_no_damage_and_after_harm_it_does(lab: Lab) -> None:
    frequent = {"checkpoint": {"every_steps": 1}, "buffer": {"segment_groups": 1}}
    run_file, layout = lab.run_file("living", run={"num_steps": 100_000}, **frequent), lab.layout("living")
    with Run(run_file, layout) as run:
        for step in (2, 6, 10):  # each while segments are sealed and checkpoints completed and pruned
            run.wait_for_step(step)
            checked = rlhpc("check", str(layout.root))
            assert checked.returncode == 0, checked.stdout + checked.stderr
            assert "sound; a resume starts from step" in checked.stdout
        run.interrupt()
        assert run.finish() in (0, 130), run.story()
    newest = max(layout.checkpoints.glob("step_*"))
    flip_one_bit(weights_of(newest))
    checked = rlhpc("check", str(layout.root))
    assert checked.returncode == 1
    assert f"{newest.name}/trainer/weights-00001.safetensors" in checked.stdout
