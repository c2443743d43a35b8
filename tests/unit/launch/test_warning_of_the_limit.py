"""A job that evaluates a run is told that its time is nearly over: wherever that finds it, it goes on later."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, field_serializer

from launch.evaluate.follow import follow_run
from launch.evaluate.job import TimeIsUp, TimeWarning
from rlhpc.base.run_directory import RunLayout

JOB = 4711


def warn() -> None:
    """As Slurm does.  The handler runs before this returns."""
    os.kill(os.getpid(), signal.SIGUSR2)


class Warned(BaseModel):
    """Its serializer is interrupted by the warning."""

    number: int = 0

    @field_serializer("number")
    def _as_text(self, number: int) -> str:
        warn()
        return str(number)


class WarnedFinaliser:
    """The warning comes while it is being finalised."""

    def __del__(self) -> None:
        warn()


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A run whose evaluations are this process's job."""
    layout = RunLayout(tmp_path / "run")
    layout.evaluations.mkdir(parents=True)
    (layout.evaluations / "job.json").write_text(json.dumps({"job_id": JOB}))
    monkeypatch.setenv("SLURM_JOB_ID", str(JOB))
    return layout


def write_settings() -> None:
    Warned().model_dump_json()


def finalise() -> None:
    WarnedFinaliser()


@pytest.mark.parametrize("work", [warn, write_settings, finalise])
def test_a_warning_disturbs_nobody_and_is_not_forgotten(layout: RunLayout, work: Callable[[], None]) -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    with TimeWarning(layout) as warning:
        warning.remind()
        work()
        with pytest.raises(TimeIsUp):
            warning.remind()
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_in_a_job_of_somebody_elses_it_is_ctrl_c(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", str(JOB + 1))
    with TimeWarning(layout) as warning:
        warn()
        with pytest.raises(KeyboardInterrupt):
            warning.remind()


def test_a_job_goes_on_later_where_it_is_reminded_and_nowhere_else(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def evaluate(
        layout: RunLayout, options: object, show: object, tell: Callable[[str], None], remind: Callable[[], None]
    ) -> int:
        remind()
        warn()
        tell("the best model so far")  # before its figures are on disk: nothing is raised here
        remind()
        return 1

    monkeypatch.setattr("launch.evaluate.follow._follow", evaluate)
    monkeypatch.setattr("launch.evaluate.follow.run_of", lambda options: layout)
    monkeypatch.setattr("launch.evaluate.follow.go_on_later", lambda layout, tell: said.append("later") or 0)
    assert follow_run(argparse.Namespace(), lambda report: None, said.append) == 0
    assert said == ["the best model so far", "later"]
