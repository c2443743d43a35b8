"""What every way of moving weights promises: one publisher here, two receivers in processes of their own.

By NCCL too, where there is a GPU: one is enough (tests/gpu/one_card.py).
"""

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

from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.checksums import RunningChecksum, checksum64
from rlhpc.weights.factory import make_publisher
from tests.gpu.one_card import environment_of, place, why_not
from tests.patience import PATIENCE_S

BUCKET_BYTES = 1 << 16  # smaller than the largest tensor
TIMEOUT_S = PATIENCE_S
SHORT_S = 2.0  # where the limit is what ends the wait
TCP = "gloo over tcp"
KINDS = {"gloo": "", "gloo over tcp": "127.0.0.1", "ipc": "", "nccl": ""}  # → host; ipc maps a file on CPU
NUM_RANKS = 4  # the publisher, two receivers, and one that comes in the place of another
NOT_NCCL = why_not(NUM_RANKS) if place() == "cuda" else "gloo in its place"
ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(bool(NOT_NCCL), reason=NOT_NCCL))
CASES = [(kind, staging) for staging in ("shadow", "paused") for kind in KINDS if (kind, staging) != (TCP, "paused")]


def started(rank: int) -> ReceiverProcess:
    """Start a receiver, which is on a host of its own to NCCL if it has to share a card."""
    receiver = ReceiverProcess({} if NOT_NCCL else environment_of(rank, NUM_RANKS))
    assert receiver.answer() == {"ok": "ready"}
    return receiver


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ReceiverProcess]]:
    receivers = [started(rank) for rank in (1, 2)]
    yield receivers
    for receiver in receivers:
        receiver.kill()


@pytest.fixture(
    params=[pytest.param(case, marks=ON_A_GPU if case[0] == "nccl" else (), id="-".join(case)) for case in CASES]
)
def broadcast(
    request: pytest.FixtureRequest, tmp_path: Path, processes: list[ReceiverProcess], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Broadcast]:
    kind, staging = request.param
    transport, device = kind.split()[0], "cuda" if kind == "nccl" else "cpu"
    if kind == "nccl":
        for name, value in environment_of(0, NUM_RANKS).items():
            monkeypatch.setenv(name, value)
    config = WeightsConfig(transport=transport, timeout_s=TIMEOUT_S)
    publisher = make_publisher(config, directory=tmp_path / "weights", device=device, host=KINDS[kind])
    yield Broadcast(publisher, transport, processes, TIMEOUT_S, device, staging)
    for receiver in processes:
        receiver.wake()
    publisher.dissolve()


def manifest_of(seed: int, version: int, epoch: int) -> WeightManifest:
    return make_manifest(version, epoch, specs_of(draw_weights(seed)), BUCKET_BYTES)


def publish(broadcast: Broadcast, version: int, epoch: int) -> None:
    broadcast.tell_all(manifest_of(version, version, epoch))
    broadcast.publisher.publish(manifest_of(version, version, epoch), iter(broadcast.draw(version)))


def test_several_versions_arrive_bit_for_bit_everywhere(broadcast: Broadcast) -> None:
    broadcast.form(epoch=1)
    for version in (0, 1, 2, 3):
        publish(broadcast, version, epoch=1)
        expected = fingerprint(draw_weights(version))
        assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": expected}] * 2


def test_a_new_epoch_goes_on_without_the_member_that_was_killed(broadcast: Broadcast) -> None:
    doomed = started(NUM_RANKS - 1)
    survivors = broadcast.receivers
    broadcast.form(epoch=1, receivers=[*survivors[:1], doomed])
    publish(broadcast, 1, epoch=1)
    assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": fingerprint(draw_weights(1))}] * 2

    doomed.kill()
    drawn: list[str] = []
    broadcast.tell(survivors[0], manifest_of(2, 2, 1))
    began = time.monotonic()
    with pytest.raises(GroupFailed):
        broadcast.publisher.publish(manifest_of(2, 2, 1), counting(broadcast.draw(2), drawn))
    assert time.monotonic() - began < TIMEOUT_S
    assert drawn == [name for name, _ in draw_weights(2)]  # drawn to the end, or the trainer's ranks would hang
    survivors[0].answer()  # GroupFailed, or the version whole; it never hangs

    broadcast.form(epoch=2, receivers=survivors)
    publish(broadcast, 3, epoch=2)
    assert [receiver.answer() for receiver in survivors] == [{"ok": fingerprint(draw_weights(3))}] * 2


def test_a_receiver_that_dies_in_a_broadcast_is_noticed_and_another_takes_its_place(broadcast: Broadcast) -> None:
    doomed, (survivor, other) = started(NUM_RANKS - 1), broadcast.receivers
    broadcast.form(epoch=1, receivers=[survivor, doomed])
    manifest = manifest_of(1, 1, 1)
    broadcast.tell(survivor, manifest)
    broadcast.tell(doomed, manifest, "dies at 1")
    began = time.monotonic()
    with pytest.raises(GroupFailed):
        broadcast.publisher.publish(manifest, iter(broadcast.draw(1)))
    assert time.monotonic() - began < TIMEOUT_S
    doomed.kill()
    broadcast.publisher.dissolve()
    survivor.answer()  # it may have the version whole, or know that another has not
    broadcast.form(epoch=2, receivers=[survivor, other])
    publish(broadcast, 2, epoch=2)
    assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": fingerprint(draw_weights(2))}] * 2


def test_a_receiver_that_stands_still_in_a_broadcast_is_left_out_and_rejoins(
    broadcast: Broadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open: only the limit ends the wait."""
    survivor, still = broadcast.receivers
    with monkeypatch.context() as patch:
        patch.setattr(broadcast.publisher, "_timeout_s", (3 if broadcast.device == "cpu" else 10) * SHORT_S)
        broadcast.form(epoch=1)
        manifest = manifest_of(1, 1, 1)
        broadcast.tell(survivor, manifest)
        broadcast.tell(still, manifest, "stops at 1")
        with pytest.raises(GroupFailed):
            broadcast.publisher.publish(manifest, iter(broadcast.draw(1)))
    broadcast.publisher.dissolve()
    survivor.answer()
    broadcast.form(epoch=2, receivers=[survivor])
    publish(broadcast, 2, epoch=2)
    assert survivor.answer() == {"ok": fingerprint(draw_weights(2))}
    still.wake()
    assert still.answer()["error"] in ("GroupFailed", "TornWeights")
    broadcast.form(epoch=3, receivers=[survivor, still])
    publish(broadcast, 3, epoch=3)
    assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": fingerprint(draw_weights(3))}] * 2


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
            damage.setattr("rlhpc.weights.broadcast.checksum64", partial(_checksum, wrong))
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
        broadcast.publisher.publish(manifest, counting(broadcast.draw(1), drawn))
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
    broadcast.form(epoch=1)
    broadcast.tell_all(manifest_of(1, 8, 1))
    with pytest.raises(GroupFailed):
        broadcast.publisher.publish(manifest_of(1, 7, 1), iter(broadcast.draw(1)))
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
        broadcast.publisher.publish(manifest_of(1, 1, 5), counting(broadcast.draw(1), drawn))
    assert len(drawn) == len(draw_weights(1))


def test_weights_that_differ_from_the_manifest_are_a_bug_of_the_exporter(broadcast: Broadcast) -> None:
    broadcast.form(epoch=1)
    manifest = manifest_of(1, 1, 1)
    broadcast.tell_all(manifest)
    drawn: list[str] = []
    first, second, *others = broadcast.draw(1)
    swapped = [second, first, *others]
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
