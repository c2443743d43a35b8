"""Trials of what a run survives on one machine: kills, stops and damage at random instants.  Prints a line per trial.

    python -m bench.trials orphans               the launcher is killed 0 … 3 s after its start, in steps of 0.1 s
    python -m bench.trials zombies --trials 20   a controller that stood still wakes up in its successor's timeline
    python -m bench.trials kills --trials 200    any process is killed at a random instant; the run goes on by itself,
                                                 or is resumed if it was the launcher; every tenth time it is, and the
                                                 newest checkpoint is damaged in between
    python -m bench.trials stops --trials 500    `rlhpc run` is stopped at a random instant, by SIGINT, SIGTERM or
                                                 `rlhpc stop`, some a second time; then resumed, and stopped again
    python -m bench.trials controller-stops      the same for the controller alone, in this process, on a disk that is
                                                 slow at random: its threads are in the middle of a write
    python -m bench.trials services --trials 50  teacher, judge or reward model of a run is killed, or stands still for
                                                 up to 25 s, at a random instant; what each had to say of a rollout is
                                                 there in the end, and right
    python -m bench.trials disk-errors --trials 40 --seconds 10
                                                 every call below the run directory, or one kind of calls, fails for so
                                                 long from a random instant on, the run's start and its end included

Exit status 1 if a process was left, a group was lost, trained twice, or trained on by two timelines, a service's answer
is missing or wrong, or a stop did not end with 0 and a clean audit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import psutil

from launch.run_directory.prepare import num_attempts
from launch.verify.audit import audit_run
from launch.verify.evidence import Depth
from launch.view.standing import Queue, State, find_runs, standing_of
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.types import FinishReason, Verdict
from rlhpc.training.checkpoint_directory import KnownCheckpoints
from tests.faults.refusing_disk import ERRORS, KINDS, RefusingDisk
from tests.ring.ring_rewards import parity
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab
from tests.simulator.real_time import Attempted, RealTime, WatchedDisk

GROUPS, GROUP_SIZE = 4, 4
SLOW = {"task": "tests.ring.ring_rewards:slow_parity"}
ENDLESS = {"num_steps": 1_000_000}
LEFT_AFTER_S = 5.0  # nothing of a run may live so long after its launcher was killed
STALE_AFTER_S = 10.0  # a process that was stopped is gone so long after it was woken
DAMAGE_EVERY = 10


def main() -> int:
    """Do one kind of trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(TRIALS))
    parser.add_argument("--trials", type=int, default=20, help="of all but orphans (20)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each disk error (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run in progress ends, too
    root = Path(tempfile.mkdtemp(prefix="rlhpc-trials-"))
    try:
        trial = Trial(make_lab(root), options.engine, options.trials, random.Random(options.seed), options.seconds)
        failures = TRIALS[options.kind](trial)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"kind": options.kind, "engine": options.engine, "seed": options.seed, "failures": failures}))
    return 1 if failures else 0


class Trial:
    """Where runs of trials live, and chance."""

    def __init__(self, lab: Lab, engine: str, num_trials: int, chance: random.Random, seconds: float) -> None:
        """seconds: of each disk error."""
        self.lab, self.engine, self.num_trials, self.chance, self.seconds = lab, engine, num_trials, chance, seconds

    def start(self, name: str, *words: str, environment: Mapping[str, str] = MappingProxyType({})) -> Run:
        """`rlhpc run` of a run that lasts, with a checkpoint every four steps."""
        sections = {"run": ENDLESS, "data": SLOW, "generation": {"engine": self.engine}}
        run_file = self.lab.run_file(name, **sections, checkpoint={"every_steps": 4})
        return Run(run_file, self.lab.layout(name), *words, environment=environment)

    def start_short(self, name: str, *words: str) -> Run:
        """`rlhpc run` of a run of 40 steps, with a checkpoint every four."""
        sections = {"run": {"num_steps": 40}, "data": SLOW, "generation": {"engine": self.engine}}
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
            stale = first.role("controller")
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
    """SIGKILL of a random process at a random instant; one run all the way, resumed if the victim was its launcher."""
    failures, name = 0, "killed"
    layout = trial.lab.layout(name)
    recoveries: dict[str, list[float]] = {}  # seconds from the death of a kind of process to the next step
    run: Run | None = None
    for number in range(trial.num_trials):
        if run is None:
            resume = ("--resume",) if layout.config.exists() else ()
            run = trial.start(name, *resume, "--max-retries", "1000")
        if trial.chance.random() < 0.7:  # in the middle of training, and not at the start, where little is at stake
            _wait_for_a_step(run)
        time.sleep(trial.chance.choice((3.0, 8.0)) * trial.chance.random())
        has_trained = _has_trained(run)
        is_to_damage = number % DAMAGE_EVERY == DAMAGE_EVERY - 1
        who, victim = ("launcher", run.process) if is_to_damage else _victim(run, trial.chance)
        victim.kill()
        began = time.monotonic()
        ends_attempt = who.endswith(("controller", "trainer"))
        went_on = who != "launcher" and _wait_for_a_step(run, in_another_attempt=ends_attempt)
        problem, damaged = "", ""
        if not went_on:
            problem = _end(run) or (
                f"the run ended with it: {run.output.splitlines()[-1]}" if who != "launcher" and has_trained else ""
            )
            run = None
            damaged = _damage_newest(layout, trial.chance) if is_to_damage else ""
        failures += bool(problem)
        took_s = time.monotonic() - began
        how = f"went on after {took_s:.1f} s" if went_on else "ended"
        if went_on:
            recoveries.setdefault(who, []).append(took_s)
        print(f"kill {number}: {who}, {how}, step {_saved_step(layout)} saved {damaged}{problem}", flush=True)
    if run is not None:
        _end(run)
    for who, seconds in sorted(recoveries.items()):
        seconds.sort()
        p50, p95 = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.95))
        print(f"{who:24} {len(seconds):4} kills, to the next step: median {p50:5.1f} s, p95 {p95:5.1f} s")
    problem = trial.verdict(name)
    print(problem or "every step has one whole batch, no group stands twice, and the audit is clean")
    return failures + bool(problem)


def stops(trial: Trial) -> int:
    """Stop one run again and again, at an instant of its start, replay, training, farewell or closing.

    Every run that has done all its steps is followed by another.
    """
    failures, runs, num_unmade = 0, 0, 0
    for number in range(trial.num_trials):
        name = f"stopped-{runs}"
        layout, chance = trial.lab.layout(name), trial.chance
        resume = ("--resume",) if layout.config.exists() else ()
        began, attempts = time.monotonic(), num_attempts(layout) if resume else 0
        with trial.start_short(name, *resume) as run:
            how = _stop_at_random(run, chance)
            status = run.finish(300.0)
            said = run.output.strip().splitlines()
            run.assert_nothing_is_left(within_s=20.0)
        is_made = layout.config.exists() and num_attempts(layout) > attempts
        is_unmade = not is_made and status in _ENDED_BY_SIGNAL
        num_unmade += is_unmade
        is_cut_short = status == 130 and (how == "SIGINT twice" or any("is killed" in line for line in said))
        is_legal = status == 0 or is_unmade or (how.startswith("SIGINT") and is_cut_short)
        problem = "" if is_legal else f"ended with {status}: {said[-1] if said else ''}"
        problem = problem or next((line for line in said if line.startswith("Traceback")), "")
        if layout.rollouts.exists():
            problem = problem or _audited(layout) or ("" if is_unmade else _not_over(layout))
        failures += bool(problem)
        runs += layout.summary.exists() or bool(problem)
        took_s, when = time.monotonic() - began, ", before anything was made" if is_unmade else ""
        print(f"stop {number}: {how}{when}, {took_s:.1f} s, step {_saved_step(layout)} saved {problem}", flush=True)
    print(f"{num_unmade} of {trial.num_trials} ended before anything was made, all others with 0, or 130 if killed")
    return failures


# Of a command that a signal ends before its attempt has begun.
_ENDED_BY_SIGNAL = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def _not_over(layout: RunLayout) -> str:
    """Return what `rlhpc list` says of a run that has ended, if it is neither complete nor stopped."""
    standing = standing_of(find_runs([layout.root], depth=0).runs[0], Queue(), time.time())
    return "" if standing.state in (State.COMPLETE, State.STOPPED) else f"{standing.state} {standing.remark}"


def _stop_at_random(run: Run, chance: random.Random) -> str:
    """Wait for the instant and stop it; return how."""
    how = chance.choice(("SIGTERM", "SIGTERM", "SIGINT", "SIGINT twice", "rlhpc stop"))
    if chance.random() < 0.5:  # else within the start, which takes as long
        _wait_for_a_step(run)
    waited = Deadline(chance.choice((3.0, 10.0)) * chance.random())
    while not waited.is_over and run.process.poll() is None:
        time.sleep(0.01)
    if run.process.poll() is not None:
        return "not stopped"
    if how == "rlhpc stop":
        subprocess.run([sys.executable, "-m", "launch.cli", "stop", str(run.layout.root)], check=False,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    else:
        run.interrupt(signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)
    if how == "SIGINT twice":
        time.sleep(3.0 * chance.random())
        if run.process.poll() is None:
            run.interrupt()
    return how


def controller_stops(trial: Trial) -> int:
    """Stop the controller of tests/simulator/real_time.py, in this process, at random instants."""
    failures, runs, run = 0, 0, None
    logging.disable(logging.WARNING)
    for number in range(trial.num_trials):
        if run is None:
            run = RealTime(trial.lab.root / f"run-{runs}", trial.chance.randrange(1 << 30), run={"num_steps": 8})
            runs += 1
        slow_s = trial.chance.choice((0.0, 0.01, 0.1))
        disk = WatchedDisk(partial(trial.chance.uniform, 0.0, slow_s))
        instant = Instant.drawn(trial.chance)
        with disk.installed():
            status = run.attempt(instant.stop)
        problem = "; ".join(filter(None, (f"ended with {status}" if status else "", *disk.overlaps, run.problem())))
        failures += bool(problem)
        is_complete = run.layout.summary.exists()
        print(f"stop {number}: {instant}, {instant.phase}, disk {slow_s:g} s {problem}", flush=True)
        if is_complete or problem:
            run = None
    return failures


@dataclass
class Instant:
    """When a controller is stopped, and how."""

    at_s: float  # after its start, or after the farewell of one that ends by itself has begun
    is_late: bool  # the latter
    patience_s: float  # for the step that is being trained; 0: a write is cut short where it is
    again_s: float  # between the first request and one without patience
    phase: str = "it ended before"  # of the run at that instant

    @classmethod
    def drawn(cls, chance: random.Random) -> Instant:
        is_late = chance.random() < 0.15
        at_s = chance.uniform(0.0, 0.1 if is_late else chance.choice((0.2, 1.0, 4.0)))
        return cls(at_s, is_late, chance.choice((0.0, 0.0, 0.3, math.inf)), chance.uniform(0.0, 0.5))

    def __str__(self) -> str:
        since = "its farewell" if self.is_late else "its start"
        return f"{self.at_s:.3f} s after {since}, patience {self.patience_s:.1f} s, again after {self.again_s:.3f} s"

    async def stop(self, attempted: Attempted) -> None:
        figures = attempted.controller.board.figures
        while self.is_late and not figures.is_ending:  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.at_s)
        self.phase = "closing" if attempted.is_closing else "farewell" if figures.is_ending else figures.phase
        attempted.stop._request(self.patience_s)
        await asyncio.sleep(self.again_s)
        attempted.stop._request(0.0)


def disk_errors(trial: Trial) -> int:
    """Runs on a disk that refuses now and then: an attempt that is lost is a failure.

    Every fourth trial begins a run, of which the disk refuses the beginning; every fourth is at the end of one.
    """
    failures, name, run, disk = 0, "", None, None
    for number in range(trial.num_trials):
        where = ("start", "run", "run", "end")[number % 4]
        if run is None or disk is None or where == "start":
            name = f"disk-{number}"
            disk = RefusingDisk(trial.lab.root, trial.lab.layout(name).root)
            run = trial.start(name, environment=disk.environment)
            if where == "start":  # a command that is refused at once has lost nothing
                run.wait_for_file(trial.lab.layout(name).attempts)
        if where != "start":
            _wait_for_a_step(run)
        time.sleep(4.0 * trial.chance.random())
        error = trial.chance.choice(ERRORS)
        kinds = KINDS if trial.chance.random() < 0.5 else (trial.chance.choice(KINDS),)
        if where == "end":
            run.interrupt(signal.SIGTERM)
            time.sleep(2.0 * trial.chance.random())
        began, before = time.monotonic(), disk.num_refused
        with disk.refuses(error, kinds):
            time.sleep(trial.seconds)
        went_on = run.finish(120.0) == 0 if where == "end" else _wait_for_a_step(run)
        attempts = trial.lab.layout(name).attempts.read_text().count("\n")
        is_failure = not went_on or attempts != 1
        failures += is_failure
        what = f"{errno.errorcode[error]} of {'everything' if len(kinds) > 1 else kinds[0]}"
        how = "went on" if went_on else f"ended: {run.output.strip().splitlines()[-1]}"
        figures = f"{disk.num_refused - before} calls failed, {time.monotonic() - began:.1f} s, {attempts} attempts"
        print(f"{number} {where:5} {what:24} {how}; {figures}", flush=True)
        if is_failure or where == "end":
            _put_down(run, is_failure)
            run = None
    if run is not None:
        _end(run)
    return failures


GRADE = 7  # of every completion, by the judge
SCORES = {"7": 0.25, "=": 0.5}  # of a prompt with its completion, by the reward model, if such a text is in it


def services(trial: Trial) -> int:
    """SIGKILL of a service's process, or SIGSTOP and later SIGCONT; one run all the way, stopped at the end."""
    name, failures, layout = "served", 0, trial.lab.layout("served")
    run_file = trial.lab.run_file(
        name,
        run=ENDLESS,
        data={"task": "mixed", "reference_field": "*"},
        service=[
            {"name": "teacher", "kind": "teacher", "path": _served(trial.lab, "teacher"), "replicas": 2},
            {"name": "judge", "kind": "judge", "path": _served(trial.lab, "judge", reply=f"Grade: {GRADE}")},
            {"name": "scorer", "kind": "reward", "path": _served(trial.lab, "scorer", scores=SCORES)},
        ],
        judge={"service": "judge", "cache": False},
        algorithm={"distillation_coefficient": 0.5},
        admission={"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "active_sampling": False},
        transport={"dead_after_s": 15.0},
    )
    parts = f'{{odd="{SLOW["task"]}",judge="llm_judge",scorer="reward_model"}}'
    with Run(run_file, layout, f'composite={{mixed={{tasks={parts},correct="odd"}}}}') as run:
        for number in range(trial.num_trials):
            went_on = _wait_for_a_step(run)
            time.sleep(trial.chance.choice((1.0, 6.0)) * trial.chance.random())
            victims = [each for each in run.survivors() if "--service" in each.cmdline()]
            victims = [each for each in victims if "rlhpc.roles" in each.cmdline()]
            if not victims or not went_on:
                print(f"service {number}: no step, or no service lives\n{run.story()}", flush=True)
                return failures + 1
            victim = trial.chance.choice(victims)
            words = victim.cmdline()
            who = f"{words[words.index('--service') + 1]} (service-{words[words.index('--replica') + 1]})"
            paused_s = trial.chance.choice((0.0, 0.0, 1.0, 6.0, 25.0))
            began = time.monotonic()
            with contextlib.suppress(psutil.NoSuchProcess):
                if paused_s:
                    victim.suspend()
                    time.sleep(paused_s)
                    victim.resume()
                else:
                    victim.kill()
            went_on = _wait_for_a_step(run)
            failures += not went_on
            how = f"stood still for {paused_s:g} s" if paused_s else "killed"
            next_s = time.monotonic() - began
            print(f"service {number}: {who} {how}, next step {next_s:.1f} s later, {run.status()['step']}", flush=True)
        run.interrupt(signal.SIGTERM)
        status = run.finish(300.0)
        failures += status != 0 or "attempt 1 begins" in run.output
    problem = _audited(layout) or _unserved(layout, trial.lab)
    print(problem or "every rollout has what the services say of it, and the audit is clean")
    return failures + bool(problem)


def _served(lab: Lab, name: str, **script: object) -> str:
    """Copy the lab's model for a service, with a script of its own."""
    copied = Path(shutil.copytree(lab.model, lab.root / name)) / "config.json"
    copied.write_text(json.dumps(json.loads(copied.read_text()) | {"scripted_engine": script}))
    return str(copied.parent)


def _unserved(layout: RunLayout, lab: Lab) -> str:
    """Return what a service has said wrongly, or not at all, of the rollouts of a run; "": nothing."""
    tokenizer, of_token, num = PromptTokenizer(lab.model), dict[int, float](), 0
    for resolved in read_rollouts_directory(layout.rollouts):
        for member in resolved.group.members:
            rollout, num = member.rollout, num + 1
            has_ended = rollout.finish_reason is FinishReason.STOP
            text = tokenizer.decode_completion(rollout.token_ids, has_ended=has_ended)
            whole = tokenizer.decode(resolved.group.prompt.token_ids.tolist()) + text
            score = sum(each for part, each in SCORES.items() if part in whole)
            wanted = parity(text, "").reward + GRADE / 10 + score
            if member.verdict is Verdict.VERIFIER_ERROR or abs(member.reward - wanted) > 1e-9:
                return f"{rollout.group_id}:{rollout.sample_index}: {member.verdict} {member.reward}, not {wanted}"
            if member.teacher is None or len(member.teacher.logprobs) != len(rollout.token_ids):
                return f"{rollout.group_id}:{rollout.sample_index}: without its teacher's scores"
            for token, logprob in zip(rollout.token_ids.tolist(), member.teacher.logprobs.tolist(), strict=True):
                if of_token.setdefault(token, logprob) != logprob:  # the scripted engine's table has no context
                    return f"{rollout.group_id}:{rollout.sample_index}: token {token}: {logprob}"
    print(f"{num} rollouts in segments")
    return "" if num else "no rollout"


TRIALS: dict[str, Callable[[Trial], int]] = {
    "services": services,
    "disk-errors": disk_errors,
    "orphans": orphans,
    "zombies": zombies,
    "kills": kills,
    "stops": stops,
    "controller-stops": controller_stops,
}


def _audited(layout: RunLayout) -> str:
    """Return what `rlhpc audit` objects to; "": nothing."""
    audit = audit_run(layout, Depth(is_quick=False), lambda _: None)
    return "; ".join(f"{check.name}: {offence}" for check in audit.checks for offence in check.offences)


def _put_down(run: Run, is_failure: bool) -> None:
    if is_failure:
        print(run.story(), file=sys.stderr, flush=True)
    _end(run)


def _wait_for_a_step(run: Run, *, in_another_attempt: bool = False) -> bool:
    """Wait until a step has been trained from now on; False: the run has ended, or none was trained."""
    deadline, before = Deadline(180.0), run.status()
    first = before.get("attempt")
    while run.process.poll() is None and not deadline.is_over:
        now = run.status()
        is_there = not in_another_attempt or now.get("attempt") != first
        has_gone_on = now.get("attempt") == before.get("attempt") and now.get("step", -1) > max(
            before.get("step", -1), 0
        )
        if is_there and has_gone_on:
            return True
        before = now if now.get("attempt") != before.get("attempt") else before
        time.sleep(0.05)
    return False


def _has_trained(run: Run) -> bool:
    """Whether this attempt has trained a step."""
    status = run.status()
    return bool(status) and status["phase"] == "training" and status["step"] > (status["resume_step"] or 0)


def _end(run: Run) -> str:
    """End a run at once; says what is left of it."""
    run.interrupt(signal.SIGKILL)
    try:
        run.finish(60.0)
        run.assert_nothing_is_left(within_s=20.0)
    except AssertionError as error:
        return str(error)
    return ""


def _victim(run: Run, chance: random.Random) -> tuple[str, psutil.Process]:
    """A process of the run and what it is; each kind is as likely as the others.  The launcher, if none is left."""
    kinds: dict[str, list[psutil.Process]] = {}
    for process in run.survivors():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "launch.cli" in words:
            kind = "launcher"
        elif "launch.supervisor.role_task" in words:
            kind = f"task of the {words[words.index('--role') + 1]}"
        elif "rlhpc.roles" in words:
            kind = words[words.index("rlhpc.roles") + 1]
        else:
            kind = "reward-worker" if any("rewards" in word for word in words) else "engine"
        kinds.setdefault(kind, []).append(process)
    if not kinds:
        return "launcher", psutil.Process(run.process.pid)
    kind = chance.choice(sorted(kinds))
    return kind, chance.choice(kinds[kind])


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
