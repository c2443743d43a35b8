"""Ranks: how they meet, where they compute, what they decide together, and how they leave."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.base.host_address import host_address
from rlhpc.base.patience import Deadline
from rlhpc.protocol.errors import ChannelTimeout, CheckpointError, ConfigError, RoleFailed
from rlhpc.training.logprob import all_ranks_agree
from rlhpc.training.ranks import Place, RankContext, close_process_group, connect_ranks, device_of, open_process_group
from rlhpc.training.trainer_state import on_all_ranks
from tests.listening import listening_addresses
from tests.patience import PATIENCE_S
from tests.rank_context import RANKS
from tests.unit.training.rank_processes import run_ranks

# ----------------------------- Ranks find each other by a file in a directory that they share, or say who did not come


def attend(file: Path, rank: int, world_size: int, timeout_s: float = PATIENCE_S) -> Any:
    return connect_ranks(file, rank=rank, world_size=world_size, host="127.0.0.1", timeout_s=timeout_s)


def stale(file: Path, address: str) -> None:
    """What another start of the trainer has left behind."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(Place(address, "of an older start", "gone", 4711))))


def nobody_listens() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rendezvous" / "trainer_0.meeting"


@pytest.mark.parametrize("last", [0, 2])
def test_all_meet_whoever_comes_last(file: Path, last: int) -> None:
    with ThreadPoolExecutor(3) as threads:
        early = [threads.submit(attend, file, rank, 3) for rank in range(3) if rank != last]
        time.sleep(0.2)
        assert not any(rank.done() for rank in early)
        stores = [threads.submit(attend, file, last, 3), *early]
        for number, store in enumerate(stores):
            store.result(PATIENCE_S).set(f"word {number}", "x")
        assert all(store.result().check([f"word {number}"]) for store in stores for number in range(3))
    assert list(file.parent.iterdir()) == []


def test_rank_0_tells_nobody_but_the_user_where_it_is(file: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(attend, file, 0, 2)
        told = until_told(file)
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert told.pid == os.getpid()
        assert told.host == socket.gethostname()
        with pytest.raises(ConnectionRefusedError):  # it listens at the address it was given and at no other
            socket.create_connection(("127.0.0.2", told.endpoint[1]), timeout=1)
        attend(file, 1, 2)
        waiting.result(PATIENCE_S)


def until_told(file: Path) -> Place:
    assert Deadline(PATIENCE_S).wait_for(file.exists, 0.01)
    return Place(**json.loads(file.read_bytes()))


@pytest.mark.waits
def test_rank_0_names_the_ranks_that_are_missing(file: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(attend, file, 0, 4, 3.0)
        until_told(file)
        threads.submit(attend, file, 2, 4, 4.0).add_done_callback(Future.exception)
        with pytest.raises(ChannelTimeout, match=r"ranks 1, 3 of the trainer have not appeared .* after 3 s"):
            waiting.result(PATIENCE_S)
    assert not file.exists()


@pytest.mark.waits
def test_another_rank_names_those_that_are_missing_too(file: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(attend, file, 0, 3, 4.0)
        until_told(file)
        with pytest.raises(ChannelTimeout, match=r"rank 2 of the trainer has not appeared .* after 2 s"):
            attend(file, 1, 3, 2.0)
        with pytest.raises(ChannelTimeout, match="rank 2 of the trainer has"):
            waiting.result(PATIENCE_S)


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_rank_that_finds_no_address_names_rank_0_and_the_file(file: Path, has_directory: bool) -> None:
    if has_directory:
        file.parent.mkdir()
    with pytest.raises(ChannelTimeout, match=rf"rank 0 of the trainer has not appeared after 0.1 s: no {file}"):
        attend(file, 1, 2, 0.1)


def test_a_rank_that_rank_0_does_not_answer_says_where_it_tried(file: Path) -> None:
    address = nobody_listens()
    stale(file, address)
    with pytest.raises(ChannelTimeout, match=rf"process 4711 on gone\) has not replied at {address} after 0.2 s"):
        attend(file, 1, 2, 0.2)


def test_an_address_that_a_dead_rank_0_left_behind_is_read_again(file: Path) -> None:
    stale(file, nobody_listens())
    with ThreadPoolExecutor(1) as threads:
        misled = threads.submit(attend, file, 1, 2)
        time.sleep(0.1)
        store = attend(file, 0, 2)
        assert misled.result(PATIENCE_S).num_keys() == store.num_keys()


@pytest.mark.waits
def test_a_rank_in_another_starts_room_leaves_it_for_the_new_one(tmp_path: Path, file: Path) -> None:
    """Somebody else's store answers at the stale address: its port was given away again."""
    elsewhere = tmp_path / "elsewhere" / "file"
    with ThreadPoolExecutor(2) as threads:
        stranger = threads.submit(attend, elsewhere, 0, 2, 3.0)
        stale(file, until_told(elsewhere).address)
        misled = threads.submit(attend, file, 1, 2)
        time.sleep(0.2)
        store = attend(file, 0, 2)
        assert misled.result(PATIENCE_S).num_keys() == store.num_keys()
        with pytest.raises(ChannelTimeout, match="rank 1 of the trainer has"):  # it was not taken for the stranger's
            stranger.result(PATIENCE_S)


def test_an_address_that_is_not_this_hosts_is_said_so(file: Path) -> None:
    with pytest.raises(RoleFailed, match=r"cannot listen at 203\.0\.113\.7"):
        connect_ranks(file, rank=0, world_size=2, host="203.0.113.7", timeout_s=1.0)
    assert not file.exists()


def join(pipe: Any, file: Path, rank: int, host: str) -> None:
    """A trainer's rank: the default group, then a gloo group beside it, as the command stream makes one."""
    torch.set_num_threads(1)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    ranks = RankContext(rank, 3, f"rendezvous://{file}", host=host, meet_timeout_s=PATIENCE_S)
    open_process_group(ranks, torch.device("cpu"))
    beside = dist.new_group(backend="gloo")
    number = torch.tensor([rank + 1])
    dist.all_reduce(number, group=beside)
    pipe.send((int(number), listening_addresses(os.getpid())))
    pipe.recv()  # all have looked
    close_process_group()


@pytest.mark.starts
def test_every_group_of_three_processes_listens_where_other_hosts_reach_it(file: Path) -> None:
    host = host_address({})
    pipes, processes = [], []
    for rank in (2, 1, 0):
        here, there = RANKS.Pipe()
        processes.append(RANKS.Process(target=join, args=(there, file, rank, host), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        answers = [pipe.recv() if pipe.poll(PATIENCE_S * 2) else None for pipe in pipes]
        for pipe in pipes:
            pipe.send("go")
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [answer[0] for answer in answers] == [6, 6, 6]
    assert {address for answer in answers for address in answer[1]} == {host}
    assert list(file.parent.iterdir()) == []


def test_one_rank_meets_nobody(tmp_path: Path) -> None:
    open_process_group(RankContext(0, 1, f"rendezvous://{tmp_path}/never"), torch.device("cpu"))
    close_process_group()
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------- Where a rank computes, and how it leaves the others


def test_a_rank_computes_on_the_cpu_where_it_shall_or_must() -> None:
    assert device_of("cpu", 3) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert device_of("auto", 3) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_wanted_and_not_seen_is_a_fault_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"trainer\.device='cuda': .* sees no GPU on .*\(CUDA_VISIBLE_DEVICES='7'\)"):
        device_of("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_rank_whose_gpu_does_not_work_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for it on theirs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a machine with a GPU, too
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_of("auto", 0) == torch.device("cpu")  # a torch for CPU, and what somebody's shell has set
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"trainer\.device='auto': .* sees no GPU on .*legal here: 'cpu'"):
        device_of("auto", 0)
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert device_of("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize(("backend", "has_left"), [("gloo", True), ("nccl", False)])
def test_a_rank_that_fails_alone_does_not_destroy_what_all_ranks_have_to_destroy_together(
    monkeypatch: pytest.MonkeyPatch, backend: str, has_left: bool
) -> None:
    open_process_group(RankContext(), torch.device("cpu"))
    monkeypatch.setattr(dist, "get_backend", lambda: backend)  # a group of NCCL needs a GPU

    def fail() -> None:
        with ExitStack() as stack:
            stack.callback(close_process_group)
            raise ConfigError("here alone")

    with pytest.raises(ConfigError):
        fail()
    assert dist.is_initialized() is not has_left
    close_process_group()  # in the order of the program
    assert not dist.is_initialized()


def test_ranks_may_have_as_many_connections_as_the_node_allows() -> None:
    """Each group of gloo takes one for every other rank, and the usual limit is 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        open_process_group(RankContext(), torch.device("cpu"))
        close_process_group()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# --------------------------------------------- What all ranks of a trainer decide together: one that says no is enough

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
def test_all_ranks_hear_no_if_one_says_no_and_what_one_cannot_read_none_goes_on_with(tmp_path: Path) -> None:
    rounds = [(True, True), (True, False), (False, True), (False, False)]
    assert run_ranks(2, votes, tmp_path, rounds) == [[True, False, False, False]] * 2
    assert run_ranks(2, reads, tmp_path, [0, 1, -1]) == [["damaged for 0", "damaged for 1", "read"]] * 2


def test_a_rank_without_others_decides_alone() -> None:
    assert all_ranks_agree(True, CPU)
    assert not all_ranks_agree(False, CPU)
