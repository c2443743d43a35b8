"""Two streams of tests: those on Slurm wait most of their time, and the others need the cores meanwhile.

`make test` runs both at once (pytest-xdist, --dist loadgroup); without -n they run one after the other, as ever.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_on_slurm = "slurm" in item.path.parts
        item.add_marker(pytest.mark.xdist_group("slurm" if is_on_slurm else "rest"))
