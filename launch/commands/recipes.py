"""`rlhpc recipes`: the run files that reproduce published runs, and copies of them.

Input: configs/gsm8k.toml, configs/recipes/*.toml and, with adapters, configs/lora/*.toml.  Output: a table, or one file
in a directory.
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from launch.common.text import aligned, quoted
from rlhpc.base.files import write_atomically
from rlhpc.base.near_names import near_hint
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import ConfigError

DIRECTORY = Path(__file__).parents[1] / "configs"  # a link in a checkout, a folder in an installation


def recipes(options: argparse.Namespace) -> int:
    """List the recipes, or copy one; returns exit status 0."""
    if options.action is None:
        print(recipe_table())
        return 0
    copy = copy_recipe(options.name, options.directory)
    print(
        f"{copy}: put your paths into model.path and data.path; "
        f"`rlhpc check {quoted(copy)} --site SITE.toml` comes next"
    )
    return 0


def known_recipes(directory: Path = DIRECTORY) -> dict[str, Path]:
    """Files of the recipes by name, the smallest run first."""
    folders = [sorted((directory / name).glob("*.toml")) for name in ("lora", "recipes")]
    paths = (directory / "gsm8k.toml", *chain(*folders))
    return {path.stem: path for path in sorted(paths, key=lambda path: sum(num_gpus(load_config(path))))}


def num_gpus(config: Config) -> tuple[int, int]:
    """Numbers of GPUs of trainer ranks, of engines."""
    return config.trainer.num_ranks, config.generation.num_replicas * config.generation.tensor_parallel


def recipe_table(directory: Path = DIRECTORY) -> str:
    """Table of recipes: name, GPUs of trainer and engines, first sentence of the file's head."""
    rows = [("recipe", "GPUs", "")]
    for name, path in known_recipes(directory).items():
        train, generate = num_gpus(load_config(path))
        first, *_ = path.read_text(encoding="utf-8").splitlines()
        rows.append((name, f"{train} + {generate}", first.removeprefix("# ")))
    return "\n".join(aligned(rows))


def copy_recipe(name: str, into: Path, directory: Path = DIRECTORY) -> Path:
    """Write the recipe's file into an existing directory; return its path.  Raises ConfigError, OSError."""
    known = known_recipes(directory)
    if name not in known:
        raise ConfigError(f"recipe {name!r}: unknown; legal: {', '.join(known)}{near_hint(name, known)}")
    if not into.is_dir():
        raise ConfigError(f"{into} is not a directory; legal: one that exists")
    copy = into / f"{name}.toml"
    if copy.exists():
        raise ConfigError(f"{copy} exists already; legal: another directory, or move it away")
    write_atomically(copy, known[name].read_bytes())
    return copy
