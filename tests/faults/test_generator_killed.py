"""One of two generators dies without a word; the run does not notice more than it has to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rlhpc.run_layout import RunLayout
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import Lab, Run, make_lab, summary_of

NUM_STEPS = 40  # far more than go by before both engines are seen at work


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.ring
@pytest.mark.vllm
def test_a_run_survives_sigkill_of_one_of_two_generators(lab: Lab) -> None:
    run_file = lab.run_file(
        "bereft",
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        generation={"engine": "vllm", "num_replicas": 2, "max_num_seqs": 8, "max_completion_tokens": 160},
        trainer={"device": "auto"},
        weights={"timeout_s": 10.0},
        transport={"dead_after_s": 5.0},
    )
    layout = lab.layout("bereft")
    with Run(run_file, layout) as run:
        # Both sample: the victim holds leases, so that there is something to lose.
        status = run.wait_until(lambda s: s["step"] >= 2 and all(_is_sampling(r) for r in _generators(s, 2)))
        victim = _generators(status, 2)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()  # the engine workers of the dead one neither
    assert f"{victim['name']} ended with signal SIGKILL" in run.output
    assert "the run goes on with the rest" in run.output
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
    summary = summary_of(layout)
    assert summary["steps"] == NUM_STEPS
    assert summary["leases_regranted"] > 0
    assert summary["staleness_max"] <= summary["staleness_bound"]
    assert max(r.trained_version - r.admitted_version for r in consumed(layout.rollouts)) <= 1
    assert _members_at_the_end(layout) == {"generator-0", "generator-1"} - {victim["name"]}


def _generators(status: dict, num: int) -> list[dict]:
    found = [role for role in status["roles"] if role["name"].startswith("generator")]
    return found if len(found) == num else [{"metrics": {}}]


def _is_sampling(role: dict) -> bool:
    return role["metrics"].get("running", 0) > 0


def _members_at_the_end(layout: RunLayout) -> set[str]:
    status = json.loads(Path(layout.status).read_bytes())
    return {role["name"] for role in status["roles"] if role["name"].startswith("generator")}
