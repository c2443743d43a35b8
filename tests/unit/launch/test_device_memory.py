"""What all processes on one GPU take together is judged, share by share, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.checks.memory_plan import GIB, plan_engine, plan_memory
from launch.checks.memory_verdict import judge_devices
from launch.cli import main
from launch.doctor import gpus
from launch.doctor.gpus import Gpu, memory_of, parse_listing, parse_memory
from launch.plan.gpu_map import GpuMap, VisibleGpus, map_gpus
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.errors import ConfigError
from tests.unit.launch.public_models import CONFIGS, make_model_directory

ROOT = Path(__file__).parents[3]
MODEL = "Qwen2.5-0.5B"
SHARED = ("trainer.num_ranks=1", "generation.num_replicas=1")


def recipe(*overrides: str, kv_gib: float | None = 4) -> Config:
    cache = [] if kv_gib is None else [f"generation.kv_cache_bytes={int(kv_gib * GIB)}"]
    return load_config(ROOT / "configs" / "gsm8k.toml", [*SHARED, *cache, *overrides])


def shape_of(model: str = MODEL) -> ModelShape:
    shape = ModelShape.of(CONFIGS[model])
    assert shape is not None
    return shape


def verdict(config: Config, card: float, *, words: tuple[str, ...] = ("0",), model: str = MODEL) -> str:
    """What `rlhpc check` says on a machine whose GPUs have `card` GiB each.  Raises ConfigError."""
    visible = VisibleGpus(words, ",".join(words))
    return judge_devices(config, CONFIGS[model], shape_of(model), map_gpus(config, visible), dict.fromkeys(words, card))


def refusal(config: Config, card: float, *, words: tuple[str, ...] = ("0",), model: str = MODEL) -> str:
    try:
        verdict(config, card, words=words, model=model)
    except ConfigError as error:
        return str(error)
    return ""


def together_gib(config: Config, model: str = MODEL) -> float:
    return (plan_memory(config, shape_of(model))[0].peak + plan_engine(config, shape_of(model)).total) / GIB


def test_a_trainer_and_an_engine_that_fit_alone_and_not_together_are_refused() -> None:
    config = recipe("trainer.token_budget=4096", kv_gib=12)
    rank, engine = plan_memory(config, shape_of())[0].peak / GIB, plan_engine(config, shape_of()).total / GIB
    card = max(rank, engine) + 1
    assert refusal(config, card, words=("0", "1")) == ""  # each has a GPU of its own
    said = refusal(config, card)
    assert f"{rank + engine:.1f} GiB" in said
    assert f"{rank + engine - card:.1f} GiB more than" in said


def test_every_share_is_named_and_they_add_up() -> None:
    said = refusal(recipe(), 8)
    shares = dict(re.findall(r"(trainer-0|generation|generator-0) ([\d.]+) \(", said))
    assert set(shares) == {"trainer-0", "generator-0"}
    parts = [float(number) for number in re.findall(r"[a-z] ([\d.]+)(?=[,)])", said)]
    assert sum(parts) == pytest.approx(together_gib(recipe()), abs=0.1 * len(parts))
    for part in ("weights", "KV cache", "new weights while they arrive", "optimiser", "a step", "CUDA"):
        assert part in said


@pytest.mark.parametrize("kv_gib", [1, 4, 16, 64])
@pytest.mark.parametrize("card", [4, 8, 12, 16, 23.5, 44, 79])
@pytest.mark.parametrize("model", ["Qwen2.5-0.5B", "Qwen2.5-7B"])
def test_the_values_that_are_said_to_fit_do(model: str, card: float, kv_gib: float) -> None:
    """What is accepted fits by the sum; what is refused is accepted with the change, taken at its word."""
    config = recipe(kv_gib=kv_gib)
    said = refusal(config, card, model=model)
    assert (said == "") == (together_gib(config, model) <= card)
    if "would fit: " in said:
        changes = re.findall(r"[a-z]+\.\w+=\S+", said.partition("would fit: ")[2])
        assert changes
        better = recipe(*changes, kv_gib=None if any("kv_cache" in change for change in changes) else kv_gib)
        assert refusal(better, card, model=model) == ""
        assert better.generation.kv_cache_bytes is not None
    elif said:
        assert "no setting that was tried fits" in said


def test_the_cache_is_what_shrinks_first_and_never_below_one_sequence() -> None:
    said = refusal(recipe(kv_gib=64), 40)
    (value,) = re.findall(r"would fit: generation\.kv_cache_bytes=(\d+) ", said)
    assert 0 <= 40 - together_gib(recipe(f"generation.kv_cache_bytes={value}", kv_gib=None)) < 0.1
    least = together_gib(recipe(kv_gib=1)) - 1 + plan_engine(recipe(kv_gib=None), shape_of()).kv_cache / GIB
    assert "would fit: trainer." in refusal(recipe(kv_gib=64), least - 2)


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_least_that_is_enough() -> None:
    said = refusal(recipe(kv_gib=0.001), 79)
    (value,) = re.findall(r"cannot hold one sequence .* legal: (\d+) or more", said)
    assert refusal(recipe(f"generation.kv_cache_bytes={value}", kv_gib=None), 79) == ""


def test_two_engines_on_one_gpu_count_twice() -> None:
    """No map of ours puts them there; the sum does not depend on who made the map."""
    config, shape = recipe(kv_gib=4), shape_of()
    one = plan_engine(config, shape).total / GIB
    both = GpuMap({"generator-0": ("0",), "generator-1": ("0",)})
    assert "generator-1" in judge_devices(config, CONFIGS[MODEL], shape, both, {"0": 2 * one + 0.1})
    with pytest.raises(ConfigError, match=r"generator-0 .*generator-1 .*would fit: generation\.kv_cache_bytes="):
        judge_devices(config, CONFIGS[MODEL], shape, both, {"0": 2 * one - 1})


def test_gpus_of_their_own_are_judged_each_by_its_own_memory() -> None:
    config = recipe("trainer.token_budget=4096", kv_gib=None)
    found = map_gpus(config, VisibleGpus(("0", "1"), "0,1"))
    need = plan_memory(config, shape_of())[0].peak / GIB
    assert judge_devices(config, CONFIGS[MODEL], shape_of(), found, {"0": need + 1, "1": 79.0}).count("fits  ") == 1
    with pytest.raises(ConfigError, match=r"GPU 0, trainer-0's own; would fit: trainer\."):
        judge_devices(config, CONFIGS[MODEL], shape_of(), found, {"0": need - 1, "1": 79.0})
    with pytest.raises(ConfigError, match=r"new weights need .* of GPU 1 \(4 GiB\), generator-0's own"):
        judge_devices(config, CONFIGS[MODEL], shape_of(), found, {"0": 79.0, "1": 4.0})


def test_a_gpu_of_unknown_memory_is_not_judged_and_that_is_said() -> None:
    config = recipe()
    found = map_gpus(config, VisibleGpus(("GPU-7",), "GPU-7"))
    assert "GPU GPU-7" in judge_devices(config, CONFIGS[MODEL], shape_of(), found, {})
    apart = map_gpus(config, VisibleGpus(("MIG-1", "GPU-5"), ""))
    assert "not judged" in judge_devices(config, CONFIGS[MODEL], shape_of(), apart, {"GPU-5": 79.0})
    with pytest.raises(ConfigError, match="of GPU GPU-5"):  # what is known is judged all the same
        judge_devices(config, CONFIGS[MODEL], shape_of(), apart, {"GPU-5": 4.0})


def test_the_page_on_memory_shows_what_is_said() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"rlhpc: {refusal(recipe('trainer.token_budget=4096'), 23.5)}\n" in page


# ------------------------------------------------------------------------------------------------ how much a GPU has

LISTING = "GPU 0: NVIDIA H100 (UUID: GPU-5d5b)\nGPU 1: NVIDIA L4 (UUID: GPU-5e0c)\n  MIG 1g (UUID: MIG-77)\n"
MEMORY = "GPU-5d5b, 81559\nGPU-5e0c, 23034\nGPU-9999, [N/A]\n"


def test_nvidia_smi_says_how_much_memory_a_gpu_has() -> None:
    machine = parse_memory(parse_listing(LISTING), MEMORY)
    assert [gpu.memory_gib for gpu in machine] == [pytest.approx(79.65, abs=0.01), pytest.approx(22.49, abs=0.01)]
    # An index counts in CUDA's order, which is not nvidia-smi's where cards differ: the smallest is assumed.
    known = memory_of(machine, ("GPU-5d", "0", "1", "MIG-77"))
    assert known == {
        word: pytest.approx(gib, abs=0.01) for word, gib in (("GPU-5d", 79.65), ("0", 22.49), ("1", 22.49))
    }
    assert memory_of(parse_memory(parse_listing(LISTING), ""), ("0", "GPU-5d")) == {}


def test_two_names_of_one_gpu_are_refused() -> None:
    machine = parse_listing(LISTING)
    with pytest.raises(ConfigError, match="GPU-5d5b is named twice"):
        gpus.visible_gpus(machine, "GPU-5d,GPU-5d5b")


def test_check_judges_the_one_gpu_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    model = make_model_directory(tmp_path / "model", CONFIGS[MODEL])
    (tmp_path / "train.jsonl").write_text('{"question": "add", "answer": "2"}\n')
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    run_file = str(ROOT / "configs" / "gsm8k.toml")
    words = ["check", run_file, *paths, *SHARED, f"run.directory={str(tmp_path / 'run')!r}"]
    monkeypatch.setattr(gpus, "_machine", lambda: (Gpu("GPU-5d5b", memory_gib=79.6),))
    assert main([*words, f"generation.kv_cache_bytes={4 * GIB}"]) == 0, capsys.readouterr().err
    assert re.search(
        r"^fits        GPU 0 \(79.6 GiB\): .*trainer-0 .*generator-0 .* to spare", capsys.readouterr().out, re.M
    )
    monkeypatch.setattr(gpus, "_machine", lambda: (Gpu("GPU-5d5b", memory_gib=15.7),))
    assert main([*words, f"generation.kv_cache_bytes={16 * GIB}"]) == 2
    assert "would fit: " in capsys.readouterr().err
