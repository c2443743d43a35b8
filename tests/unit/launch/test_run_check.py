"""`rlhpc check RUN_DIR` finds what is damaged, names it, and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.checks.run_check import Row, Verdict, check_run, chosen_step
from launch.cli import main
from launch.demo.task import write_dataset
from launch.run_directory.prepare import prepare_run_dir
from rlhpc.buffer.resolved import ResolvedGroup
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.exit_status import EXIT_CONFIG
from rlhpc.run_layout import RunLayout
from tests.unit.buffer.rollout_samples import ManualClock, make_group
from tests.unit.launch.site_kit import config_of
from tests.unit.launch.test_checkpoint_choice import flip_one_bit, save

pytestmark = pytest.mark.starts


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Two checkpoints and three segments of two groups."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    write_dataset(tmp_path / "train.jsonl", 10, seed=0)
    model, data = f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'train.jsonl'}"
    config = config_of(f"run.directory={tmp_path / 'run'}", model, data)
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    write_segments(layout, range(6))
    save(layout, 8)
    save(layout, 10)
    return layout


def write_segments(layout: RunLayout, group_ids: range, first_index: int = 0) -> None:
    writer = SegmentWriter(
        layout.rollouts,
        first_index,
        run_name="run",
        run_attempt=0,
        max_groups=2,
        max_s=60.0,
        clock=ManualClock(),
    )
    for group_id in group_ids:
        writer.add(ResolvedGroup(make_group(group_id), consumed_step=group_id // 2))
    writer.seal_all()


def damaged(layout: RunLayout) -> list[Row]:
    return [row for row in check_run(layout, lambda text: None) if row.verdict is Verdict.DAMAGED]


def state_of(layout: RunLayout) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in layout.root.rglob("*") if path.is_file()}


def test_a_sound_run_is_sound_and_untouched(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    before = state_of(layout)
    assert main(["check", str(layout.root)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"{layout.root}: sound; a resume starts from step 10"
    assert "6 groups, all checksums right" in out
    assert state_of(layout) == before


@pytest.mark.parametrize(
    ("damage", "part", "said"),
    [
        (lambda run: flip_one_bit(run.checkpoint(10) / "controller.json"), "checkpoints", "checksum differs"),
        (lambda run: (run.checkpoint(8) / "COMPLETE").unlink(), "checkpoints", "has no COMPLETE"),
        (lambda run: flip_one_bit(run.segment(1)), "segments", "the checksum of the file differs"),
        (lambda run: os.truncate(run.segment(2), 700), "segments", "truncated or damaged"),
        (lambda run: run.segment(1).unlink(), "segments", "segment 1 is missing"),
        (lambda run: write_segments(run, range(4, 6), 3), "segments", "twice: 4, 5"),
        (lambda run: flip_one_bit(run.config), "settings", "config.json"),
        (lambda run: run.config.write_text(run.config.read_text().replace("demo", "other")), "settings", "altered"),
        (lambda run: run.inputs.write_text("[]"), "inputs", "damaged"),
        (lambda run: (run.root.parent / "train.jsonl").write_text("{}"), "inputs", "train.jsonl has other content"),
        (lambda run: run.attempts.write_text(run.attempts.read_text() * 2), "attempts", "numbered [0, 0]"),
        (lambda run: run.attempts.write_text('{"index":'), "attempts", "cannot be read"),
    ],
)
def test_whatever_is_damaged_is_named_and_the_status_is_1(
    layout: RunLayout,
    damage: Callable[[RunLayout], None],
    part: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(layout)
    before = state_of(layout)
    assert main(["check", str(layout.root), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["is_damaged"]
    found = [row for row in document["rows"] if row["verdict"] == "damaged"]
    assert {row["part"] for row in found} == {part}
    assert any(said in row["text"] for row in found), found
    assert state_of(layout) == before


def test_it_says_which_checkpoint_is_taken_and_why_others_are_not(layout: RunLayout) -> None:
    save(layout, 12)
    flip_one_bit(layout.checkpoint(12) / "controller.json")
    rows = {row.name: row.text for row in check_run(layout, lambda text: None) if row.part == "checkpoints"}
    assert rows["step_000012"].startswith("a resume sets it aside: ")
    assert rows["step_000010"] == "a resume starts from here"
    assert rows["step_000008"] == "older than the one resumed from"
    assert chosen_step(check_run(layout, lambda text: None)) == 10


def test_segments_that_the_checkpoint_counts_on_are_missed_at_their_end_too(layout: RunLayout) -> None:
    state = {"step": 12, "policy_version": 12, "prompts": {}, "membership": {}, "totals": {}}
    content = json.dumps({**state, "buffer": {"next_segment_index": 4}})
    save(layout, 12, controller=content)
    assert [row.text for row in damaged(layout)] == [
        f"{layout.segment(3)} is missing: the checkpoint of step 12 was taken after 4"
    ]


def test_what_is_being_written_or_was_set_aside_is_no_damage(layout: RunLayout) -> None:
    layout.segment(3).with_name("segment_000003.h5.partial").write_bytes(b"half")
    (layout.checkpoints / ".step_000012.tmp").mkdir()
    (layout.checkpoints / "step_000006.damaged-2").mkdir()
    (layout.rollouts / "lost_attempt_1").mkdir()
    (layout.root / ".status.json.123.tmp").touch()
    rows = check_run(layout, lambda text: None)
    assert not [row for row in rows if row.verdict is Verdict.DAMAGED]
    assert sum(row.part == "leftovers" for row in rows) == 5


def test_a_segment_that_goes_while_it_is_read_is_no_damage(layout: RunLayout) -> None:
    """A resume sets it aside."""

    def go(text: str) -> None:
        if text.startswith("segment_000002"):
            layout.segment(2).unlink()

    assert all(row.verdict is not Verdict.DAMAGED for row in check_run(layout, go))


def test_what_is_no_run_directory_is_refused_with_status_2(
    layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([str(tmp_path)], [str(layout.root), "run.seed=1"], [str(tmp_path / "train.jsonl"), "--json"]):
        assert main(["check", *words]) == EXIT_CONFIG
        assert capsys.readouterr().err.startswith("rlhpc: ")
