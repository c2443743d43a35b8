"""Every process of a run on one machine has GPUs of its own, or the run is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.doctor import gpus
from launch.doctor.gpus import Gpu, parse_listing, visible_gpus
from launch.plan.gpu_map import VisibleGpus, describe_gpus, map_gpus
from launch.plan.processes import describe_plan, local_plan_document
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import ConfigError
from tests import build

TWO_WHOLE = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5e0c7ab1-0c3f-11ee-9a54-0242ac120002)
"""
ONE_CUT = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1a2b3c4d-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-9f8e7d6c-0c3f-11ee-9a54-0242ac120002)
"""
FIRST, SECOND = (gpu.uuid for gpu in parse_listing(TWO_WHOLE))
PART_0, PART_1 = parse_listing(ONE_CUT)[0].parts
OLD_PART = "MIG-GPU-1a2b3c4d-d33d-2b2c-524d-9e3d8d2b8a77/1/0"  # as drivers before 470 called them


def config_of(*, trainer: Any = None, generation: Any = None, weights: Any = None, evaluation: Any = ()) -> Config:
    return build.config(
        generation=generation or {}, trainer=trainer or {}, weights=weights or {}, evaluation=evaluation
    )


def visible(*words: str) -> VisibleGpus:
    return VisibleGpus(words, ",".join(words))


# ------------------------------------------------------------------------------------------------------ what is visible


@pytest.mark.parametrize(
    ("listing", "shown", "words"),
    [
        (TWO_WHOLE, None, ("0", "1")),
        (TWO_WHOLE, "1", ("1",)),
        (TWO_WHOLE, " 1 , 0", ("1", "0")),
        (TWO_WHOLE, "", ()),
        (TWO_WHOLE, "-1", ()),
        (TWO_WHOLE, "NoDevFiles", ()),
        (TWO_WHOLE, "0,7,1", ("0",)),  # what comes after a device that is not there, CUDA does not show either
        (TWO_WHOLE, f"{SECOND},{FIRST}", (SECOND, FIRST)),
        (TWO_WHOLE, "GPU-5e,GPU-5d", (SECOND, FIRST)),
        (TWO_WHOLE, "GPU-77", ()),
        (ONE_CUT, None, (PART_0, PART_1, "1")),
        (ONE_CUT, PART_1, (PART_1,)),
        (ONE_CUT, OLD_PART, (OLD_PART,)),
        ("", None, ()),
        ("No devices were found\n", "0", ()),
    ],
)  # fmt: skip
def test_the_callers_own_choice_of_gpus_is_heeded_as_cuda_heeds_it(
    listing: str, shown: str | None, words: tuple[str, ...]
) -> None:
    assert visible_gpus(parse_listing(listing), shown) == words


def test_a_gpu_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES='0,1,0': 0 is named twice"):
        visible_gpus(parse_listing(TWO_WHOLE), "0,1,0")


def test_gpus_that_the_installed_torch_cannot_use_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_machine", lambda: parse_listing(TWO_WHOLE))
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "")
    assert gpus.gpus_here({}).words == ()
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    assert gpus.gpus_here({"CUDA_VISIBLE_DEVICES": "1"}).words == ("1",)


@pytest.mark.starts
def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ $# = 1 ] && [ $1 = -L ] && cat <<'END'\n{TWO_WHOLE}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    assert gpus.gpus_here({}).words == ("0", "1")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate'; exit 9\n")
    monkeypatch.setattr(gpus, "_device_files", lambda: (Gpu(""), Gpu(""), Gpu("")))
    assert gpus.gpus_here({}).words == ("0", "1", "2")
    assert gpus.gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-abc,2"}).words == ("GPU-abc", "2")


def test_device_files_are_counted_where_nobody_lists_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (tmp_path / name).touch()
    assert gpus._device_files(tmp_path) == (Gpu(""), Gpu(""))


# -------------------------------------------------------------------------------------------------------- who gets it


def components(config: Config, gpus: VisibleGpus) -> list[dict[str, Any]]:
    """Of the plan of `rlhpc run` on a machine of 32 cores."""
    layout, gpu_map = RunLayout(Path("/run")), map_gpus(config, gpus)
    found: list[dict[str, Any]] = json.loads(local_plan_document(config, layout, gpu_map, 0, 32))["jobs"][0][
        "components"
    ]
    return found


def environments(config: Config, gpus: VisibleGpus) -> dict[str, str | None]:
    """What each task of `rlhpc run` sets for its process."""
    return {
        name: component["visible_devices"].get(name, component["environment"].get("CUDA_VISIBLE_DEVICES"))
        for component in components(config, gpus)
        for share in component["roles"]
        for name in [f"{share['role']}-{replica}" for replica in range(share["num_processes"])]
    }


def test_trainer_ranks_come_first_then_the_engines_and_rewards_have_what_is_left_over() -> None:
    config = config_of(trainer={"num_ranks": 2}, generation={"num_replicas": 2, "tensor_parallel": 2})
    assert environments(config, visible("7", "6", "5", "4", "3", "2", "1", "0")) == {
        "controller-0": "",
        "reward-0": "1,0",
        "trainer-0": "7",
        "trainer-1": "6",
        "generator-0": "5,4",
        "generator-1": "3,2",
    }


def test_ranks_that_work_in_host_memory_have_their_share_of_the_cores_if_they_have_gpus() -> None:
    """Controller, reward service, two ranks and one engine."""
    config = config_of(trainer={"num_ranks": 2, "ema_decay": 0.9})
    threads = [component["defaults"]["OMP_NUM_THREADS"] for component in components(config, visible(*"012"))]
    assert threads == ["1", "6", "1"]
    for other, here in ((config, VisibleGpus()), (config_of(trainer={"num_ranks": 2}), visible(*"012"))):
        assert {component["defaults"]["OMP_NUM_THREADS"] for component in components(other, here)} == {"1"}


def test_evaluation_has_gpus_of_its_own_before_rewards_have_the_rest() -> None:
    tables = [{"path": "a.jsonl"}, {"path": "b.jsonl", "num_replicas": 2}]
    config = config_of(generation={"tensor_parallel": 2}, evaluation=tables)
    gpus = map_gpus(config, visible(*"01234567"))
    assert (gpus.variable("evaluation"), gpus.variable("reward-0")) == ("3,4,5,6", "7")
    assert "evaluation: 3,4,5,6" in describe_gpus(gpus)
    with pytest.raises(ConfigError, match=r"\[evaluation\] needs 4 GPU\(s\) beside those of the run, 2 are left of 5"):
        map_gpus(config, visible(*"01234"))
    alone = config_of(generation={"kv_cache_bytes": 1 << 30}, evaluation=tables[:1])
    with pytest.raises(ConfigError, match="0 are left"):
        map_gpus(alone, visible("0"))
    scripted = config_of(generation={"engine": "scripted"}, evaluation=tables)
    assert map_gpus(scripted, visible("0")).variable("evaluation") == ""
    assert map_gpus(scripted, VisibleGpus()).variable("evaluation") is None


def test_uuids_and_parts_are_handed_on_as_they_are() -> None:
    assert environments(config_of(), visible(SECOND, FIRST))["generator-0"] == FIRST
    beside = environments(config_of(generation={"tensor_parallel": 2}), visible(PART_0, "1", "2", PART_1))
    assert (beside["trainer-0"], beside["generator-0"], beside["reward-0"]) == (PART_0, "1,2", PART_1)


def test_a_trainer_on_cpu_and_a_scripted_engine_take_no_gpu() -> None:
    config = config_of(trainer={"device": "cpu", "num_ranks": 4})
    assert environments(config, visible("0"))["trainer-3"] == ""
    assert environments(config, visible("0"))["generator-0"] == "0"
    assert map_gpus(config, visible("0")).transport == "gloo"
    assert environments(config_of(generation={"engine": "scripted"}), visible("0"))["generator-0"] == ""


def test_without_a_gpu_nobody_is_told_anything() -> None:
    assert set(environments(config_of(), VisibleGpus()).values()) == {None}
    assert environments(config_of(trainer={"device": "cpu"}), VisibleGpus())["trainer-0"] == ""


def test_one_gpu_is_shared_if_the_cache_has_a_size() -> None:
    config = config_of(generation={"kv_cache_bytes": 1 << 30})
    assert environments(config, visible("3")) == {
        "controller-0": "", "reward-0": "", "trainer-0": "3", "generator-0": "3",
    }  # fmt: skip
    assert map_gpus(config, visible("3")).transport == "ipc"
    with pytest.raises(ConfigError, match=r"generation\.kv_cache_bytes is not given, and trainer and engine share"):
        map_gpus(config_of(), visible("3"))


def test_gpus_of_their_own_mean_nccl_and_the_plan_says_who_has_which() -> None:
    config = config_of(generation={"tensor_parallel": 2})
    found = map_gpus(config, visible("0", "1", "2", "3"))
    assert found.transport == "nccl"
    assert describe_gpus(found) == "trainer-0: 0; generator-0: 1,2; left over: 3"
    lines = describe_plan(config, RunLayout(Path("/run")), found)
    assert "weights by nccl\ngpus        trainer-0: 0; generator-0: 1,2; left over: 3\n" in lines


@pytest.mark.parametrize(
    ("sections", "words", "said"),
    [
        (
            {"trainer": {"num_ranks": 4}, "generation": {"num_replicas": 3}}, ("0", "1", "2", "3", "4"),
            r"num_ranks=4 \+ generation.num_replicas=3 × generation.tensor_parallel=1 need 7 GPUs, 5 visible "
            r"\(CUDA_VISIBLE_DEVICES='0,1,2,3,4'\); would fit: generation.num_replicas=1; for a run on Slurm",
        ),
        (
            {"trainer": {"num_ranks": 4, "tensor_parallel": 2}, "generation": {"tensor_parallel": 2}},
            ("0", "1", "2", "3", "4"), r"need 6 GPUs, 5 visible .* would fit: trainer.num_ranks=2;",
        ),
        ({"trainer": {"num_ranks": 2}}, ("0",), r"would fit: trainer.device=cpu;"),
        ({"trainer": {"num_ranks": 2}, "generation": {"kv_cache_bytes": 9}}, ("0",), r"fit: trainer.num_ranks=1;"),
        ({"generation": {"num_replicas": 2, "kv_cache_bytes": 9}}, ("0",), r"would fit: generation.num_replicas=1;"),
        ({"generation": {"tensor_parallel": 2}}, ("0",), r"fit: .*, which share it, with generation.kv_cache_bytes"),
        ({"generation": {"tensor_parallel": 8}}, ("0", "1"), r"need 9 GPUs, 2 visible .* no smaller layout fits"),
        ({"trainer": {"num_ranks": 2}}, (PART_0, PART_1, "1"), r"on MIG slices .*NCCL does not connect slices"),
        ({}, (PART_0, PART_1), rf"generator-0 on a MIG slice, {PART_1}: .* legal: whole GPUs for engines, after"),
        ({}, ("0", OLD_PART), rf"generator-0 on a MIG slice, {OLD_PART}"),
        ({"generation": {"kv_cache_bytes": 9}}, (PART_0,), rf"generator-0 on a MIG slice, {PART_0}"),
        ({"evaluation": [{"path": "a.jsonl"}]}, ("0", "1", PART_0), "evaluation on a MIG slice"),
        ({"generation": {"kv_cache_bytes": 9}, "weights": {"transport": "nccl"}}, ("0",), r"both on GPU 0, .*ipc"),
        ({"weights": {"transport": "ipc"}}, ("0", "1"), r"trainer-0 on GPU 0, generator-0 on GPU 1"),
        ({"weights": {"transport": "nccl"}}, (), r"weights\.transport='nccl', and generator-0 is on CPU"),
        ({"trainer": {"optimizer_offload": True}}, (), r"offload=true .*device='auto' needs a GPU .* 0 visible"),
        ({"trainer": {"optimizer_offload": True, "device": "cpu"}}, ("0",), r"'cpu' needs a GPU .*: false"),
        ({"trainer": {"device": "cuda"}}, (), r"trainer\.device='cuda' needs 1 GPU\(s\), 0 visible"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_with_what_there_is_and_what_would_fit(
    sections: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        map_gpus(config_of(**sections), visible(*words))


@pytest.mark.parametrize("command", ["check", "run"])
def test_check_and_run_refuse_alike_before_anything_is_made(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "_machine", lambda: parse_listing(TWO_WHOLE)[:1])
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(f"launch.commands.{command}.preflight", lambda config, **_: None)
    monkeypatch.chdir(tmp_path)
    run_file = Path(__file__).parents[3] / "configs" / "gsm8k.toml"
    assert main([command, str(run_file), "trainer.num_ranks=1", "generation.num_replicas=1"]) == 2
    assert "generation.kv_cache_bytes is not given" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
