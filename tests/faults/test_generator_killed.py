"""One of two generators dies without a word: the run goes on meanwhile, and it is started again."""

from __future__ import annotations

import os
import signal

import pytest

from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import Lab, Run, last_scalar, make_lab, rlhpc


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.ring
@pytest.mark.vllm
def test_a_run_survives_sigkill_of_one_of_two_generators(lab: Lab) -> None:
    run_file = lab.run_file(
        "bereft",
        run={"num_steps": 100_000},  # stopped once everything has been seen
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
        run.wait_for_step(status["step"] + 5)
        back = run.wait_until(lambda s: all(_has_sampled(r) and r["pid"] != victim["pid"] for r in _generators(s, 2)))
        pids = {role["name"]: role["pid"] for role in _generators(back, 2)}
        stopped = rlhpc("stop", str(layout.root))
        assert stopped.returncode == 0, stopped.stderr
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()  # the engine workers of the dead one neither
    assert f"{victim['name']} on " in run.output
    assert "it is started again" in run.output
    assert_full_batches_trained_once(layout.rollouts, run.status()["step"], 4, 4)
    assert last_scalar(layout, "group/regranted_total") > 0
    assert max(r.trained_version - r.admitted_version for r in consumed(layout.rollouts)) <= 1
    (other,) = {"generator-0", "generator-1"} - {victim["name"]}
    assert pids[other] == next(r["pid"] for r in _generators(status, 2) if r["name"] == other)  # undisturbed


def _generators(status: dict, num: int) -> list[dict]:
    found = [role for role in status["roles"] if role["name"].startswith("generator")]
    return found if len(found) == num else [{"metrics": {}, "pid": 0}]


def _has_sampled(role: dict) -> bool:
    return role["metrics"].get("tokens", 0) > 0


def _is_sampling(role: dict) -> bool:
    return role["metrics"].get("running", 0) > 0
