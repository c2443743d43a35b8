"""Agents, environments and reward functions that fail: for a while, for good, and by killing their worker.

Their prompts are all of the same tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.exit_status import EXIT_CONFIG, EXIT_FAULT
from rlhpc.run_layout import RunLayout
from tests.faults.unreliable import FAULTS, GAME, WORDS, break_down, mend
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, rollouts_on_disk
from tests.ring.run_kit import ROOT, Lab, Run, rlhpc

pytestmark = pytest.mark.ring
NUM_STEPS = 3
MODULE = "tests.faults.unreliable"
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "agent": {"data": {"environment": "agent", "task": "environment"}, "agent": {"function": f"{MODULE}:play"}},
    "environment": {
        "data": {"environment": f"{MODULE}:OneTurn", "task": "environment", "prompt_template": "{same}"},
    },
    "game": {
        "data": {"environment": "gymnasium", "task": "environment", "prompt_template": "{same}"},
        "environment": {"id": GAME},
    },
    "judge": {"data": {"task": f"{MODULE}:judge", "prompt_template": "{same}", "reference_field": "seed"}},
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv(FAULTS, str(tmp_path / "faults"))
    chat = tmp_path / "chat"
    subprocess.run([sys.executable, ROOT / "examples" / "echo_agent.py", chat], check=True)
    return write_records(Lab(tmp_path, chat / "model", chat / "train.jsonl"), 500)


def write_records(lab: Lab, number: int) -> Lab:
    records = [{"digits": str(1000 + seed), "same": "7", "seed": str(seed)} for seed in range(number)]
    lab.dataset.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return lab


def run_of(lab: Lab, kind: str, *words: str, **sections: dict[str, Any]) -> Run:
    common: dict[str, dict[str, Any]] = {
        "run": {"num_steps": NUM_STEPS},
        "data": {"use_chat_template": True},
        "generation": {"max_prompt_tokens": 24, "max_completion_tokens": 40},
        "environment": {} if kind == "judge" else {"max_turn_tokens": 4},
    }
    layers = (common, KINDS[kind], sections)
    merged = {name: {} for layer in layers for name in layer}
    for layer in layers:
        for name, values in layer.items():
            merged[name] = {**merged[name], **values}
    return Run(lab.run_file(kind, **merged), lab.layout(kind), *words)


def strikes(layout: RunLayout) -> str:
    return layout.strikes.read_text() if layout.strikes.exists() else ""


@pytest.mark.parametrize(
    "kind", ["agent", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "agent")]
)
def test_a_run_goes_on_when_what_has_failed_for_a_while_works_again(lab: Lab, kind: str, tmp_path: Path) -> None:
    break_down(tmp_path / "faults", "raise", times=30)  # of two attempts each
    with run_of(lab, kind) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        status = run.status()
    layout = lab.layout(kind)
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
    assert status["queue"]["dropped_verifier_error"] >= 1
    assert status["queue"]["dropped_poison"] == 0
    assert WORDS in status["errors"]["latest"]
    assert strikes(layout) == ""
    assert f"; the last error: {kind if kind == 'agent' else ''}" in run.output
    told = rlhpc("status", str(layout.root)).stdout
    assert f"the last: {status['errors']['latest'][:20]}" in told
    assert f"dropped_verifier_error {status['queue']['dropped_verifier_error']}" in told
    audit = rlhpc("audit", str(layout.root))
    assert (audit.returncode, "poison and quarantine" in audit.stdout.splitlines()[-1]) == (0, True), audit.stdout


@pytest.mark.parametrize(
    "kind", ["agent", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "agent")]
)
def test_what_fails_for_good_ends_the_run_with_the_cause_and_a_resume_after_the_mend_samples(
    lab: Lab, kind: str, tmp_path: Path
) -> None:
    break_down(tmp_path / "faults", "raise")
    with run_of(lab, kind) as run:
        assert run.finish() == EXIT_FAULT, run.story()
    assert "rewards.max_error_share=0.2: 41 of the last 41 verdicts" in run.output
    assert f"{'agent raised' if kind == 'agent' else 'raised'} 41)" in run.output
    assert WORDS in run.output
    assert {rollout.drop_reason for rollout in rollouts_on_disk(lab.layout(kind).rollouts)} == {"verifier_error"}
    mend(tmp_path / "faults")
    with run_of(lab, kind, "--resume") as run:
        assert run.finish() == 0, run.story()
    assert "quarantine" not in run.output
    assert_full_batches_trained_once(lab.layout(kind).rollouts, NUM_STEPS, 4, 4)


@pytest.mark.long
def test_a_run_of_which_quarantine_leaves_nothing_says_so_and_goes_on_once_it_is_lifted(
    lab: Lab, tmp_path: Path
) -> None:
    write_records(lab, 6)
    break_down(tmp_path / "faults", "die")
    deadly: dict[str, dict[str, Any]] = {
        "rewards": {"max_error_share": 1.0, "max_attempts": 1},
        "admission": {"max_attempts": 1, "max_groups_without_spread": 40},
    }
    layout = lab.layout("environment")
    with run_of(lab, "environment", **deadly) as run:
        assert run.finish() == EXIT_CONFIG, run.story()
    assert "40 errors in a row and no verdict between them" in run.output
    assert "quarantined 34" in run.output
    assert "1 reward worker died judging it, the last:" in run.output
    assert "--lift-quarantine" in run.output
    audit = rlhpc("audit", str(layout.root))
    assert audit.returncode == 0, audit.stdout
    assert "6 prompts quarantined" in audit.stdout
    assert audit.stdout.splitlines()[-1].startswith(f"{layout.root}: clean, with remarks on poison and quarantine")
    status = rlhpc("status", str(layout.root)).stdout
    assert "quarantined prompts   6: record " in status
    assert "train.jsonl:" in status

    mend(tmp_path / "faults")
    with run_of(lab, "environment", "--resume", **deadly) as run:
        assert run.finish() == EXIT_CONFIG, run.story()
    assert "6 prompts of earlier attempts stay quarantined (record" in run.output
    with run_of(lab, "environment", "--resume", "--lift-quarantine", **deadly) as run:
        assert run.finish() == 0, run.story()
    assert "the quarantine of 6 prompts is lifted (record" in run.output
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
