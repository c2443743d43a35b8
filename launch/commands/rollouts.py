"""`rlhpc rollouts RUN_DIR`: transcripts of sampled rollouts, as text, as one HTML page, or as JSON lines.

Input: the directory of a run that is running, was killed, or was copied from elsewhere.  Output: transcripts.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from launch.common.counted import counted
from launch.common.json_text import json_text
from launch.common.pager import print_paged
from launch.common.paths import without_dots
from launch.common.standard_output import say_or_lose
from launch.common.text_table import escaped
from launch.reading.rollouts import RunRollouts, SeenRollout, Selection, sample_of
from launch.reading.transcript import as_document, transcripts
from rlhpc.errors import ConfigError
from rlhpc.run_layout import RunLayout
from rlhpc.types import Verdict


def show_rollouts(options: argparse.Namespace) -> int:
    """Print, or write the page.  Raises ConfigError: no run, or an option that selects nothing sensible."""
    selection = selection_of(options)
    rollouts = RunRollouts(RunLayout(without_dots(options.run_dir)), tokenizer_dir=options.tokenizer, tell=_tell)
    if options.html is not None:
        return _write_page(rollouts, selection, options)
    shown = [0]
    chosen = _counted(_chosen(rollouts.each(selection), options.sample), shown)
    if options.json:
        for seen in chosen:
            print(json_text(as_document(seen)))
        _tell(counted(shown[0], "rollout"))
        return 0
    first = next(iter(chosen), None)
    if first is None:
        _tell("no rollout of this run is selected")
        return 0
    print_paged(transcripts(chain([first], chosen)))
    _tell(f"{counted(shown[0], 'rollout')} shown")
    return 0


def _counted(rollouts: Iterator[SeenRollout], shown: list[int]) -> Iterator[SeenRollout]:
    for seen in rollouts:
        shown[0] += 1
        yield seen


def selection_of(options: argparse.Namespace) -> Selection:
    """What the options ask for.  Raises ConfigError."""
    if options.verdict is not None and options.verdict not in (legal := [each.value for each in Verdict]):
        raise ConfigError(f"--verdict {options.verdict}; legal: {', '.join(legal)}")
    low, high = options.min_reward, options.max_reward
    if low is not None and high is not None and low > high:
        raise ConfigError(f"--min-reward {low:g} is above --max-reward {high:g}: nothing is between them")
    return Selection(_steps(options.step), options.task, options.verdict, low, high, _pattern(options.grep))


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ConfigError(f"--step {text}; legal: a step, such as 7, or the first and the last of some, such as 5-9")
    return int(match[1]), int(match[2] or match[1])


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"--grep {text!r} is not a Python regular expression: {error}") from error


def _chosen(rollouts: Iterator[SeenRollout], number: int | None) -> Iterator[SeenRollout]:
    """The same ones each time, so that two people who type the same command speak of the same rollouts."""
    if number is None:
        return rollouts
    return iter(sample_of(rollouts, number, random.Random(0).randrange))


def _write_page(rollouts: RunRollouts, selection: Selection, options: argparse.Namespace) -> int:
    from launch.reading.rollouts_page import write_page

    rows: Iterable[SeenRollout] = _chosen(rollouts.each(selection), options.sample)
    written = write_page(options.html, rollouts, rows)
    print(f"{options.html}: {written}")
    return 0


def _tell(line: str) -> None:
    say_or_lose(f"rlhpc: {escaped(line)}")
