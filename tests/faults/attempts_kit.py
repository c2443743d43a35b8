"""Start the processes of a run one by one, as a supervisor does, and begin attempt after attempt in its directory.

Input: a run file.  Output: processes that are known by name.  Which of them outlast an attempt is the test's to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from launch.plan.processes import NO_GPU, ROLE_ENVIRONMENT, process_names
from launch.run_directory.prepare import AttemptStart, mint_keys, prepare_run_dir
from rlhpc.config.file import load_config
from tests.ring.run_kit import Lab, command_environment, trace_of, wait_while_it_moves

JOB = 4711  # as if Slurm had given it


class Attempts:
    """One run directory and the processes that live in it.  Use as a context manager: leaving it kills what is left."""

    def __init__(self, lab: Lab, name: str, **sections: Any) -> None:
        self.layout = lab.layout(name)
        self._config = load_config(lab.run_file(name, **sections))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._attempt: AttemptStart | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill(*self._processes)

    def begin(self) -> AttemptStart:
        """Prepare the directory for the next attempt and mint its keys; start nothing."""
        return self._claim(resume=self._attempt is not None)

    def resume(self) -> AttemptStart:
        """The same for a directory in which others began."""
        return self._claim(resume=True)

    def _claim(self, *, resume: bool) -> AttemptStart:
        self._attempt = prepare_run_dir(self._config, self.layout, resume=resume, fresh=False)
        mint_keys(self._config, self.layout)
        return self._attempt

    def start(self, *names: str, meet_timeout_s: float = 60.0, start: int = 0) -> None:
        """Start processes of the present attempt; `start` counts starts within it."""
        assert self._attempt is not None
        for name in process_names(self._config):
            if name in names:
                words = ["--meet-timeout-s", str(meet_timeout_s)]
                words += ["--incarnation", f"{JOB}.{self._attempt.index}.{start}"]
                self._processes[name] = self._spawn(name, self._attempt, words)

    def pid(self, name: str) -> int:
        """Process id of the last start under this name."""
        return self._processes[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send one process a signal."""
        self._processes[name].send_signal(number)

    def kill(self, *names: str) -> None:
        """SIGKILL, and what they have started with them."""
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[name].pid, signal.SIGKILL)
            self._processes[name].wait()

    def status_of(self, name: str) -> int:
        """Wait until it ends; returns its exit status."""
        self.wait_until(lambda: not self.is_alive(name), f"the end of {name}")
        return self._processes[name].wait()

    def is_alive(self, name: str) -> bool:
        """Whether it runs."""
        return self._processes[name].poll() is None

    def are_alive(self, *names: str) -> bool:
        """Whether all of them run."""
        return all(map(self.is_alive, names))

    def log(self, name: str) -> str:
        """All that was said under this name."""
        logs = sorted((self.layout.logs / name).glob("*.log"))
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds."""
        wait_while_it_moves(is_so, self._trace, what, self.story)

    def _trace(self) -> tuple[object, ...]:
        with contextlib.suppress(FileNotFoundError):
            return trace_of(self.layout, json.loads(self.layout.status.read_bytes()))
        return trace_of(self.layout, {})

    def story(self) -> str:
        """The last lines of every log: for the message of a failed test."""
        return "\n".join(f"--- {name}\n" + "\n".join(self.log(name).splitlines()[-25:]) for name in self._processes)

    def abandon(self, *names: str) -> dict[str, subprocess.Popen[bytes]]:
        """Forget processes, which others of their names may follow; they are the caller's now."""
        return {name: self._processes.pop(name) for name in names}

    def _spawn(self, name: str, attempt: AttemptStart, words: list[str]) -> subprocess.Popen[bytes]:
        role, _, replica = name.rpartition("-")
        path = self.layout.log(role, int(replica), attempt.index)
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = NO_GPU if role == "trainer" and self._config.trainer.device == "cpu" else {}
        with path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "rlhpc.roles", *self._arguments(role, replica, attempt), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=command_environment() | ROLE_ENVIRONMENT | hidden,
                start_new_session=True,
            )

    def _arguments(self, role: str, replica: str, attempt: AttemptStart) -> list[str]:
        arguments = [role, "--run-dir", str(self.layout.root), "--replica", replica, "--attempt", str(attempt.index)]
        if role == "trainer":
            arguments += ["--num-ranks", str(self._config.trainer.num_ranks)]
        if role in ("controller", "trainer"):  # the others outlast attempts, and belong to none
            arguments += ["--owner", attempt.owner]
        return arguments if attempt.resume_step is None else [*arguments, "--resume-step", str(attempt.resume_step)]
