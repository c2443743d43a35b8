"""The Python API of runs: start, run, check, evaluate, compare, export, submit."""

from __future__ import annotations

import os
import re
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

from submitit.core.utils import FailedJobError, UncompletedJobError

from launch.api_run import (
    Checkpoint,
    Overrides,
    Run,
    Tell,
    command_words,
    import_path,
    import_path_exported,
    in_python,
    refuse_both,
    say_nothing,
    settings_of,
    speaks_python,
    words_of,
)
from launch.checks.model_files import read_model
from launch.commands.submit import submit_run
from launch.common.text import quoted, without_dots
from launch.evaluate.command import comparison_of
from launch.evaluate.evaluation import caches_on_this_node, plan_evaluation
from launch.evaluate.request import find_target, requests_of, with_settings_of
from launch.run_directory.prepare import refuse_taken_directory
from launch.run_files.records import JobRecord, read_job_records
from launch.run_files.run_state import last_outcome
from launch.slurm.commands import SlurmError
from launch.slurm.queue import cancel
from launch.submitit_hetjob.job import HeterogeneousSlurmJob
from launch.supervisor.controller_job import SOONER
from rlhpc.base.files import is_listed
from rlhpc.base.processes import child_command
from rlhpc.base.run_directory import RunLayout
from rlhpc.base.user_code import look_up
from rlhpc.config.rules import Config
from rlhpc.data.files import dataset_files
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError, RlhpcError, RoleFailed, RunDirectoryError

# ---------------------------------------------------------------------------------------------------------------- local
#
# `rlhpc.start`, `run`, `check`, `evaluate`, `compare`, `export`: the commands on this machine, from Python.
#
# Input: files and words as on the command line.  A run and a check are separate processes, so that libraries, threads,
# an event loop and CUDA of this interpreter do not matter; an evaluation is judged here, and its engines are processes.

_LONGEST_REASON = 50  # lines
_BY_A_SIGNAL = re.compile(r"\bSIG[A-Z]+ asks the run")
_SAYS = "rlhpc: "  # prefix of errors, and of other messages that interrupt the line of progress


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
        """True if the run has ended, complete or not."""
        return self._command.done()

    def wait(self) -> Run:
        """Wait for the end; return the run, complete or stopped.  An interrupt ends the wait and not the run.

        Raises ConfigError for settings; RoleFailed if the run failed; both with the reason that `rlhpc run` prints.
        """
        status = self._command.wait()
        if status not in (0, *(_OF_A_STOP if self._is_asked else ())):
            raise self._command.error(signature(start).parameters)
        return self.run

    def stop(self, *, now: bool = False) -> Run:
        """Finish the step, save, and end the run, as `rlhpc stop` does; return when it has ended.  now: end at once."""
        self._is_asked = True
        self._command.is_asked_here = True
        self._command.send(signal.SIGINT if now else signal.SIGTERM)
        return self.wait()


# Statuses of a run that a signal has ended before it began: its own, or Python's while it loads.
_OF_A_STOP = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)


class _Command:
    """`rlhpc NAME …` as a process that Ctrl-C does not reach; a thread passes its output on, and keeps its errors."""

    def __init__(self, words: Sequence[str], tell: Tell | None) -> None:
        self._name, self._tell = words[0], tell or say_nothing
        self.is_asked_here = False  # this session has asked it to stop
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
        self._has_ended = threading.Event()  # Python 3.11 believes that a thread whose join was interrupted has ended
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()

    def done(self) -> bool:
        return self._has_ended.is_set()

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        self._has_ended.wait()
        return self._process.wait()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def error(self, arguments: Mapping[str, Parameter]) -> ConfigError | RoleFailed:
        """Error with the printed reason; arguments: Python arguments of the command's options."""
        reason = in_python("\n".join(self._reason).removeprefix(_SAYS), arguments)
        if self._process.returncode == EXIT_CONFIG:
            return ConfigError(reason)
        return RoleFailed(f"`rlhpc {self._name}` has ended with status {self._process.returncode}: {reason}")

    def _listen(self, errors: IO[str]) -> None:
        """Pass lines to `tell`, in a thread: its exceptions are reported by Python and end only this thread."""
        heard = chain(map(self._kept, errors), self._read_output())
        try:
            for line in heard:
                self._tell(_of_this_session(line) if self.is_asked_here else line)
        finally:
            for _ in heard:  # read on, or the process would block
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


def _of_this_session(line: str) -> str:
    """A run's line about its stop, in terms of Python: there is no terminal for a Ctrl-C."""
    return _BY_A_SIGNAL.sub("stop() asks the run", line).replace(SOONER, "")


def _without_end(line: str) -> str:
    return line.rstrip("\n")


def _refuse_at_once(config: Config, *, begins: bool) -> None:
    """Raise errors of `rlhpc run` that are found without reading files.  begins: neither --resume nor --fresh."""
    try:
        if begins:
            refuse_taken_directory(RunLayout(config.run_directory), resume=False, fresh=False)
    except RunDirectoryError as error:
        raise ConfigError(str(error)) from error
    for dataset in config.data:
        for part in (part for task in dataset.all_tasks for part in config.parts_of(task)):
            if part.startswith("__main__:"):  # whose module no other process has
                look_up("data.task", part)
    read_model(config.model.path)
    files = [(each.path, each.split) for each in config.data if each.path is not None]
    for path, split in (*files, *((each.path, each.split) for each in config.demonstrations)):
        dataset_files(path, split)


@speaks_python
def start(
    config: str | Path | Config,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    tell: Tell | None = None,
) -> StartedRun:
    """Begin a run on this machine and return at once; the run outlives this Python.

    config: a run file, or the result of `rlhpc.config.file.load_config`, which is written beside the run directory.
    overrides: ["section.key=value"] or {"section.key": value}.  tell: called, in a thread of its own, with the lines
    that `rlhpc run` prints.  Raises ConfigError for settings, a directory that is taken, and a missing model or
    dataset; `wait` raises other errors.
    """
    refuse_both(resume=resume, fresh=fresh)
    known = settings_of(config, overrides)
    _refuse_at_once(known, begins=not (resume or fresh))
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
    """Do a run on this machine, to its end; returns it, also if it was stopped.

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
    config: str | Path | Config, overrides: Overrides = (), *, site: str | Path | None = None, tell: Tell | None = None
) -> list[str]:
    """Look for mistakes in a run file, as `rlhpc check` does; returns the warnings.

    site: site file of the target cluster; None: this machine.  tell: called with the lines that the command prints.
    Raises ConfigError.
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
    model: str | Path | Run,
    data: str | Path,
    overrides: Overrides = (),
    *,
    run: str | Path | Run | None = None,
    step: int | None = None,
    samples: int = 1,
    prompts: int | None = None,
    temperature: float = 1.0,
    out: str | Path | None = None,
    fresh: bool = False,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Sample a dataset with a model and return its figures, as `rlhpc evaluate --json` prints them.

    model: HF checkpoint, run, or a checkpoint in one.  run: run file or directory with the settings for an HF
    checkpoint.  step: of a run; default: the newest.  out: directory of the samples, for `compare`.
    Called again, it draws only missing samples.  Raises ConfigError, CheckpointError, DataError.
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
    adapter: bool = False,
    dtype: str | None = None,
    tell: Tell | None = None,
) -> Path:
    """Write the trained model of a run as an HF checkpoint, as `rlhpc export` does; returns its directory.

    step: a checkpoint; default: the newest sound one.  ema: the moving average of its weights.  adapter: the adapters
    alone, as PEFT loads them.  dtype: "float32" or "bfloat16"; default: that of the model at model.path, of adapters
    float32.  tell: called with the lines that the command prints.
    Raises CheckpointError, ConfigError, RunDirectoryError.  It loads torch.
    """
    from launch.commands.export import export_run

    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype}; legal: float32, bfloat16")
    said = export_run(RunLayout(Run(run).directory), Path(out), step, is_average=ema, dtype=dtype, is_adapter=adapter)
    for line in said.splitlines():
        (tell or say_nothing)(line)
    return Path(out)


# -------------------------------------------------------------------------------------------------------------- run job
#
# A submitted run as submitit's Job: `state`, `done`, `wait`, `result`, `cancel`, `stdout`.
#
# Input: a run directory with jobs.  The state is that of the controller's job, the newest if there are several in
# succession.  `result` is the run's summary.json; nothing is unpickled for it.


class RunJob(HeterogeneousSlurmJob[dict[str, Any]]):
    """The jobs of one run, as one job.  Any process can create it from the run directory at any time."""

    def __init__(self, directory: str | Path) -> None:
        """Raises RunDirectoryError if no job of a controller is recorded in the directory."""
        self._layout = RunLayout(Path(directory))
        super().__init__(self._layout.logs / "slurm", str(self._newest().job_id))

    @property
    def run(self) -> Run:
        """The run with its results."""
        return Run.load(self._layout.root)

    @property
    def state(self) -> str:
        """Slurm's state of the controller's job: PENDING, RUNNING, COMPLETED …; as of the last query."""
        job_id = str(self._newest().job_id)
        self.watcher.register_job(job_id)
        return str(self.watcher.get_state(job_id))

    def done(self, force_check: bool = False) -> bool:
        """True if the run is over: neither a requeue nor a successor will continue it."""
        job_id = self._newest().job_id
        try:
            if is_listed(self._layout.logs / "slurm" / f"{job_id}_0_result.pkl"):
                return job_id == self._newest().job_id
        except FileNotFoundError:
            return False
        return bool(self.watcher.is_done(str(job_id), mode="force" if force_check else "standard"))

    def results(self) -> list[dict[str, Any]]:
        """[summary], once the run is over.  Raises the result of `exception`."""
        error = self.exception()
        if error is not None:
            raise error
        return [self.run.summary or {}]

    def exception(self) -> UncompletedJobError | FailedJobError | None:
        """Wait for the end; return None if the run is complete, else the error."""
        self.wait()
        if self.run.summary is not None:
            return None
        name = str(self._newest().job_id)
        why = last_outcome(self._layout, name)
        where = f"`rlhpc status {quoted(self._layout.root)}` says more"
        if not why:
            return UncompletedJobError(f"job {name} ({self.state}) ended without recording a reason; {where}")
        return FailedJobError(f"{why}; {where}")

    def cancel(self, check: bool = True) -> None:
        """Cancel all jobs of the run.  check: raise SlurmError if that fails.  `run.stop()` saves first."""
        try:
            cancel([record.job_id for record in read_job_records(self._layout)])
        except SlurmError:
            if check:
                raise
        self.watcher.look_soon(str(self._newest().job_id))

    def stdout(self) -> str | None:
        """The batch log of the controller's job, over all requeues; None if it has not begun."""
        record = self._newest()
        path = self._layout.logs / "slurm" / f"{record.name}-{record.job_id}.log"
        return path.read_text(errors="replace") if path.exists() else None

    def stderr(self) -> str | None:
        """stdout again: both streams go into one file."""
        return self.stdout()

    def _newest(self) -> JobRecord:
        records = [record for record in read_job_records(self._layout) if record.hosts_controller]
        if not records:
            raise RunDirectoryError(f"{self._layout.root}: no job of this run is recorded; was it submitted?")
        return records[-1]


# --------------------------------------------------------------------------------------------------------------- submit


@speaks_python
def submit(
    config: str | Path | Config,
    site: str | Path,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    after: str | int | None = None,
    tell: Tell | None = None,
) -> RunJob:
    """Check a run, submit its jobs, and return them as one job of submitit.

    config: a run file, or the result of `rlhpc.config.file.load_config`.  site: a site file.
    overrides: ["section.key=value"] or {"section.key": value}.  after: a job id, or a dependency in sbatch's syntax.
    tell: called with the lines that `rlhpc submit` prints.
    Raises ConfigError, RunDirectoryError: refused, nothing was written; SlurmError: sbatch failed.
    """
    refuse_both(resume=resume, fresh=fresh)
    known, depends = settings_of(config, overrides), None if after is None else str(after)
    with import_path_exported():
        layout = submit_run(known, Path(site), resume=resume, fresh=fresh, after=depends, tell=tell or say_nothing)
    return RunJob(layout.root)


# -------------------------------------------------------------------------------------------------------------   init
#
# The Python API: names that `import rlhpc` loads on first use (rlhpc/__init__.py), and the classes of their results.
#
# Small on purpose: everything in it keeps its names and meanings (docs/python.md).

__all__ = [
    "Checkpoint", "Run", "RunJob", "StartedRun", "check", "compare", "evaluate", "export", "run", "start", "submit",
]  # fmt: skip
