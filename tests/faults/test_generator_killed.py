"""One of two generators dies without a word: the run goes on meanwhile, and it is started again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launch.view.events import read_story
from launch.view.report import rows_of
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from tests.ring.ring_rewards import GATE, open_gate
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import Lab, Run, last_scalar, make_lab, rlhpc


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.ring
@pytest.mark.parametrize("engine", ["scripted", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])])
def test_a_run_survives_sigkill_of_one_of_two_generators(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    name = f"bereft-{engine}"
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    open_gate(gate)
    run_file = lab.run_file(
        name,
        run={"num_steps": 100_000},  # stopped once everything has been seen
        data={"task": "tests.ring.ring_rewards:gated_parity"},
        rewards={"timeout_s": 600.0},
        generation={"engine": engine, "num_replicas": 2, "max_num_seqs": 8, "max_completion_tokens": 160},
        trainer={"device": "auto"},
        weights={"timeout_s": 10.0},
        transport={"dead_after_s": 5.0},
    )
    layout = lab.layout(name)
    with Run(run_file, layout) as run:
        run.wait_until(lambda s: s["step"] >= 2 and all(_has_sampled(r) for r in _generators(s, 2)))
        # Nobody is judged from here on: who holds leases holds them until killed, and one does: all slots are full.
        open_gate(gate, 0)
        closed = time.time()
        status = run.wait_until(lambda s: any(_holds_leases(r, s, closed) for r in _generators(s, 2)))
        victim = next(role for role in _generators(status, 2) if _holds_leases(role, status, closed))
        os.kill(victim["pid"], signal.SIGKILL)
        open_gate(gate)
        run.wait_for_step(status["step"] + 5)
        back = run.wait_until(lambda s: all(_has_sampled(r) and r["pid"] != victim["pid"] for r in _generators(s, 2)))
        pids = {role["name"]: role["pid"] for role in _generators(back, 2)}
        stopped = rlhpc("stop", str(layout.root))
        assert stopped.returncode == 0, stopped.stderr
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()  # the engine workers of the dead one neither
    assert f"{victim['name']} on " in run.output
    assert "it is restarted" in run.output
    assert_full_batches_trained_once(layout.rollouts, run.status()["step"], 4, 4)
    assert last_scalar(layout, "group/regranted_total") > 0
    assert max(r.trained_version - r.admitted_version for r in consumed(layout.rollouts)) <= 1
    assert_the_report_tells_of_it(layout, victim)
    (other,) = {"generator-0", "generator-1"} - {victim["name"]}
    assert pids[other] == next(r["pid"] for r in _generators(status, 2) if r["name"] == other)  # undisturbed


def assert_the_report_tells_of_it(layout: RunLayout, victim: dict) -> None:
    """Without a log file: who died, of what, when it was missed, and that it came back."""
    story = read_story(RunView(layout))
    told = {
        each.kind: each.text
        for each in story.happenings
        if victim["name"] in (each.who, each.text[: len(victim["name"])])
    }
    assert "signal SIGKILL" in told["restart"]
    assert "is lost: no sign of life" in " ".join(each.text for each in story.faults if each.who == victim["name"])
    joined = [each.text for each in story.happenings if (each.who, each.kind) == (victim["name"], "joined")]
    assert len({*joined}) == 2  # a loaded machine may miss one of them for a moment: it joins again
    assert f"pid {victim['pid']} " in joined[0]
    assert victim["name"] in rows_of(story)


def _generators(status: dict, num: int) -> list[dict]:
    found = [role for role in status["roles"] if role["name"].startswith("generator")]
    return found if len(found) == num else [{"metrics": {}, "pid": 0}]


def _has_sampled(role: dict) -> bool:
    return role["metrics"].get("tokens", 0) > 0


def _holds_leases(role: dict, status: dict, since: float) -> bool:
    """It said so half a second after that moment: verdicts that were on their way have arrived."""
    heard_at = status["unix_time_s"] - role.get("silent_s", 0)
    return role["pid"] > 0 and heard_at > since + 0.5 and role["waits_for"] == ""
