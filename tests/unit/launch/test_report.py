"""`rlhpc report`: what happened to a run, where its time went, and what that recommends, without a log file."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from launch.plan.script import plan_document
from launch.run_files.run_state import EventLog
from launch.view.charts import histogram, line_chart, nice_ticks, stacked_chart
from launch.view.events import MOST_STRETCHES, Happening, Spell, Story, advice_for, gpus_of, hours_of, read_story
from launch.view.report import MOST_COLUMNS, as_text, read_report, rows_of, thinned, timeline_chart, write_report
from launch.view.run import RunView
from rlhpc.base.ownership import SILENCE_S, Launcher
from rlhpc.buffer.lost_leases import LineFile
from rlhpc.metrics.curves import Curve
from rlhpc.metrics.tensorboard import Recorder
from rlhpc.protocol.errors import EXIT_CONFIG
from rlhpc.roles.controller.guarding import GuardEntry, GuardFile
from rlhpc.roles.controller.run_status import TimelineEntry
from tests.unit.launch.runs_kit import TextRun, launcher_elsewhere
from tests.unit.launch.site_kit import plan_of
from tests.unit.launch.web_kit import asks_the_network, dom_of, needs_browser, picture_of, texts_in

BEGAN_S = 1_790_000_000.0
FIGURES = {"pass@1": {"value": 0.5, "low": 0.4, "high": 0.6}}


class ToldRun(TextRun):
    """A run of 20 steps with a timeline of 100 s: a generator dies after 40 s and is back after 70."""

    def __init__(self, root: Path, scalars: Mapping[str, float] | None = None, *overrides: str) -> None:
        super().__init__(root, "run.name=told", "generation.num_replicas=2", *overrides)
        self.seal([self.group("3 + 4 =", [("7", 1.0), ("eight", 0.0)], step=step) for step in range(4)])
        entries = []
        for end in range(5, 101, 5):
            work: dict[str, dict[str, float]] = {
                "trainer-0": {"works": 0.5, "batch": 0.5},
                "generator-0": {"works": 1.0},
            }
            if not 45 <= end <= 70:
                work["generator-1"] = {"works": 0.8, "leases": 0.2}
            phase = "starting" if end <= 10 else "training"
            entries.append(TimelineEntry(BEGAN_S + end, 0, end // 5, phase, 5.0, work))
        entries += [
            TimelineEntry(BEGAN_S + 1, 0, 0, "starting", event="joined", name="generator-1", text="pid 5 on n1"),
            TimelineEntry(BEGAN_S + 46, 0, 9, "training", event="lost", name="generator-1", text="no sign of life"),
            TimelineEntry(BEGAN_S + 71, 0, 14, "training", event="joined", name="generator-1", text="pid 6 on n1"),
        ]
        assert LineFile(self.layout.timeline, TimelineEntry).append(entries)
        begun = {"index": 0, "resume_step": None, "unix_time_s": BEGAN_S}
        self.layout.attempts.write_text(json.dumps(begun) + "\n")
        path = self.layout.job_events("4711")
        EventLog(path, 0).say("restart", "generator-1 on n1 ended with signal SIGKILL: …; it is restarted")
        self._move_to(path, BEGAN_S + 41)
        GuardFile(self.layout.guard).append(GuardEntry(0, 12, 12, "warn", {}, [], "grad_norm 9", BEGAN_S + 98))
        self.write_scalars({"checkpoint/failed_total": 0.0} | dict(scalars or {}))

    def tell_at(self, job_id: int, events: Mapping[int, str]) -> None:
        """seconds of the timeline → event of a job's supervisor."""
        with self.layout.job_events(str(job_id)).open("a") as file:
            for second, event in events.items():
                file.write(
                    json.dumps({"unix_time_s": BEGAN_S + second, "event": event, "text": "complete: all"}) + "\n"
                )

    def write_scalars(self, scalars: Mapping[str, float], num_steps: int = 20) -> None:
        clock = iter(BEGAN_S + 10 + 4.5 * np.arange(10_000))
        recorder = Recorder(self.layout.tensorboard, wall_clock=lambda: float(next(clock)))
        for step in range(num_steps):
            failed = {"checkpoint/failed_total": float(step >= 15)}
            base = {"reward/mean": step / 20, "time/step_s": 4.0, "trainer/step_s": 3.0, "time/wait_for_batch_s": 0.5}
            recorder.step(step, base | dict(scalars) | failed)
        recorder.close()

    @staticmethod
    def _move_to(path: Path, unix_time_s: float) -> None:
        line = json.loads(path.read_text())
        path.write_text(json.dumps(line | {"unix_time_s": unix_time_s}) + "\n")


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> ToldRun:
    return ToldRun(tmp_path_factory.mktemp("report") / "told")


def test_the_story_of_a_killed_generator_is_whole_and_in_order(told):
    report = read_report(RunView(told.layout))
    texts = [each.text for _, each in report.marks]
    expected = (
        "attempt 0 begins",
        "pid 5",
        "SIGKILL",
        "is lost: no sign of life",
        "pid 6",
        "could not be written",
        "warn: grad",
    )
    assert len(texts) == len(expected)
    assert all(words in text for words, text in zip(expected, texts, strict=True)), texts
    assert [each.kind for each in report.story.faults] == ["restart", "lost", "checkpoint"]  # a warning is none


@pytest.mark.parametrize(("action", "is_fault"), [("warn", False), ("tighten", True), ("skip", True), ("stop", True)])
def test_of_the_guard_what_it_did_is_a_fault_and_what_it_only_said_is_none(tmp_path, action, is_fault):
    run = TextRun(tmp_path / "guarded")
    GuardFile(run.layout.guard).append(GuardEntry(0, 12, 12, action, {}, [], "grad_norm 9", BEGAN_S))
    assert bool(read_story(RunView(run.layout)).faults) == is_fault


def test_a_run_that_its_user_has_ended_has_no_fault(tmp_path):
    run = TextRun(tmp_path / "ended")
    for job, verdict in (("4712", "stop: asked for by `rlhpc stop`"), ("4713", "abort: by `rlhpc stop --now`")):
        EventLog(run.layout.job_events(job), 0).say("verdict", verdict)
    assert read_story(RunView(run.layout)).faults == []


def begins_here(run: TextRun, index: int) -> EventLog:
    """An attempt that `rlhpc run` begins; returns the log of its supervisor."""
    log = EventLog(run.layout.job_events("local"), 0)
    log.attempt = index
    with run.layout.attempts.open("a") as file:
        file.write(json.dumps({"index": index, "resume_step": None, "unix_time_s": time.time()}) + "\n")
    log.say("attempt", f"attempt {index} begins from the beginning")
    return log


@pytest.mark.starts
def test_an_attempt_whose_launcher_was_killed_is_a_fault_once_that_is_certain(tmp_path):
    run = TextRun(tmp_path / "killed")
    begins_here(run, 0)
    Launcher.register(run.layout)
    assert read_story(RunView(run.layout)).faults == []
    child = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    run.layout.launcher.write_text(
        json.dumps(json.loads(run.layout.launcher.read_bytes()) | {"pid": int(child.stdout)})
    )
    assert [each.text for each in read_story(RunView(run.layout)).faults] == [
        "attempt 0 ended without a word: its launcher was killed, or the machine went down"
    ]
    begins_here(run, 1).say("attempt_end", "attempt 1, step 3 trained, step 3 saved: complete")
    story = read_story(RunView(run.layout))
    assert [each.attempt for each in story.faults] == [0]
    assert [each.kind for each in story.happenings] == ["attempt", "killed", "attempt", "attempt_end"]


def test_a_killed_run_ended_at_its_last_status_whatever_became_of_its_launchers_file(tmp_path):
    """A resume that is refused removes that file."""
    run = TextRun(tmp_path / "killed")
    begins_here(run, 0)
    end_s = time.time() + 90
    run.layout.status.write_text(json.dumps({"phase": "training", "step": 7, "roles": [], "unix_time_s": end_s}))
    story = read_story(RunView(run.layout))
    assert [each.unix_time_s for each in story.happenings if each.kind == "killed"] == [end_s]
    run.layout.job_events("local").unlink()
    assert read_story(RunView(run.layout)).end_s == end_s


@pytest.mark.parametrize("word", ["retry", "verdict"])
def test_an_attempt_whose_processes_could_not_be_started_has_said_so(tmp_path, word):
    """It ends without an end of its own: what follows is the launcher's word."""
    run = TextRun(tmp_path / "told")
    why = "a process could not be started: Resource temporarily unavailable"
    log = begins_here(run, 0)
    log.say("kill", why)
    log.say(word, why)
    assert [each.kind for each in read_story(RunView(run.layout)).faults if each.kind == "killed"] == []


def test_a_launcher_on_another_machine_is_taken_for_killed_once_it_is_silent(tmp_path):
    run = TextRun(tmp_path / "elsewhere")
    begins_here(run, 0)
    launcher_elsewhere(run.layout)
    assert read_story(RunView(run.layout)).faults == []
    heartbeat_s = time.time() - 2 * SILENCE_S
    os.utime(run.layout.launcher, (heartbeat_s, heartbeat_s))
    assert [each.kind for each in read_story(RunView(run.layout)).faults] == ["killed"]


def test_of_last_words_that_fill_a_page_the_beginning_and_what_follows_are_shown():
    text = f"trainer-0 ended with signal SIGKILL: Optimizer({'lr=0.0, ' * 500}); another attempt in 2 s"
    brief = Happening(0.0, "run", "retry", text).brief
    assert len(brief) <= 250
    assert brief.startswith("trainer-0 ended with signal SIGKILL: Optimizer(lr=0.0")
    assert brief.endswith("; another attempt in 2 s")
    assert Happening(0.0, "run", "retry", "short\nlines").brief == "short lines"


def test_of_a_preempted_job_the_end_is_a_fault_and_the_way_on_is_told(tmp_path):
    run = ToldRun(tmp_path / "told")
    log = EventLog(run.layout.job_events("4712"), 0)
    log.say("verdict", "signal: Slurm ended this job (scancel, preemption, node failure)")
    EventLog(run.layout.job_events("4713"), 0).say("verdict", "time: this job is close to its time limit")
    with run.layout.attempts.open("a") as file:
        file.write(json.dumps({"index": 1, "resume_step": 10, "unix_time_s": BEGAN_S + 2e9}) + "\n")
    story = read_story(RunView(run.layout))
    assert [each.who for each in story.faults if each.kind == "verdict"] == ["job 4712"]
    assert story.happenings[-1].text == "attempt 1 begins from the checkpoint of step 10"


def test_the_timeline_has_a_row_for_each_process_and_none_where_it_was_not_there(told):
    story = read_story(RunView(told.layout))
    rows = rows_of(story)
    assert list(rows) == ["trainer-0", "generator-0", "generator-1"]
    ends = {round(spell.end_s - BEGAN_S) for spell in rows["generator-1"]}
    assert ends == {*range(5, 45, 5), *range(75, 101, 5)}


def test_of_many_processes_a_row_shows_the_mean_and_the_unlucky_have_their_own():
    spells = [
        Spell(f"generator-{i}", 0.0, 5.0, {"works": float(i % 2), "leases": 1.0 - i % 2}, "training")
        for i in range(4096)
    ]
    story = Story([Happening(3.0, "generator-77", "lost", "gone")], spells, 0.0, 5.0)
    rows = rows_of(story)
    assert list(rows) == ["4096 generators, mean", "generator-77"]
    assert rows["4096 generators, mean"][0].shares == pytest.approx({"works": 0.5, "leases": 0.5})
    assert len(timeline_chart(story, [])) < 10_000


def test_a_process_that_was_there_for_a_part_does_not_end_the_phase():
    always = [Spell("trainer-0", begin_s, begin_s + 100.0, {"works": 1.0}, "training") for begin_s in (0.0, 100.0)]
    page = [
        re.findall(r'<rect x="[\d.]+" y="20" width="[\d.]+"', timeline_chart(Story([], spells, 0.0, 200.0), []))
        for spells in (always, [*always, Spell("generator-0", 150.0, 160.0, {"works": 1.0}, "training")])
    ]
    assert page[0] == page[1] != []


def test_a_long_timeline_is_drawn_by_means_that_keep_every_second():
    spells = [Spell("trainer-0", 5.0 * i, 5.0 * i + 5, {"works": i % 3 / 2}, "training") for i in range(3000)]
    thin = thinned(spells)
    assert len(thin) <= MOST_COLUMNS
    worked = [sum(s.shares.get("works", 0) * (s.end_s - s.begin_s) for s in each) for each in (spells, thin)]
    assert worked[0] == pytest.approx(worked[1])


def test_a_time_in_which_a_process_was_not_there_stays_empty_however_long_the_timeline():
    there = [i for i in range(3000) if not 900 <= i < 1400]
    spells = [Spell("generator-0", 5.0 * i, 5.0 * i + 5, {"works": 1.0}, "training") for i in there]
    bars = thinned(spells, 100)
    assert len(bars) <= 102
    assert not [bar for bar in bars if bar.begin_s < 5.0 * 1399 and bar.end_s > 5.0 * 901]


def test_hours_by_use_add_up_to_the_time_that_processes_were_there(told):
    hours = hours_of(RunView(told.layout), read_story(RunView(told.layout)))
    assert hours.unit == "process-hours"
    assert hours.total * 3600 == pytest.approx(100 + 100 + 70)
    assert hours.by_use["training"] * 3600 == pytest.approx(90 * 0.5)
    assert hours.by_use["generating"] * 3600 == pytest.approx(90 + 60 * 0.8)
    assert hours.by_use["starting: engines and trainer load"] * 3600 == pytest.approx(30)


def test_with_gpus_hours_are_theirs_and_lost_tokens_are_set_apart(tmp_path):
    run = ToldRun(tmp_path / "told", {"tokens/generated_total": 900.0, "generator/tokens_lost_total": 100.0})
    parts = [
        {"roles": [{"role": "trainer", "num_processes": 1}], "gpus_per_task": 1, "nodes": 1, "tasks_per_node": 1},
        {"roles": [{"role": "generator", "num_processes": 2}], "gpus_per_task": 4, "nodes": 2, "tasks_per_node": 1},
    ]
    plan = run.layout.job_plan
    plan.write_text(json.dumps({"jobs": [{"name": "hetjob", "components": parts}]}))
    record = {"job_id": 4711, "name": "hetjob", "plan": str(plan), "submitted_unix_s": BEGAN_S - 5}
    run.layout.job_record(4711).write_text(json.dumps(record))
    EventLog(run.layout.job_events("4711"), 0).say("verdict", "complete")
    hours = hours_of(RunView(run.layout), read_story(RunView(run.layout)))
    assert hours.unit == "GPU-hours"
    assert hours.total * 3600 == pytest.approx(100 + 4 * (100 + 70))
    lost = hours.by_use["generating what was lost with generators"]
    assert lost / (lost + hours.by_use["generating"]) == pytest.approx(0.1)
    assert [*hours.by_job] == ["4711 (hetjob, 9 GPUs)"]


def test_the_hours_of_a_large_run_are_numbers_that_people_read(tmp_path):
    run = ToldRun(tmp_path / "told")
    parts = [{"roles": [{"role": role}], "gpus_per_task": 360_000} for role in ("trainer", "generator")]
    run.layout.job_plan.write_text(json.dumps({"jobs": [{"name": "hetjob", "components": parts}]}))
    report = read_report(RunView(run.layout))
    assert "     4,500  training" in as_text(report)
    write_report(tmp_path / "page.html", report)
    assert "<td>4,500</td>" in (tmp_path / "page.html").read_text()


def test_gpus_are_those_of_the_plan_by_which_the_run_was_last_started(tmp_path):
    """A run begun on a machine without GPUs and then submitted had process-hours for ever."""
    layout = ToldRun(tmp_path / "told", {}).layout
    for when, (plan, gpus) in enumerate(((layout.local_plan, 0), (layout.job_plan, 4), (layout.local_plan, 1))):
        roles = [{"role": role, "num_processes": 1} for role in ("trainer", "generator")]
        plan.write_text(json.dumps({"jobs": [{"components": [{"roles": roles, "gpus_per_task": gpus}]}]}))
        os.utime(plan, (when, when))
        assert gpus_of(RunView(layout)) == {"trainer": gpus, "generator": gpus}


def test_the_hours_of_a_job_are_those_of_its_lives_without_the_queue_between_and_those_of_a_living_job_go_on(tmp_path):
    run = ToldRun(tmp_path / "told")
    run.layout.job_plan.write_text(plan_document(plan_of()))
    for job_id in (4712, 4713):
        record = {"job_id": job_id, "name": "hetjob", "plan": str(run.layout.job_plan), "submitted_unix_s": BEGAN_S}
        run.layout.job_record(job_id).write_text(json.dumps(record))
    run.tell_at(4712, {0: "life", 5: "start", 20: "verdict", 21: "requeue", 61: "life", 65: "start", 81: "verdict"})
    run.tell_at(4713, {82: "life", 83: "start"})  # at work until now
    hours = hours_of(RunView(run.layout), read_story(RunView(run.layout)))
    of_jobs = {label.partition(" ")[0]: (label, each) for label, each in hours.by_job.items()}
    gpus = int(of_jobs["4712"][0].rpartition(", ")[2].split()[0])
    assert gpus > 0
    assert of_jobs["4712"][1] * 3600 == pytest.approx(gpus * (21 + 20))
    assert of_jobs["4713"][1] * 3600 == pytest.approx(gpus * (100 - 82))


def test_a_job_that_was_killed_without_a_word_is_at_work_until_another_does_its_work(tmp_path):
    """As on a node that went down."""
    run = ToldRun(tmp_path / "told")
    run.layout.job_plan.write_text(plan_document(plan_of()))
    for job_id in (4712, 4713):
        record = {"job_id": job_id, "name": "hetjob", "plan": str(run.layout.job_plan), "submitted_unix_s": BEGAN_S}
        run.layout.job_record(job_id).write_text(json.dumps(record))
    run.tell_at(4712, {0: "life", 5: "restart"})
    run.tell_at(4713, {32: "life"})
    hours = hours_of(RunView(run.layout), read_story(RunView(run.layout)))
    gpus = int(next(iter(hours.by_job)).rpartition(", ")[2].split()[0])
    seconds = [each * 3600 / gpus for _, each in sorted(hours.by_job.items())]
    assert seconds == pytest.approx([32, 68])


@pytest.mark.parametrize(
    ("scalars", "said"),
    [
        (
            {"generator/idle_ratio": 0.5, "trainer/idle_ratio": 0.02, "generator/live": 4.0},
            "Generators idle 50%.*3 instead of 4",
        ),
        (
            {"trainer/idle_ratio": 0.5, "generator/live": 2.0},
            "Trainer idle 50%.*4 generators instead of 2.*generation.num_replicas=4",
        ),
        ({"trainer/idle_ratio": 0.5, "generator/live": 1.0}, "of 2 generators 1.0 were alive"),
        (
            {"trainer/idle_ratio": 0.4, "generator/idle_ratio": 0.4, "generator/live": 2.0, "staleness/bound": 1.0},
            "max_staleness=1 .*try 2",
        ),
        ({"reward/zero_variance_share": 0.6, "group/all_correct_share": 0.5}, "60% of finished groups.*too easy"),
        ({"length/truncated_share": 0.3, "length/completion_max": 512.0}, "30% of completions are cut off at 512"),
        ({"packing/fill": 0.4, "packing/num_microbatches": 1.0}, "Micro-batches are 40% full"),
        ({"reward/verifier_error_share": 0.05}, "5.0% of verdicts are verifier errors"),
        ({"policy/ess": 0.1}, "effective sample size is 10%"),
    ],
)
def test_recommendations_have_numbers_and_follow_from_the_figures(tmp_path, scalars, said):
    run = ToldRun(tmp_path / "told", scalars)
    advice = advice_for(RunView(run.layout))
    assert len([each for each in advice if re.search(said, each)]) == 1, advice


def test_preemptions_before_a_generator_was_started_again_count(tmp_path):
    figures = RunView(ToldRun(tmp_path / "told").layout)
    steps = np.arange(20)
    counted = np.where(steps < 10, 5.0 * steps, 0.0)  # 45, and none since the generator died
    figures.curves["generator/preemptions"] = Curve(steps, counted, BEGAN_S + 1.0 * steps)
    assert [each for each in advice_for(figures) if each.startswith("Engines have preempted 45 rollouts")]


@pytest.mark.parametrize(
    ("overrides", "parts", "is_advised"),
    [
        ([], 1.0, True),
        ([], 3.2, False),
        (["admission.step_parts=2"], 1.0, False),
        (["algorithm.aggregation=sequence"], 1.0, False),
        (["admission.groups_per_step=3"], 1.0, False),
    ],
)
def test_steps_in_parts_are_advised_to_runs_that_can_have_them(tmp_path, overrides, parts, is_advised):
    scalars = {"trainer/idle_ratio": 0.4, "generator/idle_ratio": 0.4, "generator/live": 2.0, "staleness/bound": 1.0}
    scalars["trainer/step_parts"] = parts
    run = ToldRun(tmp_path / "told", scalars, "admission.groups_per_step=4", *overrides)
    (advice,) = [each for each in advice_for(RunView(run.layout)) if "wait for each other" in each]
    assert ("admission.step_parts=4 at the same bound" in advice) == is_advised


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (
            {"num_cores": 2, "uses_gpus": False},
            "4 busy processes have this machine's 2 cores: more generators",
        ),
        ({"num_cores": 64, "num_gpus_left": 0, "uses_gpus": True}, "this machine has no GPU left: more generators"),
        ({"num_cores": 64, "num_gpus_left": 1, "uses_gpus": True}, "this machine has 1 GPU left: more generators"),
        ({"num_cores": 64, "num_gpus_left": 2, "uses_gpus": True}, "4 generators instead of 2"),
        ({"num_cores": 64, "uses_gpus": False}, "4 generators instead of 2"),
    ],
)
def test_generators_are_recommended_where_the_machine_has_room_for_them(tmp_path, machine, said):
    """On two cores "2 generators instead of 1 would feed it" was slower."""
    run = ToldRun(tmp_path / "told", {"trainer/idle_ratio": 0.5, "generator/live": 2.0})
    run.layout.local_plan.write_text(json.dumps({"machine": machine}))
    advice = advice_for(RunView(run.layout))
    assert [each for each in advice if said in each], advice


def test_a_trainer_that_others_wait_for_is_promised_no_gpus_of_a_machine_without(tmp_path):
    run = ToldRun(tmp_path / "told", {"generator/idle_ratio": 0.5, "trainer/idle_ratio": 0.02, "generator/live": 2.0})
    run.layout.local_plan.write_text(json.dumps({"machine": {"num_cores": 2, "uses_gpus": False}}))
    assert [each for each in advice_for(RunView(run.layout)) if each.endswith("Generators: fewer would not do.")]


def test_a_chart_of_zeros_has_an_axis_that_a_reader_expects():
    chart = line_chart("Clipped", np.arange(5), {"policy/clip_low_share": np.zeros(5)})
    labels = [float(label) for label in re.findall(r">([-+.0-9e]+)</text>", chart)]
    assert all(label == 0 or abs(label) >= 0.1 for label in labels), labels


def test_more_generators_are_added_to_a_run_that_is_submitted(tmp_path):
    run = ToldRun(tmp_path / "told", {"trainer/idle_ratio": 0.5, "generator/live": 2.0})
    run.layout.job_plan.write_text("{}")
    assert [each for each in advice_for(RunView(run.layout)) if "`rlhpc scale RUN_DIR --generators +2`" in each]


def test_where_nobody_idles_nothing_is_recommended_and_of_few_steps_nothing_is_said(told, tmp_path):
    assert advice_for(RunView(told.layout)) == []
    young = TextRun(tmp_path / "young")
    assert "Too early" in advice_for(RunView(young.layout))[0]


def test_faults_for_which_there_is_no_room_are_counted_and_not_said_to_go_without_saying(tmp_path):
    run = ToldRun(tmp_path / "told")
    run.tell_at(4711, dict.fromkeys(range(1, 100), "restart"))
    report = read_report(RunView(run.layout))
    num_faults = len(report.story.faults)
    assert num_faults > len(report.marks) == 60
    write_report(tmp_path / "page.html", report)
    page = (tmp_path / "page.html").read_text()
    assert f"{num_faults - 60} earlier faults" in page
    assert f"({num_faults - 25} earlier faults" in "\n".join(as_text(report))


def test_one_step_without_a_reward_does_not_hide_those_of_all_others(tmp_path):
    run = TextRun(tmp_path / "gap")
    recorder = Recorder(run.layout.tensorboard)
    for step in range(30):
        recorder.step(step, {"reward/mean": math.nan if step in (1, 29) else step / 20})
    recorder.close()
    assert "reward    0.050 → 1.375, first and last tenth" in as_text(read_report(RunView(run.layout)))


def test_the_terminal_gets_the_short_form(told, capsys):
    assert main(["report", str(told.layout.root)]) == 0
    out = capsys.readouterr().out
    for words in ("run       told", "steps     20 of 120", "SIGKILL", "process-hours", "Recommendations"):
        assert words in out
    assert main(["report", str(told.layout.root.parent)]) == EXIT_CONFIG


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("timeline.jsonl", {"unix_time_s": None}),
        ("timeline.jsonl", {"unix_time_s": 1e300}),
        ("timeline.jsonl", {"seconds": 1e300}),
        ("timeline.jsonl", {"attempt": "x"}),
        ("timeline.jsonl", {"phase": 3}),
        ("timeline.jsonl", {"work": []}),
        ("timeline.jsonl", {"work": {"trainer-0": None}}),
        ("timeline.jsonl", {"work": {"trainer-0": {"works": "x"}}}),
        ("guard.jsonl", {"unix_time_s": [], "attempt": 0}),
        ("guard.jsonl", {"unix_time_s": math.nan}),
        ("guard.jsonl", {"attempt": {}}),
        ("attempts.jsonl", {"unix_time_s": 1e300}),
        ("jobs/4711.events.jsonl", {"unix_time_s": 1e300}),
    ],
)
def test_a_line_of_another_form_costs_that_line_and_not_the_report(file, changes, tmp_path):
    run = ToldRun(tmp_path / "told")
    write_report(tmp_path / "before.html", read_report(RunView(run.layout)))
    path = run.layout.root / file
    line = json.loads(path.read_text().splitlines()[0])
    path.write_text(path.read_text() + json.dumps(line | changes) + "\n")
    write_report(tmp_path / "after.html", read_report(RunView(run.layout)))
    assert (tmp_path / "after.html").read_text() == (tmp_path / "before.html").read_text()


def test_plans_and_evaluations_of_another_form_count_as_absent(tmp_path):
    run = ToldRun(tmp_path / "told")
    run.layout.job_plan.write_text(json.dumps({"jobs": [{"name": "hetjob", "components": [{"roles": ["x"]}]}]}))
    assert gpus_of(RunView(run.layout)) == {"trainer": 0, "generator": 0}
    place = run.layout.evaluations / "told-step_000004-held_out"
    place.mkdir(parents=True)
    figures = {"pass@1": {"value": "x", "low": 0.1, "high": 0.2}, "reward": {"value": 0.5, "low": 0.4, "high": 0.6}}
    (place / "summary.json").write_text(json.dumps({"figures": figures, "attempt": "x"}))
    assert RunView(run.layout).evaluations == {}
    (place / "summary.json").write_text(json.dumps({"figures": figures, "attempt": 0}))
    assert [*RunView(run.layout).evaluations["held_out"][4]] == ["reward"]


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    run = TextRun(tmp_path / "new")
    assert write_report(tmp_path / "page.html", read_report(RunView(run.layout))) > 1000
    assert "Nothing is recorded" in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def page(told) -> Path:
    path = told.layout.root.parent / "report.html"
    place = told.layout.evaluations / "told-step_000010-held_out"
    place.mkdir(parents=True)
    (place / "summary.json").write_text(json.dumps({"figures": FIGURES, "attempt": 0}))
    write_report(path, read_report(RunView(told.layout)))
    return path


def test_the_page_asks_nobody_and_runs_nothing(page):
    assert asks_the_network(page.read_text()) == []
    assert "<script" not in page.read_text()
    assert page.stat().st_size < 1_000_000


@pytest.mark.starts
@needs_browser
def test_a_browser_shows_every_part_of_the_report(page, tmp_path):
    document = dom_of(page, profile=tmp_path / "profile")
    heads = texts_in(document, "h2")
    assert heads[:4] == [
        "Recommendations",
        "Who worked, and who waited for whom",
        "What happened",
        "Where the time of a step went",
    ]
    assert {"Curves", "Distributions", "process-hours", "Evaluations", "Settings"} <= {*heads}
    assert len(texts_in(document, "fault")) >= 4  # rows, and marks in the chart
    assert "pass@1" in document
    assert len(texts_in(document, "chart")) >= 5
    assert picture_of(page, profile=tmp_path / "picture", size=(1400, 2400)).stat().st_size > 50_000


def test_long_curves_are_thinned_and_gaps_stay_gaps():
    steps, values = np.arange(20_000), np.sin(np.arange(20_000) / 500)
    values[5_000:9_000] = np.nan
    chart = line_chart("A curve", steps, {"one": values})
    assert len(chart) < 15_000
    assert chart.count("<polyline") == 2
    assert "means of stretches" in chart
    assert "nan" not in chart + histogram("No numbers", {}, x_label="x") + stacked_chart(
        "None", np.zeros(0, np.int64), {}
    )


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (-3, 5), (0.001, 0.0012), (1e6, 3e9), (7, 7)])
def test_ticks_are_round_enclose_the_values_and_are_few(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9 * abs(high)
    assert 2 <= len(ticks) <= 8


def test_a_long_timeline_is_told_in_stretches_and_its_hours_are_the_same(tmp_path):
    run = TextRun(tmp_path / "run", "run.name=long", "generation.num_replicas=2")
    number, away = 10 * MOST_STRETCHES, range(4500, 4600)
    ends = [BEGAN_S + 7 * (place + 1) for place in range(number)]
    work = [{"trainer-0": {"works": place % 4 / 4, "batch": 1 - place % 4 / 4}} for place in range(number)]
    entries = [TimelineEntry(BEGAN_S, 0, 0, "starting", event="joined", name="trainer-0", text="pid 5 on n1")]
    for place, (end_s, shares) in enumerate(zip(ends, work, strict=True)):
        there = {} if place in away else {"generator-0": {"works": 1.0}}
        phase = "starting" if place < 13 else "training"
        entries.append(TimelineEntry(end_s, 0, place, phase, 7.0, shares | there))
    assert LineFile(run.layout.timeline, TimelineEntry).append(entries)

    story = read_story(RunView(run.layout))
    rows = rows_of(story)
    assert all(len(spells) <= MOST_STRETCHES + 5 for spells in rows.values())
    assert (story.begin_s, story.end_s) == (BEGAN_S, ends[-1])
    assert [each.kind for each in story.happenings] == ["joined"]
    assert sum(each.shares["works"] * (each.end_s - each.begin_s) for each in rows["trainer-0"]) == pytest.approx(
        sum(7 * each["trainer-0"]["works"] for each in work)
    )
    for spells in rows.values():
        assert spells[0].phase == "starting"
        assert (spells[0].begin_s, spells[-1].end_s) == (BEGAN_S, ends[-1])
        assert [each.end_s for each in spells if each.phase == "starting"][-1] == ends[12]
    seams = [(a.end_s, b.begin_s) for a, b in pairwise(rows["generator-0"]) if b.begin_s - a.end_s > 1]
    assert seams == [(ends[4499], ends[4599])]


def test_rollouts_in_segments_are_counted_by_what_a_report_shows(tmp_path):
    run = TextRun(tmp_path / "run", "run.name=counted", "generation.num_replicas=2")
    trained = [run.group("3 + 4 =", [("7", 1.0), ("eight", 0.0)], step=step) for step in range(4)]
    dropped = [run.group("3 + 4 =", [("7", 1.0), ("7", 1.0)])]
    run.seal(trained[:1] + dropped)
    run.seal(trained[1:])
    sampled = RunView(run.layout).sampled
    lengths = Counter(len(member.rollout.token_ids) for each in trained for member in each.group.members)
    assert sampled.lengths_trained == lengths
    assert sampled.lengths_dropped == {len(dropped[0].group.members[0].rollout.token_ids): 2}
    assert sampled.staleness == Counter(
        each.trained_version - each.group.admitted_version for each in trained for _ in each.group.members
    )
    assert (sampled.dropped, sampled.num_groups, sampled.num_rollouts) == ({"zero_variance": 1}, 5, 10)


def test_a_histogram_counts_stretches_of_values():
    chart = histogram("Lengths", {0: 3, 1: 4, 79: 5}, x_label="tokens")
    assert re.findall(r"<title>([^<]*)</title>", chart)[::39] == ["0 to 1: 7", "78 to 79: 5"]
