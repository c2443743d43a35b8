"""A copy changes places with what it is a copy of, and both come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rlhpc.training.backends import HeldParameters
from tests.unit.training.live_bytes import LiveBytes


def parameters() -> list[Tensor]:
    """Two dtypes, odd sizes, a number without dimensions, nothing at all, a view, and what is not a number."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(40, 7, generator=draw)
    broken = torch.tensor([float("nan"), -0.0, float("-inf")])
    half = torch.randn(1000, 3, generator=draw).bfloat16()
    return [whole[3:20], half, torch.tensor(2.5), torch.empty(0, 4), whole[20:], broken]


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def changed(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(-1.5).add_(1)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_they_hold_the_copy_while_it_is_asked_and_every_bit_of_their_own_after_it(memory: str) -> None:
    live = parameters()
    held, first = HeldParameters(lambda: live), bits(live)
    held.hold(memory)
    changed(live)
    own = bits(live)
    assert own != first
    for _ in range(2):
        with held.in_place():
            assert bits(live) == first
        assert bits(live) == own
    with held.in_place(is_wanted=False):
        assert bits(live) == own
    places = [tensor.data_ptr() for tensor in held._held]
    held.hold(memory)
    assert [tensor.data_ptr() for tensor in held._held] == places  # no second copy while it is replaced
    changed(live)
    with held.in_place():
        assert bits(live) == own


def test_an_error_while_the_copy_is_in_place_leaves_both_as_they_were() -> None:
    live = parameters()
    held, first = HeldParameters(lambda: live), bits(live)
    held.hold("host")
    changed(live)
    own = bits(live)
    with pytest.raises(ValueError, match="in between"), held.in_place():
        raise ValueError("in between")
    assert bits(live) == own
    with held.in_place():
        assert bits(live) == first


def test_tensors_are_written_to_only_within_what_their_backend_puts_around_it() -> None:
    live, seen = parameters(), []

    @contextmanager
    def around() -> Iterator[None]:
        seen.append(bits(live))
        yield
        seen.append(bits(live))

    held, first = HeldParameters(lambda: live, around), bits(live)
    held.hold("device")
    changed(live)
    own = bits(live)
    with held.in_place():
        pass
    assert seen == [own, first, first, own]


def test_beside_model_and_copy_there_is_one_tensor_more_of_the_largest_size() -> None:
    live = [torch.randn(100, 100) for _ in range(5)] + [torch.randn(300, 100)]
    held = HeldParameters(lambda: live)
    with LiveBytes(*live) as holding:
        held.hold("host")
    total = sum(tensor.nbytes for tensor in live)
    assert total <= holding.peak <= total + 6 * 512
    with LiveBytes(*live, *held._held) as asking, held.in_place():
        pass
    assert asking.peak == live[-1].nbytes


def test_without_a_copy_there_is_nothing_to_ask_and_one_that_was_released_is_forgotten() -> None:
    live = parameters()
    held = HeldParameters(lambda: live)
    for _ in range(2):
        with pytest.raises(AssertionError, match="no reference is held"), held.in_place():
            pass
        held.hold("host")
        held.release()
        held.release()
