"""Versions as what has changed: exact, whole where a receiver lacks the one before, and never half of one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.contracts import WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import TensorSpec, WeightGroup, WeightManifest
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.checksums import checksum64
from rlhpc.weights.factory import make_publisher, make_receiver
from rlhpc.weights.memory import HostShadow, fresh_blocks, named_tensors

TIMEOUT_S = 60.0
FULL_EVERY = 4
BUCKET_BYTES = 1 << 15  # the head is in a bucket of its own
Weights = list[tuple[str, torch.Tensor]]


def first_weights(dtype: torch.dtype = torch.bfloat16) -> Weights:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, generator=generator)).to(dtype)

    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1.0]).to(dtype)
    return [
        ("embedding", drawn(101, 131)),
        ("odd", odd),
        ("router", torch.randn(3, generator=generator)),  # float32 among the others
        ("scale", drawn(1).view(())),
        ("turned", drawn(40, 90).t()),  # not contiguous
        ("head", drawn(128, 130)),
    ]


def after_a_step(weights: Weights, seed: int, share: float = 0.01) -> Weights:
    """One number in a hundred moves by one unit in the last place; signs of zero and payloads of NaN change, too."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for name, tensor in weights:
        changed = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.dtype == torch.bfloat16:
            bits = changed.view(-1).view(torch.int16)
            bits[torch.rand(bits.shape, generator=generator) < share] += 1
            if name == "odd":
                bits[:3] ^= torch.tensor([-0x8000, -0x8000, seed], dtype=torch.int16)
        else:
            changed += 1.0
        result.append((name, changed))
    return result


def bits(weights: Weights) -> list[bytes]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, tensor in weights]


class Member:
    """An engine's worker: its memory outlives its membership of an epoch."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps, self.shadow = keeps, HostShadow(is_pinned=False)
        self.receiver: WeightReceiver | None = None

    def join(self, group: WeightGroup, rank: int) -> None:
        self.receiver = make_receiver(group.transport, device="cpu", timeout_s=TIMEOUT_S)
        self.receiver.join(group, rank)

    def receive(self, manifest: WeightManifest) -> Weights:
        assert self.receiver is not None
        if self.keeps:
            self.shadow.receive(self.receiver, manifest)
            return [(name, tensor.clone()) for name, tensor in self.shadow.take()]
        with closing(self.receiver.receive(manifest, fresh_blocks(manifest))) as arriving:
            return list(named_tensors(manifest, arriving))


class Cluster:
    """A trainer's end and threads for the members."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.config = WeightsConfig(transport="gloo", timeout_s=TIMEOUT_S, full_every=FULL_EVERY)
        self.pool, self.directory = pool, directory
        self.members: list[Member] = []
        self.num_epochs = 0
        self.restart()

    def restart(self) -> None:
        """Another process of the trainer."""
        self.publisher = make_publisher(self.config, directory=self.directory, device="cpu")

    def form(self, *members: Member) -> None:
        self.members, self.num_epochs = list(members), self.num_epochs + 1
        names = tuple(f"g{index}" for index in range(len(members)))
        group = self.publisher.open(WeightGroup(self.num_epochs, "gloo", "", names, (1,) * len(names)))
        joining = [self.pool.submit(member.join, group, rank) for rank, member in enumerate(members, 1)]
        self.publisher.form()
        for each in joining:
            each.result()

    def begin(self, version: int, weights: Weights) -> tuple[Future[None], list[Future[Weights]]]:
        specs = tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in weights)
        manifest = make_manifest(version, self.num_epochs, specs, BUCKET_BYTES)
        receiving = [self.pool.submit(member.receive, manifest) for member in self.members]
        return self.pool.submit(self.publisher.publish, manifest, iter(weights)), receiving

    def publish(self, version: int, weights: Weights) -> float:
        """Publish, and see that everybody has it bit for bit.  Returns the share of its bytes that was sent."""
        publishing, receiving = self.begin(version, weights)
        publishing.result()
        for each in receiving:
            assert bits(each.result()) == bits(weights)
        return self.publisher.sent_share

    def until_delta(self, weights: Weights, version: int = 0) -> Weights:
        """Publish steps until one has been sent as a delta; returns the weights then."""
        for step in range(version, version + 4):
            if self.publish(step, weights) < 1:
                return weights
            weights = after_a_step(weights, step + 1)
        raise AssertionError("no delta was sent")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def cluster(tmp_path: Path, pool: ThreadPoolExecutor) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, pool)
    yield cluster
    for member in cluster.members:
        assert member.receiver is not None
        member.receiver.leave()
    cluster.publisher.dissolve()


def test_steps_are_sent_as_what_has_changed_and_one_version_in_so_many_whole(cluster: Cluster) -> None:
    cluster.form(Member(), Member())
    weights, shares = first_weights(), []
    for version in range(2 * FULL_EVERY + 2):
        shares.append(cluster.publish(version, weights))
        weights = after_a_step(weights, version + 1)
    whole = [index for index, share in enumerate(shares) if share == 1]
    assert whole == [*range(0, len(shares), FULL_EVERY)]
    assert all(share < 0.05 for share in shares if share != 1)


def test_nothing_new_and_everything_new_arrive_as_well(cluster: Cluster) -> None:
    cluster.form(Member())
    weights = cluster.until_delta(first_weights())
    assert cluster.publish(7, weights) < 0.01
    assert cluster.publish(8, after_a_step(weights, 8, share=1.0)) == 1


def test_a_bucket_that_has_changed_much_is_sent_as_it_is_among_deltas(cluster: Cluster) -> None:
    cluster.form(Member())
    weights = cluster.until_delta(first_weights())
    head = after_a_step(weights, 9, share=1.0)[-1]
    share = cluster.publish(9, [*after_a_step(weights, 9)[:-1], head])
    alone = head[1].numel() / sum(tensor.numel() for _, tensor in weights)
    assert alone < share < alone + 0.05


def test_who_joins_gets_a_whole_version_and_the_others_with_it(cluster: Cluster) -> None:
    old, new = Member(), Member()
    cluster.form(old)
    weights = cluster.until_delta(first_weights())
    cluster.form(old, new)
    assert cluster.publish(10, after_a_step(weights, 10)) == 1
    cluster.until_delta(after_a_step(weights, 11), version=11)


def test_a_trainer_that_was_started_again_sends_a_whole_version(cluster: Cluster) -> None:
    member = Member()
    cluster.form(member)
    weights = cluster.until_delta(first_weights())
    cluster.publisher.dissolve()
    cluster.restart()
    cluster.form(member)
    assert cluster.publish(10, after_a_step(weights, 10)) == 1


def test_who_has_missed_a_version_gets_a_whole_one(cluster: Cluster) -> None:
    """Its memory holds another version than the trainer codes against, whatever both were told."""
    ahead, behind = Member(), Member()
    cluster.form(ahead, behind)
    weights = cluster.until_delta(first_weights())
    cluster.form(ahead)
    weights = cluster.until_delta(after_a_step(weights, 20), version=20)
    cluster.form(ahead, behind)
    assert cluster.publish(30, after_a_step(weights, 30)) == 1


def test_a_member_without_the_memory_of_the_version_before_is_never_given_a_delta(cluster: Cluster) -> None:
    """Its process goes on, and what it had received is gone, in the middle of an epoch."""
    member = Member()
    cluster.form(member)
    weights = cluster.until_delta(first_weights())
    member.shadow = HostShadow(is_pinned=False)
    weights = after_a_step(weights, 12)
    assert cluster.publish(13, weights) == 1


def test_one_that_keeps_nothing_gets_every_version_whole(cluster: Cluster) -> None:
    cluster.form(Member(keeps=False))
    weights = first_weights()
    for version in range(4):
        assert cluster.publish(version, weights) == 1
        weights = after_a_step(weights, version + 1)


def test_of_float32_weights_no_copy_is_kept(cluster: Cluster) -> None:
    cluster.form(Member())
    weights = first_weights(torch.float32)
    for version in range(4):
        assert cluster.publish(version, weights) == 1
    assert vars(cluster.publisher)["_image"].blocks == []


def test_a_damaged_delta_is_found_never_served_and_answered_by_a_whole_version(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, hurt = Member(), Member()
    cluster.form(sound, hurt)
    weights = after_a_step(cluster.until_delta(first_weights()), 14)
    wrong = chain([12345], repeat(None))
    with monkeypatch.context() as damage:
        damage.setattr("rlhpc.weights.deltas.checksum64", lambda data: next(wrong) or checksum64(data))
        publishing, receiving = cluster.begin(14, weights)
        for each in receiving:
            with pytest.raises(TornWeights, match="a delta has checksum"):
                each.result()
        with pytest.raises(GroupFailed, match="torn"):
            publishing.result()
    for member in (sound, hurt):
        with pytest.raises(TornWeights):
            member.shadow.take()
    cluster.form(sound, hurt)
    assert cluster.publish(15, weights) == 1


def test_deltas_that_are_switched_off_are_not_sent(cluster: Cluster) -> None:
    cluster.config = cluster.config.model_copy(update={"delta": "off"})
    cluster.restart()
    cluster.form(Member())
    weights = first_weights()
    for version in range(4):
        assert cluster.publish(version, weights) == 1
