"""`rlhpc.start`, `run`, `check`, `evaluate`, `compare`, `export`: what commands do on this machine, from Python.

Input: files and words as on the command line.  A run and a check are processes of their own, so that whatever this
interpreter has loaded, threads, an event loop and CUDA included, does not matter; an evaluation is judged here, and its
engines are processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from typing import IO, Any

from launch.commands.evaluate.compare import comparison_of
from launch.commands.evaluate.evaluation import plan_evaluation
from launch.commands.evaluate.processes import caches_on_this_node
from launch.commands.evaluate.request import requests_of
from launch.commands.evaluate.target import find_target, with_settings_of
from launch.common.paths import without_dots
from launch.door.arguments import (
    Overrides,
    Tell,
    command_words,
    import_path,
    in_python,
    refuse_both,
    say_nothing,
    settings_of,
    speaks_python,
    words_of,
)
from launch.door.run import Run
from rlhpc.config import Config
from rlhpc.errors import ConfigError, RlhpcError, RoleFailed
from rlhpc.exit_status import EXIT_CONFIG
from rlhpc.python_child import child_command
from rlhpc.run_layout import RunLayout

_LONGEST_REASON = 50  # lines
_SAYS = "rlhpc: "  # what begins an error, and whatever else interrupts the line of progress


class StartedRun:
    """A run of this machine, in a process of its own that outlives this Python: `rlhpc.start` returns it."""

    def __init__(self, run: Run, command: _Command) -> None:
        """Made by `start`."""
        self.run = run
        """The run; until it has begun, its settings are those that were given, and its phase "new"."""
        self._command, self._is_asked = command, False

    def __repr__(self) -> str:
        return f"StartedRun({self.run!r}{', ended' if self.done() else ''})"

    def done(self) -> bool:
        """Whether it has ended, complete or not."""
        return self._command.done()

    def wait(self) -> Run:
        """Wait for the end; the run, complete or stopped.  An interrupt ends the waiting and not the run.

        Raises ConfigError for settings; RoleFailed: it did not end well; both with the reason that `rlhpc run` prints.
        """
        status = self._command.wait()
        if status not in (0, *(_OF_A_STOP if self._is_asked else ())):
            raise self._command.error(signature(start).parameters)
        return self.run

    def stop(self, *, now: bool = False) -> Run:
        """Finish the step, save, and end it, as `rlhpc stop` does; returns when it has ended.  now: end at once."""
        self._is_asked = True
        self._command.send(signal.SIGINT if now else signal.SIGTERM)
        return self.wait()


# Of a run that a signal has ended before it had begun: its own status, or that of Python while it loads.
_OF_A_STOP = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)


class _Command:
    """`rlhpc NAME …` as a process that Ctrl-C does not reach; a thread tells what it prints, and keeps its errors."""

    def __init__(self, words: Sequence[str], tell: Tell | None) -> None:
        self._name, self._tell = words[0], tell or say_nothing
        self._reason = deque[str](maxlen=_LONGEST_REASON)
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  _read_output closes it
        self._process = subprocess.Popen(
            child_command("launch.cli", *words),
            env=os.environ | {"PYTHONPATH": import_path()},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.printed = list[str]()
        """Lines of its standard output, once it has ended."""
        self._has_ended = threading.Event()  # Python 3.11 takes a thread whose join was interrupted for ended
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()

    def done(self) -> bool:
        return self._has_ended.is_set()

    def wait(self) -> int:
        """Returns the exit status."""
        self._has_ended.wait()
        return self._process.wait()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def error(self, arguments: Mapping[str, Parameter]) -> ConfigError | RoleFailed:
        """Why it failed, as it has printed it; arguments: that its options have here."""
        reason = in_python("\n".join(self._reason).removeprefix(_SAYS), arguments)
        if self._process.returncode == EXIT_CONFIG:
            return ConfigError(reason)
        return RoleFailed(f"`rlhpc {self._name}` has ended with status {self._process.returncode}: {reason}")

    def _listen(self, errors: IO[str]) -> None:
        """Pass lines to `tell`, in a thread: what it raises is reported by Python and ends only this thread."""
        heard = chain(map(self._kept, errors), self._read_output())
        try:
            for line in heard:
                self._tell(line)
        finally:
            for _ in heard:  # the process must not wait for a reader
                pass
            errors.close()
            self._has_ended.set()

    def _kept(self, line: str) -> str:
        if line.startswith(_SAYS):
            self._reason.clear()
        self._reason.append(_without_end(line))
        return _without_end(line)

    def _read_output(self) -> Iterator[str]:
        self._process.wait()
        with self._output:
            self._output.seek(0)
            self.printed = [_without_end(line) for line in self._output]
        yield from self.printed


def _without_end(line: str) -> str:
    return line.rstrip("\n")


@speaks_python
def start(
    config: str | Path | Config,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    tell: Tell | None = None,
) -> StartedRun:
    """Begin a run on this machine and return at once; it goes on when this Python ends.

    config: a run file, or the result of `rlhpc.config_file.load_config`, which is written beside the run directory.
    overrides: ["section.key=value"] or {"section.key": value}.  tell: called, in a thread of its own, with the lines
    that `rlhpc run` prints.  Raises ConfigError for settings; what else is wrong, `wait` raises.
    """
    refuse_both(resume=resume, fresh=fresh)
    known = settings_of(config, overrides)
    file = known.run_directory.with_name(f"{known.run_directory.name}.toml")
    words = [*command_words(config, overrides, known, file), *["--resume"] * resume, *["--fresh"] * fresh]
    return StartedRun(Run._to_begin(known), _Command(["run", *words], tell))


@speaks_python
def run(
    config: str | Path | Config,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    tell: Tell | None = None,
) -> Run:
    """Do a run on this machine, to its end; returns it, also where it was stopped.

    Arguments as of `start`.  KeyboardInterrupt ends the run as Ctrl-C ends the command, and is raised again; a run
    whose Python is killed goes on.
    Raises ConfigError for settings; RoleFailed: it did not end well; both with the reason that `rlhpc run` prints.
    """
    started = start(config, overrides, resume=resume, fresh=fresh, tell=tell)
    try:
        return started.wait()
    except KeyboardInterrupt:
        with suppress(RlhpcError):
            started.stop(now=True)
        raise


@speaks_python
def check(
    config: str | Path | Config,
    overrides: Overrides = (),
    *,
    site: str | Path | None = None,
    tell: Tell | None = None,
) -> list[str]:
    """Look for mistakes in a run file, as `rlhpc check` does; returns the warnings.

    site: file of the cluster that it is meant for; None: this machine.  tell: called with the lines that the command
    prints.  Raises ConfigError for what is illegal.
    """
    known = settings_of(config, overrides)
    with tempfile.TemporaryDirectory(prefix="rlhpc-check-") as place:
        words = command_words(config, overrides, known, Path(place) / "config.toml")
        command = _Command(["check", *words, *(() if site is None else ("--site", str(site)))], tell)
        try:
            status = command.wait()
        except KeyboardInterrupt:
            command.send(signal.SIGINT)
            raise
    if status != 0:
        raise command.error(signature(check).parameters)
    return [line.removeprefix("warning").strip() for line in command.printed if line.startswith("warning")]


@speaks_python
def evaluate(
    model: str | Path,
    data: str | Path,
    overrides: Overrides = (),
    *,
    run: str | Path | None = None,
    step: int | None = None,
    samples: int = 1,
    prompts: int | None = None,
    temperature: float = 1.0,
    out: str | Path | None = None,
    fresh: bool = False,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Sample a dataset with a model and return its figures, as `rlhpc evaluate --json` prints them.

    model: HF checkpoint, run directory, or a checkpoint in one.  run: run file or directory whose settings an HF
    checkpoint is evaluated with.  step: of a run; default: the newest.  out: directory of the samples, for `compare`.
    Called again, it draws only what is missing.  Raises what the command does: ConfigError, CheckpointError, DataError.
    """
    target = find_target(without_dots(Path(model)), step)
    if run is not None:
        target = with_settings_of(target, without_dots(Path(run)))
    how = {
        "samples": samples,
        "prompts": prompts,
        "temperature": temperature,
        "out": None if out is None else Path(out),
    }
    of_following = dict.fromkeys(("every", "keep_best", "stop_after", "ema"))
    (request,) = requests_of(Namespace(data=Path(data), overrides=words_of(overrides), **how, **of_following), target)
    with caches_on_this_node():
        plan = plan_evaluation(target, request, runs_here=True)
        return plan.report(tell or say_nothing, is_fresh=fresh).as_json()


@speaks_python
def compare(first: str | Path, second: str | Path) -> dict[str, Any]:
    """Compare two evaluations, by their directories, as `rlhpc compare --json` does.  Raises ConfigError, DataError."""
    return comparison_of(Path(first), Path(second)).as_json()


@speaks_python
def export(
    run: str | Path | Run,
    out: str | Path,
    *,
    step: int | None = None,
    ema: bool = False,
    dtype: str | None = None,
    tell: Tell | None = None,
) -> Path:
    """Write the trained model of a run as an HF checkpoint, as `rlhpc export` does; returns where.

    step: a checkpoint; default: the newest sound one.  ema: the moving average of its weights.  dtype: "float32" or
    "bfloat16"; default: that of the model at model.path.  tell: called with the lines that the command prints.
    Raises CheckpointError, ConfigError, RunDirectoryError.  It loads torch.
    """
    from launch.commands.export import export_run

    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype}; legal: float32, bfloat16")
    known = run if isinstance(run, Run) else Run(run)
    said = export_run(RunLayout(known.directory), Path(out), step, is_average=ema, dtype=dtype)
    for line in said.splitlines():
        (tell or say_nothing)(line)
    return Path(out)
