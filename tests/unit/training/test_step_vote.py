"""What all ranks of a trainer decide together: one that says no is enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhpc.errors import CheckpointError
from rlhpc.training.checkpoint import on_all_ranks
from rlhpc.training.process_group import close_process_group, open_process_group
from rlhpc.training.step_vote import all_ranks_agree
from tests.contracts.trainer_cluster import Rank, RankProcesses

CPU = torch.device("cpu")


def votes(rank: Rank, *, rounds: list[tuple[bool, bool]]) -> list[bool]:
    open_process_group(rank.rank, rank.world_size, f"file://{rank.scratch / 'store'}", CPU)
    outcome = [all_ranks_agree(answers[rank.rank], CPU) for answers in rounds]
    close_process_group()
    return outcome


def reads(rank: Rank, *, fails_on: int) -> str:
    """What a rank makes of a checkpoint that is damaged for one of them."""

    def read() -> str:
        if rank.rank == fails_on:
            raise CheckpointError("damaged here")
        return "read"

    open_process_group(rank.rank, rank.world_size, f"file://{rank.scratch / 'store'}", CPU)
    try:
        return on_all_ranks(read, rank.scratch, CPU)
    except CheckpointError as error:
        return "damaged here" if "damaged here" in str(error) else "another rank failed"
    finally:
        close_process_group()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(2)
    yield processes
    processes.close()


def test_all_ranks_hear_no_if_one_says_no(two_ranks: RankProcesses, tmp_path: Path) -> None:
    rounds = [(True, True), (True, False), (False, True), (False, False)]
    assert two_ranks.run(votes, {}, tmp_path / "run", rounds=rounds) == [[True, False, False, False]] * 2


def test_what_one_rank_cannot_read_no_rank_goes_on_with(two_ranks: RankProcesses, tmp_path: Path) -> None:
    assert two_ranks.run(reads, {}, tmp_path / "first", fails_on=0) == ["damaged here", "another rank failed"]
    assert two_ranks.run(reads, {}, tmp_path / "second", fails_on=1) == ["another rank failed", "damaged here"]
    assert two_ranks.run(reads, {}, tmp_path / "none", fails_on=-1) == ["read", "read"]


def test_a_rank_without_others_decides_alone() -> None:
    assert all_ranks_agree(True, CPU)
    assert not all_ranks_agree(False, CPU)
