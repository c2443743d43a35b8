"""The site file: where runs run.  So far which GPUs there are and how much memory they have.

Eats TOML, makes Site.  Unknown keys are refused.  slurm/sites/example.toml explains every key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Self

from pydantic import ValidationError, model_validator

from rlhpc.config import PositiveFloat, Section
from rlhpc.errors import ConfigError

# GiB that CUDA reports as the whole of a GPU, rounded down: less than the name says, which counts in GB.
GPU_MEMORY_GIB = {
    "a100-40": 39.3,
    "a100-80": 79.1,
    "h100": 79.1,
    "h100-94": 93.0,
    "h200": 139.7,
    "b200": 178.0,
    "gh200": 94.5,
    "l4": 22.0,
    "l40s": 44.3,
    "a40": 44.3,
    "a6000": 47.4,
    "rtx4090": 23.5,
    "v100-16": 15.7,
    "v100-32": 31.7,
}


class GpuConfig(Section):
    """The GPUs of one kind of process."""

    gpu: str
    """Name of the GPU; GPU_MEMORY_GIB lists those whose memory is known."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB (2^30 bytes), as torch.cuda.get_device_properties reports it; none: from the name."""

    @property
    def memory_gib(self) -> float:
        """As given, or of the named GPU."""
        return self.gpu_memory_gib or GPU_MEMORY_GIB[self.gpu]

    @model_validator(mode="after")
    def _memory_is_known(self) -> Self:
        if self.gpu_memory_gib is None and self.gpu not in GPU_MEMORY_GIB:
            raise ValueError(
                f"gpu={self.gpu!r}: its memory is not known here; give gpu_memory_gib, or one of "
                f"{', '.join(sorted(GPU_MEMORY_GIB))}"
            )
        return self


class Site(Section):
    """A whole site file."""

    trainer: GpuConfig
    generation: GpuConfig


def load_site(path: Path) -> Site:
    """Read a site file.  Raises ConfigError: missing, not TOML, unknown key, wrong type, a GPU of unknown memory."""
    try:
        return Site.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such site file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a directory, not a site file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in _faults(error))) from None


def _faults(error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors(include_url=False):
        *tables, key = (str(part) for part in detail["loc"])
        place = ".".join((*tables, key))
        if detail["type"] == "extra_forbidden":
            legal = (GpuConfig if tables else Site).model_fields
            lines.append(f"{place}={detail['input']!r}: unknown key; legal: {', '.join(legal)}")
        elif detail["type"] == "missing":
            lines.append(f"{place}: missing; it has no default")
        elif detail["type"] == "value_error":
            lines.append(f"{place}.{detail['ctx']['error']}")
        else:
            lines.append(f"{place}={detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}")
    return lines
