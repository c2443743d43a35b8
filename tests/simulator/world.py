"""One run: a controller with everything that it needs, faults that a schedule brings, and what must hold.

Input: a seed and a list of faults.  Output: Outcome: whether every invariant held to its end, and a trace.
The controller is the product's (roles/controller/), with its ledger, buffer, journal, checkpoints and channels; what
begins an attempt are the launcher's functions.  Whatever else is in here a supervisor does: starting again what died.
TensorBoard alone is left out: nothing is decided by it, and it starts threads.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import deque
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from launch.run_directory.prepare import num_attempts
from launch.verify.audit import audit_run
from launch.verify.evidence import Depth
from rlhpc.base import patience
from rlhpc.base.patience import LONGEST_PAUSE_S
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash, write_resolved
from rlhpc.protocol.errors import ChannelTimeout, CheckpointError, JournalError, OwnershipLost, RoleFailed, SegmentError
from rlhpc.protocol.messages import BATCHES, CONTROL, LEASES
from rlhpc.protocol.types import PackedBatch, Prompt, ScoredRollout
from rlhpc.roles.controller import batch_maker
from rlhpc.roles.controller.controller import assemble
from rlhpc.roles.lifecycle import RoleContext, StopRequest, first_leaf
from tests.engines.scripted_engine import Script
from tests.simulator.disk import SimulatedDisk
from tests.simulator.faults import CONTROLLER, GENERATORS, TRAINER, Fault
from tests.simulator.generators import SimulatedGenerator
from tests.simulator.havoc import bring
from tests.simulator.invariants import Invariants, Known, Violation, check_step, check_totals, made
from tests.simulator.loop import Process, SimulatedLoop, start
from tests.simulator.network import SimulatedClient, SimulatedServer
from tests.simulator.seclusion import in_silence
from tests.simulator.settings import EOS, VOCABULARY, begin, settings_of
from tests.simulator.trainer import Broadcasts, ScriptedTrainer, Weights

FAULTS_OF_THE_WORLD = (RoleFailed, ChannelTimeout, CheckpointError, JournalError, SegmentError)  # end an attempt
LIMIT_S = 3000.0  # virtual, of a run; faults begin in the first minute
NUM_LAST_EVENTS = 40


@dataclass(frozen=True)
class Outcome:
    """How a run went."""

    seed: int
    faults: tuple[Fault, ...]
    problem: str  # "": none
    trace: tuple[str, ...]
    num_events: int
    num_attempts: int
    seconds: float  # virtual
    cpu_s: float = field(default=0.0, compare=False)

    def story(self) -> str:
        """For people: what was done, and the last that was heard."""
        return "\n".join(
            [f"seed {self.seed}: {self.problem or 'no violation'}", *(f"  {fault}" for fault in self.faults), "  …"]
            + [f"  {line}" for line in self.trace[-NUM_LAST_EVENTS:]]
        )


class World:
    """Everything in one simulated run."""

    def __init__(self, seed: int, faults: Sequence[Fault], root: Path) -> None:
        self.seed, self.faults = seed, tuple(faults)
        self.rng = random.Random(f"{seed} world")
        self.loop = SimulatedLoop(str(seed))
        self.began_s = self.loop.time()
        self.layout, self.config = RunLayout(root), settings_of(seed, root)
        self.hash = config_hash(self.config)
        self.disk = SimulatedDisk(root, self.loop.time)
        self.trace: deque[tuple[float, tuple[object, ...]]] = deque()
        self.broadcasts = Broadcasts(self.rng)
        self.known = Known()
        self.processes: dict[str, Process] = {}
        self.generators: dict[str, SimulatedGenerator] = {}
        self.servers: dict[str, SimulatedServer] = {}
        self.controller_incarnation = ""
        self.invariants: Invariants | None = None
        self.violation: BaseException | None = None
        self.is_power_cut = self._is_usurped = False
        self._ended = asyncio.Event()  # of the present attempt
        self._latency_s = self.rng.choice((0.01, 0.1, 1.0))
        self._step_s = self.rng.choice((0.1, 1.0, 3.0))
        self._token_s = self.rng.choice((0.02, 0.1, 0.4))
        self._num_starts = dict.fromkeys(GENERATORS, 0)
        self.loop.after_event = self._after_event

    # ---------------------------------------------------------------------------------------------------------- running

    def run(self) -> Outcome:
        """Let it happen."""
        problem = ""
        in_a_thread = patch.object(batch_maker, "SMALL_BATCH_TOKENS", 0 if self.seed % 2 else 1 << 14)
        clock = SimpleNamespace(sleep=self.loop.block, monotonic=self.loop.time)
        of_calls_that_block = patch.object(patience, "time", clock)
        with self.disk.installed(), in_silence(), in_a_thread, of_calls_that_block:
            try:
                self._found()
                self.loop.run(self._live(), LIMIT_S)
            except* Violation as group:
                problem = str(first_leaf(group))
            except* TimeoutError:
                problem = f"liveness: no end within {LIMIT_S:g} s"
            self.disk.close()
            self.loop.close()
        lines = tuple(f"{at_s - self.began_s:8.3f} {' '.join(map(str, words))}" for at_s, words in self.trace)
        attempts = num_attempts(self.layout)
        seconds = self.loop.time() - self.began_s
        return Outcome(self.seed, self.faults, problem, lines, self.loop.num_events, attempts, seconds)

    def _found(self) -> None:
        for directory in (self.layout.root, self.layout.rollouts, self.layout.checkpoints):
            directory.mkdir(exist_ok=True)
        write_resolved(self.config, self.layout, "")

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            around = [group.create_task(bring(self, fault)) for fault in self.faults]
            around += [group.create_task(self._keep_alive(name)) for name in GENERATORS]
            await self._supervise()
            for task in around:
                task.cancel()

    def _after_event(self, process: Process) -> None:
        if self.violation is not None:
            raise self.violation
        if process is self.processes.get(CONTROLLER) and self.invariants is not None and not process.is_dead:
            self.invariants.check()

    def tell(self, *words: object) -> None:
        """A line of the trace."""
        self.trace.append((self.loop.time(), words))

    def _violated(self, text: str) -> None:
        """Where an exception would be caught by somebody else."""
        self.violation = self.violation or Violation(text)

    # ------------------------------------------------------------------------------------------------ the supervisor's

    async def _supervise(self) -> None:
        """Attempt after attempt, until the run is complete."""
        while True:
            if self.layout.summary.exists():  # perhaps by a controller that was taken for dead
                self._audit()
                return
            self._ended = await self._attempt()
            await self._ended.wait()
            await asyncio.sleep(self.rng.random() * 2)
            for name in (CONTROLLER, TRAINER):
                if not self._is_usurped:
                    self.processes[name].kill()
            self._is_usurped = False
            self.controller_incarnation, self.invariants = "", None
            await asyncio.sleep(self.rng.random() * 3)

    async def _attempt(self) -> asyncio.Event:
        """Begin one, as the launcher does; returns what is set when controller or trainer is gone."""
        context = begin(self.layout, self.config)
        self.tell("attempt", context.attempt, "from", context.resume_step)
        ended = asyncio.Event()
        controller = self.processes[CONTROLLER] = Process(CONTROLLER)
        trainer = self.processes[TRAINER] = Process(TRAINER)
        for process in (controller, trainer):
            process.on_death = partial(self._died, process, ended)
        for spec in (CONTROL, LEASES, BATCHES):
            self.servers[spec.name] = SimulatedServer(spec, self.rng, controller, self._latency_s)
            self.servers[spec.name].on_send = partial(self._said, controller)
            self.servers[spec.name].on_receive = partial(self._heard, controller)
        self.controller_incarnation = context.incarnation
        self._watch(start(self.loop, controller, self._control(context)), controller)
        script = ScriptedTrainer(
            self, replace(context, role=TRAINER, incarnation=f"0.{context.attempt}.0-t"), self._step_s
        )
        self._watch(start(self.loop, trainer, script.run()), trainer)
        return ended

    def _watch(self, task: asyncio.Task[Any], process: Process) -> None:
        """A process ends with its main task."""

        def look(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not process.is_dead:
                first = first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
                is_old = self.processes[process.name] is not process or self._is_usurped
                self.tell(process.name, "ends:", type(first).__name__, str(first).replace(str(self.layout.root), "…"))
                if isinstance(first, Violation):
                    self.violation = self.violation or first
                elif not isinstance(first, FAULTS_OF_THE_WORLD) and not (is_old and isinstance(first, OwnershipLost)):
                    self._violated(f"{process.name} ends with {type(first).__name__}: {first}")
            process.kill()

        task.add_done_callback(look)

    def _died(self, process: Process, ended: asyncio.Event) -> None:
        is_present = self.processes[process.name] is process
        self.tell(process.name, "is gone" if is_present else "of an earlier attempt is gone")
        if process.name == CONTROLLER:
            try:
                self.disk.crash(process, self.rng, is_power_cut=self.is_power_cut and is_present)
            except OSError as error:  # of ours: within a call of the product it would be taken for the disk's
                self.violation = self.violation or error
            if is_present:
                self.is_power_cut, self.invariants = False, None
        if is_present:
            self._close_connections(process.name)
        self.loop.call_soon(ended.set, context=Context())

    def usurp(self, seconds: float) -> None:
        """Another attempt begins though controller and trainer are alive: nobody can hear them for a while.

        When they wake they find out within a second, as rlhpc/base/ownership.py has it.
        """
        processes = [self.processes[name] for name in (CONTROLLER, TRAINER)]
        for process in processes:
            process.stands_still_until = self.loop.time() + seconds
            self.loop.call_later(seconds + self.rng.random(), process.kill, context=Context())
        self._is_usurped, self.invariants = True, None
        self._ended.set()

    def _close_connections(self, name: str) -> None:
        """Its kernel tells the peer."""
        for server in self.servers.values():
            client = server.connections.get(name)
            if client is not None and client.process.is_dead:
                self.loop.call_later(self.rng.random(), setattr, client, "is_gone", True, context=Context())

    async def _control(self, context: RoleContext) -> None:
        """As roles/controller/controller.py."""
        stop = StopRequest()
        controller = assemble(context, *(self.servers[spec.name] for spec in (CONTROL, LEASES, BATCHES)))
        self.invariants = Invariants(controller, self.known, self.loop.time, self._is_hindered)
        self._check_totals = partial(check_totals, controller, self.layout.rollouts)  # of the one that ends the run
        await controller.run_and_close(stop)

    async def _keep_alive(self, name: str) -> None:
        """Start a generator again and again."""
        while True:
            number = self._num_starts[name]
            self._num_starts[name] += 1
            context = RoleContext(
                role="generator", replica=int(name[-1]), num_ranks=1, attempt=0, resume_step=None,
                incarnation=f"0.0.{number}-g", layout=self.layout, config=self.config, config_hash=self.hash,
            )  # fmt: skip
            script = Script(
                seed=self.seed,
                vocab_size=VOCABULARY,
                stop_token_id=EOS,
                stop_probability=0.3,
                token_s=self._token_s,
                max_num_seqs=3,
            )
            ended = asyncio.Event()
            process = self.processes[name] = Process(name)
            process.on_death = partial(self._died, process, ended)
            generator = self.generators[name] = SimulatedGenerator(self, context, script)
            self._watch(start(self.loop, process, generator.run()), process)
            await ended.wait()
            await asyncio.sleep(0.5 + self.rng.random() * 4)

    def _audit(self) -> None:
        audit = audit_run(self.layout, Depth(is_quick=self.seed % 8 != 0), _unheard)
        if not audit.is_clean or audit.num_steps != self.config.run.num_steps:
            offences = [f"{check.name}: {offence}" for check in audit.checks for offence in check.offences]
            raise Violation(f"audit, {audit.num_steps} steps: {'; '.join(offences)[:600]}")
        self._check_totals()

    # -------------------------------------------------------------------------------------------------- what roles tell

    def connect(self, channel: str, context: RoleContext) -> SimulatedClient | None:
        server = self.servers.get(channel)
        if server is None or not self.controller_incarnation:
            return None
        return server.attach(
            context.name, context.incarnation, self.processes[TRAINER if context.role == TRAINER else context.name]
        )

    def delivered(self, prompt: Prompt, scored: ScoredRollout) -> None:
        made(self.known, prompt, scored)

    def trained(self, batch: PackedBatch, weights: Weights) -> None:
        self.tell("step", batch.step, "of version", batch.policy_version)
        try:
            check_step(batch, weights, self.config)
        except Violation as violation:
            self.violation = self.violation or violation

    def _is_hindered(self, peer: str, outbox: str) -> bool:
        now_s, client = self.loop.time(), self.servers[LEASES.name].connections[peer]
        is_awake = self.processes[CONTROLLER].stands_still_until < now_s - 1
        has_written = self.disk.refuses_until < now_s - LONGEST_PAUSE_S - 1
        is_there = self.generators[peer].outbox._name == outbox and not (client.is_closed or client.process.is_dead)
        return not (is_there and is_awake and has_written)

    def _heard(self, controller: Process, peer: str, message: object) -> None:
        if self.invariants is not None and self.processes[CONTROLLER] is controller:
            self.invariants.heard(peer, message)

    def _said(self, controller: Process, peer: str, message: object) -> None:
        if self.invariants is not None and self.processes[CONTROLLER] is controller:
            try:
                self.invariants.said(peer, message)
            except Violation as violation:
                self.violation = self.violation or violation


def _unheard(_: str) -> None:
    """Takes lines."""


def simulate(seed: int, faults: Sequence[Fault], directory: Path) -> Outcome:
    """Run a seed in a directory below this one, which is deleted afterwards."""
    root, began_s = directory / f"seed_{seed}", time.process_time()
    shutil.rmtree(root, ignore_errors=True)
    try:
        return replace(World(seed, faults, root).run(), cpu_s=time.process_time() - began_s)
    finally:
        shutil.rmtree(root, ignore_errors=True)
