"""The memory report of `rlhpc check`: a table, and whether the layout fits the GPUs of a site.

Input: a Config, a ModelShape and a site file.  Output: lines, or a ConfigError that names a change that would fit.
Every number is an estimate (plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launch.checks.memory.device_verdict import AN_ESTIMATE, judge_devices
from launch.checks.memory.engine import EngineMemory, plan_engine
from launch.checks.memory.engine_verdict import refuse_engine
from launch.checks.memory.host_verdict import judge_host
from launch.checks.memory.plan import GIB, RankMemory, fullest, plan_memory
from launch.checks.memory.trainer_verdict import refuse_trainer
from launch.plan.gpu_map import GpuMap
from launch.plan.site_file import Site, load_site
from rlhpc.config import Config
from rlhpc.model_shape import ModelShape

NOBODY = GpuMap()
NOTHING_KNOWN: Mapping[str, float] = MappingProxyType({})

_ROWS = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("optimizer", "optimiser"),
    ("buckets", "ZeRO buckets"),
    ("reference", "reference"),
    ("average", "average of weights"),
    ("activations", "in a step: activations"),
    ("head", "in a step: logits, head"),
    ("optimizer_scratch", "in the update: gradients again"),
    ("export", "in an export: buckets"),
    ("allowance", "CUDA, NCCL, fragments"),
    ("peak", "fullest moment"),
    ("host_loading", "host, while loading: whole model"),
    ("host_optimizer", "host: offload"),
    ("host_snapshot", "host: checkpoint"),
    ("host_reference", "host: reference"),
    ("host_average", "host: average of weights"),
    ("host_image", "host: weights as sent"),
)


def memory_report(
    config: Config,
    model: Mapping[str, Any],
    shape: ModelShape | None,
    site_file: Path | None,
    gpus: GpuMap = NOBODY,
    memory_gib: Mapping[str, float] = NOTHING_KNOWN,
) -> str:
    """What `rlhpc check` says of memory.  Raises ConfigError: no legal site file, GPUs or host memory too small.

    gpus, memory_gib: who gets which GPU of this machine, and how large each is; they count where no site is given.
    """
    site = load_site(site_file) if site_file else None
    if shape is None:
        return f"memory      not known for model_type={model.get('model_type')!r}"
    plan, engine = plan_memory(config, shape), plan_engine(config, shape)
    if site is None and not gpus.devices:  # there is no GPU here
        return (
            f"memory      on GPUs about {fullest(plan).peak / GIB:.1f} GiB a rank and {engine.total / GIB:.1f} GiB an "
            "engine; --site SITE.toml shows the estimate and judges it"
        )
    table = f"{describe_memory(plan)}\n{describe_engine(engine)}"
    if site is None or site_file is None:
        return f"{table}\n{judge_devices(config, model, shape, gpus, memory_gib)}"
    if config.trainer.device == "cpu":
        return f"{table}\nfits        not judged: trainer.device='cpu'"
    fits = judge_memory(config, model, shape, site, site_file)
    return "\n".join([table, fits, *judge_host(config, shape, site, site_file)])


def describe_memory(plan: tuple[RankMemory, ...]) -> str:
    """A table with a column for the first stage, the last, and the fullest where it is another."""
    stages = sorted({0, fullest(plan).stage, len(plan) - 1})
    lines = ["memory      estimate, GiB a rank    " + "".join(f"{f'stage {stage}':>10}" for stage in stages)]
    for name, text in _ROWS:
        values = [getattr(plan[stage], name) for stage in stages]
        if any(values):
            lines.append(f"  {text:<34}" + "".join(f"{value / GIB:>10.2f}" for value in values))
    return "\n".join(lines)


def describe_engine(need: EngineMemory) -> str:
    """The same for one GPU of a generator."""
    rows = {
        "weights": need.weights,
        "KV cache, at least": need.kv_cache,
        "new weights, arriving": need.beside,
        "CUDA, activations": need.allowance,
        "all, at least": need.total,
    }
    lines = [f"  {text:<34}{value / GIB:>10.2f}" for text, value in rows.items()]
    return "\n".join(["engine      estimate, GiB a GPU", *lines])


def judge_memory(config: Config, model: Mapping[str, Any], shape: ModelShape, site: Site, source: Path) -> str:
    """The line that says by how much it fits.  Raises ConfigError if trainer or engine cannot."""
    if config.generation.engine == "vllm":
        gpu = f"generation.gpu={site.generation.gpu!r} ({site.generation.memory_gib:g} GiB) in {source}"
        refuse_engine(config, shape, site.generation.memory_gib, gpu)
    limit = site.trainer.memory_gib
    gpu = f"trainer.gpu={site.trainer.gpu!r}"
    rank = fullest(plan_memory(config, shape))
    refuse_trainer(config, model, shape, rank, limit, f"{gpu} in {source}")
    return f"fits        {limit:g} GiB of {gpu}: {limit - rank.peak / GIB:.1f} GiB to spare ({AN_ESTIMATE})"
