"""`rlhpc reward`: judge completions of a file by a task, like the reward service of a run.

Input: JSON lines with a completion and a reference each.  Output: verdict, reward and parts of each, in their order, as
a table or JSON lines.  Workers, time and memory are those of [rewards] and [sandbox].
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.common.text import aligned, file_and_settings, json_text, printable
from launch.evaluate.request import document_without_run
from rlhpc.config.file import load_config, settled
from rlhpc.config.rules import Config
from rlhpc.config.tables import WHOLE_RECORD
from rlhpc.config.tables_services import is_code
from rlhpc.data.files import json_lines
from rlhpc.data.record_source import Record
from rlhpc.data.tokenizer import answer_of
from rlhpc.protocol.errors import ConfigError, DataError
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.code_place import check_sandbox
from rlhpc.rewards.pool import Judgement, open_pool
from rlhpc.rewards.registry import validate_task

EXIT_NOT_JUDGED = 1  # a verifier failed
OPEN = (
    "rewards",
    "sandbox",
    "instructions",
    "math",
    "text",
    "composite",
    "judge",
    "reward_model",
    "service",
)  # sections that the words may change
_SHOWN_CHARACTERS = 60


def judge_records(options: argparse.Namespace) -> int:
    """Print a verdict for each record.  Returns 1 if a verifier failed on one, else 0, also if all are wrong.

    Raises ConfigError, DataError, SandboxError; RoleFailed if the function cannot be imported.
    """
    file, overrides = file_and_settings(options.words, "file, and settings (key=value)")
    config = _settings(options, overrides)
    field = options.reference or _reference_field(config, options.task)
    for part in config.parts_of(options.task):
        validate_task(part, config.rewards.task_arguments.get(part, {}))
    for service in config.services_asked_by(options.task):
        if service.path is not None:
            raise ConfigError(
                f"{options.task!r} asks service {service.name!r}, which a run starts, and there is none here; legal: "
                f"the address of a server with this model, service=[{{ name = {service.name!r}, kind = "
                f'{service.kind!r}, url = "http://HOST:PORT/v1" }}]'
            )
    check_sandbox(config.sandbox, is_needed=is_code(config, options.task))
    records = _records(file)
    if not records:
        raise ConfigError(
            f"{file or 'standard input'}: holds no record; legal: one JSON object per line, with fields "
            f"{options.completion!r} and {field!r}"
        )
    end = _thinking_end(config, options.task)
    completions = [answer_of(record.text(options.completion, "--completion"), end)[0] for record in records]
    references = [_reference(record, field, options.completion) for record in records]
    asked = list(zip(completions, references, strict=True))

    def show(place: int, judgement: Judgement) -> None:
        if options.json:
            print(json_text(_document(records[place], judgement)), flush=True)

    found = asyncio.run(_judge(config, options.task, asked, show))
    if not options.json:
        print(_table(records, found))
    return EXIT_NOT_JUDGED if any(each.verdict is Verdict.VERIFIER_ERROR for each in found) else 0


def _settings(options: argparse.Namespace, words: Sequence[str]) -> Config:
    for word in words:
        if re.split("[.=]", word)[0].strip() not in OPEN:
            legal = ", ".join(f"{section}.…" for section in OPEN)
            raise ConfigError(
                f"{word!r}: not a setting of `rlhpc reward`; legal: {legal}, the others in --run RUN.toml"
            )
    if options.run is not None:
        return load_config(options.run, words)
    data = {"path": ".", "task": options.task, "reference_field": options.reference or "reference"}
    document = document_without_run("reward", data, {"max_prompt_tokens": 1, "max_completion_tokens": 1})
    return settled(document, words, "command line")


def _records(file: Path | None) -> list[Record]:
    if file in (None, Path("-")):
        return _records_of(sys.stdin.buffer, "standard input")
    try:
        with file.open("rb") as lines:
            return _records_of(lines, str(file))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _records_of(lines: Iterable[bytes], name: str) -> list[Record]:
    return [Record(fields, f"{name}:{number}") for fields, number in json_lines(lines, name)]


def _reference_field(config: Config, task: str) -> str:
    """Reference field of a task in the run file; of a task without dataset, that of all datasets if they agree."""
    of_task = {dataset.reference_field for dataset in config.data if dataset.task == task}
    fields = of_task or {dataset.reference_field for dataset in config.data}
    if len(fields) > 1:
        raise ConfigError(
            f"--reference is missing: the datasets of the run file have {', '.join(map(repr, sorted(fields)))}"
        )
    return fields.pop()


def _thinking_end(config: Config, task: str) -> str:
    """data.thinking_end of the datasets of a task; "" for another task."""
    ends = {dataset.thinking_end for dataset in config.data if task in dataset.all_tasks} or {""}
    if len(ends) > 1:
        raise ConfigError(
            f"data.thinking_end of the datasets that {task!r} judges is {' and '.join(map(repr, sorted(ends)))}; legal "
            "here: the same for all"
        )
    return ends.pop()


def _reference(record: Record, field: str, completion: str) -> str:
    if field == WHOLE_RECORD:  # as it is in a dataset, which has no completion
        rest = {name: value for name, value in record.fields.items() if name != completion}
        record = Record(rest, record.source)
    return record.reference(field, "--reference")


async def _judge(
    config: Config, task: str, asked: Sequence[tuple[str, str]], show: Callable[[int, Judgement], None]
) -> list[Judgement]:
    """Judge in the order of the records; show each judgement once those before it are shown."""
    num_workers = min(config.rewards.workers_per_replica, max(1, len(asked)))
    found: list[Judgement] = []
    async with open_pool(config, [task], num_workers) as pool:
        calls = [asyncio.create_task(pool.judge(task, *each)) for each in asked]
        try:
            for place, call in enumerate(calls):
                found.append(await call)
                show(place, found[-1])
        finally:
            await pool.close()
            await asyncio.gather(*calls, return_exceptions=True)
    return found


def _document(record: Record, judgement: Judgement) -> dict[str, Any]:
    """The judgement as JSON for programs; reward is null if the verifier failed."""
    is_judged = judgement.verdict is not Verdict.VERIFIER_ERROR
    return {
        "line": _line_of(record),
        "verdict": judgement.verdict.value,
        "reward": judgement.reward if is_judged else None,
        "parts": judgement.parts,
        "answer": judgement.answer,
        "detail": judgement.detail,
        **({"rewards_at": judgement.rewards_at} if judgement.rewards_at else {}),
    }


def _table(records: Sequence[Record], found: Sequence[Judgement]) -> str:
    rows: list[tuple[str, ...]] = [("LINE", "VERDICT", "REWARD", "PARTS", "DETAIL")]
    rows += [_row(record, judgement) for record, judgement in zip(records, found, strict=True)]
    return "\n".join([*aligned(rows), _total(found)])


def _row(record: Record, judgement: Judgement) -> tuple[str, ...]:
    is_judged = judgement.verdict is not Verdict.VERIFIER_ERROR
    parts = ", ".join(f"{printable(name)} {value:g}" for name, value in judgement.parts.items())
    # A verifier's failure is shown in full.
    detail = printable(judgement.detail)[: _SHOWN_CHARACTERS if is_judged else None]
    reward = f"{judgement.reward:g}" if is_judged else "-"
    return str(_line_of(record)), judgement.verdict.value, reward, parts or "-", detail or "-"


def _total(found: Sequence[Judgement]) -> str:
    counts = Counter(judgement.verdict for judgement in found)
    rewards = [judgement.reward for judgement in found if judgement.verdict is not Verdict.VERIFIER_ERROR]
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    words = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    return f"{len(found)} judged: {words}{mean}"


def _line_of(record: Record) -> int:
    return int(record.source.rpartition(":")[2])
