"""Transfer weights through files of the run directory: slow, but possible everywhere.

Input: a WeightManifest and tensors.  Publisher and receivers share only a directory with atomic rename:

    epoch_000003/joined_0001                    rank 1 has joined
    epoch_000003/version_000012/bucket_0000.bin …       one per bucket, laid out by flat_tensors.py; or .delta
    epoch_000003/version_000012/checksums.json  written last: a version without it does not exist
    epoch_000003/version_000012/verified_0001   rank 1 has the whole version ("torn_0001": it has not)

A rank that keeps the version writes its identity into "verified".  If every rank does, the next version's buckets are
sent as deltas (delta_file.py), except those with too many changes.  The two newest versions are kept.  The directory is
removed when the epoch is dissolved.
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
from rlhpc.files import names_in, write_atomically
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast_header import check_header, check_sums, header_of, identity_of
from rlhpc.weights.buckets import buckets_of, manifest_bytes
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import exhaust, fill_block
from rlhpc.weights.host_image import MAX_SHARE, NOTHING, HostImage
from rlhpc.weights.rendezvous_file import file_of, remove_left_over

NUM_KEPT_VERSIONS = 2
LOOK_EVERY_S = 0.05  # each look is a directory listing, which takes 0.01 s on a parallel filesystem
CHECKSUMS = "checksums.json"
DELTA = ".delta"  # suffix of a bucket that is sent as a delta


class DiskPublisher(WeightPublisher):
    """Writes versions as files."""

    def __init__(self, directory: Path, timeout_s: float, image: HostImage | None = None) -> None:
        """directory: the run's weights directory; created if needed.  image: for deltas; None: write none."""
        self._directory, self._timeout_s = directory, timeout_s
        self._opened: WeightGroup | None = None
        self._is_formed = False
        self._image = image
        self._kept = NOTHING  # identity of the version that all receivers of this epoch keep
        self._do_receivers_keep = False

    def open(self, group: WeightGroup) -> WeightGroup:
        """Make the epoch's directory, empty; see WeightPublisher."""
        self.dissolve()
        directory = self._directory / f"epoch_{group.epoch:06d}"
        try:
            shutil.rmtree(directory, ignore_errors=True)  # of an earlier attempt of the run with the same number
            directory.mkdir(parents=True)
        except OSError as error:
            raise GroupFailed(f"the rendezvous {directory} could not be created: {error}") from error
        self._opened = replace(group, address=f"file://{directory}")
        return self._opened

    def form(self) -> None:
        """Wait until every rank has written its file; see WeightPublisher."""
        if self._opened is None:
            raise GroupFailed("no rendezvous is open")
        directory = _path_of(self._opened)
        missing = marks = {f"joined_{rank:04d}" for rank in range(1, self._opened.world_size)}
        for _ in Deadline(self._timeout_s).polls(LOOK_EVERY_S):
            missing = marks - names_in(directory)
            if not missing:
                self._is_formed = True
                return
        raise GroupFailed(f"{', '.join(sorted(missing))} missing in {directory} after {self._timeout_s:g} s")

    def publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write, then wait until every rank has verified it; see WeightPublisher."""
        try:
            if self._opened is None or not self._is_formed or self._opened.epoch != manifest.epoch:
                raise GroupFailed(f"epoch {manifest.epoch} is not formed")
            directory = _version_directory(self._opened, manifest.policy_version)
            try:
                num_bytes = self._write(directory, manifest, weights)
                self._wait_for_verdicts(directory)
            except OSError as error:
                raise GroupFailed(f"version {manifest.policy_version} could not be written: {error}") from error
            self.sent_share = num_bytes / max(1, manifest_bytes(manifest))
        finally:
            exhaust(weights)
        self._remove_superseded()

    def dissolve(self) -> None:
        """Remove the epoch's directory; see WeightPublisher."""
        if self._opened is not None:
            shutil.rmtree(_path_of(self._opened), ignore_errors=True)
        self._opened, self._is_formed = None, False
        self._kept, self._do_receivers_keep = NOTHING, False

    def _write(self, directory: Path, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Returns the bytes of all buckets' files."""
        image = self._image
        offered = NOTHING if image is None else image.offer(manifest)
        if image is not None and offered != NOTHING and offered == self._kept:
            image.forget()
            sums, num_bytes = _write_deltas(directory, manifest, weights, image.blocks, offered)
            image.became(manifest, sums, by_delta=True)
            return num_bytes
        if image is not None and self._do_receivers_keep and image.make_room(manifest):
            image.became(manifest, _write_whole(directory, manifest, weights, image.blocks), by_delta=False)
        else:
            largest = max((bucket.num_bytes for bucket in buckets_of(manifest)), default=0)
            buffer = torch.zeros(largest, dtype=torch.uint8)
            blocks = [buffer[: bucket.num_bytes] for bucket in buckets_of(manifest)]
            _write_whole(directory, manifest, weights, blocks)
        return manifest_bytes(manifest)

    def _wait_for_verdicts(self, directory: Path) -> None:
        assert self._opened is not None
        ranks = range(1, self._opened.world_size)
        verified, torn = list[int](), list[int]()
        for _ in Deadline(self._timeout_s).polls(LOOK_EVERY_S):
            names = names_in(directory)
            verified, torn = (
                [rank for rank in ranks if f"{kind}_{rank:04d}" in names] for kind in ("verified", "torn")
            )
            if len(verified) + len(torn) == len(ranks):
                break
        missing = set(ranks) - set(verified)
        if missing:
            raise GroupFailed(
                f"{directory.name}: ranks {sorted(missing)} of {self._opened.world_size} did not verify it "
                f"(found it torn: {torn})"
            )
        kept = {(directory / f"verified_{rank:04d}").read_text() for rank in ranks}
        self._do_receivers_keep = "" not in kept
        self._kept = int(kept.pop(), 16) if self._do_receivers_keep and len(kept) == 1 else NOTHING

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
        self._identity = 0

    def join(self, group: WeightGroup, rank: int) -> None:
        """Write this rank's file; see WeightReceiver."""
        self.leave()
        try:
            (_path_of(group) / f"joined_{rank:04d}").touch()
        except OSError as error:
            raise GroupFailed(f"no rendezvous at {group.address!r}: {error}") from error
        self._group, self._rank = group, rank

    def receive(
        self, manifest: WeightManifest, allocate: Allocate, held: int | None = None
    ) -> Generator[Tensor, None, None]:
        """Read every bucket as soon as it exists, verify at the end; see WeightReceiver."""
        group, self._identity = self._group, 0
        if group is None or group.epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        directory = _version_directory(group, manifest.policy_version)
        verdict, kept = "torn", ""
        try:
            sums, names = list[int](), set[str]()
            for index, bucket in enumerate(buckets_of(manifest)):
                path = _bucket_file(directory, index)
                delta = path.with_suffix(DELTA)
                if path.name not in names and delta.name not in names:  # of the last look
                    names = self._wait_for(path, delta, directory / CHECKSUMS)
                block = allocate(index, torch.device("cpu"))
                if delta.name in names:
                    _read_delta(delta, held, block)
                else:
                    _read_bucket(path, block, bucket.num_bytes)
                sums.append(checksum64(block))
                yield block
            self._wait_for(directory / CHECKSUMS)
            _verify(directory, manifest, sums)
            self._identity = identity_of(manifest, sums)
            verdict, kept = "verified", "" if held is None else f"{self._identity:x}"
        finally:
            if self._group is not None:
                _leave_verdict(directory, f"{verdict}_{self._rank:04d}", kept)

    def _wait_for(self, *any_of: Path) -> set[str]:
        """Return the names in their directory.  Raises GroupFailed if none appears; is then a member of no group."""
        wanted = {path.name for path in any_of}
        for _ in Deadline(self._timeout_s).polls(LOOK_EVERY_S):
            if self._group is None:  # left meanwhile, by another thread
                raise GroupFailed("this member has left the group")
            names = names_in(any_of[0].parent)
            if CHECKSUMS in names:  # all files exist now, though this listing may have started before they did
                return names_in(any_of[0].parent)
            if wanted & names:
                return names
        self.leave()
        raise GroupFailed(f"{any_of[0]} did not appear within {self._timeout_s:g} s")

    def identity(self) -> int:
        """See WeightReceiver."""
        return self._identity

    def leave(self) -> None:
        """Remove this rank's file; see WeightReceiver."""
        if self._group is not None:
            remove_left_over(_path_of(self._group) / f"joined_{self._rank:04d}")
        self._group = None


def _write_whole(
    directory: Path, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]], blocks: list[Tensor]
) -> list[int]:
    """Returns the checksums.  Raises OSError."""
    directory.mkdir(exist_ok=True)
    sums: list[int] = []
    for index, (bucket, block) in enumerate(zip(buckets_of(manifest), blocks, strict=True)):
        fill_block(bucket, weights, block)
        _write_bucket(_bucket_file(directory, index), block)
        sums.append(checksum64(block))
    _write_checksums(directory, manifest, sums)
    return sums


def _write_deltas(
    directory: Path, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]], image: list[Tensor], base: int
) -> tuple[list[int], int]:
    """Write the changes to the image, which becomes the new version.  Returns checksums and bytes.  Raises OSError."""
    from rlhpc.weights.delta_codec import DeltaEncoder  # numba takes half a second to load
    from rlhpc.weights.delta_file import with_head  # the same

    directory.mkdir(exist_ok=True)
    encoder, sums, num_bytes = DeltaEncoder(MAX_SHARE), list[int](), 0
    scratch = torch.zeros(max((block.numel() for block in image), default=0), dtype=torch.uint8)
    for index, (bucket, block) in enumerate(zip(buckets_of(manifest), image, strict=True)):
        fresh, path = scratch[: bucket.num_bytes], _bucket_file(directory, index)
        fill_block(bucket, weights, fresh)
        coded = encoder.encode(block, fresh)
        written = block if coded is None else with_head(base, coded)
        _write_bucket(path if coded is None else path.with_suffix(DELTA), written)
        num_bytes += written.numel()
        sums.append(checksum64(block))
    _write_checksums(directory, manifest, sums)
    return sums, num_bytes


def _write_bucket(path: Path, block: Tensor) -> None:
    # Not synced: after a power cut no reader is left, and checksums guard against the rest.
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(_bytes_of(block))
    temporary.replace(path)


def _write_checksums(directory: Path, manifest: WeightManifest, sums: list[int]) -> None:
    write_atomically(directory / CHECKSUMS, json.dumps({"header": header_of(manifest), "checksums": sums}).encode())


def _bytes_of(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


def _read_bucket(path: Path, block: Tensor, num_bytes: int) -> None:
    """Raises TornWeights if the file is missing or has another size."""
    try:
        with path.open("rb", buffering=0) as file:
            view, filled = _bytes_of(block), 0
            while filled < num_bytes and (count := file.readinto(view[filled:])):
                filled += count
            if filled != num_bytes or file.read(1):
                raise TornWeights(f"{path} does not have {num_bytes} bytes")
    except OSError as error:
        raise TornWeights(f"{path}: {error!r}") from error


def _read_delta(path: Path, held: int | None, block: Tensor) -> None:
    """Raises TornWeights if it is missing, incomplete, or based on another version than the one in the block."""
    from rlhpc.weights.delta_file import put_delta  # numba takes half a second to load

    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise TornWeights(f"{path}: {error!r}") from error
    put_delta(
        torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8), held, block
    )


def _verify(directory: Path, manifest: WeightManifest, sums: list[int]) -> None:
    try:
        record = json.loads((directory / CHECKSUMS).read_bytes())
        check_header(manifest, record["header"])
        check_sums(manifest, record["checksums"], sums)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TornWeights(f"{directory}: {error!r}") from error


def _leave_verdict(directory: Path, name: str, text: str) -> None:
    try:
        temporary = directory / f"{name}.tmp"
        temporary.write_text(text)
        temporary.replace(directory / name)
    except OSError as error:
        raise GroupFailed(f"{directory} is gone: {error}") from error


def _path_of(group: WeightGroup) -> Path:
    return file_of(group.address)


def _version_directory(group: WeightGroup, policy_version: int) -> Path:
    return _path_of(group) / f"version_{policy_version:06d}"


def _bucket_file(directory: Path, index: int) -> Path:
    return directory / f"bucket_{index:04d}.bin"
