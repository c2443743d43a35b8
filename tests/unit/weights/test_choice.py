"""Who is in a membership epoch, and how weights travel to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.errors import CheckpointError, ConfigError, GroupFailed
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.choice import Membership, choose_transport
from rlhpc.weights.factory import make_publisher, make_receiver
from tests.patience import PATIENCE_S

# ----------------------------------------------------------------------------------------------------------- transports
#
# How weights travel follows from who is on which GPU.


A, B, C, D = (f"GPU-{letter}" for letter in "abcd")


@pytest.mark.parametrize(
    ("wish", "trainer", "engines", "chosen"),
    [
        ("auto", "", {"g0": [""], "g1": [""]}, "gloo"),
        ("auto", A, {"g0": [B], "g1": [C, D]}, "nccl"),
        ("auto", A, {"g0": [A]}, "ipc"),
        ("auto", A, {"g0": [A], "g1": [A]}, "ipc"),
        ("auto", "", {"g0": [A]}, "gloo"),  # a trainer on CPU beside an engine that has the GPU
        ("auto", A, {"g0": [""]}, "gloo"),
        ("auto", "MIG-1", {"g0": ["MIG-2"]}, "gloo"),
        ("auto", "MIG-1", {"g0": ["MIG-1"]}, "ipc"),
        ("nccl", A, {"g0": [B]}, "nccl"),
        ("nccl", "MIG-1", {"g0": ["MIG-2"]}, "nccl"),
        ("ipc", A, {"g0": [A]}, "ipc"),
        # One GPU, and processes that are hosts of their own to NCCL, as the components of a job on Slurm are.
        ("auto", f"{A}@n1.7.trainer", {"g0": [f"{A}@n1.7.generation"]}, "ipc"),
        ("ipc", f"{A}@n1.7.trainer", {"g0": [f"{A}@n1.7.generation"]}, "ipc"),
        ("nccl", f"{A}@1", {"g0": [f"{A}@2"], "g1": [f"{A}@3"]}, "nccl"),
        ("auto", A, {"g0": [f"{B}@1"], "g1": [f"{B}@2"]}, "nccl"),
        ("ipc", "", {"g0": [""]}, "ipc"),
        ("gloo", A, {"g0": [A], "g1": [B]}, "gloo"),
    ],
)
def test_weights_travel_as_the_devices_allow(
    wish: str, trainer: str, engines: dict[str, list[str]], chosen: str
) -> None:
    assert choose_transport(wish, trainer, engines) == chosen


@pytest.mark.parametrize(
    ("trainer", "engines", "chosen"),
    [
        ("", {"g0": [""], "g1": [""]}, "ipc"),
        ("", {"g0": [A]}, "gloo"),
        (A, {"g0": [""]}, "gloo"),
        (A, {"g0": [B]}, "nccl"),
    ],
)
def test_on_one_host_processes_on_the_cpu_share_memory(
    trainer: str, engines: dict[str, list[str]], chosen: str
) -> None:
    assert choose_transport("auto", trainer, engines, is_one_host=True) == chosen


def test_a_deterministic_run_connects_no_nccl_whose_ends_are_set_differently() -> None:
    engines = {"g0": [B], "g1": [C, D]}
    assert choose_transport("auto", A, engines, is_deterministic=True) == "gloo"
    assert choose_transport("auto", A, {"g0": [A]}, is_deterministic=True) == "ipc"
    with pytest.raises(
        ConfigError, match=r"weights\.transport='nccl' with run\.deterministic=true: .*legal: auto, gloo"
    ):
        choose_transport("nccl", A, engines, is_deterministic=True)


@pytest.mark.parametrize(
    ("wish", "trainer", "engines", "words"),
    [
        ("auto", A, {"g0": [A], "g1": [B]}, r"ipc to g1: trainer-0 and g0 on GPU-a, g1 on GPU-b, .*'gloo'"),
        ("auto", A, {"g0": [A, B]}, r"ipc to g0: .*, g0 on GPU-a, GPU-b"),
        ("auto", A, {"g0": [B], "g1": [B]}, r"nccl: g0 and g1 are both on GPU-b, .*'gloo'"),
        ("nccl", A, {"g0": [A]}, r"nccl: trainer-0 and g0 are both on GPU-a, .* auto, ipc"),
        ("nccl", "0", {"g0": ["0"]}, r"are both on GPU 0,"),
        ("nccl", f"{A}@1", {"g0": [f"{A}@1"]}, r"nccl: trainer-0 and g0 are both on GPU-a, .* auto, ipc"),
        ("auto", f"{A}@1", {"g0": [f"{A}@1"], "g1": [f"{B}@1"]}, r"ipc to g1: trainer-0 and g0 on GPU-a, g1 on GPU-b,"),
        ("nccl", "", {"g0": [""]}, r"weights\.transport='nccl', and g0 is on CPU; legal: auto, gloo"),
        ("nccl", "", {"g0": [A]}, r"trainer-0 is on CPU"),
        ("nccl", "", {}, r"trainer-0 is on CPU"),
        ("nccl", A, {"g0": [""]}, r"g0 is on CPU"),
        ("ipc", A, {"g0": [B]}, r"ipc to g0"),
        ("ipc", "", {"g0": [A]}, r"trainer-0 on the CPU"),
        ("pigeon", "", {}, r"weights\.transport='pigeon'; legal: auto, gloo, nccl, ipc"),
    ],
)
def test_what_cannot_work_is_refused_with_who_is_where(
    wish: str, trainer: str, engines: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_transport(wish, trainer, engines)


# -------------------------------------------------------------------------------------------------------------- factory


@pytest.mark.parametrize("transport", ["auto", "pigeon"])
def test_both_ends_are_of_a_transport_that_was_chosen(transport: str, tmp_path: Path) -> None:
    weights = WeightsConfig().model_copy(update={"transport": transport})
    with pytest.raises(ConfigError, match=rf"weights\.transport='{transport}'; legal: gloo, nccl, ipc"):
        make_publisher(weights, directory=tmp_path, device="cpu")
    with pytest.raises(ConfigError, match=transport):
        make_receiver(transport, device="cpu", timeout_s=1.0)


@pytest.mark.parametrize("address", ["", "http://x", "tcp://nowhere", "file:///does/not/exist/x"])
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_a_meeting_place_that_is_not_there_is_a_failed_group(transport: str, address: str) -> None:
    receiver = make_receiver(transport, device="cpu", timeout_s=0.2)
    with pytest.raises(GroupFailed):
        receiver.join(WeightGroup(1, transport, address, ("g",), (1,)), 1)
    receiver.leave()


def test_a_run_directory_may_lie_deep(tmp_path: Path) -> None:
    """A unix socket's address holds 107 bytes."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    publisher = make_publisher(WeightsConfig(transport="ipc", timeout_s=PATIENCE_S), directory=deep, device="cpu")
    group = publisher.open(WeightGroup(1, "ipc", "", ("g",), (1,)))
    receiver = make_receiver("ipc", device="cpu", timeout_s=PATIENCE_S)
    receiver.join(group, 1)
    publisher.form()
    publisher.dissolve()


# ----------------------------------------------------------------------------------------------------------- membership


def of_two() -> Membership:
    membership = Membership()
    membership.hello("b", 2, "b1")
    membership.hello("a", 1, "a1")
    return membership


def test_an_epoch_holds_everyone_by_name_with_their_ranks() -> None:
    membership = of_two()
    assert membership.needs_new_epoch
    group = membership.next_group("gloo", "tcp://here:1")
    assert (group.epoch, group.transport, group.address) == (1, "gloo", "tcp://here:1")
    assert (group.members, group.ranks_per_member, group.world_size) == (("a", "b"), (1, 2), 4)
    assert not membership.needs_new_epoch
    assert membership.is_whole


def test_nobody_makes_no_epoch() -> None:
    membership = Membership()
    assert not membership.needs_new_epoch
    with pytest.raises(ValueError, match="no generator is alive"):
        membership.next_group("gloo")


def test_a_member_that_comes_back_starts_from_nothing() -> None:
    membership = of_two()
    group = membership.next_group("gloo")
    membership.acknowledged("a", group.epoch, 3)
    membership.lost("a")
    membership.hello("a", 1, "a1")
    assert membership.live_members(0) == frozenset()
    assert not membership.acknowledged("a", group.epoch, 3)  # it is a stranger to this epoch
    assert membership.needs_new_epoch
    assert membership.next_group("gloo").members == ("a", "b")


def test_acknowledgements_of_older_epochs_do_not_count() -> None:
    membership = of_two()
    old = membership.next_group("gloo")
    membership.next_group("gloo")
    assert not membership.acknowledged("a", old.epoch, 4)
    assert membership.live_members(4) == frozenset()


def test_epochs_are_counted_on_after_a_restart() -> None:
    membership = of_two()
    membership.next_group("gloo")
    membership.next_group("gloo")
    restarted = Membership()
    restarted.load_state(membership.state())
    restarted.hello("a", 1, "a1")
    assert restarted.next_group("gloo").epoch == 3


@pytest.mark.parametrize("state", [{}, {"last_epoch": "3"}, {"last_epoch": -1}])
def test_a_damaged_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="last_epoch"):
        Membership().load_state(state)


def test_a_member_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_weight_ranks=0"):
        Membership().hello("a", 0, "a1")


NAMES = st.sampled_from(["a", "b", "c"])
VERSIONS = st.integers(0, 2)


class MembershipLaws(RuleBasedStateMachine):
    """Against a model: who is alive, who is in the epoch since it was formed, what each has acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership()
        self.alive: dict[str, int] = {}
        self.in_epoch: set[str] = set()
        self.formed: set[str] = set()
        self.versions: dict[str, int] = {}
        self.epochs: list[int] = [0]

    @initialize(version=VERSIONS)
    def begin(self, version: int) -> None:
        """Two are there, and one of them has acknowledged a version: what comes after that is what may go wrong."""
        for name in ("a", "b"):
            self.hello(name, 0)
        self.form()
        self.acknowledge("a", version, 0)

    @rule(name=NAMES, incarnation=st.integers(0, 1))
    def hello(self, name: str, incarnation: int) -> None:
        self.membership.hello(name, 1, str(incarnation))
        if self.alive.get(name) != incarnation:
            self.alive[name] = incarnation
            self.in_epoch.discard(name)
            self.versions.pop(name, None)

    @rule(name=NAMES)
    def lost(self, name: str) -> None:
        self.membership.lost(name)
        self.alive.pop(name, None)
        self.in_epoch.discard(name)
        self.versions.pop(name, None)

    @rule()
    def form(self) -> None:
        if self.alive:
            group = self.membership.next_group("gloo")
            assert group.epoch > self.epochs[-1]
            assert set(group.members) == set(self.alive)
            self.epochs.append(group.epoch)
            self.in_epoch, self.formed = set(self.alive), set(self.alive)

    @rule(name=NAMES, age=st.integers(0, 1))
    def failed(self, name: str, age: int) -> None:
        self.membership.failed(name, self.epochs[-1 - age] if len(self.epochs) > age else -1)
        if age == 0:
            self.in_epoch.discard(name)

    @rule(name=NAMES, version=VERSIONS, age=st.integers(0, 1))
    def acknowledge(self, name: str, version: int, age: int) -> None:
        epoch = self.epochs[-1 - age] if len(self.epochs) > age else -1
        counts = self.membership.acknowledged(name, epoch, version)
        assert counts == (age == 0 and epoch > 0 and name in self.in_epoch)
        if counts:
            self.versions[name] = version

    @invariant()
    def agrees_with_the_model(self) -> None:
        for version in range(4):
            serving = {name for name, served in self.versions.items() if served >= version}
            assert self.membership.live_members(version) == serving
            assert self.membership.waiting_for(version) == self.in_epoch - serving
        assert self.membership.candidates == set(self.alive)
        assert self.membership.is_whole == (len(self.epochs) > 1 and self.in_epoch == self.formed)
        fits = self.in_epoch == self.formed == set(self.alive)
        assert self.membership.needs_new_epoch == (bool(self.alive) and not fits)


TestMembershipLaws = MembershipLaws.TestCase
TestMembershipLaws.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
