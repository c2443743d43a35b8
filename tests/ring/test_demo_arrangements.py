"""The demo's run files in a short form: every trainer and layout that they show, with a real engine, to the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from rlhpc.base.run_directory import RunLayout
from rlhpc.training.checkpoint_directory import latest_complete
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import ROOT, Lab, Run, rlhpc, summary_of

pytestmark = [pytest.mark.ring, pytest.mark.vllm]
NUM_STEPS, GROUPS, GROUP_SIZE = 4, 4, 4


def run_in_short(lab: Lab, name: str) -> RunLayout:
    """A run file of configs/ on the lab's model, with a reward that a model which cannot add has spread in."""
    layout = lab.layout(name)
    words = {
        "run.directory": layout.root,
        "run.num_steps": NUM_STEPS,
        "model.path": lab.model,
        "data.path": lab.dataset,
        "data.task": "tests.ring.ring_rewards:parity",
        "admission.groups_per_step": GROUPS,
        "admission.group_size": GROUP_SIZE,
        "generation.max_num_seqs": 16,
        "trainer.warmup_steps": 0,
    }
    copy = Path(shutil.copy(ROOT / "configs" / f"{name}.toml", lab.root))
    with Run(copy, layout, *(f"{key}={value}" for key, value in words.items())) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    return layout


def names_of(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param("demo", marks=pytest.mark.soak), "demo_tp2", "demo_deepspeed", "demo_lora"]
)
def test_a_run_file_of_the_demo_trains_and_exports_with_its_trainer(lab: Lab, name: str) -> None:
    layout = run_in_short(lab, name)
    assert summary_of(layout)["steps"] == NUM_STEPS
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)
    newest = latest_complete(layout.checkpoints)
    assert newest is not None
    assert newest[0] == NUM_STEPS
    exported = layout.root / "exported"
    answer = rlhpc("export", str(layout.root), str(exported))
    assert answer.returncode == 0, answer.stderr
    assert names_of(exported) == names_of(lab.model)
