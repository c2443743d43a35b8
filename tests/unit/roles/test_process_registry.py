"""Who is there, and how busy, as far as heartbeats tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.base.user_code import code_digest
from rlhpc.protocol.messages import Heartbeat, Hello
from rlhpc.roles.controller.dispatcher import ProcessRegistry
from rlhpc.roles.controller.recorder import GeneratorMeter
from tests.unit.buffer.rollout_samples import ManualClock


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


def test_a_heartbeat_of_someone_unknown_changes_nothing(registry: ProcessRegistry) -> None:
    assert not registry.record("generator-7", beat(capacity=64))
    assert registry.names() == []
    assert registry.capacity("generator-7") == 0


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


def test_totals_are_of_one_role(registry: ProcessRegistry) -> None:
    for name, member in (("generator-0", hello()), ("generator-1", hello(replica=1)), ("reward-0", hello("reward"))):
        registry.register(name, member)
        registry.record(name, beat(running=2.0))
    assert registry.total("running", "generator") == 4
    assert registry.total("never heard of", "generator") == 0
    assert registry.names("generator") == ["generator-0", "generator-1"]


def test_the_report_has_a_row_for_everyone_with_pid_and_wait(registry: ProcessRegistry, clock: ManualClock) -> None:
    registry.register("reward-0", hello("reward"))
    registry.register("generator-0", hello())
    registry.record("generator-0", beat(running=2.0))
    clock.advance(1.5)
    first, second = registry.report()
    assert (first["name"], second["name"]) == ("generator-0", "reward-0")
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


def test_time_of_several_generators_adds_up_and_a_lost_one_no_longer_counts(
    registry: ProcessRegistry, clock: ManualClock
) -> None:
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
    registry.record("generator-1", beat(busy_s=4.0))
    assert meter.look() == (1, 0)


def test_an_engine_that_counts_more_than_passed_is_never_idle_below_zero(
    registry: ProcessRegistry, clock: ManualClock
) -> None:
    meter = GeneratorMeter(registry)
    registry.register("generator-0", hello())
    meter.look()
    clock.advance(1)
    registry.record("generator-0", beat(busy_s=1.2))
    assert meter.look() == (1, 0)
