"""`rlhpc audit RUN_DIR` finds nothing in any history of the real buffer, and whatever was falsified in one."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from launch.commands.submit import Submission, submit_checked
from launch.plan.jobs import plan_jobs
from launch.run_directory.prepare import NEWEST, ResumePoint
from launch.verify.audit import as_table, audit_run, look_before_going_on
from launch.verify.evidence import Depth
from launch.verify.report import Audit, Check, CheckVerdict
from launch.verify.steps import compare, describe
from launch.verify.timeline import EventEvidence
from rlhpc.base.native import crc32
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.history import EVENTS, Admitted, Began, GroupEventLog, Taken, Trained, event_paths, read_events
from rlhpc.buffer.journal import JOURNAL, journal_paths, read_journal, read_journals
from rlhpc.buffer.segments import segment_paths
from rlhpc.protocol.errors import EXIT_CONFIG, RunDirectoryError
from rlhpc.training.checkpoint_directory import KnownCheckpoints
from tests.unit.buffer.log_files import place_of, write_anew
from tests.unit.buffer.rollout_samples import make_scored
from tests.unit.launch.audit_kit import (
    MUTATIONS,
    AuditedRun,
    Falsified,
    Killed,
    a_checkpoint_opens_a_trained_group,
    an_event_is_gone,
    edit_checkpoint,
    edit_events,
    edit_segment,
    live_through,
)
from tests.unit.launch.site_kit import site_of

# -------------------- `rlhpc audit RUN_DIR` finds nothing in any history of the real buffer, and whatever was falsified

QUICK, FULL = Depth(is_quick=True), Depth()
BEFORE_A_RESUME = Depth(is_quick=True, last_segments=1)
NO_CHECKPOINT = 1000  # steps from one to the next
Mutation = Callable[[RunLayout, random.Random], Falsified | None]


def audited(layout: RunLayout, depth: Depth = FULL) -> Audit:
    return audit_run(layout, depth, lambda text: None)


def assert_clean(layout: RunLayout, depth: Depth = FULL) -> Audit:
    audit = audited(layout, depth)
    assert audit.is_clean, as_table(layout, audit)
    assert audit.places["missing"] == 0
    placed = sum(audit.places[place] for place in ("trained", "dropped", "buffered", "in_flight"))
    assert placed == audit.places["drawn"]
    assert sum(audit.dropped.values()) == audit.places["dropped"]
    return audit


def check_of(audit: Audit, name: str) -> Check:
    return next(check for check in audit.checks if check.name == name)


def complete_run(root: Path, seed: int, num_kills: int) -> RunLayout:
    run = AuditedRun(root, seed)
    live_through(run, num_kills, lambda: None)
    return run.layout


def killed_run(root: Path, seed: int) -> RunLayout:
    """Between two checkpoints: much is in the journal alone."""

    def end(step: int) -> None:
        if step == 5:
            raise Killed

    run = AuditedRun(root, seed)
    run.start()
    run.tell = end
    with pytest.raises(Killed):
        run.run()
    run.tear()
    return run.layout


# -------------------------------------------------------------------------------------------------- histories that hold


@pytest.mark.parametrize(
    "seeds",
    [range(10), *(pytest.param(range(first, first + 30), marks=pytest.mark.long) for first in range(10, 190, 30))],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_no_history_of_the_real_buffer_is_accused_whenever_it_is_killed(tmp_path, seeds):
    for seed in seeds:
        run = AuditedRun(tmp_path / str(seed), seed)

        def audit(run: AuditedRun = run) -> None:
            for depth in (FULL, BEFORE_A_RESUME):
                found = audited(run.layout, depth)
                assert found.is_clean, f"seed {run.seed}, {depth}\n{as_table(run.layout, found)}"

        live_through(run, seed % 4, audit)
        assert_clean(run.layout, QUICK)
        audit_at_end = assert_clean(run.layout)
        assert audit_at_end.num_steps == run.config.run.num_steps
        assert (audit_at_end.places["buffered"], audit_at_end.places["in_flight"]) == (0, 0)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 150), marks=pytest.mark.long)], ids=lambda seeds: f"{seeds.start}-"
)
@pytest.mark.timeout(900)  # over a second a seed on a busy machine
def test_a_run_whose_journal_was_damaged_between_two_attempts_tells_a_history_that_is_right(tmp_path, seeds):
    for seed in seeds:
        run = AuditedRun(tmp_path / str(seed), seed, every_steps=NO_CHECKPOINT if seed % 2 else 3)
        for _ in range(2):
            run.start()
            with suppress(Killed):
                run.run(kill_after=run.random.randint(20, 90))
            run.layout.summary.unlink(missing_ok=True)
            run.damage()
        run.start()
        run.run()
        audit = audited(run.layout)
        broken = [
            check.name for check in audit.checks if check.verdict is CheckVerdict.VIOLATED and check.name != "files"
        ]
        assert not broken, f"seed {seed}\n{as_table(run.layout, audit)}"


def test_what_a_killed_run_holds_is_counted(tmp_path):
    audit = assert_clean(killed_run(tmp_path / "run", 2))
    assert audit.places["trained"] > 0
    assert audit.places["in_flight"] + audit.places["buffered"] > 0
    assert audit.resume_step is not None


@pytest.mark.parametrize("seed", [2, 5])
def test_admissions_that_a_kill_cut_off_are_written_down_by_the_next_attempt(tmp_path, seed):
    """Rollouts are on disk before the events of the same commit, and may be those of the youngest group alone."""
    layout = killed_run(tmp_path / "run", seed)
    (path,) = event_paths(layout.rollouts)
    events = [*read_events(path).events.values()]
    youngest = max(record.scored.rollout.group_id for record in next(read_journals(layout.rollouts)).records)
    gap = next(i for i, event in enumerate(events) if getattr(event, "group", -1) == youngest - 2)
    write_anew(path, EVENTS, events[:gap])
    run = AuditedRun(layout.root, seed + 100)
    run.start()
    run.run()
    assert_clean(layout)


# ------------------------------------------------------------------------------------------------ histories that do not


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> list[RunLayout]:
    """Complete in one go, complete after kills, and killed."""
    root = tmp_path_factory.mktemp("originals")
    layouts = [
        complete_run(root / "complete", 5, 0),
        complete_run(root / "resumed", 11, 3),
        killed_run(root / "dead", 47),
    ]
    for layout in layouts:
        assert_clean(layout)
    return layouts


def copy_run(layout: RunLayout, copy: RunLayout) -> None:
    """Journal files, which are large and mostly holes, by another name: no test changes them."""

    def one(source: str, target: str) -> None:
        (os.link if Path(source).name.startswith("journal_") else shutil.copy2)(source, target)

    shutil.copytree(layout.root, copy.root, copy_function=one)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_whatever_is_falsified_is_named(originals, mutation, tmp_path):
    """With every checksum as it should be."""
    num_applied = 0
    for number, layout in enumerate(originals):
        copy = RunLayout(tmp_path / str(number))
        copy_run(layout, copy)
        falsified = mutation(copy, random.Random(number))
        if falsified is None:
            continue
        num_applied += 1
        audit = audited(copy)
        assert not audit.is_clean, f"{falsified} of {number}\n{as_table(copy, audit)}"
        assert is_named(falsified, audit), f"{falsified} of {number}\n{as_table(copy, audit)}"
    assert num_applied, "nothing was falsified: the test shows nothing"


def is_named(falsified: Falsified, audit: Audit) -> bool:
    return any(
        (falsified.group >= 0 and (offence.group == falsified.group or f"group {falsified.group} " in offence.text))
        or (falsified.step >= 0 and offence.step == falsified.step)
        or (falsified.file != "" and falsified.file in offence.file)
        for check in audit.checks
        for offence in check.offences
    )


def test_a_sample_outside_its_group_is_named_once(originals, tmp_path):
    copy = RunLayout(tmp_path / "run")
    copy_run(originals[0], copy)

    def renumber(groups: list[ResolvedGroup]) -> None:
        members = groups[0].group.members
        rollout = replace(members[0].rollout, sample_index=9)
        group = replace(groups[0].group, members=(replace(members[0], rollout=rollout), *members[1:]))
        groups[0] = replace(groups[0], group=group)

    edit_segment(segment_paths(copy.rollouts)[0], renumber)
    (text,) = [offence.text for offence in check_of(audited(copy), "members").offences if offence.sample == 9]
    assert re.fullmatch(r"group \d+: sample 9 of a group of \d", text)


def test_damage_is_named_by_file(originals, tmp_path):
    copy = RunLayout(tmp_path / "run")
    copy_run(originals[1], copy)
    path = segment_paths(copy.rollouts)[0]
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    (offence,) = check_of(audited(copy), "files").offences
    assert offence.file == f"rollouts/{path.name}"
    assert "the checksum of the file differs" in offence.text


# --------------------------------------------------------------------------------------------------------- what is said


def test_it_reads_only_and_says_so_in_a_table_and_in_json(originals, tmp_path, capsys):
    layout = RunLayout(tmp_path / "run")
    copy_run(originals[1], layout)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in layout.root.rglob("*") if path.is_file()}
    for words in ([], ["--quick"], ["--json"], ["--json", "--quick"]):
        assert main(["audit", str(layout.root), *words]) == 0
    out = capsys.readouterr().out
    assert f"{layout.root}: clean; 8 steps, version 7" in out.splitlines()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    assert {path for path in layout.root.rglob("*") if path.is_file()} == before.keys()


def test_the_json_document_keeps_its_keys_and_names_offenders(originals, tmp_path, capsys):
    layout = RunLayout(tmp_path / "run")
    copy_run(originals[0], layout)

    def stale(document: dict[str, object]) -> None:
        document["policy_version"] = 100

    _, path = KnownCheckpoints(layout.checkpoints).steps()[-1]
    edit_checkpoint(path, stale)
    assert main(["audit", str(layout.root), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert sorted(document) == [
        "checks", "groups", "is_clean", "is_quick", "lengths", "num_steps", "policy_version", "resume_step", "run_dir",
        "schema",
    ]  # fmt: skip
    assert (document["schema"], document["is_clean"], document["is_quick"], document["num_steps"]) == (
        1,
        False,
        False,
        8,
    )
    places = {"drawn", "missing", "trained", "dropped", "buffered", "in_flight", "dropped_because"}
    assert document["groups"].keys() == places
    (broken,) = [check for check in document["checks"] if check["verdict"] == "violated"]
    assert broken.keys() == {"name", "verdict", "looked_at", "remarks", "num_offences", "offences"}
    assert broken["name"] == "checkpoints agree"
    assert {offence["file"] for offence in broken["offences"]} == {f"checkpoints/{path.name}/controller.json"}
    assert main(["audit", str(layout.root)]) == 1
    assert "VIOLATED checkpoints agree: checkpoints/step_000008/controller.json: " in capsys.readouterr().out


def test_what_is_no_run_directory_is_refused_with_status_2(tmp_path, capsys):
    for path, said in ((tmp_path, "not a run directory"), (tmp_path / "nothing", "no such directory")):
        assert main(["audit", str(path)]) == EXIT_CONFIG
        assert said in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- what is tolerated


def test_files_that_are_not_known_are_no_accusation_and_events_are(originals, tmp_path):
    layout = RunLayout(tmp_path / "run")
    copy_run(originals[0], layout)
    for name in ("partials_000000.log", "guard.jsonl", "segment_0.h5.partial"):
        (layout.rollouts / name).write_bytes(b"x")
    assert_clean(layout)
    other = make_dataclass("Later", [("group", int)], frozen=True)(3)
    edit_events(event_paths(layout.rollouts)[0], lambda events: events.insert(9, other))
    (offence,) = check_of(audited(layout), "files").offences
    assert offence.text == f"events of another version of rlhpc: type {crc32(b'Later'):#010x} (1)"


def test_a_step_that_was_to_be_repeated_when_the_run_was_stopped_is_as_it_went_before(tmp_path):
    rollouts = RunLayout(tmp_path).rollouts
    rollouts.mkdir()
    first, second = GroupEventLog(rollouts, 0), GroupEventLog(rollouts, 1)
    for event in (
        Began(0, 0, goes_on=True),
        *(Admitted(group, group, 0) for group in range(4)),
        *(Taken(0, (0, 1)), Trained(0, 0, applied=True), Taken(1, (2, 3)), Trained(1, 1, applied=True)),
    ):
        first.add(event)
    for event in (Began(0, 8, goes_on=True, timeline=0), Taken(0, (0, 1))):
        second.add(event)
    for log in (first, second):
        log.commit(log.num_pending)
    evidence = EventEvidence(rollouts)
    evidence.look(is_last=True)
    assert [(step, known.version) for step, _, known in evidence.trained_steps()] == [(0, 0), (1, 1)]
    assert evidence.offences == []
    second.add(Trained(0, 0, applied=True))
    second.add(Trained(0, 0, applied=True))
    second.commit(2)
    evidence.look(is_last=True)
    assert ["trained a second time" in offence.text for offence in evidence.offences] == [True]


@pytest.mark.starts
def test_a_run_that_goes_on_is_never_accused(tmp_path):
    """A process works on it, is killed, and another goes on."""
    code = "from tests.unit.launch.test_audit import go_on; go_on()"
    for attempt in range(2):
        words = [sys.executable, "-c", code, str(tmp_path / "run"), str(attempt)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as writer:
            try:
                assert writer.stdin is not None
                assert writer.stdout is not None
                writer.stdout.readline()
                for number in range(6):
                    writer.stdin.write(b"\n")
                    assert_clean(RunLayout(tmp_path / "run"), FULL if number % 2 else QUICK)
                writer.stdin.write(b"\n")  # it is killed while it works
            finally:
                writer.kill()
        assert_clean(RunLayout(tmp_path / "run"))


def go_on() -> None:
    """Main of the process that works."""
    root, attempt = Path(sys.argv[1]), int(sys.argv[2])
    run = AuditedRun(root, 2 + 3 * attempt, num_steps=100_000, every_steps=5)
    run.start()

    def tell(step: int) -> None:
        print(step, flush=True)
        if step % 50 == 0:  # an audit reads everything: it may not last the longer, the slower this machine is
            sys.stdin.readline()

    run.tell = tell
    run.run()


# -------------------------------------------------------------------------------------------------------------- lengths


def test_lengths_are_compared_as_every_pair_of_them_is():
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 30, 300), rng.integers(5, 40, 500)
    share, z = compare(np.bincount(left), np.bincount(right))
    pairs = (left[:, None] > right).mean() + (left[:, None] == right).mean() / 2
    assert share == pytest.approx(pairs)
    assert z < -4
    assert describe(np.bincount(left)) == {"count": 300, "mean": left.mean(), "median": np.sort(left)[149]}
    assert compare(np.bincount(left), np.bincount(left)) == (pytest.approx(0.5), pytest.approx(0.0))


def test_a_loss_that_prefers_long_completions_and_poisoned_prompts_are_remarked_upon(tmp_path):
    layout = complete_run(tmp_path / "run", 5, 0)
    for number, path in enumerate(segment_paths(layout.rollouts)):
        lost = layout.rollouts / f"lost_attempt_{number + 1}"
        lost.mkdir()
        shutil.copy2(path, lost)
        edit_segment(lost / path.name, make_long)
    before = audited(layout)
    assert before.is_clean
    (remark,) = check_of(before, "length bias").remarks
    assert remark.startswith("rollouts that are lost are longer than those trained: in 100% of pairs")
    assert before.lengths["lost"]["mean"] > before.lengths["trained"]["mean"] + 20

    lines = [{"prompt": "abc", "lost_leases": 3, "together": 4}, {"prompt": "def", "lost_leases": 1, "together": 4}]
    lines.append(
        {"prompt": "1:7", "lost_leases": 0, "together": 0, "workers": 9, "source": "b.jsonl:8", "why": "SIGSEGV"}
    )
    layout.lost_leases.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    dropped, quarantined, suspects = check_of(audited(layout), "poison and quarantine").remarks
    assert dropped.startswith("dropped because no verifier, environment or agent could judge them: ")
    assert quarantined == (
        "1 prompt quarantined, sampled again only after a resume with --lift-quarantine: record 1:7 (b.jsonl:8): "
        "9 reward workers died judging it, the last: SIGSEGV"
    )
    said = "1 prompt under suspicion, granted with few others or alone: record abc: "
    said += "3 generators died sampling it"
    assert suspects == said
    last = as_table(layout, audited(layout)).splitlines()[-1]
    assert last.startswith(f"{layout.root}: clean, with remarks on members, length bias, poison and quarantine; ")


def make_long(groups: list[ResolvedGroup]) -> None:
    """Other rollouts of the same groups, of 40 tokens."""
    for place, group in enumerate(groups):
        members = tuple(
            make_scored(group.group.group_id, member.rollout.sample_index, length=40) for member in group.group.members
        )
        groups[place] = replace(group, group=replace(group.group, members=members))


# ---------------------- A resume looks at the history first: it refuses to train something twice, and warns of the rest

CUT_BYTES = 16  # of a row: its number and its group, and not its prompt


@pytest.fixture
def run(tmp_path) -> AuditedRun:
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


def test_of_a_history_that_is_right_nothing_is_said(run):
    assert warnings(run.layout) == []


@pytest.mark.parametrize("is_lengthened", [False, True])
def test_a_rollout_that_a_full_disk_has_cut_off_accuses_nobody(run, is_lengthened):
    """The disk took what fitted into a block: the record begins, and its rest, if there is any, is zeros."""
    path = journal_paths(run.layout.rollouts)[-1]
    first, end = place_of(path, JOURNAL, -1)
    data, num_rollouts = path.read_bytes(), len(read_journal(path).records)
    cut = data[first : first + CUT_BYTES]
    path.write_bytes(data + cut + bytes(end - first - len(cut) if is_lengthened else 0))
    assert warnings(run.layout) == []
    assert len(read_journal(path, is_verified=False).records) == num_rollouts


def test_going_on_is_refused_where_a_group_would_be_trained_twice(run):
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


def test_a_submission_is_refused_before_anything_is_written(run, tmp_path):
    assert a_checkpoint_opens_a_trained_group(run.layout, random.Random(0)) is not None
    site_file = tmp_path / "site.toml"
    site_file.touch()
    site = site_of(cluster={"shared_directory": str(tmp_path)})
    submission = Submission(run.config, site_file, site, plan_jobs(run.config, site, run.layout))
    before = sorted(run.layout.root.rglob("*"))
    with pytest.raises(RunDirectoryError, match="would train something twice"):
        submit_checked(submission, [], resume=True, fresh=False, tell=lambda line: None)
    assert sorted(run.layout.root.rglob("*")) == before


def test_what_going_on_makes_no_worse_is_a_warning(run):
    assert an_event_is_gone(Trained)(run.layout, random.Random(0)) is not None
    lines = warnings(run.layout)
    assert lines[0].startswith("audit: steps: step ")
    assert all(line.endswith(f"`rlhpc audit {run.layout.root}` lists everything") for line in lines)


def test_an_older_checkpoint_that_disagrees_forbids_nothing(run):
    """Unless it is the one that is taken."""
    (_, older), (_, newest) = KnownCheckpoints(run.layout.checkpoints).steps()
    aside = newest.rename(newest.with_name("elsewhere"))
    assert a_checkpoint_opens_a_trained_group(run.layout, random.Random(0)) is not None
    with pytest.raises(RunDirectoryError, match=older.name):
        warnings(run.layout)
    aside.rename(newest)
    assert any(older.name in line for line in warnings(run.layout))


def test_what_cannot_be_audited_is_left_to_the_resume(run):
    run.layout.config.write_text("{}")
    assert warnings(run.layout) == []
    run.layout.config.write_text('{"config": {}, "hash": ""}')
    (line,) = warnings(run.layout)
    assert line.startswith("the history of the run cannot be audited: ")
