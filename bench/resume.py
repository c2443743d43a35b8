"""How long `rlhpc run --resume` takes until its first optimiser step, where no engine has to be loaded.

    python -m bench.resume [--rounds 3] [KEY=VALUE ...]

configs/demo.toml with the scripted engine, trained for a few steps and then resumed again and again, each time for two
steps more.  The clock runs from the start of the command until the step's event is in the run directory: interpreter,
checks, checkpoint, processes, rendezvous, the first weights and the first batch are in it.  Prints seconds and CPU
seconds of the whole command, round by round.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.demo_runs import environment, make_demo_model
from bench.figures import tell
from launch.demo.run import RUN_FILE
from launch.demo.task import write_dataset
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import Trained, event_paths, read_events

LOOK_S = 0.005
FIRST_STEPS, MORE_STEPS = 4, 2


def num_trained(layout: RunLayout) -> int:
    """Steps that were done, of all attempts."""
    files = map(read_events, event_paths(layout.rollouts))
    return sum(isinstance(event, Trained) for file in files for event in file.events.values())


def until_first_step(layout: RunLayout, words: Sequence[str]) -> float:
    """Run a command to its end; return the seconds until a step was done.  Raises SystemExit if it fails."""
    before = num_trained(layout) if layout.rollouts.exists() else 0
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        command = [sys.executable, "-m", "launch.cli", "run", str(RUN_FILE), *words]
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
        seconds = None
        while started.poll() is None:
            if seconds is None and layout.rollouts.exists() and num_trained(layout) > before:
                seconds = time.monotonic() - began
            time.sleep(LOOK_S)
        if started.returncode or seconds is None:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {started.returncode}:\n{output.read()[-4000:].decode()}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="the demo's, where it has been made already")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = options.model.absolute() if options.model else make_demo_model(root)
        layout, data = RunLayout(root / "run"), root / "train.jsonl"
        write_dataset(data, 1_000, seed=0)
        words = [
            f"run.directory={layout.root}", f"model.path={model}", f"data.path={data}", "generation.engine=scripted",
            "data.task=bench.trl_side:is_even", "trainer.warmup_steps=0", *options.words,
        ]  # fmt: skip
        print(f"load {os.getloadavg()[0]:.1f}; first start {until_first_step(layout, [*words, steps(0)]):.1f} s")
        found = []
        for number in range(1, options.rounds + 1):
            before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            found.append(until_first_step(layout, [*words, steps(number), "--resume"]))
            cpu_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
            print(
                f"resume {number}: {found[-1]:5.2f} s to the first step, {cpu_s:5.1f} s of CPU to its end", flush=True
            )
    tell("resume s", statistics.median(found))


def steps(number: int) -> str:
    """How far the run goes at that resume."""
    return f"run.num_steps={FIRST_STEPS + MORE_STEPS * number}"


if __name__ == "__main__":
    main()
