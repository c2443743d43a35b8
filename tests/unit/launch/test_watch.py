"""What a user of `rlhpc run` sees while it starts and trains, and what is said at its end."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from launch.run_files.run_state import last_words
from launch.view.status import LOOK_AT_DISK_S, OLD_S, Watch
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.full_disk import fill, small_disk
from tests.unit.launch.site_kit import config_of

EXPECTED = ["controller-0", "reward-0", "trainer-0", "generator-0"]


class Screen:
    """A run directory, and what is printed of it."""

    def __init__(self, root: Path, **how: Any) -> None:
        self.now = 0.0
        self.layout, self.stream = RunLayout(root), io.StringIO()
        self.watch = Watch(self.layout, self.stream, expected=EXPECTED, clock=lambda: self.now, **how)

    def show(
        self,
        phase: str,
        step: int,
        *roles: str,
        attempt: int = 0,
        disk: Sequence[str] = (),
        errors: Mapping[str, object] = MappingProxyType({}),
        ago_s: float = 0.0,
        **queue: int,
    ) -> None:
        document = {
            "phase": phase, "step": step, "num_steps": 9, "reward": 0.5, "trainer_tokens_per_s": 100.0,
            "generator_tokens_per_s": 200.0, "staleness_max": 1, "eta_s": 60.0, "queue": queue, "attempt": attempt,
            "disk_troubles": disk, "errors": dict(errors), "roles": [{"name": name} for name in roles],
            "unix_time_s": time.time() - ago_s,
        }  # fmt: skip
        self.layout.status.write_text(json.dumps(document))
        self.watch.look()

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_a_start_shows_its_phase_and_who_is_not_there_yet(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    screen.show("starting", 0, "reward-0")
    screen.now = 45.0
    screen.show("waiting for generators", 0, "reward-0", "trainer-0")
    screen.show("waiting for generators", 0, *EXPECTED)
    screen.show("training", 0, *EXPECTED)
    screen.show("training", 1, *EXPECTED)
    assert screen.lines == [
        "starting | waits for trainer-0, generator-0 | 0 s",
        "waiting for generators | waits for generator-0 | 45 s",
        "step 1/9 | 1 min left | reward 0.500 | staleness 1.0 | generate 200 tok/s | train 100 tok/s",
    ]


def test_of_another_attempt_the_time_since_it_began_is_shown(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    screen.show("starting", 80, attempt=3)
    screen.show("training", 81, *EXPECTED, attempt=3)
    screen.now = 4000.0
    screen.show("starting", 81, *EXPECTED, attempt=4)
    screen.now = 4007.0
    screen.show("waiting for generators", 81, *EXPECTED, attempt=4)
    starts = [line for line in screen.lines if not line.startswith("step")]
    assert starts[1:] == ["starting | 0 s", "waiting for generators | 7 s"]


def test_a_resume_shows_no_figures_before_its_first_step(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    screen.show("starting", 80, *EXPECTED)
    screen.show("training", 80, *EXPECTED)
    assert screen.lines == ["starting | 0 s"]
    screen.show("training", 81, *EXPECTED)
    assert screen.lines[1].startswith("step 81/9 | ")


def test_what_no_verifier_can_judge_is_told_when_it_happens_and_whenever_it_has_doubled(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    for count in (0, 1, 2, 3, 5, 9):
        screen.show("training", 0, dropped_verifier_error=count)
    told = [line for line in screen.lines if line.startswith("rlhpc: ")]
    why = f"dropped: no verifier could judge them; `rlhpc rollouts {tmp_path} --verdict verifier_error` says why"
    assert told == [f"rlhpc: 1 group is {why}", *(f"rlhpc: {n} groups are {why}" for n in (2, 5))]


def test_a_wait_for_verdicts_is_told_when_it_begins_and_when_it_is_over(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    waits = {"causes": {"raised": 41}, "latest": "no tool server", "waited_s": 3, "patience_s": 60.0}
    for attempt, errors in enumerate(({}, waits, waits, {}, waits, {})):
        screen.show("training", 0, errors=errors, attempt=attempt // 5)
    begins = (
        "rlhpc: too many errors in place of verdicts: the run waits for up to 60 s until there are some again "
        "(rewards.error_patience_s); the last error: no tool server"
    )
    assert screen.lines == [begins, "rlhpc: the run waits for verdicts no longer", begins]  # another attempt is anew


def test_a_disk_that_refuses_is_told_when_it_begins_and_when_it_is_over(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    for trouble in ([], ["no room; trying again for 300 s"], ["no room; trying again for 296 s"], [], []):
        screen.show("training", 0, disk=trouble)
        screen.now += LOOK_AT_DISK_S
    assert screen.lines == [
        "rlhpc: the disk refuses: no room; trying again for 300 s",
        "rlhpc: the disk takes what is written again",
    ]


def test_what_the_run_says_of_its_disk_is_told_at_once(tmp_path: Path) -> None:
    """It may be over before another look at the disk itself is due."""
    screen = Screen(tmp_path)
    screen.show("training", 0, disk=[])
    screen.show("training", 0, disk=["no room; trying again for 300 s"])
    assert screen.lines == ["rlhpc: the disk refuses: no room; trying again for 300 s"]


@pytest.mark.starts
def test_a_disk_too_full_for_the_status_itself_is_told_all_the_same(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with small_disk(root, 1 << 20):
        screen = Screen(root)
        screen.show("training", 3, ago_s=OLD_S + 1)  # nothing was written for so long, though there is room
        assert len(screen.lines) == 1
        fill(root / "filler", but_bytes=0)
        screen.now += LOOK_AT_DISK_S
        screen.watch.look()
        (root / "filler").unlink()
        screen.now += LOOK_AT_DISK_S
        screen.watch.look()
        assert sorted(path.name for path in root.iterdir()) == ["status.json"]
    assert screen.lines[1:] == [
        f"rlhpc: the disk refuses: No space left on device in {root}, where the run can write nothing any more, "
        "its status neither",
        "rlhpc: the disk takes what is written again",
    ]


def test_quiet_says_nothing_but_what_it_is_told(tmp_path: Path) -> None:
    screen = Screen(tmp_path, is_quiet=True)
    screen.show("training", 3, dropped_verifier_error=7)
    screen.watch.tell("the trainer has failed")
    assert screen.lines == ["rlhpc: the trainer has failed"]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    write_resolved(config_of(), layout, "")
    return layout


def test_a_complete_run_ends_with_its_figures_and_the_next_commands(layout: RunLayout) -> None:
    summary = {"steps": 9, "reward_first_tenth": 0.25, "reward_last_tenth": 0.75, "training_s": 3.0}
    layout.summary.write_text(json.dumps(summary))
    words = "\n".join(last_words(layout, "`rlhpc run a.toml --resume`"))
    assert "reward, last tenth of steps    0.750" in words
    assert f"{layout.root}: complete" in words
    assert f"rlhpc export {layout.root} MODEL" in words
    assert "every reward was 0" not in words
    layout.summary.write_text(json.dumps(summary | {"reward_first_tenth": 0.0, "reward_last_tenth": 0.0}))
    assert "every reward was 0" in "\n".join(last_words(layout, ""))


def test_a_run_that_was_interrupted_ends_with_what_was_saved_and_how_to_go_on(layout: RunLayout) -> None:
    status = {"phase": "stopped", "step": 7, "unix_time_s": 0.0, "roles": []}
    layout.status.write_text(json.dumps(status))
    layout.checkpoint(7).mkdir(parents=True)
    (layout.checkpoint(7) / "COMPLETE").touch()
    assert last_words(layout, "`rlhpc run a.toml --resume`") == [
        f"{layout.root}: stopped, saved at step 7; `rlhpc run a.toml --resume` continues it"
    ]


def test_before_there_is_a_run_nothing_is_said(tmp_path: Path) -> None:
    assert last_words(RunLayout(tmp_path), "") == []


class Closed(io.StringIO):
    """A terminal that is gone: EIO."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_what_nobody_can_read_any_more_ends_no_run(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    screen.watch = Watch(screen.layout, Closed(), expected=EXPECTED)
    screen.show("training", 1, *EXPECTED, dropped_poison=1)


def test_last_words_are_said_also_in_a_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, gone = Screen(tmp_path), tmp_path / "gone"
    write_resolved(config_of(), screen.layout, "")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert last_words(screen.layout, "`x`") == [f"{tmp_path}: stopped before the first step; `x` continues it"]
    refused = f"{tmp_path}: stopped before the first step; once that is mended, `x` continues it"
    assert last_words(screen.layout, "`x`", EXIT_CONFIG) == [refused]


def test_a_terminal_obeys_nothing_of_a_processs_last_words(tmp_path: Path) -> None:
    """They may quote what a model has sampled."""
    stream = io.StringIO()
    Watch(RunLayout(tmp_path), stream).tell("generator-0 ended with status 1: no answer in \x1b[2J\x9b2J\u202e\rwell")
    assert stream.getvalue() == (
        "rlhpc: generator-0 ended with status 1: no answer in \\x1b[2J\\x9b2J\\x202e\\x0dwell\n"
    )
