"""A resume looks at the history first: it refuses to train something twice, and warns of the rest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from launch.commands.submit import Submission, submit_checked
from launch.plan.jobs import plan_jobs
from launch.run_directory.prepare import NEWEST, ResumePoint
from launch.verify.audit import look_before_going_on
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.journal import journal_paths, read_rollout_rows
from rlhpc.protocol.errors import RunDirectoryError
from rlhpc.training.checkpoint_directory import KnownCheckpoints
from tests.unit.launch.audit_mutations import a_checkpoint_opens_a_trained_group, a_line_is_gone
from tests.unit.launch.audit_runs import AuditedRun, Killed
from tests.unit.launch.site_kit import site_of

CUT_BYTES = 16  # of a row: its number and its group, and not its prompt


@pytest.fixture
def run(tmp_path: Path) -> AuditedRun:
    """Killed after step 8, with checkpoints of steps 3 and 6."""

    def end(step: int) -> None:
        if step == 8:
            raise Killed

    run = AuditedRun(tmp_path / "run", 2, num_steps=20)
    run.start()
    run.tell = end
    with pytest.raises(Killed):
        run.run()
    return run


def warnings(layout: RunLayout, resume_from: ResumePoint = NEWEST) -> list[str]:
    lines: list[str] = []
    look_before_going_on(layout, resume_from, lines.append)
    return lines


def test_of_a_history_that_is_right_nothing_is_said(run: AuditedRun) -> None:
    assert warnings(run.layout) == []


def test_a_row_of_the_journal_that_a_full_disk_has_cut_off_accuses_nobody(run: AuditedRun) -> None:
    """The disk took what fitted into a block: the row begins, and its rest and its checksum are zeros."""
    path = journal_paths(run.layout.rollouts)[-1]
    layout, rows = read_rollout_rows(path)
    last = rows[-1].copy()
    last["sequence"] += 1
    with path.open("r+b") as file:
        file.seek(layout.place("rollouts", len(rows)))
        file.write(last.tobytes()[:CUT_BYTES])
    assert warnings(run.layout) == []
    assert len(read_rollout_rows(path)[1]) == len(rows)


def test_going_on_is_refused_where_a_group_would_be_trained_twice(run: AuditedRun) -> None:
    falsified = a_checkpoint_opens_a_trained_group(run.layout, random.Random(0))
    assert falsified is not None
    before = sorted(run.layout.root.rglob("*"))
    for point in (NEWEST, ResumePoint(no_replay=True)):
        with pytest.raises(
            RunDirectoryError, match=f"twice: group {falsified.group} is open in step_000006"
        ) as refusal:
            warnings(run.layout, point)
        assert "--step N of 3, or start over with --from-start" in str(refusal.value)
    assert any(f"group {falsified.group} is open" in line for line in warnings(run.layout, ResumePoint(step=3)))
    assert warnings(run.layout, ResumePoint(from_start=True)) == []
    assert sorted(run.layout.root.rglob("*")) == before


def test_a_submission_is_refused_before_anything_is_written(run: AuditedRun, tmp_path: Path) -> None:
    assert a_checkpoint_opens_a_trained_group(run.layout, random.Random(0)) is not None
    site_file = tmp_path / "site.toml"
    site_file.touch()
    site = site_of(cluster={"shared_directory": str(tmp_path)})
    submission = Submission(run.config, site_file, site, plan_jobs(run.config, site, run.layout))
    before = sorted(run.layout.root.rglob("*"))
    with pytest.raises(RunDirectoryError, match="would train something twice"):
        submit_checked(submission, [], resume=True, fresh=False, tell=lambda line: None)
    assert sorted(run.layout.root.rglob("*")) == before


def test_what_going_on_makes_no_worse_is_a_warning(run: AuditedRun) -> None:
    assert a_line_is_gone("trained")(run.layout, random.Random(0)) is not None
    lines = warnings(run.layout)
    assert lines[0].startswith("audit: steps: step ")
    assert all(line.endswith(f"`rlhpc audit {run.layout.root}` lists everything") for line in lines)


def test_an_older_checkpoint_that_disagrees_forbids_nothing(run: AuditedRun) -> None:
    """Unless it is the one that is taken."""
    (_, older), (_, newest) = KnownCheckpoints(run.layout.checkpoints).steps()
    aside = newest.rename(newest.with_name("elsewhere"))
    assert a_checkpoint_opens_a_trained_group(run.layout, random.Random(0)) is not None
    with pytest.raises(RunDirectoryError, match=older.name):
        warnings(run.layout)
    aside.rename(newest)
    assert any(older.name in line for line in warnings(run.layout))


def test_what_cannot_be_audited_is_left_to_the_resume(run: AuditedRun) -> None:
    run.layout.config.write_text("{}")
    assert warnings(run.layout) == []
    run.layout.config.write_text('{"config": {}, "hash": ""}')
    (line,) = warnings(run.layout)
    assert line.startswith("the history of the run cannot be audited: ")
