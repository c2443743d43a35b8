"""Recipes run: copied, a tiny model and machine put in their place, all that they learn by left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.commands.recipes import copy_recipe
from rlhpc.config.file import load_config, read_resolved
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Run, make_lab, rlhpc, summary_of
from tests.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.ring
GROUPS, GROUP_SIZE, STEPS = 8, 4, 3
SMALL = {
    "run.num_steps": STEPS, "model.dtype": "float32",
    "data.task": "tests.ring.ring_rewards:parity", "data.prompt_template": "{prompt}",
    "data.use_chat_template": "false",
    "generation.engine": "scripted", "generation.num_replicas": 1, "generation.tensor_parallel": 1,
    "generation.max_prompt_tokens": 12, "generation.max_completion_tokens": 24, "generation.max_num_seqs": 16,
    "admission.groups_per_step": GROUPS, "admission.group_size": GROUP_SIZE,
    "rewards.num_replicas": 1, "rewards.workers_per_replica": 1,
    "trainer.num_ranks": 1, "trainer.tensor_parallel": 1, "trainer.pipeline_parallel": 1, "trainer.context_parallel": 1,
    "trainer.expert_parallel": 1, "trainer.device": "cpu", "trainer.token_budget": 256,
    "trainer.overlap_grad_reduce": "false", "trainer.sequence_parallel": "false", "trainer.warmup_steps": 1,
    "weights.bucket_bytes": 1 << 20, "checkpoint.every_steps": 3,
    "transport.kind": "ipc",
}  # fmt: skip
OF_A_RECIPE = {
    "dapo-32b": {"shaping.overlong_tokens": 8},
}
LEARNT_BY = ("algorithm", "shaping")


@pytest.mark.long
@pytest.mark.parametrize("name", ["areal-1.5b", "dapo-32b", "gspo-30b-a3b"])
def test_a_recipe_trains_a_tiny_model(name: str, tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    model = make_tiny_checkpoint(tmp_path / "moe", family="qwen3_moe") if "a3b" in name else lab.model
    recipe, layout = copy_recipe(name, tmp_path), lab.layout(name)
    places = {"run.directory": layout.root, "model.path": model, "data.path": lab.dataset}
    values = SMALL | OF_A_RECIPE.get(name, {}) | places
    with Run(recipe, layout, *(f"{key}={value}" for key, value in values.items())) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    told, done = load_config(recipe), read_resolved(layout)[0]
    for section in LEARNT_BY:
        changed = {key.partition(".")[2] for key in values if key.startswith(f"{section}.")}
        kept = getattr(told, section).model_dump(exclude=changed)
        assert getattr(done, section).model_dump(exclude=changed) == kept
    assert summary_of(layout)["steps"] == STEPS
    assert_full_batches_trained_once(layout.rollouts, STEPS, GROUPS, GROUP_SIZE)
    audited = rlhpc("audit", str(layout.root))
    assert audited.returncode == 0, audited.stdout
