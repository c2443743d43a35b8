"""A run starts its own services, sees them die, and ends as it would without."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from rlhpc.transport.service_address import addresses_of
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab, scalars
from tests.tiny_models import make_tiny_classifier

pytestmark = [pytest.mark.ring, pytest.mark.long]
NAMES = {"service-0": "teacher", "service-1": "teacher", "service-2": "strict", "service-3": "scores"}


def services(lab: Lab) -> list[dict[str, Any]]:
    model = str(lab.model)
    return [
        {"name": "teacher", "kind": "teacher", "path": model, "replicas": 2},
        {"name": "strict", "kind": "judge", "path": model},
        {"name": "scores", "kind": "reward", "path": str(make_tiny_classifier(lab.root / "scores"))},
    ]


def served(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of the services in a status, by name of the process."""
    return {row["name"]: row for row in status["roles"] if row["name"].startswith("service-")}


def test_services_of_a_run_are_started_shown_and_restarted_each_on_its_own(tmp_path: Any) -> None:
    lab = make_lab(tmp_path)
    lab.script_engine(token_s=0.05)
    run_file = lab.run_file(
        "served", run={"num_steps": 40}, service=services(lab), algorithm={"distillation_coefficient": 0.1},
        admission={"active_sampling": False}, reward_model={"service": "scores", "use_chat_template": False},
        data={"task": "reward_model", "reference_field": "*"},
    )  # fmt: skip
    layout = lab.layout("served")
    with Run(run_file, layout) as run:
        seen = run.wait_until(lambda status: served(status).keys() == NAMES.keys())
        assert {name: row["service"] for name, row in served(seen).items()} == NAMES
        assert served(seen)["service-2"]["kind"] == "judge"
        before = {
            each.replica: each
            for name in ("teacher", "strict", "scores")
            for each in addresses_of(layout.rendezvous, name)
        }
        assert [each.service for each in before.values()] == ["teacher", "teacher", "strict", "scores"]
        for replica, name in enumerate(NAMES):
            victim: psutil.Process = run.role("service", replica)
            os.kill(victim.pid, signal.SIGKILL)
            run.wait_until(
                lambda status, name=name, pid=victim.pid: served(status).get(name, {"pid": pid})["pid"] != pid
            )
        after = {
            each.replica: each
            for name in ("teacher", "strict", "scores")
            for each in addresses_of(layout.rendezvous, name)
        }
        assert [after[replica].key == before[replica].key for replica in range(4)] == [False] * 4
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert run.output.count("; it is restarted") == 4
    assert "attempt 1 begins" not in run.output
    assert_full_batches_trained_once(layout.rollouts, 40, 4, 4)
    assert max(scalars(layout, "service_requests_per_s/teacher")) > 0
    assert max(scalars(layout, "service_tokens_per_s/scores")) > 0
    assert [*layout.rendezvous.glob("service-*.json")] == [], "each has withdrawn its address"
