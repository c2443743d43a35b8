"""Layouts of run files for published models, tensor by tensor, without memory: what ranks hold, what leaves them.

Everything is on the meta device: names and shapes, no numbers.  Megatron's own modules are built for ranks of the real
world size; its process groups are torch's "fake" backend, which connects to nobody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from launch.checks.memory_plan import bucket_sizes
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.models.shape import ModelShape, ParallelLayout
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.hf_model import on_disk
from rlhpc.training.megatron.hf_layout import ParameterMap, exported, fill_local, parameter_maps, tensor_specs
from rlhpc.training.megatron.hf_weights import sharded_weights
from rlhpc.weights.buckets import buckets_of, make_manifest, manifest_bytes
from tests.unit.launch.public_models import CONFIGS, LARGE_RUNS, RECIPES
from tests.unit.training.rank_processes import run_ranks

ROOT = Path(__file__).parents[4]
META = torch.device("meta")
RUNS = LARGE_RUNS | RECIPES


def run_of(name: str) -> tuple[Config, Any, ParallelLayout]:
    """Run file, transformers configuration of its model, and layout."""
    config = load_config(ROOT / "configs" / f"{name}.toml")
    numbers = dict(CONFIGS[RUNS[name]])
    return config, AutoConfig.for_model(numbers.pop("model_type"), **numbers), ParallelLayout.of(config.trainer)


def maps_of(name: str) -> tuple[ParameterMap, ...]:
    _, model, layout = run_of(name)
    return parameter_maps(model, layout)


def expected_by_engines(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an HF checkpoint of this model, which is what engines read."""
    with META:
        module = AutoModelForCausalLM.from_config(run_of(name)[1])
    specs = (TensorSpec(key, "bfloat16", tuple(tensor.shape)) for key, tensor in module.named_parameters())
    return {each.name: each.shape for spec in specs for each in on_disk(spec)}


def test_every_run_file_is_looked_at() -> None:
    files = (ROOT / "configs").glob("*/*.toml")
    assert {str(path.relative_to(ROOT / "configs").with_suffix("")) for path in files} == set(RUNS) - {"gsm8k"}


@pytest.mark.parametrize("name", RUNS)
def test_every_tensor_that_an_engine_expects_leaves_the_trainer_and_no_other(name: str) -> None:
    config, model, layout = run_of(name)
    items = sharded_weights(model, layout, torch.bfloat16)
    left: dict[str, tuple[int, ...]] = {}
    for item in items:
        shards = [torch.empty(shard.num_elements, dtype=torch.bfloat16, device=META) for shard in item.shards]
        for spec, tensor in zip(item.specs, item.join(shards), strict=True):
            assert (spec.shape, spec.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert spec.name not in left
            left[spec.name] = tuple(tensor.shape)
        assert all(0 <= shard.rank < config.trainer.num_ranks for shard in item.shards)
    assert left == expected_by_engines(name)


@pytest.mark.parametrize("name", RUNS)
def test_shards_are_filled_from_the_checkpoint_and_every_number_of_it_is_read_once(name: str) -> None:
    """Rows and columns counted: slabs of all shards of a parameter together are its tensors, nothing twice."""
    for place in exported(maps_of(name)):
        shapes = {tensor.name: tensor.shape for tensor in place.tensors}
        read = dict.fromkeys(shapes, 0)

        def reader(name: str, index: tuple[slice, ...], shapes: Any = shapes, read: Any = read) -> Tensor:
            part = torch.empty(shapes[name], device=META)[index]
            read[name] += part.numel()
            return part

        for shard in range(place.num_shards):
            fill_local(place, reader, shard, torch.empty(place.shard_shape, device=META))
        assert read == {tensor.name: torch.Size(tensor.shape).numel() for tensor in place.tensors}


@pytest.mark.parametrize("name", RUNS)
def test_the_memory_plan_counts_buckets_as_large_as_those_that_are_sent(name: str) -> None:
    """It knows sizes and not the order within a layer, so that a border may lie a tensor further."""
    config, _, _ = run_of(name)
    manifest = make_manifest(1, 1, tensor_specs(maps_of(name), "bfloat16"), config.weights.bucket_bytes)
    shape = ModelShape.of(CONFIGS[RUNS[name]])
    assert shape is not None
    assert manifest_bytes(manifest) == 2 * shape.num_parameters
    sent, counted = [bucket.num_bytes for bucket in buckets_of(manifest)], bucket_sizes(config, shape)
    assert (len(sent), sum(sent)) == (len(counted), sum(counted))
    assert counted == pytest.approx(sent, rel=1e-3)


@pytest.mark.vllm
@pytest.mark.starts
@pytest.mark.long
def test_vllms_own_models_take_every_tensor_and_are_whole_then() -> None:
    """In a process of its own; the engine's ranks cut what they take by vLLM's own rules."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.training.megatron.engine_on_meta", *LARGE_RUNS],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["large/')]
    assert [name for name, *_ in answers] == list(LARGE_RUNS)
    for name, missing, missing_without_the_last in answers:
        assert missing == [], name
        assert len(missing_without_the_last) == 1, name


# ------------------------------------------------------------------------------------------------ Megatron's own ranks


def held_by(rank: int, maps: tuple[ParameterMap, ...], layout: ParallelLayout) -> dict[str, tuple[int, ...]]:
    """By the plan: parameters of a rank and their shapes.  Tensor ranks are the fastest axis, stages the slowest."""
    in_stage = layout.num_ranks // layout.pipeline
    stage, place_in_stage = divmod(rank, in_stage)
    return {
        place.name: place.shard_shape
        for place in maps
        if place.ranks[0] // in_stage == stage
        and (".local_experts." not in place.name or place.ranks[0] % in_stage == place_in_stage % layout.expert)
    }


def ranks_to_build(layout: ParallelLayout) -> list[int]:
    """Of every stage the first and the last rank."""
    in_stage = layout.num_ranks // layout.pipeline
    return [stage * in_stage + place for stage in range(layout.pipeline) for place in (0, in_stage - 1)]


def build(rank: int, world_size: int, names: list[str]) -> dict[str, int]:
    """In a process of its own: build Megatron's modules as these ranks do.  Returns how many of each run."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlhpc.training.megatron.backend import close_groups, open_groups
    from rlhpc.training.megatron.hf_weights import parameters_of_rank
    from rlhpc.training.megatron.model import build_chunks
    from rlhpc.training.megatron.model_config import transformer_config

    built: dict[str, int] = {}
    for name in names:
        config, model, layout = run_of(name)
        maps = parameter_maps(model, layout)
        for each in ranks_to_build(layout):
            if distributed.is_initialized():
                distributed.destroy_process_group()
            distributed.init_process_group("fake", store=FakeStore(), rank=each, world_size=layout.num_ranks)
            open_groups(layout, rank=each, device=torch.device("cpu"))
            with META:
                settings = transformer_config(model, config.trainer, torch.bfloat16)
                found = parameters_of_rank(build_chunks(model, settings, config.trainer, META), model, layout)
            assert all(parameter.is_meta for parameter in found.values())
            assert {key: tuple(p.shape) for key, p in found.items()} == held_by(each, maps, layout), (name, each)
            built[name] = built.get(name, 0) + len(found)
            close_groups()
    return built


@pytest.mark.starts
def test_megatron_builds_on_every_kind_of_rank_what_the_plan_says(tmp_path: Path) -> None:
    (built,) = run_ranks(1, build, tmp_path, list(RUNS), timeout_s=600)
    assert set(built) == set(RUNS)
