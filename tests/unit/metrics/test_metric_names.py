import re
from pathlib import Path

import pytest

from launch.cli import main
from rlhpc.metrics.names import HISTOGRAMS, METRICS, find_metric
from rlhpc.metrics.tensorboard import CHARTS, dashboard

PAGES = Path(__file__).parents[3] / "docs"


def test_every_metric_has_a_unit_and_a_one_line_meaning():
    for name, metric in (METRICS | HISTOGRAMS).items():
        assert re.fullmatch(r"[a-z0-9_]+(/([a-z0-9_]+|\*))?", name)
        assert metric.unit
        assert metric.meaning
        assert "\n" not in metric.meaning


def test_names_of_seconds_and_bytes_carry_their_unit():
    for name, metric in METRICS.items():
        assert (metric.unit == "s") == name.removesuffix("/*").endswith("_s") or metric.unit.endswith("/s"), name
        assert (metric.unit == "bytes") == name.endswith("_bytes"), name


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(KeyError, match="reward/median"):
        find_metric("reward/median")


def test_a_family_takes_any_last_part():
    assert find_metric("reward_part/format") is METRICS["reward_part/*"]
    assert find_metric("reward_part/format/tags") is METRICS["reward_part/*"]  # a user's name may have a slash


def test_the_dashboard_shows_known_metrics_only_and_both_idle_ratios_on_one_chart():
    for charts in CHARTS.values():
        for names in charts.values():
            assert all(find_metric(name) for name in names)
    assert CHARTS["Idle"]["Idle ratios"] == ("trainer/idle_ratio", "generator/idle_ratio")


def test_tags_of_the_dashboard_match_exactly_their_metric():
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
