"""Move weights through files of the run directory: slow, and possible everywhere.

Input: a WeightManifest and tensors.  Publisher and receivers share only a directory with atomic rename:

    epoch_000003/joined_0001                    rank 1 takes part
    epoch_000003/version_000012/bucket_0000.bin …       one a bucket, as flat_tensors.py lays it out
    epoch_000003/version_000012/checksums.json  written last: a version without it does not exist
    epoch_000003/version_000012/verified_0001   rank 1 has it, whole ("torn_0001": it has not)

The two newest versions are kept.  The directory goes when the epoch is dissolved.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.contracts import Allocate, WeightPublisher, WeightReceiver
from rlhpc.deadline import Deadline
from rlhpc.errors import GroupFailed, TornWeights
from rlhpc.files import write_atomically
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast_header import check_header, check_sums, header_of
from rlhpc.weights.buckets import buckets_of
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import exhaust, fill_block
from rlhpc.weights.rendezvous_file import file_of

NUM_KEPT_VERSIONS = 2
LOOK_EVERY_S = 0.01  # a directory listing on a parallel filesystem takes about as long
CHECKSUMS = "checksums.json"


class DiskPublisher(WeightPublisher):
    """Writes versions as files."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        """directory: the run's weights directory; made when needed."""
        self._directory, self._timeout_s = directory, timeout_s
        self._opened: WeightGroup | None = None
        self._is_formed = False

    def open(self, group: WeightGroup) -> WeightGroup:
        """Make the epoch's directory, empty; see WeightPublisher."""
        self.dissolve()
        directory = self._directory / f"epoch_{group.epoch:06d}"
        try:
            shutil.rmtree(directory, ignore_errors=True)  # of an earlier attempt of the run with the same number
            directory.mkdir(parents=True)
        except OSError as error:
            raise GroupFailed(f"the rendezvous {directory} could not be made: {error}") from error
        self._opened = replace(group, address=f"file://{directory}")
        return self._opened

    def form(self) -> None:
        """Wait until every rank has written its file; see WeightPublisher."""
        if self._opened is None:
            raise GroupFailed("no rendezvous is open")
        directory = _path_of(self._opened)
        marks = [directory / f"joined_{rank:04d}" for rank in range(1, self._opened.world_size)]
        if not Deadline(self._timeout_s).wait_for(lambda: all(mark.exists() for mark in marks), LOOK_EVERY_S):
            missing = [mark.name for mark in marks if not mark.exists()]
            raise GroupFailed(f"{', '.join(missing)} missing in {directory} after {self._timeout_s:g} s")
        self._is_formed = True

    def publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write, then wait until every rank has verified it; see WeightPublisher."""
        try:
            if self._opened is None or not self._is_formed or self._opened.epoch != manifest.epoch:
                raise GroupFailed(f"epoch {manifest.epoch} is not formed")
            directory = _version_directory(self._opened, manifest.policy_version)
            try:
                _write_version(directory, manifest, weights)
            except OSError as error:
                raise GroupFailed(f"version {manifest.policy_version} could not be written: {error}") from error
            self._wait_for_verdicts(directory)
        finally:
            exhaust(weights)
        self._remove_superseded()

    def dissolve(self) -> None:
        """Remove the epoch's directory; see WeightPublisher."""
        if self._opened is not None:
            shutil.rmtree(_path_of(self._opened), ignore_errors=True)
        self._opened, self._is_formed = None, False

    def _wait_for_verdicts(self, directory: Path) -> None:
        assert self._opened is not None
        ranks = range(1, self._opened.world_size)

        def verdicts(kind: str) -> list[int]:
            return [rank for rank in ranks if (directory / f"{kind}_{rank:04d}").exists()]

        deadline = Deadline(self._timeout_s)
        deadline.wait_for(lambda: len(verdicts("verified")) + len(verdicts("torn")) == len(ranks), LOOK_EVERY_S)
        missing = set(ranks) - set(verdicts("verified"))
        if missing:
            raise GroupFailed(
                f"{directory.name}: ranks {sorted(missing)} of {self._opened.world_size} did not verify it "
                f"(found it torn: {verdicts('torn')})"
            )

    def _remove_superseded(self) -> None:
        assert self._opened is not None
        for old in sorted(_path_of(self._opened).glob("version_*"))[:-NUM_KEPT_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)


class DiskReceiver(WeightReceiver):
    """Reads versions once they are complete."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long to wait for a version to appear."""
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._rank = 0

    def join(self, group: WeightGroup, rank: int) -> None:
        """Write this rank's file; see WeightReceiver."""
        self.leave()
        try:
            (_path_of(group) / f"joined_{rank:04d}").touch()
        except OSError as error:
            raise GroupFailed(f"no rendezvous at {group.address!r}: {error}") from error
        self._group, self._rank = group, rank

    def receive(self, manifest: WeightManifest, allocate: Allocate) -> Generator[Tensor, None, None]:
        """Read every bucket as soon as it exists, verify at the end; see WeightReceiver."""
        group = self._group
        if group is None or group.epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        directory = _version_directory(group, manifest.policy_version)
        verdict = "torn"
        try:
            sums: list[int] = []
            for index, bucket in enumerate(buckets_of(manifest)):
                self._wait_for(_bucket_file(directory, index), directory)
                block = allocate(index, torch.device("cpu"))
                _read_bucket(_bucket_file(directory, index), block, bucket.num_bytes)
                sums.append(checksum64(block))
                yield block
            self._wait_for(directory / CHECKSUMS, directory)
            _verify(directory, manifest, sums)
            verdict = "verified"
        finally:
            if self._group is not None:
                _leave_verdict(directory, f"{verdict}_{self._rank:04d}")

    def _wait_for(self, path: Path, directory: Path) -> None:
        """Raises GroupFailed if it does not appear, and is then a member of none."""
        deadline = Deadline(self._timeout_s)
        if not deadline.wait_for(lambda: path.exists() or (directory / CHECKSUMS).exists(), LOOK_EVERY_S):
            self.leave()
            raise GroupFailed(f"{path} did not appear within {self._timeout_s:g} s")

    def leave(self) -> None:
        """Remove this rank's file; see WeightReceiver."""
        if self._group is not None:
            (_path_of(self._group) / f"joined_{self._rank:04d}").unlink(missing_ok=True)
        self._group = None


def _write_version(directory: Path, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
    directory.mkdir(exist_ok=True)
    sums: list[int] = []
    buckets = buckets_of(manifest)
    buffer = torch.zeros(max((bucket.num_bytes for bucket in buckets), default=0), dtype=torch.uint8)
    for index, bucket in enumerate(buckets):
        block = buffer[: bucket.num_bytes]
        fill_block(bucket, weights, block)
        path = _bucket_file(directory, index)
        # Not synced: after a power cut there is no reader left for it, and checksums guard the rest.
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(_bytes_of(block))
        temporary.replace(path)
        sums.append(checksum64(block))
    write_atomically(directory / CHECKSUMS, json.dumps({"header": header_of(manifest), "checksums": sums}).encode())


def _bytes_of(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


def _read_bucket(path: Path, block: Tensor, num_bytes: int) -> None:
    """Raises TornWeights if the file is not there or not of this size."""
    try:
        with path.open("rb", buffering=0) as file:
            view, filled = _bytes_of(block), 0
            while filled < num_bytes and (count := file.readinto(view[filled:])):
                filled += count
            if filled != num_bytes or file.read(1):
                raise TornWeights(f"{path} has not {num_bytes} bytes")
    except OSError as error:
        raise TornWeights(f"{path}: {error!r}") from error


def _verify(directory: Path, manifest: WeightManifest, sums: list[int]) -> None:
    try:
        record = json.loads((directory / CHECKSUMS).read_bytes())
        check_header(manifest, record["header"])
        check_sums(manifest, record["checksums"], sums)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TornWeights(f"{directory}: {error!r}") from error


def _leave_verdict(directory: Path, name: str) -> None:
    try:
        (directory / name).touch()
    except OSError as error:
        raise GroupFailed(f"{directory} has gone: {error}") from error


def _path_of(group: WeightGroup) -> Path:
    return file_of(group.address)


def _version_directory(group: WeightGroup, policy_version: int) -> Path:
    return _path_of(group) / f"version_{policy_version:06d}"


def _bucket_file(directory: Path, index: int) -> Path:
    return directory / f"bucket_{index:04d}.bin"
