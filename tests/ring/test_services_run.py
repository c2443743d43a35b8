"""A run starts its own services, sees them die, and ends as it would without."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from rlhpc.transport.service_address import addresses_of
from tests.ring.run_kit import Lab, Run, make_lab

pytestmark = [pytest.mark.ring, pytest.mark.long]
NAMES = {"service-0": "teacher", "service-1": "teacher", "service-2": "strict"}


def services(lab: Lab) -> list[dict[str, Any]]:
    model = str(lab.model)
    return [
        {"name": "teacher", "kind": "teacher", "path": model, "replicas": 2},
        {"name": "strict", "kind": "judge", "path": model},
    ]


def served(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of the services in a status, by name of the process."""
    return {row["name"]: row for row in status["roles"] if row["name"].startswith("service-")}


def test_services_of_a_run_are_started_shown_and_restarted_each_on_its_own(tmp_path: Any) -> None:
    lab = make_lab(tmp_path)
    lab.script_engine(token_s=0.02)
    run_file = lab.run_file("served", run={"num_steps": 12}, service=services(lab))
    layout = lab.layout("served")
    with Run(run_file, layout) as run:
        seen = run.wait_until(lambda status: served(status).keys() == NAMES.keys())
        assert {name: row["service"] for name, row in served(seen).items()} == NAMES
        assert served(seen)["service-2"]["kind"] == "judge"
        before = {
            each.replica: each for name in ("teacher", "strict") for each in addresses_of(layout.rendezvous, name)
        }
        assert [each.service for each in before.values()] == ["teacher", "teacher", "strict"]
        for replica, name in enumerate(NAMES):
            victim: psutil.Process = run.role("service", replica)
            os.kill(victim.pid, signal.SIGKILL)
            run.wait_until(
                lambda status, name=name, pid=victim.pid: served(status).get(name, {"pid": pid})["pid"] != pid
            )
        after = {each.replica: each for name in ("teacher", "strict") for each in addresses_of(layout.rendezvous, name)}
        assert [after[replica].key == before[replica].key for replica in (0, 1, 2)] == [False] * 3
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert run.output.count("; it is restarted") == 3
    assert "attempt 1 begins" not in run.output
    assert [*layout.rendezvous.glob("service-*.json")] == [], "each has withdrawn its address"
