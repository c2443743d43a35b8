"""What an evaluation samples: written once to its directory, read by its processes.

evaluation.json     these settings
samples-0.jsonl     samples of its first process (samples_file.py)
summary.json        the figures, once all samples are there
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhpc.config import Config
from rlhpc.errors import ConfigError
from rlhpc.files import write_atomically

NAME = "evaluation.json"
OF_RUNS = {"path", "name", "weight", "max_prompt_tokens", "max_completion_tokens"}  # of [data]; other keys decide
SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Model, data and engine as a run file has them, and how much is sampled."""

    config: Config
    title: str  # the model and the data, for people
    samples_per_prompt: int
    num_prompts: int  # the first ones in the seeded order
    temperature: float  # 0: the most likely token each time
    inputs: dict[str, Any]  # digests of what the samples depend on

    @property
    def identity(self) -> dict[str, Any]:
        """What determines a sample, by key: samples under different values do not belong together."""
        config = self.config
        return {
            **{f"inputs.{name}": value for name, value in self.inputs.items()},
            **{f"data.{key}": value for key, value in config.data[0].model_dump(mode="json", exclude=OF_RUNS).items()},
            **_of_environment(config),
            **_of_tasks(config),
            "generation.engine": config.generation.engine,
            "generation.max_prompt_tokens": config.generation.max_prompt_tokens,
            "generation.max_completion_tokens": config.generation.max_completion_tokens,
            "generation.stop": list(config.generation.stop),
            "model.chat_template_kwargs": config.model.chat_template_kwargs,
            "model.dtype": config.model.dtype,
            "run.seed": config.run.seed,
            "temperature": self.temperature,
        }

    @property
    def num_samples(self) -> int:
        """Of all prompts."""
        return self.num_prompts * self.samples_per_prompt

    def write(self, directory: Path) -> None:
        """Write them into an evaluation's directory.  Raises OSError."""
        document = {
            "config": self.config.model_dump(mode="json"),
            **{name: getattr(self, name) for name in _PLAIN},
        }
        write_atomically(directory / NAME, json.dumps(document, indent=1).encode())


def _of_environment(config: Config) -> dict[str, Any]:
    """What determines a dialogue; a corpus counts by its contents, which are among the inputs."""
    if not config.data[0].environment:
        return {}
    table = config.environment.model_dump(mode="json", exclude={"corpus"})
    return {f"environment.{key}": value for key, value in table.items()}


def _of_tasks(config: Config) -> dict[str, Any]:
    """The tables that say how the dataset's tasks judge."""
    found: dict[str, Any] = {}
    for task in config.data_tasks:
        if task in config.composite:
            found[f"composite.{task}"] = config.composite[task].model_dump(mode="json")
        for part, key, table in (
            ("llm_judge", "judge", config.judge),
            ("instruction_following", "instructions", config.instructions),
            ("math_answer", "math", config.math),
            ("exact_match", "text", config.text),
            ("token_f1", "text", config.text),
        ):
            if part in config.parts_of(task):
                values = table.model_dump(mode="json", exclude=_EFFORT)
                found |= {f"{key}.{name}": value for name, value in values.items()}
    return found


_EFFORT = {"timeout_s", "attempts", "backoff_s", "requests_per_s", "key_variable", "key_file", "cache"}  # of no verdict
_PLAIN = ("title", "samples_per_prompt", "num_prompts", "temperature", "inputs")


def read_settings(directory: Path) -> EvaluationSettings | None:
    """Read an evaluation's settings; None if there are none.  Raises ConfigError if the file is damaged."""
    path = directory / NAME
    try:
        document = json.loads(path.read_bytes())
        config = Config.model_validate(document["config"])
        return EvaluationSettings(config, **{name: document[name] for name in _PLAIN})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{path}: damaged: {error}") from error
