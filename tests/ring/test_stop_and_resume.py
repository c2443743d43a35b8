"""A run that is ended from outside, and what the next start makes of its directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.training.checkpoint_directory import latest_complete
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, command_environment, rlhpc, run_to_the_end, summary_of, within

pytestmark = pytest.mark.ring
GROUPS, GROUP_SIZE = 4, 4
SLOW = {"task": "tests.ring.ring_rewards:slow_parity"}
ENDLESS = {"num_steps": 100_000}
CTRL_C_LIMIT_S = 10.0


def test_ctrl_c_ends_everything_within_ten_seconds_and_a_resume_goes_on_to_the_last_step(lab: Lab) -> None:
    run_file, layout = lab.run_file("interrupted", run=ENDLESS, data=SLOW), lab.layout("interrupted")
    with Run(run_file, layout) as run:
        run.wait_until(lambda status: status["step"] >= 7 and latest_complete(layout.checkpoints) is not None)
        with within(CTRL_C_LIMIT_S, "Ctrl-C"):
            run.interrupt()
            status = run.finish()
        run.assert_nothing_is_left()
        assert status in (0, 130), run.story()

    refused = rlhpc("run", str(run_file))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert str(layout.root) in refused.stderr
    assert "--resume" in refused.stderr
    assert "--fresh" in refused.stderr
    assert len(layout.attempts.read_text().splitlines()) == 1

    saved = _saved_step(layout)
    assert saved >= 4
    num_steps = saved + 5
    with Run(run_file, layout, "--resume", f"run.num_steps={num_steps}") as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        assert "resumed with run.num_steps" in run.output
    assert_full_batches_trained_once(layout.rollouts, num_steps, GROUPS, GROUP_SIZE)
    summary = summary_of(layout)
    assert summary["steps"] == num_steps
    assert summary["rollouts_trained"] == num_steps * GROUPS * GROUP_SIZE
    attempts = [json.loads(line) for line in layout.attempts.read_text().splitlines()]
    assert [attempt["resume_step"] for attempt in attempts] == [None, saved]


def test_a_resume_of_a_complete_run_leaves_its_figures_in_the_status(lab: Lab) -> None:
    layout = run_to_the_end(lab, "over", run={"num_steps": 2})
    before = json.loads(layout.status.read_bytes())
    with Run(lab.root / "over.toml", layout, "--resume") as run:
        assert run.finish() == 0, run.story()
    after = json.loads(layout.status.read_bytes())
    assert (after["attempt"], after["phase"]) == (1, "complete")
    assert after["reward"] == before["reward"]
    assert after["staleness_max"] == before["staleness_max"]
    assert after["trainer_tokens_per_s"] > 0
    assert after["generator_tokens_per_s"] > 0


def test_ctrl_c_while_processes_are_being_started_ends_them_too(lab: Lab) -> None:
    with Run(lab.run_file("early", run=ENDLESS), lab.layout("early")) as run:
        run.wait_for_file(run.layout.log("controller", 0, 0))  # the first of four
        with within(CTRL_C_LIMIT_S, "Ctrl-C"):
            run.interrupt()
            assert run.finish() in (0, 130), run.story()
        run.assert_nothing_is_left()


def test_a_stop_while_the_trainer_loads_ends_everything_at_once(lab: Lab) -> None:
    """It had registered, and waited for the channel of a controller that had gone: for 46 s."""
    with Run(lab.run_file("begun", run=ENDLESS), lab.layout("begun")) as run:
        run.wait_until(lambda status: "trainer-0" in {role["name"] for role in status["roles"]})
        with within(CTRL_C_LIMIT_S, "a stop"):
            run.interrupt(signal.SIGTERM)
            assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert "killed" not in run.output


# Sends the command a signal when Python is about to do something: an event of audit hooks, a word of its arguments.
STOPS_AT = """
import atexit, os, sys
event, word = os.environ["STOPS_AT"].split()
number = int(os.environ["STOPS_BY"])

def look(name, arguments):
    global number
    if number and name == event and word in str(arguments[:2]):  # a process has it in its environment, too
        by, number = number, 0
        os.kill(os.getpid(), by)

if "launch.cli" in sys.orig_argv and "run" in sys.orig_argv:
    sys.addaudithook(look)
    if event == "exit":
        atexit.register(os.kill, os.getpid(), number)
"""
BEFORE_ANYTHING = ("import launch.checks.bias", "open train.jsonl", "os.rename launcher.json", "os.rename config.json")
IN_THE_START = ("os.rename inputs.json", "open attempts.jsonl", "os.rename local_plan.json", "os.mkdir secrets")
IN_A_RESUME = ("os.rename owner.json", "open attempts.jsonl", "subprocess.Popen 'controller'")
EVERYWHERE = [*BEFORE_ANYTHING, *IN_THE_START, *IN_A_RESUME]


@pytest.mark.parametrize(
    ("number", "made"),
    [
        (signal.SIGTERM, [BEFORE_ANYTHING[1], BEFORE_ANYTHING[3], IN_THE_START[0], *IN_A_RESUME[1:]]),
        pytest.param(signal.SIGTERM, EVERYWHERE, marks=[pytest.mark.long, pytest.mark.soak]),
        pytest.param(signal.SIGINT, EVERYWHERE, marks=pytest.mark.long),
    ],
)
def test_a_stop_at_any_point_of_a_start_is_a_stop_or_leaves_nothing(
    lab: Lab, number: signal.Signals, made: list[str]
) -> None:
    """SIGTERM left half a directory, which no start took, or ended the command with 130 though nothing was lost."""
    name = f"points-{int(number)}-{len(made)}"
    run_file, layout = lab.run_file(name, run={"num_steps": 2}), lab.layout(name)
    (lab.root / "sitecustomize.py").write_text(STOPS_AT)
    path = f"{lab.root}{os.pathsep}{command_environment()['PYTHONPATH']}"
    for point in made:
        resume = ["--resume"] if layout.config.exists() else []
        environment = {"PYTHONPATH": path, "STOPS_AT": point, "STOPS_BY": str(int(number))}
        with Run(run_file, layout, *resume, environment=environment) as run:
            status = run.finish()
            run.assert_nothing_is_left()
        assert "Traceback" not in run.output, run.story()
        if point in BEFORE_ANYTHING:
            assert status in (-number, 128 + number), (point, run.story())
            assert not layout.root.exists(), point
        else:
            assert status == 0, (point, run.story())
            assert "stopped before the first step" in run.output, point
            assert "stopped" in rlhpc("status", str(layout.root)).stdout, point
    environment = {"PYTHONPATH": path, "STOPS_AT": "exit python", "STOPS_BY": str(int(number))}
    with Run(run_file, layout, "--resume", environment=environment) as run:
        assert run.finish() == 0, run.story()  # -15: a complete run was told by a signal that came as Python ended
    assert_full_batches_trained_once(layout.rollouts, 2, GROUPS, GROUP_SIZE)


@pytest.mark.vllm
@pytest.mark.long
def test_ctrl_c_ends_engines_while_they_load_and_while_they_sample(lab: Lab) -> None:
    run_file = lab.run_file(
        "engines", run=ENDLESS, data=SLOW, generation={"engine": "vllm"}, trainer={"device": "auto"}
    )
    for is_so in (lambda s: "trainer-0" in {role["name"] for role in s["roles"]}, lambda s: s["step"] >= 2):
        with Run(run_file, lab.layout("engines"), "--fresh") as run:
            run.wait_until(is_so)
            with within(CTRL_C_LIMIT_S, "Ctrl-C"):
                run.interrupt()
                assert run.finish() in (0, 130), run.story()
            run.assert_nothing_is_left()


def test_rlhpc_stop_saves_the_step_and_ends_everything(lab: Lab) -> None:
    run_file, layout = (
        lab.run_file("stopped", run=ENDLESS, data=SLOW, checkpoint={"every_steps": 1000}),
        lab.layout("stopped"),
    )
    with Run(run_file, layout) as run:
        run.wait_for_step(3)
        living = rlhpc("status", str(layout.root))
        assert living.returncode == 0
        assert all(name in living.stdout for name in ("generator-0", "reward-0", "trainer-0"))
        with_the_living = rlhpc("run", str(run_file), "--fresh")
        assert with_the_living.returncode == 2
        assert "a run is active here" in with_the_living.stderr
        stopped = rlhpc("stop", str(layout.root))
        assert stopped.returncode == 0, stopped.stderr
        assert "stopped" in stopped.stdout
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    step = _saved_step(layout)
    assert step >= 3  # nothing was saved on schedule
    assert json.loads(layout.status.read_bytes())["phase"] == "stopped"
    assert not layout.summary.exists()
    assert_full_batches_trained_once(layout.rollouts, step, GROUPS, GROUP_SIZE)
    again = rlhpc("stop", str(layout.root))
    assert again.returncode == 0
    assert "this run is not running" in again.stdout


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>&1 | head -c 1", "2>/dev/full >/dev/full"])
def test_a_run_whose_streams_are_closed_broken_or_full_goes_on_to_its_end(lab: Lab, streams: str) -> None:
    layout = lab.layout("unheard")
    command = [sys.executable, "-m", "launch.cli", "run", str(lab.run_file("unheard")), "--fresh", "run.num_steps=2"]
    subprocess.run(
        ["sh", "-c", f'"$@" {streams}', "sh", *command], env=command_environment(), cwd=lab.root, check=False
    )
    assert summary_of(layout)["steps"] == 2


def test_a_launcher_that_is_killed_leaves_nothing_behind(lab: Lab) -> None:
    run_file, layout = lab.run_file("orphaned", run=ENDLESS, data=SLOW), lab.layout("orphaned")
    with Run(run_file, layout) as run:
        run.wait_for_step(1)
        run.interrupt(signal.SIGKILL)
        run.process.wait()
        run.assert_nothing_is_left(within_s=CTRL_C_LIMIT_S)


def _saved_step(layout: RunLayout) -> int:
    found = latest_complete(layout.checkpoints)
    assert found is not None
    return found[0]
