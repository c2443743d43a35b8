"""A job that evaluates a run is told that its time is nearly over: wherever that finds it, it goes on later."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, field_serializer

from launch.commands.evaluate.follow import follow_run
from launch.commands.evaluate.following_job import TimeIsUp, TimeWarning
from rlhpc.run_layout import RunLayout

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


class WarnedSequence:
    """The warning comes while torch asks for an element."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        warn()
        return 0.0


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


def make_a_tensor() -> None:
    torch.tensor(WarnedSequence())  # as safetensors makes one of a mapped file


def sleep() -> None:
    warn()


@pytest.mark.parametrize("work", [sleep, write_settings, make_a_tensor])
def test_whatever_a_library_makes_of_the_warning_the_job_goes_on_later(
    layout: RunLayout, work: Callable[[], None]
) -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(TimeIsUp), TimeWarning(layout):
        work()
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_a_job_that_is_cancelled_after_its_warning_does_not_go_on(layout: RunLayout) -> None:
    def cancelled_while_it_ends() -> None:
        with suppress(TimeIsUp):
            warn()
        raise KeyboardInterrupt  # as SIGTERM does

    with pytest.raises(KeyboardInterrupt), TimeWarning(layout):
        cancelled_while_it_ends()


def test_an_error_without_a_warning_stays_what_it_is(layout: RunLayout) -> None:
    with pytest.raises(ValueError, match="of its own"), TimeWarning(layout):
        raise ValueError("of its own")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_warning_that_python_drops_is_raised_when_the_job_next_says_how_far_it_is(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def evaluate(layout: RunLayout, options: object, show: object, tell: Callable[[str], None], remind: object) -> int:
        WarnedFinaliser()
        tell("4 of 8 samples")
        return 1

    monkeypatch.setattr("launch.commands.evaluate.follow._follow", evaluate)
    monkeypatch.setattr("launch.commands.evaluate.follow.run_of", lambda options: layout)
    monkeypatch.setattr("launch.commands.evaluate.follow.go_on_later", lambda layout, tell: said.append("later") or 0)
    assert follow_run(None, None, said.append) == 0  # type: ignore[arg-type]
    assert said == ["later"]
