"""Pieces from all ranks become whole tensors on one, in order, within the announced memory."""

from __future__ import annotations

import pytest
import torch

from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_tensors import BUCKET_SHARDS, Shard, ShardedTensorSpec, gather_stream
from tests.unit.training.live_bytes import LiveBytes
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts

CPU = torch.device("cpu")
RANKS = 2
SIZES = (40, 7, 300, 1, 64, 64, 5)  # of the pieces of each item
BUCKET = 200
BUCKETS = (1, BUCKET, 1 << 20)
ELEMENT = 4  # bytes


def halves(index, *, num_elements=None, joined=torch.cat):
    """One tensor, an equal piece of it on each rank."""
    size = SIZES[index] if num_elements is None else num_elements
    spec = TensorSpec(f"tensor {index}", "float32", (RANKS * size,))
    return ShardedTensorSpec(
        (spec,), tuple(Shard(rank, size) for rank in range(RANKS)), lambda pieces: [joined(pieces)]
    )


def piece(rank, index, size):
    """What a rank holds."""
    return torch.arange(size, dtype=torch.float32) + 1000 * rank + 10_000 * index


def stream(rank, items, *, own=None, bucket=BUCKET):
    def held(index):
        return [piece(rank, index, p.num_elements) for p in items[index].shards if p.rank == rank]

    return gather_stream(items, own or held, to_rank=0, dtype=torch.float32, device=CPU, bucket_elements=bucket)


def all_items():
    return [halves(index) for index in range(len(SIZES))]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By rank: what each of the functions below returned there, one after the other in one pair of processes."""
    return run_ranks(RANKS, everything, tmp_path_factory.mktemp("ranks"), timeout_s=120)


def everything(rank, world_size):
    return {
        "collected": {bucket: collected(rank, bucket) for bucket in BUCKETS},
        "peak bytes": {bucket: peak_bytes(rank, bucket) for bucket in BUCKETS},
        "closed after one": closed_after_one(rank),
        "failed to join": with_a_join_that_fails(rank),
        "from one rank only": from_one_rank_only(rank),
    }


def collected(rank, bucket):
    return [(name, tensor.clone()) for name, tensor in stream(rank, all_items(), bucket=bucket)]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_whole_tensors_come_in_order_on_one_rank_and_nothing_on_the_other(seen, bucket):
    lead, other = (of_rank["collected"][bucket] for of_rank in seen)
    assert other == []
    assert [name for name, _ in lead] == [f"tensor {index}" for index in range(len(SIZES))]
    for index, (_, tensor) in enumerate(lead):
        assert torch.equal(tensor, torch.cat([piece(rank, index, SIZES[index]) for rank in range(RANKS)]))


def peak_bytes(rank, bucket):
    """What receiving and joining takes; a rank's own pieces are there anyway, and are not counted."""
    own = [piece(rank, index, size) for index, size in enumerate(SIZES)]
    with LiveBytes(*own) as bytes_of:
        for _name, tensor in stream(rank, all_items(), own=lambda index: [own[index]], bucket=bucket):
            del tensor
    return bytes_of.peak


@pytest.mark.parametrize("bucket", BUCKETS)
def test_memory_is_one_bucket_and_what_one_item_is_joined_to(seen, bucket):
    lead, other = (of_rank["peak bytes"][bucket] for of_rank in seen)
    largest, everything_sent = RANKS * max(SIZES), sum(SIZES)
    received = min(max(bucket, largest // RANKS), everything_sent)
    assert lead <= ELEMENT * (received + largest)
    assert lead >= ELEMENT * (largest // RANKS + largest), "the largest tensor was not seen: nothing was measured"
    assert other == 0


def closed_after_one(rank):
    """Take one tensor and close; then the group must still work, and nothing stale lie in it."""
    items = all_items()
    tensors = stream(rank, items)
    first = next(tensors, None)
    tensors.close()
    again = [(name, tensor.clone()) for name, tensor in stream(rank, items)]
    return first and first[0], again


def test_closing_early_takes_what_the_others_send_and_leaves_the_group_sound(seen):
    first, again = seen[0]["closed after one"]
    assert first == "tensor 0"
    assert torch.equal(again[1][1], torch.cat([piece(rank, 1, SIZES[1]) for rank in range(RANKS)]))
    assert len(again) == len(SIZES)


def with_a_join_that_fails(rank):
    def broken(pieces):
        raise ArithmeticError("no tensor can be made of this")

    items = all_items()
    items[1] = halves(1, joined=broken)
    try:
        list(stream(rank, items))
        failure = ""
    except ArithmeticError as error:
        failure = str(error)
    return failure, [name for name, _ in stream(rank, all_items())]


def test_an_error_in_joining_leaves_no_rank_waiting(seen):
    (failure, names), (others_failure, _) = (of_rank["failed to join"] for of_rank in seen)
    assert failure == "no tensor can be made of this"
    assert others_failure == ""
    assert len(names) == len(SIZES)


def from_one_rank_only(rank):
    spec = TensorSpec("elsewhere", "float32", (6,))
    items = [
        ShardedTensorSpec((spec,), (Shard(1, 2), Shard(0, 0), Shard(1, 4)), lambda pieces: [torch.cat(pieces)]),
        ShardedTensorSpec((spec,), (Shard(0, 6),), lambda pieces: pieces),
    ]
    asked = []

    def own(index):
        asked.append(index)
        return [piece(rank, index, p.num_elements) for p in items[index].shards if p.rank == rank]

    return [tensor.clone() for _, tensor in stream(rank, items, own=own)], asked


def test_ranks_are_asked_only_for_items_of_which_they_hold_something(seen):
    (tensors, asked), (_, asked_of_other) = (of_rank["from one rank only"] for of_rank in seen)
    assert torch.equal(tensors[0], torch.cat([piece(1, 0, 2), piece(1, 0, 4)]))
    assert torch.equal(tensors[1], piece(0, 1, 6))
    assert (asked, asked_of_other) == ([0, 1], [0])


def test_one_rank_alone_needs_no_group_and_copies_nothing():
    spec = TensorSpec("whole", "float32", (4,))
    held = torch.arange(4.0)
    items = [ShardedTensorSpec((spec,), (Shard(0, 4),), lambda pieces: pieces)]
    ((name, tensor),) = stream(0, items, own=lambda index: [held])
    assert name == "whole"
    assert tensor.data_ptr() == held.data_ptr()


def test_a_batch_has_a_bounded_number_of_messages_however_small_they_are():
    """NCCL has hung on large batches; with 64 ranks of ZeRO-3 one bucket of a small model would have thousands."""
    items = [
        ShardedTensorSpec((TensorSpec(f"tensor {n}", "float32", (1,)),), (Shard(0, 1),), lambda pieces: pieces)
        for n in range(3 * BUCKET_SHARDS)
    ]
    asked = []

    def own(index):
        asked.append(index)
        return [torch.zeros(1)]

    tensors = stream(0, items, own=own, bucket=1 << 20)
    next(tensors)
    assert len(asked) == BUCKET_SHARDS
    tensors.close()


def test_a_piece_of_another_size_or_dtype_than_announced_is_our_own_mistake():
    spec = TensorSpec("whole", "float32", (4,))
    items = [ShardedTensorSpec((spec,), (Shard(0, 4),), lambda pieces: pieces)]
    with pytest.raises(AssertionError, match=r"whole: \[3\] numbers where \[4\] were announced"):
        list(stream(0, items, own=lambda index: [torch.zeros(3)]))
    with pytest.raises(AssertionError):
        list(stream(0, items, own=lambda index: [torch.zeros(4, dtype=torch.bfloat16)]))
