"""What whole runs need, made once a session."""

from __future__ import annotations

import pytest

from tests.ring.run_kit import Lab, make_lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A model, a dataset and a place for runs."""
    return make_lab(tmp_path_factory.mktemp("lab"))
