"""How weights travel follows from who is on which GPU."""

from __future__ import annotations

import pytest

from rlhpc.protocol.errors import ConfigError
from rlhpc.weights.choice import choose_transport

A, B, C, D = (f"GPU-{letter}" for letter in "abcd")


@pytest.mark.parametrize(
    ("wish", "trainer", "engines", "chosen"),
    [
        ("auto", "", {"g0": [""], "g1": [""]}, "gloo"),
        ("auto", A, {"g0": [B], "g1": [C, D]}, "nccl"),
        ("auto", A, {"g0": [A]}, "ipc"),
        ("auto", A, {"g0": [A], "g1": [A]}, "ipc"),
        ("auto", "", {"g0": [A]}, "gloo"),  # a trainer on CPU beside an engine that has the GPU
        ("auto", A, {"g0": [""]}, "gloo"),
        ("auto", "MIG-1", {"g0": ["MIG-2"]}, "gloo"),
        ("auto", "MIG-1", {"g0": ["MIG-1"]}, "ipc"),
        ("nccl", A, {"g0": [B]}, "nccl"),
        ("nccl", "MIG-1", {"g0": ["MIG-2"]}, "nccl"),
        ("ipc", A, {"g0": [A]}, "ipc"),
        # One GPU, and processes that are hosts of their own to NCCL, as the components of a job on Slurm are.
        ("auto", f"{A}@n1.7.trainer", {"g0": [f"{A}@n1.7.generation"]}, "ipc"),
        ("ipc", f"{A}@n1.7.trainer", {"g0": [f"{A}@n1.7.generation"]}, "ipc"),
        ("nccl", f"{A}@1", {"g0": [f"{A}@2"], "g1": [f"{A}@3"]}, "nccl"),
        ("auto", A, {"g0": [f"{B}@1"], "g1": [f"{B}@2"]}, "nccl"),
        ("ipc", "", {"g0": [""]}, "ipc"),
        ("gloo", A, {"g0": [A], "g1": [B]}, "gloo"),
    ],
)
def test_weights_travel_as_the_devices_allow(
    wish: str, trainer: str, engines: dict[str, list[str]], chosen: str
) -> None:
    assert choose_transport(wish, trainer, engines) == chosen


@pytest.mark.parametrize(
    ("trainer", "engines", "chosen"),
    [
        ("", {"g0": [""], "g1": [""]}, "ipc"),
        ("", {"g0": [A]}, "gloo"),
        (A, {"g0": [""]}, "gloo"),
        (A, {"g0": [B]}, "nccl"),
    ],
)
def test_on_one_host_processes_on_the_cpu_share_memory(
    trainer: str, engines: dict[str, list[str]], chosen: str
) -> None:
    assert choose_transport("auto", trainer, engines, is_one_host=True) == chosen


def test_a_deterministic_run_connects_no_nccl_whose_ends_are_set_differently() -> None:
    engines = {"g0": [B], "g1": [C, D]}
    assert choose_transport("auto", A, engines, is_deterministic=True) == "gloo"
    assert choose_transport("auto", A, {"g0": [A]}, is_deterministic=True) == "ipc"
    with pytest.raises(
        ConfigError, match=r"weights\.transport='nccl' with run\.deterministic=true: .*legal: auto, gloo"
    ):
        choose_transport("nccl", A, engines, is_deterministic=True)


@pytest.mark.parametrize(
    ("wish", "trainer", "engines", "words"),
    [
        ("auto", A, {"g0": [A], "g1": [B]}, r"ipc to g1: trainer-0 and g0 on GPU-a, g1 on GPU-b, .*'gloo'"),
        ("auto", A, {"g0": [A, B]}, r"ipc to g0: .*, g0 on GPU-a, GPU-b"),
        ("auto", A, {"g0": [B], "g1": [B]}, r"nccl: g0 and g1 are both on GPU-b, .*'gloo'"),
        ("nccl", A, {"g0": [A]}, r"nccl: trainer-0 and g0 are both on GPU-a, .* auto, ipc"),
        ("nccl", "0", {"g0": ["0"]}, r"are both on GPU 0,"),
        ("nccl", f"{A}@1", {"g0": [f"{A}@1"]}, r"nccl: trainer-0 and g0 are both on GPU-a, .* auto, ipc"),
        ("auto", f"{A}@1", {"g0": [f"{A}@1"], "g1": [f"{B}@1"]}, r"ipc to g1: trainer-0 and g0 on GPU-a, g1 on GPU-b,"),
        ("nccl", "", {"g0": [""]}, r"weights\.transport='nccl', and g0 is on CPU; legal: auto, gloo"),
        ("nccl", "", {"g0": [A]}, r"trainer-0 is on CPU"),
        ("nccl", "", {}, r"trainer-0 is on CPU"),
        ("nccl", A, {"g0": [""]}, r"g0 is on CPU"),
        ("ipc", A, {"g0": [B]}, r"ipc to g0"),
        ("ipc", "", {"g0": [A]}, r"trainer-0 on the CPU"),
        ("pigeon", "", {}, r"weights\.transport='pigeon'; legal: auto, gloo, nccl, ipc"),
    ],
)
def test_what_cannot_work_is_refused_with_who_is_where(
    wish: str, trainer: str, engines: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_transport(wish, trainer, engines)
