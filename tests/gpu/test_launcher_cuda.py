"""What only GPUs can show of a whole `rlhpc run`: fresh processes that start their engines, and who has which GPU.

In tests within one process CUDA is initialised before an engine starts, which hides how it is started.
"""

from __future__ import annotations

import os

import pytest
import torch

from launch.doctor.gpus import gpus_here
from rlhpc.base.run_directory import RunLayout
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab, scalars

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_GPUS = torch.cuda.device_count()
KV_CACHE_BYTES = 1 << 28
RUN_LIMIT_S = 600.0  # two engines' worth of loading
NUM_STEPS, GROUPS, GROUP_SIZE = 6, 4, 4


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def start(
    lab: Lab, name: str, admission: dict[str, object] | None = None, backend: str = "reference", **generation: object
) -> Run:
    engine = {"engine": "vllm", "kv_cache_bytes": KV_CACHE_BYTES, "enforce_eager": True}
    run_file = lab.run_file(
        name,
        model={"dtype": "bfloat16"},
        generation={**engine, **generation},
        admission=admission or {},
        trainer={"device": "cuda", "backend": backend},
        weights={"timeout_s": 60.0},
    )
    return Run(run_file, lab.layout(name))


def visible_to(run: Run) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of every role process that lives."""
    found = {}
    for process in run.survivors():
        words = process.cmdline()
        if "rlhpc.roles" in words:
            role, replica = words[words.index("rlhpc.roles") + 1], words[words.index("--replica") + 1]
            found[f"{role}-{replica}"] = process.environ()["CUDA_VISIBLE_DEVICES"]
    return found


def epochs(layout: RunLayout) -> str:
    return "".join(file.read_text() for file in sorted((layout.logs / "controller-0").glob("*.log")))


def finish(run: Run, layout: RunLayout) -> None:
    assert run.finish(RUN_LIMIT_S) == 0, run.story()
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)
    run.assert_nothing_is_left()


def test_a_trainer_and_a_fresh_engine_share_one_gpu(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    layout = lab.layout("shared")
    with start(lab, "shared") as run:
        finish(run, layout)
    assert "by ipc: generator-0" in epochs(layout)


def test_steps_begin_with_parts_of_their_batches(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    layout = lab.layout("in-parts")
    with start(lab, "in-parts", {"max_staleness": 0, "step_parts": GROUPS}, "megatron") as run:
        finish(run, layout)
    assert max(scalars(layout, "trainer/step_parts")) > 1


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
def test_every_process_of_a_run_on_several_gpus_has_its_own(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    layout = lab.layout("apart")
    with start(lab, "apart") as run:
        run.wait_until(lambda status: status["step"] >= 1, RUN_LIMIT_S)
        visible = visible_to(run)
        finish(run, layout)
    assert (visible["trainer-0"], visible["generator-0"], visible["controller-0"]) == ("1", "0", "")
    assert "by nccl: generator-0" in epochs(layout)


@pytest.mark.skipif(NUM_GPUS < 3, reason="needs three GPUs")
def test_an_engine_on_two_gpus_takes_weights_on_both(lab: Lab) -> None:
    layout = lab.layout("tensor")
    with start(lab, "tensor", tensor_parallel=2) as run:
        finish(run, layout)
    assert "by nccl: generator-0" in epochs(layout)


def test_the_gpus_that_nvidia_smi_lists_are_those_that_torch_sees() -> None:
    environment = {key: value for key, value in os.environ.items() if key == "CUDA_VISIBLE_DEVICES"}
    assert len(gpus_here(environment).words) == NUM_GPUS
