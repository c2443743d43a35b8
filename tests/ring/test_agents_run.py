"""docs/environments.md: its commands are run as printed, and what its agent was given by OpenAI's client is trained."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.prefixes import Member, PartialRollout, read_partials
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.types import Rollout
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, assert_the_audit_is_clean
from tests.ring.run_kit import GONE_S, Run, rlhpc
from tests.unit.doc_pages import ROOT, blocks, commands_of_block

PAGE = ROOT / "docs" / "environments.md"
# The scripted engine draws as the policy of an untaught model would, and needs a second in place of a minute.
QUICK = ("generation.engine=scripted", "trainer.backend=reference", "trainer.device=cpu", "run.num_steps=100000")
QUICK += ("admission.groups_per_step=2", "admission.group_size=4")
QUICK += ("environment.max_turn_tokens=1",)  # its engine draws an end too seldom for groups with spread


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("openai is not installed (extra 'dev')")
    root = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", root / "examples")
    return root


@pytest.mark.ring
def test_what_mini_swe_agent_was_given_is_trained_through_the_death_of_a_generator_and_a_resume(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("minisweagent") is None:
        pytest.skip("mini-swe-agent is not installed (extra 'examples')")
    monkeypatch.setenv("PYTHONPATH", f"{place / 'examples'}:{ROOT}")
    monkeypatch.chdir(place)
    subprocess.run([sys.executable, "examples/mini_swe_agent.py", "swe"], check=True, cwd=place)
    layout = RunLayout(place / "runs" / "swe")
    run_file = Path(shutil.copy(place / "examples" / "mini_swe_agent.toml", place))
    with Run(run_file, layout, *QUICK) as started:
        status = started.wait_for_step(2)
        os.kill(next(role["pid"] for role in status["roles"] if role["name"] == "generator-0"), signal.SIGKILL)
        started.wait_for_step(status["step"] + 2)
        started.process.kill()
        started.assert_nothing_is_left(within_s=GONE_S)
    with Run(run_file, layout, "--resume", *QUICK) as started:
        started.wait_for_step(status["step"] + 4)
        assert rlhpc("stop", str(layout.root)).returncode == 0
        assert started.finish() == 0, started.story()
        started.assert_nothing_is_left()
        num_steps = started.status()["step"]
    assert_full_batches_trained_once(layout.rollouts, num_steps, 2, 4)
    assert_the_audit_is_clean(layout)
    tasks = [json.loads(line) for line in (place / "swe" / "train.jsonl").read_text().splitlines()]
    tokenizer, rewards = PromptTokenizer(place / "swe" / "model"), list[float]()
    for resolved in read_rollouts_directory(layout.rollouts):
        task = json.loads(resolved.group.prompt.reference)
        assert task in tasks
        for member in resolved.group.members:
            said = [tokenizer.decode(turn) for turn in turns_of(member.rollout)]
            assert member.reward == _reward_of(task["files"], said), said
            rewards.append(member.reward)
    assert {0.0, 1.0} == {*rewards}


def _reward_of(files: dict[str, str], said: Sequence[str]) -> float:
    """What the repository's test says after these turns, by mini-swe-agent's rules, without it."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            Path(directory, name).write_text(text)
        for turn in said:
            commands = re.findall(r"```mswea_bash_command\n(.*?)\n```", turn)
            if len(commands) == 1:
                done = subprocess.run(commands[0], shell=True, cwd=directory, capture_output=True, check=False)
                if done.stdout.startswith(b"COMPLETE_TASK"):
                    break
        return float(subprocess.run(["sh", "test.sh"], cwd=directory, check=False).returncode == 0)


@pytest.mark.long
@pytest.mark.ring
def test_the_commands_of_the_page_train_what_a_client_of_openai_was_given_through_the_death_of_a_generator(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = blocks(PAGE, "bash", heading="Agents over HTTP")
    export, make, check, run = commands_of_block("bash", block)
    assert export == "export PYTHONPATH=examples"
    monkeypatch.setenv("PYTHONPATH", f"{place / 'examples'}:{ROOT}")
    monkeypatch.chdir(place)
    program, *words = shlex.split(make)
    assert program == "python"
    subprocess.run([sys.executable, *words], check=True, cwd=place)
    assert rlhpc(*shlex.split(check)[1:]).returncode == 0
    name, command, run_file = shlex.split(run)
    assert (name, command) == ("rlhpc", "run")
    layout = RunLayout(place / "runs" / "echo")
    with Run(Path(shutil.copy(place / run_file, place)), layout, *QUICK) as started:
        # The death of a generator takes its agents along; its rollouts go on with other agents.
        status = started.wait_for_step(2)
        agents = [process for process in started.survivors() if "rlhpc.agents.host" in _words(process)]
        assert len(agents) >= 1
        os.kill(next(role["pid"] for role in status["roles"] if role["name"] == "generator-0"), signal.SIGKILL)
        started.wait_for_step(status["step"] + 3)
        assert not [process for process in agents if process.is_running()]
        stopped = rlhpc("stop", str(layout.root))
        assert stopped.returncode == 0, stopped.stderr
        assert started.finish() == 0, started.story()
        started.assert_nothing_is_left()
        num_steps = started.status()["step"]
    assert_full_batches_trained_once(layout.rollouts, num_steps, 2, 4)
    assert_the_audit_is_clean(layout)
    assert_every_reward_is_of_what_was_trained(layout, place / "echo" / "model")


@pytest.mark.long
@pytest.mark.ring
def test_an_agent_that_rewrites_its_history_trains_its_rows_and_a_killed_generator_costs_none_of_their_turns(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{place / 'examples'}:{ROOT}")
    monkeypatch.chdir(place)
    subprocess.run([sys.executable, "examples/echo_agent.py", "echo"], check=True, cwd=place)
    layout = RunLayout(place / "runs" / "rows")
    words = ("run.name=rows", "generation.engine=transformers", "agent.function=tests.unit.roles.sample_agents:harness")
    words += ("environment.max_turns=16", "buffer.partial_interval_tokens=1", *QUICK[1:6])
    with Run(Path(shutil.copy(ROOT / "examples" / "agent.toml", place / "rows.toml")), layout, *words) as started:
        step = started.wait_for_step(2)["step"]
        known: dict[Member, PartialRollout] = {}

        def knows_several_rows(_: dict[str, Any]) -> bool:
            known.update(read_partials(layout.rollouts)[0])
            return sum(len(partial.tokens.rows) > 2 for partial in known.values()) > 3

        started.wait_until(knows_several_rows)
        started.kill_roles("generator")
        known = read_partials(layout.rollouts)[0]
        step = started.wait_for_step(step + 4)["step"]
        stopped = rlhpc("stop", str(layout.root))
        assert stopped.returncode == 0, stopped.stderr
        assert started.finish() == 0, started.story()
        started.assert_nothing_is_left()
        num_steps = started.status()["step"]
    assert_full_batches_trained_once(layout.rollouts, num_steps, 2, 4)
    assert_the_audit_is_clean(layout)
    tokenizer, num_kept = PromptTokenizer(place / "echo" / "model"), 0
    for resolved in read_rollouts_directory(layout.rollouts):
        for member in resolved.group.members:
            rollout = member.rollout
            told = [tokenizer.decode(turn[: len(turn) - (turn[-1] == EOS)]) for turn in turns_of(rollout)]
            assert sorted(told) == json.loads(member.detail)
            assert 4 <= len(rollout.rows) <= 5
            partial = known.get((rollout.group_id, rollout.sample_index))
            if partial is not None and len(partial.tokens.rows) > 2:
                sampled = partial.tokens.behaviour_logprobs != 0
                kept = set(rollout.behaviour_logprobs[rollout.loss_mask].tolist())
                assert set(partial.tokens.behaviour_logprobs[sampled].tolist()) <= kept
                num_kept += 1
    assert num_kept > 0


EOS = 2


def turns_of(rollout: Rollout) -> list[np.ndarray]:
    """Tokens of each turn of all rows."""
    found = []
    for row in rollout.rows:
        ids, mask = rollout.token_ids[row], rollout.loss_mask[row]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        found += [ids[first:last] for first, last in edges.reshape(-1, 2)]
    return found


def assert_every_reward_is_of_what_was_trained(layout: RunLayout, model: Path) -> None:
    """The agent's own count, made again from the tokens on disk."""
    tokenizer, found = PromptTokenizer(model), 0
    for resolved in read_rollouts_directory(layout.rollouts):
        for member in resolved.group.members:
            rollout = member.rollout
            edges = np.flatnonzero(np.diff(np.concatenate([[0], rollout.loss_mask.astype(int), [0]])))
            turns = turns_of(rollout)
            asked = [tokenizer.decode(rollout.token_ids[max(0, first - 3) : first])[0] for first in edges[::2]]
            assert len(turns) == 3
            assert [len(turn) for turn in turns] == [1, 1, 1]
            right = [tokenizer.decode(turn) == digit for turn, digit in zip(turns, asked, strict=True)]
            assert member.reward == pytest.approx(sum(right) / 3)
            found += 1
    assert found >= 5 * 2 * 4


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_agent_of_the_page_is_the_example() -> None:
    (shown,) = blocks(PAGE, "python", heading="Agents over HTTP")
    example = (ROOT / "examples" / "echo_agent.py").read_text(encoding="utf-8")
    for part in shown.strip().split("\n\n\n"):
        assert part in example
