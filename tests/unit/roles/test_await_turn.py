"""A process that has loaded ahead of its attempt waits for it, takes its name and number, and is fenced as others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.errors import OwnershipLost
from rlhpc.ownership import take_over
from rlhpc.roles.common.lifecycle import RoleContext
from rlhpc.roles.common.stand_by import LOOK_S, await_turn, await_turn_blocking
from rlhpc.roles.trainer.models import open_ahead
from rlhpc.run_layout import RunLayout
from tests.unit.roles.small_ring import small_config

JOB = 12


def standing_by(root: Path, role: str) -> RoleContext:
    """For the first life of job 12, which is expected to begin attempt 1."""
    layout, config = RunLayout(root), small_config()
    return RoleContext(role, 0, 1, 1, None, "12.0.1-x", layout, config, "hash", stands_by_for=(JOB, 0))


def begin(layout: RunLayout, job: int, index: int, owner: str) -> None:
    document = {"attempt": index, "resume_step": 40, "job_id": job, "restart": 0, "fence": owner}
    layout.attempt.write_text(json.dumps(document))


async def test_a_generator_waits_for_the_attempt_of_its_own_job_and_belongs_to_no_owner(tmp_path: Path) -> None:
    context, stop = standing_by(tmp_path, "generator"), asyncio.Event()
    begin(context.layout, 11, 0, "0-old")
    waiting = asyncio.create_task(await_turn(context, stop))
    await asyncio.sleep(3 * LOOK_S)
    assert context.layout.loaded_mark("generator", 0, 1, JOB).exists()
    assert not waiting.done()
    begin(context.layout, JOB, 1, "1-new")
    turn = await waiting
    assert turn == replace(context, resume_step=40, stands_by_for=None)
    assert await await_turn(turn, stop) is turn, "who stands by for nobody does not wait"


async def test_a_generator_that_is_asked_to_leave_while_it_stands_by_does(tmp_path: Path) -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(await_turn(standing_by(tmp_path, "generator"), stop))
    stop.set()
    assert await waiting is None


def test_a_trainer_takes_number_step_and_owner_of_the_attempt_that_begins(tmp_path: Path) -> None:
    context, loaded = standing_by(tmp_path, "trainer"), threading.Event()
    owner = take_over(context.layout, 2, job_id=JOB).owner
    begin(context.layout, JOB, 2, owner)
    turn = await_turn_blocking(context, loaded.set)
    assert loaded.is_set()
    assert (turn.attempt, turn.resume_step, turn.owner) == (2, 40, owner)


def test_a_trainer_waits_on_while_nobody_can_tell_whose_the_run_is(tmp_path: Path) -> None:
    context, loaded = standing_by(tmp_path, "trainer"), threading.Event()
    owner = take_over(context.layout, 2, job_id=JOB).owner
    right = context.layout.owner.rename(tmp_path / "right")
    context.layout.owner.symlink_to(context.layout.owner)  # an error for who opens it
    begin(context.layout, JOB, 2, owner)

    def answer_again() -> None:
        loaded.wait()
        time.sleep(3 * LOOK_S)
        right.rename(context.layout.owner)

    server = threading.Thread(target=answer_again)
    server.start()
    assert await_turn_blocking(context, loaded.set).owner == owner
    server.join()


def test_a_trainer_whose_attempt_is_over_already_writes_nothing(tmp_path: Path) -> None:
    context = standing_by(tmp_path, "trainer")
    begin(context.layout, JOB, 1, take_over(context.layout, 1, job_id=JOB).owner)
    take_over(context.layout, 2, job_id=JOB + 1)
    with pytest.raises(OwnershipLost):
        await_turn_blocking(context)


def test_a_reference_that_is_renewed_is_not_opened_before_its_checkpoint_is_known(tmp_path: Path) -> None:
    context = standing_by(tmp_path, "trainer")
    renewed = context.config.algorithm.model_copy(update={"reference_every": 2})
    config = context.config.model_copy(update={"algorithm": renewed})
    with ExitStack() as stack:
        assert open_ahead(replace(context, config=config), stack) is None
        assert open_ahead(replace(context, stands_by_for=None), stack) is None
