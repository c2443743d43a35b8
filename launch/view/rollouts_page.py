"""Rollouts of a run as one page for a browser: an index of all, and with texts as many as fit into a few megabytes.

    SeenRollout … ─▶ index: a number a column         ─▶ JSON in rollouts_page.html
                  └▶ groups drawn at random, up to a ─▶ texts, tokens, their log-probabilities, versions, advantages
                     size

The page needs no network and no other file.  Everything that a model has sampled is embedded as data and shown as text,
never as markup.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from markupsafe import Markup

from launch.view.report import embedded, filled_template, write_whole
from launch.view.rollouts import RunRollouts, SeenRollout, Texts

MOST_BYTES = 4_800_000
MOST_INDEX_ROWS = 60_000  # of a page that has room for texts beside them
_TEMPLATE = "rollouts_page.html"
# Least bytes of JSON of each besides its texts: groups are kept by this estimate, and measured at the end.
_BYTES_PER_TOKEN, _BYTES_PER_ROLLOUT, _BYTES_PER_GROUP = 4, 60, 60
_WORDS = ("standing", "task", "verdict", "finish")
_NUMBERS = ("step", "group", "sample", "reward", "advantage", "length", "staleness", "admitted")


@dataclass(frozen=True, slots=True)
class Written:
    """The size of the page."""

    num_rollouts: int
    num_with_text: int
    num_left_out: int  # not in the index either
    num_bytes: int

    def __str__(self) -> str:
        """Text for a terminal."""
        left = f"; {self.num_left_out:,} more are not in it: select fewer" if self.num_left_out else ""
        size = f"{self.num_bytes / 1e6:.1f} MB"
        return f"{self.num_rollouts:,} rollouts, {self.num_with_text:,} of them with text, {size}{left}"


@dataclass(slots=True)
class _Index:
    """A column of numbers for each field; words are stored as indices into a list."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in (*_NUMBERS, *_WORDS)})
    words: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in _WORDS})

    def add(self, seen: SeenRollout) -> int:
        """Add a rollout; return its row."""
        standing = f"{seen.standing}: {seen.drop_reason}" if seen.drop_reason else seen.standing
        facts: dict[str, Any] = {
            "step": seen.step,
            "group": seen.group_id,
            "sample": seen.sample_index,
            "reward": _rounded(seen.reward, 4),
            "advantage": _rounded(seen.advantage, 3),
            "length": len(seen.token_ids),
            "staleness": seen.staleness,
            "admitted": seen.admitted_version,
            **{
                name: self.words[name].setdefault(word, len(self.words[name]))
                for name, word in zip(_WORDS, (standing, seen.task, seen.verdict, seen.finish_reason), strict=True)
            },
        }
        for name, column in self.columns.items():
            column.append(facts[name])
        return len(self.columns["step"]) - 1


class _Drawn:
    """Groups drawn at random, as many as fit; groups of one size are equally likely."""

    def __init__(self, most_bytes: int) -> None:
        self._left, self._random = most_bytes, random.Random(0)
        self._heap: list[tuple[float, int, int, list[tuple[int, SeenRollout]]]] = []  # -lot, number, bytes, members
        self._limit = 2.0  # groups with higher lots were dropped before

    def offer(self, members: list[tuple[int, SeenRollout]]) -> None:
        """Keep a group if it fits.  members: (row, rollout) of all its members."""
        lot, size = self._random.random(), _estimate([seen for _, seen in members])
        if lot >= self._limit:
            return
        heapq.heappush(self._heap, (-lot, members[0][0], size, members))
        self._left -= size
        while self._left < 0:
            given_up, _, size, _ = heapq.heappop(self._heap)
            self._left += size
            self._limit = min(self._limit, -given_up)

    def groups(self) -> list[list[tuple[int, SeenRollout]]]:
        """The groups kept, in the order of their lots."""
        return [members for _, _, _, members in sorted(self._heap, key=lambda each: -each[0])]


def write_page(path: Path, rollouts: RunRollouts, rows: Iterable[SeenRollout], most_bytes: int = MOST_BYTES) -> Written:
    """Write the page.  Raises OSError."""
    index, drawn, num_left_out = _Index(), _Drawn(most_bytes), 0
    for _, of_group in groupby(rows, key=lambda seen: seen.group_id):
        if len(index.columns["step"]) >= MOST_INDEX_ROWS:
            num_left_out += sum(1 for _ in of_group)
            continue
        drawn.offer([(index.add(seen), seen) for seen in of_group])
    contents = _Contents(rollouts.texts)
    room = most_bytes - (Path(__file__).parent / _TEMPLATE).stat().st_size - _size(index.columns)
    contents.take_in(drawn.groups(), room)
    document = _document(rollouts, index, contents, num_left_out)
    page = filled_template(_TEMPLATE, name=rollouts.layout.root.name, data=Markup(embedded(document)))
    write_whole(path, page)
    return Written(len(index.columns["step"]), len(contents.full), num_left_out, len(page))


@dataclass(slots=True)
class _Contents:
    """The part of the page with texts."""

    texts: Texts
    pieces: dict[str, int] = field(default_factory=dict)  # text of a token → its place in the page's table
    ids: dict[int, int] = field(default_factory=dict)  # place → the first token with that text
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)  # by row of its first member
    full: dict[int, dict[str, Any]] = field(default_factory=dict)  # by row

    def take_in(self, drawn: Iterable[Sequence[tuple[int, SeenRollout]]], most_bytes: int) -> None:
        """Add groups in their order, until the next one does not fit."""
        for members in drawn:
            known, first = len(self.pieces), members[0][1]
            group = {"group": first.group_id, "prompt": first.prompt, "reference": first.reference}
            full = {row: _in_full(seen, self.texts, self.pieces, self.ids) for row, seen in members}
            most_bytes -= _size([group, full, list(islice(self.pieces, known, None))]) + 16 * (len(self.pieces) - known)
            if most_bytes < 0:
                return
            self.groups[members[0][0]] = group
            self.full |= full


def _size(document: object) -> int:
    return len(embedded(document).encode("utf-8", "backslashreplace"))


def _estimate(members: Sequence[SeenRollout]) -> int:
    """Bytes of a group's JSON, at least."""
    first = members[0]
    texts = len(first.prompt) + len(first.reference) + sum(len(seen.detail) for seen in members)
    num_tokens = sum(len(seen.token_ids) for seen in members)
    return _BYTES_PER_GROUP + texts + _BYTES_PER_ROLLOUT * len(members) + _BYTES_PER_TOKEN * num_tokens


def _document(rollouts: RunRollouts, index: _Index, contents: _Contents, num_left_out: int) -> dict[str, Any]:
    worths = sorted(abs(value) for value in index.columns["advantage"] if value is not None)
    return {
        "index": index.columns,
        "words": {name: list(words) for name, words in index.words.items()},
        "groups": [group for _, group in sorted(contents.groups.items())],
        "full": contents.full,
        "pieces": list(contents.pieces),
        "ids": contents.ids,
        "most_advantage": worths[int(0.98 * len(worths))] if worths else 0.0,  # a rare high one would hide all others
        "said": _said(len(index.columns["step"]), len(contents.full), num_left_out),
        "elsewhere": f"rlhpc rollouts {rollouts.layout.root}",
        "no_advantage": "no advantage: it is in no batch, or advantages came from a critic",
    }


def _in_full(seen: SeenRollout, texts: Texts, pieces: dict[str, int], ids: dict[int, int]) -> dict[str, Any]:
    """t: pieces of the text; l: hundredths of a nat below certainty; v: (version, tokens); m: tokens without a loss.

    r: (first token, tokens at its beginning that an earlier row has) of further rows.
    """
    found = []
    for piece, token in zip(texts.pieces(seen.token_ids), seen.token_ids.tolist(), strict=True):
        place = pieces.setdefault(piece, len(pieces))
        ids.setdefault(place, token)
        found.append(place)
    return {
        "t": found,
        "l": [round(-100 * each) if -99.99 < each < math.inf else 9999 for each in seen.behaviour_logprobs.tolist()],
        "v": [[version, len(list(run))] for version, run in groupby(seen.versions.tolist())],
        "a": _advantages(seen),
        "m": [place for place, counts in enumerate(seen.loss_mask.tolist()) if not counts],
        "r": [list(pair) for pair in zip(seen.row_starts, seen.num_shared[1:], strict=True)],
        "parts": {name: _rounded(value, 4) for name, value in seen.reward_parts.items()},
        "detail": seen.detail,
    }


def _advantages(seen: SeenRollout) -> float | list[float | None] | None:
    """A single number if all loss tokens have the same advantage."""
    if seen.advantages is None:
        return None
    values = seen.advantages[seen.loss_mask]
    if len(values) == 0 or bool((values == values[0]).all()):
        return _rounded(float(values[0]), 3) if len(values) else 0.0
    return [_rounded(value, 3) for value in seen.advantages.tolist()]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _said(num_rows: int, num_full: int, num_left_out: int) -> str:
    said = [f"{num_rows:,} rollouts."]
    if num_full < num_rows:
        said.append(
            f"{num_full:,} are shown with their text, as whole groups drawn at random; others only with figures."
        )
    if num_left_out:
        said.append(f"{num_left_out:,} more are left out entirely.")
    return " ".join(said)
