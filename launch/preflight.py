"""What can be known to be wrong before any process is started.

Eats Config; raises ConfigError with the place, or returns what it found out.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from rlhpc.config import Config
from rlhpc.data.prompts import DatasetSummary, validate_dataset
from rlhpc.errors import ConfigError
from rlhpc.rewards.registry import validate_task

_NEEDED = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class Findings:
    """What preflight learnt about model and data."""

    model_type: str
    max_positions: int
    dataset: DatasetSummary


def preflight(config: Config) -> Findings:
    """Check model directory, task, dataset and installed parts, cheapest first.  Raises ConfigError."""
    model = _model_config(config)
    _parts_are_installed(config)
    validate_task(config.data.task)
    longest = config.generation.max_prompt_tokens + config.generation.max_completion_tokens
    positions = int(model.get("max_position_embeddings", longest))
    if longest > positions:
        raise ConfigError(
            f"generation.max_prompt_tokens + generation.max_completion_tokens = {longest} is more than the model's "
            f"context of {positions} (max_position_embeddings in {config.model.path / 'config.json'})"
        )
    return Findings(str(model.get("model_type", "?")), positions, validate_dataset(config))


def _model_config(config: Config) -> dict[str, Any]:
    path = config.model.path
    if not path.is_dir():
        raise ConfigError(f"model.path={str(path)!r}: no such directory; give an HF checkpoint directory")
    missing = [name for name in _NEEDED if not (path / name).exists()]
    if missing or not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model.path={str(path)!r}: not a complete HF checkpoint: {', '.join(missing) or '*.safetensors'} missing"
        )
    try:
        document: dict[str, Any] = json.loads((path / "config.json").read_bytes())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path / 'config.json'}: not JSON: {error}") from error
    return document


def _parts_are_installed(config: Config) -> None:
    needed = {"torch": "trainer.backend", "transformers": "trainer.backend"}
    if config.generation.engine == "vllm":
        needed["vllm"] = "generation.engine='vllm'"
    for module, key in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{key} needs the package {module}, which is not installed here (README, Install)")
