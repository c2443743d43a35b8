"""Agents, environments, tools, judges and reward functions that fail: for a while, for good, and by killing a worker.

Their prompts are all of the same tokens.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.faults.unreliable import CALL, FAULTS, GAME, WORDS, break_down, grade, mend
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import ROOT, Lab, Run, rlhpc
from tests.unit.rewards.judge_server import judging

pytestmark = pytest.mark.ring
PARITY = "tests.ring.ring_rewards:parity"
NUM_STEPS = 3
MODULE = "tests.faults.unreliable"
OF_ENVIRONMENT: dict[str, Any] = {"task": "environment", "prompt_template": "{same}"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "agent": {
        "data": {"environment": "agent", "task": "environment"},
        "agent": {"function": f"{MODULE}:play"},
        "environment": {"max_turn_tokens": 4},
    },
    "environment": {
        "data": {"environment": f"{MODULE}:OneTurn", **OF_ENVIRONMENT},
        "environment": {"max_turn_tokens": 4},
    },
    "game": {
        "data": {"environment": "gymnasium", **OF_ENVIRONMENT},
        "environment": {"id": GAME, "max_turn_tokens": 4},
    },
    "tools": {
        "data": {"environment": f"{MODULE}:Tools", **OF_ENVIRONMENT, "task": PARITY, "reference_field": "seed"},
        "environment": {"max_turns": 2, "max_turn_tokens": 4},
    },
    "judge": {
        "data": {"task": "llm_judge", "prompt_template": "{same}", "reference_field": "seed"},
        "judge": {"model": "judge", "template": "{completion}", "attempts": 1},
    },
    "function": {"data": {"task": f"{MODULE}:judge", "prompt_template": "{same}", "reference_field": "seed"}},
}


def each_kind(*long: str) -> pytest.MarkDecorator:
    """Agents in `make test`, these in `make test-all`, all in `make soak-matrix`."""
    soak = [kind for kind in KINDS if kind not in ("agent", *long)]
    rarely = [pytest.param(kind, marks=[pytest.mark.long, pytest.mark.soak]) for kind in soak]
    return pytest.mark.parametrize(
        "kind", ["agent", *(pytest.param(each, marks=pytest.mark.long) for each in long), *rarely]
    )


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template begins dialogues with a special token, as agents need."""
    made = tmp_path_factory.mktemp("chat")
    subprocess.run([sys.executable, ROOT / "examples" / "echo_agent.py", made], check=True)
    return made


@pytest.fixture
def lab(chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv(FAULTS, str(tmp_path / "faults"))
    shutil.copytree(chat, tmp_path, dirs_exist_ok=True)
    return write_records(Lab(tmp_path, tmp_path / "model", tmp_path / "train.jsonl"), 500)


def write_records(lab: Lab, number: int) -> Lab:
    records = [{"digits": str(1000 + seed), "same": "7", "seed": str(seed)} for seed in range(number)]
    lab.dataset.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return lab


def teach_calls(lab: Lab) -> None:
    """Have most tokens of the vocabulary be calls of a tool: a scripted engine draws few texts of more than one."""
    path = lab.model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        CALL % int(token) if token.isdigit() and token != "7" else token: number for token, number in vocabulary.items()
    }
    path.write_text(json.dumps(tokenizer))


def run_of(lab: Lab, kind: str, *words: str, **sections: dict[str, Any]) -> Run:
    common: dict[str, dict[str, Any]] = {
        "run": {"num_steps": 100_000},  # stopped once everything has been seen
        "data": {"use_chat_template": True},
        "generation": {"max_prompt_tokens": 24, "max_completion_tokens": 40},
    }
    layers = (common, KINDS[kind], sections)
    merged = {name: {} for layer in layers for name in layer}
    for layer in layers:
        for name, values in layer.items():
            merged[name] = {**merged[name], **values}
    return Run(lab.run_file(kind, **merged), lab.layout(kind), *words)


@contextmanager
def surroundings(lab: Lab, kind: str) -> Iterator[dict[str, dict[str, Any]]]:
    """What a kind needs beside its run, and the settings that name it."""
    if kind == "tools":
        teach_calls(lab)
    if kind != "judge":
        yield {}
        return
    with judging(grade) as server:
        yield {"judge": {"endpoint": server.endpoint}}


def stop_later(run: Run, layout: RunLayout) -> None:
    """Let it train some steps more, stop it, and see that it has trained every batch once."""
    run.wait_for_step(run.status()["step"] + NUM_STEPS)
    stopped = rlhpc("stop", str(layout.root))
    assert stopped.returncode == 0, stopped.stderr
    assert run.finish() == 0, run.story()
    run.assert_nothing_is_left()
    assert_full_batches_trained_once(layout.rollouts, run.status()["step"], 4, 4)


def is_waiting(layout: RunLayout, status: dict[str, Any], *, is_told: bool) -> bool:
    """Whether the run waits, and `rlhpc status` says so: a late verdict may come between the two."""
    is_so = "waited_s" in status["errors"]
    return is_so and (not is_told or "; waiting for verdicts since " in rlhpc("status", str(layout.root)).stdout)


def lost_leases(layout: RunLayout) -> str:
    return layout.lost_leases.read_text() if layout.lost_leases.exists() else ""


@each_kind("tools", "judge")
def test_a_run_goes_on_when_what_has_failed_for_a_while_works_again(lab: Lab, kind: str, tmp_path: Path) -> None:
    layout = lab.layout(kind)
    with surroundings(lab, kind) as settings, run_of(lab, kind, **settings) as run:
        run.wait_for_step(1)
        break_down(tmp_path / "faults", "raise")
        run.wait_until(partial(is_waiting, layout, is_told=kind != "tools"))  # a turn without a call has its verdict
        mend(tmp_path / "faults")
        stop_later(run, layout)
        status = run.status()
    assert "too many errors in place of verdicts: the run waits for up to 120 s" in run.output
    assert "there are verdicts again" in run.output
    assert len(layout.attempts.read_text().splitlines()) == 1
    assert status["queue"]["dropped_verifier_error"] >= 1
    assert status["queue"]["dropped_poison"] == 0
    assert WORDS in status["errors"]["latest"] or kind == "judge"
    assert lost_leases(layout) == ""
    told = rlhpc("status", str(layout.root)).stdout
    assert f"the last: {status['errors']['latest'][:20]}" in told
    assert f"dropped_verifier_error {status['queue']['dropped_verifier_error']}" in told
    audit = rlhpc("audit", str(layout.root))
    assert (audit.returncode, "poison and quarantine" in audit.stdout.splitlines()[-1]) == (0, True), audit.stdout


@each_kind("game", "function")
def test_what_fails_for_good_ends_the_run_with_the_cause_and_a_resume_after_the_mend_samples(
    lab: Lab, kind: str, tmp_path: Path
) -> None:
    layout, rewards = lab.layout(kind), {"error_patience_s": 1.0}
    with surroundings(lab, kind) as settings:
        with run_of(lab, kind, rewards=rewards, **settings) as run:
            run.wait_for_step(1)
            break_down(tmp_path / "faults", "raise")
            assert run.finish() == EXIT_CONFIG, run.story()
            run.assert_nothing_is_left()
        cause = "agent raised" if kind == "agent" else "raised"
        found = re.search(r"StarvedError: rewards.max_error_share=0.2: 41 of the last \d+ verdicts .*", run.output)
        assert found, run.output
        assert f" {cause} 41), " in found[0]
        assert ("status 502" if kind == "judge" else WORDS) in found[0]
        assert len(layout.attempts.read_text().splitlines()) == 1
        audit = rlhpc("audit", str(layout.root))
        assert audit.returncode == 0, audit.stdout
        mend(tmp_path / "faults")
        with run_of(lab, kind, "--resume", rewards=rewards, **settings) as run:
            run.wait_until(lambda status: status["attempt"] == 1)
            stop_later(run, layout)
    assert "quarantine" not in run.output


@pytest.mark.long
def test_where_agents_fail_on_one_generator_alone_it_is_given_fewer_leases_and_the_run_goes_on(
    lab: Lab, tmp_path: Path
) -> None:
    layout = lab.layout("agent")
    break_down(tmp_path / "faults", "raise", where="/g0-")
    with run_of(lab, "agent", generation={"num_replicas": 3}) as run:
        status = run.wait_until(lambda status: "paused" in status["errors"])
        run.wait_for_step(status["step"] + NUM_STEPS)
        assert "; nothing but errors on generator-0" in rlhpc("status", str(layout.root)).stdout
        mend(tmp_path / "faults")
        run.wait_until(lambda status: "paused" not in status["errors"])
        stop_later(run, layout)
    assert len(layout.attempts.read_text().splitlines()) == 1


@pytest.mark.long
def test_a_run_of_which_quarantine_leaves_nothing_says_so_and_goes_on_once_it_is_lifted(
    lab: Lab, tmp_path: Path
) -> None:
    write_records(lab, 6)
    break_down(tmp_path / "faults", "die", where="/r0-")  # not in the trial before the run
    deadly: dict[str, dict[str, Any]] = {
        "run": {"num_steps": NUM_STEPS},
        "rewards": {"max_error_share": 1.0, "max_attempts": 1},
        "admission": {"max_attempts": 1, "max_zero_variance_groups": 40},
    }
    layout = lab.layout("environment")
    with run_of(lab, "environment", **deadly) as run:
        assert run.finish() == EXIT_CONFIG, run.story()
    assert "40 errors in a row and no verdict between them" in run.output
    assert re.search(
        r"of the attempt: quarantined \d\d, died \d\d?\)", run.output
    )  # of a prompt two groups may be on the way
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
