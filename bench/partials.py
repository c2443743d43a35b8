"""What reports of running rollouts cost: bytes, and processor time of generator and controller.

    python -m bench.partials [--rollouts 128] [--tokens 2048] [--repeats 5]

First table: one report of so many tokens of each rollout, as a generator encodes it, as the controller takes it in, and
as it writes it.  Token ids follow Zipf's law over 150,000, log-probabilities are those of a policy that is sure of two
tokens in three: what they are deflated to depends on that.  Second table: the scripted engine with and without reports,
in turn, in the same process; the ratio is of tokens per second of processor time, which holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.prefixes import (
    PartialIntake,
    PartialLog,
    PartialRollout,
    decode_partials,
    encode_partials,
    id_checksum,
)
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.config.tables import AdmissionConfig, BufferConfig
from rlhpc.protocol.types import Prefix, Prompt, RolloutRequest, SamplingParams
from rlhpc.roles.generator.sampling import ProgressReporter
from tests.engines.scripted_engine import Script, ScriptedEngine

VOCABULARY = 150_000
INTERVAL_TOKENS = BufferConfig().partial_interval_tokens
RAW_BYTES = 12  # id, log-probability, version
MAX_TOKENS = 1 << 20


def sampled(rng: np.random.Generator, count: int) -> Prefix:
    ids = np.random.default_rng(0).permutation(VOCABULARY).astype(np.int32)
    is_sure = rng.random(count) < 2 / 3
    logprobs = -np.where(is_sure, rng.exponential(0.02, count), rng.exponential(1.5, count)).astype(np.float32)
    return Prefix(ids[np.minimum(rng.zipf(1.25, count), VOCABULARY) - 1], logprobs, np.zeros(count, np.int32))


def reports(num_rollouts: int, count: int) -> list[list[PartialRollout]]:
    """So many, one after the other, of all rollouts."""
    rng = np.random.default_rng(1)
    drafts = [sampled(rng, count * INTERVAL_TOKENS) for _ in range(num_rollouts)]
    return [
        [
            PartialRollout(
                member,
                0,
                member,
                start,
                id_checksum(draft.token_ids[:start]),
                Prefix(*(a[start:end] for a in of(draft))),
            )
            for member, draft in enumerate(drafts)
        ]
        for start, end in ((i * INTERVAL_TOKENS, (i + 1) * INTERVAL_TOKENS) for i in range(count))
    ]


def of(draft: Prefix) -> tuple[np.ndarray, ...]:
    return draft.token_ids, draft.behaviour_logprobs, draft.versions


def buffer_of(num_rollouts: int, directory: Path) -> RolloutBuffer:
    ledger = AdmissionLedger(
        num_slots=num_rollouts,
        window_groups=1,
        groups_per_step=1,
        group_size=1,
        sampling=lambda _: SamplingParams(max_tokens=MAX_TOKENS),
        lease_deadline_s=600.0,
        max_attempts=5,
        clock=time.monotonic,
    )
    segments = SegmentWriter(
        directory, 0, run_name="bench", run_attempt=0, max_groups=1000, max_s=1e9, clock=time.monotonic
    )
    buffer = RolloutBuffer(ledger, segments)
    for member in range(num_rollouts):
        buffer.admit(Prompt(member, "any", np.zeros(1, np.int32), ""), 0)
        buffer.ledger.grant("generator-0", 1)
    return buffer


def cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def cost_of_reports(num_rollouts: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        intake = PartialIntake(buffer_of(num_rollouts, Path(directory)).ledger, MAX_TOKENS)
        log, rows = PartialLog(Path(directory), 0), list[tuple[int, float, float, float]]()
        log.begin([])
        for pieces in reports(num_rollouts, repeats):
            encoded: list[tuple[bytes, int]] = []
            encode_s = cpu_s(lambda: encoded.append(encode_partials(pieces)))  # noqa: B023  called at once
            take_in_s = cpu_s(lambda: intake.receive("generator-0", decode_partials(*encoded[0]), 0))  # noqa: B023
            write_s = cpu_s(lambda: log.append(pieces))  # noqa: B023
            rows.append((len(encoded[0][0]), encode_s, take_in_s, write_s))
    num_tokens = num_rollouts * INTERVAL_TOKENS
    num_bytes, encode_s, take_in_s, write_s = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"a report of {num_rollouts} rollouts with {INTERVAL_TOKENS} new tokens each, medians of {repeats}")
    print(f"  bytes a token                  {num_bytes / num_tokens:6.2f}   of {RAW_BYTES}")
    for what, seconds in (
        ("generator", encode_s),
        ("controller, received", take_in_s),
        ("its thread, on disk", write_s),
    ):
        a_token = seconds / num_tokens * 1e9
        print(f"  {what:22} CPU {1e3 * seconds:7.2f} ms   {a_token:6.0f} µs per 1,000 tokens")


async def throughput(num_rollouts: int, num_tokens: int, *, has_reports: bool) -> tuple[float, int, int]:
    """(tokens per second of processor time, reports, their bytes)."""
    engine = ScriptedEngine(Script(stop_probability=1e-12, max_num_seqs=num_rollouts))
    reporter = ProgressReporter(
        engine, AdmissionConfig(groups_per_step=1, group_size=1), BufferConfig(), time.monotonic
    )
    prompt = Prompt(0, "any", np.zeros(1, np.int32), "")
    requests = [RolloutRequest(m, 0, prompt, SamplingParams(max_tokens=num_tokens)) for m in range(num_rollouts)]
    num_reports = num_bytes = 0

    async def report() -> None:
        nonlocal num_reports, num_bytes
        while True:
            await asyncio.sleep(reporter.look_s)
            if (message := reporter.report(requests, 0)) is not None:
                num_reports, num_bytes = num_reports + 1, num_bytes + len(message.pieces)

    reporting = asyncio.create_task(report()) if has_reports else None
    began = time.process_time()
    await asyncio.gather(*map(engine.generate, requests))
    took_s = time.process_time() - began
    if reporting is not None:
        reporting.cancel()
    return num_rollouts * num_tokens / took_s, num_reports, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cost_of_reports(options.rollouts, options.repeats)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(options.repeats):
        for has_reports in ((False, True), (True, False))[repeat % 2]:
            rate, num_reports, num_bytes = asyncio.run(
                throughput(options.rollouts, options.tokens, has_reports=has_reports)
            )
            rates[has_reports].append(rate)
            if has_reports:
                sent = f"{num_reports} reports, {num_bytes / (options.rollouts * options.tokens):.2f} bytes a token"
    without, with_reports = (statistics.median(rates[each]) for each in (False, True))
    print(
        f"scripted engine, {options.rollouts} rollouts of {options.tokens} tokens, medians of {options.repeats} pairs"
    )
    print(f"  without reports {without:8.0f} tokens/CPU s")
    print(f"  with reports    {with_reports:8.0f} tokens/CPU s   {sent}")
    print(f"  ratio           {with_reports / without:8.3f}")


if __name__ == "__main__":
    main()
