"""Start whole runs as processes and see what becomes of them.

Input: settings.  Output: a run file and `rlhpc run` as a subprocess.  Every process of a run, however deep, carries an
environment variable of its own, by which what is left of it is found and ended, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import psutil

from launch.demo.task import write_dataset
from rlhpc.base.run_directory import RunLayout
from tests.tiny_models import make_tiny_checkpoint

ROOT = Path(__file__).parents[2]
MARKER = "RLHPC_TEST_RUN"
QUIET_INTERPRETER_S = 0.1  # what `slowness` measures, on a quiet machine
QUIET_LIMIT_S = 120.0  # a run that moves nothing for so long will not: no vLLM engine takes longer on a busy machine
CEILING_S = 600.0
GONE_S = 30.0  # after its launcher was killed: a generator gives verdicts that are due five seconds; on a busy machine

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lab:
    """A model, a dataset, and a place for runs."""

    root: Path
    model: Path
    dataset: Path

    def run_file(self, name: str, **sections: Any) -> Path:
        """Write NAME.toml: a small, quick run with these sections laid over it; returns its path."""
        settings = quick_settings(self, name)
        for section, values in sections.items():
            settings[section] = values if isinstance(values, list) else {**settings.get(section, {}), **values}
        path = self.root / f"{name}.toml"
        path.write_text(to_toml(settings), encoding="utf-8")
        return path

    def script_engine(self, **script: object) -> None:
        """Give the model's config.json other settings of the scripted engine (tests/engines/scripted_engine.py)."""
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"scripted_engine": script}))

    def layout(self, name: str) -> RunLayout:
        """Where the run of that name lives."""
        return RunLayout(self.root / "runs" / name)


def make_lab(root: Path, family: str = "qwen2") -> Lab:
    """Make a tiny checkpoint and 500 additions."""
    model = make_tiny_checkpoint(root / "model", family)
    write_dataset(root / "train.jsonl", 500, seed=0)
    return Lab(root, model, root / "train.jsonl")


def quick_settings(lab: Lab, name: str) -> dict[str, Any]:
    """Six steps of 4 × 4 rollouts of at most 24 tokens from the scripted engine."""
    return {
        "run": {"name": name, "directory": str(lab.root / "runs" / name), "num_steps": 6, "seed": 1},
        "model": {"path": str(lab.model), "dtype": "float32"},
        "data": {"path": str(lab.dataset), "task": "tests.ring.ring_rewards:parity"},
        "generation": {
            "engine": "scripted",
            "max_prompt_tokens": 12,
            "max_completion_tokens": 24,
            "max_num_seqs": 16,
            "kv_cache_bytes": 64 << 20,
        },
        "admission": {"groups_per_step": 4, "group_size": 4, "max_staleness": 1},
        "trainer": {"backend": "reference", "token_budget": 256, "learning_rate": 1e-4, "device": "cpu"},
        "weights": {"timeout_s": 20.0},
        "checkpoint": {"every_steps": 4},
        "buffer": {"segment_groups": 8},
    }


def to_toml(settings: Settings) -> str:
    """Spell two levels of settings as TOML, whose scalars are JSON's; a section may be a list of tables."""
    lines = []
    for section, values in settings.items():
        for table in values if isinstance(values, list) else (values,):
            lines.append(f"[[{section}]]" if isinstance(values, list) else f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


class Run:
    """One `rlhpc run`.  Use as a context manager: leaving it kills whatever is left."""

    def __init__(
        self, run_file: Path, directory: RunLayout, *words: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`words` are options and overrides of the command line; environment: on top of this process's."""
        self.layout = directory
        self._mark = uuid.uuid4().hex
        self.output_path = run_file.with_name(f"{run_file.stem}-{self._mark[:8]}.out")
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launch.cli", "run", str(run_file), *words],
                cwd=run_file.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=command_environment() | {MARKER: self._mark} | dict(environment),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """What the command has printed."""
        return self.output_path.read_text(encoding="utf-8")

    def finish(self, timeout_s: float = CEILING_S) -> int:
        """Wait for the command to end; returns its exit status.  Fails with what the roles said if it does not."""
        wait_while_it_moves(lambda: self.process.poll() is not None, self._trace, "the end", self.story, timeout_s)
        return self.process.wait()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send the launcher a signal, as Ctrl-C does."""
        self.process.send_signal(number)

    def status(self) -> dict[str, Any]:
        """status.json, {} while there is none."""
        try:
            document: dict[str, Any] = json.loads(self.layout.status.read_bytes())
        except FileNotFoundError:
            return {}
        return document

    def wait_until(self, is_so: Callable[[dict[str, Any]], bool], timeout_s: float = CEILING_S) -> dict[str, Any]:
        """Wait until the status is so and return it.  Fails when the run ends before."""
        found: dict[str, Any] = {}

        def is_there() -> bool:
            nonlocal found
            found = self.status()
            if found and is_so(found):
                return True
            assert self.process.poll() is None, f"the run has ended\n{self.story()}"
            return False

        wait_while_it_moves(is_there, self._trace, "the status", self.story, timeout_s)
        return found

    def wait_for_step(self, step: int) -> dict[str, Any]:
        """Wait until so many steps are done; returns the status."""
        return self.wait_until(lambda status: status["step"] >= step)

    def wait_for_file(self, path: Path) -> None:
        """Wait until there is such a file."""
        wait_while_it_moves(path.exists, self._trace, str(path), self.story)

    def survivors(self) -> list[psutil.Process]:
        """Every process that this command has started and that lives, itself included."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def role(self, role: str, replica: int = 0) -> psutil.Process:
        """The process of a role, not the task that holds it.  It has to live."""
        found = next((process for process in self.survivors() if _is_role(process, role, replica)), None)
        assert found is not None, f"no {role}-{replica} lives\n{self.story()}"
        return found

    def kill_roles(self, *roles: str) -> None:
        """All found before the first is killed: its death may end the others, too."""
        found = [self.role(role) for role in roles]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def assert_nothing_is_left(self, within_s: float = 2.0) -> None:
        """The command has ended; so has everything that it started, on a quiet machine within that time."""
        began = time.monotonic()
        while left := self.survivors():
            took_s = time.monotonic() - began
            if took_s >= within_s and took_s >= within_s * slowness():
                assert not self.survivors(), [process.cmdline() for process in left]
            time.sleep(0.05)

    def story(self) -> str:
        """What was said, and the last lines of every log: for the message of a failed test."""
        logs = sorted(self.layout.logs.rglob("*.log"))
        tails = [f"--- {log.parent.name}/{log.name}\n{_tail(log)}" for log in logs]
        return "\n".join([self.output, *tails])

    def _trace(self) -> tuple[object, ...]:
        return trace_of(self.layout, self.status(), self.output_path)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(MARKER) == self._mark)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            return False


def _is_role(process: psutil.Process, role: str, replica: int) -> bool:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return bool(words[3:5] == ["rlhpc.roles", role] and words[words.index("--replica") + 1] == str(replica))


def run_to_the_end(lab: Lab, name: str, *words: str, **sections: Mapping[str, Any]) -> RunLayout:
    """Do a run that should succeed and leave nothing behind; returns where it is."""
    with Run(lab.run_file(name, **sections), lab.layout(name), *words) as run:
        status = run.finish()
        assert status == 0, run.story()
        run.assert_nothing_is_left()
    return lab.layout(name)


def rlhpc(*words: str, timeout_s: float = CEILING_S) -> subprocess.CompletedProcess[str]:
    """Do another command in a process of its own."""
    command = [sys.executable, "-m", "launch.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=command_environment())


def command_environment() -> dict[str, str]:
    """This process's environment, in which tests.ring.ring_rewards can be imported."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def summary_of(layout: RunLayout) -> dict[str, Any]:
    """summary.json."""
    document: dict[str, Any] = json.loads(layout.summary.read_bytes())
    return document


def last_scalar(layout: RunLayout, name: str) -> float:
    """The last value that TensorBoard has."""
    return scalars(layout, name)[-1]


def scalars(layout: RunLayout, name: str) -> list[float]:
    """All values that TensorBoard has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second to import

    accumulator = EventAccumulator(str(layout.tensorboard))
    accumulator.Reload()
    return [float(event.value) for event in accumulator.Scalars(name)]


@contextlib.contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """Fail when the block takes longer than it may on a quiet machine; on a busy one everything takes longer."""
    before, began = slowness(), time.monotonic()
    yield
    took_s = time.monotonic() - began
    if took_s > limit_s:
        allowed_s = limit_s * max(before, slowness())
        assert took_s <= allowed_s, f"{what} took {took_s:.1f} s; allowed: {allowed_s:.1f} s"


def slowness() -> float:
    """How much longer this machine takes for everything just now than a quiet one of two cores; 1 to 10."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", "import json, subprocess, asyncio"], check=True)
    return min(10.0, max(1.0, (time.monotonic() - began) / QUIET_INTERPRETER_S))


def wait_while_it_moves(
    is_so: Callable[[], object],
    trace: Callable[[], object],
    what: str,
    story: Callable[[], str],
    timeout_s: float = CEILING_S,
) -> None:
    """Wait until it is so; in vain once nothing that `trace` sees has changed for QUIET_LIMIT_S, or after timeout_s."""
    began = moved_at = looked_at = time.monotonic()
    seen = trace()
    while not is_so():
        now = time.monotonic()
        if now - looked_at > 1.0:
            before, seen, looked_at = seen, trace(), now
            moved_at = now if seen != before else moved_at
        assert now - moved_at < QUIET_LIMIT_S, f"nothing moves: {what}\n{story()}"
        assert now - began < timeout_s, f"not in {timeout_s:g} s: {what}\n{story()}"
        time.sleep(0.05)


def trace_of(layout: RunLayout, status: Mapping[str, Any], *files: Path) -> tuple[object, ...]:
    """Whatever moves while something still happens in a run: its step, who is there, what is logged."""
    roles = [(role["name"], role.get("state")) for role in status.get("roles", [])]
    sizes = sum(path.stat().st_size for path in [*layout.root.glob("logs/**/*.log"), *files])
    return status.get("step"), status.get("attempt"), status.get("phase"), roles, sizes


def _tail(log: Path, num_lines: int = 25) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
