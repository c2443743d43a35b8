"""From a target, a dataset and the user's words to the settings of an evaluation.

Input: Target, path of a dataset, overrides.  Output: Config, of which an evaluation uses [model], [data], [generation]
and [rewards].  A model from a run is evaluated as it was trained, unless the words say otherwise; but for the seed, so
that of a dataset all models get the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.commands.evaluate.target import Target
from rlhpc.config import Config
from rlhpc.config_file import settled
from rlhpc.errors import ConfigError

OPEN = ("data", "generation", "rewards")  # sections that the words may change
OPEN_KEYS = ("model.dtype", "run.seed")
UNUSED = {
    "admission": {"groups_per_step": 1, "group_size": 2},
    "trainer": {"backend": "reference", "device": "cpu", "token_budget": 1 << 40},
}


def evaluation_config(target: Target, data: Path, words: Sequence[str]) -> Config:
    """Raises ConfigError: a key that an evaluation does not have, and what config_file.load_config raises."""
    for word in words:
        key = word.partition("=")[0].strip()
        if key == "generation.temperature":
            raise ConfigError(f"{word!r}: an evaluation has --temperature for it")
        if key == "data.path":
            raise ConfigError(f"{word!r}: the dataset is the second argument of `rlhpc evaluate`")
        if key.partition(".")[0] not in OPEN and key not in OPEN_KEYS:
            legal = ", ".join((*(f"{section}.…" for section in OPEN), *OPEN_KEYS))
            raise ConfigError(f"{word!r}: not a setting of an evaluation; legal: {legal}")
    # Seeds: what a killed evaluation had begun is drawn again alike.  The engine has its GPUs to itself.
    data_here = {"path": str(data), "shuffle": True}
    generation = {"seeded_samples": True, "kv_cache_bytes": None}
    document: dict[str, Any] = {
        "run": {"name": "evaluation", "num_steps": 1},
        "model": {"path": str(target.model)},
        "data": data_here,
        "generation": generation,
        **UNUSED,
    }
    if (run := target.settings) is not None:
        document["model"]["dtype"] = run.model.dtype
        document["data"] = run.data.model_dump(mode="json") | data_here
        document["generation"] = run.generation.model_dump(mode="json") | generation | {"temperature": 1.0}
        document["rewards"] = run.rewards.model_dump(mode="json")
    return settled(document, words, "evaluation")
