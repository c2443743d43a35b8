from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from rlhpc.errors import GroupFailed, TornWeights
from rlhpc.types import TensorSpec, WeightGroup, WeightManifest
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.disk import DiskPublisher, DiskReceiver
from rlhpc.weights.shadow import fresh_blocks, named_tensors
from tests.patience import PATIENCE_S

LISTING = os.listdir
EXISTS = Path.exists
SPECS = (TensorSpec("a", "float32", (5,)), TensorSpec("b", "bfloat16", (2, 3)))


def manifest(version: int) -> WeightManifest:
    return make_manifest(version, 1, SPECS, 16)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((5,), float(version))), ("b", torch.full((2, 3), version, dtype=torch.bfloat16))]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[DiskPublisher, DiskReceiver, Path]:
    publisher, receiver = DiskPublisher(tmp_path, PATIENCE_S), DiskReceiver(PATIENCE_S)
    group = publisher.open(WeightGroup(1, "disk", "", ("g",), (1,)))
    receiver.join(group, 1)
    publisher.form()
    return publisher, receiver, tmp_path / "epoch_000001"


def publish(publisher: DiskPublisher, receiver: DiskReceiver, version: int) -> list[tuple[str, torch.Tensor]]:
    thread = threading.Thread(target=publisher.publish, args=(manifest(version), iter(weights(version))))
    thread.start()
    received = list(
        named_tensors(manifest(version), receiver.receive(manifest(version), fresh_blocks(manifest(version))))
    )
    thread.join()
    return received


def test_a_verdict_that_cannot_be_read_fails_the_version_and_not_the_trainer(
    pair: tuple[DiskPublisher, DiskReceiver, Path],
) -> None:
    publisher, _, epoch = pair
    (epoch / "version_000001" / "verified_0001").mkdir(parents=True)
    with pytest.raises(GroupFailed, match="verified_0001"):
        publisher.publish(manifest(1), iter(weights(1)))


def test_only_the_two_newest_versions_are_kept(pair: tuple[DiskPublisher, DiskReceiver, Path]) -> None:
    publisher, receiver, directory = pair
    for version in range(4):
        received = publish(publisher, receiver, version)
        assert [torch.equal(got, want) for (_, got), (_, want) in zip(received, weights(version), strict=True)] == [
            True
        ] * 2
    assert sorted(path.name for path in directory.glob("version_*")) == ["version_000002", "version_000003"]


def test_a_version_without_checksums_does_not_exist_yet(pair: tuple[DiskPublisher, DiskReceiver, Path]) -> None:
    publisher, _, directory = pair
    quick = DiskReceiver(0.05)
    quick.join(WeightGroup(1, "disk", f"file://{directory}", ("g",), (1,)), 1)
    (directory / "version_000007").mkdir()
    with pytest.raises(GroupFailed, match="did not appear"):
        list(quick.receive(manifest(7), fresh_blocks(manifest(7))))
    publisher.dissolve()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "checksums"])
def test_a_damaged_file_is_refused(pair: tuple[DiskPublisher, DiskReceiver, Path], damage: str) -> None:
    publisher, receiver, directory = pair
    publish(publisher, receiver, 1)
    file = directory / "version_000001" / "bucket_0001.bin"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-4])
    elif damage == "remove":
        file.unlink()
    else:
        (directory / "version_000001" / "checksums.json").write_text("{")
    with pytest.raises(TornWeights):
        list(receiver.receive(manifest(1), fresh_blocks(manifest(1))))
    assert (directory / "version_000001" / "torn_0001").exists()


def test_what_an_earlier_attempt_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    stale = tmp_path / "epoch_000001" / "joined_0001"
    stale.parent.mkdir()
    stale.touch()
    publisher = DiskPublisher(tmp_path, 0.05)
    publisher.open(WeightGroup(1, "disk", "", ("g",), (1,)))
    with pytest.raises(GroupFailed, match="joined_0001 missing"):
        publisher.form()


class _NfsClient:
    """Remembers what was not there, until the directory in which it would be is listed.  For any thread."""

    def __init__(self) -> None:
        self._absent: set[Path] = set()
        self._lock = threading.RLock()

    def exists(self, path: Path) -> bool:
        with self._lock:
            if path not in self._absent and not EXISTS(path):
                self._absent.add(path)
            return path not in self._absent

    def listdir(self, directory: Path) -> list[str]:
        with self._lock:
            if not self.exists(directory):
                raise FileNotFoundError(directory)
            self._absent = {path for path in self._absent if path.parent != directory}
            return LISTING(directory)


def test_what_was_not_there_when_first_looked_for_is_soon_found_on_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _NfsClient()
    monkeypatch.setattr(Path, "exists", lambda path: client.exists(path))
    monkeypatch.setattr(os, "listdir", client.listdir)
    publisher, receiver = DiskPublisher(tmp_path, PATIENCE_S), DiskReceiver(PATIENCE_S)
    group = publisher.open(WeightGroup(1, "disk", "", ("g",), (1,)))
    forming = threading.Thread(target=publisher.form)
    forming.start()
    time.sleep(0.1)  # its first look is over
    receiver.join(group, 1)
    forming.join()
    received: list[tuple[str, torch.Tensor]] = []
    blocks = receiver.receive(manifest(1), fresh_blocks(manifest(1)))
    receiving = threading.Thread(target=lambda: received.extend(named_tensors(manifest(1), blocks)))
    receiving.start()
    time.sleep(0.1)  # as above: not even the version's directory was there
    publisher.publish(manifest(1), iter(weights(1)))
    receiving.join()
    assert [name for name, _ in received] == ["a", "b"]
    publisher.dissolve()
