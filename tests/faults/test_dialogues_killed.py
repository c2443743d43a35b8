"""A generator and the reward service die in the middle of dialogues: these go on from their tokens, nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.buffer.segments import read_rollouts_directory
from tests.ring.ring_rewards import GATE, open_gate
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import ROOT, Lab, Run, rlhpc


@pytest.mark.long
@pytest.mark.ring
def test_dialogues_outlive_the_deaths_of_their_generator_and_of_their_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, chat = tmp_path / "gate", tmp_path / "chat"
    subprocess.run([sys.executable, ROOT / "examples" / "echo_agent.py", chat], check=True)
    lab = Lab(tmp_path, chat / "model", chat / "train.jsonl")  # its template ends turns with a special token
    monkeypatch.setenv(GATE, str(gate))
    open_gate(gate)
    run_file = lab.run_file(
        "talking",
        run={"num_steps": 100_000},  # stopped once everything has been seen
        data={
            "environment": "tests.unit.rewards.sample_environments:GatedHalf",
            "task": "environment",
            "use_chat_template": True,
            "prompt_template": "{digits}",
        },
        environment={"max_turns": 3, "max_turn_tokens": 4},
        rewards={"timeout_s": 500.0, "workers_per_replica": 2},
        generation={"num_replicas": 2, "max_prompt_tokens": 24, "max_completion_tokens": 100},
        transport={"dead_after_s": 5.0},
        buffer={"partial_interval_tokens": 1},
    )
    layout = lab.layout("talking")
    with Run(run_file, layout) as run:
        step = run.wait_for_step(1)["step"]
        gate.unlink()  # every dialogue stops behind its first turn
        held = run.wait_until(lambda s: all(_is_held(role) for role in _generators(s)))
        pids = {role["name"]: role["pid"] for role in held["roles"]}
        for victim in ("generator-0", "reward-0"):
            os.kill(pids[victim], signal.SIGKILL)
        run.wait_until(lambda s: all(_has_come_back(s, name, pids[name]) for name in ("generator-0", "reward-0")))
        open_gate(gate)
        run.wait_for_step(step + 4)
        assert rlhpc("stop", str(layout.root)).returncode == 0
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        num_steps = run.status()["step"]
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)
    members = [each for resolved in read_rollouts_directory(layout.rollouts) for each in resolved.group.members]
    assert max(int((~each.rollout.loss_mask).sum()) for each in members) > 0
    said = "".join(log.read_text(encoding="utf-8") for log in layout.logs.rglob("*.log"))
    assert "did not repeat its observations" not in said


def _generators(status: dict) -> list[dict]:
    found = [role for role in status["roles"] if role["name"].startswith("generator")]
    return found if len(found) == 2 else [{"metrics": {}, "waits_for": "x"}]


def _is_held(role: dict) -> bool:
    """It has leases, and samples nothing."""
    return role["waits_for"] == "" and role["metrics"].get("running", 1) == 0


def _has_come_back(status: dict, name: str, old: int) -> bool:
    return any(role["name"] == name and role["pid"] != old for role in status["roles"])
