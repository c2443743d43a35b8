"""The simulator's roles around a controller in real time: its own threads, real files, and stops at any instant.

Input: a directory, a seed, what is to happen during an attempt.  Output: the exit status of the controller.
Generators and trainer are those of the simulator, over channels in memory; attempts begin as the launcher begins them.
The simulator does the work of threads at once: only here can a write outlive the task that waited for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.verify.audit import audit_run
from launch.verify.evidence import Depth
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.messages import BATCHES, CONTROL, LEASES
from rlhpc.protocol.types import PackedBatch, Prompt, ScoredRollout
from rlhpc.roles.controller.controller import Controller, assemble
from rlhpc.roles.lifecycle import RoleContext, StopRequest, exit_status_of
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script
from tests.simulator.generators import SimulatedGenerator
from tests.simulator.settings import EOS, VOCABULARY, begin, settings_of
from tests.simulator.trainer import Broadcasts, ScriptedTrainer, Weights

STEP_S = 0.05  # the longest
NUM_GENERATORS = 2
LONGEST_HOLD_S = 30.0
CALLS = ("pwritev", "ftruncate", "fsync", "fdatasync", "replace", "close")
log = logging.getLogger("tests.real_time")


@dataclass
class Attempted:
    """An attempt that is under way."""

    controller: ClosingController
    stop: StopRequest

    @property
    def is_closing(self) -> bool:
        """All that is left is to write what is in memory."""
        return self.controller.is_closing


class ClosingController(Controller):
    """The product's, which tells that it closes."""

    is_closing = False

    async def close(self) -> None:
        self.is_closing = True
        await super().close()


class RealTime:
    """One run, attempt after attempt."""

    def __init__(self, root: Path, seed: int, **sections: dict[str, Any]) -> None:
        """sections: keys of the run file that differ from the seed's."""
        self.rng = random.Random(f"{seed} real time")
        self.layout, config = RunLayout(root), settings_of(seed, root)
        changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
        self.config = config.model_copy(update=changed)
        for directory in (self.layout.root, self.layout.rollouts, self.layout.checkpoints):
            directory.mkdir()
        write_resolved(self.config, self.layout, "")
        self.controller_incarnation = ""

    def attempt(self, disturb: Callable[[Attempted], Coroutine[Any, Any, None]]) -> int:
        """Run one to its end; return the exit status of its controller.  disturb: what happens meanwhile."""
        return exit_status_of(lambda: asyncio.run(self._attempt(disturb)), log)

    def problem(self) -> str:
        """What the audit objects to; "": nothing."""
        audit = audit_run(self.layout, Depth(is_quick=False), lambda _: None)
        return "; ".join(f"{check.name}: {offence}" for check in audit.checks for offence in check.offences)

    async def _attempt(self, disturb: Callable[[Attempted], Coroutine[Any, Any, None]]) -> None:
        """As roles/controller/controller.py."""
        context, stop = begin(self.layout, self.config), StopRequest()
        self.broadcasts = Broadcasts(self.rng)
        self._servers = {spec.name: MemoryServer(spec) for spec in (CONTROL, LEASES, BATCHES)}
        controller = ClosingController(**vars(assemble(context, *self._servers.values())))
        self.controller_incarnation = context.incarnation
        attempted = Attempted(controller, stop)
        around = [asyncio.ensure_future(each) for each in (disturb(attempted), *self._others(context))]
        try:
            await controller.run_and_close(stop)
        finally:
            for task in around:
                task.cancel()
            disturbed, *_ = await asyncio.gather(*around, return_exceptions=True)
        if isinstance(disturbed, Exception):
            raise disturbed

    def _others(self, context: RoleContext) -> Iterator[Coroutine[Any, Any, None]]:
        incarnation = context.incarnation.removesuffix("c")
        yield ScriptedTrainer(self, replace(context, role="trainer", incarnation=f"{incarnation}t"), STEP_S).run()
        for replica in range(NUM_GENERATORS):
            own = replace(context, role="generator", replica=replica, incarnation=f"{incarnation}g", resume_step=None)
            script = Script(
                seed=self.config.run.seed, vocab_size=VOCABULARY, stop_token_id=EOS, stop_probability=0.3,
                token_s=STEP_S / 5, max_num_seqs=3,
            )  # fmt: skip
            yield SimulatedGenerator(self, own, script).run()

    # -------------------------------------------------------------------------------------- what the roles see of this

    def connect(self, channel: str, context: RoleContext) -> Any:
        return self._servers[channel].connect(context.name, context.incarnation)

    def tell(self, *words: object) -> None:
        pass

    def delivered(self, prompt: Prompt, scored: ScoredRollout) -> None:
        pass

    def trained(self, batch: PackedBatch, weights: Weights) -> None:
        pass


class WatchedDisk:
    """The system calls by which files change: slow, or held at one file; notes two threads at one file at once."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0, held: str = "") -> None:
        """delay: seconds before each call.  held: a part of the path; the first call for it waits for `release`."""
        self._delay, self._held = delay, held
        self._real = {name: getattr(os, name) for name in CALLS}
        self._busy: dict[str, int] = {}  # path → the thread that is at it
        self._is_free = threading.Event()
        self.is_holding = threading.Event()
        self.overlaps: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """os as the product sees it."""
        for name in CALLS:
            setattr(os, name, self._watched(name))
        try:
            yield
        finally:
            self.release()
            for name, call in self._real.items():
                setattr(os, name, call)

    def release(self) -> None:
        """Let the call go on."""
        self._is_free.set()

    def _watched(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            path = str(args[1]) if name == "replace" else self._path_of(args[0])
            if not path:
                return real(*args, **kwargs)
            with self._at(path, name):
                return real(*args, **kwargs)

        return call

    @contextmanager
    def _at(self, path: str, name: str) -> Iterator[None]:
        thread = threading.get_ident()
        if self._busy.setdefault(path, thread) != thread:
            self.overlaps.append(f"{name} of {Path(path).name} beside another thread's call")
        try:
            is_first = self._held and self._held in path and not self.is_holding.is_set()
            if is_first and threading.current_thread() is not threading.main_thread():
                self.is_holding.set()
                self._is_free.wait(LONGEST_HOLD_S)
            time.sleep(self._delay())
            yield
        finally:
            if self._busy.get(path) == thread:
                del self._busy[path]

    @staticmethod
    def _path_of(descriptor: int) -> str:
        """Of a regular file that is open for writing; "": it is none."""
        with suppress(OSError):
            is_read_only = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and not is_read_only:
                return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115  it need not exist
        return ""
