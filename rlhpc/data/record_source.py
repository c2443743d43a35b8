"""The records that a table [data] names: in files, or made by a library.

Input: a table [data].  Output: Records.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.config_data import DataConfig
from rlhpc.data.reasoning_gym_source import made_records
from rlhpc.data.records import Record, read_records


def records_of(data: DataConfig) -> Sequence[Record]:
    """Raises DataError for what cannot be read or made."""
    return read_records(data.path, data.split) if data.path is not None else made_records(data)
