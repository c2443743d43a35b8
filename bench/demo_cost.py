"""Where the demo's CPU time goes, process by process.

    python -m bench.demo_cost [--directory DIR] [KEY=VALUE ...]

Runs configs/demo.toml, with the keys given, in a scratch directory (or DIR, where model and run stay), and reads the
CPU time of every process below it from /proc.  A sample counts as made when its group is trained on or dropped.
Prints, for the time from the first optimiser step to the last: CPU seconds for 1,000 samples made, by process; samples
a second; and seconds from the first step until the running mean of the reward is 0.8.  The last line has the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.demo_runs import GOAL, Rewards, environment, make_demo_model
from bench.figures import tell
from launch.demo.run import NUM_PROBLEMS, RUN_FILE
from launch.demo.task import write_dataset
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import EVENTS, Dropped, Taken, Trained
from rlhpc.buffer.log import read_log

LOOK_S = 0.2


@dataclass(slots=True)
class Look:
    """The run at one instant."""

    at_s: float
    cpu_s: Mapping[str, float]  # by process name, those that have ended included
    num_steps: int
    num_groups: int  # trained or dropped


@dataclass(slots=True)
class Watch:
    """Reads a running demo."""

    layout: RunLayout
    root: psutil.Process
    looks: list[Look] = field(default_factory=list)
    _seconds: dict[tuple[int, float], tuple[str, float]] = field(default_factory=dict)  # by pid and start
    _place: int = 0
    _steps: int = 0
    _groups: int = 0

    def look(self) -> None:
        """Append how it is now."""
        with contextlib.suppress(psutil.Error):
            for process in (self.root, *self.root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    self._see(process)
        self._read_events()
        cpu = defaultdict[str, float](float)
        for name, seconds in self._seconds.values():
            cpu[name] += seconds
        self.looks.append(Look(time.monotonic(), cpu, self._steps, self._groups))

    def _see(self, process: psutil.Process) -> None:
        key = process.pid, process.create_time()
        times = process.cpu_times()
        self._seconds[key] = name_of(process), times.user + times.system

    def _read_events(self) -> None:
        for path in self.layout.rollouts.glob("events_000000.log"):
            file = read_log(path, EVENTS, start=self._place)
            for _, event in file.messages():
                self._steps += isinstance(event, Trained)
                self._groups += len(event.groups) if isinstance(event, Taken) else isinstance(event, Dropped)
            self._place = file.places[-1][1] if file.places else self._place


def name_of(process: psutil.Process) -> str:
    """Of its role; or of the nearest role above it, whose process it is."""
    for ancestor in (process, *process.parents()):
        words = ancestor.cmdline()
        if "rlhpc.roles" in words:
            role = words[words.index("rlhpc.roles") + 1]
            return role if ancestor == process else f"processes of the {role}"
    return "launcher and the rest"


def run_watched(layout: RunLayout, model: Path, data: Path, words: Sequence[str]) -> list[Look]:
    """Run configs/demo.toml on a model and data to its end.  Raises SystemExit if it fails."""
    settings = [f"run.directory={layout.root}", f"model.path={model}", f"data.path={data}", *words]
    command = [sys.executable, "-m", "launch.cli", "run", str(RUN_FILE), *settings, "--fresh"]
    with tempfile.TemporaryFile() as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
        watch = Watch(layout, psutil.Process(started.pid))
        while started.poll() is None:
            watch.look()
            time.sleep(LOOK_S)
        if started.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {started.returncode}:\n{output.read()[-4000:].decode()}")
    return watch.looks


def span(looks: Sequence[Look]) -> tuple[Look, Look]:
    """When the first step was done, and the last."""
    first = next(look for look in looks if look.num_steps)
    return first, next(look for look in looks if look.num_steps == looks[-1].num_steps)


def table(looks: Sequence[Look], layout: RunLayout, group_size: int) -> str:
    """What it cost between the first step and the last."""
    first, last = span(looks)
    made, seconds = group_size * (last.num_groups - first.num_groups), last.at_s - first.at_s
    spent = {name: last.cpu_s[name] - first.cpu_s[name] for name in last.cpu_s}
    lines = [f"{name:<32}{1000 * spent[name] / made:8.2f}" for name in sorted(spent, key=lambda name: -spent[name])]
    lines.insert(0, "CPU seconds for 1,000 samples")
    lines.append(f"{'all':<32}{1000 * sum(spent.values()) / made:8.2f}")
    lines.append(f"{made / seconds:.0f} samples/s made, {made:,} in {seconds:.0f} s, {last.num_steps} steps")
    lines.append(goal_line(looks, layout, first.at_s))
    tell("demo CPU-s", 1000 * sum(spent.values()) / made)
    return "\n".join(lines)


def goal_line(looks: Sequence[Look], layout: RunLayout, began_s: float) -> str:
    """When the running mean reached the goal; a version is as old as its step."""
    rewards = Rewards.of(layout)
    version = next((index for index, value in enumerate(rewards.curve) if value >= GOAL), math.inf)
    at = next((look.at_s - began_s for look in looks if look.num_steps > version), math.nan)
    tell("demo s to goal", at)
    return f"reward {GOAL} after {at:.0f} s (version {version}), {rewards.final:.3f} at the end"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.directory or Path(scratch)).absolute()
        layout, model = RunLayout(root / "run"), make_demo_model(root)
        load, began = os.getloadavg()[0], time.monotonic()
        write_dataset(root / "train.jsonl", NUM_PROBLEMS, seed=0)
        looks = run_watched(layout, model, root / "train.jsonl", options.words)
        whole = resource.getrusage(resource.RUSAGE_CHILDREN)
        group_size = json.loads(layout.config.read_bytes())["config"]["admission"]["group_size"]
        print(table(looks, layout, group_size))
        cpu = whole.ru_utime + whole.ru_stime
        print(f"the whole command: {time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU; load {load:.1f} before it")


if __name__ == "__main__":
    main()
