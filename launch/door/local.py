"""`rlhpc.run`, `rlhpc.evaluate`, `rlhpc.compare`: what the commands of these names do, from Python.

Input: files and words as on the command line.  A run is a process of its own, so that whatever this interpreter has
loaded, threads and CUDA included, does not matter; an evaluation is judged here, and its engines are processes.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.commands.evaluate.compare import comparison_of
from launch.commands.evaluate.evaluation import plan_evaluation
from launch.commands.evaluate.processes import caches_on_this_node
from launch.commands.evaluate.request import requests_of
from launch.commands.evaluate.target import find_target, with_settings_of
from launch.common.paths import without_dots
from launch.door.run import Run
from rlhpc.config_file import load_config
from rlhpc.errors import ConfigError, RoleFailed

Tell = Callable[[str], None]


def run(
    run_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    tell: Tell = lambda line: None,
) -> Run:
    """Do a run on this machine, to its end; returns it, also where it was stopped.

    overrides: "section.key=value".  tell: called with the lines that `rlhpc run` prints.  KeyboardInterrupt ends the
    run as Ctrl-C ends the command, and is raised again; a run whose Python is killed goes on.
    Raises ConfigError for settings; RoleFailed: it did not end well, with its last line.
    """
    config = load_config(Path(run_file), list(overrides), "overrides")
    words = [*overrides, *["--resume"] * resume, *["--fresh"] * fresh]
    command = [sys.executable, "-P", "-m", "launch.cli", "run", str(run_file), *words]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it once, from here
    ) as process:
        last = _told(process, tell)
    if process.returncode == 2:
        raise ConfigError(last.removeprefix("rlhpc: "))
    if process.returncode != 0:
        raise RoleFailed(f"{run_file}: `rlhpc run` has ended with status {process.returncode}: {last}")
    return Run.load(config.run_directory)


def _told(process: subprocess.Popen[str], tell: Tell) -> str:
    """Every line of a process to its end; returns the last."""
    assert process.stdout is not None
    last = ""
    try:
        for line in process.stdout:
            last = line.rstrip("\n") or last
            tell(line.rstrip("\n"))
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    return last


def evaluate(
    model: str | Path,
    data: str | Path,
    overrides: Sequence[str] = (),
    *,
    run: str | Path | None = None,
    step: int | None = None,
    samples: int = 1,
    prompts: int | None = None,
    temperature: float = 1.0,
    out: str | Path | None = None,
    fresh: bool = False,
    tell: Tell = lambda line: None,
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
    (request,) = requests_of(Namespace(data=Path(data), overrides=list(overrides), **how, **of_following), target)
    with caches_on_this_node():
        return plan_evaluation(target, request, runs_here=True).report(tell, is_fresh=fresh).as_json()


def compare(first: str | Path, second: str | Path) -> dict[str, Any]:
    """Compare two evaluations, by their directories, as `rlhpc compare --json` does.  Raises ConfigError, DataError."""
    return comparison_of(Path(first), Path(second)).as_json()
