"""JSON for other programs: valid whatever a run has measured.

Input: dictionaries, lists and plain values.  Output: text.
"""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(document: object, indent: int | None = None) -> str:
    """NaN and infinities, for which JSON has no word, are null."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
