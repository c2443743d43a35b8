"""The types of messages."""

from __future__ import annotations

import typing

import numpy as np
import pytest

from rlhpc.protocol import types


@pytest.mark.parametrize("name", ["Int32", "UInt8", "Float32", "Bool"])
def test_an_array_type_is_written_out(name: str) -> None:
    """NumPy 2.5 made NDArray[…] the name of an alias, and no message with one could be sent."""
    assert typing.get_origin(getattr(types, name)) is np.ndarray
    assert "NDArray" not in vars(types)
