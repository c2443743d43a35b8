"""A run as exported to Weights & Biases."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launch.common.counted import counted
from launch.reading.metric_table import metric_table
from launch.reading.run_figures import settings_of
from rlhpc.metrics.curve_table import CurveTable
from rlhpc.run_layout import RunLayout


@dataclass(frozen=True)
class ExportedRun:
    """Name, settings, and an id that stays: that of another history in the same directory is another one."""

    layout: RunLayout
    table: CurveTable

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved run file, by section and key; {} where it is damaged."""
        return settings_of(self.layout)

    @property
    def name(self) -> str:
        """As in the run file."""
        return str(self.settings.get("run", {}).get("name", self.layout.root.name))

    @cached_property
    def identity(self) -> str:
        """12 hexadecimal digits, whichever metrics are exported: all of the run's are read for it."""
        began = float(metric_table(self.layout).unix_times_s[0])
        return hashlib.sha256(f"{self.layout.root}\n{began!r}".encode()).hexdigest()[:12]

    @property
    def size(self) -> str:
        """In words."""
        return f"{counted(len(self.table.steps), 'step')}, {counted(len(self.table.curves), 'metric')}"
