"""The content of a run's report, as data, text and a page.

Input: a run directory.  Output: RunReport.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import chain
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from launch.common.text import three_digits
from launch.view.charts import Scale, histogram, line_chart, nice_ticks, stacked_chart
from launch.view.events import Happening, Hours, Spell, Story, advice_for, hours_of, place_of, read_story
from launch.view.run import RunView
from rlhpc.base.files import write_atomically
from rlhpc.metrics.curves import merged
from rlhpc.metrics.meters import SILENT, WORKS, format_count, format_duration
from rlhpc.protocol.errors import ConfigError

# ------------------------------------------------------------------------------------------------------------ page file
#
# Self-contained pages for a browser: a template beside this module, filled in and written atomically.


def embedded(document: object) -> str:
    """JSON that is safe inside a script element: it cannot end the element or run code."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def filled_template(template: str, **content: object) -> bytes:
    """A template beside this module; texts in it are escaped, Markup is not.  A lone surrogate becomes its escape."""
    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    pages.filters |= {"digits": three_digits, "code": _with_code}
    return pages.get_template(template).render(content).encode("utf-8", "backslashreplace")


def _with_code(text: str) -> Markup:
    """Format text between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text)))


def write_whole(path: Path, page: bytes) -> None:
    """Write a page atomically.  Raises ConfigError: the file cannot be written."""
    legal = "legal: the name of a file in a directory of yours, with room for it, such as report.html"
    if path.is_dir():
        raise ConfigError(f"{path}: cannot be written: it is a directory; {legal}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}; {legal}") from error


# ------------------------------------------------------------------------------------------------------- timeline chart
#
# Work and waiting of processes: one row per process over wall-clock time, and marks for events.
#
# Input: Story.  Output: an <svg> element.  A row's height is divided as the time was: work at the bottom, waiting
# above. A gap in a row means that the process was absent.  A role with many processes has one row for their mean, and
# a separate row for each process with an event.

WIDTH = 1080
_LEFT, _RIGHT, _ROW, _GAP, _TOP = 150, 10, 17, 5, 46
MOST_COLUMNS = 450  # intervals of a row that are drawn separately
MOST_BARS = 9_000  # of all rows: the page stays small
_GAP_S = 1.0  # between two intervals: the process was absent
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
    """Label → spells of a row, sorted by place_of."""
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
    """Merge neighbours if there are more spells than columns, but never across a time when the process was absent."""
    every = -(-len(spells) // most)
    found, held = list[Spell](), list[Spell]()
    for spell in spells:
        if held and (len(held) == every or spell.begin_s - held[-1].end_s > _GAP_S):
            found.append(_together(held))
            held = []
        held.append(spell)
    return [*found, *([_together(held)] if held else [])]


def legend(story: Story) -> list[tuple[str, str]]:
    """(colour, meaning) of each colour in the chart."""
    waits = sorted({what for spell in story.spells for what in spell.shares if what != WORKS})
    return [(WORK_COLOUR, "works"), *((colour_of(what), meaning_of(what)) for what in waits)]


def meaning_of(what: str) -> str:
    """Meaning of a key of Spell.shares, in words."""
    return {WORKS: "works", SILENT: "gives no sign of life"}.get(what, f"waits for {what}")


def colour_of(what: str) -> str:
    """Colour of work, or of a reason for waiting."""
    return WORK_COLOUR if what == WORKS else WAIT_COLOURS.get(what, OTHER_COLOUR)


def clock(unix_time_s: float, *, with_day: bool = False) -> str:
    """Local time on the machine that makes the page."""
    return time.strftime("%Y-%m-%d %H:%M:%S" if with_day else "%H:%M:%S", time.localtime(unix_time_s))


def _merged(process: str, spells: Sequence[Spell], weights: Sequence[float]) -> Spell:
    """Merge spells into one with the weighted mean of their shares."""
    total, shares = sum(weights) or 1.0, defaultdict[str, float](float)
    for spell, weight in zip(spells, weights, strict=True):
        for what, share in spell.shares.items():
            shares[what] += share * weight / total
    return Spell(process, spells[0].begin_s, spells[-1].end_s, dict(shares), spells[0].phase)


def _together(spells: Sequence[Spell]) -> Spell:
    return _merged(spells[0].process, spells, [spell.end_s - spell.begin_s for spell in spells])


def _mean(of_processes: Sequence[Sequence[Spell]]) -> list[Spell]:
    """The mean over processes of intervals that end at the same time."""
    at = defaultdict[float, list[Spell]](list)
    for spell in chain.from_iterable(of_processes):
        at[spell.end_s].append(spell)
    return [_merged(f"{len(spells)} of them", spells, [1.0] * len(spells)) for _, spells in sorted(at.items())]


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
    """Coloured phases of the run behind the rows, with their names where there is room."""
    stretches: list[tuple[str, float, float]] = []
    for begin_s, end_s, phase in sorted({(spell.begin_s, spell.end_s, spell.phase) for spell in story.spells}):
        if stretches and stretches[-1][0] == phase and begin_s - stretches[-1][2] < 1.0:
            stretches[-1] = (phase, stretches[-1][1], max(end_s, stretches[-1][2]))  # some were absent in part
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


def _axis(story: Story, x: Scale, height: float) -> Iterator[str]:
    """Minutes, or hours, since the beginning."""
    seconds = story.end_s - story.begin_s
    unit, name = next(
        (u, n) for u, n, most in ((1, "s", 300), (60, "min", 10_800), (3600, "h", 1e99)) if seconds <= most
    )
    for tick in nice_ticks(0, seconds / unit, 8):
        place = x(story.begin_s + tick * unit)
        if place <= WIDTH - _RIGHT + 1:
            said = f"{tick:g} {name}"
            yield f'<text x="{place:.1f}" y="{height - 12}" class="tick" text-anchor="middle">{said}</text>'


def _marks(marks: Sequence[Marked], x: Scale, height: float) -> list[str]:
    parts, last = [], -99.0
    for number, each in marks:
        place = x(each.unix_time_s)
        cls = "fault" if each.is_fault else "event"
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="18" y2="{height - 28}" class="{cls}"/>')
        if place - last >= 13:  # otherwise its number would cover the previous one
            said = f"{clock(each.unix_time_s)} {each.who}: {each.brief}"
            parts.append(
                f'<text x="{place:.1f}" y="13" class="mark {cls}" text-anchor="middle">{number}'
                f"<title>{escape(said)}</title></text>"
            )
            last = place
    return parts


# ---------------------------------------------------------------------------------------------------------- report data

MOST_MARKS = 60


@dataclass(frozen=True, slots=True)
class RunReport:
    """Report of a run at the moment of reading."""

    view: RunView
    story: Story
    hours: Hours
    advice: list[str]

    @property
    def marks(self) -> list[tuple[int, Happening]]:
        """Events, numbered, oldest first; if there are too many, only faults, and only the last of these."""
        told = [each for each in self.story.happenings if not each.is_planned]
        if len(told) > MOST_MARKS:
            told = [each for each in told if each.is_fault][-MOST_MARKS:]
        return [*enumerate(told, 1)]

    @property
    def num_faults_left_out(self) -> int:
        """Number of faults before the first mark, left out for lack of room."""
        return len(self.story.faults) - sum(each.is_fault for _, each in self.marks)

    @property
    def headline(self) -> list[tuple[str, str]]:
        """(name, value) of the key figures, the most important first."""
        return _headline(self.view, self.story)


def read_report(view: RunView) -> RunReport:
    """Read a run directory once and make its report.  Raises RunDirectoryError: no run is here; OSError."""
    view.layout.require_run()
    story = read_story(view)
    return RunReport(view, story, hours_of(view, story), advice_for(view))


def as_text(report: RunReport, num_shown: int = 25) -> list[str]:
    """The report for a terminal: figures, events, recommendations."""
    width = max(len(name) for name, _ in report.headline)
    lines = [f"{name:<{width}}  {value}" for name, value in report.headline]
    marks = report.marks
    lines += ["", "What happened"] if marks else []
    if report.num_faults_left_out:
        earlier = report.num_faults_left_out + max(0, len(marks) - num_shown)
        lines.append(f"  ({earlier} earlier faults; --html FILE shows the last {len(marks)})")
    elif len(marks) > num_shown:
        lines.append(f"  ({len(marks) - num_shown} earlier ones: --html FILE shows them)")
    lines += [f"  {clock(each.unix_time_s, with_day=True)}  {each.who}: {each.brief}" for _, each in marks[-num_shown:]]
    if report.hours.by_use:
        lines += ["", f"{report.hours.unit}"]
        lines += [
            f"  {three_digits(hours):>8}  {use}"
            for use, hours in sorted(report.hours.by_use.items(), key=lambda each: -each[1])
        ]
    lines += ["", "Recommendations"]
    return lines + [f"  {said}" for said in report.advice or ["none: no process idles, and no metric is out of bounds"]]


def _headline(view: RunView, story: Story) -> list[tuple[str, str]]:
    status = view.status

    def last(name: str) -> float:
        return view.curves[name].last if name in view.curves else math.nan

    settings = view.settings.get("run", {})
    total = status.get("num_steps") or settings.get("num_steps", "?")
    reward = view.curves.get("reward/mean")
    rows = [
        ("run", view.name),
        ("phase", "complete" if view.summary else str(status.get("phase", "not begun"))),
        ("steps", f"{view.num_steps_seen} of {total}, policy version {status.get('version', '?')}"),
    ]
    ends = [view.summary.get(f"reward_{end}_tenth", math.nan) for end in ("first", "last")]
    if reward is not None and not view.summary:
        values = reward.values[np.isfinite(reward.values)]
        tenth = max(1, len(values) // 10)
        ends = [float(part.mean()) for part in (values[:tenth], values[-tenth:]) if len(part)]
    if view.is_supervised:
        held_out = view.curves.get("sft/held_out_loss")
        if held_out is not None:
            values = held_out.values[np.isfinite(held_out.values)]
            rows.append(("held out", f"loss {values[-1]:.4f}, lowest {values.min():.4f}"))
        rows += [
            ("loss", f"{last('trainer/loss'):.4f} at the last step, after {last('sft/epoch'):.2f} epochs"),
            (
                "preferences",
                f"accuracy {last('sft/preference_accuracy'):.0%}, margin {last('sft/preference_margin'):.4f} nats",
            ),
            ("idle", _idle(view)),
            ("speed", f"{_rate(last('trainer/tokens_per_s'))} trained"),
        ]
        return _known([*rows, *_of_story(story)])
    if ends and None not in ends:
        rows.append(("reward", " → ".join(f"{end:.3f}" for end in ends) + ", first and last tenth"))
    rows += [
        ("rollouts", f"{view.sampled.num_rollouts:,} in segments, {view.sampled.lengths_trained.total():,} trained"),
        ("staleness", f"{last('staleness/mean'):.2f} on average lately; bound {last('staleness/bound'):.0f}"),
        ("idle", _idle(view)),
        ("speed", f"{_rate(last('trainer/tokens_per_s'))} trained, {_rate(last('generator/tokens_per_s'))} sampled"),
    ]
    return _known([*rows, *_of_story(story)])


def _of_story(story: Story) -> list[tuple[str, str]]:
    since = format_duration(max(0.0, story.end_s - story.begin_s))
    return [("time", f"{since} since the beginning"), ("faults", f"{len(story.faults)}")]


def _known(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    of_run, *of_figures = rows  # a run may be called nanogpt
    return [of_run, *((name, value) for name, value in of_figures if "nan" not in value)]


def _idle(view: RunView) -> str:
    """Shares of idle time: of a complete run from its summary; of others over the second half of the steps."""
    if view.summary and view.is_supervised:
        return "trainer {trainer_idle_ratio:.0%}".format(**view.summary)
    if view.summary:
        return "generators {generator_idle_ratio:.0%}, trainer {trainer_idle_ratio:.0%}".format(**view.summary)
    shares = [view.mean_of(f"{who}/idle_ratio") for who in ("generator", "trainer")]
    generators, trainer = ("not known" if share is None else f"{share:.0%}" for share in shares)
    return f"generators {generators}, trainer {trainer}, in the second half of the steps"


def _rate(value: float) -> str:
    return "nan" if math.isnan(value) else f"{format_count(value)} tok/s"


# ---------------------------------------------------------------------------------------------------------- report page
#
# The report of a run as one page for a browser: no script, no network, charts as SVG.
#
# Input: RunReport.  Output: a file.


# Title, metrics that share a chart, and whether its axis begins at zero.
CURVES: tuple[tuple[str, dict[str, str], bool], ...] = (
    ("Reward", {"mean": "reward/mean", "correct": "reward/correct_share"}, True),
    (
        "Zero-variance groups (share)",
        {"all": "reward/zero_variance_share", "too easy": "group/all_correct_share"},
        True,
    ),
    ("Completion (tokens)", {"mean": "length/completion_mean", "longest": "length/completion_max"}, True),
    ("Turns and rows of a rollout", {"turns": "length/turns_mean", "rows": "length/rows_mean"}, True),
    ("Staleness (versions)", {"mean": "staleness/mean", "max": "staleness/max", "bound": "staleness/bound"}, True),
    ("Idle (share of the time)", {"generators": "generator/idle_ratio", "trainer": "trainer/idle_ratio"}, True),
    ("Tokens a second", {"sampled": "generator/tokens_per_s", "trained": "trainer/tokens_per_s"}, True),
    ("Entropy (nats)", {"entropy": "trainer/entropy"}, True),
    ("Loss", {"loss": "trainer/loss"}, False),
    ("Held-out loss (nats)", {"loss": "sft/held_out_loss"}, False),
    ("Gradient norm, before clipping", {"norm": "trainer/grad_norm"}, True),
    ("Divergence (nats)", {"sampler": "policy/mismatch_kl", "k3": "policy/kl_k3"}, True),
    ("Clipped (share of tokens)", {"above": "policy/clip_high_share", "below": "policy/clip_low_share"}, True),
    ("Generators", {"alive": "generator/live", "members": "weights/members"}, True),
)
# Parts of the time between two steps, measured by the trainer; the rest is "other".
STEP_PARTS = {"trainer waits for its batch": "time/wait_for_batch_s", "training": "trainer/step_s"}


def write_report(path: Path, report: RunReport) -> int:
    """Write the page; returns its size in bytes.  Raises ConfigError as write_whole."""
    view, left = report.view, len(report.story.happenings) - len(report.marks) - report.num_faults_left_out
    page = filled_template(
        "report.html",
        report=report,
        name=dict(report.headline)["run"],
        timeline=Markup(timeline_chart(report.story, report.marks)),
        legend=legend(report.story),
        clock=partial(clock, with_day=True),
        num_routine=left,
        charts={
            "Where the time of a step went": [*map(Markup, _step_charts(view))],
            "Curves": [*map(Markup, _curves(view))],
            "Distributions": [*map(Markup, _distributions(view))],
        },
        settings={name: json.dumps(keys, indent=1, ensure_ascii=False) for name, keys in view.settings.items()},
    )
    write_whole(path, page)
    return len(page)


def _step_charts(view: RunView) -> Iterable[str]:
    steps, values = merged(view.curves, ["time/step_s", *STEP_PARTS.values()])
    if "time/step_s" not in values:
        yield stacked_chart("Seconds of a step", steps, {})
        return
    whole = values["time/step_s"]
    parts = {name: np.nan_to_num(values.get(key, np.zeros(len(steps)))) for name, key in STEP_PARTS.items()}
    parts["training"] = np.minimum(parts["training"], whole)
    parts["trainer waits for its batch"] = np.minimum(parts["trainer waits for its batch"], whole - parts["training"])
    parts["other"] = np.maximum(0, np.nan_to_num(whole) - sum(parts.values()))
    yield stacked_chart("Trainer: seconds of a step", steps, parts)
    names = {
        "waits for groups": "time/wait_for_groups_s",
        "packs": "time/pack_s",
        "waits for weights": "time/wait_for_weights_s",
    }
    steps, values = merged(view.curves, [*names.values()])
    yield line_chart("Controller: seconds of a step", steps, _named(names, values), from_zero=True)
    names = {"publish": "weights/publish_s", "receive": "weights/receive_s", "pause": "weights/pause_s"}
    steps, values = merged(view.curves, [*names.values()])
    yield line_chart("Weights: seconds of a version", steps, _named(names, values), from_zero=True)


def _curves(view: RunView) -> Iterable[str]:
    for title, names, from_zero in CURVES:
        steps, values = merged(view.curves, [*names.values()])
        if values:
            yield line_chart(title, steps, _named(names, values), from_zero=from_zero)


def _named(names: dict[str, str], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {short: values[key] for short, key in names.items() if key in values}


def _distributions(view: RunView) -> Iterable[str]:
    sampled = view.sampled
    yield histogram("Staleness of trained rollouts", sampled.staleness, x_label="versions")
    yield histogram("Completions, trained", sampled.lengths_trained, x_label="tokens")
    yield histogram("Completions, dropped", sampled.lengths_dropped, x_label="tokens")
