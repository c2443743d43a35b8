"""Cache the check of a dataset until its files, the tokenizer, the settings or the code change.

Input: Config.  Output: DatasetSummary.  Files are identified by path, size, times and inode, without reading them, so
that a million prompts are checked only once.  Faults are not cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import rlhpc
from rlhpc.config import Config
from rlhpc.data.cache import cached
from rlhpc.data.dataset_files import dataset_files
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.data.reasoning_gym_source import library_version

_CODE = ("data/*.py", "rewards/*.py", "tool_schemas.py")  # the code that determines the result
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def once(config: Config, place: int, with_references: bool, look: Callable[[], DatasetSummary]) -> DatasetSummary:
    """What `look` finds of one dataset of a run, or found before.  Raises what it raises.

    with_references: whether tasks check their references.
    """
    data = config.data[place]
    files = dataset_files(data.path, data.split) if data.path is not None else []
    package = Path(rlhpc.__file__).parent
    made_of = {
        "data": data.model_dump(mode="json"),
        "references": with_references,
        "task_tables": [
            table.model_dump(mode="json")
            for table in (config.judge, config.instructions, config.math, config.text, config.sandbox)
        ],
        "template": _states([Path(config.judge.template_file)] if config.judge.template_file else []),
        "composites": {name: table.model_dump(mode="json") for name, table in config.composite.items()},
        "tools": config.environment.tools if data.environment else (),  # prompts describe them
        "curriculum": config.curriculum.model_dump(mode="json"),
        "generation": [config.generation.max_prompt_tokens, config.generation.max_completion_tokens],
        "files": _states(files),
        "library": library_version() if data.source else "",
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "tokenizer": _states(config.model.path / name for name in _TOKENIZER),
        "code": _states(file for part in _CODE for file in sorted(package.glob(part))),
    }
    found = cached("datasets", json.dumps(made_of), lambda: json.dumps(asdict(look())).encode(), is_whole=_is_summary)
    return DatasetSummary(**json.loads(found))


def _is_summary(content: bytes) -> bool:
    try:
        DatasetSummary(**json.loads(content))
    except (TypeError, ValueError):
        return False
    return True


def _states(files: Iterable[Path]) -> list[tuple[str, int, int, int, int]]:
    """States of the files that exist; ctime cannot be set back."""
    states = ((file, file.stat()) for file in files if file.exists())
    return [(str(file), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for file, s in states]
