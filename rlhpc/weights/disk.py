"""Move weights through files of the run directory: slow, and possible everywhere.

Eats a WeightManifest; publisher and receivers share nothing but a directory with atomic rename:

    epoch_000003/joined_0001                    rank 1 takes part
    epoch_000003/version_000012/bucket_0000.safetensors …
    epoch_000003/version_000012/checksums.json  written last: a version without it does not exist
    epoch_000003/version_000012/verified_0001   rank 1 has it, whole ("torn_0001": it has not)

The two newest versions are kept.  The directory goes when the epoch is dissolved.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhpc.contracts import WeightPublisher, WeightReceiver
from rlhpc.errors import GroupFailed, TornWeights
from rlhpc.files import write_atomically
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast_header import check_header, check_sums, header_of
from rlhpc.weights.buckets import buckets_of
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import exhaust, is_as_specified, next_weight
from rlhpc.weights.meeting_file import file_of

NUM_KEPT_VERSIONS = 2
LOOK_EVERY_S = 0.01  # a directory listing on a parallel filesystem takes about as long
CHECKSUMS = "checksums.json"


class DiskPublisher(WeightPublisher):
    """Writes versions for whoever reads them."""

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
            raise GroupFailed(f"the meeting place {directory} could not be made: {error}") from error
        self._opened = replace(group, address=f"file://{directory}")
        return self._opened

    def form(self) -> None:
        """Wait until every rank has left its mark; see WeightPublisher."""
        if self._opened is None:
            raise GroupFailed("no meeting place is open")
        directory = _path_of(self._opened)
        marks = [directory / f"joined_{rank:04d}" for rank in range(1, self._opened.world_size)]
        if not _wait(lambda: all(mark.exists() for mark in marks), self._timeout_s):
            missing = [mark.name for mark in marks if not mark.exists()]
            raise GroupFailed(f"{', '.join(missing)} missing in {directory} after {self._timeout_s:g} s")
        self._is_formed = True

    def publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write, then wait for everyone's word; see WeightPublisher."""
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

        _wait(lambda: len(verdicts("verified")) + len(verdicts("torn")) == len(ranks), self._timeout_s)
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
    """Reads versions once they are whole."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long to wait for a version to appear."""
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._rank = 0

    def join(self, group: WeightGroup, rank: int) -> None:
        """Leave a mark; see WeightReceiver."""
        self.leave()
        try:
            (_path_of(group) / f"joined_{rank:04d}").touch()
        except OSError as error:
            raise GroupFailed(f"no meeting place at {group.address!r}: {error}") from error
        self._group, self._rank = group, rank

    def receive(self, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
        """Wait, read, verify; see WeightReceiver."""
        group = self._group
        if group is None or group.epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        directory = _version_directory(group, manifest.policy_version)
        if not _wait((directory / CHECKSUMS).exists, self._timeout_s):
            self.leave()
            raise GroupFailed(f"{directory} did not appear within {self._timeout_s:g} s")
        try:
            weights = _read_version(directory, manifest)
        except TornWeights:
            _leave_verdict(directory, f"torn_{self._rank:04d}")
            raise
        _leave_verdict(directory, f"verified_{self._rank:04d}")
        return weights

    def leave(self) -> None:
        """Take the mark back; see WeightReceiver."""
        if self._group is not None:
            (_path_of(self._group) / f"joined_{self._rank:04d}").unlink(missing_ok=True)
        self._group = None


def _write_version(directory: Path, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
    directory.mkdir(exist_ok=True)
    sums: list[int] = []
    for index, bucket in enumerate(buckets_of(manifest)):
        tensors: dict[str, Tensor] = {}
        for spec in bucket.tensors:
            name, tensor = next_weight(spec, weights)
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        data = bytearray(safetensors.torch.save(tensors))
        sums.append(checksum64(torch.frombuffer(data, dtype=torch.uint8)))
        write_atomically(_bucket_file(directory, index), data)
    write_atomically(directory / CHECKSUMS, json.dumps({"header": header_of(manifest), "checksums": sums}).encode())


def _read_version(directory: Path, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
    try:
        record = json.loads((directory / CHECKSUMS).read_bytes())
        check_header(manifest, record["header"])
        blocks = [_read_bytes(_bucket_file(directory, index)) for index in range(len(manifest.bucket_ends))]
        check_sums(manifest, record["checksums"], [checksum64(block) for block in blocks])
        tensors = {name: tensor for block in blocks for name, tensor in _parsed(block).items()}
        weights = [(spec.name, tensors[spec.name]) for spec in manifest.tensors]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise TornWeights(f"{directory}: {error!r}; nothing was loaded") from error
    for spec, (name, tensor) in zip(manifest.tensors, weights, strict=True):
        if not is_as_specified(spec, name, tensor):
            raise TornWeights(f"{directory}: {name} is {tensor.dtype} {tuple(tensor.shape)}; nothing was loaded")
    return weights


def _read_bytes(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8))


def _parsed(block: Tensor) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = safetensors.torch.load(block.numpy().tobytes())
    return tensors


def _leave_verdict(directory: Path, name: str) -> None:
    try:
        (directory / name).touch()
    except OSError as error:
        raise GroupFailed(f"{directory} has gone: {error}") from error


def _wait(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Look until it is done; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _path_of(group: WeightGroup) -> Path:
    return file_of(group.address)


def _version_directory(group: WeightGroup, policy_version: int) -> Path:
    return _path_of(group) / f"version_{policy_version:06d}"


def _bucket_file(directory: Path, index: int) -> Path:
    return directory / f"bucket_{index:04d}.safetensors"
