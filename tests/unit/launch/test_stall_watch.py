"""When an attempt of a Slurm job counts as stalled."""

from __future__ import annotations

from launch.plan.processes import STALL_S
from launch.supervisor.outcomes import AwakeTime, StallWatch


def test_the_first_step_has_its_whole_limit_from_the_beginning_of_training_on() -> None:
    """Models that load for longer than stall_s took it all: the attempt was killed when training began."""
    watch = StallWatch(15.0, 12.0, now=100.0)
    assert watch.look(-1, False, 105.0) is None
    assert watch.look(0, False, 110.0) is None
    assert watch.look(0, False, 140.0) is None
    assert watch.look(0, True, 145.0) is None
    assert watch.look(0, True, 160.0) is None
    assert watch.look(0, True, 160.1) == 15.0


def test_before_training_roles_may_wait_for_each_other() -> None:
    watch = StallWatch(15.0, 12.0, now=0.0)
    assert watch.look(-1, False, 39.0) is None
    assert watch.look(-1, False, 39.1) == 39.0
    assert not watch.has_moved


def test_every_step_begins_the_limit_anew_and_the_first_one_of_a_resume_is_none_of_this_attempt() -> None:
    watch = StallWatch(15.0, 12.0, now=0.0)
    assert watch.look(40, True, 5.0) is None  # where it resumes
    assert not watch.has_moved
    assert watch.look(41, True, 19.0) is None
    assert watch.has_moved
    assert watch.look(41, True, 34.0) is None
    assert watch.look(41, True, 34.5) == 15.0


def test_steps_that_are_trained_again_begin_the_limit_anew_and_are_no_progress() -> None:
    watch = StallWatch(15.0, 12.0, now=0.0)
    assert watch.look(0, False, 5.0) is None
    assert watch.look(1, False, 44.0) is None
    assert watch.look(2, False, 83.0) is None
    assert watch.look(2, True, 84.0) is None
    assert (watch.has_stepped, watch.has_moved) == (True, False)
    assert watch.look(2, True, 99.5) == 15.0
    assert watch.look(3, True, 100.0) is None
    assert watch.has_moved


def test_a_step_of_a_run_on_this_machine_may_take_hours() -> None:
    """A model of 7B on one GPU samples for more than an hour before its first step."""
    watch = StallWatch(STALL_S, 1800.0, 0.0)
    assert watch.look(0, is_training=True, now=1.0) is None
    assert watch.look(0, is_training=True, now=2 * 3600.0) is None
    assert watch.look(0, is_training=True, now=7 * 3600.0) == STALL_S


def test_time_in_which_slurm_had_suspended_the_job_is_no_stall() -> None:
    """A job that was continued after an hour was ended at once, or used up a retry."""
    clock = [100.0]
    awake = AwakeTime(lambda: clock[0])
    watch = StallWatch(3600.0, 12.0, awake())
    assert watch.look(6, True, awake()) is None
    clock[0] += 10 * 3600.0
    assert watch.look(6, True, awake()) is None
    for _ in range(3600 - 300):
        clock[0] += 1.0
        assert watch.look(6, True, awake()) is None
    clock[0] += 1.0
    assert watch.look(6, True, awake()) == 3600.0
