"""What `rlhpc status` tells of prompts that end generators, and of the guard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.view.run import RunView
from launch.view.status import read_notes, render_status
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases, Suspicion
from rlhpc.config.file import write_resolved
from rlhpc.roles.controller.guard import GuardEntry, GuardFile
from tests.unit.buffer.rollout_samples import ManualClock, make_ledger
from tests.unit.launch.launchers import living_launcher
from tests.unit.launch.site_kit import config_of


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    write_resolved(config_of("admission.max_attempts=3"), layout, "")
    return layout


def strike(layout: RunLayout, **strikes: int) -> None:
    book = LostLeases()
    book.unwritten = [Suspicion(prompt, number, 4) for prompt, number in strikes.items()]
    LostLeaseFile(layout.strikes).append(book)


def test_where_nothing_has_happened_nothing_is_said(layout: RunLayout) -> None:
    assert read_notes(RunView(layout)).lines() == []


def test_prompts_that_ended_generators_too_often_are_listed_and_others_counted(layout: RunLayout) -> None:
    strike(layout, killer=1, other=1, innocent=1)
    strike(layout, killer=3, innocent=0)
    notes = read_notes(RunView(layout))
    assert [each.prompt for each in notes.quarantined] == ["killer"]
    assert [each.prompt for each in notes.suspects] == ["other"]
    assert notes.lines()[0] == (
        "quarantined prompts   1: record killer: 3 generators died sampling it; a resume with "
        "--lift-quarantine samples them again"
    )
    assert notes.lines()[1].startswith("suspect prompts   1;")


def test_status_shows_the_last_action_of_the_guard_and_programs_get_all(layout: RunLayout) -> None:
    for step in (3, 4):
        GuardFile(layout.guard).append(
            GuardEntry(0, step, step, "warn", {"ess": (0.1, 0.3, None)}, (1,), f"step {step}: low")
        )
    assert read_notes(RunView(layout)).lines() == ["guard   2 actions, the last one: warn (attempt 0), step 4: low"]
    document = json.loads(render_status(layout, as_json=True))
    assert [entry["step"] for entry in document["guard"]] == [3, 4]


@pytest.mark.starts
def test_who_starts_has_a_row_and_the_queue_fits_the_terminal(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    config = config_of("generation.num_replicas=2")
    write_resolved(config, layout, "")
    ledger = make_ledger(ManualClock())
    counts = dict.fromkeys(ledger.counts(), 1234567) | {"dropped_poison": 0}
    role = {"name": "generator-0", "state": "ready", "version": 3, "silent_s": 0.3, "waits_for": "", "metrics": {}}
    figures = dict.fromkeys(("version", "step", "reward", "generator_tokens_per_s", "trainer_tokens_per_s"), 1)
    figures |= dict.fromkeys(("staleness_max", "staleness_bound", "num_steps", "unix_time_s"), 2)
    status = {"name": "first", "phase": "training", "queue": counts, "roles": [role], **figures}
    layout.status.write_text(json.dumps(status))
    with living_launcher(layout):
        lines = render_status(layout).splitlines()
    assert "generator-1   starting" in lines
    (row,) = [line for line in lines if line.startswith("generator-0")]
    assert row.split() == ["generator-0", "ready", "3", "0", "0.3s", "-"]
    queue = lines[2 : lines.index("")]
    assert max(map(len, queue)) <= 80
    told = re.findall(r"(\w+) (\d+)", "\n".join(queue))
    assert dict(told) == {name: str(count) for name, count in counts.items() if count}
    over = render_status(layout)  # the launcher is gone
    assert "generator-" not in over
    assert "not running on this machine" in over
