"""Who worked and who waited for whom: one row per process over wall-clock time, and marks for events.

Input: Story.  Output: an <svg> element.  A row's height is divided as the time was: work at the bottom, waiting above.
A gap in a row means that the process was absent.  A role with many processes has one row for their mean, and a separate
row for each process with an event.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from launch.reading.charts import Scale, nice_ticks
from launch.reading.happenings import Happening, Story, place_of
from launch.reading.spells import Spell
from rlhpc.roles.controller.metrics.timeline import SILENT, WORKS

WIDTH = 1080
_LEFT, _RIGHT, _ROW, _GAP, _TOP = 150, 10, 17, 5, 46
MOST_COLUMNS = 450  # intervals of a row that are drawn apart
MOST_BARS = 9_000  # of all rows: the page stays small
_GAP_S = 1.0  # between two intervals: the process was not there
MOST_ROWS_OF_A_ROLE = 16
WORK_COLOUR, OTHER_COLOUR = "#2a8f62", "#7a8088"
WAIT_COLOURS = {"leases": "#e8a33d", "batch": "#4a86c8", "completions": "#cdd5dd", SILENT: "#c4304b"}
_PHASES = {"training": "#e9f3ee", "replaying": "#efe6f8", "starting": "#eef1f4", "waiting for generators": "#fdf3e3"}
Marked = tuple[int, Happening]


def timeline_chart(story: Story, marks: Sequence[Marked]) -> str:
    """marks: events, with their numbers in the list beside the chart."""
    rows = rows_of(story)
    if not rows:
        return '<p class="note">Nothing is recorded: the run has just begun, or wrote no timeline yet.</p>'
    height = _TOP + len(rows) * (_ROW + _GAP) + 30
    x = Scale(story.begin_s, max(story.end_s, story.begin_s + 1), _LEFT, WIDTH - _RIGHT)
    parts = [_phases(story, x, height), *_axis(story, x, height)]
    for place, (label, spells) in enumerate(rows.items()):
        top = _TOP + place * (_ROW + _GAP)
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 12}" class="tick" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{WIDTH - _RIGHT - _LEFT}" height="{_ROW}" class="absent"/>')
        parts += [_bar(spell, x, top) for spell in thinned(spells, min(MOST_COLUMNS, MOST_BARS // len(rows)))]
    parts += _marks(marks, x, height)
    head = f'viewBox="0 0 {WIDTH} {height}" class="timeline" role="img" shape-rendering="crispEdges"'
    return f"<svg {head}>{''.join(parts)}</svg>"


def rows_of(story: Story) -> dict[str, list[Spell]]:
    """Label → what was done, in the order in which people look at processes."""
    by_process, by_role = defaultdict[str, list[Spell]](list), defaultdict[str, list[str]](list)
    for spell in story.spells:
        by_process[spell.process].append(spell)
    for process in sorted(by_process, key=place_of):
        by_role[process.rpartition("-")[0]].append(process)
    touched = {each.who for each in story.faults}
    rows: dict[str, list[Spell]] = {}
    for role, processes in by_role.items():
        if len(processes) > MOST_ROWS_OF_A_ROLE:
            rows[f"{len(processes)} {role}s, mean"] = _mean([by_process[process] for process in processes])
            processes = [process for process in processes if process in touched][: MOST_ROWS_OF_A_ROLE - 1]
        rows |= {process: by_process[process] for process in processes}
    return rows


def thinned(spells: Sequence[Spell], most: int = MOST_COLUMNS) -> list[Spell]:
    """Merge neighbours if there are more of them than columns, but never across a time when the process was absent."""
    every = -(-len(spells) // most)
    found, held = list[Spell](), list[Spell]()
    for spell in spells:
        if held and (len(held) == every or spell.begin_s - held[-1].end_s > _GAP_S):
            found.append(_together(held))
            held = []
        held.append(spell)
    return [*found, *([_together(held)] if held else [])]


def legend(story: Story) -> list[tuple[str, str]]:
    """(colour, meaning) of what the chart shows."""
    waits = sorted({what for spell in story.spells for what in spell.shares if what != WORKS})
    return [(WORK_COLOUR, "works"), *((colour_of(what), meaning_of(what)) for what in waits)]


def meaning_of(what: str) -> str:
    """What a process did, in words."""
    return {WORKS: "works", SILENT: "gives no sign of life"}.get(what, f"waits for {what}")


def colour_of(what: str) -> str:
    """The colour of work, or of what is waited for."""
    return WORK_COLOUR if what == WORKS else WAIT_COLOURS.get(what, OTHER_COLOUR)


def clock(unix_time_s: float, *, with_day: bool = False) -> str:
    """Local time on the machine that makes the page."""
    return time.strftime("%Y-%m-%d %H:%M:%S" if with_day else "%H:%M:%S", time.localtime(unix_time_s))


def _together(spells: Sequence[Spell]) -> Spell:
    total = sum(spell.end_s - spell.begin_s for spell in spells) or 1.0
    shares = defaultdict[str, float](float)
    for spell in spells:
        for what, share in spell.shares.items():
            shares[what] += share * (spell.end_s - spell.begin_s) / total
    return Spell(spells[0].process, spells[0].begin_s, spells[-1].end_s, dict(shares), spells[0].phase)


def _mean(of_processes: Sequence[Sequence[Spell]]) -> list[Spell]:
    """The mean over processes of intervals that end at the same time."""
    at = defaultdict[float, list[Spell]](list)
    for spells in of_processes:
        for spell in spells:
            at[spell.end_s].append(spell)
    found = []
    for end_s, spells in sorted(at.items()):
        shares = defaultdict[str, float](float)
        for spell in spells:
            for what, share in spell.shares.items():
                shares[what] += share / len(spells)
        found.append(Spell(f"{len(spells)} of them", spells[0].begin_s, end_s, dict(shares), spells[0].phase))
    return found


def _bar(spell: Spell, x: Scale, top: float) -> str:
    left, right = x(spell.begin_s), x(spell.end_s)  # bars overlap a little: rounding would leave seams
    said = ", ".join(f"{meaning_of(what)} {share:.0%}" for what, share in spell.shares.items())
    parts = [
        f"<g><title>{escape(spell.process)}, {clock(spell.begin_s)} to {clock(spell.end_s)}: {escape(said)}</title>"
    ]
    bottom = top + _ROW
    for what in sorted(spell.shares, key=lambda each: each != WORKS):
        height = _ROW * min(1.0, spell.shares[what])
        bottom -= height
        parts.append(
            f'<rect x="{left:.1f}" y="{bottom:.1f}" width="{right - left + 0.6:.1f}" height="{height:.1f}" '
            f'fill="{colour_of(what)}"/>'
        )
    return "".join([*parts, "</g>"])


def _phases(story: Story, x: Scale, height: float) -> str:
    """What the run was doing, behind the rows; its name where there is room."""
    stretches: list[tuple[str, float, float]] = []
    for begin_s, end_s, phase in sorted({(spell.begin_s, spell.end_s, spell.phase) for spell in story.spells}):
        if stretches and stretches[-1][0] == phase and begin_s - stretches[-1][2] < 1.0:
            stretches[-1] = (phase, stretches[-1][1], max(end_s, stretches[-1][2]))  # some were absent for a part
        else:
            stretches.append((phase, begin_s, end_s))
    parts = []
    for phase, begin_s, end_s in stretches:
        left, right = x(begin_s), x(end_s)
        fill = _PHASES.get(phase, "#eef1f4")
        parts.append(f'<rect x="{left:.1f}" y="20" width="{right - left:.1f}" height="{height - 48}" fill="{fill}"/>')
        if right - left > 6.2 * len(phase):
            parts.append(f'<text x="{left + 3:.1f}" y="40" class="tick">{escape(phase)}</text>')
    return "".join(parts)


def _axis(story: Story, x: Scale, height: float) -> list[str]:
    """Minutes, or hours, since the beginning."""
    seconds = story.end_s - story.begin_s
    unit, name = next(
        (u, n) for u, n, most in ((1, "s", 300), (60, "min", 10_800), (3600, "h", 1e99)) if seconds <= most
    )
    parts = []
    for tick in nice_ticks(0, seconds / unit, 8):
        place = x(story.begin_s + tick * unit)
        if place <= WIDTH - _RIGHT + 1:
            said = f"{tick:g} {name}"
            parts.append(f'<text x="{place:.1f}" y="{height - 12}" class="tick" text-anchor="middle">{said}</text>')
    return parts


def _marks(marks: Sequence[Marked], x: Scale, height: float) -> list[str]:
    parts, last = [], -99.0
    for number, each in marks:
        place = x(each.unix_time_s)
        cls = "fault" if each.is_fault else "event"
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="18" y2="{height - 28}" class="{cls}"/>')
        if place - last >= 13:  # otherwise its number would cover the one before
            said = f"{clock(each.unix_time_s)} {each.who}: {each.brief}"
            parts.append(
                f'<text x="{place:.1f}" y="13" class="mark {cls}" text-anchor="middle">{number}'
                f"<title>{escape(said)}</title></text>"
            )
            last = place
    return parts
