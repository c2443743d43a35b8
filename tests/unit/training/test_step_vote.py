"""What all ranks of a trainer decide together: one that says no is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhpc.protocol.errors import CheckpointError
from rlhpc.training.logprob import all_ranks_agree
from rlhpc.training.trainer_state import on_all_ranks
from tests.unit.training.rank_processes import run_ranks

CPU = torch.device("cpu")


def votes(rank: int, world_size: int, rounds: list[tuple[bool, bool]]) -> list[bool]:
    return [all_ranks_agree(answers[rank], CPU) for answers in rounds]


def reads(rank: int, world_size: int, failing: list[int]) -> list[str]:
    """What a rank makes of checkpoints of which each is damaged for one rank, −1: for none."""

    def read(failing_rank: int) -> str:
        if rank == failing_rank:
            raise CheckpointError(f"damaged for {rank}")
        return "read"

    results = []
    for failing_rank in failing:
        try:
            results.append(on_all_ranks(lambda each=failing_rank: read(each)))  # type: ignore[misc]
        except CheckpointError as error:
            results.append(str(error))
    return results


@pytest.mark.starts
def test_all_ranks_hear_no_if_one_says_no(tmp_path: Path) -> None:
    rounds = [(True, True), (True, False), (False, True), (False, False)]
    assert run_ranks(2, votes, tmp_path, rounds) == [[True, False, False, False]] * 2


@pytest.mark.starts
def test_what_one_rank_cannot_read_no_rank_goes_on_with(tmp_path: Path) -> None:
    assert run_ranks(2, reads, tmp_path, [0, 1, -1]) == [["damaged for 0", "damaged for 1", "read"]] * 2


def test_a_rank_without_others_decides_alone() -> None:
    assert all_ranks_agree(True, CPU)
    assert not all_ranks_agree(False, CPU)
