"""Who is there, and who is given leases on which prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlhpc.base.user_code import code_digest
from rlhpc.protocol.messages import LEASES, CancelGroup, Heartbeat, Hello
from rlhpc.protocol.types import Lease, Prompt, Verdict
from rlhpc.rewards.outcomes import ErrorGate
from rlhpc.roles.controller.leases import SPARE, AwakeClock, CreditQueue, LeaseDispatcher, ProcessRegistry
from rlhpc.roles.controller.recorder import GeneratorMeter
from tests.engines.memory_channel import MemoryServer
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.roles.small_ring import make_buffer, make_ledger, prompt, small_config

# --------------------------------------------------------------------------------------------------------------- leases
#
# Prompts are drawn when somebody can sample them, and no generator is given more than it said it would hold.


CONFIG = small_config(groups_per_step=4, group_size=4, max_staleness=1, window_groups=1)  # 8 slots of 4 samples


class CountedPrompts:
    """Prompts 0, 1, 2, …; `sizes`: of groups that are larger than others."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.sizes: dict[int, int] = {}

    def draw(self, live_version: int) -> Prompt:
        self.num_drawn += 1
        return prompt(self.num_drawn - 1)

    def num_rollouts(self, prompt_id: int) -> int:
        return self.sizes.get(prompt_id, 0)


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
        prompts: Any = self.prompts
        self.generators = TwoGenerators(set(self.clients))
        self.capacity = self.generators.samples
        buffer = make_buffer(CONFIG, directory, self.ledger)
        self.now_s, self.gate = 0.0, ErrorGate(0.2, patience_s=60.0, clock=lambda: self.now_s)
        self.dispatcher = LeaseDispatcher(
            self.server, buffer, prompts, self.generators, self.generators, on_disk, fills_slots, self.gate
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


@asynccontextmanager
async def running(exchange: Exchange) -> AsyncIterator[Exchange]:
    task = asyncio.create_task(exchange.dispatcher.run())
    yield exchange
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def exchange(tmp_path: Path) -> AsyncIterator[Exchange]:
    async with running(Exchange(tmp_path)) as made:
        yield made


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


async def test_a_generator_is_given_no_more_than_its_credit_and_leases_are_split(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 6
    exchange.generators.live_version = -1
    assert await exchange.leases() == {
        "generator-0": [],
        "generator-1": [],
    }  # nothing is drawn before there are weights
    assert exchange.prompts.num_drawn == 0
    exchange.generators.live_version, exchange.generators.ready_members = 3, {"generator-0"}
    exchange.capacity["generator-1"] = 100
    leases = await exchange.leases()
    assert [lease.sample_indices for lease in leases["generator-0"]] == [(0, 1, 2, 3), (0, 1)]
    assert leases["generator-1"] == []  # it does not sample with the live version
    assert (await exchange.leases())["generator-0"] == []  # woken again: the credit is used up
    exchange.capacity["generator-0"] = 7
    (lease,) = (await exchange.leases())["generator-0"]
    assert (lease.group_id, lease.sample_indices) == (1, (2,))


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


async def test_prompts_are_drawn_as_they_can_be_begun_under_the_version_that_is_live_then(exchange: Exchange) -> None:
    exchange.capacity["generator-0"] = 6
    assert [lease.admitted_version for lease in (await exchange.leases())["generator-0"]] == [3, 3]
    assert exchange.prompts.num_drawn == 2  # though there are eight slots
    exchange.generators.live_version, exchange.capacity["generator-0"] = 5, 12
    leases = (await exchange.leases())["generator-0"]
    assert [(lease.group_id, lease.admitted_version) for lease in leases] == [(1, 3), (2, 5)]


async def test_slots_are_filled_at_once_where_nothing_may_depend_on_time(tmp_path: Path) -> None:
    async with running(Exchange(tmp_path, fills_slots=True)) as exchange:
        exchange.capacity["generator-0"] = 1
        assert num_samples((await exchange.leases())["generator-0"]) == 1
        assert exchange.prompts.num_drawn == 8


async def test_a_wake_for_one_generator_looks_at_no_other_but_at_whom_something_was_taken_from(
    exchange: Exchange,
) -> None:
    exchange.capacity.update({"generator-0": 4, "generator-1": 4})
    await exchange.leases()
    exchange.capacity.update({"generator-0": 1, "generator-1": 1})  # one more each
    given = {name: num_samples(leases) for name, leases in (await exchange.leases("generator-0")).items()}
    assert given == {"generator-0": 1, "generator-1": 0}
    exchange.ledger.deliver(1, 0)  # generator-1 holds it
    given = {name: num_samples(leases) for name, leases in (await exchange.leases("generator-0")).items()}
    assert given == {"generator-0": 0, "generator-1": 2}


async def test_where_another_prompt_might_be_drawn_after_a_restart_a_choice_is_on_disk_before_it_is_told(
    tmp_path: Path,
) -> None:
    written = asyncio.Event()

    async def on_disk() -> None:
        await written.wait()

    async with running(Exchange(tmp_path, on_disk)) as exchange:
        exchange.capacity["generator-0"] = 1000
        assert await exchange.leases() == {"generator-0": [], "generator-1": []}
        assert exchange.prompts.num_drawn == 8
        written.set()
        assert num_samples((await exchange.leases())["generator-0"]) == 32
        written.clear()
        exchange.ledger.hand_back("generator-0", 0, [0])
        assert num_samples((await exchange.leases())["generator-0"]) == 1  # nothing new was admitted


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


# --------------------------------------------------------------------------------------------------------- credit queue
#
# Whoever has most credit comes first, however it changes, at a cost that does not grow with their number.


NAMES = [f"generator-{number}" for number in range(5)]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-2, 6))))
def test_it_is_always_the_generator_with_most_credit_of_equals_the_first(changes: list[tuple[str, int]]) -> None:
    credit: dict[str, int] = dict.fromkeys(NAMES, 3)
    queue = CreditQueue(credit.__getitem__)
    queue.look_at_all(NAMES)
    for name, new in changes:
        credit[name] = new
        queue.look_at(name)
        best = max(NAMES, key=credit.__getitem__)
        assert queue.most() == ((best, credit[best]) if credit[best] > 0 else None)
    assert len(queue._heap) <= 2 * len(NAMES) + SPARE


def test_credit_that_has_shrunk_unseen_is_not_given_away_twice_and_who_was_set_aside_comes_back() -> None:
    credit = {"a": 5, "b": 4}
    queue = CreditQueue(credit.__getitem__)
    queue.look_at_all(credit)
    queue.set_aside("a")
    assert queue.most() == ("b", 4)
    queue.look_at("a")
    assert queue.most() == ("a", 5)
    credit["a"] = 0
    assert queue.most() == ("b", 4)


@pytest.mark.parametrize("num_generators", [8, 512])
def test_a_lease_looks_at_few_generators_however_many_there_are(num_generators: int) -> None:
    looks, credit = Counter[str](), dict.fromkeys(map(str, range(num_generators)), 0)

    def credit_of(name: str) -> int:
        looks[name] += 1
        return credit[name]

    queue = CreditQueue(credit_of)
    queue.look_at_all(credit)
    looks.clear()
    for turn in range(1000):  # a sample arrives, another one is leased
        name = str(turn * 7 % num_generators)
        credit[name] += 1
        queue.look_at(name)
        assert queue.most() == (name, 1)
        credit[name] -= 1
        queue.look_at(name)
    assert looks.total() <= 3 * 1000


# ----------------------------------------------------------------------------------------------------- process registry
#
# Who is there, and how busy, as far as heartbeats tell.


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> ProcessRegistry:
    return ProcessRegistry("hash", 10.0, clock)


def hello(role: str = "generator", replica: int = 0, incarnation: str = "a", config_hash: str = "hash") -> Hello:
    return Hello(role, replica, incarnation, config_hash, pid=100 + replica, host="here", num_weight_ranks=1)


def beat(capacity: int = 0, **metrics: float) -> Heartbeat:
    return Heartbeat("running", "leases", 3, capacity, metrics)


def test_a_process_with_other_settings_stays_out(registry: ProcessRegistry) -> None:
    assert not registry.register("generator-0", hello(config_hash="other"))
    assert registry.names() == []
    assert registry.register("generator-0", hello())
    assert registry.names() == ["generator-0"]


def test_a_process_of_another_version_is_admitted_and_named(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    registry = ProcessRegistry("hash", 10.0, clock, code="abc")
    assert registry.register("generator-0", replace(hello(), code="abc"))
    assert caplog.messages == []
    assert registry.register("generator-1", replace(hello(replica=1), code="def"))
    assert registry.register("reward-0", hello("reward"))  # of a version that says nothing of itself
    of_generator, of_reward = caplog.messages
    assert of_generator.startswith("generator-1, pid 101 on here, runs another version of rlhpc than the controller")
    assert "(code without a digest and abc)" in of_reward
    assert registry.names() == ["generator-0", "generator-1", "reward-0"]


def test_the_digest_is_of_the_code_and_not_of_its_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place / "part").mkdir(parents=True)
        (tmp_path / place / "part" / "a.py").write_text("1")
    first, second = tmp_path / "here", tmp_path / "there"
    (second / "a.pyc").write_text("compiled")
    assert code_digest(first) == code_digest(second)
    (second / "part" / "a.py").write_text("2")
    assert code_digest(first) != code_digest(second)
    assert len(code_digest()) == 12


def test_a_process_of_an_earlier_start_stays_out_even_after_its_successor_is_gone(registry: ProcessRegistry) -> None:
    assert registry.register("generator-0", hello(incarnation="3.1.0-new"))
    for incarnation in ("3.0.2-old", "2.5.0-older"):
        assert registry.is_superseded("generator-0", hello(incarnation=incarnation))
        assert not registry.register("generator-0", hello(incarnation=incarnation))
    member = registry.member("generator-0")
    assert member is not None
    assert member.hello.incarnation == "3.1.0-new"
    registry.forget("generator-0")
    assert not registry.register("generator-0", hello(incarnation="3.0.2-old"))
    assert registry.register("generator-0", hello(incarnation="3.1.0-again"))  # equal in order: the newest wins
    assert registry.register("generator-0", hello(incarnation="4.0.0-later"))


def test_silence_is_counted_from_the_last_sign_of_life(registry: ProcessRegistry, clock: ManualClock) -> None:
    registry.register("generator-0", hello())
    registry.register("reward-0", hello("reward"))
    clock.advance(8)
    registry.record("reward-0", beat())
    clock.advance(3)
    assert registry.silent() == ["generator-0"]
    registry.forget("generator-0")
    registry.forget("generator-0")
    assert registry.silent() == []


def test_a_heartbeat_of_a_process_whose_hello_was_lost_does_not_count_for_its_predecessor(
    registry: ProcessRegistry,
) -> None:
    """Who answers it asks for the Hello once more; until then it would be thought to have its predecessor's weights."""
    registry.register("generator-0", hello(incarnation="3.0.0-first"))
    assert registry.record("generator-0", replace(beat(capacity=8), incarnation="3.0.0-first"))
    assert not registry.record("generator-0", replace(beat(capacity=64), incarnation="3.0.1-second"))
    assert registry.capacity("generator-0") == 8
    registry.register("generator-0", hello(incarnation="3.0.1-second"))
    assert registry.record("generator-0", replace(beat(capacity=64), incarnation="3.0.1-second"))


def test_credit_is_what_the_last_heartbeat_said_and_nothing_before_the_first(registry: ProcessRegistry) -> None:
    assert not registry.record("generator-0", beat(capacity=64))  # nobody knows it
    assert (registry.names(), registry.capacity("generator-0")) == ([], 0)
    registry.register("generator-0", hello())
    assert registry.capacity("generator-0") == 0
    registry.record("generator-0", beat(capacity=64))
    assert registry.capacity("generator-0") == 64
    registry.register("generator-0", hello(incarnation="b"))  # started again
    assert registry.capacity("generator-0") == 0


def test_an_answer_to_a_roll_call_costs_no_credit(registry: ProcessRegistry, clock: ManualClock) -> None:
    registry.register("generator-0", hello())
    assert registry.record("generator-0", beat(capacity=64))
    clock.advance(8)
    assert registry.register("generator-0", hello())
    assert registry.capacity("generator-0") == 64
    clock.advance(8)
    assert registry.silent() == []  # it is a sign of life


def test_totals_and_names_are_of_one_role_and_the_report_has_a_row_for_everyone(
    registry: ProcessRegistry, clock: ManualClock
) -> None:
    for name, member in (("reward-0", hello("reward")), ("generator-1", hello(replica=1)), ("generator-0", hello())):
        registry.register(name, member)
        registry.record(name, beat(running=2.0))
    assert registry.total("running", "generator") == 4
    assert registry.total("never heard of", "generator") == 0
    assert sorted(registry.names("generator")) == ["generator-0", "generator-1"]
    clock.advance(1.5)
    first, *_, last = registry.report()
    assert (first["name"], last["name"]) == ("generator-0", "reward-0")
    assert {key: first[key] for key in ("state", "waits_for", "version", "silent_s", "pid", "metrics")} == {
        "state": "running", "waits_for": "leases", "version": 3, "silent_s": 1.5, "pid": 100,
        "metrics": {"running": 2.0},
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ meter


def test_idle_time_is_what_lies_between_heartbeats_and_was_not_busy(
    registry: ProcessRegistry, clock: ManualClock
) -> None:
    meter = GeneratorMeter(registry)
    registry.register("generator-0", hello())
    registry.record("generator-0", beat(busy_s=5.0))
    assert meter.look() == (0, 0)  # the first look only reads
    clock.advance(4)
    registry.record("generator-0", beat(busy_s=8.0))
    assert meter.look() == (4, 1)
    assert meter.look() == (0, 0)  # nothing new was heard


def test_what_engines_decoded_at_once_and_how_fast_is_of_all_of_them_together(
    registry: ProcessRegistry, clock: ManualClock
) -> None:
    meter = GeneratorMeter(registry)
    for replica in (0, 1):
        registry.register(f"generator-{replica}", hello(replica=replica))
        registry.record(f"generator-{replica}", beat())
    meter.look()
    assert meter.decoding.figures() == {}  # nothing was sampled
    clock.advance(4)
    registry.record("generator-0", beat(busy_s=4.0, decoding_s=32.0, tokens=320.0))
    registry.record("generator-1", beat(busy_s=1.0, decoding_s=8.0, tokens=80.0))
    meter.look()
    assert meter.decoding.figures() == {"generator/decoded_together": 8.0, "generator/token_s": 0.1}


def test_a_restart_counts_nothing_backwards(registry: ProcessRegistry, clock: ManualClock) -> None:
    meter = GeneratorMeter(registry)
    registry.register("generator-0", hello())
    registry.record("generator-0", beat(busy_s=50.0))
    meter.look()
    clock.advance(10)
    registry.register("generator-0", hello(incarnation="b"))
    registry.record("generator-0", beat(busy_s=1.0))
    assert meter.look() == (0, 0)
    clock.advance(2)
    registry.record("generator-0", beat(busy_s=2.0))
    assert meter.look() == (2, 1)


def test_a_lost_one_no_longer_counts_and_none_is_idle_below_zero(registry: ProcessRegistry, clock: ManualClock) -> None:
    meter = GeneratorMeter(registry)
    for replica in (0, 1):
        registry.register(f"generator-{replica}", hello(replica=replica))
        registry.record(f"generator-{replica}", beat())
    registry.register("reward-0", hello("reward"))
    meter.look()
    clock.advance(3)
    for replica in (0, 1):
        registry.record(f"generator-{replica}", beat(busy_s=3.0 * replica))
    assert meter.look() == (6, 3)
    registry.forget("generator-0")
    clock.advance(1)
    registry.record("generator-1", beat(busy_s=4.2))  # it counts more than has passed
    assert meter.look() == (1, 0)


# ---------------------------------------------------------------------------------------------------------- awake clock
#
# Time in which this process could hear nobody is nobody's silence.


DEAD_AFTER_S = 10.0


def live(clock: ManualClock, awake: AwakeClock, seconds: int) -> None:
    for _ in range(10 * seconds):
        clock.advance(0.1)
        awake.look()


def test_time_is_counted_whole_while_somebody_looks_and_a_pause_counts_for_one_stretch() -> None:
    clock = ManualClock()
    awake = AwakeClock(clock, longest_s=1.0)
    began = awake()
    live(clock, awake, 7)
    assert abs(awake() - began - 7) < 1e-6
    clock.advance(3600)
    assert abs(awake() - began - 8) < 1e-6  # also before anybody has looked
    awake.look()
    assert abs(awake() - began - 8) < 1e-6
    live(clock, awake, 2)
    assert abs(awake() - began - 10) < 1e-6


def test_nobody_is_silent_after_a_pause_of_our_own_and_who_stays_silent_then_is() -> None:
    clock = ManualClock()
    awake = AwakeClock(clock, longest_s=1.0)
    registry = ProcessRegistry("hash", DEAD_AFTER_S, awake)
    for replica in (0, 1):
        registry.register(f"generator-{replica}", Hello("generator", replica, "a", "hash", 1, "here", 1))
    live(clock, awake, 1)
    clock.advance(6 * DEAD_AFTER_S)
    assert registry.silent() == []
    awake.look()
    assert registry.silent() == []
    for _ in range(10):
        live(clock, awake, 1)
        registry.record("generator-1", Heartbeat("running", "", 0))
    assert registry.silent() == ["generator-0"]


async def test_a_clock_that_is_run_keeps_up_with_the_loop() -> None:
    loop = asyncio.get_running_loop()
    awake = AwakeClock(loop.time, longest_s=5.0)
    running = asyncio.create_task(awake.run())
    began, awake_began, begun = loop.time(), awake(), loop.time()
    await asyncio.sleep(0.3)
    before, awake_s, after = loop.time(), awake() - awake_began, loop.time()
    assert before - begun - 1e-6 <= awake_s <= after - began + 1e-6
    running.cancel()
