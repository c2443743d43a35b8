"""Trials of what a run survives on one machine: kills, stops and damage at random instants.  Prints a line per trial.

    python -m bench.trials orphans               the launcher is killed 0 … 3 s after its start, in steps of 0.1 s
    python -m bench.trials zombies --trials 20   a controller that stood still wakes up in its successor's timeline
    python -m bench.trials kills --trials 200    any process is killed at a random instant, and the run resumed;
                                                 every tenth time the newest checkpoint is damaged in between

Exit status 1 if a process was left, or a group was lost, trained twice, or trained on by two timelines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import KnownCheckpoints
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab

GROUPS, GROUP_SIZE = 4, 4
SLOW = {"task": "tests.ring.ring_rewards:slow_parity"}
ENDLESS = {"num_steps": 1_000_000}
LEFT_AFTER_S = 5.0  # nothing of a run may live so long after its launcher was killed
STALE_AFTER_S = 10.0  # a process that was stopped is gone so long after it was woken
DAMAGE_EVERY = 10


def main() -> int:
    """Do one kind of trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("orphans", "zombies", "kills"))
    parser.add_argument("--trials", type=int, default=20, help="of zombies and kills (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rlhpc-trials-"))
    trials: dict[str, Callable[[Trial], int]] = {"orphans": orphans, "zombies": zombies, "kills": kills}
    try:
        trial = Trial(make_lab(root), options.engine, options.trials, random.Random(options.seed))
        failures = trials[options.kind](trial)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"kind": options.kind, "engine": options.engine, "failures": failures}))
    return 1 if failures else 0


class Trial:
    """Where runs of trials live, and chance."""

    def __init__(self, lab: Lab, engine: str, num_trials: int, chance: random.Random) -> None:
        self.lab, self.engine, self.num_trials, self.chance = lab, engine, num_trials, chance

    def start(self, name: str, *words: str) -> Run:
        """`rlhpc run` of a run that lasts, with a checkpoint every four steps."""
        sections = {"run": ENDLESS, "data": SLOW, "generation": {"engine": self.engine}}
        run_file = self.lab.run_file(name, **sections, checkpoint={"every_steps": 4})
        return Run(run_file, self.lab.layout(name), *words)

    def verdict(self, name: str) -> str:
        """Resume a run to its end; "" if every step has one whole batch and no group stands twice."""
        layout = self.lab.layout(name)
        num_steps = _saved_step(layout) + 6
        with self.start(name, "--resume", f"run.num_steps={num_steps}") as run:
            if run.finish(300.0) != 0:
                return run.output.strip().splitlines()[-1]
        try:
            assert_full_batches_trained_once(layout.rollouts, num_steps, GROUPS, GROUP_SIZE)
        except AssertionError as error:
            return str(error) or "a batch that is not whole, or a group that stands twice"
        return ""


def orphans(trial: Trial) -> int:
    """What lives LEFT_AFTER_S after the launcher was killed."""
    failures = 0
    for tenths in range(31):
        name = f"orphan-{tenths}"
        with trial.start(name) as run:
            time.sleep(tenths / 10)
            run.interrupt(signal.SIGKILL)
            run.process.wait()
            killed = time.monotonic()
            while run.survivors() and time.monotonic() - killed < LEFT_AFTER_S:
                time.sleep(0.05)
            left, took_s = run.survivors(), time.monotonic() - killed
            failures += bool(left)
            print(
                f"launcher killed after {tenths / 10:.1f} s: nothing left after {took_s:.1f} s", left or "", flush=True
            )
    return failures


def zombies(trial: Trial) -> int:
    """SIGSTOP the controller, SIGKILL the launcher, resume, SIGCONT."""
    failures = 0
    for number in range(trial.num_trials):
        name = f"zombie-{number}"
        with trial.start(name) as first:
            first.wait_for_step(5)
            time.sleep(trial.chance.random())
            stale = _role(first, "controller")
            stale.suspend()
            first.interrupt(signal.SIGKILL)
            first.process.wait()
            with trial.start(name, "--resume") as second:
                time.sleep(12 * trial.chance.random())
                woken = time.monotonic()
                if stale.is_running():
                    stale.resume()
                _, alive = psutil.wait_procs([stale], timeout=STALE_AFTER_S)
                took_s = time.monotonic() - woken
                second.interrupt(signal.SIGTERM)
                second.finish(120.0)
            problem = "the stale controller lives" if alive else trial.verdict(name)
            failures += bool(problem)
            print(f"zombie {number}: gone {took_s:.1f} s after it was woken; {problem or 'one timeline'}", flush=True)
    return failures


def kills(trial: Trial) -> int:
    """SIGKILL of a random process at a random instant, and a resume; one run all the way."""
    failures, name = 0, "killed"
    layout = trial.lab.layout(name)
    words: tuple[str, ...] = ()
    for number in range(trial.num_trials):
        with trial.start(name, *words) as run:
            begins_at = _saved_step(layout)
            instant_s = trial.chance.choice((3.0, 8.0)) * trial.chance.random()
            if trial.chance.random() < 0.7:  # in the middle of training, and not at the start, where little is at stake
                _wait_for_attempts_step(run, begins_at + 1)
            time.sleep(instant_s)
            victim = _victim(run, trial.chance)
            if victim is not None:
                victim[1].kill()
            if run.process.poll() is None and (victim is None or victim[0] == "reward-worker"):
                run.interrupt(signal.SIGKILL)  # a worker is replaced, and the run goes on
            try:
                run.finish(60.0)
                run.assert_nothing_is_left(within_s=20.0)
            except AssertionError as error:
                failures += 1
                print(f"kill {number}: {error}", flush=True)
        damaged = _damage_newest(layout, trial.chance) if number % DAMAGE_EVERY == DAMAGE_EVERY - 1 else ""
        who = victim[0] if victim is not None else "launcher"
        print(f"kill {number}: {who}, step {_saved_step(layout)} saved {damaged}", flush=True)
        words = ("--resume",) if layout.config.exists() else ()
    problem = trial.verdict(name)
    print(problem or "every step has one whole batch, and no group stands twice")
    return failures + bool(problem)


def _wait_for_attempts_step(run: Run, step: int) -> None:
    """Wait until this attempt has trained a step, or the run has ended."""
    deadline = time.monotonic() + 90.0
    while run.process.poll() is None and time.monotonic() < deadline and run.status().get("step", -1) < step:
        time.sleep(0.05)


def _victim(run: Run, chance: random.Random) -> tuple[str, psutil.Process] | None:
    """A process of the run and what it is; each kind is as likely as the others."""
    kinds: dict[str, list[psutil.Process]] = {}
    for process in run.survivors():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "launch.cli" in words:
            kind = "launcher"
        elif "rlhpc.roles" in words:
            kind = words[words.index("rlhpc.roles") + 1]
        else:
            kind = "reward-worker" if any("rewards" in word for word in words) else "engine"
        kinds.setdefault(kind, []).append(process)
    if not kinds:
        return None
    kind = chance.choice(sorted(kinds))
    return kind, chance.choice(kinds[kind])


def _role(run: Run, role: str) -> psutil.Process:
    return next(process for process in run.survivors() if process.cmdline()[2:4] == ["rlhpc.roles", role])


def _saved_step(layout: RunLayout) -> int:
    return max((step for step, _ in _complete_checkpoints(layout)), default=0)


def _complete_checkpoints(layout: RunLayout) -> list[tuple[int, Path]]:
    """(step, path), oldest first; whether a checkpoint is sound is for the run to find out."""
    known = KnownCheckpoints(layout.checkpoints).steps()
    return [(step, path) for step, path in known if (path / "COMPLETE").exists()]


def _damage_newest(layout: RunLayout, chance: random.Random) -> str:
    """Flip one bit of one file of the newest checkpoint, if there is an older one to go back to."""
    complete = _complete_checkpoints(layout)
    if len(complete) < 2:
        return ""
    files = sorted(path for path in complete[-1][1].rglob("*") if path.is_file() and path.stat().st_size > 0)
    path = chance.choice(files)
    place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ bit]), place)
    return f"(then damaged {path.relative_to(layout.root)})"


if __name__ == "__main__":
    sys.exit(main())
