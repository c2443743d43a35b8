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
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from launch.verify.audit import as_table, audit_run
from launch.verify.evidence import Depth
from launch.verify.report import Audit, Check, CheckVerdict
from launch.verify.steps import compare, describe
from launch.verify.timeline import EventEvidence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.history import Admitted, Began, GroupEventLog, Taken, Trained, event_paths
from rlhpc.buffer.journal import read_journals
from rlhpc.buffer.segments import segment_paths
from rlhpc.protocol.errors import EXIT_CONFIG
from rlhpc.training.checkpoint_directory import KnownCheckpoints
from tests.unit.buffer.rollout_samples import make_scored
from tests.unit.launch.audit_mutations import MUTATIONS, Falsified, edit_checkpoint, edit_events, edit_segment
from tests.unit.launch.audit_runs import AuditedRun, Killed, live_through

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
def test_no_history_of_the_real_buffer_is_accused_whenever_it_is_killed(tmp_path: Path, seeds: range) -> None:
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
def test_a_run_whose_journal_was_damaged_between_two_attempts_tells_a_history_that_is_right(
    tmp_path: Path, seeds: range
) -> None:
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


def test_what_a_killed_run_holds_is_counted(tmp_path: Path) -> None:
    audit = assert_clean(killed_run(tmp_path / "run", 2))
    assert audit.places["trained"] > 0
    assert audit.places["in_flight"] + audit.places["buffered"] > 0
    assert audit.resume_step is not None


@pytest.mark.parametrize("seed", [2, 5])
def test_admissions_that_a_kill_cut_off_are_written_down_by_the_next_attempt(tmp_path: Path, seed: int) -> None:
    """Rollouts are on disk before the events of the same commit, and may be those of the youngest group alone."""
    layout = killed_run(tmp_path / "run", seed)
    events = layout.rollouts / "events_000000.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    youngest = max(record.scored.rollout.group_id for record in next(read_journals(layout.rollouts)).records)
    gap = next(i for i, line in enumerate(lines) if f'"group":{youngest - 2},' in line.decode().replace(" ", ""))
    events.write_bytes(b"".join(lines[:gap]))
    run = AuditedRun(layout.root, seed + 100)
    run.start()
    run.run()
    assert_clean(layout)


# ------------------------------------------------------------------------------------------------ histories that do not


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[RunLayout]:
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
def test_whatever_is_falsified_is_named(originals: list[RunLayout], mutation: Mutation, tmp_path: Path) -> None:
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


def test_a_sample_outside_its_group_is_named_once(originals: list[RunLayout], tmp_path: Path) -> None:
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


def test_damage_is_named_by_file(originals: list[RunLayout], tmp_path: Path) -> None:
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


def test_it_reads_only_and_says_so_in_a_table_and_in_json(
    originals: list[RunLayout], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = RunLayout(tmp_path / "run")
    copy_run(originals[1], layout)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in layout.root.rglob("*") if path.is_file()}
    for words in ([], ["--quick"], ["--json"], ["--json", "--quick"]):
        assert main(["audit", str(layout.root), *words]) == 0
    out = capsys.readouterr().out
    assert f"{layout.root}: clean; 8 steps, version 7" in out.splitlines()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    assert {path for path in layout.root.rglob("*") if path.is_file()} == before.keys()


def test_the_json_document_keeps_its_keys_and_names_offenders(
    originals: list[RunLayout], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_is_no_run_directory_is_refused_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in ((tmp_path, "not a run directory"), (tmp_path / "nothing", "no such directory")):
        assert main(["audit", str(path)]) == EXIT_CONFIG
        assert said in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- what is tolerated


def test_files_that_are_not_known_are_no_accusation_and_events_are(originals: list[RunLayout], tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    copy_run(originals[0], layout)
    for name in ("partials_000000.bin", "guard.jsonl", "segment_0.h5.partial"):
        (layout.rollouts / name).write_bytes(b"x")
    assert_clean(layout)
    other = {"event": "partial", "group": 3, "tokens": 5}
    edit_events(event_paths(layout.rollouts)[0], lambda events: events.insert(9, other))
    (offence,) = check_of(audited(layout), "files").offences
    assert offence.text == "events of another version of rlhpc: partial (1)"


def test_a_step_that_was_to_be_repeated_when_the_run_was_stopped_is_as_it_went_before(tmp_path: Path) -> None:
    rollouts = RunLayout(tmp_path).rollouts
    rollouts.mkdir()
    first, second = GroupEventLog(rollouts, 0), GroupEventLog(rollouts, 1)
    for event in (
        Began(0, 0, goes_on=True),
        *(Admitted(group, group, 0) for group in range(4)),
        *(Taken(0, [0, 1]), Trained(0, 0, applied=True), Taken(1, [2, 3]), Trained(1, 1, applied=True)),
    ):
        first.add(event)
    for event in (Began(0, 8, goes_on=True, timeline=0), Taken(0, [0, 1])):
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
def test_a_run_that_goes_on_is_never_accused(tmp_path: Path) -> None:
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


def test_lengths_are_compared_as_every_pair_of_them_is() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 30, 300), rng.integers(5, 40, 500)
    share, z = compare(np.bincount(left), np.bincount(right))
    pairs = (left[:, None] > right).mean() + (left[:, None] == right).mean() / 2
    assert share == pytest.approx(pairs)
    assert z < -4
    assert describe(np.bincount(left)) == {"count": 300, "mean": left.mean(), "median": np.sort(left)[149]}
    assert compare(np.bincount(left), np.bincount(left)) == (pytest.approx(0.5), pytest.approx(0.0))


def test_a_loss_that_prefers_long_completions_and_poisoned_prompts_are_remarked_upon(tmp_path: Path) -> None:
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

    lines = [{"prompt": "abc", "strikes": 3, "together": 4}, {"prompt": "def", "strikes": 1, "together": 4}]
    lines.append({"prompt": "1:7", "strikes": 0, "together": 0, "workers": 9, "source": "b.jsonl:8", "why": "SIGSEGV"})
    layout.strikes.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
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
