"""Supervised fine-tuning as a run: from demonstrations to a model, ended from outside and gone on with, bit for bit."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import signal
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launch.cli import main
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import read_resolved
from rlhpc.data.demonstrations import Demonstration, open_demonstrations
from rlhpc.training.checkpoint_directory import KnownCheckpoints
from tests.contracts.trainer_textbook import load_hf
from tests.ring.run_kit import Lab, Run, rlhpc, scalars, summary_of, to_toml, wait_while_it_moves
from tests.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.ring
NUM_STEPS = 24


def stage_file(lab: Lab, name: str, **sections: Mapping[str, Any]) -> Path:
    """Write NAME.toml: 24 steps on additions, with these sections laid over it; returns its path."""
    rng, data = random.Random(0), lab.root / "additions.jsonl"
    if not data.exists():
        pairs = [(rng.randrange(30), rng.randrange(30)) for _ in range(300)]
        data.write_text("".join(f"{json.dumps({'sum': f'{a}+{b}=', 'is': str(a + b)})}\n" for a, b in pairs))
    settings: dict[str, Any] = {
        "run": {"name": name, "directory": str(lab.root / "runs" / name), "deterministic": True},
        "model": {"path": str(lab.model), "dtype": "float32"},
        "demonstrations": {"path": str(data), "prompt_field": "sum", "completion_field": "is"},
        "sft": {"batch_size": 150, "num_steps": NUM_STEPS, "held_out": 0.1, "evaluate_every": 6, "learning_rate": 5e-3},
        "trainer": {"backend": "reference", "token_budget": 128, "device": "cpu"},
        "checkpoint": {"every_steps": 5},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    (lab.root / f"{name}.toml").write_text(to_toml(settings), encoding="utf-8")
    return lab.root / f"{name}.toml"


def done(lab: Lab, name: str, *words: str, **sections: Mapping[str, Any]) -> RunLayout:
    with Run(stage_file(lab, name, **sections), lab.layout(name), *words) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    return lab.layout(name)


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> RunLayout:
    return done(lab, "undisturbed")


def weights_of(layout: RunLayout) -> dict[str, torch.Tensor]:
    return dict(load_hf(layout.model).state_dict())


def same(one: RunLayout, other: RunLayout) -> bool:
    """Whether two runs have ended with the same model, bit for bit, on the same losses."""
    first, second = weights_of(one), weights_of(other)
    assert scalars(one, "sft/held_out_loss") == scalars(other, "sft/held_out_loss")
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def held_out_loss(layout: RunLayout) -> float:
    """The loss of the exported model on what the run has held out, by transformers in float64."""
    config, _ = read_resolved(layout)
    model, held_out = load_hf(layout.model).double(), list(open_demonstrations(config).held_out())
    return sum(nll_of(model, each) for each in held_out) / sum(int(each.loss_mask.sum()) for each in held_out)


def nll_of(model: Any, each: Demonstration) -> float:
    tokens = torch.from_numpy(each.token_ids.astype("int64"))
    wanted = torch.where(torch.from_numpy(each.loss_mask.copy()), tokens, -100)[1:]
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))


def test_a_run_learns_from_demonstrations_and_leaves_a_model_that_others_load(undisturbed: RunLayout) -> None:
    layout, summary = undisturbed, summary_of(undisturbed)
    losses, held_out = scalars(layout, "trainer/loss"), scalars(layout, "sft/held_out_loss")
    assert (summary["steps"], summary["epochs"], len(losses)) == (NUM_STEPS, NUM_STEPS * 150 / 270, NUM_STEPS)
    assert losses[-1] < 0.7 * losses[0]
    assert len(held_out) == NUM_STEPS / 6
    assert held_out[-1] == pytest.approx(held_out_loss(layout), rel=1e-5)
    assert summary["held_out_best"] == pytest.approx(min(held_out))
    assert [step for step, _ in KnownCheckpoints(layout.checkpoints).steps()] == [20, NUM_STEPS]
    assert sorted(path.name for path in layout.logs.iterdir()) == ["controller-0", "trainer-0"]


def test_commands_that_look_at_runs_know_it(undisturbed: RunLayout) -> None:
    root = str(undisturbed.root)
    told = {name: rlhpc(*words) for name, *words in (
        ("status", "status", root), ("list", "list", root), ("report", "report", root), ("check", "check", root),
        ("audit", "audit", root), ("metrics", "metrics", root), ("scale", "scale", root, "--generators", "+1"),
        ("evaluate", "evaluate", root), ("rollouts", "rollouts", root),
    )}  # fmt: skip
    assert {name: each.returncode for name, each in told.items()} == {
        name: 2 * (name in ("audit", "scale", "evaluate", "rollouts")) for name in told
    }
    assert "supervised fine-tuning   loss" in told["status"].stdout
    assert "held out" in told["status"].stdout
    assert "reward" not in told["status"].stdout
    assert f"complete  {NUM_STEPS}/{NUM_STEPS}  -" in told["list"].stdout
    assert "held out  loss" in told["report"].stdout
    assert "staleness" not in told["report"].stdout
    assert "sound; a resume starts from step 24" in told["check"].stdout
    assert "`rlhpc check" in told["audit"].stderr
    assert "nothing is sampled" in told["rollouts"].stderr
    assert "which has neither generators nor" in told["scale"].stderr
    assert f"`rlhpc evaluate {undisturbed.model} --run RUN.toml`" in told["evaluate"].stderr
    assert "sft/held_out_loss" in told["metrics"].stdout


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param({"backend": "megatron", "num_ranks": 2, "tensor_parallel": 2}, marks=pytest.mark.long),
        {"backend": "deepspeed", "num_ranks": 2, "zero_stage": 2},
    ],
    ids=["megatron-tp2", "deepspeed-dp2"],
)
def test_ranks_of_every_backend_learn_what_one_rank_learns(
    lab: Lab, undisturbed: RunLayout, trainer: dict[str, Any]
) -> None:
    layout = done(lab, f"by-{trainer['backend']}", trainer=trainer, sft={"num_steps": 6})
    one = scalars(undisturbed, "trainer/loss")[:6]
    assert scalars(layout, "trainer/loss")[0] == pytest.approx(one[0], rel=1e-5)
    assert scalars(layout, "sft/held_out_loss")[0] == pytest.approx(held_out_loss(layout), rel=1e-5)
    assert (layout.model / "config.json").exists()


@pytest.mark.parametrize("role", [pytest.param("controller", marks=pytest.mark.long), "trainer"])
def test_a_run_whose_process_is_killed_ends_as_if_nothing_had_happened(
    lab: Lab, undisturbed: RunLayout, role: str
) -> None:
    name = f"{role}-killed"
    with Run(stage_file(lab, name), lab.layout(name)) as run:
        run.wait_for_step(8)
        run.kill_roles(role)
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert len(run.layout.attempts.read_text().splitlines()) == 2
    assert same(run.layout, undisturbed)


@pytest.mark.long
def test_preferences_are_learnt_and_held_out_ones_told_of_also_after_a_killing(lab: Lab) -> None:
    """The loss of DPO over held-out pairs in batches of 60 and 30, by transformers in float64."""
    data, sections = lab.root / "preferences.jsonl", {}
    data.write_text("".join(f'{{"sum": "{n}+1=", "is": "{n + 1}", "not": "{n + 1}0"}}\n' for n in range(900)))
    sections["demonstrations"] = {"path": str(data), "rejected_field": "not"}
    sections["sft"] = {"loss": "dpo", "beta": 0.2, "batch_size": 60, "num_steps": 24}
    layout = done(lab, "preferring", **sections)
    (config, _), start, end = read_resolved(layout), load_hf(lab.model).double(), load_hf(layout.model).double()
    gains = [
        [nll_of(start, each) - nll_of(end, each) for each in pair.sequences]
        for pair in open_demonstrations(config).held_out()
    ]
    margins = [0.2 * (chosen - rejected) for chosen, rejected in gains]
    assert len(margins) == 90
    wanted = [sum(math.log1p(math.exp(-each)) for each in margins) / 90, 1.0, sum(margins) / 90]
    names = ("loss", "preference_accuracy", "preference_margin")
    found = [scalars(layout, f"sft/held_out_{name}")[-1] for name in names]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert scalars(layout, "trainer/loss")[0] == pytest.approx(math.log(2), rel=1e-6)
    assert found[0] < 0.6
    assert scalars(layout, "sft/preference_accuracy")[-1] == 1.0
    with Run(stage_file(lab, "preferring-killed", **sections), lab.layout("preferring-killed")) as run:
        run.wait_for_step(6)
        run.kill_roles("trainer")
        assert run.finish() == 0, run.story()
    undisturbed, killed = weights_of(layout), weights_of(run.layout)
    assert all(torch.equal(tensor, killed[name]) for name, tensor in undisturbed.items())
    summary = summary_of(run.layout)
    for name in ("held_out_best", "preference_accuracy_last", "preference_margin_last"):
        assert summary[name] == summary_of(layout)[name]
    assert summary["pairs_trained"] == 24 * 60
    assert "pairs trained" in run.story()
    assert re.search("preferences +accuracy 100%, margin ", rlhpc("report", str(layout.root)).stdout)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL], ids=lambda number: number.name
)
def test_a_run_that_was_ended_goes_on_to_the_same_model(
    lab: Lab, undisturbed: RunLayout, number: signal.Signals
) -> None:
    name = f"ended-by-{number.name.lower()}"
    with Run(stage_file(lab, name), lab.layout(name)) as run:
        run.wait_for_step(7)
        run.interrupt(number)
        run.finish()
        run.assert_nothing_is_left(30.0)
    assert not run.layout.summary.exists()
    assert same(done(lab, name, "--resume"), undisturbed)


def test_an_rl_run_with_demonstrations_learns_from_them_first_and_goes_on_from_that_model(lab: Lab) -> None:
    text = stage_file(
        lab, "unused", sft={"num_steps": 4, "evaluate_every": 2}, run={"deterministic": False}
    ).read_text()
    stage = {name: values for name, values in tomllib.loads(text).items() if name in ("demonstrations", "sft")}
    path, layout, first = (
        lab.run_file("both", run={"num_steps": 2}, **stage),
        lab.layout("both"),
        lab.layout("both-sft"),
    )
    with Run(path, layout) as run:
        wait_while_it_moves(first.status.exists, first.status.exists, "the first stage", run.story)
        run.interrupt()
        run.finish()
        run.assert_nothing_is_left(10.0)
    assert not layout.is_run
    for _ in range(2):  # the second time both are complete
        with Run(path, layout, "--resume") as run:
            assert run.finish() == 0, run.story()
        assert summary_of(first)["steps"] == 4
        assert summary_of(layout)["steps"] == 2
    assert read_resolved(layout)[0].model.path == first.model
    refused = rlhpc("run", str(path), "--resume", "sft.learning_rate=1e-4")
    assert (refused.returncode, "sft.learning_rate: 0.005 → 0.0001" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize(
    ("record", "words", "said"),
    [
        ('{"sum": "1+1="}', (), "no field 'is', which demonstrations.completion_field names"),
        ('{"sum": "1+1=", "is": 2', (), "additions.jsonl:1"),
        ('{"sum": "1+1=", "is": "2"}', ("model.path=/nowhere",), "model.path"),
        ('{"sum": "1+1=", "is": "2"}', ("sft.max_tokens=4",), "the conversation has"),
        ('{"sum": "1+1=", "is": "2"}', ("sft.warmup_steps=99",), "sft.warmup_steps=99"),
        ('{"sum": "1+1=", "is": "2"}', ("trainer.token_budget=9999", "sft.max_tokens=9999"), "context of 4096"),
    ],
    ids=["no-answer", "half-a-record", "no-model", "too-long", "warm-up", "context"],
)
def test_what_cannot_be_learnt_is_refused_before_anything_is_there(
    tmp_path: Path, record: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path, make_tiny_checkpoint(tmp_path / "model"), tmp_path / "unused")
    (tmp_path / "additions.jsonl").write_text(f"{record}\n")
    assert main(["sft", str(stage_file(lab, "refused")), "sft.held_out=0.0", "sft.evaluate_every=50", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert not lab.layout("refused").root.exists()


def test_a_run_that_stops_early_leaves_the_model_with_the_lowest_held_out_loss(lab: Lab) -> None:
    """At this rate each later model is worse than the first."""
    sft = {"early_stop": 2, "learning_rate": 0.5, "lr_schedule": "constant", "evaluate_every": 2}
    layout = done(lab, "stops-early", sft=sft, checkpoint={"every_steps": 1})
    summary, losses = summary_of(layout), scalars(layout, "sft/held_out_loss")
    best = losses.index(min(losses))
    assert (summary["model_step"], summary["steps"]) == (2 * (best + 1), 2 * (best + 3))
    assert (summary["stopped_early"], len(losses)) == (True, best + 3)
    assert held_out_loss(layout) == pytest.approx(losses[best], rel=1e-4)
    assert layout.checkpoint(summary["model_step"]).is_dir()


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_killed_or_paused_at_any_instant_a_run_ends_with_the_same_model(
    lab: Lab, undisturbed: RunLayout, seed: int
) -> None:
    rng, name = random.Random(seed), f"struck-{seed}"
    path, layout = stage_file(lab, name), lab.layout(name)
    for words in ((), ("--resume",), ("--resume",)):
        with Run(path, layout, *words) as run:
            while not layout.status.exists() and run.process.poll() is None:
                time.sleep(0.1)
            time.sleep(rng.uniform(0.0, 8.0))
            victims = [process for process in run.survivors() if process.pid != run.process.pid]
            match rng.choice(["launcher", "process", "pause"]):
                case "launcher":
                    run.interrupt(signal.SIGKILL)
                case "process" if victims:
                    rng.choice(victims).kill()
                case _ if victims:
                    victim = rng.choice(victims)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        victim.suspend()
                        time.sleep(rng.uniform(0.5, 3.0))
                        victim.resume()
            run.finish()
            run.assert_nothing_is_left(30.0)
        if layout.summary.exists():
            break
    if not layout.summary.exists():
        done(lab, name, "--resume")
    assert same(layout, undisturbed)
