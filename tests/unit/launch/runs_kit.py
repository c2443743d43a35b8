"""Run directories of every standing, made by the code that makes them in earnest; and a squeue that prints a record.

What it prints was recorded from Slurm 22.05, 24.11 and 26.05, which print the same: `record` fills ids, states and
directories in.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from launch.run_directory.begin_attempt import begin_attempt
from launch.run_directory.prepare import AttemptStart, note_attempt, prepare_run_dir_for_jobs
from launch.run_files.records import JobRecord, write_job_record
from launch.run_files.run_state import EventLog
from rlhpc.base.files import write_atomically
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.protocol.types import SamplingParams
from rlhpc.roles.controller.dispatcher import ProcessRegistry
from rlhpc.roles.controller.run_status import StatusBoard
from tests.unit.launch.site_kit import config_of


class Runs:
    """Run directories below one, and the commands of Slurm before the system's own."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root / "runs", root / "bin"
        self.root.mkdir()
        self.bin.mkdir()
        self._lines: list[str] = []
        self._answer()

    def prepare(self, name: str, *overrides: str) -> RunLayout:
        """A run of 100 steps that nobody has started."""
        config = config_of(f"run.name={name}", f"run.directory={self.root / name}", "run.num_steps=100", *overrides)
        prepare_run_dir_for_jobs(config, RunLayout(config.run_directory), resume=False, fresh=False)
        return RunLayout(config.run_directory)

    def local(self, name: str) -> RunLayout:
        """A run of this machine whose first attempt has begun, and whose launcher is gone."""
        layout = self.prepare(name)
        note_attempt(layout, AttemptStart(0, None))
        return layout

    def submitted(self, name: str, job_id: int, begun: bool = True) -> RunLayout:
        """A run that was submitted as one job; begun: its first attempt has."""
        layout = self.prepare(name)
        self.job(layout, job_id, "hetjob")
        if begun:
            begin_attempt(layout, job_id=job_id, restart=0)
        return layout

    def job(self, layout: RunLayout, job_id: int, name: str, **more: Any) -> None:
        """Record a job."""
        known = {"placement": "hetjob", "array_size": None, "plan": "", "script": "", "is_elastic": False}
        known |= {"first_replica": 0, "replicas_per_task": 1, "partition": None, "submitted_unix_s": time.time()}
        write_job_record(layout, JobRecord(job_id=job_id, name=name, **(known | more)))

    def status(self, layout: RunLayout, phase: str, step: int, ago_s: float = 0.0, reward: float = 0.5) -> None:
        """What a controller wrote `ago_s` ago."""
        config = config_of(f"run.name={layout.root.name}", f"run.directory={layout.root}", "run.num_steps=100")
        ledger = AdmissionLedger(
            num_slots=4, window_groups=2, groups_per_step=2, group_size=2, sampling=lambda _: SamplingParams(16),
            lease_deadline_s=60.0, max_attempts=3, clock=time.monotonic,
        )  # fmt: skip
        board = StatusBoard(layout, config, ProcessRegistry("", 15.0, time.monotonic), ledger)
        board.figures.phase, board.figures.step, board.figures.reward = phase, step, reward
        write_atomically(layout.status, board.document())
        age(layout.status, ago_s)

    def verdict(self, layout: RunLayout, job_id: int, text: str) -> None:
        """A life of the job with the controller, and what it came to ("": it has not)."""
        log = EventLog(layout.job_events(str(job_id)), 0)
        log.say("life", "job runs")
        if text:
            log.say("verdict", text)
            log.say("cancel", "cancelling the run's other jobs: 13")

    def queue(self, layout: RunLayout, job: str, state: str, *, reason: str = "None", nodes: str = "",
              name: str = "hetjob", partition: str = "cpu") -> None:  # fmt: skip
        """One more line of squeue's, of a job of this run."""
        log = layout.log("slurm", 0, 0).parents[1] / "slurm" / f"{name}-%j.log"
        job_name = layout.root.name + ("" if name == "hetjob" else f".{name}")
        self.line(job, state, str(log), reason=reason, nodes=nodes, name=job_name, partition=partition)

    def line(self, job: str, state: str, log: str, *, reason: str = "None", nodes: str = "", name: str = "x",
             partition: str = "cpu") -> None:  # fmt: skip
        """One more line of squeue's."""
        used, start = ("0:04", "2026-11-22T01:16:53") if nodes else ("0:00", "N/A")
        cells = (log, job, state, "0", reason, partition, used, "4:56", "5:00", start, nodes, name)
        widths = (1024, 80, 20, 9, 200, 100, 20, 20, 20, 24, 400, 100)
        self._lines.append("".join(f"{cell:<{width}}|" for cell, width in zip(cells, widths, strict=True)))
        self._answer()

    def script(self, text: str) -> None:
        """What stands in squeue's place."""
        (self.bin / "squeue").write_text(f'#!/bin/sh\necho "$*" >> {self.bin}/calls\n{text}\n')
        (self.bin / "squeue").chmod(0o755)

    def calls(self) -> list[str]:
        """How squeue was called."""
        path = self.bin / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def _answer(self) -> None:
        (self.bin / "answer").write_text("\n".join([*self._lines, ""]))
        self.script(f"cat {self.bin}/answer")


def age(path: Path, seconds: float) -> None:
    """Make a file look as old as that."""
    import os

    moment = time.time() - seconds
    os.utime(path, (moment, moment))
