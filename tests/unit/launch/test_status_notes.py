"""What `rlhpc status` tells of prompts that end generators, and of the guard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.commands.status import render_status
from launch.commands.status_notes import read_notes
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases, Suspicion
from rlhpc.config_file import write_resolved
from rlhpc.roles.controller.guard_file import GuardEntry, GuardFile
from rlhpc.run_layout import RunLayout
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
    assert read_notes(layout).lines() == []


def test_prompts_that_ended_generators_too_often_are_listed_and_others_counted(layout: RunLayout) -> None:
    strike(layout, killer=1, other=1, innocent=1)
    strike(layout, killer=3, innocent=0)
    notes = read_notes(layout)
    assert (notes.quarantined, notes.suspects) == (["killer"], ["other"])
    assert notes.lines()[0].startswith("quarantined prompts   1,")
    assert "killer" in notes.lines()[0]
    assert notes.lines()[1].startswith("suspect prompts   1,")


def test_status_shows_the_last_action_of_the_guard_and_programs_get_all(layout: RunLayout) -> None:
    for step in (3, 4):
        GuardFile(layout.guard).append(
            GuardEntry(0, step, step, "warn", {"ess": (0.1, 0.3, None)}, (1,), f"step {step}: low")
        )
    assert read_notes(layout).lines() == ["guard   2 actions, the last one: warn (attempt 0), step 4: low"]
    document = json.loads(render_status(layout, as_json=True))
    assert [entry["step"] for entry in document["guard"]] == [3, 4]
