"""The samples of an evaluation on disk: JSON lines that one process appends and a later one continues.

Input: samples as they are judged.  Output: samples-0.jsonl, samples-1.jsonl, … in the directory of the evaluation, one
file for each of its processes.  A killed process leaves complete lines and at most one incomplete one, which is ignored
and cut off.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhpc.errors import DataError
from rlhpc.files import naming, numbered_files

_NAME = re.compile(r"samples-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One completion and its verdict."""

    prompt: int  # its place in the order of prompts
    sample: int  # 0 … samples per prompt − 1
    source: str  # file and line of the record
    completion: str
    num_tokens: int
    finish_reason: str  # "stop", or "length" where it was cut off
    verdict: str
    reward: float  # without a meaning where the verdict is verifier_error
    answer: str = ""
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)


class SamplesFile:
    """The file of one process.  Use as a context manager."""

    def __init__(self, directory: Path, index: int) -> None:
        """Continue the file, or begin it.  Raises OSError."""
        self._path = directory / f"samples-{index}.jsonl"
        self._file = self._path.open("ab")
        os.ftruncate(self._file.fileno(), _length_of_whole_lines(self._path))

    def append(self, sample: EvaluatedSample) -> None:
        """Hand a sample to the kernel: it survives the end of this process.  Raises OSError that names the file."""
        with naming(self._path):
            self._file.write(json.dumps(asdict(sample)).encode() + b"\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with naming(self._path), self._file:
            os.fsync(self._file.fileno())


def read_samples(directory: Path) -> Iterator[EvaluatedSample]:
    """All whole samples, duplicates of a prompt and number included.  Raises DataError for a damaged line, OSError."""
    for _, path in numbered_files(directory, _NAME):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break  # it was being written when the process was killed
                try:
                    yield EvaluatedSample(**json.loads(line))
                except (ValueError, TypeError) as error:
                    raise DataError(f"{path}:{number}: not a sample of an evaluation: {error}") from error


def _length_of_whole_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(len(line) for line in lines if line.endswith(b"\n"))
