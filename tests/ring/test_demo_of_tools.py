"""The demo of tools in short: a model that mostly guesses learns to search, through real processes."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launch.demo.lookup import CALL, make_lookup_model, write_dataset
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.data.tokenizer import PromptTokenizer
from tests.ring.rollouts_on_disk import assert_looking_is_learnt, assert_the_audit_is_clean
from tests.ring.run_kit import ROOT, Run, rlhpc

pytestmark = [pytest.mark.ring, pytest.mark.vllm, pytest.mark.long, pytest.mark.soak]
NUM_STEPS = 30


def _words(process: psutil.Process) -> list[str]:
    """The command line of a process; [] of one that has ended."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tools")
    make_lookup_model(root / "model")
    write_dataset(root / "model", 2000, seed=0)
    return root / "model"


@pytest.fixture(scope="module")
def demo(model: Path) -> tuple[RunLayout, Path]:
    root = model.parent
    layout = RunLayout(root / "run")
    words = {
        "run.directory": layout.root,
        "run.num_steps": NUM_STEPS,
        "model.path": root / "model",
        "data.path": root / "model" / "train.jsonl",
        "environment.corpus": root / "model" / "documents.jsonl",
    }
    copy = Path(shutil.copy(ROOT / "configs" / "demo_tool.toml", root))
    with Run(copy, layout, *(f"{key}={value}" for key, value in words.items())) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    return layout, root / "model"


def test_a_model_learns_to_use_a_tool(demo: tuple[RunLayout, Path]) -> None:
    assert_looking_is_learnt(*demo, CALL)


def test_the_audit_of_a_run_of_dialogues_is_clean(demo: tuple[RunLayout, Path]) -> None:
    assert_the_audit_is_clean(demo[0])


def test_a_run_calls_the_tool_of_a_server_and_goes_on_when_that_is_killed(model: Path) -> None:
    pytest.importorskip("mcp", reason="extra 'mcp'")
    root, layout = model.parent / "served", RunLayout(model.parent / "served" / "run")
    root.mkdir()
    text = (ROOT / "configs" / "demo_tool.toml").read_text()
    of_corpus = [line for line in text.splitlines() if line.startswith(("tools =", "corpus =", "num_documents ="))]
    for line in of_corpus:
        text = text.replace(f"{line}\n", "")
    server = [sys.executable, str(Path(__file__).parent / "lookup_server.py"), str(model / "documents.jsonl")]
    text += f'\n[mcp.lookup]\ncommand = {json.dumps(server)}\nsession = "worker"\ntimeout_s = 20.0\n'
    (root / "demo_tool.toml").write_text(text)
    words = {
        "run.directory": layout.root,
        "run.num_steps": 6,
        "model.path": model,
        "data.path": model / "train.jsonl",
        "rewards.timeout_s": 60.0,
        "trainer.learning_rate": 1e-9,  # as many calls in the end as at first
    }
    checked = rlhpc("check", root / "demo_tool.toml", *(f"{key}={value}" for key, value in words.items()))
    assert "tools       mcp.lookup: search" in checked.stdout
    with Run(root / "demo_tool.toml", layout, *(f"{key}={value}" for key, value in words.items())) as run:
        run.wait_for_step(2)
        (alive,) = servers = [each for each in run.role("reward").children(recursive=True) if _words(each) == server]
        alive.kill()
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert not [each for each in psutil.process_iter() if _words(each) == server], servers
    tokenizer, found = PromptTokenizer(model), Counter[bool]()
    for resolved in read_rollouts_directory(layout.rollouts):
        for member in resolved.group.members:
            said = tokenizer.decode(member.rollout.token_ids)
            if "nothing was found" not in said and ": " not in said:
                continue
            found[resolved.group.admitted_version < 2] += 1
    assert found[True]
    assert found[False]
    assert_the_audit_is_clean(layout)
