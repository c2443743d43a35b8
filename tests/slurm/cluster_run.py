"""Runs on a dev cluster, as a user starts them: a run file, a site file, `rlhpc submit`.

Input: a cluster and a lab (model and dataset).  Output: SlurmRun, which looks at a run from outside and fails with all
that its supervisors and roles have said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.private_slurm.cluster import DevCluster
from tests.ring.ring_rewards import GATE
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import ROOT, Lab, command_environment, summary_of, to_toml, trace_of, wait_while_it_moves

# Sections of a run that is not over in a moment: every step takes its rewards' time.
LASTING = {"data": {"task": "tests.ring.ring_rewards:slow_parity"}}
# Of one that does not end before the test stops it, however fast the machine: for what is done to it on its way.
ENDLESS = {"num_steps": 100_000}


def short_limit() -> str:
    """The shortest time limit that Slurm has, or one that outlasts a start here: at a load of 80 that takes 45 s."""
    return f"0:{1 + int(os.getloadavg()[0] // 30):02}:00"


def held_by(gate: Path) -> dict[str, dict[str, Any]]:
    """Sections of a run that makes no step before that file is there."""
    return {
        "data": {"task": "tests.ring.ring_rewards:gated_parity"},
        "rewards": {"timeout_s": 600.0},
        "site": {"prologue": {"commands": [f"export {GATE}={gate}"]}},
    }


def environment_on(cluster: DevCluster) -> dict[str, str]:
    """The environment of a command on this cluster that finds the rewards of the tests."""
    ours = command_environment()
    return {**cluster.environment(), **{name: ours[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}}


class SlurmRun:
    """One run on one cluster."""

    def __init__(self, cluster: DevCluster, lab: Lab, name: str, placement: str = "hetjob", **sections: Any) -> None:
        """sections: laid over the quick run of tests/ring/run_kit.py; `site` holds sections of the site file."""
        self.cluster, self.lab, self.layout = cluster, lab, lab.layout(name)
        site = sections.pop("site", {})
        self.run_file = lab.run_file(name, **sections)
        self.site_file = lab.root / f"{name}.site.toml"
        self.site_file.write_text(to_toml(site_settings(lab, placement, site)), encoding="utf-8")
        self.submitted_at = 0.0

    def submit(self, *words: str) -> str:
        """`rlhpc submit`; returns what it printed."""
        self.submitted_at = time.time()
        return self.cli("submit", str(self.run_file), str(self.site_file), *words)

    def cli(self, *words: str, status: int = 0, timeout_s: float = 180.0, cwd: Path | None = None) -> str:
        """Any rlhpc command, on this cluster; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=cwd or self.lab.root,
            env=environment_on(self.cluster),
        )
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.story()}"
        return done.stdout + done.stderr

    # -------------------------------------------------------------------------------------------------------- looking

    @property
    def jobs(self) -> dict[str, int]:
        """Job ids by name, the newest of each."""
        records = [json.loads(path.read_bytes()) for path in self.layout.jobs.glob("[0-9]*.json")]
        return {record["name"]: record["job_id"] for record in sorted(records, key=lambda record: record["job_id"])}

    def status(self) -> dict[str, Any]:
        """status.json, {} while there is none."""
        try:
            document: dict[str, Any] = json.loads(self.layout.status.read_bytes())
        except FileNotFoundError:
            return {}
        return document

    def events(self, word: str | None = None) -> list[dict[str, Any]]:
        """Events of all supervisors in the order of time; those of one word."""
        lines = [line for path in self.layout.jobs.glob("*.events.jsonl") for line in path.read_text().splitlines()]
        found = sorted((json.loads(line) for line in lines), key=lambda event: event["unix_time_s"])
        return [event for event in found if word in (None, event["event"])]

    def attempts(self) -> list[dict[str, Any]]:
        """One for every start: attempts.jsonl."""
        return [json.loads(line) for line in self.layout.attempts.read_text().splitlines()]

    def wait(self, is_so: Callable[[], Any], what: str) -> Any:
        """Wait until it is so and return what it said; in vain once nothing of run and cluster moves any more."""
        found: Any = None

        def is_there() -> Any:
            nonlocal found
            found = is_so()
            return found

        wait_while_it_moves(is_there, self._trace, what, self.story)
        return found

    def wait_step(self, step: int) -> float:
        """Wait until so many steps are done; returns the seconds since submission."""
        self.wait(lambda: self.status().get("step", 0) >= step, f"step {step}")
        return time.time() - self.submitted_at

    def wait_attempt(self, attempt: int, step: int = 0) -> None:
        """Wait until the controller of this attempt, or of a later one, runs and has done so many steps.

        A later one, since Slurm may say only after the next attempt has begun that a component or a node is gone.
        """

        def is_there() -> bool:
            status = self.status()
            return bool(status.get("attempt", -1) >= attempt and status["step"] >= step)

        self.wait(is_there, f"attempt {attempt}, step {step}")

    def wait_more_steps(self, num_steps: int = 2) -> None:
        """Wait until an attempt has done so many more steps than it has now."""

        def seen() -> tuple[int, int]:
            status = self.status()
            return status.get("attempt", -1), status.get("step", 0)

        attempt, step = seen()

        def is_further() -> bool:
            nonlocal attempt, step
            now = seen()
            if now[0] != attempt:  # it begins at the last checkpoint
                attempt, step = now
            return now[0] >= 0 and now[1] >= step + num_steps

        self.wait(is_further, "training goes on")

    def wait_complete(self) -> float:
        """Wait until the run is complete and none of its jobs is left; returns the seconds that it took."""
        began = time.monotonic()
        self.wait(self.layout.summary.exists, "complete")
        self.wait(lambda: not self.queue(), "no job left")
        return time.monotonic() - began

    def stop(self) -> int:
        """`rlhpc stop`: saved, no job left, full batches up to there, nothing trained twice; returns the step."""
        self.cli("stop", str(self.layout.root), timeout_s=300.0)
        self.wait(lambda: not self.queue(), "no job left")
        assert self.status()["phase"] == "stopped", self.story()
        step: int = self.status()["step"]
        assert_full_batches_trained_once(self.layout.rollouts, step, groups_per_step=4, group_size=4)
        return step

    def _trace(self) -> tuple[object, ...]:
        """Whatever moves while something still happens."""
        slurm = (self.queue(), self.cluster.node_states()) if self.cluster.is_reachable() else ()
        return *trace_of(self.layout, self.status()), len(self.events()), slurm

    def queue(self) -> dict[str, str]:
        """State by job, task or component, of those of this run that are in the queue."""
        out = self.cluster.run("squeue", "--noheader", "--format=%i|%T|%F|%A")
        rows = [line.strip().split("|") for line in out.splitlines() if line.strip()]
        own = {str(number) for number in self.jobs.values()}
        return {shown: state for shown, state, array, number in rows if own & {shown.partition("+")[0], array, number}}

    def story(self) -> str:
        """What was said: for the message of a failed test."""
        said = [
            f"{e['unix_time_s']:.1f} {e['restart']} {e['attempt']} {e['event']}: {e['text']}" for e in self.events()
        ]
        logs = sorted([*self.layout.logs.rglob("*.log"), *self.layout.evaluations.rglob("*.log")])
        tails = [f"--- {log.parent.name}/{log.name}\n{_tail(log)}" for log in logs]
        return "\n".join([*said, self.cluster.run("squeue", "--states=all", check=False), *tails])


def site_settings(lab: Lab, placement: str, over: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A site file for the dev cluster's default shape, with `over` laid over it."""
    settings: dict[str, dict[str, Any]] = {
        "cluster": {"name": "dev", "shared_directory": str(lab.root), "placement": placement},
        "common": {"time": "0:30:00"},
        "controller": {"partition": "cpu", "memory_gib_per_task": 1},
        "trainer": {"partition": "train", "gpu": "h100", "gpus_per_node": 4, "memory_gib_per_gpu": 1},
        "generation": {"partition": "gen", "gpu": "h100", "gpus_per_node": 4, "memory_gib_per_gpu": 1},
        "prologue": {"python": sys.executable, "code": str(ROOT)},
    }
    for section, values in over.items():
        settings[section] = {**settings.get(section, {}), **values}
    return settings


def assert_whole(run: SlurmRun, num_steps: int) -> None:
    """Complete; every step had a full batch and nothing was trained twice."""
    assert summary_of(run.layout)["steps"] == num_steps, run.story()
    assert_full_batches_trained_once(run.layout.rollouts, num_steps, groups_per_step=4, group_size=4)


def trained_in_vain(run: SlurmRun) -> int:
    """Rollouts that were trained on in steps that a later attempt did again.

    What was set aside without having been trained on (groups that came after the last checkpoint) is no loss.
    """
    return sum(len(consumed(directory)) for directory in run.layout.rollouts.glob("lost_attempt_*"))


def role_pids(run: SlurmRun, role: str) -> list[int]:
    """Pids of the run's processes of a role."""
    found = []
    for process in run.cluster.job_processes():
        with suppress(OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8").split("\0")
            if "rlhpc.roles" in words and role in words and str(run.layout.root) in words:
                found.append(process.pid)
    return sorted(found)


def _tail(log: Path, num_lines: int = 25) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
