"""What only a GPU can show: weights over CUDA IPC, and vLLM on CUDA.  By NCCL: contracts/test_weight_transport.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.checksums import NUM_LANES, checksum64
from rlhpc.weights.factory import make_publisher
from tests.contracts.engine_subjects import VllmSubject, request_of
from tests.contracts.weight_receiver_process import fingerprint
from tests.contracts.weight_receivers import Broadcast, ReceiverProcess, draw_weights, specs_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TIMEOUT_S = 30.0


@pytest.fixture
def receiver() -> Iterator[ReceiverProcess]:
    process = ReceiverProcess()
    assert process.answer() == {"ok": "ready"}
    yield process
    process.kill()


@pytest.mark.parametrize("num_bytes", [0, 5, 8 * NUM_LANES, 20 * NUM_LANES + 3])
def test_a_checksum_is_the_same_on_both_devices(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert checksum64(data.cuda()) == checksum64(data)


@pytest.mark.parametrize("transport", ["ipc", "gloo"])
def test_weights_reach_another_process_on_the_same_gpu(
    transport: str, tmp_path: Path, receiver: ReceiverProcess
) -> None:
    config = WeightsConfig(transport=transport, timeout_s=TIMEOUT_S)
    publisher = make_publisher(config, directory=tmp_path, device="cuda")
    broadcast = Broadcast(publisher, transport, [receiver], TIMEOUT_S, "cuda")
    broadcast.form(epoch=1)
    for version in range(3):
        weights = draw_weights(version, device="cuda")
        manifest = make_manifest(version, 1, specs_of(weights), 1 << 16)
        broadcast.tell_all(manifest)
        publisher.publish(manifest, iter(weights))
        assert receiver.answer() == {"ok": fingerprint(weights)}
    publisher.dissolve()


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_vllm_takes_new_weights_by_ipc_while_it_samples(tmp_path: Path) -> None:
    subject = await VllmSubject.start(
        tmp_path, "qwen2", tied=True, transport="ipc", device="cuda", gpu_memory_utilization=0.3, kv_cache_bytes=None
    )
    try:
        await subject.join()
        await subject.update(0)
        running = [asyncio.create_task(subject.engine.generate(request_of(i, max_tokens=500))) for i in range(8)]
        await asyncio.sleep(0.05)
        await subject.update(1)
        rollouts = await asyncio.gather(*running)
        assert all(np.all(np.diff(rollout.versions) >= 0) for rollout in rollouts)
        assert any(set(rollout.versions.tolist()) == {0, 1} for rollout in rollouts), "no rollout met the new weights"
        fresh = await subject.engine.generate(request_of(3))
        expected = subject.expected_logprobs(1, fresh)
        np.testing.assert_allclose(fresh.behaviour_logprobs, expected, atol=1e-2)  # attention in TF32; old weights: 0.5
    finally:
        await subject.engine.close()
        subject.publisher.dissolve()
    words = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert [word for word in words if "resource_tracker" not in word] == []


def test_an_ipc_group_needs_no_network(tmp_path: Path) -> None:
    publisher = make_publisher(WeightsConfig(transport="ipc"), directory=tmp_path, device="cuda")
    assert publisher.open(WeightGroup(1, "ipc", "", ("g",), (1,))).address.startswith("file://")
    publisher.dissolve()
