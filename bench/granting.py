"""What a lease costs the controller as generators grow in number, and what memory a million groups leave behind.

    python -m bench.granting [--leases 20000] [--groups 0]

Granting: the real dispatcher, ledger and buffer over channels in memory.  Each generator holds 16 samples; in each turn
a sample of one generator arrives, the dispatcher is woken, and leases another one.  CPU time, turn about between the
numbers of generators, so that what else the machine does hits them alike.

Memory: so many groups (--groups, a million takes minutes) pass through the ledger and the dispatcher, 2,000 a second of
its clock, with a lease deadline of ten minutes: bytes that Python has allocated after each tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Set
from pathlib import Path

import numpy as np

from bench.figures import tell
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.protocol.types import Lease, Prompt, SamplingParams
from rlhpc.roles.controller.leases import LeaseDispatcher

CAPACITY, GROUP_SIZE = 16, 8
GROUPS_A_SECOND, DEADLINE_S = 2000, 600.0


class Leases:
    """Takes leases and forgets them."""

    def __init__(self) -> None:
        self.last: Lease | None = None
        self.num_sent = 0

    async def send(self, peer: str, message: object) -> None:
        assert isinstance(message, Lease)
        self.last, self.num_sent = message, self.num_sent + 1


class Prompts:
    """Prompts without end."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def draw(self, live_version: int) -> Prompt:
        self.num_drawn += 1
        return Prompt(self.num_drawn, "any", np.arange(8, dtype=np.int32), "42")

    def num_rollouts(self, prompt_id: int) -> int:
        return 0


class Generators:
    """So many, all ready."""

    def __init__(self, number: int) -> None:
        self.live_version = 0
        self.ready_members: Set[str] = frozenset(f"generator-{index}" for index in range(number))

    def is_ready(self, name: str) -> bool:
        return name in self.ready_members

    def capacity(self, name: str) -> int:
        return CAPACITY


class Exchange:
    """A dispatcher with its generators."""

    def __init__(self, num_generators: int, directory: Path) -> None:
        self.now_s = 0.0
        self.names = [f"generator-{index}" for index in range(num_generators)]
        num_slots = 4 * num_generators * CAPACITY
        self.ledger = AdmissionLedger(
            num_slots=num_slots, window_groups=1, groups_per_step=num_slots, group_size=GROUP_SIZE,
            sampling=lambda _: SamplingParams(16), lease_deadline_s=DEADLINE_S, max_attempts=5,
            clock=lambda: self.now_s,
        )  # fmt: skip
        segments = SegmentWriter(
            directory, 0, run_name="bench", run_attempt=0, max_groups=1 << 30, max_s=1e9, clock=lambda: 0.0
        )
        buffer, self.generators, self.leases = (
            RolloutBuffer(self.ledger, segments),
            Generators(num_generators),
            Leases(),
        )
        self.dispatcher = LeaseDispatcher(self.leases, buffer, Prompts(), self.generators, self.generators)  # type: ignore[arg-type]
        self.held: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}

    async def fill(self) -> None:
        """Grant until every generator is full."""
        await self.dispatcher._grant()
        for name, keys in self.ledger._held.items():
            self.held[name] = list(keys)

    async def turn(self, name: str) -> float:
        """A sample of this generator arrives and another is leased; returns the CPU seconds of the second."""
        group_id, index = self.held[name].pop(0)
        self.ledger.deliver(group_id, index)
        if self.ledger.group(group_id).is_finished:
            self.ledger.drop(group_id, DropReason.ZERO_VARIANCE)
        began_s = time.process_time()
        self.dispatcher.wake(name)
        await self.dispatcher._grant()
        spent_s = time.process_time() - began_s
        lease = self.leases.last
        assert lease is not None
        self.held[name] += [(lease.group_id, i) for i in lease.sample_indices]
        return spent_s


async def granting(num_leases: int, numbers: tuple[int, ...] = (8, 64, 512, 4096)) -> dict[int, float]:
    """CPU microseconds of a wake that grants a lease, by the number of generators."""
    with tempfile.TemporaryDirectory() as directory:
        exchanges = {number: Exchange(number, Path(directory)) for number in numbers}
        spent_s = dict.fromkeys(numbers, 0.0)
        for exchange in exchanges.values():
            await exchange.fill()
        gc.disable()
        for turn in range(num_leases):
            for number, exchange in exchanges.items():
                spent_s[number] += await exchange.turn(exchange.names[turn * 7 % number])
        gc.enable()
    return {number: 1e6 * seconds / num_leases for number, seconds in spent_s.items()}


async def memory(num_groups: int, num_generators: int = 64) -> list[int]:
    """Blocks of memory that Python has allocated after each tenth of the groups."""
    with tempfile.TemporaryDirectory() as directory:
        exchange = Exchange(num_generators, Path(directory))
        await exchange.fill()
        found, num_dropped, turn = list[int](), exchange.ledger.counts()["dropped"], 0
        while len(found) < 10:
            await exchange.turn(exchange.names[turn % num_generators])
            turn += 1
            exchange.now_s += 1 / (GROUPS_A_SECOND * GROUP_SIZE)
            if turn % 1000 == 0:
                exchange.ledger.expire()
                num_dropped = exchange.ledger.counts()["dropped"]
                if num_dropped >= (len(found) + 1) * num_groups // 10:
                    found.append(sys.getallocatedblocks())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, default=20_000)
    parser.add_argument("--groups", type=int, default=0)
    options = parser.parse_args()
    costs = asyncio.run(granting(options.leases))
    first = next(iter(costs.values()))
    for number, cost in costs.items():
        tell(f"granting growth, {number}", cost / first)
        print(f"{number:5} generators: {cost:6.1f} µs of CPU a lease, × {cost / first:.2f}", flush=True)
    if options.groups:
        sizes = asyncio.run(memory(options.groups))
        tell("memory growth", max(sizes[2:]) / min(sizes[2:]))
        print(f"{options.groups} groups, blocks after each tenth:", *sizes)


if __name__ == "__main__":
    main()
