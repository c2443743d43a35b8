"""run.deterministic: a run that is killed again and again ends with the bits of one that never was."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import Trained, event_paths, read_events
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import Lab, Run, make_lab, run_to_the_end

pytestmark = pytest.mark.ring
NUM_STEPS = 12
COMPARED = ("loss", "grad_norm", "entropy", "learning_rate")
FALLING = {"lr_schedule": "linear", "warmup_steps": 2, "decay_tokens": 6_000}  # a little more than they train
TWO_RANKS = {"num_ranks": 2}


@dataclass(frozen=True, slots=True)
class Course:
    """Everything that two runs have to have in common."""

    steps: dict[int, tuple[object, ...]]  # version, applied, figures of the trainer, as recorded last
    rollouts: dict[tuple[int, int], tuple[object, ...]]  # what was trained on: step, tokens, versions, reward
    trainer: dict[str, bytes]  # all tensors of the last checkpoint, of critic, reference and average too

    @classmethod
    def of(cls, layout: RunLayout) -> Course:
        steps = {}
        for path in event_paths(layout.rollouts):
            for event in read_events(path).events.values():
                if isinstance(event, Trained):
                    figures = {name: event.metrics[name].hex() for name in COMPARED if name in event.metrics}
                    steps[event.step] = (event.version, event.applied, figures)
        rollouts = {
            (row.group_id, row.sample_index): (
                row.consumed_step,
                row.token_ids.tolist(),
                row.versions.tolist(),
                row.reward,
                row.admitted_version,
            )
            for row in consumed(layout.rollouts)
        }
        files = sorted(layout.checkpoint(NUM_STEPS).glob("*/*.safetensors"))
        return cls(steps, rollouts, {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files})


def settings(name: str, max_staleness: int, **trainer: object) -> dict[str, Any]:
    return {
        "run": {"num_steps": NUM_STEPS, "deterministic": True},
        "data": {"task": "tests.ring.ring_rewards:very_slow_parity"},
        "admission": {"max_staleness": max_staleness},
        "generation": {"num_replicas": 2, "max_completion_tokens": 120},  # long enough to span updates, if it could
        "checkpoint": {"every_steps": 5},
        "trainer": {"token_budget": 512, **trainer},
    }


def two_datasets(lab: Lab) -> list[dict[str, object]]:
    """Of nine records and of five, of which every third prompt is of the second."""
    lines = lab.dataset.read_text().splitlines(keepends=True)
    tables = []
    for name, weight, some in (("nine", 2.0, lines[:9]), ("five", 1.0, lines[9:14])):
        path = lab.root / f"{name}.jsonl"
        path.write_text("".join(some))
        tables.append({"path": str(path), "task": "tests.ring.ring_rewards:very_slow_parity", "weight": weight})
    return tables


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def resumed_at(layout: RunLayout) -> int:
    """Return the step at which the newest attempt has begun, 0 for the first."""
    return json.loads(layout.attempts.read_text().splitlines()[-1])["resume_step"] or 0


def run_killed_three_times(lab: Lab, name: str, seed: int, **sections: Any) -> RunLayout:
    """At random instants: two roles, one role, and the launcher."""
    rng = random.Random(seed)
    layout, run_file = lab.layout(name), lab.run_file(name, **sections)
    first, second, third = sorted(rng.sample(range(1, NUM_STEPS - 3), 3))  # while there are steps to come
    with Run(run_file, layout) as run:
        run.wait_for_step(first)
        time.sleep(rng.random() / 4)
        run.kill_roles(*rng.choice([("controller",), ("trainer", "generator"), ("controller", "trainer", "generator")]))
        # A local run whose attempt has trained nothing before it fails is not tried again: somebody sits there.
        run.wait_until(lambda status: status["attempt"] == 1 and status["step"] >= max(second, resumed_at(layout) + 1))
        time.sleep(rng.random() / 4)
        run.role(rng.choice(["trainer", "controller"])).kill()
        run.wait_until(lambda status: status["attempt"] == 2 and status["step"] >= third)
        run.process.kill()
        run.process.wait()
    with Run(run_file, layout, "--resume") as run:
        assert run.finish() == 0, run.story()
        assert "went differently" not in run.story(), run.story()
    return layout


RULES = {"target_pass_rate": 0.5, "solved_rest_epochs": 1, "max_group_size": 9, "pass_chance": 0.99}
MINIBATCHES = {"proximal": "recompute", "minibatches": 3, "epochs": 2, "loss": "gmpo"}
RENEWED = {"kl_coefficient": 0.5, "reference_every": 4}  # checkpoints hold the reference
CRITIC = {"advantage": "gae", "advantage_normalization": "batch", "gae_lambda": 0.95}
TAUGHT = {"distillation_coefficient": 0.1, "kl_coefficient": 0.5, "kl_reference": "teacher"}
LONG = pytest.mark.long
SOAK = (pytest.mark.long, pytest.mark.soak)


@pytest.mark.parametrize(
    ("name", "max_staleness", "trainer", "algorithm"),
    [  # each staleness, backend and state that a checkpoint has to hold, in few runs
        pytest.param("alone", 1, {"backend": "reference"}, RENEWED),
        pytest.param("adapters", 1, {"backend": "reference", "ema_decay": 0.8}, {"kl_coefficient": 0.5}, marks=LONG),
        pytest.param(
            "megatron-dp2", 0, {"backend": "megatron", "ema_decay": 0.8, **TWO_RANKS}, MINIBATCHES, marks=LONG
        ),
        pytest.param(
            "critic", 2, {"backend": "deepspeed", "zero_stage": 2, **FALLING, **TWO_RANKS}, CRITIC, marks=LONG
        ),
        pytest.param("teacher", 1, {}, TAUGHT, marks=LONG),
        pytest.param("vllm", 1, {}, {}, marks=LONG),  # a bit that differs would show in every token
        pytest.param("curriculum", 1, {}, {"kl_coefficient": 0.5, "entropy_coefficient": 1e-3}, marks=SOAK),
    ],
)
def test_a_run_killed_three_times_ends_with_the_bits_of_one_that_was_not(
    lab: Lab, name: str, max_staleness: int, trainer: dict[str, object], algorithm: dict[str, object]
) -> None:
    sections = settings(name, max_staleness, **trainer) | ({"algorithm": algorithm} if algorithm else {})
    if algorithm in (CRITIC, TAUGHT):
        sections["admission"] |= {"active_sampling": False}
    if name == "adapters":
        sections["lora"] = {"rank": 4, "alpha": 8.0}
    if name == "teacher":
        sections["service"] = [{"name": "larger", "kind": "teacher", "path": str(lab.model), "replicas": 2}]
    if name == "vllm":
        sections["generation"] |= {"engine": "vllm", "num_replicas": 1}
    if name == "curriculum":  # epochs of a few prompts: who is drawn, and how often, hangs on what was sampled before
        sections |= {"data": two_datasets(lab), "curriculum": RULES}
    whole = Course.of(run_to_the_end(lab, f"{name}-whole", **sections))
    layout = run_killed_three_times(lab, f"{name}-killed", 1 + max_staleness, **sections)
    killed = Course.of(layout)
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4, may_be_more=name == "curriculum")
    assert sorted(whole.steps) == sorted(killed.steps) == list(range(NUM_STEPS))
    for step in whole.steps:
        assert whole.steps[step] == killed.steps[step], step
    assert whole.rollouts == killed.rollouts
    assert whole.trainer == killed.trainer
    for step, _, versions, _, admitted in whole.rollouts.values():
        assert set(versions) == {admitted} == {max(0, step - max_staleness)}
