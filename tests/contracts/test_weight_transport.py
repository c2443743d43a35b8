"""What every way of moving weights promises: one publisher here, two receivers in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weight_receiver_process import fingerprint
from weight_receivers import Broadcast, ReceiverProcess, counting, draw_weights, specs_of

from rlhpc.config_sections import WeightsConfig
from rlhpc.errors import GroupFailed
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.checksum import RunningChecksum, checksum64
from rlhpc.weights.factory import make_publisher
from tests.patience import PATIENCE_S

BUCKET_BYTES = 1 << 16  # smaller than the largest tensor
TIMEOUT_S = PATIENCE_S
SHORT_S = 2.0  # where the limit is what ends the wait
KINDS = {"gloo": "", "gloo over tcp": "127.0.0.1", "disk": "", "ipc": ""}  # kind → host; ipc maps a file on CPU


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ReceiverProcess]]:
    receivers = [ReceiverProcess() for _ in range(2)]
    assert [receiver.answer() for receiver in receivers] == [{"ok": "ready"}] * 2
    yield receivers
    for receiver in receivers:
        receiver.kill()


@pytest.fixture(params=[*((kind, "shadow") for kind in KINDS), *((kind, "paused") for kind in ("gloo", "ipc", "disk"))])
def broadcast(request: pytest.FixtureRequest, tmp_path: Path, processes: list[ReceiverProcess]) -> Iterator[Broadcast]:
    kind, staging = request.param
    transport = kind.split()[0]
    config = WeightsConfig(transport=transport, timeout_s=TIMEOUT_S)
    publisher = make_publisher(config, directory=tmp_path / "weights", device="cpu", host=KINDS[kind])
    yield Broadcast(publisher, transport, processes, TIMEOUT_S, "cpu", staging)
    publisher.dissolve()


def manifest_of(seed: int, version: int, epoch: int) -> WeightManifest:
    return make_manifest(version, epoch, specs_of(draw_weights(seed)), BUCKET_BYTES)


def publish(broadcast: Broadcast, version: int, epoch: int) -> None:
    broadcast.tell_all(manifest_of(version, version, epoch))
    broadcast.publisher.publish(manifest_of(version, version, epoch), iter(draw_weights(version)))


def test_several_versions_arrive_bit_for_bit_everywhere(broadcast: Broadcast) -> None:
    broadcast.form(epoch=1)
    for version in (0, 1, 2, 3):
        publish(broadcast, version, epoch=1)
        expected = fingerprint(draw_weights(version))
        assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": expected}] * 2


def test_a_new_epoch_goes_on_without_the_member_that_was_killed(
    broadcast: Broadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = ReceiverProcess()
    assert doomed.answer() == {"ok": "ready"}
    survivors = broadcast.receivers
    broadcast.form(epoch=1, receivers=[*survivors[:1], doomed])
    publish(broadcast, 1, epoch=1)
    assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": fingerprint(draw_weights(1))}] * 2

    doomed.kill()
    drawn: list[str] = []
    broadcast.tell(survivors[0], manifest_of(2, 2, 1))
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(broadcast.publisher, "_timeout_s", SHORT_S)  # weights on disk are waited for so long
        with pytest.raises(GroupFailed):
            broadcast.publisher.publish(manifest_of(2, 2, 1), counting(draw_weights(2), drawn))
    assert time.monotonic() - began < TIMEOUT_S
    assert drawn == [name for name, _ in draw_weights(2)]  # drawn to the end, or the trainer's ranks would hang
    survivors[0].answer()  # weights from disk it may have whole; over a group it has GroupFailed; it never hangs

    broadcast.form(epoch=2, receivers=survivors)
    publish(broadcast, 3, epoch=2)
    assert [receiver.answer() for receiver in survivors] == [{"ok": fingerprint(draw_weights(3))}] * 2


class _Wrong(RunningChecksum):
    """A checksum that is another one where `wrong` says so."""

    def __init__(self, wrong: Iterator[int | None], device: torch.device) -> None:
        super().__init__(device)
        self._wrong = wrong

    def value(self) -> int:
        return next(self._wrong) or super().value()


def _checksum(wrong: Iterator[int | None], block: Tensor) -> int:
    """Of the next bucket: another one where `wrong` says so."""
    return next(wrong) or checksum64(block)


def test_damaged_weights_are_refused_whole(broadcast: Broadcast, monkeypatch: pytest.MonkeyPatch) -> None:
    last = len(manifest_of(1, 1, 1).bucket_ends) - 1
    for epoch, damaged in enumerate((0, last), start=1):
        broadcast.form(epoch=epoch)
        wrong = iter([12345 if index == damaged else None for index in range(last + 1)])
        with monkeypatch.context() as damage:
            for module in ("group_publisher", "disk"):
                damage.setattr(f"rlhpc.weights.{module}.checksum64", partial(_checksum, wrong))
            damage.setattr("rlhpc.weights.ipc.RunningChecksum", partial(_Wrong, wrong))
            with pytest.raises(GroupFailed, match="torn"):
                publish(broadcast, epoch, epoch=epoch)
        for receiver in broadcast.receivers:
            answer = receiver.answer()
            assert answer["error"] == "TornWeights"
            assert f"bucket {damaged}" in answer["message"]
    broadcast.form(epoch=3)
    publish(broadcast, 3, epoch=3)
    assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": fingerprint(draw_weights(3))}] * 2


@pytest.mark.parametrize("bucket", range(3))
@pytest.mark.parametrize("how", ["no room", "fails at"])
def test_a_receiver_that_cannot_take_a_version_says_so_instead_of_being_waited_for(
    broadcast: Broadcast, how: str, bucket: int
) -> None:
    """The trainer learns why at once, the other receiver is not held up, and nothing runs into a time-out."""
    manifest, drawn = manifest_of(1, 1, 1), list[str]()
    assert len(manifest.bucket_ends) == 3
    broadcast.form(epoch=1)
    small, roomy = broadcast.receivers
    broadcast.tell(small, manifest, f"{how} {bucket}")
    broadcast.tell(roomy, manifest)
    began = time.monotonic()
    with pytest.raises(GroupFailed, match=r"cannot|torn"):
        broadcast.publisher.publish(manifest, counting(draw_weights(1), drawn))
    why = small.answer()
    assert why["error"] == "GroupFailed"
    assert ("CUDA out of memory" if how == "no room" else "a layer could not be put together") in why["message"]
    roomy.answer()  # it may have the version whole, or know that another has not
    assert time.monotonic() - began < TIMEOUT_S
    assert drawn == [name for name, _ in draw_weights(1)]
    broadcast.form(epoch=2)
    publish(broadcast, 2, epoch=2)
    assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": fingerprint(draw_weights(2))}] * 2


def test_receivers_refuse_another_version_than_they_were_told(broadcast: Broadcast) -> None:
    if broadcast.transport == "disk":
        pytest.skip("a version on disk has its number in its name: another one is simply not there")
    broadcast.form(epoch=1)
    broadcast.tell_all(manifest_of(1, 8, 1))
    with pytest.raises(GroupFailed):
        broadcast.publisher.publish(manifest_of(1, 7, 1), iter(draw_weights(1)))
    for receiver in broadcast.receivers:
        answer = receiver.answer()
        assert answer["error"] == "TornWeights"
        assert "policy version is 7, not 8" in answer["message"]


def test_a_group_that_does_not_come_together_fails_in_time(
    broadcast: Broadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(broadcast.publisher, "_timeout_s", SHORT_S)
        broadcast.publisher.open(WeightGroup(1, broadcast.transport, "", ("nobody",), (1,)))
        with pytest.raises(GroupFailed):
            broadcast.publisher.form()
    assert time.monotonic() - began < TIMEOUT_S
    broadcast.publisher.dissolve()
    broadcast.form(epoch=2)
    publish(broadcast, 1, epoch=2)
    assert all("ok" in receiver.answer() for receiver in broadcast.receivers)


def test_nothing_is_published_to_an_epoch_that_was_not_formed(broadcast: Broadcast) -> None:
    drawn: list[str] = []
    with pytest.raises(GroupFailed):
        broadcast.publisher.publish(manifest_of(1, 1, 5), counting(draw_weights(1), drawn))
    assert len(drawn) == len(draw_weights(1))


def test_weights_that_differ_from_the_manifest_are_a_bug_of_the_exporter(broadcast: Broadcast) -> None:
    if broadcast.transport == "disk":
        broadcast.timeout_s = SHORT_S  # the version never appears
    broadcast.form(epoch=1)
    manifest = manifest_of(1, 1, 1)
    broadcast.tell_all(manifest)
    drawn: list[str] = []
    swapped = [draw_weights(1)[1], draw_weights(1)[0], *draw_weights(1)[2:]]
    with pytest.raises(ValueError, match="the manifest expects"):
        broadcast.publisher.publish(manifest, counting(swapped, drawn))
    assert len(drawn) == len(swapped)
    broadcast.publisher.dissolve()
    assert all("error" in receiver.answer() for receiver in broadcast.receivers)


def test_a_dissolved_group_leaves_no_file(broadcast: Broadcast, tmp_path: Path) -> None:
    broadcast.form(epoch=1)
    publish(broadcast, 1, epoch=1)
    for receiver in broadcast.receivers:
        receiver.answer()
        receiver.tell("leave")
        assert receiver.answer() == {"ok": "left"}
    broadcast.publisher.dissolve()
    broadcast.publisher.dissolve()
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.is_socket()] == []


def test_a_stranger_is_told_that_it_is_no_member(broadcast: Broadcast) -> None:
    broadcast.form(epoch=1)
    broadcast.tell_all(replace(manifest_of(1, 1, 1), epoch=9))
    assert [receiver.answer()["error"] for receiver in broadcast.receivers] == ["GroupFailed"] * 2
