"""What the task reasoning_gym finds in a reference; reads it without the library, which a login node may not have."""

from __future__ import annotations

import json
from typing import Any

from rlhpc.sandbox.values import decode

_SHOWN_CHARACTERS = 80


def read_reference(reference: str) -> tuple[str, Any, Any]:
    """(name of the dataset, entry, settings) of what data.source writes.  Raises ValueError if it is something else."""
    try:
        read = json.loads(reference)
        return str(read["dataset"]), decode(read["entry"]), decode(read["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"the reference is {reference[:_SHOWN_CHARACTERS]!r}; the task reasoning_gym judges those of data.source, "
            'with data.reference_field = "entry"'
        ) from error


def check_reference(reference: str) -> None:
    """Raises ValueError if it is no entry of data.source."""
    read_reference(reference)
