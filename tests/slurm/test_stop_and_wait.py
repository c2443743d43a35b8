"""Runs are stopped by their recorded ids alone, and waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.commands import stop
from launch.slurm.queue import cancel
from launch.view import status as wait_for_run
from launch.view.status import Watch
from tests.ring.run_kit import Lab, make_lab
from tests.slurm.cluster_kit import job_state, submit, wait_state
from tests.slurm.submit_kit import LATER, Desk, ids_of


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("placement", ["hetjob", "jobs"])
def test_stop_cancels_what_waits_in_the_queue(desk: Desk, placement: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = submit(desk.cluster, "sleep 60", LATER)
    assert desk.submit(f"stop-{placement}", desk.site(cluster={"placement": placement})) == 0
    layout = desk.lab.layout(f"stop-{placement}")
    assert main(["stop", str(layout.root)]) == 0
    assert capsys.readouterr().out.endswith(
        f"{layout.root}: stopped before the first step; `rlhpc resume {layout.root}` continues it\n"
    )
    assert desk.queued() == [str(other)]
    assert main(["stop", str(layout.root)]) == 0
    assert capsys.readouterr().out == f"{layout.root}: this run is not running\n"


def test_stop_waits_for_what_runs_and_cancels_the_rest(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request, looked = desk.lab.layout("running").stop_request, tmp_path / "looked"
    until_asked = f"while [ ! -e {request} ] || [ ! -e {looked} ]; do sleep 0.2; done; sleep 1"

    def cancel_after_a_look(*words: Any, **options: Any) -> None:
        looked.touch()  # the rows to be printed have been read
        cancel(*words, **options)

    monkeypatch.setattr(stop, "cancel", cancel_after_a_look)
    layout = desk.recorded(
        "running", ("controller", until_asked, ("--partition=cpu",)), ("trainer", "sleep 60", (LATER,))
    )
    ids = ids_of(layout)
    wait_state(desk.cluster, ids["controller"], "RUNNING")
    assert main(["stop", str(layout.root)]) == 0
    assert job_state(desk.cluster, ids["controller"]) == "COMPLETED"
    assert job_state(desk.cluster, ids["trainer"]) == "CANCELLED"
    assert f"{ids['controller']} running" in capsys.readouterr().out


def test_stop_now_cancels_what_runs(desk: Desk) -> None:
    other = submit(desk.cluster, "sleep 600", "--partition=cpu", "--job-name=now")
    layout = desk.recorded("now", ("hetjob", "sleep 600", ("--partition=cpu",)))
    job = ids_of(layout)["hetjob"]
    wait_state(desk.cluster, job, "RUNNING")
    assert main(["stop", str(layout.root), "--now"]) == 0
    assert layout.abort_request.exists()
    assert job_state(desk.cluster, job) == "CANCELLED"
    assert job_state(desk.cluster, other) in ("RUNNING", "PENDING")  # of the same name, and not of this run


@pytest.mark.parametrize(("script", "status"), [("touch {summary}", 0), ("true", 1)])
def test_wait_tells_a_run_that_is_complete_from_one_that_ended(
    desk: Desk,
    script: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wait_for_run, "ASK_SLURM_EVERY_S", 0.2)
    name, told = f"wait-{status}", tmp_path / "told"

    class ToldWatch(Watch):
        def tell(self, text: str) -> None:
            super().tell(text)
            if " running" in text:
                told.touch()

    monkeypatch.setattr(wait_for_run, "Watch", ToldWatch)
    lines = f"while [ ! -e {told} ]; do sleep 0.1; done; {script.format(summary=desk.lab.layout(name).summary)}"
    layout = desk.recorded(name, ("hetjob", lines, ("--partition=cpu",)))
    assert wait_for_run.wait_for_run(layout) == status
    said = capsys.readouterr().err
    assert f"{ids_of(layout)['hetjob']} running" in said
    assert ("complete" if status == 0 else "all jobs have ended, the run is not complete") in said
