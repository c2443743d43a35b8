"""How weights travel follows from where trainer and engines say that they are, not from what one of them sees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhpc.config.file import load_config
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import TensorSpec, WeightManifest
from rlhpc.weights.choice import choose_transport
from rlhpc.weights.memory import device_id
from tests.unit.roles.small_ring import MANIFEST, SmallRing, small_config, small_ring
from tests.unit.transport.counted_number import CountedNumber

LARGE = sorted((Path(__file__).parents[3] / "configs" / "large").glob("*.toml"))


class Nodes:
    """Nodes of eight GPUs, of which a process sees its own, or all of its node; stands in for torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_visible: int) -> None:
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        self._num_given, self._first_visible, self._sees_node = 0, 0, num_visible == 8
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)

    def process(self, num_gpus: int) -> tuple[str, ...]:
        """What the next process, of so many GPUs, says that they are."""
        first = self._num_given
        self._num_given += num_gpus
        self._first_visible = first - first % 8 if self._sees_node else first
        return tuple(device_id(f"cuda:{first - self._first_visible + i}") for i in range(num_gpus))

    def _properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"{self._first_visible + index:04d}")


@pytest.mark.parametrize("num_visible", [1, 8])
@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_large_runs_send_weights_by_nccl_however_many_gpus_one_process_sees(
    path: Path, num_visible: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, nodes = load_config(path), Nodes(monkeypatch, num_visible)
    trainer = [nodes.process(1) for _ in range(config.trainer.num_ranks)]
    engines = {
        f"generator-{replica}": nodes.process(config.generation.tensor_parallel)
        for replica in range(config.generation.num_replicas)
    }
    everywhere = [name for names in (*trainer, *engines.values()) for name in names]
    assert len(set(everywhere)) == len(everywhere)
    for wish in (config.weights.transport, "nccl"):
        assert choose_transport(wish, trainer[0][0], engines) == "nccl"


def test_a_part_of_a_gpu_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0001,MIG-c6d4")
    assert (device_id("cuda:0"), device_id("cuda:1"), device_id("cpu")) == ("GPU-0000", "MIG-c6d4", "")


def test_a_device_is_called_by_the_host_that_its_process_is_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch, 2)
    monkeypatch.setenv("NCCL_HOSTID", "n1.7.trainer")
    assert (device_id("cuda:0"), device_id("cpu")) == ("GPU-0000@n1.7.trainer", "")


async def placed(ring: SmallRing, trainer: str, *generators: tuple[str, ...]) -> str:
    """The transport of the epoch that the ring forms."""
    ring.weight_sync.describe(MANIFEST, trainer)
    for replica, devices in enumerate(generators):
        await ring.add_generator(f"generator-{replica}", devices=devices)
    await ring.weight_sync.publish(0)
    await ring.weight_sync.wait_until_live(0)
    return ring.trainer.transports[0]


@pytest.mark.parametrize(
    ("trainer", "devices", "transport"),
    [("", ("",), "gloo"), ("GPU-a", ("GPU-b", "GPU-c"), "nccl"), ("GPU-a", ("GPU-a",), "ipc")],
)
async def test_an_epoch_is_formed_with_the_transport_of_its_members(
    trainer: str, devices: tuple[str, ...], transport: str, tmp_path: Path
) -> None:
    async with small_ring(small_config(), tmp_path) as ring:
        assert await placed(ring, trainer, devices) == transport


async def test_a_run_whose_engines_share_the_trainers_gpu_in_part_ends_with_who_is_where(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path) as ring:
        with pytest.raises(ConfigError, match="trainer-0 and generator-0 on GPU-a, generator-1 on GPU-b"):
            await placed(ring, "GPU-a", ("GPU-a",), ("GPU-b",))


async def test_a_late_generator_that_weights_cannot_reach_is_turned_away_and_the_run_goes_on(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path) as ring:
        assert ring.weight_sync.misplaced("generator-1", ("GPU-a",)) == ""  # nobody has weights yet
        assert await placed(ring, "GPU-a", ("GPU-b",)) == "nccl"
        assert "trainer-0 and generator-1 on GPU-a, generator-0 on GPU-b" in ring.weight_sync.misplaced(
            "generator-1", ("GPU-a",)
        )
        assert ring.weight_sync.misplaced("generator-1", ("GPU-c",)) == ""
        assert ring.weight_sync.misplaced("generator-0", ("GPU-b",)) == ""  # it was started again


async def test_what_is_coming_is_encoded_once_for_all_generators(tmp_path: Path) -> None:
    """Of a large mixture of experts it takes 13 ms, and the controller does nothing else meanwhile."""
    names = [f"model.layers.0.mlp.experts.{expert}.weight" for expert in range(3_000)]
    num_tensors = CountedNumber(len(names))
    manifest = WeightManifest(0, 0, tuple(TensorSpec(name, "float32", (2,)) for name in names), (num_tensors,))
    async with small_ring(small_config(), tmp_path) as ring:
        ring.weight_sync.describe(manifest, "")
        generators = [await ring.add_generator(f"generator-{replica}") for replica in range(4)]
        for version in range(2):
            await ring.weight_sync.publish(version)
            await ring.weight_sync.wait_until_live(version)
    assert [[version for _, version in each.received] for each in generators] == [[0, 1]] * 4
    assert num_tensors.reads == 2  # once a version
