"""Prompts are drawn when somebody can sample them, and no generator is given more than it said it would hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlhpc.buffer.batches import DropReason
from rlhpc.protocol.contracts import PromptSource, RecordName
from rlhpc.protocol.messages import LEASES, CancelGroup
from rlhpc.protocol.types import Lease, Prompt, Verdict
from rlhpc.rewards.outcomes import ErrorGate
from rlhpc.roles.controller.dispatcher import LeaseDispatcher
from tests.engines.memory_channel import MemoryServer
from tests.unit.roles.small_ring import make_buffer, make_ledger, prompt, small_config

CONFIG = small_config(groups_per_step=4, group_size=4, max_staleness=1, window_groups=1)  # 8 slots of 4 samples


class CountedPrompts(PromptSource):
    """Prompts 0, 1, 2, …"""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.sizes: dict[int, int] = {}

    def draw(self, live_version: int) -> Prompt:
        return self.draw_again(None)

    def draw_again(self, prompt_id: int | None) -> Prompt:
        self.num_drawn += 1
        return self.peek(self.num_drawn - 1)

    def num_rollouts(self, prompt_id: int) -> int:
        return self.sizes.get(prompt_id, 0)

    def learn(self, group_id: int, admitted_version: int, prompt_id: int, pass_rate: float) -> None:
        raise AssertionError("not needed here")

    def figures(self) -> dict[str, float]:
        return {}

    def peek(self, prompt_id: int) -> Prompt:
        return prompt(prompt_id)

    def record_of(self, prompt_id: int) -> RecordName:
        return RecordName(str(prompt_id))

    def state(self) -> dict[str, int]:
        return {}

    def load_state(self, state: dict[str, int]) -> None:
        raise AssertionError("not needed here")


@dataclass
class TwoGenerators:
    """What weight sync and registry know: who may have leases, under which version, and how many samples each."""

    ready_members: set[str]
    live_version: int = 3
    samples: Counter[str] = field(default_factory=Counter)

    def is_ready(self, name: str) -> bool:
        return name in self.ready_members

    def capacity(self, name: str) -> int:
        return self.samples[name]


class Exchange:
    """LeaseDispatcher with two generators that say what they can hold."""

    def __init__(
        self, directory: Path, on_disk: Callable[[], Awaitable[None]] | None = None, *, fills_slots: bool = False
    ) -> None:
        self.server = MemoryServer(LEASES)
        self.clients = {name: self.server.connect(name) for name in ("generator-0", "generator-1")}
        self.ledger, self.prompts = make_ledger(CONFIG), CountedPrompts()
        self.generators = TwoGenerators(set(self.clients))
        self.capacity = self.generators.samples
        buffer = make_buffer(CONFIG, directory, self.ledger)
        self.now_s, self.gate = 0.0, ErrorGate(0.2, patience_s=60.0, clock=lambda: self.now_s)
        self.dispatcher = LeaseDispatcher(
            self.server, buffer, self.prompts, self.generators, self.generators, on_disk, fills_slots, self.gate
        )

    async def leases(self, name: str = "") -> dict[str, list[Lease]]:
        """Wake it, and return what each generator is sent because of that."""
        self.dispatcher.wake(name)
        for _ in range(20):
            await asyncio.sleep(0)
        return {name: await _drain(client) for name, client in self.clients.items()}


async def _drain(client) -> list[Lease]:
    leases = []
    while client.statistics.receive_queue_depth:
        leases.append(await client.receive())
    return leases


def num_samples(leases: list[Lease]) -> int:
    return sum(len(lease.sample_indices) for lease in leases)


@pytest.fixture
async def exchange(tmp_path: Path) -> AsyncIterator[Exchange]:
    exchange = Exchange(tmp_path)
    task = asyncio.create_task(exchange.dispatcher.run())
    yield exchange
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_every_slot_is_filled_with_the_next_prompt_under_the_live_version(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 1000
    leases = (await exchange.leases())["generator-0"]
    assert [lease.prompt.prompt_id for lease in leases] == list(range(8))
    assert {lease.admitted_version for lease in leases} == {3}
    assert {lease.sample_indices for lease in leases} == {(0, 1, 2, 3)}
    assert not exchange.ledger.has_slot


async def test_a_hard_prompt_is_leased_with_more_members_than_others(exchange: Exchange) -> None:
    exchange.capacity["generator-0"], exchange.prompts.sizes = 1000, {1: 7, 2: 3}
    leases = (await exchange.leases())["generator-0"]
    assert [(lease.group_size, len(lease.sample_indices)) for lease in leases[:4]] == [(4, 4), (7, 7), (4, 4), (4, 4)]
    assert not exchange.ledger.has_slot  # as many slots as ever


async def test_while_verifiers_fail_one_group_is_leased_now_and_then(
    exchange: Exchange,
) -> None:
    for _ in range(41):
        exchange.gate.count(Verdict.VERIFIER_ERROR)
        exchange.gate.check()
    exchange.capacity["generator-0"] = exchange.capacity["generator-1"] = 1000
    assert await exchange.leases() == {"generator-0": [], "generator-1": []}
    exchange.now_s += 1.0
    leases = await exchange.leases()
    assert sum(map(len, leases.values())) == 1
    exchange.gate.count(Verdict.WRONG)
    leases = await exchange.leases()
    assert sum(map(len, leases.values())) == 7
    assert not exchange.ledger.has_slot


async def test_before_the_first_version_is_live_nothing_is_drawn(exchange: Exchange) -> None:
    exchange.generators.live_version, exchange.capacity["generator-0"] = -1, 1000
    assert await exchange.leases() == {"generator-0": [], "generator-1": []}
    assert exchange.prompts.num_drawn == 0


async def test_a_generator_is_given_no_more_than_its_credit_and_leases_are_split(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 6
    leases = (await exchange.leases())["generator-0"]
    assert [lease.sample_indices for lease in leases] == [(0, 1, 2, 3), (0, 1)]
    assert (await exchange.leases())["generator-0"] == []  # woken again: the credit is used up
    exchange.capacity["generator-0"] = 7
    (lease,) = (await exchange.leases())["generator-0"]
    assert (lease.group_id, lease.sample_indices) == (1, (2,))


async def test_delivery_gives_credit_back(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 4
    await exchange.leases()
    exchange.ledger.deliver(0, 2)
    (lease,) = (await exchange.leases())["generator-0"]
    assert len(lease.sample_indices) == 1
    assert exchange.ledger.outstanding("generator-0") == 4


async def test_whoever_has_most_credit_comes_first_so_that_replicas_stay_equally_full(exchange: Exchange) -> None:
    exchange.capacity.update({"generator-0": 100, "generator-1": 100})
    given = {name: num_samples(leases) for name, leases in (await exchange.leases()).items()}
    assert given == {"generator-0": 16, "generator-1": 16}


async def test_unequal_generators_are_filled_to_what_each_can_hold(exchange: Exchange) -> None:
    exchange.capacity.update({"generator-0": 6, "generator-1": 20})
    given = {name: num_samples(leases) for name, leases in (await exchange.leases()).items()}
    assert given == {"generator-0": 6, "generator-1": 20}


async def test_who_does_not_sample_with_the_live_version_gets_nothing(exchange: Exchange) -> None:
    exchange.capacity.update({"generator-0": 100, "generator-1": 100})
    exchange.generators.ready_members = {"generator-1"}
    leases = await exchange.leases()
    assert leases["generator-0"] == []
    assert num_samples(leases["generator-1"]) == 32


async def test_a_lease_that_cannot_be_delivered_goes_to_another_at_once(exchange: Exchange) -> None:
    exchange.capacity.update({"generator-0": 100, "generator-1": 99})
    await exchange.clients["generator-0"].close()
    exchange.dispatcher.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    leases = await _drain(exchange.clients["generator-1"])
    assert sorted(lease.group_id for lease in leases) == list(range(8))
    assert exchange.ledger.outstanding("generator-0") == 0
    assert exchange.ledger.counts()["lost_samples"] == 0  # it was never there: no strike against the group
    exchange.ledger.conservation()


async def test_credit_below_zero_is_no_credit(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 8
    await exchange.leases()
    exchange.capacity["generator-0"] = 2  # it drains: it holds more than it wants
    assert (await exchange.leases())["generator-0"] == []


async def test_prompts_are_drawn_as_they_can_be_begun_under_the_version_that_is_live_then(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 6
    assert [lease.admitted_version for lease in (await exchange.leases())["generator-0"]] == [3, 3]
    assert exchange.prompts.num_drawn == 2  # though there are eight slots
    exchange.generators.live_version, exchange.capacity["generator-0"] = 5, 12
    leases = (await exchange.leases())["generator-0"]
    assert [(lease.group_id, lease.admitted_version) for lease in leases] == [(1, 3), (2, 5)]


async def test_slots_are_filled_at_once_where_nothing_may_depend_on_time(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path, fills_slots=True)
    task = asyncio.create_task(exchange.dispatcher.run())
    exchange.capacity["generator-0"] = 1
    assert num_samples((await exchange.leases())["generator-0"]) == 1
    assert exchange.prompts.num_drawn == 8
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_wake_for_one_generator_looks_at_no_other_but_at_whom_something_was_taken_from(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    exchange.capacity.update({"generator-0": 4, "generator-1": 4})
    task = asyncio.create_task(exchange.dispatcher.run())
    await exchange.leases()
    exchange.capacity.update({"generator-0": 1, "generator-1": 1})  # one more each
    given = {name: num_samples(leases) for name, leases in (await exchange.leases("generator-0")).items()}
    assert given == {"generator-0": 1, "generator-1": 0}
    exchange.ledger.deliver(1, 0)  # generator-1 holds it
    given = {name: num_samples(leases) for name, leases in (await exchange.leases("generator-0")).items()}
    assert given == {"generator-0": 0, "generator-1": 2}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dropped_group_is_replaced_by_a_new_prompt(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 1000
    await exchange.leases()
    exchange.ledger.drop(3, DropReason.NO_SPREAD)
    exchange.generators.live_version = 5
    (lease,) = (await exchange.leases())["generator-0"]
    assert (lease.prompt.prompt_id, lease.admitted_version) == (8, 5)


async def test_where_another_prompt_might_be_drawn_after_a_restart_a_choice_is_on_disk_before_it_is_told(
    tmp_path: Path,
) -> None:
    written = asyncio.Event()

    async def on_disk() -> None:
        await written.wait()

    exchange = Exchange(tmp_path, on_disk)
    exchange.capacity["generator-0"] = 1000
    task = asyncio.create_task(exchange.dispatcher.run())
    assert await exchange.leases() == {"generator-0": [], "generator-1": []}
    assert exchange.prompts.num_drawn == 8
    written.set()
    assert num_samples((await exchange.leases())["generator-0"]) == 32
    written.clear()
    exchange.ledger.hand_back("generator-0", 0, [0])
    assert num_samples((await exchange.leases())["generator-0"]) == 1  # nothing new was admitted
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_whoever_may_be_sampling_a_group_that_was_dropped_is_told_once(tmp_path: Path) -> None:
    exchange, dropped = Exchange(tmp_path), [4, 7]
    exchange.generators.ready_members = {"generator-0"}
    await exchange.dispatcher.cancel(dropped)
    await exchange.dispatcher.cancel(dropped)
    client = exchange.clients["generator-0"]
    assert [await client.receive() for _ in range(client.statistics.receive_queue_depth)] == [
        CancelGroup(7),
        CancelGroup(4),
    ]
    assert exchange.clients["generator-1"].statistics.receive_queue_depth == 0


async def test_a_generator_that_is_gone_keeps_no_other_from_being_told(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    await exchange.clients["generator-0"].close()
    await exchange.dispatcher.cancel([4])
    assert await exchange.clients["generator-1"].receive() == CancelGroup(4)
