"""Run directories of every standing, made by the code that makes them; launchers, texts, and a recorded squeue."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from launch.run_directory.begin_attempt import begin_attempt
from launch.run_directory.prepare import AttemptStart, note_attempt, prepare_run_dir_for_jobs
from launch.run_files.records import JobRecord, write_job_record
from launch.run_files.run_state import EventLog
from rlhpc.base.files import write_atomically
from rlhpc.base.processes import ProcessIdentity
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.config.file import write_resolved
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams, ScoredRollout, Verdict
from rlhpc.roles.controller.leases import ProcessRegistry
from rlhpc.roles.controller.run_status import StatusBoard
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.launch.site_kit import config_of

# -------------------- Run directories of every standing, made by the code that makes them in earnest; and a squeue that


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


# ------------------------------------ Launchers of runs, as files and processes: one that lives, one of another machine


@contextmanager
def living_launcher(layout: RunLayout) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that stands in launcher.json."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    layout.launcher.write_text(json.dumps(identity.to_json()))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def launcher_elsewhere(layout: RunLayout) -> None:
    """Write the name of a launcher on another machine."""
    record = {"host": "another-host", "boot_id": "of another machine", "pid": 1, "start_ticks": 1}
    layout.launcher.write_text(json.dumps(record))


@contextmanager
def controller_elsewhere(layout: RunLayout) -> Iterator[None]:
    """launcher_elsewhere, and a status.json that is written again and again."""
    launcher_elsewhere(layout)
    over = threading.Event()

    def write() -> None:
        while not over.wait(0.05):
            layout.status.write_text("{}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


# ----------------------- Run directories with texts in them: a byte-level tokenizer beside them, and groups that a test

EOS = "<eos>"


def make_tokenizer(model_dir: Path) -> Tokenizer:
    """Bytes are tokens, as in the tokenizers of most models, and one token ends."""
    model_dir.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return tokenizer


class TextRun:
    """A run whose groups say what a test wants."""

    def __init__(self, root: Path, *overrides: str) -> None:
        root.mkdir()
        self.model = root / "model"
        self.tokenizer = make_tokenizer(self.model)
        self.layout = RunLayout(root / "run")
        for directory in (self.layout.root, self.layout.rollouts):
            directory.mkdir()
        words = (f"run.directory={self.layout.root}", f"model.path={self.model}", "admission.group_size=2")
        self.config = config_of(*words, "admission.groups_per_step=2", "trainer.warmup_steps=0", *overrides)
        write_resolved(self.config, self.layout, "")
        self._num_groups = self._num_segments = 0

    def tokens(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text).ids, np.int32)

    def group(
        self, prompt: str, completions: Sequence[tuple[str, float]], *, step: int = -1, task: str = "adding"
    ) -> ResolvedGroup:
        """Of completions with their rewards; a negative reward is a failed verifier.  step −1: dropped."""
        number, self._num_groups = self._num_groups, self._num_groups + 1
        asked = Prompt(number, task, self.tokens(prompt), "#### 7")
        members = [self._scored(number, index, number, *each) for index, each in enumerate(completions)]
        group = RolloutGroup(number, asked, max(0, step - 1), tuple(members))
        if step < 0:
            return ResolvedGroup(group, drop_reason=DropReason.ZERO_VARIANCE)
        return ResolvedGroup(group, step, trained_version=step, applied=True)

    def _scored(self, group_id: int, index: int, prompt_id: int, text: str, reward: float) -> ScoredRollout:
        token_ids = self.tokens(text + EOS)
        verdict = Verdict.VERIFIER_ERROR if reward < 0 else Verdict.CORRECT if reward > 0.5 else Verdict.WRONG
        rollout = Rollout(
            group_id,
            index,
            prompt_id,
            token_ids,
            -np.linspace(0, 2, len(token_ids), dtype=np.float32),
            np.sort(np.arange(len(token_ids), dtype=np.int32) % 3),
            np.ones(len(token_ids), np.bool_),
            FinishReason.STOP,
        )
        return ScoredRollout(rollout, reward, verdict, {"answer": reward}, f"extracted {index}")

    def seal(self, groups: Iterable[ResolvedGroup]) -> None:
        """Into one segment more."""
        writer = SegmentWriter(
            self.layout.rollouts,
            self._num_segments,
            run_name="seen",
            run_attempt=0,
            max_groups=1_000_000,
            max_s=60.0,
            clock=ManualClock(),
        )
        for resolved in groups:
            writer.add(resolved)
        writer.seal_all()
        self._num_segments = writer.next_index
