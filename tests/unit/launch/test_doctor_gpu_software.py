"""Driver, architecture and compiler of a node, by what nvidia-smi has said on such machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.doctor import probe, verdicts
from tests.unit.launch.site_kit import config_of, plan_of

H100 = """\
NVIDIA H100 80GB HBM3, 81559 MiB, 580.82.07, 9.0
NVIDIA H100 80GB HBM3, 81559 MiB, 580.82.07, 9.0
"""
OLD_A100 = "NVIDIA A100-SXM4-80GB, 81920 MiB, 535.183.06, 8.0\n"
V100 = "Tesla V100-SXM2-32GB, 32768 MiB, 580.65.06, 7.0\n"
T4 = "Tesla T4, 15360 MiB, 580.65.06, 7.5\n"
OLD_4090 = "NVIDIA GeForce RTX 4090, 24564 MiB, 560.35.03, 8.9\n"
B200 = "NVIDIA B200, 183359 MiB, 580.82.07, 10.0\n"
WITHOUT_CAPABILITY = "Tesla V100-PCIE-16GB, 16384 MiB, 470.223.02\n"
LOST = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n" + OLD_A100
NOT_KNOWN = "NVIDIA A100-PCIE-40GB, 40960 MiB, 580.65.06, [N/A]\n"


def ready_of(text: str, **changes: Any) -> dict[str, Any]:
    """What a probe would report on a node where nvidia-smi says this."""
    cards = probe.parse_gpus(text)
    return {
        "node": "g0", "torch_cuda": "13.0", "gpus": [card["name"] for card in cards], "driver": cards[0]["driver"],
        "compute_capabilities": [card["compute_capability"] for card in cards], "cuda_library": "",
        "vllm_compatibility": "", "compiler": "/usr/bin/gcc", "has_python_headers": True, **changes,
    }  # fmt: skip


def judged(ready: dict[str, Any], component: str = "generation", dtype: str = "bfloat16") -> dict[str, Any]:
    config, plan = config_of(f"model.dtype={dtype}"), plan_of()
    (part,) = (part for job in plan.jobs for part in job.components if part.name == component)
    findings = verdicts.judge_gpu_software("node", ready, part, config)
    return {finding.key.removeprefix("node: "): finding for finding in findings}


def test_a_new_node_passes():
    found = judged(ready_of(H100))
    assert [finding.verdict for finding in found.values()] == ["pass"] * 3
    assert found["architecture"].text == "sm_90"


@pytest.mark.parametrize(
    ("text", "changes", "key", "verdict", "said", "remedy"),
    [
        (
            OLD_A100,
            {},
            "driver",
            "fail",
            "535.183.06; torch is for CUDA 13.0, which needs 580",
            "compatibility package",
        ),
        (OLD_A100, {"torch_cuda": "12.8"}, "driver", "pass", "535.183.06", ""),
        (OLD_A100, {"cuda_library": "580.82.07"}, "driver", "warn", "libcuda 580.82.07", "VLLM_ENABLE_CUDA_COMPAT"),
        (
            OLD_A100,
            {"cuda_library": "580.82.07", "vllm_compatibility": "1"},
            "driver",
            "pass",
            "libcuda 580.82.07",
            "",
        ),
        (OLD_A100, {"cuda_library": "550.54.15"}, "driver", "fail", "which needs 580", "compatibility package"),
        (OLD_4090, {}, "driver", "fail", "which needs 580", "a torch and vLLM for an older CUDA"),
        (H100, {"driver": ""}, "driver", "warn", "not known", "torch.ones"),
        (H100, {"torch_cuda": "14.0"}, "driver", "warn", "not known", "torch.ones"),
        (V100, {}, "architecture", "fail", "sm_70: torch for CUDA 13.0 has no kernels", "sm_75"),
        (V100, {"torch_cuda": "12.8"}, "architecture", "fail", "sm_70: neither bfloat16", "sm_80"),
        (T4, {}, "architecture", "fail", "sm_75: neither bfloat16", "sm_80"),
        (B200, {}, "architecture", "pass", "sm_100", ""),
        (WITHOUT_CAPABILITY, {}, "architecture", "warn", "not reported", "sm_75"),
        (NOT_KNOWN, {}, "architecture", "warn", "not reported", "sm_75"),
        (H100 + V100, {}, "architecture", "fail", "sm_70, sm_90: torch", "V100"),
        (LOST, {}, "driver", "fail", "535.183.06", "compatibility package"),
        (H100, {"compiler": ""}, "compiler", "fail", "not on g0: a C compiler; Triton", "gcc"),
        (H100, {"has_python_headers": False}, "compiler", "fail", "not on g0: Python.h", "python3-dev"),
    ],
)
def test_what_keeps_torch_from_a_gpu_is_told_with_its_remedy(text, changes, key, verdict, said, remedy):
    finding = judged(ready_of(text, **changes))[key]
    assert finding.verdict == verdict
    assert said in finding.text
    assert remedy in finding.remedy


def test_the_compatibility_package_is_not_offered_for_a_consumer_card():
    assert "compatibility" not in judged(ready_of(OLD_4090))["driver"].remedy


def test_float32_runs_on_a_turing_card_with_a_warning():
    assert judged(ready_of(T4), dtype="float32")["architecture"].verdict == "warn"


def test_a_trainer_without_a_compiler_is_warned_only():
    assert judged(ready_of(H100, compiler=""), component="trainer")["compiler"].verdict == "warn"


@pytest.mark.parametrize("changes", [{"gpus": None}, {"gpus": []}, {"torch_cuda": ""}])
def test_nothing_is_said_without_named_gpus_or_with_a_cpu_build(changes):
    assert judged(ready_of(H100, **changes)) == {}


def fake_nvidia_smi(directory: Path, script: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.starts
def test_an_nvidia_smi_that_knows_no_architectures_is_asked_again(tmp_path, monkeypatch):
    fake_nvidia_smi(
        tmp_path,
        'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
        "echo 'Tesla V100-PCIE-16GB, 16384 MiB, 470.223.02'",
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert probe.gpus() == [
        {"name": "Tesla V100-PCIE-16GB, 16384 MiB", "driver": "470.223.02", "compute_capability": ""}
    ]


@pytest.mark.starts
def test_an_nvidia_smi_that_fails_gives_no_gpus(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert probe.gpus() == []


def test_a_libcuda_of_the_compatibility_package_is_seen_by_its_version(tmp_path):
    (tmp_path / "libcuda.so.580.82.07").write_text("")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.580.82.07")
    assert probe.cuda_library(f"/nowhere::{tmp_path}") == "580.82.07"
    assert probe.cuda_library("/nowhere") == ""


@pytest.mark.starts
def test_a_probe_tells_compiler_and_headers_of_the_interpreter_it_runs_under():
    program = "import json, sys; sys.path.insert(0, sys.argv[1]); import probe; print(probe.compiler())"
    said = subprocess.run(
        [sys.executable, "-c", program, str(Path(probe.__file__).parent)],
        env={"PATH": "/nowhere"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "'compiler': ''" in said
