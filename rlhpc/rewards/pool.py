"""Score completions in processes that may hang or die without affecting others.

Input: (task, completion, reference).  Output: Judgement.  Each worker has one completion at a time, so that
verifier_error is always assigned to the completion that caused it.  A hung worker is killed, a dead one is replaced;
the others continue.  A verifier's failure is never a reward of zero.

    judge() ── takes an idle worker ── asks ── gives it back
                                                   └ lost: killed, replaced in the background, verdict verifier_error
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec
from msgspec.structs import replace

from rlhpc.base.processes import child_command, child_environment
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.environments import variables_of
from rlhpc.rewards.outcomes import (
    DIED,
    HEADER_BYTES,
    LONG_S,
    OUT_OF_MEMORY,
    PREFIX,
    TIMED_OUT,
    UNSENT,
    WAITING,
    Answered,
    DialogueRequest,
    JudgeRequest,
    Ready,
    Replies,
    Reply,
    TaskCounts,
    Turn,
    body_length,
    encode_frame,
)
from rlhpc.rewards.task_settings import worker_environment

# ---------------------------------------------------------------------------------------------------------------- turns
#
# Assignment of idle workers to waiting completions: tasks in turn, so that none of them blocks the others.
#
# Input: workers that become idle, tasks that wait.  Output: a worker for each.  The task with the fewest workers comes
# first.  A task that has lost a worker (it hung, or killed its process) gets one at a time until it has returned one
# whole: with several workers, other tasks are not affected.

Worker = TypeVar("Worker")


class Turns(Generic[Worker]):
    """Idle workers, and the completions that wait for one.  Belongs to one event loop."""

    def __init__(self) -> None:
        self._idle: deque[Worker] = deque()
        self._waiting: dict[str, deque[asyncio.Future[Worker]]] = {}  # by task; the task served last is last
        self._held: defaultdict[str, int] = defaultdict(int)  # workers by task
        self._suspects: set[str] = set()  # tasks that have lost a worker since they last returned one
        self._end = ""

    async def take(self, task: str) -> Worker:
        """Wait for a worker.  Raises RoleFailed once the pool has ended."""
        if self._end:
            raise RoleFailed(self._end)
        if self._idle and not self._waiting and self._may_take(task):
            self._held[task] += 1
            return self._idle.popleft()
        turn: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task, deque()).append(turn)
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.put_back(task, turn.result())
            raise

    def exchange(self, taken: Worker, wanted: Worker) -> Worker:
        """Exchange the taken worker for the wanted one, if that is idle; return the worker to use."""
        if wanted not in self._idle:
            return taken
        self._idle.remove(wanted)
        self._idle.append(taken)
        return wanted

    def give_back(self, task: str, worker: Worker) -> None:
        """Return a worker that has answered."""
        self._held[task] -= 1
        self._suspects.discard(task)
        self.add(worker)

    def put_back(self, task: str, worker: Worker) -> None:
        """Return a worker that was not asked."""
        self._held[task] -= 1
        self.add(worker)

    def lose(self, task: str) -> None:
        """Record that a task's worker is gone."""
        self._held[task] -= 1
        self._suspects.add(task)
        self._serve()

    def add(self, worker: Worker) -> None:
        """Add an idle worker."""
        self._idle.append(worker)
        self._serve()

    def end(self, why: str) -> None:
        """Fail present and future waits with RoleFailed and this text."""
        self._end = why
        for turns in self._waiting.values():
            for turn in turns:
                if not turn.done():
                    turn.set_exception(RoleFailed(why))
        self._waiting.clear()

    def _serve(self) -> None:
        while self._idle and (task := self._next()) is not None:
            turns = self._waiting[task]
            turn = turns.popleft()
            if not turns:
                del self._waiting[task]
            elif len(self._waiting) > 1:
                self._waiting[task] = self._waiting.pop(task)  # now the last one
            if not turn.done():  # else it was cancelled
                self._held[task] += 1
                turn.set_result(self._idle.popleft())

    def _next(self) -> str | None:
        return min(filter(self._may_take, self._waiting), key=self._held.__getitem__, default=None)

    def _may_take(self, task: str) -> bool:
        return task not in self._suspects or not self._held[task]


# ------------------------------------------------------------------------------------------------------- worker process
#
# One worker process as its pool sees it: started, asked, killed.
#
# Input: JudgeRequest or DialogueRequest.  Output: Replies or Turn.  Every way in which a process can fail to answer
# becomes WorkerLost; after that only kill() may be called.  One request at a time.

_READY = msgspec.msgpack.Decoder(Ready)
_REPLY: msgspec.msgpack.Decoder[Replies | Turn] = msgspec.msgpack.Decoder(Replies | Turn)
_Message = TypeVar("_Message")
_Answer = TypeVar("_Answer", Replies, Turn)
_LAST_MOMENT_S = 10.0  # from the end of a pipe to that of its process, on a busy node


class WorkerLost(Exception):
    """The process died, did not reply in time or sent an invalid reply; never leaves this package."""

    def __init__(self, why: str, failure: str = DIED) -> None:
        """failure: TIMED_OUT or DIED."""
        super().__init__(why)
        self.failure = failure


class WorkerProcess:
    """A process that scores one completion at a time."""

    def __init__(self, process: Process) -> None:
        """Wrap a process that spawn() started."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._requests, self._replies = process, process.stdin, process.stdout

    @classmethod
    async def spawn(cls, tasks: Sequence[str], memory_limit_bytes: int, settings: Mapping[str, str]) -> WorkerProcess:
        """Start the process; it is not ready yet.  Call it in a thread that outlives the workers.

        It leads a process group of its own, so that processes started by a reward function die with it.  It dies with
        the thread that starts it (PR_SET_PDEATHSIG counts threads, not processes).
        Raises OSError if no process can be started.
        """
        process = await asyncio.create_subprocess_exec(
            *child_command("rlhpc.rewards.worker", str(os.getpid()), str(memory_limit_bytes), *tasks),
            stdin=PIPE,
            stdout=PIPE,
            env=child_environment(**settings),
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._process.pid

    async def wait_until_ready(self, timeout_s: float) -> Ready:
        """Wait until it has imported its reward functions and environments.  Raises WorkerLost."""
        ready = await self._receive(_READY, timeout_s)
        if ready.error:
            raise WorkerLost(f"worker cannot start: {ready.error}")
        return ready

    async def ask(self, request_frame: bytes, timeout_s: float) -> Replies | Turn:
        """Send an encoded JudgeRequest or DialogueRequest; return its answer.

        Raises WorkerLost, after `timeout_s` at most, or a moment later if the process has closed its pipe.
        """
        self._requests.write(request_frame)
        return await self._receive(_REPLY, timeout_s)

    async def _receive(self, decoder: msgspec.msgpack.Decoder[_Message], timeout_s: float) -> _Message:
        try:
            async with asyncio.timeout(timeout_s):
                header = await self._replies.readexactly(HEADER_BYTES)
                body = await self._replies.readexactly(body_length(header))
            return decoder.decode(body)
        except TimeoutError:
            raise WorkerLost(f"no answer within {timeout_s:g} s; killed", TIMED_OUT) from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerLost(f"worker died: {await self._how_it_ended()}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise WorkerLost(f"worker sent an invalid reply: {error}") from error

    async def kill(self) -> None:
        """End the process, and its whole group, now; wait until it is gone.  Idempotent."""
        # Its exit leaves its children behind in the group, so the group is signalled even then.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._requests.close()
        await self._process.wait()

    async def _how_it_ended(self) -> str:
        """Describe the end of a process that has closed its pipe, a moment before it ends."""
        try:
            async with asyncio.timeout(_LAST_MOMENT_S):
                status = await self._process.wait()
        except TimeoutError:
            return "closed its pipe"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


# ----------------------------------------------------------------------------------------------------------------- pool

log = logging.getLogger("rlhpc.rewards")

_MAX_FAILED_STARTS = 5  # consecutive; more mean a fault of the node
MOST_HELD = 1 << 16  # dialogues with a known worker
_MOST_LOGGED = 100  # tracebacks
_FIRST_BACKOFF_S = 0.1  # doubled with every failed start


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict and reward of one completion; becomes part of a ScoredRollout, or of an evaluation's sample."""

    reward: float  # 0.0 and meaningless when the verdict is VERIFIER_ERROR
    verdict: Verdict
    parts: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    answer: str = ""
    rewards_at: dict[int, float] = field(default_factory=dict)  # characters of the completion → part of the reward
    failure: str = ""  # of a VERIFIER_ERROR: one of FAILURES


@dataclass(eq=False, slots=True)
class _Asked:
    """A completion to be judged."""

    completion: str
    reference: str
    found: asyncio.Future[Judgement] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RewardPool:
    """A fixed number of worker processes.  Belongs to one event loop and to the thread that runs it.

    Completions for batched functions wait until a worker judges them together.  A batch does not wait to be full: when
    a worker becomes free, it gets all waiting completions, up to batch_size.  If a batch fails, its completions are
    judged again one by one, so that only those that cause the failure are verifier errors.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        *,
        preload_tasks: Sequence[str] = (),
        memory_limit_bytes: int = 0,
        task_timeout_s: Mapping[str, float] | None = None,
        task_memory_bytes: Mapping[str, int] | None = None,
        batch_size: int = 64,
        start_timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet.

        timeout_s: for judging one completion, without the wait for a free worker.
        preload_tasks: reward functions that a worker imports before it takes its first completion.
        memory_limit_bytes: address space of one worker (RLIMIT_AS); 0 for no limit.
        task_timeout_s, task_memory_bytes: other limits, of single tasks.
        batch_size: most completions passed to a batched function; timeout_s applies to all of them together.
        environment: variables of the workers, besides those of this process.
        """
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._preload_tasks = tuple(preload_tasks)
        self._memory_limit_bytes, self._start_timeout_s = memory_limit_bytes, start_timeout_s
        self._task_timeout_s, self._task_memory_bytes = dict(task_timeout_s or {}), dict(task_memory_bytes or {})
        self._environment = dict(environment or {})
        self._workers: set[WorkerProcess] = set()  # that may be alive
        self._turns: Turns[WorkerProcess] = Turns()
        self._holders: dict[str, WorkerProcess] = {}  # by dialogue: the worker that has taken its turns so far
        self._batched: set[str] = set()  # tasks whose function takes many completions at once
        self.tools: dict[str, tuple[str, ...]] = {}  # by environment: names of those that it offers
        self._batch_size = batch_size
        self._waiting: defaultdict[str, deque[_Asked]] = defaultdict(deque)  # for these tasks
        self._num_serving: defaultdict[str, int] = defaultdict(int)  # by task: number of _serving
        self._serving: set[asyncio.Task[None]] = set()
        self.failed_batches: dict[str, str] = {}  # by task: error of the last one
        self._replacements: set[asyncio.Task[None]] = set()
        self._limits: dict[WorkerProcess, float] = {}  # seconds, of workers that are being asked
        self._begun: dict[WorkerProcess, tuple[str, int, float]] = {}  # task, completions and beginning of what they do
        self._end = ""  # why the pool accepts no more work
        self.num_restarts = 0  # workers replaced since the start
        self._logged: set[tuple[str, ...]] = set()  # causes: exception name, and the traceback's lines with places
        self.counts = TaskCounts()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of workers that are alive or starting."""
        return tuple(sorted(worker.pid for worker in self._workers))

    @property
    def patience_s(self) -> float:
        """Seconds within which current work ends: in a verdict, a new worker, or the end of the pool."""
        starting_s = (self._start_timeout_s + 2**_MAX_FAILED_STARTS * _FIRST_BACKOFF_S) * _MAX_FAILED_STARTS
        return max([0.0, *self._limits.values(), starting_s if self._replacements else 0.0])

    def metrics(self) -> dict[str, float]:
        """Return the counts for a heartbeat, and how many completions are with a worker for LONG_S or more."""
        late, waiting = time.monotonic() - LONG_S, Counter[str]()
        for task, number, began in self._begun.values():
            waiting[task] += number if began <= late else 0
        return self.counts.as_metrics() | {f"{PREFIX}{WAITING}:{task}": float(waiting[task]) for task in waiting}

    async def start(self) -> None:
        """Start all workers and wait until they are warm.

        Raises RoleFailed if one does not start (the user's module cannot be imported, for example); none is left.
        """
        starts = (self._add_worker() for _ in range(self._num_workers))
        failures = [end for end in await asyncio.gather(*starts, return_exceptions=True) if end is not None]
        if failures:
            await self.close()
            raise RoleFailed(f"reward pool: {failures[0]}") from failures[0]

    def judges_together(self, task: str) -> bool:
        """Return whether waiting completions are judged in one call; known once the pool has started."""
        return task in self._batched

    async def judge(self, task: str, completion: str, reference: str) -> Judgement:
        """Score one completion.  Pure: may be repeated.

        Returns verdict VERIFIER_ERROR if the function raised, returned no finite number, ran out of time or killed its
        process.  Raises RoleFailed if the pool is closed or can start no more workers.  Cancelling costs a worker,
        except for batched functions, where it does not affect other completions.
        """
        asked = _Asked(completion, reference)
        try:
            self._frame(task, [asked])
        except ValueError as error:  # a lone surrogate, or 64 MiB of text
            self.counts.count(task, 0.0, UNSENT)
            return _failed(f"cannot be sent to a worker: {error}", UNSENT)
        if task not in self._batched:
            return await self._judge_alone(task, asked)
        self._waiting[task].append(asked)
        if self._num_serving[task] < self._num_workers:
            self._num_serving[task] += 1
            serving = asyncio.create_task(self._serve(task))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
        return await asked.found

    def _frame(self, task: str, batch: Sequence[_Asked]) -> bytes:
        completions, references = [each.completion for each in batch], [each.reference for each in batch]
        return encode_frame(JudgeRequest(task, completions, references, self._memory_of(task)))

    async def _serve(self, task: str) -> None:
        """Have completions judged by a batched function, until none waits."""
        waiting, batch = self._waiting[task], list[_Asked]()
        try:
            while waiting:
                worker, batch = await self._turns.take(task), []
                while waiting and len(batch) < self._batch_size:
                    asked = waiting.popleft()
                    if not asked.found.done():  # otherwise the caller was cancelled
                        batch.append(asked)
                if batch:
                    await self._judge_batch(task, worker, batch)
                else:
                    self._turns.put_back(task, worker)
        except RoleFailed as error:
            for asked in (*batch, *waiting):
                if not asked.found.done():
                    asked.found.set_exception(RoleFailed(str(error)))
            waiting.clear()
        finally:
            self._num_serving[task] -= 1

    async def _judge_batch(self, task: str, worker: WorkerProcess, batch: Sequence[_Asked]) -> None:
        found = await self._judge_together(task, worker, batch)
        if found is None:
            found = await asyncio.gather(*(self._judge_alone(task, each) for each in batch))
        for asked, each in zip(batch, found, strict=True):
            if not asked.found.done():
                asked.found.set_result(each)

    async def _judge_alone(self, task: str, asked: _Asked) -> Judgement:
        found = await self._judge_together(task, await self._turns.take(task), [asked])
        assert found is not None
        return found[0]

    async def _judge_together(
        self, task: str, worker: WorkerProcess, batch: Sequence[_Asked]
    ) -> list[Judgement] | None:
        """Have a worker judge, and return it.  None if a batch of several failed; a single one gets its verdict."""
        began = time.monotonic()
        try:
            frame = self._frame(task, batch)
        except ValueError as error:  # too long together: each alone is short enough
            self._turns.put_back(task, worker)
            said = Replies(f"cannot be sent to a worker: {error}", UNSENT)
        else:
            said = await self._ask(Replies, task, worker, frame, self._timeout_of(task), len(batch))
        took_s = time.monotonic() - began
        if not said.error:
            for place, reply in enumerate(said.replies):
                num_forked = 0 if place else said.num_forked
                self.counts.count(task, took_s / len(batch), reply.failure, num_forked, reply.costs)
            return [_judgement(task, reply) for reply in said.replies]
        if len(batch) == 1:
            self.counts.count(task, took_s, said.failure, said.num_forked, said.costs)
            return [_failed(f"{task}: {said.error}", said.failure)]
        self.counts.count_failed_batch(task, took_s)
        self.failed_batches[task] = said.error
        again = "%s failed on a batch of %d completions; judging them again one by one: %s"
        log.warning(again, task, len(batch), said.error)
        return None

    def _memory_of(self, task: str) -> int:
        return self._task_memory_bytes.get(task, self._memory_limit_bytes)

    def _timeout_of(self, task: str) -> float:
        return self._task_timeout_s.get(task, self._timeout_s)

    async def answer(self, dialogue: DialogueRequest) -> Turn:
        """Have an environment take the last turn of a dialogue.  May be repeated; failures and limits as in judge().

        Limits are those of the dialogue's task; turns and failures are counted under the environment's name.  The
        worker that has taken the earlier turns is used if it is idle; another one replays them, and gets extra time.
        """
        name = dialogue.environment
        try:
            frame = encode_frame(replace(dialogue, memory_limit_bytes=self._memory_of(dialogue.task)))
        except ValueError as error:
            self.counts.count(name, 0.0, UNSENT)
            return Turn(f"cannot be sent to a worker: {error}", UNSENT)
        taken = await self._turns.take(name)
        holder = self._holders.pop(dialogue.key, None)
        worker = taken if holder is None else self._turns.exchange(taken, holder)
        timeout_s = self._timeout_of(dialogue.task)
        times = 1 if worker is holder else max(1, len(dialogue.turns))
        began = time.monotonic()
        turn = await self._ask(Turn, name, worker, frame, timeout_s * times)
        self.counts.count(name, time.monotonic() - began, turn.failure, turn.num_forked, turn.costs)
        if turn.error:
            return Turn(f"{name}: {turn.error}", turn.failure)
        if not turn.is_over:
            self._holders[dialogue.key] = worker
            if len(self._holders) > MOST_HELD:
                self._holders.pop(next(iter(self._holders)))
        return turn

    async def _ask(
        self, kind: type[_Answer], name: str, worker: WorkerProcess, frame: bytes, timeout_s: float, number: int = 1
    ) -> _Answer:
        """Ask a worker, and return it; if it is lost the answer says so.  Raises RoleFailed if the pool has ended.

        name: the task or environment that uses the worker.  number: completions that it gets.
        """
        is_whole, began = False, time.monotonic()
        self._limits[worker], self._begun[worker] = timeout_s, (name, number, began)
        try:
            answer = await worker.ask(frame, timeout_s)
            assert isinstance(answer, kind)
            self._log_once(name, answer)
            is_whole = answer.failure != OUT_OF_MEMORY  # it may never free that memory
        except WorkerLost as loss:
            if self._end:
                raise RoleFailed(f"reward pool: {self._end}") from loss
            return kind(str(loss), loss.failure)
        except asyncio.CancelledError:
            self.counts.count(name, time.monotonic() - began)
            raise
        finally:
            del self._limits[worker], self._begun[worker]
            # Also when this call was cancelled: a worker that may still reply to the old request cannot be used.
            if is_whole:
                self._turns.give_back(name, worker)
            else:
                self._turns.lose(name)
                self._replace_in_background(worker)
        if answer.num_forked:
            log.warning("%s left %d processes behind, which were killed", name, answer.num_forked)
        return answer

    def _log_once(self, name: str, reply: Answered) -> None:
        """Log the traceback of an exception of the user's code, the first from each place."""
        cause = name, *(line for line in reply.traceback.splitlines() if line.startswith("  File "))
        if reply.traceback and cause not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(cause)
            log.warning("%s: %s; the first from this place:\n%s", name, reply.error, reply.traceback)

    async def close(self) -> None:
        """Kill every worker and wait until it is gone.  Calls of judge() in progress raise RoleFailed.  Idempotent."""
        self._finish("closed")
        for replacement in self._replacements:
            replacement.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        await asyncio.gather(*(self._discard(worker) for worker in tuple(self._workers)))
        await asyncio.gather(*self._serving)

    async def _add_worker(self) -> None:
        worker = await WorkerProcess.spawn(self._preload_tasks, self._memory_limit_bytes, self._environment)
        self._workers.add(worker)
        try:
            ready = await worker.wait_until_ready(self._start_timeout_s)
        except WorkerLost:
            await self._discard(worker)
            raise
        self._batched.update(ready.batched)
        self.tools.update(ready.tools)
        self._turns.add(worker)

    def _replace_in_background(self, worker: WorkerProcess) -> None:
        if self._end:
            return  # close() kills it
        replacement = asyncio.create_task(self._replace(worker))
        self._replacements.add(replacement)
        replacement.add_done_callback(self._replaced)

    def _replaced(self, replacement: asyncio.Task[None]) -> None:
        self._replacements.discard(replacement)
        if not replacement.cancelled() and (error := replacement.exception()) is not None:
            self._finish(f"a worker could not be replaced: {error!r}")

    async def _replace(self, worker: WorkerProcess) -> None:
        await self._discard(worker)
        self.num_restarts += 1
        why = ""
        for num_failed in range(_MAX_FAILED_STARTS):
            if num_failed > 0:
                await asyncio.sleep(_FIRST_BACKOFF_S * 2 ** (num_failed - 1))
            try:
                await self._add_worker()
            except (WorkerLost, OSError) as failure:
                why = str(failure)
            else:
                return
        self._finish(f"{_MAX_FAILED_STARTS} starts of a worker failed in a row, the last with: {why}")

    async def _discard(self, worker: WorkerProcess) -> None:
        await worker.kill()
        self._workers.discard(worker)

    def _finish(self, why: str) -> None:
        if not self._end:
            self._end = why
            self._turns.end(f"reward pool: {why}")


def _judgement(task: str, reply: Reply) -> Judgement:
    if reply.error:
        return _failed(f"{task}: {reply.error}", reply.failure)
    verdict = Verdict.CORRECT if reply.is_correct else Verdict.WRONG
    return Judgement(reply.reward, verdict, reply.parts, reply.detail, reply.answer, reply.rewards_at)


def _failed(why: str, failure: str) -> Judgement:
    return Judgement(0.0, Verdict.VERIFIER_ERROR, detail=why, failure=failure)


# ------------------------------------------------------------------------------------------------------------ open pool
#
# A reward pool from the run file: for the service, evaluations and `rlhpc reward`.

_START_S, _START_OF_ONE_S = 60.0, 5.0  # the second: of a worker on a core that it shares with others


def open_pool(
    config: Config,
    tasks: Sequence[str],
    num_workers: int = 0,
    *,
    judge_cache: Path | None = None,
    rendezvous: Path | None = None,
    with_environments: bool = False,
) -> RewardPool:
    """A pool from the run file, not started yet; num_workers: 0 for rewards.workers_per_replica.

    judge_cache: directory for replies of a judge; None: no cache.  rendezvous: directory with addresses of the run's
    services; None: there is no run.  with_environments: workers import and open the datasets' environments before they
    are ready.
    """
    rewards = config.rewards
    named = {*tasks, *config.data_tasks}
    limits = {task: config.time_limit_of(task) for task in named if config.services_asked_by(task)}
    workers = worker_environment(config, judge_cache, rendezvous)
    num_workers = num_workers or rewards.workers_per_replica
    return RewardPool(
        num_workers,
        rewards.timeout_s,
        preload_tasks=tasks,
        memory_limit_bytes=rewards.memory_bytes,
        task_timeout_s={**rewards.task_timeout_s, **limits},
        task_memory_bytes=rewards.task_memory_bytes,
        batch_size=rewards.batch_size,
        start_timeout_s=start_timeout_s(num_workers, len(os.sched_getaffinity(0))),
        environment=workers | (variables_of(config) if with_environments else {}),
    )


def start_timeout_s(num_workers: int, num_cores: int) -> float:
    """Time limit for workers that start together and import on the cores that this process may use."""
    return _START_S + _START_OF_ONE_S * num_workers / num_cores
