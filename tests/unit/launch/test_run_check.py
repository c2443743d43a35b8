"""`rlhpc check RUN_DIR` finds what is damaged, names it, and changes nothing."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from launch.cli import main
from launch.common.text import columns_of
from launch.demo.task import write_dataset
from launch.run_directory.prepare import prepare_run_dir
from launch.verify.audit import ProgressNote
from launch.verify.files import check_run, chosen_step
from launch.verify.report import FileVerdict, Row
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.history import EVENTS, Admitted, Began, Dropped, Event, GroupEventLog, Taken, Trained
from rlhpc.buffer.journal import JOURNAL, JournalFiles
from rlhpc.buffer.log import read_log
from rlhpc.buffer.prefixes import PartialLog
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.unit.buffer.log_files import flip_at, flip_in_record, reopen, write_anew
from tests.unit.buffer.rollout_samples import ManualClock, make_draft, make_group, make_record, make_scored, piece_of
from tests.unit.launch.site_kit import config_of
from tests.unit.launch.test_checkpoint_choice import flip_one_bit, save

pytestmark = pytest.mark.starts


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    """Two checkpoints, three segments of two groups, three journal files of twelve rollouts, events of an attempt."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    write_dataset(tmp_path / "train.jsonl", 10, seed=0)
    model, data = f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'train.jsonl'}"
    config = config_of(f"run.directory={tmp_path / 'run'}", model, data)
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    write_segments(layout, range(6))
    write_journal(layout, range(12))
    write_events(layout, 0, HISTORY)
    write_partials(layout)
    save(layout, 8)
    save(layout, 10, controller=json.dumps(STATE | {"step": 10, "buffer": {"next_segment_index": 0} | JOURNAL_FROM_4}))
    return layout


HISTORY = (
    Began(0, 0, goes_on=True),
    *(Admitted(group, group, 0) for group in range(5)),
    Taken(0, (0, 1)),
    Trained(0, 0, applied=True),
    Dropped(2, DropReason.POISON),
    Taken(1, (3, 4)),
    Trained(1, 1, applied=True),
)

LEAPS = [Began(2, 12, goes_on=True), Taken(3, (0, 1))]
STATE = {"step": 12, "policy_version": 12, "prompts": {}, "membership": {}, "totals": {}, "guard": {}, "progress": {}}
JOURNAL_FROM_4 = {"journal": {"attempt": 0, "num_events": 0, "num_rollouts": 3}}


def write_journal(layout: RunLayout, indices: range, attempt: int = 0) -> None:
    """Rollouts of two a group, numbered from 1, five to a file."""
    for first in range(indices.start, indices.stop, 5):
        files = JournalFiles(layout.rollouts, run_name="run", attempt=attempt, first_sequence=first + 1)
        some = range(first, min(first + 5, indices.stop))
        files.append([make_record(i + 1, make_scored(i // 2, i % 2)) for i in some])
        files.close()


def write_events(layout: RunLayout, attempt: int, events: Sequence[Event]) -> None:
    log = GroupEventLog(layout.rollouts, attempt)
    for event in events:
        log.add(event)
    log.commit(len(events))
    log.close()


def write_partials(layout: RunLayout) -> None:
    """Two rollouts that are being sampled, reported twice."""
    log, draft = PartialLog(layout.rollouts, 0), make_draft(0, 50)
    log.begin([piece_of(draft, 0, 20, member=(6, index)) for index in range(2)])
    log.append([piece_of(draft, 20, 50, member=(6, index)) for index in range(2)])
    log.close()


def partials(layout: RunLayout) -> Path:
    return layout.rollouts / "partials_000000.log"


def journal(layout: RunLayout, index: int) -> Path:
    return layout.rollouts / f"journal_{index:06d}.log"


def events(layout: RunLayout, attempt: int) -> Path:
    return layout.rollouts / f"events_{attempt:06d}.log"


def write_later_events(path: Path) -> None:
    """Those of a version that has more kinds of them."""
    write_anew(path, EVENTS, [make_dataclass("Later", [("step", int)], frozen=True)(3)])


def write_segments(layout: RunLayout, group_ids: range, first_index: int = 0) -> None:
    writer = SegmentWriter(
        layout.rollouts, first_index, run_name="run", run_attempt=0, max_groups=2, max_s=60.0, clock=ManualClock()
    )
    for group_id in group_ids:
        writer.add(ResolvedGroup(make_group(group_id), consumed_step=group_id // 2))
    writer.seal_all()


def damaged(layout: RunLayout) -> list[Row]:
    return [row for row in check_run(layout, lambda text: None) if row.verdict is FileVerdict.DAMAGED]


def state_of(layout: RunLayout) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in layout.root.rglob("*") if path.is_file()}


def test_a_sound_run_is_sound_and_untouched(layout, capsys):
    before = state_of(layout)
    assert main(["check", str(layout.root)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"{layout.root}: sound; a resume starts from step 10"
    assert "6 groups, all checksums right" in out
    assert "12 rollouts, all checksums right" in out
    assert f"{len(HISTORY)} events, all checksums right" in out
    assert "2 rollouts of 100 tokens, all checksums right" in out
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
        (lambda run: flip_in_record(journal(run, 1), JOURNAL, 3), "journal", "journal_000001.log: bytes 1"),
        (lambda run: flip_at(journal(run, 1), 30), "journal", "journal_000001.log: bytes 0 to 1024 are damaged"),
        (lambda run: flip_in_record(journal(run, 1), JOURNAL, 0), "journal", "journal_000001.log: bytes 1040 to"),
        (lambda run: flip_in_record(journal(run, 0), JOURNAL, -1), "journal", "journal_000001.log: rollout 5"),
        (lambda run: flip_at(journal(run, 2), 40), "journal", "journal_000002.log: bytes 0 to 1024 are damaged"),
        (lambda run: journal(run, 1).write_bytes(b"x" * 9000), "journal", "_000001.log is not a log"),
        (lambda run: os.truncate(journal(run, 1), 1500), "journal", "journal_000002.log: rollouts 6 to 10"),
        (lambda run: os.truncate(journal(run, 0), 60), "journal", "journal_000000.log is not a log"),
        (lambda run: flip_at(partials(run), 30), "partials", "partials_000000.log: bytes 0 to"),
        (lambda run: journal(run, 1).unlink(), "journal", "missing between"),
        (lambda run: journal(run, 0).unlink(), "journal", "missing: rollouts 4 to 5, the first since the checkpoint"),
        (
            lambda run: shutil.copy(journal(run, 1), journal(run, 3)),
            "journal",
            "also in journal_000002.log: rollouts 6 to 12",
        ),
        (lambda run: flip_in_record(events(run, 0), EVENTS, 3), "events", "events_000000.log: bytes 1"),
        (lambda run: flip_at(events(run, 0), 30), "events", "events_000000.log: bytes 0 to 1024 are damaged"),
        (lambda run: write_events(run, 1, [Taken(2, (9,))]), "events", "group 9 of step 2 was never admitted"),
        (
            lambda run: write_events(run, 1, [Taken(2, (3,)), Taken(3, (3,))]),
            "events",
            "group 3 is trained at step 2 and at step 3",
        ),
        (lambda run: write_events(run, 1, [Trained(1, 1, applied=True)]), "events", "step 1 is trained, and no batch"),
        (lambda run: write_events(run, 1, LEAPS), "events", "step 3 follows, where step 2 is due"),
        (
            lambda run: write_events(run, 1, [Taken(2, (*range(9, 99),))]),
            "events",
            "80 more contradictions: `rlhpc",
        ),
        (lambda run: write_later_events(events(run, 0)), "events", "is it of another version of rlhpc?"),
        (lambda run: flip_one_bit(run.config), "settings", "config.json"),
        (lambda run: run.config.write_text(run.config.read_text().replace('"demo"', '"other"')), "settings", "altered"),
        (lambda run: run.inputs.write_text("[]"), "inputs", "damaged"),
        (lambda run: (run.root.parent / "train.jsonl").write_text("{}"), "inputs", "train.jsonl has changed"),
        (lambda run: run.attempts.write_text(run.attempts.read_text() * 2), "attempts", "numbered [0, 0]"),
        (lambda run: run.attempts.write_text('{"index":'), "attempts", "cannot be read"),
        (lambda run: run.attempts.unlink(), "attempts", "attempts.jsonl is missing, though there are events"),
    ],
)
def test_whatever_is_damaged_is_named_and_the_status_is_1(layout, damage, part, said, capsys):
    damage(layout)
    before = state_of(layout)
    assert main(["check", str(layout.root), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["is_damaged"]
    found = [row for row in document["rows"] if row["verdict"] == "damaged"]
    assert {row["part"] for row in found} == {part}
    assert any(said in row["text"] for row in found), found
    assert state_of(layout) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_sound_run_of_another_user_is_sound(layout, capsys):
    (layout.secrets / "public").mkdir(parents=True, mode=0o700)
    for path in (layout.root, *layout.root.rglob("*")):
        os.chown(path, 12345, -1)
    assert main(["check", str(layout.root)]) == 0
    assert "belongs to user 12345" in capsys.readouterr().out


def test_what_somebody_has_named_like_a_checkpoint_is_none(layout):
    (layout.checkpoints / "step_10").mkdir()
    names = [row.name for row in check_run(layout, lambda text: None) if row.part == "checkpoints"]
    assert names == ["step_000010", "step_000008"]


def test_it_says_which_checkpoint_is_taken_and_why_others_are_not(layout):
    save(layout, 12)
    flip_one_bit(layout.checkpoint(12) / "controller.json")
    rows = {row.name: row.text for row in check_run(layout, lambda text: None) if row.part == "checkpoints"}
    assert rows["step_000012"].startswith("a resume sets it aside: ")
    assert rows["step_000010"] == "a resume starts from here"
    assert rows["step_000008"] == "older than the one resumed from"
    assert chosen_step(check_run(layout, lambda text: None)) == 10


def test_segments_that_the_checkpoint_counts_on_are_missed_at_their_end_too(layout):
    save(layout, 12, controller=json.dumps(STATE | {"buffer": {"next_segment_index": 4} | JOURNAL_FROM_4}))
    assert [row.text for row in damaged(layout)] == [
        f"{layout.segment(3)} is missing: the checkpoint of step 12 was taken after 4"
    ]


def test_what_is_being_written_or_was_set_aside_is_no_damage(layout):
    layout.segment(3).with_name("segment_000003.h5.partial").write_bytes(b"half")
    (layout.checkpoints / ".step_000012.tmp").mkdir()
    (layout.checkpoints / "step_000006.damaged-2").mkdir()
    (layout.rollouts / "lost_attempt_1").mkdir()
    (layout.root / ".status.json.123.tmp").touch()
    rows = check_run(layout, lambda text: None)
    assert not [row for row in rows if row.verdict is FileVerdict.DAMAGED]
    assert sum(row.part == "leftovers" for row in rows) == 5


def test_a_segment_that_goes_while_it_is_read_is_no_damage(layout):
    """A resume sets it aside."""

    def go(text: str) -> None:
        if text.startswith("segment_000002"):
            layout.segment(2).unlink()

    assert all(row.verdict is not FileVerdict.DAMAGED for row in check_run(layout, go))


# ------------------------------------------------------------------------------------------------ journal and events


def notes(layout: RunLayout) -> list[tuple[str, str]]:
    rows = [row for row in check_run(layout, lambda text: None) if row.verdict is FileVerdict.NOTE]
    return [(row.name, row.text) for row in rows]


def test_what_a_killed_process_left_half_written_is_a_remark(layout):
    places = read_log(journal(layout, 2), JOURNAL).places  # a prompt and two rollouts
    (first, _), (_, last) = places[-2:]
    reopen(journal(layout, 2))
    for index in (2, 1):
        flip_in_record(journal(layout, 2), JOURNAL, index)
    end = events(layout, 0).stat().st_size
    with events(layout, 0).open("ab") as file:
        file.write(b"RLHP0123abcd")
    assert not damaged(layout)
    remark = "at its end: half written when its process ended, or being written now"
    assert notes(layout) == [
        ("journal_000002.log", f"bytes {first} to {last} {remark}"),
        ("events_000000.log", f"bytes {end} to {end + 12} {remark}"),
    ]
    write_journal(layout, range(10, 14), attempt=1)  # goes on where it found the end
    write_events(layout, 1, [Began(1, 10, goes_on=True), Taken(1, (4, 3))])
    assert not damaged(layout)


def test_rollouts_of_an_attempt_that_was_overtaken_do_not_count(layout):
    write_journal(layout, range(8, 14), attempt=1)
    assert not damaged(layout)


def test_files_that_checkpoints_have_made_superfluous_may_be_gone(layout):
    shutil.rmtree(layout.rollouts)
    layout.rollouts.mkdir()
    write_segments(layout, range(6))
    write_journal(layout, range(3, 12))
    write_events(layout, 1, [Began(1, 3, goes_on=True), Taken(1, (0, 1))])  # group 0 was admitted by attempt 0
    assert not damaged(layout)


def test_without_a_checkpoint_the_beginning_is_needed_unless_the_run_began_over(layout):
    shutil.rmtree(layout.checkpoints)
    layout.checkpoints.mkdir()
    assert not damaged(layout)
    journal(layout, 0).unlink()
    assert [row.text for row in damaged(layout)] == [
        f"{layout.rollouts}: missing: rollouts 1 to 5, the first since the beginning"
    ]
    write_events(layout, 1, [Began(0, 5, goes_on=False)])
    assert not damaged(layout)


def test_a_run_that_begins_over_admits_its_groups_anew(layout):
    write_events(layout, 1, [Began(0, 12, goes_on=False), Admitted(0, 0, 0), Taken(0, (0, 1))])
    (row,) = damaged(layout)
    assert row.text.endswith("group 1 of step 0 was never admitted")


def test_the_half_written_end_of_partial_rollouts_is_no_damage(layout):
    reopen(partials(layout))
    os.truncate(partials(layout), partials(layout).stat().st_size - 5)
    rows = [row for row in check_run(layout, lambda text: None) if row.part == "partials"]
    assert [row.verdict for row in rows] == [FileVerdict.NOTE, FileVerdict.SOUND]
    assert "2 rollouts of 40 tokens" in rows[1].text


def test_a_journal_that_is_deleted_while_it_is_read_is_no_damage(layout):
    def go(text: str) -> None:
        if text.startswith("journal_000001"):
            journal(layout, 0).unlink()
            journal(layout, 1).unlink()

    assert all(row.verdict is not FileVerdict.DAMAGED for row in check_run(layout, go))


def test_a_run_that_goes_on_is_sound_at_every_moment(layout):
    """A process appends all the time; the check reads what it has just begun to write."""
    code = "from tests.unit.launch.test_run_check import append_for_ever; append_for_ever()"
    with subprocess.Popen([sys.executable, "-c", code, str(layout.rollouts)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            for _ in range(5):
                writer.stdout.readline()
                assert not damaged(layout)
        finally:
            writer.kill()
    assert not damaged(layout)


def append_for_ever() -> None:
    """Main of the process that writes."""
    files = JournalFiles(Path(sys.argv[1]), run_name="run", attempt=1, first_sequence=13)
    log = GroupEventLog(Path(sys.argv[1]), 1)
    log.add(Began(0, 12, goes_on=True))
    for batch in itertools.count():
        numbers = range(13 + 16 * batch, 29 + 16 * batch)
        files.append([make_record(n, make_scored(n // 2, n % 2, length=128), 0) for n in numbers])
        log.add(Admitted(5 + batch, 5 + batch, 0))
        log.commit(log.num_pending)
        print(batch, flush=True)
        time.sleep(0.005)  # some MB a second


def test_what_is_no_run_directory_is_refused_with_status_2(layout, tmp_path, capsys):
    for words in ([str(tmp_path)], [str(layout.root), "run.seed=1"], [str(tmp_path / "train.jsonl"), "--json"]):
        assert main(["check", *words]) == EXIT_CONFIG
        assert capsys.readouterr().err.startswith("rlhpc: ")


def test_it_says_what_a_crash_would_cost(layout):
    """Steps after the chosen checkpoint that have been recorded, by their own times."""
    assert not [row for row in check_run(layout, lambda text: None) if row.part == "replay"]  # recorded: 0 and 1
    trained = [Trained(step, step, applied=True, metrics={"step_s": 2.5}) for step in range(9, 14)]
    write_events(layout, 1, [Began(0, 12, goes_on=True), *(Taken(e.step, (e.step,)) for e in trained), *trained])
    said = (
        "since the checkpoint of step 10, steps 10 to 13 would be trained again, from the journal: 10.0 s of training"
    )
    (row,) = [row for row in check_run(layout, lambda text: None) if row.part == "replay"]
    assert row.text.startswith(said)
    write_events(layout, 2, [Began(0, 12, goes_on=False)])
    assert not [row for row in check_run(layout, lambda text: None) if row.part == "replay"]


def test_a_file_that_stands_alone_is_not_from_itself_to_itself(layout, capsys):
    assert main(["check", str(layout.root)]) == 0
    out = capsys.readouterr().out
    assert "events_000000  " in out
    assert "events_000000 to" not in out


class Terminal(io.StringIO):
    """Shows lines as a terminal does."""

    def isatty(self) -> bool:
        return True


def test_what_is_being_read_stays_on_its_line_of_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    note = ProgressNote(terminal)
    for text in ("model /scratch/group/models/qwen and data /scratch/group/data.jsonl", "\u6a21\u578b" * 20, "\x1b[2J"):
        note._said_at = -math.inf
        note(text)
    note.close()
    shown = terminal.getvalue().split("\r")
    assert max(map(columns_of, shown)) < 30
    assert "reading model /scratch" in shown[1]
    assert "\x1b" not in terminal.getvalue()
