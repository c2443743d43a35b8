"""Host memory of a trainer rank: what it needs while it loads and trains, and whether its task may have as much."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from launch.checks.memory_plan import GIB, RankMemory, plan_memory
from launch.checks.memory_verdict import describe_memory, judge_host
from launch.cli import main
from launch.plan.site_file import Site
from rlhpc.config.rules import with_values
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests.unit.launch.public_models import CONFIGS, NUM_PARAMETERS
from tests.unit.launch.test_memory_plan import ROOT, check_words, config_of, plan_of, shape_of

SEVEN, LARGE = NUM_PARAMETERS["Qwen2.5-7B"], NUM_PARAMETERS["Qwen2.5-32B"]


def rank_of(model: str, backend: str, **trainer: Any) -> RankMemory:
    (rank,) = plan_of(model, backend, **trainer)
    assert isinstance(rank, RankMemory)
    return rank


@pytest.mark.parametrize(("model", "num"), [("Qwen2.5-7B", SEVEN), ("Qwen2.5-32B", LARGE)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_of_deepspeed_loads_the_whole_model_in_float32_and_once_more_in_bfloat16(
    model: str, num: int, stage: int
) -> None:
    rank = rank_of(model, "deepspeed", num_ranks=8, zero_stage=stage)
    assert rank.host == 6 * num > rank.host_training, "nothing is cut yet: ranks do not matter"
    assert rank_of(model, "deepspeed", num_ranks=8, zero_stage=stage, dtype="float32").host_loading == 4 * num
    assert "host, while loading: whole model" in describe_memory((rank,))


def test_what_deepspeed_offloads_comes_while_the_float32_model_is_still_there() -> None:
    rank = rank_of("Qwen2.5-7B", "deepspeed", num_ranks=2, zero_stage=3, optimizer_offload=True)
    assert rank.host_loading == 4 * SEVEN + rank.host_optimizer
    assert rank.host_optimizer == 16 * SEVEN // 2


def test_the_larger_of_loading_and_training_counts() -> None:
    rank = rank_of("Qwen2.5-7B", "deepspeed", num_ranks=1)
    assert rank.host == rank.host_training == 12 * SEVEN > rank.host_loading == 6 * SEVEN


def test_megatron_reads_slices_and_the_reference_a_whole_model() -> None:
    assert rank_of("Qwen2.5-7B", "megatron", num_ranks=8).host_loading == 0
    assert rank_of("Qwen2.5-7B", "reference").host_loading == 4 * SEVEN
    assert rank_of("Qwen2.5-7B", "reference", device="cpu").host_loading == 0, "they are its masters"


@pytest.mark.parametrize(
    ("backend", "whole", "parts", "copies"),
    [
        ("megatron", {"num_ranks": 2}, {"num_ranks": 2, "tensor_parallel": 2}, 1),
        ("deepspeed", {"num_ranks": 2, "zero_stage": 2}, {"num_ranks": 2, "zero_stage": 3}, 1),
        ("megatron", {"num_ranks": 2}, {"num_ranks": 2, "pipeline_parallel": 2}, 0),
    ],
)
def test_parts_of_the_largest_tensor_lie_beside_the_whole_while_they_are_joined_for_an_export(
    backend: str, whole: dict[str, Any], parts: dict[str, Any], copies: int
) -> None:
    one, cut = plan_of("Qwen2.5-7B", backend, **whole)[0], plan_of("Qwen2.5-7B", backend, **parts)[0]
    assert cut.export - one.export == copies * 2 * 152064 * 3584


# ------------------------------------------------------------------------------------------------------------- verdict


def test_the_sending_rank_keeps_what_it_sent_where_only_changes_travel() -> None:
    base = config_of(num_ranks=8, pipeline_parallel=2)

    def images(**weights: Any) -> list[int]:
        changed = with_values(base, {f"weights.{key}": value for key, value in weights.items()})
        return [rank.host_image for rank in plan_memory(changed, shape_of(CONFIGS["Qwen2.5-7B"]))]

    whole = 2 * NUM_PARAMETERS["Qwen2.5-7B"]
    assert images(transport="gloo") == [whole, 0]
    assert images() == images(transport="nccl") == images(transport="gloo", delta="off") == [0, 0]
    assert images(transport="gloo", staging="paused") == [0, 0]  # engines have nothing to apply a change to
    wider = plan_memory(with_values(base, {"weights.transport": "gloo"}), shape_of(CONFIGS["Qwen2.5-7B"]))[0]
    assert wider.host_training == whole + plan_memory(base, shape_of(CONFIGS["Qwen2.5-7B"]))[0].host_training
    assert "host: weights as sent" in describe_memory((wider,))


def said(given: int | None, model: str = "Qwen2.5-32B", backend: str = "deepspeed", **trainer: Any) -> list[str]:
    site = Site.model_validate({"trainer": {"gpu": "b200", "memory_gib_per_gpu": given}, "generation": {"gpu": "b200"}})
    return judge_host(config_of(backend, **trainer), shape_of(CONFIGS[model]), site, Path("site.toml"))


def test_host_memory_that_is_too_small_is_refused_with_key_value_and_what_is_needed() -> None:
    with pytest.raises(ConfigError) as refused:
        said(96, num_ranks=8, zero_stage=3)
    need = 6 * LARGE / GIB + 8
    assert str(refused.value) == (
        f"trainer.memory_gib_per_gpu=96 in site.toml: a rank of stage 0 needs {need:.1f} GiB of host memory while it "
        f"loads the whole model (estimate; 8 of them the process), {need - 96:.1f} GiB more; "
        "would fit: memory_gib_per_gpu=192"
    )
    assert f"rlhpc: {refused.value}\n" in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (fits,) = said(192, num_ranks=8, zero_stage=3)
    assert fits == f"host        192 GiB of trainer.memory_gib_per_gpu: {192 - need:.1f} GiB to spare (an estimate)"
    with pytest.raises(ConfigError, match="while it trains and saves"):
        said(96, backend="megatron", num_ranks=2, optimizer_offload=True)


def test_a_stage_in_the_middle_is_looked_at_too() -> None:
    config = config_of(num_ranks=4, pipeline_parallel=4)
    hosts = [rank.host for rank in plan_memory(config, ModelShape.of(CONFIGS["Qwen2.5-7B"]))]  # type: ignore[arg-type]
    fullest = hosts.index(max(hosts))
    with pytest.raises(ConfigError, match=f"a rank of stage {fullest} needs "):
        said(1, "Qwen2.5-7B", "megatron", num_ranks=4, pipeline_parallel=4)


def test_what_the_default_of_the_partition_must_be_is_said_where_much_is_needed() -> None:
    (warning,) = said(None, num_ranks=8, zero_stage=3)
    assert warning.startswith(
        "warning     trainer.memory_gib_per_gpu is not in site.toml: the partition's default must be 192 GiB a GPU; "
    )
    assert said(None, "Qwen2.5-0.5B", "megatron", num_ranks=8) == []
    (whole_node,) = said(0, num_ranks=8, zero_stage=3)
    assert whole_node.startswith(
        "host        trainer.memory_gib_per_gpu=0, all of a node: a rank of stage 0 needs 191.1"
    )


def test_a_small_model_is_not_refused_for_a_guess() -> None:
    (line,) = said(1, "Qwen2.5-0.5B", "megatron", num_ranks=8)
    assert line.startswith(
        "host        1 GiB of trainer.memory_gib_per_gpu: not judged: a rank of stage 0 needs 8.7 GiB"
    )
    with pytest.raises(ConfigError, match="would fit: memory_gib_per_gpu=11"):
        said(1, "Qwen2.5-0.5B", "deepspeed", num_ranks=8)


def test_a_large_model_is_warned_of_for_the_guess_and_refused_for_what_is_counted() -> None:
    need = 6 * LARGE / GIB
    (warning,) = said(math.ceil(need), num_ranks=8, zero_stage=3)
    assert warning.startswith("warning     trainer.memory_gib_per_gpu=")
    assert warning.endswith("; would fit: 192")
    with pytest.raises(ConfigError, match="would fit: memory_gib_per_gpu=192"):
        said(math.floor(need), num_ranks=8, zero_stage=3)


def test_check_refuses_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[trainer]\ngpu = "h100"\nmemory_gib_per_gpu = 16\n[generation]\ngpu = "h100"\n')
    words = check_words("large/qwen2.5-32b-tp4-pp2", tmp_path)
    assert main([*words[:-1], str(site)]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"trainer\.memory_gib_per_gpu=16 in .*: a rank of stage \d needs [\d.]+ GiB", line)
