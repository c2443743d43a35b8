"""Rollouts as text for a terminal, and as JSON for programs.

Input: SeenRollout.  Output: lines.  Sampled text may contain anything: control characters, which could move the cursor
or do worse, are shown escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from launch.common.counted import counted
from launch.common.text_table import escaped
from launch.reading.rollouts import SeenRollout
from rlhpc.types import Int32

_RULE = "─" * 80


def transcripts(rollouts: Iterable[SeenRollout]) -> Iterator[str]:
    """Lines for people: each group's prompt once, below it the selected completions."""
    group_id: int | None = None
    for seen in rollouts:
        if seen.group_id != group_id:
            group_id = seen.group_id
            yield from _head(seen)
        yield from _completion(seen)


def as_document(seen: SeenRollout) -> dict[str, Any]:
    """The same for programs: every field, and staleness."""
    document = {each.name: _plain(getattr(seen, each.name)) for each in fields(seen)}
    return document | {"staleness": seen.staleness, "advantage": seen.advantage}


def ranges(versions: Int32) -> str:
    """ "3", or "3 to 5"; versions never fall within a completion."""
    first, last = int(versions[0]), int(versions[-1])
    return f"{first}" if first == last else f"{first} to {last}"


def fate(seen: SeenRollout) -> str:
    """What became of a rollout, in words."""
    match seen.standing:
        case "trained":
            return f"trained in step {seen.step}"
        case "skipped":
            return f"in step {seen.step}, which was skipped"
        case "taken":
            return f"taken for step {seen.step}"
        case "dropped":
            return f"dropped: {seen.drop_reason}"
    return "in no batch yet"


def _head(seen: SeenRollout) -> Iterator[str]:
    leases = f", lease {seen.attempts}" if seen.attempts > 1 else ""
    yield _RULE
    yield f"group {seen.group_id}: {escaped(seen.task)}, {fate(seen)} (prompt {seen.prompt_id}{leases})"
    yield from _block("prompt", seen.prompt)
    yield from _block("reference", seen.reference)


def _completion(seen: SeenRollout) -> Iterator[str]:
    yield ""
    yield f"  [{seen.sample_index}] {_worth(seen)}"
    yield f"      {_origin(seen)}"
    if seen.detail:
        yield f"      verifier: {escaped(seen.detail)}"
    yield from _block("completion", seen.completion)


def _worth(seen: SeenRollout) -> str:
    parts = ", ".join(f"{escaped(name)} {value:g}" for name, value in seen.reward_parts.items())
    reward = "no reward" if math.isnan(seen.reward) else f"reward {seen.reward:.4g}"
    advantage = "" if seen.advantage is None else f", advantage {seen.advantage:+.3f}"
    return f"{seen.verdict}, {reward}{f' ({parts})' if parts else ''}{advantage}"


def _origin(seen: SeenRollout) -> str:
    age = "" if seen.staleness is None else f", trained at {seen.trained_version}: staleness {seen.staleness}"
    said = f"{counted(len(seen.token_ids), 'token')}, {seen.finish_reason}; versions {ranges(seen.versions)}"
    return f"{said}, admitted at {seen.admitted_version}{age}"


def _block(title: str, text: str) -> Iterator[str]:
    lines = escaped(text).split("\n") or [""]
    for number, line in enumerate(lines):
        yield f"{'' if number else title:<10} │ {line}".rstrip()


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value
