"""The reward service: scores completions in separate processes.

Input: RewardRequest and TurnRequest from generators.  Output: RewardReply and TurnReply.  Calls are idempotent: the
state kept between the turns of a dialogue can be rebuilt from a request.  A service keeps its processes when the
controller is replaced (lifecycle.py).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack, suppress
from functools import partial

from rlhpc.base.patience import patiently_here
from rlhpc.config.tables_services import runs_programs
from rlhpc.environments.dialogue import answered
from rlhpc.protocol.contracts import ServerChannel
from rlhpc.protocol.errors import ChannelFull, PeerUnreachable, RoleFailed
from rlhpc.protocol.messages import (
    CONTROL,
    REWARDS,
    Heartbeat,
    RewardReply,
    RewardRequest,
    StillWaiting,
    TurnReply,
    TurnRequest,
)
from rlhpc.rewards.code_place import check_sandbox
from rlhpc.rewards.environments import judged_tasks
from rlhpc.rewards.pool import RewardPool, open_pool
from rlhpc.roles.lifecycle import (
    ControllerSession,
    RoleContext,
    beat,
    heed_controller,
    hello,
    run_loop,
    serve_controllers,
    stop_event,
    unless_stopped,
)
from rlhpc.transport.open import open_server

LOOK_S = 1.0  # between two checks that requests are judged
STUCK_S = 15.0  # beyond the time limits of the requests being judged
NEWS_S = 2.0  # between two messages to waiting peers; a client's patience is one verdict plus SILENT_S


def run(context: RoleContext) -> None:
    """Serve until asked to stop."""
    run_loop(_serve(context))


async def _serve(context: RoleContext) -> None:
    stop = stop_event()
    config = context.config
    check_sandbox(config.sandbox, is_needed=runs_programs(config))
    layout = context.layout
    pool = open_pool(
        config,
        judged_tasks(config),
        judge_cache=layout.judge_replies,
        rendezvous=layout.rendezvous,
        with_environments=True,
    )
    try:
        starting = asyncio.create_task(pool.start())
        await unless_stopped(stop, starting)
        await serve_controllers(context, stop, partial(_serve_one, pool))
    finally:
        await pool.close()


async def _serve_one(pool: RewardPool, session: ControllerSession) -> None:
    """Serve the generators of one controller.  Each has new keys: the server opens after connecting to it."""
    context = session.context
    control = await unless_stopped(session.stop, asyncio.create_task(session.connect(CONTROL)))
    if control is None:
        return
    async with AsyncExitStack() as stack:
        stack.push_async_callback(control.close)
        opening = patiently_here(lambda: open_server(REWARDS, **context.listener), context.layout.rendezvous)
        server = await unless_stopped(session.stop, asyncio.create_task(opening))
        if server is None:
            return
        stack.push_async_callback(server.close)
        await control.send(hello(context))
        service = RewardService(server, pool)
        interval_s = context.config.transport.heartbeat_s
        await session.until_over(
            service.serve(), beat(control, interval_s, service.heartbeat), heed_controller(control, session)
        )


class RewardService:
    """Replies to each request as soon as it is scored, in any order.

    A peer whose requests wait behind those of others is told so as long as verdicts are being made.
    """

    def __init__(
        self, server: ServerChannel, pool: RewardPool, *, news_s: float = NEWS_S, stuck_s: float = STUCK_S
    ) -> None:
        """news_s: between two messages to waiting peers.  stuck_s: patience beyond the pool's."""
        self._server, self._pool, self._news_s, self._stuck_s = server, pool, news_s, stuck_s
        self._waiting: defaultdict[str, set[int]] = defaultdict(set)  # ids of requests, by peer
        self._num_judged = 0

    async def serve(self) -> None:
        """Receive requests, endlessly.  Raises RoleFailed if requests wait and none is judged for too long."""
        async with asyncio.TaskGroup() as judging:
            judging.create_task(self._tell_who_waits())
            judging.create_task(self._watch_progress())
            while True:
                peer, request = await self._server.receive()
                judging.create_task(self._answer(peer, request))

    def heartbeat(self) -> Heartbeat:
        """Heartbeat with the number of requests that are being scored."""
        num_waiting = sum(map(len, self._waiting.values()))
        return Heartbeat(
            state="running",
            waits_for="" if num_waiting else "completions",
            policy_version=-1,
            metrics={
                "queued": float(num_waiting),
                "judged": float(self._num_judged),
                "restarts": float(self._pool.num_restarts),
                **self._pool.metrics(),
            },
        )

    async def _answer(self, peer: str, request: RewardRequest | TurnRequest) -> None:
        self._waiting[peer].add(request.request_id)
        try:
            reply: RewardReply | TurnReply
            if isinstance(request, TurnRequest):
                reply = await answered(self._pool, request)
            else:
                reply = await self._judged(request)
        finally:
            self._waiting[peer].discard(request.request_id)
        self._num_judged += 1
        try:
            await self._server.send(peer, reply)
        except PeerUnreachable:
            return  # the generator died; its rollout is sampled again by another

    async def _tell_who_waits(self) -> None:
        while True:
            num_judged = self._num_judged
            # Requests that arrive and are answered within one interval get no message.
            known = {peer: ids.copy() for peer, ids in self._waiting.items()}
            await asyncio.sleep(self._news_s)
            if self._num_judged == num_judged:
                continue
            for peer, ids in known.items():
                if waiting := ids & self._waiting[peer]:
                    with suppress(PeerUnreachable, ChannelFull):  # the peer died, or its queue is full
                        await self._server.send(peer, StillWaiting(tuple(sorted(waiting))), timeout_s=0.0)

    async def _watch_progress(self) -> None:
        """Raise RoleFailed if requests wait and none is judged for too long: a restart brings new workers.

        Counts looks instead of seconds, during which this process may have been stopped.
        """
        stuck_s, before = 0.0, (0, 0)
        while True:
            await asyncio.sleep(LOOK_S)
            done, before = before, (self._num_judged, self._pool.num_restarts)
            num_waiting = sum(map(len, self._waiting.values()))
            stuck_s = stuck_s + LOOK_S if num_waiting and done == before else 0.0
            if stuck_s > self._pool.patience_s + self._stuck_s:
                raise RoleFailed(f"{num_waiting} requests wait, and nothing was judged for {stuck_s:g} s")

    async def _judged(self, request: RewardRequest) -> RewardReply:
        judgement = await self._pool.judge(request.task, request.completion, request.reference)
        return RewardReply(
            request.request_id,
            judgement.reward,
            judgement.verdict.value,
            judgement.parts,
            judgement.detail,
            judgement.rewards_at,
            judgement.failure,
        )
