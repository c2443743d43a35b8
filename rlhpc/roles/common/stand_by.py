"""Load everything ahead of an attempt, then wait until it begins.

Input: a context that names the job whose attempt this process is started for.  Output: the context of that attempt, as
attempt.json tells it.  Until then the process opens no channel and writes nothing but a mark that it has loaded, so it
cannot disturb the attempt that is on; the supervisor of its job decides how long it waits, and ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable

from rlhpc.patience import patiently, patiently_aside
from rlhpc.roles.common.guard import Guard
from rlhpc.roles.common.lifecycle import RoleContext

log = logging.getLogger("rlhpc.stand_by")
LOOK_S = 0.2
WRITERS = ("controller", "trainer")  # to the run directory, in the name of its owner


async def await_turn(context: RoleContext, stop: asyncio.Event) -> RoleContext | None:
    """Return the context of the attempt, at once if this process does not stand by; None when `stop` is set before."""
    if context.stands_by_for is None:
        return context
    await patiently_aside(lambda: _say_it_is_loaded(context), context.layout.logs)
    while not stop.is_set():
        found = await asyncio.to_thread(_attempt_of, context)
        if found is not None:
            return found
        await asyncio.sleep(LOOK_S)
    return None


def await_turn_blocking(context: RoleContext, load: Callable[[], object] = lambda: None) -> RoleContext:
    """Like await_turn, for a process that only a signal ends; load: called before, if it stands by.

    Raises OwnershipLost: that attempt is over already.
    """
    if context.stands_by_for is None:
        return context
    load()
    patiently(lambda: _say_it_is_loaded(context), context.layout.logs)
    while (found := _attempt_of(context)) is None:
        time.sleep(LOOK_S)
    return found


def _say_it_is_loaded(context: RoleContext) -> None:
    job_id, _ = context.stands_by_for or (0, 0)
    mark = context.layout.loaded_mark(context.role, context.replica, context.attempt, job_id)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    log.info("everything is loaded; waiting for the attempt of job %d", job_id)


def _attempt_of(context: RoleContext) -> RoleContext | None:
    """The context of the attempt of our job, if it has begun; then this process is fenced as others of it are."""
    try:
        document = json.loads(context.layout.attempt.read_bytes())
    except (OSError, ValueError):  # the filesystem does not answer at the moment
        return None
    if (document["job_id"], document["restart"]) != context.stands_by_for:
        return None
    found = dataclasses.replace(
        context,
        attempt=document["attempt"],
        resume_step=document["resume_step"],
        owner=document["fence"] if context.role in WRITERS else "",
        stands_by_for=None,
    )
    if found.fence is not None:
        try:
            found.fence.check()
        except OSError as error:  # whose the run is has been rewritten just now: as above
            log.warning("%s: cannot be read, tried again: %s", context.layout.owner, error)
            return None
        Guard(found.fence).start()
    log.info("attempt %d has begun", found.attempt)
    return found
