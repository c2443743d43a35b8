"""Whole runs on records that nobody has converted: verl's Parquet, and problems that a library makes."""

from __future__ import annotations

import shutil

import pyarrow
import pyarrow.parquet
import pytest

from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import Lab, run_to_the_end

pytestmark = pytest.mark.ring

CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@pytest.mark.long
def test_twenty_steps_on_verls_parquet_and_on_problems_that_a_library_makes(lab: Lab) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    model = lab.root / "chat-model"
    shutil.copytree(lab.model, model)
    (model / "chat_template.jinja").write_text(CHAT)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n} + {n} ="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {"index": n, "split": "train"},
        }
        for n in range(100)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), lab.root / "verl.parquet")
    parquet = {
        "path": str(lab.root / "verl.parquet"),
        "prompt_field": "prompt",
        "reference_field": "reward_model.ground_truth",
        "task": "tests.ring.ring_rewards:parity",
    }
    made = {"source": "reasoning_gym:chain_sum", "size": 50, "levels": [0, 1]}
    layout = run_to_the_end(
        lab,
        "unconverted",
        run={"num_steps": 20},
        model={"path": str(model)},
        data=[parquet, made],
        generation={"max_prompt_tokens": 120},
        admission={"active_sampling": False},  # random text solves no problem
    )
    assert_full_batches_trained_once(layout.rollouts, 20, 4, 4)
    tasks = [rollout.task for rollout in consumed(layout.rollouts)]
    assert {task: tasks.count(task) for task in set(tasks)} == {"reasoning_gym": 160, parquet["task"]: 160}
    assert not [rollout for rollout in consumed(layout.rollouts) if rollout.verdict == "verifier_error"]
