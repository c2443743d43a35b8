"""A controller is killed or stops, another begins where it can; generators and rewards live through it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_ALONE, EXIT_FAULT
from rlhpc.training.checkpoint_directory import latest_complete
from tests.faults.attempts_kit import Attempts
from tests.patience import PATIENCE_S
from tests.ring.ring_rewards import GATE, GATE_AFTER
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import Lab, make_lab, summary_of

pytestmark = pytest.mark.ring
NUM_STEPS = 24
HELD_STEPS = 19  # at most so many are done before the gate is opened
SETTINGS = {
    "run": {"num_steps": NUM_STEPS},
    "data": {"task": "tests.ring.ring_rewards:gated_parity"},
    "rewards": {"timeout_s": 600.0},
    "checkpoint": {"every_steps": 4},
    "weights": {"timeout_s": 5.0},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(autouse=True)
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """To be touched once the fault has been done."""
    monkeypatch.setenv(GATE, str(tmp_path / "gate"))
    monkeypatch.setenv(GATE_AFTER, str(HELD_STEPS * 16))
    return tmp_path / "gate"


def step_of(layout: RunLayout) -> int:
    try:
        return int(json.loads(layout.status.read_bytes())["step"])
    except FileNotFoundError:
        return 0


def assert_whole(layout: RunLayout) -> None:
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
    summary = summary_of(layout)
    assert summary["steps"] == NUM_STEPS
    assert summary["staleness_max"] <= summary["staleness_bound"]
    for rollout in consumed(layout.rollouts):  # no version of the timeline that was given up
        assert rollout.versions.max() <= rollout.consumed_step


@pytest.mark.parametrize("engine", ["scripted", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])])
def test_generators_and_rewards_outlive_a_controller_that_is_killed(lab: Lab, gate: Path, engine: str) -> None:
    settings = {**SETTINGS, "checkpoint": {"every_steps": 10}, "generation": {"engine": engine}}
    with Attempts(lab, f"killed-{engine}", **settings) as run:
        assert run.begin().index == 0
        run.start("controller-0", "trainer-0")
        run.start("generator-0", "reward-0")
        pids = run.pid("generator-0"), run.pid("reward-0")
        # Some steps past a checkpoint, which is complete: the next attempt goes back to an older version than the
        # engine has.
        run.wait_until(
            lambda: step_of(run.layout) >= 12 and latest_complete(run.layout.checkpoints) is not None, "step 12, saved"
        )
        run.kill("controller-0", "trainer-0")
        gate.touch()
        attempt = run.begin()
        assert (attempt.index, attempt.resume_step) == (1, 10)
        run.start("controller-0", "trainer-0")
        assert run.status_of("controller-0") == 0, run.story()
        assert run.status_of("generator-0") == 0, run.story()
        assert run.status_of("reward-0") == 0, run.story()
        assert (run.pid("generator-0"), run.pid("reward-0")) == pids
        assert "controller-0 was started again" in run.log("generator-0")
        assert run.log("generator-0").count("started: pid") == 1
        assert_whole(run.layout)


@pytest.mark.long
def test_they_wait_for_the_next_controller_when_one_stops_before_the_last_step(lab: Lab, gate: Path) -> None:
    with Attempts(lab, "stopped", **SETTINGS) as run:
        run.begin()
        run.start("controller-0", "trainer-0")
        run.start("generator-0", "reward-0")
        run.wait_until(lambda: step_of(run.layout) >= 5, "step 5")
        run.signal("controller-0", signal.SIGTERM)
        gate.touch()
        assert run.status_of("controller-0") == 0, run.story()
        assert run.status_of("trainer-0") == 0, run.story()
        run.wait_until(lambda: "looking for the next controller" in run.log("generator-0"), "the generator looks")
        run.begin()
        run.start("controller-0", "trainer-0")
        assert run.status_of("controller-0") == 0, run.story()
        assert run.status_of("generator-0") == run.status_of("reward-0") == 0, run.story()
        assert run.log("generator-0").count("started: pid") == 1
        assert_whole(run.layout)


@pytest.mark.long
def test_a_generator_takes_in_rewards_that_were_started_again_and_loses_nothing(lab: Lab, gate: Path) -> None:
    with Attempts(lab, "unrewarded", **SETTINGS) as run:
        run.begin()
        run.start("controller-0", "trainer-0")
        run.start("generator-0", "reward-0")
        run.wait_until(lambda: step_of(run.layout) >= 3, "step 3")
        run.kill("reward-0")
        run.start("reward-0", start=1)
        gate.touch()
        assert run.status_of("controller-0") == 0, run.story()
        assert run.status_of("generator-0") == run.status_of("reward-0") == 0, run.story()
        assert "reward-0 was started again" in run.log("generator-0")
        assert "looking for the next controller" not in run.log("generator-0")
        assert_whole(run.layout)
        assert summary_of(run.layout)["leases_regranted"] == 0


@pytest.mark.parametrize("role", ["generator-0", "reward-0", "trainer-0"])
def test_who_waits_in_vain_says_for_whom_and_ends_with_a_status_of_its_own(lab: Lab, role: str) -> None:
    with Attempts(lab, f"alone-{role}", **SETTINGS) as run:
        run.begin()
        run.start(role, meet_timeout_s=1.0)
        assert run.status_of(role) == EXIT_ALONE, run.story()
        last = run.log(role).splitlines()[-1]
        assert "ChannelTimeout" in last
        assert "controller-0 has not opened channel" in last


def test_a_controller_that_waits_in_vain_for_its_trainer_names_it(lab: Lab) -> None:
    with Attempts(lab, "untrained", **SETTINGS) as run:
        run.begin()
        run.start("controller-0", meet_timeout_s=1.0)
        assert run.status_of("controller-0") == EXIT_ALONE, run.story()
        assert "trainer-0 has not connected after 1 s" in run.log("controller-0").splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_schedulers_notice_makes_a_generator_leave_while_it_waits(lab: Lab, number: signal.Signals) -> None:
    with Attempts(lab, f"noticed-{number.name.lower()}", **SETTINGS) as run:
        run.begin()
        run.start("generator-0")
        run.wait_until(lambda: "started: pid" in run.log("generator-0"), "it begins")
        _wait_for_handler(run.pid("generator-0"), number)
        run.signal("generator-0", number)
        assert run.status_of("generator-0") == 0, run.story()


@pytest.mark.long
def test_a_generator_with_settings_of_before_ends_so_that_it_is_started_anew(lab: Lab, gate: Path) -> None:
    with Attempts(lab, "resettled", **SETTINGS) as run:
        run.begin()
        run.start("controller-0", "trainer-0")
        run.start("generator-0")
        run.start("reward-0")
        run.wait_until(lambda: step_of(run.layout) >= 5, "step 5")
        run.kill("controller-0", "trainer-0", "reward-0")
        gate.touch()
        changed = Attempts(lab, "resettled", **SETTINGS, trainer={"learning_rate": 2e-4})
        with changed:
            changed.resume()
            changed.start("controller-0", "trainer-0", "reward-0")
            assert run.status_of("generator-0") == EXIT_FAULT, run.story()
            assert "settings have changed" in run.log("generator-0").splitlines()[-1]
            changed.start("generator-0", start=1)
            assert changed.status_of("controller-0") == 0, changed.story()
        assert_whole(run.layout)


def _wait_for_handler(pid: int, number: signal.Signals) -> None:
    """Python needs a second to come to the point where signals are heeded; before that they end it, as any process."""
    for _ in Deadline(PATIENCE_S).polls(0.05):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (number - 1) & 1:
                return
    raise AssertionError(f"{number.name} is not handled")
