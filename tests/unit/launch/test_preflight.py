"""What `rlhpc check` finds out of a large run without a GPU, torch, or the weights themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.checks.preflight import preflight
from launch.plan.gpu_map import GpuMap
from launch.plan.processes import describe_plan
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import with_values
from rlhpc.protocol.errors import ConfigError
from tests.ring.run_kit import ROOT, command_environment
from tests.unit.launch.public_models import CONFIGS, NUM_PARAMETERS, make_model_directory
from tests.unit.launch.test_memory_plan import EXAMPLE_SITE, check_words, config_of


def test_preflight_knows_the_shape_of_the_model(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model", CONFIGS["Qwen2.5-7B"])
    (tmp_path / "train.jsonl").write_text('{"question": "add", "answer": "2"}\n')
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    findings = preflight(load_config(ROOT / "configs" / "large" / "qwen2.5-7b-tp2.toml", paths))
    assert findings.shape is not None
    assert findings.shape.num_parameters == NUM_PARAMETERS["Qwen2.5-7B"]
    assert (findings.model_type, findings.max_positions, findings.datasets[0].num_records) == ("qwen2", 32768, 1)


def test_a_token_beyond_the_model_is_found_in_any_record(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model", CONFIGS["Qwen2.5-7B"])
    document = json.loads((model / "tokenizer.json").read_text())
    document["model"]["vocab"]["new"] = 200_000
    (model / "tokenizer.json").write_text(json.dumps(document))
    rows = [{"question": text, "answer": "2"} for text in ("add", "add new", "new")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    with pytest.raises(ConfigError, match=r"the prompt of .*train\.jsonl:2 has token 200000, which was added"):
        preflight(load_config(ROOT / "configs" / "large" / "qwen2.5-7b-tp2.toml", paths), roles_run_here=False)


@pytest.mark.starts
def test_a_large_run_is_checked_without_loading_torch_or_megatron(tmp_path: Path) -> None:
    code = (
        "import sys; from launch.cli import main; status = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'megatron.core', 'deepspeed', 'vllm'} & set(sys.modules);"
        "sys.exit(status)"
    )
    words = [sys.executable, "-c", code, *check_words("large/qwen2.5-72b-tp8-pp4", tmp_path)]
    assert str(EXAMPLE_SITE) in words
    done = subprocess.run(words, capture_output=True, text=True, env=command_environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fits        79.1 GiB of trainer.gpu='h100'" in done.stdout


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"backend": "reference"}, "reference, 1 rank;"),
        ({"backend": "reference", "num_ranks": 2}, "reference, 2 ranks: data 2;"),
        ({"backend": "deepspeed", "num_ranks": 2, "zero_stage": 3}, "deepspeed, 2 ranks: data 2, ZeRO-3;"),
        (
            {"num_ranks": 8, "tensor_parallel": 2, "sequence_parallel": True},
            "megatron, 8 ranks: tensor 2 × data 4, sequence-parallel;",
        ),
        (
            {"num_ranks": 16, "context_parallel": 2, "pipeline_parallel": 4, "chunks_per_stage": 2},
            "megatron, 16 ranks: context 2 × data 2 × pipeline 4, 2 blocks of layers a stage;",
        ),
        ({"num_ranks": 8, "expert_parallel": 8}, "megatron, 8 ranks: data 8, experts over 8;"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_plan_says_how_the_trainer_is_laid_out(trainer: dict[str, Any], words: str) -> None:
    config = config_of(**trainer)
    assert f"trainer     {words} 8192 tokens" in describe_plan(config, RunLayout(Path("/run")), GpuMap())


def test_the_plan_names_a_critic_where_there_is_one() -> None:
    config = config_of()
    assert "critic" not in describe_plan(config, RunLayout(Path("/run")), GpuMap())
    values = {"algorithm.advantage": "gae", "critic.path": Path("/models/judge"), "critic.head_start_steps": 5}
    plan = describe_plan(with_values(config, values), RunLayout(Path("/run")), GpuMap())
    assert "critic      beside it, from /models/judge; learning rate 1e-05, alone for 5 steps" in plan
