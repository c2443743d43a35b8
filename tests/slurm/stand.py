"""Clusters for tests: one that many tests share, so that none of them is harmed by what another has done to it.

Input: a recipe for a cluster.  Output: Stand.  Guarantees: `cluster` is whole at the beginning of every test.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import Installation
from launch.private_slurm.shape import LONGEST_ROOT, ClusterShape
from rlhpc.protocol.errors import RoleFailed, RunDirectoryError
from tests.slurm.healing import PATIENCE_S, restore


class Stand:
    """Where a cluster stands that is healed after every test; one that does not heal soon makes room for a new one."""

    def __init__(self, make: Callable[[], DevCluster]) -> None:
        """make: creates a cluster that has not been started."""
        self._make = make
        self._cluster: DevCluster | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cluster is not None:
            discard(self._cluster)

    @property
    def cluster(self) -> DevCluster:
        """The cluster of now; started when first asked for."""
        if self._cluster is None:
            self._cluster = self._make()
            self._cluster.start()
        return self._cluster

    def heal(self, patience_s: float = PATIENCE_S) -> list[str]:
        """Undo what was done to it; returns what that was.  Where that fails, the next test gets a new cluster."""
        try:
            amiss = restore(self.cluster, patience_s)
        except (RoleFailed, RunDirectoryError) as error:
            amiss = [f"replaced by a new cluster: {error}"]
            discard(self.cluster, at_once=True)
            self._cluster = None
        if amiss:
            sys.stdout.write(f"left behind: {'; '.join(amiss)}\n")
        return amiss


def new_cluster(shape: ClusterShape, installation: Installation) -> DevCluster:
    """A cluster in a directory of its own, not started, which ends with this process.  Give it back by `discard`."""
    root = Path(tempfile.mkdtemp(prefix="rlhpc-slurm-"))
    if len(str(root)) > LONGEST_ROOT:  # sockets go below it
        root.rmdir()
        root = Path(tempfile.mkdtemp(prefix="rlhpc-slurm-", dir="/tmp"))
    return DevCluster.create(root, shape, installation, dies_with_parent=True)


def discard(cluster: DevCluster, *, at_once: bool = False) -> None:
    """End a cluster in whatever state it is, and delete its directory."""
    try:
        with contextlib.suppress(RoleFailed):  # Slurm does not answer; what follows does not ask it
            cluster.stop(at_once=at_once)
    finally:
        cluster.stop(at_once=True)
        shutil.rmtree(cluster.layout.root, ignore_errors=True)
