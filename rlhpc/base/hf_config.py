"""The one reading of a config.json whose model also sees: the language model's keys are in a table of their own.

Input: the content of config.json, or of generation_config.json.  Output: the same with the language model's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT = "text_config"  # table of config.json that describes the language model inside one that also sees


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Content of config.json; of a model that also sees, with the keys of its language model, for which it has none."""
    inner = config.get(TEXT)
    return {**(inner if isinstance(inner, Mapping) else {}), **config}
