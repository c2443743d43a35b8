"""What is measured under which name, and the line that tells how far a run is."""

import asyncio
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import main
from rlhpc.metrics.meters import (
    Eta,
    LoopLag,
    Progress,
    ProgressLine,
    Rate,
    fitting,
    format_count,
    format_duration,
    parts_of,
)
from rlhpc.metrics.names import HISTOGRAMS, METRICS, find_metric
from rlhpc.metrics.tensorboard import CHARTS, dashboard


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_forgets_what_is_older_than_its_window_and_is_zero_over_no_time():
    rate = Rate(10.0, now=0.0)
    rate.add(1.0, 50)
    assert rate.per_second(5.0) == 10.0  # over the time since the start
    rate.add(9.0, 50)
    assert rate.per_second(10.0) == 10.0
    assert rate.per_second(12.0) == 5.0
    assert rate.per_second(100.0) == 0.0
    rate = Rate(10.0, now=5.0)
    rate.add(5.0, 50)
    assert rate.per_second(5.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1e6)), max_size=50))
def test_a_rate_is_what_lies_in_the_window_over_the_window(events):
    rate, now = Rate(10.0, now=0.0), 20.0
    kept = []
    for gap_s, amount in events:
        now += gap_s
        rate.add(now, amount)
        kept.append((now, amount))
    expected = sum(amount for when, amount in kept if when > now - 10.0) / 10.0
    assert rate.per_second(now) == pytest.approx(expected, abs=1e-3)


async def test_loop_lag_is_how_late_a_sleep_ends():
    clock, lags = Clock(), iter([0.0, 2.0, 0.5])

    async def sleep(seconds: float) -> None:
        lag_s = next(lags, None)
        if lag_s is None:
            await asyncio.Event().wait()
        clock.now += seconds + lag_s

    lag = LoopLag(clock, 0.1, sleep)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    assert lag.take() == pytest.approx(2.0)
    assert lag.take() == 0.0
    clock.now += 7.1  # the loop is stuck just now
    assert lag.take() == pytest.approx(7.0)
    task.cancel()


def test_the_estimate_follows_the_pace_of_the_last_steps():
    eta = Eta(num_steps=100, window_steps=2)
    assert eta.remaining_s() is None
    eta.step_done(1, now=1000.0)  # the engines have started
    assert eta.remaining_s() is None
    eta.step_done(2, now=1010.0)
    assert eta.remaining_s() == 980.0
    eta.step_done(3, now=1011.0)
    eta.step_done(4, now=1012.0)
    assert eta.remaining_s() == 96.0
    eta.step_done(100, now=1100.0)
    assert eta.remaining_s() == 0.0


# -------------------------------------------------------------------------------------------------------- metric names

PAGES = Path(__file__).parents[3] / "docs"


def test_every_metric_has_a_unit_that_its_name_carries_and_an_unknown_one_is_refused():
    for name, metric in (METRICS | HISTOGRAMS).items():
        assert re.fullmatch(r"[a-z0-9_]+(/([a-z0-9_]+|\*))?", name)
        assert metric.unit
        assert metric.meaning
        assert "\n" not in metric.meaning
    for name, metric in METRICS.items():
        assert (metric.unit == "s") == name.removesuffix("/*").endswith("_s") or metric.unit.endswith("/s"), name
        assert (metric.unit == "bytes") == name.endswith("_bytes"), name
    with pytest.raises(KeyError, match="reward/median"):
        find_metric("reward/median")
    assert find_metric("reward_part/format") is METRICS["reward_part/*"]
    assert find_metric("reward_part/format/tags") is METRICS["reward_part/*"]  # a user's name may have a slash


def test_the_dashboard_shows_known_metrics_by_tags_that_match_exactly():
    for charts in CHARTS.values():
        for names in charts.values():
            assert all(find_metric(name) for name in names)
    assert CHARTS["Idle"]["Idle ratios"] == ("trainer/idle_ratio", "generator/idle_ratio")
    tags = [tag for group in dashboard().category for chart in group.chart for tag in chart.multiline.tag]
    shown = {name for charts in CHARTS.values() for names in charts.values() for name in names}
    matches = {tag: [name for name in {*METRICS, *shown} if re.search(tag, name)] for tag in tags}
    assert all(len(names) == 1 for names in matches.values())


def test_the_command_line_prints_every_name_with_unit_and_meaning(capsys):
    assert main(["schema", "metrics"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [*METRICS, *HISTOGRAMS]
    assert "| `trainer/loss` | nats | with KL term and entropy bonus, mean over loss tokens |" in rows


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_names_only_metrics_that_a_run_writes(page):
    named = re.findall(
        r"`((?:reward|policy|staleness|length|rollout|group|queue|packing|time)/[a-z0-9_]+)`", page.read_text()
    )
    assert set(named) <= METRICS.keys() | HISTOGRAMS.keys()


# ------------------------------------------------------------------------------------------------------------ progress


def test_the_line_says_step_reward_rates_staleness_and_time_left_once_it_is_known():
    progress = Progress(120, 2000, 0.41234, 13_210.0, 48_100.0, 1.24, 11_100.0)
    assert parts_of(progress) == [
        *("step 120/2000", "3 h 05 min left", "reward 0.412", "staleness 1.2"),
        *("generate 48.1k tok/s", "train 13.2k tok/s"),
    ]
    assert parts_of(Progress(1, 2, 0.0, 0.0, 0.0, 0.0, None))[:2] == ["step 1/2", "reward 0.000"]
    line = fitting(parts_of(Progress(1200, 20000, -0.41234, 13_210.0, 48_100.0, 1.24, 187_200.0)), 79)
    assert line == "step 1200/20000 | 2 d 04 h left | reward -0.412 | staleness 1.2"


@pytest.mark.parametrize(("width", "line"), [(40, "step 1/9 | a | bb"), (15, "step 1/9 | a"), (5, "step ")])
def test_a_part_is_on_the_line_whole_or_not_at_all(width, line):
    assert fitting(["step 1/9", "a", "bb"], width) == line


def test_before_training_a_log_has_a_line_for_each_phase_and_now_and_then_another():
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, is_terminal=False, num_steps=100, clock=clock)
    for second in range(70):
        line.wait("starting" if second < 10 else "waiting for generators", f"{second} s")
        clock.now += 1
    seconds = [text.rpartition(" | ")[2] for text in stream.getvalue().splitlines()]
    assert seconds == ["0 s", "10 s", "40 s"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (950.4, "950"), (999.7, "1k"), (13_210, "13.2k"), (999_800, "1M"), (1_050_000, "1.05M"),
        (2e9, "2G"), (3e12, "3T"),
    ],
)  # fmt: skip
def test_counts_have_three_digits(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"), (45.2, "45 s"), (59.7, "1 min"), (725, "12 min"), (3599, "1 h 00 min"), (11_100, "3 h 05 min"),
        (187_200, "2 d 04 h"),
    ],
)  # fmt: skip
def test_durations_have_two_units_at_most(seconds, text):
    assert format_duration(seconds) == text


def test_a_terminal_sees_one_line_rewritten(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    line = ProgressLine(stream, is_terminal=True, num_steps=10)
    for step in (1, 2):
        line.update(Progress(step, 10, 0.5, 1.0, 1.0, 0.0, None))
    line.finish()
    assert stream.getvalue().count("\n") == 1
    first, second = stream.getvalue().rstrip("\n").split("\r\x1b[K")[1:]
    assert first.startswith("step 1/10")
    assert second.startswith("step 2/10")
    assert max(len(first), len(second)) <= 39  # a wrapped line cannot be rewritten


def test_a_log_gets_the_first_and_the_last_step_and_a_line_now_and_then():
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, is_terminal=False, num_steps=100, clock=clock)
    for step in range(1, 101):
        line.update(Progress(step, 100, 0.5, 1.0, 1.0, 0.0, None))
        clock.now += 1
    line.finish()
    lines = stream.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == ["1/100", "31/100", "61/100", "91/100", "100/100"]


def test_a_closed_stream_does_not_stop_a_run():
    stream = io.StringIO()
    line = ProgressLine(stream, is_terminal=False, num_steps=100)
    stream.close()
    line.update(Progress(1, 100, 0.5, 1.0, 1.0, 0.0, None))
    line.finish()
