"""The description of a dev cluster that its directory keeps: cluster.json, written once.

Reads and writes Description.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Self

from launch.dev_cluster.shape import ClusterShape, NodeGroup, Partition, Times


@dataclass(frozen=True, slots=True)
class Description:
    """What cluster.json holds."""

    shape: ClusterShape
    prefix: str | None
    first_job_id: int

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def decode(cls, text: str) -> Self:
        """From JSON."""
        raw = json.loads(text)
        shape = ClusterShape(
            tuple(NodeGroup(**{**each, "features": tuple(each["features"])}) for each in raw["shape"]["groups"]),
            tuple(Partition(**{**each, "groups": tuple(each["groups"])}) for each in raw["shape"]["partitions"]),
            Times(**raw["shape"]["times"]),
            *(raw["shape"][flag] for flag in ("has_accounting", "enforces_limits", "has_networks")),
        )
        return cls(shape, raw["prefix"], raw["first_job_id"])
