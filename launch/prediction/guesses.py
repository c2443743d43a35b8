"""Rates from data sheets, for users without measurements.

Input: names of GPUs, a model's config.json, Config.  Output: Rates, every figure of which is marked as a guess.
Peak rates are the vendors' (NVIDIA data sheets: dense bfloat16, for V100 float16; memory bandwidth of the SXM form
where there are two); the shares of them that software reaches are round numbers that nobody measured here.

Legend: Ψ parameters, A parameters that a token passes, t engine ranks, b bytes of model.dtype.
    engine_step_s     Ψ·b / t read from memory, and what every step costs besides
    engine_sample_s   the KV cache of half a rollout read from memory, and 2·A operations
    trainer_pflop_s   a backward pass is two forward passes, recomputed activations another one (Narayanan et al. 2021,
                      arXiv:2104.04473); shared out over tensor, pipeline and context ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from launch.checks.memory.plan import ELEMENT_BYTES
from launch.prediction.rates import GUESS, Figure, Rates
from launch.prediction.ring import PFLOP
from rlhpc.config import Config
from rlhpc.model_shape import ModelShape
from rlhpc.packing.cost import FlopCost

_TFLOPS_AND_GB_S = {
    "a100-40": (312, 1555),
    "a100-80": (312, 2039),
    "h100": (989, 3350),
    "h100-94": (835, 3900),
    "h200": (989, 4800),
    "b200": (2250, 8000),
    "gh200": (989, 4000),
    "l4": (121, 300),
    "l40s": (362, 864),
    "a40": (150, 696),
    "a6000": (155, 768),
    "rtx4090": (165, 1008),
    "v100-16": (125, 900),
    "v100-32": (125, 900),
}
_OF_BANDWIDTH, _OF_PEAK_SAMPLING, _OF_PEAK_TRAINING = 0.6, 0.5, 0.4
_EVERY_STEP_S = 0.004  # of an engine: scheduling, launches, sampling
_LINK_BYTES_S = 5e9  # weights from trainer to engines
_COPY_BYTES_S = 5e9  # a rank's state from its GPU to host memory: training goes on while it is written to disk
_FIXED_S = {
    "judge_s": 0.1,
    "trainer_step_s": 0.2,
    "between_steps_s": 0.1,
    "pause_s": 0.2,
    "save_s": 5.0,
    "start_s": 300.0,
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of one GPU."""

    name: str
    flops: float
    bytes_s: float


def gpu_named(name: str | None) -> Gpu | None:
    """The GPU of this name; None: it is not in the table."""
    if name not in _TFLOPS_AND_GB_S:
        return None
    tflops, gb_s = _TFLOPS_AND_GB_S[name]
    return Gpu(name, tflops * 1e12, gb_s * 1e9)


def fixed_guesses() -> dict[str, Figure]:
    """Rates that do not depend on the GPU."""
    return {name: Figure(value, f"{GUESS}: {value:g} s anywhere") for name, value in _FIXED_S.items()}


def guessed(
    config: Config, model: Mapping[str, object], shape: ModelShape, trainer: Gpu, engine: Gpu, mean_tokens: float
) -> dict[str, Figure]:
    """All rates, by name.  mean_tokens: of a completion.  Raises ConfigError as FlopCost.from_hf_config."""
    b, ranks, layout = ELEMENT_BYTES[config.model.dtype], config.generation.tensor_parallel, config.trainer
    cost = FlopCost.from_hf_config(model)
    weights = b * shape.num_parameters
    read_s, flops = ranks * engine.bytes_s * _OF_BANDWIDTH, ranks * engine.flops * _OF_PEAK_SAMPLING
    cache = 2 * b * shape.num_layers * shape.num_key_heads * shape.head_size * (
        config.generation.max_prompt_tokens / 2 + mean_tokens / 2
    )  # fmt: skip
    cache_read_s = read_s * min(1.0, shape.num_key_heads / ranks)  # of more ranks than key heads, several read the same
    passes = 4 if layout.recompute_activations == "full" else 3
    cut = layout.num_ranks / layout.data_parallel
    found = {
        "engine_step_s": (_EVERY_STEP_S + weights / read_s, engine),
        "engine_sample_s": (cache / cache_read_s + cost.linear / flops, engine),
        "prefill_token_s": (cost.linear / flops, engine),
        "trainer_pflop_s": (passes * PFLOP / (cut * trainer.flops * _OF_PEAK_TRAINING), trainer),
        "publish_s": (0.2 + weights / _LINK_BYTES_S, trainer),
        "live_s": (0.3 + weights / ranks / _LINK_BYTES_S, engine),
        "save_s": (0.5 + 12 * shape.num_parameters / layout.num_ranks / _COPY_BYTES_S, trainer),
    }
    sources = {name: Figure(value, f"{GUESS}: data sheet of {gpu.name}") for name, (value, gpu) in found.items()}
    return fixed_guesses() | sources


NAMES = tuple(field.name for field in fields(Rates))
