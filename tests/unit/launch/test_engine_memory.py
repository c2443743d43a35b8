"""Engine, new weights while they arrive, and trainer: what does not fit a GPU is refused before one is asked for."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from launch.checks.memory_plan import GIB, legal_ranks, plan_engine, staging_bytes
from launch.checks.memory_verdict import judge_memory, refuse_unfit_ranks
from launch.plan.site_file import Site
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.errors import ConfigError
from tests.unit.launch.public_models import CONFIGS, LARGE_RUNS, NUM_PARAMETERS, ODD_CONFIGS, RECIPES

ROOT = Path(__file__).parents[3]
RUN_FILES = {
    **LARGE_RUNS,
    **RECIPES,
    "demo": "Qwen2.5-0.5B",  # in place of the demo's own, which is smaller by far
    "demo_tp2": "Qwen2.5-0.5B",
    "demo_deepspeed": "Qwen2.5-0.5B",
    "demo_tool": "Qwen2.5-0.5B",
    "reasoning_gym": "Qwen2.5-0.5B",
}
CARDS = (24, 80, 141)


def shape_of(model: str) -> ModelShape:
    shape = ModelShape.of(CONFIGS[model])
    assert shape is not None
    return shape


def run_of(name: str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.toml", overrides)


def refusal(config: Config, model: str, card: float) -> str:
    """Why generators with such GPUs cannot run; the trainer has all the memory it wants."""
    site = Site.model_validate(
        {"trainer": {"gpu": "t", "gpu_memory_gib": 1e6}, "generation": {"gpu": "g", "gpu_memory_gib": card}}
    )
    try:
        judge_memory(config, CONFIGS[model], shape_of(model), site, Path("site.toml"))
    except ConfigError as error:
        return str(error)
    return ""


def test_every_run_file_is_tried() -> None:
    files = [path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.toml")]
    assert {str(path.with_suffix("")) for path in files} == set(RUN_FILES)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_fits_or_is_refused_with_a_change_that_fits(name: str, card: int) -> None:
    """On the cards that it is for it fits; elsewhere the change is taken at its word."""
    model, said = RUN_FILES[name], refusal(run_of(name), RUN_FILES[name], card)
    if card >= 80 or "/" not in name:
        assert said == ""
    if said:
        changes = said.partition("would fit: ")[2].split()
        assert changes, said
        assert refusal(run_of(name, *changes), model, card) == ""


@pytest.mark.parametrize("name", RUN_FILES)
def test_what_is_accepted_fits_the_card(name: str) -> None:
    for card in range(4, 200, 4):
        config = run_of(name)
        need, share = plan_engine(config, shape_of(RUN_FILES[name])), config.generation.gpu_memory_utilization
        own = share * card if config.generation.kv_cache_bytes is None else card - need.beside / GIB
        fits = need.engine / GIB <= own and need.beside / GIB <= card - own + 1e-9
        assert (refusal(config, RUN_FILES[name], card) == "") == fits, card


def test_a_second_model_is_never_needed_on_a_gpu() -> None:
    """72B on four GPUs of 80 GB: the model alone is 135 GiB."""
    config, shape = run_of("large/qwen2.5-72b-tp8-pp4"), shape_of("Qwen2.5-72B")
    for staging in ("shadow", "paused", "auto"):
        changed = config.model_copy(update={"weights": config.weights.model_copy(update={"staging": staging})})
        assert staging_bytes(changed, shape) < 8 * GIB


def test_staging_grows_with_buckets_and_is_refused_where_the_share_leaves_no_room() -> None:
    name, model = "large/qwen2.5-7b-tp2", "Qwen2.5-7B"
    said = refusal(run_of(name, "generation.gpu_memory_utilization=0.99"), model, 80)
    assert "generation.gpu_memory_utilization=0.99: new weights need" in said
    small, large = (run_of(name, f"weights.bucket_bytes={size}") for size in (1 << 26, 1 << 30))
    assert staging_bytes(small, shape_of(model)) < staging_bytes(large, shape_of(model))


def test_a_cache_of_a_given_size_counts() -> None:
    said = refusal(run_of("large/qwen2.5-7b-tp2", f"generation.kv_cache_bytes={80 << 30}"), "Qwen2.5-7B", 80)
    assert f"generation.kv_cache_bytes={80 << 30}: engine (" in said


@pytest.mark.parametrize("name", [*CONFIGS, *ODD_CONFIGS])
def test_the_tensors_of_a_model_are_all_its_parameters(name: str) -> None:
    shape = ModelShape.of((CONFIGS | ODD_CONFIGS)[name])
    assert shape is not None
    sizes = [math.prod(each) for each in shape.tensors.values()]
    assert sum(sizes) == shape.num_parameters
    assert max(sizes) == shape.largest_tensor
    if name in NUM_PARAMETERS:
        assert sum(sizes) == NUM_PARAMETERS[name]


@pytest.mark.parametrize(
    ("model", "legal", "illegal"),
    [
        ("Qwen2.5-0.5B", (1, 2), (7, 14)),  # an MLP of 4864
        ("Qwen2.5-7B", (1, 2, 4), (7, 14, 28)),  # 4 key heads, an MLP of 18944
        ("Qwen2.5-32B", (1, 2, 4, 8), (5, 10, 20, 40)),
        ("Qwen3-30B-A3B", (1, 2, 4, 8, 16, 32), ()),  # key heads are copied
    ],
)
def test_an_engine_is_shared_out_only_as_vllm_can(model: str, legal: tuple[int, ...], illegal: tuple[int, ...]) -> None:
    assert legal_ranks(shape_of(model)) == legal
    for ranks in illegal:
        config = run_of("large/qwen2.5-7b-tp2", f"generation.tensor_parallel={ranks}")
        with pytest.raises(ConfigError, match=rf"tensor_parallel={ranks} .*; legal: {', '.join(map(str, legal))}$"):
            refuse_unfit_ranks(config, CONFIGS[model], shape_of(model))


def test_no_advice_is_an_engine_that_vllm_refuses() -> None:
    config = run_of("large/qwen2.5-7b-tp2", "generation.tensor_parallel=1")
    said = [refusal(config, "Qwen2.5-7B", card).partition("would fit: ")[2] for card in (8, 9, 12)]
    assert [re.findall(r"tensor_parallel=(\d+)", advice) for advice in said] == [[], ["4"], ["2"]]
