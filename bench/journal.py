"""What the journal costs beside a plain write: append, durable or not, and read back with every checksum.

    python -m bench.journal [--seconds 60] [--tokens 4096] [--memory /dev/shm] [--disk DIRECTORY]

Contenders take turns, shuffled, several times in the same run, on a file system in memory and on a disk; medians are
printed beside the lowest and highest repeat.  "raw" is the denominator: for every rollout the CRC32 of its four arrays,
for every batch one writev of the same bytes and one fdatasync, in a file of its own, and nothing else.  "journal" is
JournalFiles.append of the same batches; "no sync" does not wait for the disk.  "read" is read_journals of what was
appended, from the page cache: every row and everything that it refers to is verified.

"ingest" is what a controller does with a rollout between the socket and the trainer: decode the delivery, buffer,
ledger, advantages, packing, encode the batch.  "ingest, durable" has the journal besides, as roles/controller/
journaling.py has it: a batch is committed by a thread while the next one is taken in, and the turn ends when all are on
disk.  "seal" makes a segment of what was trained, which a controller does with and without a journal, in a thread.

The CPU column, microseconds a rollout of all threads with the kernel's share, holds on a busy machine too.  Below each
table stand the aims, all of them "at least", beside what it gives: by the clock, which needs a quiet machine, and
by CPU time.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

from bench.figures import tell
from bench.intake import Intake, Shape
from rlhpc.base.native import crc32
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.history import GroupEventLog
from rlhpc.buffer.journal import JournalFiles, JournalRecord, read_journals
from rlhpc.buffer.rollout_journal import RolloutJournal
from rlhpc.buffer.segments import to_hdf5, write_sealed
from rlhpc.protocol.messages import Delivery
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, RolloutGroup, ScoredRollout, Verdict
from rlhpc.transport.codec import Codec

GROUP_SIZE, PROMPT_TOKENS, BATCH = 8, 128, 64
GROUPS_A_STEP = BATCH // GROUP_SIZE
BYTES_A_TOKEN = 13  # id, log-probability, version, mask
MOST_BYTES = 256 << 20  # of one contender's files
RAW = "raw"


@dataclass(frozen=True)
class Result:
    """Of one turn."""

    seconds: float
    cpu_s: float
    num_rollouts: int


Contender = Callable[[Path, Sequence[JournalRecord]], Result]


def records(count: int, num_tokens: int) -> list[JournalRecord]:
    rng, made = np.random.default_rng(0), []
    for index in range(count):
        group = index // GROUP_SIZE
        prompt = Prompt(group, "math", rng.integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32), "42")
        rollout = Rollout(
            group_id=group,
            sample_index=index % GROUP_SIZE,
            prompt_id=group,
            token_ids=rng.integers(0, 150_000, num_tokens, dtype=np.int32),
            behaviour_logprobs=-rng.random(num_tokens, dtype=np.float32),
            versions=np.full(num_tokens, group, np.int32),
            loss_mask=np.ones(num_tokens, np.bool_),
            finish_reason=FinishReason.STOP,
        )
        reward = float(index % 2)
        verdict = Verdict.CORRECT if reward else Verdict.WRONG
        scored = ScoredRollout(rollout, reward, verdict, {"accuracy": reward}, "42")
        made.append(JournalRecord(index + 1, scored, prompt, 0))
    return made


def group_of(members: Sequence[JournalRecord]) -> RolloutGroup:
    first = members[0]
    return RolloutGroup(first.scored.rollout.group_id, first.prompt, 0, tuple(each.scored for each in members))


class Stopwatch:
    """Time and CPU time of this process."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def stop(self, num_rollouts: int) -> Result:
        return Result(time.perf_counter() - self._began[0], time.process_time() - self._began[1], num_rollouts)


def raw(directory: Path, rollouts: Sequence[JournalRecord]) -> Result:
    directory.mkdir()
    watch = Stopwatch()
    descriptor = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT)
    for first in range(0, len(rollouts), BATCH):
        pieces = []
        for record in rollouts[first : first + BATCH]:
            rollout, crc = record.scored.rollout, 0
            for values in (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask):
                crc = crc32(values, crc)
                pieces.append(values.data)
        if os.writev(descriptor, pieces) != sum([piece.nbytes for piece in pieces]):
            raise SystemExit("a short write: the disk is full?")
        os.fdatasync(descriptor)
    os.close(descriptor)
    return watch.stop(len(rollouts))


def append(directory: Path, rollouts: Sequence[JournalRecord], batch: int = BATCH) -> Result:
    directory.mkdir()
    watch = Stopwatch()
    files = JournalFiles(directory, run_name="bench", attempt=0)
    for first in range(0, len(rollouts), batch):
        files.append(rollouts[first : first + batch])
    files.close()
    return watch.stop(len(rollouts))


def append_one_at_a_time(directory: Path, rollouts: Sequence[JournalRecord]) -> Result:
    return append(directory, rollouts[: max(BATCH, len(rollouts) // 8)], batch=1)  # a sync each: an eighth will do


def append_without_sync(directory: Path, rollouts: Sequence[JournalRecord]) -> Result:
    with mock.patch.object(os, "fdatasync"), mock.patch.object(os, "fsync"):
        return append(directory, rollouts)


def read(directory: Path, rollouts: Sequence[JournalRecord]) -> Result:
    append(directory, rollouts)
    watch, seen = Stopwatch(), 0
    for content in read_journals(directory):
        seen += len(content.records)
    result = watch.stop(len(rollouts))
    if seen != len(rollouts):
        raise SystemExit(f"{seen} rollouts were read, {len(rollouts)} were written")
    return result


def ingest(directory: Path, rollouts: Sequence[JournalRecord], *, is_durable: bool = False) -> Result:
    directory.mkdir()
    codec = Codec([Delivery])
    frames = [codec.encode(Delivery(each.sequence, 1, "outbox", 0, 0, each.scored), 0) for each in rollouts]
    prompts = [each.prompt for each in rollouts[::GROUP_SIZE]]
    journal = None
    if is_durable:
        journal = RolloutJournal(JournalFiles(directory, run_name="bench", attempt=0), GroupEventLog(directory, 0), 0)
    shape = Shape(GROUP_SIZE, GROUPS_A_STEP, PROMPT_TOKENS, len(rollouts[0].scored.rollout.token_ids))
    intake = Intake(directory, shape, journal)
    watch = Stopwatch()
    with ThreadPoolExecutor(1) as thread:
        commits = []
        for step, first in enumerate(range(0, len(frames), BATCH)):
            intake.take_in(prompts[step * GROUPS_A_STEP :][:GROUPS_A_STEP], frames[first : first + BATCH])
            if journal is not None:
                commits.append(thread.submit(journal.commit))
        if journal is not None and max(commit.result() for commit in commits) != len(rollouts):
            raise SystemExit("rollouts are missing in the journal")
    return watch.stop(len(rollouts))


def ingest_durable(directory: Path, rollouts: Sequence[JournalRecord]) -> Result:
    return ingest(directory, rollouts, is_durable=True)


def seal(directory: Path, rollouts: Sequence[JournalRecord]) -> Result:
    directory.mkdir()
    members = rollouts[: 4 * BATCH]  # takes long: these will do
    watch = Stopwatch()
    for first in range(0, len(members), BATCH):
        groups = [group_of(members[at : at + GROUP_SIZE]) for at in range(first, first + BATCH, GROUP_SIZE)]
        resolved = [ResolvedGroup(group, consumed_step=0, trained_version=0, applied=True) for group in groups]
        write_sealed(directory / f"segment_{first:06d}.h5", to_hdf5(resolved, {}))
    return watch.stop(len(members))


CONTENDERS: Mapping[str, Contender] = {
    RAW: raw,
    "journal": append,
    "journal, no sync": append_without_sync,
    "journal, one by one": append_one_at_a_time,
    "read": read,
    "ingest": ingest,
    "ingest, durable": ingest_durable,
    "seal": seal,
}


@contextmanager
def scratch(place: str) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="journal-bench-", dir=place))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def measure(place: str, rollouts: Sequence[JournalRecord], seconds: float) -> dict[str, list[Result]]:
    """Rounds of all contenders until the time is over, three at least; files are deleted outside the clock."""
    results: dict[str, list[Result]] = {name: [] for name in CONTENDERS}
    shuffle, ends = random.Random(0), time.monotonic() + seconds
    with scratch(place) as directory:
        while len(results[RAW]) < 3 or time.monotonic() < ends:
            for name in shuffle.sample(list(CONTENDERS), len(CONTENDERS)):
                results[name].append(CONTENDERS[name](directory / "turn", rollouts))
                shutil.rmtree(directory / "turn")
    return results


def print_table(place: str, results: Mapping[str, list[Result]], num_tokens: int) -> None:
    def megabytes_per_second(result: Result) -> float:
        return result.num_rollouts * num_tokens * BYTES_A_TOKEN / result.seconds / 1e6

    def cpu_us(name: str) -> float:
        return statistics.median(result.cpu_s / result.num_rollouts for result in results[name]) * 1e6

    print(f"\n{place}, {len(results[RAW])} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{'':20}{'MB/s':>8}{'(min–max)':>16}{'/ raw':>8}{'CPU µs a rollout':>18}{'/ raw':>8}")
    raw_speed = statistics.median(map(megabytes_per_second, results[RAW]))
    for name, turns in results.items():
        speeds = [megabytes_per_second(turn) for turn in turns]
        median, spread = statistics.median(speeds), f"({min(speeds):,.0f}–{max(speeds):,.0f})"
        ratios = f"{median / raw_speed:>8.2f}{cpu_us(name):>18.1f}{cpu_us(RAW) / cpu_us(name):>8.2f}"
        print(f"{name:20}{median:>8,.0f}{spread:>16}{ratios}")


@dataclass(frozen=True)
class Aim:
    """What is to hold of the medians of one place."""

    name: str
    least: float
    value: float
    by_cpu: float  # the same of CPU time: holds on a busy machine too

    def __str__(self) -> str:
        missed = "" if self.value >= self.least else "MISSED"
        return f"{self.name:52}{self.least:>8.2f}{self.value:>8.2f}{self.by_cpu:>8.2f}  {missed}".rstrip()


def aims(results: Mapping[str, list[Result]], num_tokens: int) -> list[Aim]:
    def seconds(name: str) -> float:
        return statistics.median(turn.seconds / turn.num_rollouts for turn in results[name])

    def cpu_s(name: str) -> float:
        return statistics.median(turn.cpu_s / turn.num_rollouts for turn in results[name])

    def ratio(slower: str, faster: str) -> tuple[float, float]:
        return seconds(faster) / seconds(slower), cpu_s(faster) / cpu_s(slower)

    gigabytes = num_tokens * BYTES_A_TOKEN / 1e9
    cpu = (cpu_s("ingest") + cpu_s("seal")) / (cpu_s("ingest, durable") + cpu_s("seal"))
    return [
        Aim("append over raw write + CRC", 0.85, *ratio("journal", RAW)),
        Aim("ingest, durable over not", 0.80, *ratio("ingest, durable", "ingest")),
        Aim("replay read, GB/s", 1.0, gigabytes / seconds("read"), gigabytes / cpu_s("read")),
        Aim("controller CPU a rollout, without a journal over with", 1 / 1.3, cpu, cpu),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for both tables, about")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--memory", default="/dev/shm", help="a directory of a file system in memory")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a directory of a disk")
    options = parser.parse_args()
    count = max(2 * BATCH, min(2048, MOST_BYTES // (options.tokens * BYTES_A_TOKEN)) // BATCH * BATCH)
    rollouts = records(count, options.tokens)
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs; Python {platform.python_version()}, numpy {np.__version__}; "
        f"{count} rollouts of {options.tokens} tokens, {GROUP_SIZE} a group, {BATCH} a batch; seed 0"
    )
    for place in (options.memory, options.disk):
        results = measure(place, rollouts, options.seconds / 2)
        print_table(place, results, options.tokens)
        print(f"\n{'':52}{'aim':>8}{'is':>8}{'by CPU':>8}")
        append_over_raw, durable, replay, _ = found = aims(results, options.tokens)
        print("\n".join(map(str, found)))
        if place == options.memory:
            tell("append over raw", append_over_raw.value)
            tell("replay GB/s", replay.value)
        else:
            tell("durable ingest over not", durable.value)


if __name__ == "__main__":
    main()
