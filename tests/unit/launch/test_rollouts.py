"""`rlhpc rollouts`: every rollout that is on disk, with what people ask about it, and a page of them."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from launch.common.text import print_paged
from launch.view.rollouts import EVERYTHING, RunRollouts, SeenRollout, Selection, as_document, sample_of, transcripts
from launch.view.rollouts_page import write_page
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import START, read_history
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.config.file import write_resolved
from rlhpc.config.rules import with_values
from rlhpc.protocol.errors import EXIT_CONFIG, RunDirectoryError
from tests.unit.doc_pages import ROOT
from tests.unit.launch.audit_kit import AuditedRun, Killed
from tests.unit.launch.runs_kit import TextRun
from tests.unit.launch.web_kit import asks_the_network, dom_of, needs_browser, picture_of, texts_in

# --------------------------------------- `rlhpc rollouts`: every rollout that is on disk, with what people ask about it


def _seen(run: TextRun | AuditedRun, selection: Selection = EVERYTHING) -> list[SeenRollout]:
    return list(RunRollouts(run.layout, tell=_pass_over).each(selection))


def _pass_over(line: str) -> None:
    """Said of other things."""


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> TextRun:
    run = TextRun(tmp_path_factory.mktemp("text") / "text")
    run.seal(
        [
            run.group("3 + 4 =", [("7", 1.0), ("eight", 0.0)], step=0),
            run.group("2 + 5 =", [("zehn é", 0.25), ("7", 0.75)], step=0),
            run.group("1 + 1 =", [("2", 1.0), ("2", 1.0)]),
            run.group("9 - 2 =", [("7", 1.0), ("\x1b[2J</script>", 0.0)], step=1, task="subtracting"),
            run.group("8 - 1 =", [("7", 1.0), ("6", 0.0)], step=1, task="subtracting"),
        ]
    )
    run.seal([run.group("0 + 7 =", [("?", -1.0), ("7", 1.0)])])
    return run


@pytest.mark.parametrize("seed", range(6))
def test_of_a_run_killed_at_any_moment_every_rollout_on_disk_is_shown_once(tmp_path, seed):
    run = AuditedRun(tmp_path / "run", seed)
    run.start()
    with pytest.raises(Killed):
        run.run(kill_after=40 + 7 * seed)
    on_disk = {
        (member.rollout.group_id, member.rollout.sample_index)
        for resolved in read_rollouts_directory(run.layout.rollouts)
        for member in resolved.group.members
    } | {
        (record.scored.rollout.group_id, record.scored.rollout.sample_index)
        for record in read_history(run.layout.rollouts, START).rollouts
    }
    shown = Counter((seen.group_id, seen.sample_index) for seen in _seen(run))
    assert shown.keys() == on_disk
    assert set(shown.values()) == {1}


def test_what_a_teacher_has_said_is_shown_as_a_mean_over_loss_tokens(tmp_path):
    for seed in (1, 2):
        run = AuditedRun(tmp_path / str(seed), seed)
        run.start()
        with pytest.raises(Killed):
            run.run(kill_after=60)
        for seen in _seen(run):
            document, text = as_document(seen), "\n".join(transcripts([seen]))
            assert (seen.teacher_logprobs is None, "teacher" in text) == (seed == 2, seed == 1)
            if seen.teacher_logprobs is not None:
                mean = float(seen.teacher_logprobs[seen.loss_mask].mean())
                assert document["teacher_logprob"] == seen.teacher_logprob == mean
                assert document["teacher_logprobs"] == seen.teacher_logprobs.tolist()
                assert f", teacher {mean:.3f} a token" in text


def test_what_became_of_a_group_is_said_before_its_segment_is_sealed(tmp_path):
    run = AuditedRun(tmp_path / "run", 1, segment_groups=1000, every_steps=1000)
    run.start()
    with pytest.raises(Killed):
        run.run(kill_after=75)
    assert not list(run.layout.rollouts.glob("segment_*"))
    history = read_history(run.layout.rollouts, START)
    for seen in _seen(run):
        taken = [step for step, batch in history.batches.items() if seen.group_id in batch.groups]
        if seen.group_id in history.dropped:
            assert seen.standing == "dropped"
        elif taken and taken[0] in history.trained:
            assert (seen.standing, seen.step) == ("skipped" if taken[0] % 5 == 3 else "trained", taken[0])
            assert seen.trained_version == history.trained[taken[0]].version
        else:
            assert seen.standing == ("taken" if taken else "waiting")
    assert {"trained", "skipped", "dropped", "waiting"} <= {seen.standing for seen in _seen(run)}


@pytest.mark.parametrize("normalization", ["off", "batch"])
def test_advantages_are_those_of_the_batch_that_was_trained(tmp_path, normalization):
    run = TextRun(tmp_path / "text", f"algorithm.advantage_normalization={normalization}")
    groups = [
        run.group("3 + 4 =", [("7", 1.0), ("eight", 0.25)], step=0),
        run.group("5 + 5 =", [("same", 1.0), ("same", 1.0)]),  # dropped between two of the batch
        run.group("2 + 5 =", [("long and wrong", 0.0), ("7", 0.75)], step=0),
    ]
    run.seal(groups[:2])
    run.seal(groups[2:])  # a batch may lie in two segments
    batch = [resolved.group for resolved in groups if resolved.consumed_step == 0]
    expected = [sample.advantages for sample in SampleMaker.of(run.config)(batch)]
    seen = [each for each in _seen(run) if each.standing == "trained"]
    for mine, theirs in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(mine.advantages, theirs[len(mine.prompt_token_ids) :])
    assert all(each.advantages is None for each in _seen(run) if each.standing == "dropped")


def test_normalised_advantages_are_shown_before_a_segment_is_sealed_though_groups_of_steps_are_mixed(tmp_path):
    run = AuditedRun(tmp_path / "run", 1, segment_groups=1000, every_steps=1000)
    run.start()
    with pytest.raises(Killed):
        run.run(kill_after=75)
    normalised = with_values(run.config, {"algorithm.advantage_normalization": "batch"})
    write_resolved(normalised, run.layout, "")
    history = read_history(run.layout.rollouts, START)
    steps = {group_id: step for step, batch in history.batches.items() for group_id in batch.groups}
    in_order = [steps[group_id] for group_id in sorted(steps)]
    assert in_order != sorted(in_order)
    seen = _seen(run)
    assert {each.group_id for each in seen if each.advantages is not None} == steps.keys()
    for step, batch in history.batches.items():
        of_step = [each for each in seen if each.step == step]
        assert {each.group_id for each in of_step} == {*batch.groups}
        values = np.concatenate([each.advantages for each in of_step if each.advantages is not None])
        assert abs(values.sum()) < 1e-3  # over the tokens of the batch


def test_of_a_batch_that_is_not_whole_no_normalised_advantage_is_made_up(tmp_path):
    run = TextRun(tmp_path / "text", "algorithm.advantage_normalization=batch")
    run.seal([run.group("3 + 4 =", [("7", 1.0), ("eight", 0.25)], step=0)])
    assert [each.advantages for each in _seen(run)] == [None, None]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(steps=(1, 1)), [(3, 0), (3, 1), (4, 0), (4, 1)]),
        (Selection(steps=(0, 7), task="adding"), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (Selection(verdict="verifier_error"), [(5, 0)]),
        (Selection(min_reward=0.25, max_reward=0.75), [(1, 0), (1, 1)]),
        (Selection(max_reward=0.1), [(0, 1), (3, 1), (4, 1)]),  # a failed verifier's number is no reward
        (Selection(pattern=re.compile("ze.n é")), [(1, 0)]),
        (Selection(pattern=re.compile(r"^9 - 2")), [(3, 0), (3, 1)]),
    ],
)
def test_what_is_asked_for_is_shown(text_run, selection, expected):
    assert [(seen.group_id, seen.sample_index) for seen in _seen(text_run, selection)] == expected


def test_rollouts_say_of_which_dataset_and_record_they_are(tmp_path, capsys):
    data = tmp_path / "sums.jsonl"
    data.write_text('{"question": "3 + 4 =", "answer": "#### 7"}\n')
    run = TextRun(tmp_path / "text", f"data.path={data}", "data.name=sums")
    run.seal([run.group("3 + 4 =", [("7", 1.0), ("8", 0.0)], step=0)])
    assert [(seen.dataset, seen.record) for seen in _seen(run, Selection(dataset="sums"))] == [
        ("sums", f"{data}:1")
    ] * 2
    assert main(["rollouts", str(run.layout.root), "--dataset", "sums"]) == 0
    assert f"(prompt 0 of sums, {data}:1)" in capsys.readouterr().out
    assert main(["rollouts", str(run.layout.root), "--dataset", "sum"]) == EXIT_CONFIG
    assert "dataset='sum': not a dataset of this run; legal: sums (did you mean sums?)" in capsys.readouterr().err
    data.unlink()
    (seen, _), told = RunRollouts(run.layout, tell=print).each(), capsys.readouterr().out
    assert (seen.dataset, seen.record) == ("sums", "")
    assert "sums.jsonl does not exist" in told + capsys.readouterr().out


def test_a_sample_is_the_same_each_time_and_any_rollout_may_be_in_it(text_run):
    every = _seen(text_run)
    found = Counter[int]()
    for seed in range(600):
        chosen = sample_of(iter(every), 3, random.Random(seed).randrange)
        places = [id(seen) for seen in chosen]
        assert len(set(places)) == 3
        found.update(places)
    assert set(found) == {id(seen) for seen in every}
    assert max(found.values()) < 1.6 * min(found.values())  # 150 of each are expected


def test_a_transcript_has_prompt_reward_parts_advantage_versions_staleness_and_the_end(text_run):
    text = "\n".join(transcripts(_seen(text_run, Selection(steps=(1, 1)))))
    for words in (
        "group 3: subtracting, trained in step 1",
        "prompt     │ 9 - 2 =",
        "reference  │ #### 7",
        "correct, reward 1 (answer 1), advantage +1.000",
        "2 tokens, stop; versions 0 to 1, admitted at 0, trained at 1: staleness 1",
        "verifier: extracted 1",
        "completion │ 7<eos>",
    ):
        assert words in text
    assert text.count("9 - 2 =") == 1  # of a group's members once


@pytest.fixture
def branched(tmp_path) -> TextRun:
    """A rollout in three rows, of which the second begins as the first; its group's other one is in one."""
    run = TextRun(tmp_path / "branched")
    group = run.group("3 + 4 =", [("7 is it", 1.0), ("8", 0.0)], step=0)
    first, rows = group.group.members[0], [run.tokens("7 is it"), run.tokens("7 is it or 9"), run.tokens("so 7")]
    ends = np.cumsum([len(row) for row in rows])
    mask = np.ones(ends[-1], np.bool_)
    mask[ends[0] : ends[0] + len(rows[0])] = False  # copied
    rollout = replace(
        first.rollout,
        token_ids=np.concatenate(rows),
        behaviour_logprobs=np.full(ends[-1], -1, np.float32),
        versions=np.concatenate([np.full(len(row), 2 - place, np.int32) for place, row in enumerate(rows)]),
        loss_mask=mask,
        row_starts=ends[:-1].astype(np.int32),
    )
    members = (replace(first, rollout=rollout), group.group.members[1])
    run.seal(
        [
            replace(group, group=replace(group.group, members=members)),
            run.group("1 + 1 =", [("2", 1.0), ("3", 0.0)], step=0),
        ]
    )
    return run


def test_a_transcript_shows_rows_and_what_they_share_once(branched):
    seen = _seen(branched)
    lines = list(transcripts(seen))
    number = len(branched.tokens("7 is it"))
    assert [line for line in lines if line.startswith(("row", "           │ "))] == [
        "row 0      │ 7 is it",
        f"row 1      │ … {number} tokens as in an earlier row …",
        "           │  or 9",
        "row 2      │ so 7",
    ]
    assert any(f"{len(seen[0].token_ids)} tokens in 3 rows, stop; versions 0 to 2" in line for line in lines)
    document = as_document(seen[0])
    assert (document["row_starts"], document["num_shared"]) == (seen[0].row_starts, [0, number, 0])


def test_advantages_of_rows_stand_on_the_tokens_that_are_trained(branched):
    (seen, *_), mask = _seen(branched), _seen(branched)[0].loss_mask
    assert seen.advantages is not None
    assert set(seen.advantages[mask].tolist()) == {1.0}
    assert not seen.advantages[~mask].any()


@pytest.mark.starts
@needs_browser
def test_a_browser_shows_rows_and_folds_away_what_they_share(branched, tmp_path):
    page = tmp_path / "page.html"
    rollouts = RunRollouts(branched.layout, tell=_pass_over)
    write_page(page, rollouts, rollouts.each())
    document = dom_of(page, profile=tmp_path / "profile")
    assert texts_in(document, "row") == ["row 1", "row 2"]
    number = len(branched.tokens("7 is it"))
    assert f"<summary>{number} tokens as in an earlier row</summary>" in document
    assert "in 3 rows, stop" in document


def test_a_terminal_obeys_nothing_that_a_model_has_sampled(text_run):
    text = "\n".join(transcripts(_seen(text_run, Selection(steps=(1, 1)))))
    assert "\x1b" not in text
    assert r"\x1b[2J</script>" in text


def test_json_lines_are_json_and_hold_every_array(text_run, capsys):
    assert main(["rollouts", str(text_run.layout.root), "--json", "--verdict", "verifier_error"]) == 0
    printed = capsys.readouterr()
    assert printed.err.endswith("rlhpc: 1 rollout\n")
    (document,) = map(json.loads, printed.out.splitlines())
    assert document["reward"] is None
    assert document["token_ids"] == text_run.tokens("?<eos>").tolist()
    assert len(document["versions"]) == len(document["behaviour_logprobs"]) == 2
    assert as_document(_seen(text_run)[0])["staleness"] == 0


def test_a_run_is_read_on_a_machine_without_its_model(tmp_path, capsys):
    run = TextRun(tmp_path / "there")
    run.seal([run.group("3 + 4 =", [("7", 1.0), ("8", 0.0)], step=0)])
    here = tmp_path / "here"
    shutil.move(run.layout.root, here)
    shutil.move(run.model, tmp_path / "kept")
    assert main(["rollouts", str(here)]) == 0
    said = capsys.readouterr()
    assert f"completion │ {' '.join(map(str, run.tokens('7<eos>')))}" in said.out
    assert "model.path" in said.err
    assert "--tokenizer DIR" in said.err
    assert main(["rollouts", str(here), "--grep", "7"]) == EXIT_CONFIG
    assert "--tokenizer DIR" in capsys.readouterr().err
    assert main(["rollouts", str(here), "--grep", "3 . 4", "--tokenizer", str(tmp_path / "kept")]) == 0
    assert "completion │ 7<eos>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9-5"], "--step 9-5; legal:"),
        (["--step", "x"], "--step x; legal:"),
        (["--verdict", "right"], "--verdict right; legal: correct, wrong, verifier_error"),
        (["--grep", "("], "--grep '(' is not a Python regular expression"),
        (["--min-reward", "1", "--max-reward", "0"], "--min-reward 1 is above --max-reward 0"),
        (["--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(text_run, words, said, capsys):
    assert main(["rollouts", str(text_run.layout.root), *words]) == EXIT_CONFIG
    assert said in capsys.readouterr().err


def test_steps_beyond_the_run_are_answered_with_its_steps(tmp_path, capsys):
    run = TextRun(tmp_path / "text")
    run.seal([run.group("3 + 4 =", [("7", 1.0), ("8", 0.0)], step=0)])
    status = {"phase": "training", "step": 2, "unix_time_s": 0.0, "roles": []}
    run.layout.status.write_text(json.dumps(status))
    for words, said in ((["--step", "500"], ": --step 500; legal: 0 to 1\n"), (["--step", "1"], "is selected\n")):
        assert main(["rollouts", str(run.layout.root), *words]) == 0
        assert f"no rollout of this run is selected{said.removeprefix('is selected')}" in capsys.readouterr().err
    run.layout.status.write_text(json.dumps(status | {"step": 0}))
    assert main(["rollouts", str(run.layout.root), "--step", "7"]) == 0
    assert "is selected: no step is done yet" in capsys.readouterr().err


def test_a_run_that_samples_nothing_has_no_rollouts(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"run": {"stage": "sft"}}}))
    assert main(["rollouts", str(tmp_path)]) == EXIT_CONFIG
    assert "supervised fine-tuning, in which nothing is sampled" in capsys.readouterr().err


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunRollouts(RunLayout(tmp_path), tell=_pass_over)


def test_segments_of_other_steps_are_not_read_and_their_groups_not_shown_from_the_journal(tmp_path):
    run = AuditedRun(tmp_path / "run", 1)
    run.start()
    run.run()
    every = _seen(run)
    assert len(list(run.layout.rollouts.glob("segment_*"))) > 3
    for step in range(8):
        expected = [(seen.group_id, seen.sample_index) for seen in every if seen.step == step]
        shown = [(seen.group_id, seen.sample_index) for seen in _seen(run, Selection(steps=(step, step)))]
        assert shown == expected


@pytest.mark.starts
def test_a_terminal_gets_the_users_pager_and_a_pipe_plain_lines(text_run, tmp_path):
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {tmp_path}/paged\n")
    pager.chmod(0o700)
    words = [sys.executable, "-m", "launch.cli", "rollouts", str(text_run.layout.root), "--step", "1"]
    environment = {**os.environ, "PAGER": str(pager), "PYTHONPATH": str(ROOT)}
    plain = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert not (tmp_path / "paged").exists()
    ours, theirs = pty.openpty()
    try:
        subprocess.run(words, env=environment, stdout=theirs, check=True)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (tmp_path / "paged").read_text() == plain
    assert "9 - 2 =" in plain


@pytest.mark.starts
def test_a_pager_that_is_left_early_or_is_not_there_ends_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_paged((str(number) for number in range(100_000)), {"PAGER": "true", "PATH": os.environ["PATH"]})
    print_paged(iter(["a line"]), {"PAGER": str(tmp_path / "no-such-pager")})
    assert capsys.readouterr().out == "a line\n"


def test_a_damaged_segment_costs_its_groups_and_is_named(tmp_path):
    run = TextRun(tmp_path / "text")
    run.seal([run.group("3 + 4 =", [("7", 1.0), ("8", 0.0)], step=0)])
    run.seal([run.group("2 + 5 =", [("7", 1.0), ("8", 0.0)], step=1)])
    path = run.layout.segment(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said: list[str] = []
    seen = list(RunRollouts(run.layout, tell=said.append).each())
    assert [each.group_id for each in seen] == [1, 1]
    assert path.name in " ".join(said)


def test_rollouts_of_a_run_whose_own_estimator_raises_are_shown_without_advantages(tmp_path, monkeypatch):
    source = "def mine(rewards, lengths):\n    return rewards if len(rewards) == 3 else {}[0]\n"
    (tmp_path / "estimator_that_raises.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    run = TextRun(tmp_path / "text", "algorithm.advantage=estimator_that_raises:mine")
    run.seal([run.group("3 + 4 =", [("7", 1.0), ("8", 0.0)], step=0)])
    said: list[str] = []
    seen = list(RunRollouts(run.layout, tell=said.append).each())
    assert [each.advantages for each in seen] == [None, None]
    assert "estimator_that_raises:mine" in " ".join(said)


# ----------------------- Pages for a browser: small, alone, made quickly, and shown by a real browser as they are meant

NUM_ROLLOUTS = 20_000
MOST_BYTES = 5_000_000
MOST_S = 20.0  # of CPU: the clock of a machine that others use says nothing


@pytest.fixture(scope="module")
def text_run_pages(tmp_path_factory) -> TextRun:
    run = TextRun(tmp_path_factory.mktemp("pages") / "text")
    run.seal(
        [
            run.group("3 + 4 =", [("7", 1.0), ("eight", 0.0)], step=0),
            run.group("1 + 1 =", [("2", 1.0), ("2", 1.0)]),
            run.group("9 - 2 =", [("7", 1.0), ("</script><b>bold</b> é\x00\x1b &amp;", 0.0)], step=1),
        ]
    )
    return run


@pytest.fixture(scope="module")
def page(text_run_pages) -> Path:
    path = text_run_pages.layout.root.parent / "rollouts.html"
    assert main(["rollouts", str(text_run_pages.layout.root), "--html", str(path)]) == 0
    return path


def data_of(page: Path) -> dict[str, object]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match is not None
    document: dict[str, object] = json.loads(match[1])
    return document


def test_a_page_loads_nothing_and_holds_what_was_sampled_as_data(page):
    assert asks_the_network(page.read_text()) == []
    assert "default-src 'none'" in page.read_text()
    assert "<b>bold" not in page.read_text()
    full = data_of(page)
    pieces = full["pieces"]
    texts = ["".join(pieces[place] for place in each["t"]) for each in full["full"].values()]  # type: ignore[index, attr-defined]
    assert "</script><b>bold</b> é\x00\x1b &amp;<eos>" in texts


@pytest.mark.starts
@needs_browser
def test_a_browser_shows_every_rollout_and_the_tokens_of_one(page, tmp_path):
    document = dom_of(page, profile=tmp_path / "profile")
    rows = texts_in(document, "tr")
    assert len(rows) == 1 + 6
    assert texts_in(document, "said")[0].startswith("6 rollouts. Selected: 6, 6 of them with text.")
    assert texts_in(document, "completion") == ["7<eos>"]  # of the first that has an advantage


@pytest.mark.starts
@needs_browser
def test_filters_of_a_link_select_and_what_was_sampled_is_shown_as_text(page, tmp_path):
    document = dom_of(page, "#words=bold&colour=logprob", profile=tmp_path / "profile")
    assert texts_in(document, "said")[0].endswith("Selected: 1, 1 of them with text.")
    assert "</script><b>bold</b> é" in texts_in(document, "completion")[0]
    assert "background: rgba(190, 30, 90" in document  # the less likely, the redder


@pytest.mark.starts
@needs_browser
def test_tokens_are_coloured_by_what_is_asked_for(page, tmp_path):
    for colour, css in (("advantage", "rgba(31, 119, 180"), ("version", "rgba(120, 90, 180")):
        assert css in dom_of(page, f"#first=1&colour={colour}", profile=tmp_path / colour)
    assert picture_of(page, profile=tmp_path / "picture").stat().st_size > 20_000


@pytest.mark.long
def test_of_20_000_rollouts_a_page_has_an_index_of_all_and_as_many_texts_as_fit(tmp_path):
    run = TextRun(tmp_path / "large")
    words = np.random.default_rng(0)
    for segment in range(5):
        run.seal(
            run.group(
                f"{words.integers(1e6)} + {words.integers(1e6)} =",
                [(text(words), 1.0), (text(words), 0.0)],
                step=segment,
            )
            for _ in range(NUM_ROLLOUTS // 10)
        )
    before = resource.getrusage(resource.RUSAGE_SELF)
    rollouts = RunRollouts(run.layout, tell=lambda line: None)
    written = write_page(tmp_path / "page.html", rollouts, rollouts.each())
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert written.num_rollouts == NUM_ROLLOUTS
    assert 1000 < written.num_with_text < NUM_ROLLOUTS
    assert (tmp_path / "page.html").stat().st_size == written.num_bytes <= MOST_BYTES
    assert f"{written.num_with_text:,} are shown with their text" in (tmp_path / "page.html").read_text()
    steps = {int(row) * 5 // NUM_ROLLOUTS for row in data_of(tmp_path / "page.html")["full"]}  # type: ignore[attr-defined]
    assert steps == {0, 1, 2, 3, 4}  # drawn from the whole run
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_S


def text(words: np.random.Generator) -> str:
    return " ".join(str(number) for number in words.integers(0, 1000, 25))
