"""A whole run whose teacher, judge and reward model are vLLM engines beside the policy's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ring.run_kit import make_lab, run_to_the_end, scalars
from tests.tiny_models import make_tiny_checkpoint, make_tiny_classifier

pytestmark = [pytest.mark.ring, pytest.mark.vllm, pytest.mark.long]


def test_a_run_learns_from_a_teacher_and_a_reward_model_that_it_has_started_itself(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    sizes = {"kv_cache_bytes": 16 << 20, "max_num_seqs": 8}
    layout = run_to_the_end(
        lab,
        "taught",
        run={"num_steps": 3},
        generation={"engine": "vllm", "kv_cache_bytes": 16 << 20},
        data={"path": str(lab.dataset), "task": "reward_model", "reference_field": "*"},
        algorithm={"advantage": "distillation"},
        admission={"active_sampling": False},
        service=[
            {"name": "larger", "kind": "teacher", "path": str(make_tiny_checkpoint(tmp_path / "t", seed=1)), **sizes},
            {"name": "scores", "kind": "reward", "path": str(make_tiny_classifier(tmp_path / "r")), **sizes},
        ],
    )
    status = json.loads((layout.root / "status.json").read_text())
    assert status["step"] == 3
    assert all(value > 0 for value in scalars(layout, "teacher/kl"))


def test_a_run_learns_from_a_teacher_without_vllm(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    teacher = make_tiny_checkpoint(tmp_path / "t", seed=1)
    layout = run_to_the_end(
        lab,
        "taught-otherwise",
        run={"num_steps": 3},
        generation={"engine": "transformers", "kv_cache_bytes": 16 << 20},
        algorithm={"advantage": "distillation"},
        admission={"active_sampling": False},
        service=[
            {"name": "larger", "kind": "teacher", "path": str(teacher), "kv_cache_bytes": 16 << 20, "max_num_seqs": 8}
        ],
    )
    assert json.loads((layout.root / "status.json").read_text())["step"] == 3
    assert all(value > 0 for value in scalars(layout, "teacher/kl"))
