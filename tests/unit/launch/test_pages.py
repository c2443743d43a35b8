"""Pages for a browser: small, alone, made quickly, and shown by a real browser as they are meant."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from launch.view.rollouts import RunRollouts
from launch.view.rollouts_page import write_page
from tests.unit.launch.browser import asks_the_network, dom_of, needs_browser, picture_of, texts_in
from tests.unit.launch.seen_runs import TextRun

NUM_ROLLOUTS = 20_000
MOST_BYTES = 5_000_000
MOST_S = 20.0  # of CPU: the clock of a machine that others use says nothing


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    run = TextRun(tmp_path_factory.mktemp("pages") / "text")
    run.seal(
        [
            run.group("3 + 4 =", [("7", 1.0), ("eight", 0.0)], step=0),
            run.group("1 + 1 =", [("2", 1.0), ("2", 1.0)]),
            run.group("9 - 2 =", [("7", 1.0), ("</script><b>bold</b> é\x00\x1b &amp;", 0.0)], step=1),
        ]
    )
    return run


@pytest.fixture(scope="module")
def page(text_run: TextRun) -> Path:
    path = text_run.layout.root.parent / "rollouts.html"
    assert main(["rollouts", str(text_run.layout.root), "--html", str(path)]) == 0
    return path


def data_of(page: Path) -> dict[str, object]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match is not None
    document: dict[str, object] = json.loads(match[1])
    return document


def test_a_page_loads_nothing_and_holds_what_was_sampled_as_data(page: Path) -> None:
    assert asks_the_network(page.read_text()) == []
    assert "default-src 'none'" in page.read_text()
    assert "<b>bold" not in page.read_text()
    full = data_of(page)
    pieces = full["pieces"]
    texts = ["".join(pieces[place] for place in each["t"]) for each in full["full"].values()]  # type: ignore[index, attr-defined]
    assert "</script><b>bold</b> é\x00\x1b &amp;<eos>" in texts


@pytest.mark.starts
@needs_browser
def test_a_browser_shows_every_rollout_and_the_tokens_of_one(page: Path, tmp_path: Path) -> None:
    document = dom_of(page, profile=tmp_path / "profile")
    rows = texts_in(document, "tr")
    assert len(rows) == 1 + 6
    assert texts_in(document, "said")[0].startswith("6 rollouts. Selected: 6, 6 of them with text.")
    assert texts_in(document, "completion") == ["7<eos>"]  # of the first that has an advantage


@pytest.mark.starts
@needs_browser
def test_filters_of_a_link_select_and_what_was_sampled_is_shown_as_text(page: Path, tmp_path: Path) -> None:
    document = dom_of(page, "#words=bold&colour=logprob", profile=tmp_path / "profile")
    assert texts_in(document, "said")[0].endswith("Selected: 1, 1 of them with text.")
    assert "</script><b>bold</b> é" in texts_in(document, "completion")[0]
    assert "background: rgba(190, 30, 90" in document  # the less likely, the redder


@pytest.mark.starts
@needs_browser
def test_tokens_are_coloured_by_what_is_asked_for(page: Path, tmp_path: Path) -> None:
    for colour, css in (("advantage", "rgba(31, 119, 180"), ("version", "rgba(120, 90, 180")):
        assert css in dom_of(page, f"#first=1&colour={colour}", profile=tmp_path / colour)
    assert picture_of(page, profile=tmp_path / "picture").stat().st_size > 20_000


@pytest.mark.long
def test_of_20_000_rollouts_a_page_has_an_index_of_all_and_as_many_texts_as_fit(tmp_path: Path) -> None:
    run = TextRun(tmp_path / "large")
    words = np.random.default_rng(0)
    for segment in range(5):
        run.seal(
            run.group(
                f"{words.integers(1e6)} + {words.integers(1e6)} =",
                [(text(words), 1.0), (text(words), 0.0)],
                step=segment,
            )
            for _ in range(NUM_ROLLOUTS // 10)
        )
    before = resource.getrusage(resource.RUSAGE_SELF)
    rollouts = RunRollouts(run.layout, tell=lambda line: None)
    written = write_page(tmp_path / "page.html", rollouts, rollouts.each())
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert written.num_rollouts == NUM_ROLLOUTS
    assert 1000 < written.num_with_text < NUM_ROLLOUTS
    assert (tmp_path / "page.html").stat().st_size == written.num_bytes <= MOST_BYTES
    assert f"{written.num_with_text:,} are shown with their text" in (tmp_path / "page.html").read_text()
    steps = {int(row) * 5 // NUM_ROLLOUTS for row in data_of(tmp_path / "page.html")["full"]}  # type: ignore[attr-defined]
    assert steps == {0, 1, 2, 3, 4}  # drawn from the whole run
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_S


def text(words: np.random.Generator) -> str:
    return " ".join(str(number) for number in words.integers(0, 1000, 25))
