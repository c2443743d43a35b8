"""A prompt that kills every generator that samples it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import h5py
import pytest

from rlhpc.base.run_directory import RunLayout
from tests.faults.attempts_kit import Attempts
from tests.faults.lethal_rewards import LETHAL, RUN_DIRECTORY
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab

pytestmark = pytest.mark.ring
NUM_STEPS, MAX_ATTEMPTS, POSITION = 3, 3, 2
SETTINGS = {
    "run": {"num_steps": NUM_STEPS},
    "checkpoint": {"every_steps": 1000},
    "admission": {"max_attempts": MAX_ATTEMPTS},
}


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = make_lab(tmp_path_factory.mktemp("poison"))
    records = [json.loads(line) for line in made.dataset.read_text().splitlines()]
    records[POSITION]["answer"] = LETHAL
    made.dataset.write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def data_of(lab: Lab) -> dict[str, object]:
    return {
        "path": str(lab.dataset),
        "task": "tests.faults.lethal_rewards:parity_unless_lethal",
        "shuffle": False,
    }


def poisoned_references(rollouts: Path) -> list[str]:
    """References of the groups that were dropped as poison."""
    found = []
    for path in sorted(rollouts.glob("segment_*.h5")):
        with h5py.File(path, "r", locking=False) as file:
            reasons, offsets = file["groups/drop_reason"][:], file["groups/reference_offsets"][:]
            texts = file["groups/reference"][:]
        found += [
            texts[offsets[g] : offsets[g + 1]].tobytes().decode() for g, r in enumerate(reasons) if r == b"poison"
        ]
    return found


def num_lost_leases(layout: RunLayout) -> int:
    """Of the lethal prompt: deaths with it."""
    if not layout.lost_leases.exists():
        return 0
    return max(
        (json.loads(line)["lost_leases"] for line in layout.lost_leases.read_text().splitlines() if line), default=0
    )


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_prompt_that_kills_generators_is_dropped_over_a_crash_of_the_run_and_no_other_is(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = lab.layout("poison")
    monkeypatch.setenv(RUN_DIRECTORY, str(layout.root))
    with Attempts(lab, "poison", **SETTINGS, data=data_of(lab)) as run:
        run.begin()
        run.start("controller-0", "trainer-0", "reward-0")
        run.start("generator-0")
        run.wait_until(lambda: not run.is_alive("generator-0"), "the first generator dies")
        run.start("generator-0", start=1)
        run.wait_until(lambda: num_lost_leases(layout) == 1, "the death is written down")
        run.kill("controller-0", "trainer-0", "generator-0", "reward-0")  # and nothing was saved

        assert run.resume().resume_step is None
        run.start("controller-0", "trainer-0", "reward-0")
        starts = itertools.count(2)
        while run.is_alive("controller-0"):  # a late verdict also kills a generator that has not begun, at no strike
            run.start("generator-0", start=next(starts))
            run.wait_until(lambda: not run.are_alive("generator-0", "controller-0"), "a death, or the end of the run")
        assert run.status_of("controller-0") == 0, run.story()
    assert poisoned_references(layout.rollouts) == [LETHAL]
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)


@pytest.mark.long
def test_a_local_run_whose_only_generator_dies_of_a_prompt_goes_on_without_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = lab.layout("alone")
    monkeypatch.setenv(RUN_DIRECTORY, str(layout.root))
    # So long that nobody's silence is noticed.
    sections = {**SETTINGS, "data": data_of(lab), "transport": {"dead_after_s": 120.0}}
    with Run(lab.run_file("alone", **sections), layout) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert run.output.count("ended with signal SIGKILL") == 3
    assert poisoned_references(layout.rollouts) == [LETHAL]
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
