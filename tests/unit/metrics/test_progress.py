import io

import pytest

from rlhpc.metrics.meters import Progress, ProgressLine, fitting, format_count, format_duration, parts_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line_says_step_reward_both_rates_staleness_and_time_left():
    progress = Progress(120, 2000, 0.41234, 13_210.0, 48_100.0, 1.24, 11_100.0)
    assert parts_of(progress) == [
        *("step 120/2000", "3 h 05 min left", "reward 0.412", "staleness 1.2"),
        *("generate 48.1k tok/s", "train 13.2k tok/s"),
    ]


def test_no_time_left_is_claimed_before_it_is_known():
    assert parts_of(Progress(1, 2, 0.0, 0.0, 0.0, 0.0, None))[:2] == ["step 1/2", "reward 0.000"]


@pytest.mark.parametrize(("width", "line"), [(40, "step 1/9 | a | bb"), (15, "step 1/9 | a"), (5, "step ")])
def test_a_part_is_on_the_line_whole_or_not_at_all(width, line):
    assert fitting(["step 1/9", "a", "bb"], width) == line


def test_eighty_columns_have_room_for_the_time_left():
    line = fitting(parts_of(Progress(1200, 20000, -0.41234, 13_210.0, 48_100.0, 1.24, 187_200.0)), 79)
    assert line == "step 1200/20000 | 2 d 04 h left | reward -0.412 | staleness 1.2"


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
        (0, "0"),
        (950.4, "950"),
        (999.7, "1k"),
        (13_210, "13.2k"),
        (999_800, "1M"),
        (1_050_000, "1.05M"),
        (2e9, "2G"),
        (3e12, "3T"),
    ],
)
def test_counts_have_three_digits(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (45.2, "45 s"),
        (59.7, "1 min"),
        (725, "12 min"),
        (3599, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (187_200, "2 d 04 h"),
    ],
)
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
