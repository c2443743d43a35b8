"""The report of a run as one page for a browser: no script, no network, charts as SVG.

Input: RunReport.  Output: a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from launch.common.counted import three_digits
from launch.reading.charts import histogram, line_chart, stacked_chart
from launch.reading.page_file import filled_template, write_whole
from launch.reading.report_data import RunReport
from launch.reading.run_figures import RunFigures
from launch.reading.timeline_chart import clock, legend, timeline_chart
from rlhpc.metrics.curves import merged

# Title, metrics that share a chart, and whether its axis begins at zero.
CURVES: tuple[tuple[str, dict[str, str], bool], ...] = (
    ("Reward", {"mean": "reward/mean", "correct": "reward/correct_share"}, True),
    ("Groups without spread (share)", {"all": "reward/zero_spread_share", "too easy": "group/all_correct_share"}, True),
    ("Completion (tokens)", {"mean": "length/completion_mean", "longest": "length/completion_max"}, True),
    ("Staleness (versions)", {"mean": "staleness/mean", "max": "staleness/max", "bound": "staleness/bound"}, True),
    ("Idle (share of the time)", {"generators": "generator/idle_ratio", "trainer": "trainer/idle_ratio"}, True),
    ("Tokens a second", {"sampled": "generator/tokens_per_s", "trained": "trainer/tokens_per_s"}, True),
    ("Entropy (nats)", {"entropy": "trainer/entropy"}, True),
    ("Loss", {"loss": "trainer/loss"}, False),
    ("Gradient norm, before clipping", {"norm": "trainer/grad_norm"}, True),
    ("Divergence (nats)", {"sampler": "policy/mismatch_kl", "k3": "policy/kl_k3"}, True),
    ("Clipped (share of tokens)", {"above": "policy/clip_high_share", "below": "policy/clip_low_share"}, True),
    ("Generators", {"alive": "generator/live", "members": "weights/members"}, True),
)
# Parts of the time between two steps, as the trainer sees them; what is left is "other".
STEP_PARTS = {"trainer waits for its batch": "time/wait_for_batch_s", "training": "trainer/step_s"}


def write_report(path: Path, report: RunReport) -> int:
    """Write the page; returns its bytes.  Raises ConfigError as write_whole."""
    name = dict(report.headline)["run"]
    page = filled_template("report.html", TITLE=f"Report of {name}", DATA="".join(_sections(report)))
    write_whole(path, page)
    return len(page)


def _sections(report: RunReport) -> Iterable[str]:
    figures = report.figures
    yield _tiles(report.headline)
    yield _section("Recommendations", _advice(report.advice))
    yield _section("Who worked, and who waited for whom", _timeline(report))
    yield _section("What happened", _happenings(report))
    yield _section("Where the time of a step went", f'<div class="charts">{"".join(_step_charts(figures))}</div>')
    yield _section("Curves", f'<div class="charts">{"".join(_curves(figures))}</div>')
    yield _section("Distributions", f'<div class="charts">{"".join(_distributions(figures))}</div>')
    yield _section(report.hours.unit, _hours(report))
    if report.evaluations:
        yield _section("Evaluations", _evaluations(report))
    yield _section("Settings", _settings(figures))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _tiles(rows: Sequence[tuple[str, str]]) -> str:
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows[1:])
    return f'<dl class="tiles">{tiles}</dl>'


def _advice(said: Sequence[str]) -> str:
    if not said:
        return '<p class="note">None: no process idles, and no metric is out of bounds.</p>'
    items = (re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(each)) for each in said)
    return f"<ul>{''.join(f'<li>{each}</li>' for each in items)}</ul>"


def _timeline(report: RunReport) -> str:
    colours = "".join(
        f'<span><i style="background:{colour}"></i>{escape(what)}</span>' for colour, what in legend(report.story)
    )
    return f'{timeline_chart(report.story, report.marks)}<p class="legend">{colours}</p>'


def _happenings(report: RunReport) -> str:
    if not report.marks:
        return '<p class="note">Nothing is recorded.</p>'
    rows = [
        f'<tr class="{"fault" if each.is_fault else ""}"><td>{number}</td>'
        f"<td>{clock(each.unix_time_s, with_day=True)}</td>"
        f"<td>{'' if each.attempt < 0 else each.attempt}</td><td>{escape(each.who)}</td><td>{escape(each.kind)}</td>"
        f'<td class="text">{escape(each.brief)}</td></tr>'
        for number, each in report.marks
    ]
    num_faults = report.num_faults_left_out
    left = len(report.story.happenings) - len(rows) - num_faults
    parts = [f"{num_faults} earlier faults"] * bool(num_faults) + [f"{left} that go without saying"] * bool(left)
    more = f'<p class="note">Left out: {", and ".join(parts)}.</p>' if parts else ""
    return _table(("", "time", "attempt", "who", "what", ""), rows) + more


def _step_charts(figures: RunFigures) -> Iterable[str]:
    steps, values = merged(figures.curves, ["time/step_s", *STEP_PARTS.values()])
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
    steps, values = merged(figures.curves, [*names.values()])
    yield line_chart("Controller: seconds of a step", steps, _named(names, values), from_zero=True)
    names = {"publish": "weights/publish_s", "receive": "weights/receive_s", "pause": "weights/pause_s"}
    steps, values = merged(figures.curves, [*names.values()])
    yield line_chart("Weights: seconds of a version", steps, _named(names, values), from_zero=True)


def _curves(figures: RunFigures) -> Iterable[str]:
    for title, names, from_zero in CURVES:
        steps, values = merged(figures.curves, [*names.values()])
        if values:
            yield line_chart(title, steps, _named(names, values), from_zero=from_zero)


def _named(names: dict[str, str], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {short: values[key] for short, key in names.items() if key in values}


def _distributions(figures: RunFigures) -> Iterable[str]:
    sampled = figures.sampled
    yield histogram("Staleness of trained rollouts", sampled.staleness, x_label="versions")
    yield histogram("Completions, trained", sampled.lengths_trained, x_label="tokens")
    yield histogram("Completions, dropped", sampled.lengths_dropped, x_label="tokens")


def _hours(report: RunReport) -> str:
    hours = report.hours
    if not hours.by_use and not hours.by_job:
        return '<p class="note">Not known: no timeline is recorded.</p>'
    ordered = sorted(hours.by_use.items(), key=lambda each: -each[1])
    rows = [
        f'<tr><td class="text">{escape(use)}</td><td>{three_digits(value)}</td><td>{value / hours.total:.0%}</td>'
        f'<td><i class="bar" style="width:{160 * value / hours.total:.0f}px"></i></td></tr>'
        for use, value in ordered
    ]
    jobs = [
        f'<tr><td class="text">job {escape(job)}</td><td>{three_digits(value)}</td></tr>'
        for job, value in hours.by_job.items()
    ]
    by_job = _table(("allocated, of each job", "GPU-hours"), jobs) if jobs else ""
    return f'<div class="beside">{_table(("use", hours.unit, "", ""), rows) if rows else ""}{by_job}</div>'


def _evaluations(report: RunReport) -> str:
    rows = [
        f'<tr><td class="text">{escape(name)}</td><td>{step}</td><td class="text">{escape(figure)}</td>'
        f"<td>{worth['value']:.3f}</td><td>{worth['low']:.3f} to {worth['high']:.3f}</td></tr>"
        for name, steps in report.evaluations.items()
        for step, found in steps.items()
        for figure, worth in found.items()
        if {"value", "low", "high"} <= worth.keys()
    ]
    return _table(("dataset", "step", "figure", "value", "95 %"), rows)


def _settings(figures: RunFigures) -> str:
    sections = []
    for name, keys in figures.settings.items():
        text = json.dumps(keys, indent=1, ensure_ascii=False)
        sections.append(f"<details><summary>[{escape(name)}]</summary><pre>{escape(text)}</pre></details>")
    return "".join(sections)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
