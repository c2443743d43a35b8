"""Which ranks may share a card, what each of them sets, and how a whole run finds several cards in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import weights
from launch.doctor.gpus import parse_listing, parse_memory
from rlhpc.weights.choice import choose_transport
from tests.gpu import one_card
from tests.gpu.one_card import DEVICE_WAY, HOSTS, OVER_SOCKETS, PLACE, WAY, Cards, settle

NEW, OLD = (2, 30, 3), (2, 27, 5)


@pytest.mark.parametrize(
    ("cards", "num_ranks", "reason"),
    [
        (Cards(1, OLD), 2, ""),
        (Cards(1, OLD), 4, ""),
        (Cards(2, OLD, HOSTS, "mine"), 2, ""),  # a card each: nothing is shared
        (Cards(1, NEW, DEVICE_WAY), 3, ""),
        (Cards(1, NEW, DEVICE_WAY, "mine"), 3, ""),
        (Cards(0), 1, "needs a CUDA device"),
        (Cards(1, ()), 2, "needs a torch with NCCL"),
        (Cards(1, OLD), 5, r"5 ranks on 1 card\(s\); at most 4 share one"),
        (Cards(1, (2, 8, 4)), 2, r"NCCL 2\.8\.4 refuses two ranks on one card; needs 2\.9"),
        (Cards(1, OLD, DEVICE_WAY), 2, r"NCCL 2\.27\.5 refuses two ranks on one card; needs 2\.30 for \w+=device"),
        (Cards(1, OLD, HOSTS, "n1.7.trainer"), 2, r"NCCL_HOSTID='n1\.7\.trainer' makes one host of all ranks"),
        (Cards(1, OLD, "luck"), 2, r"RLHPC_ONE_CARD_WAY='luck'; legal: hosts, device"),
    ],
)
def test_ranks_share_a_card_only_where_nccl_lets_them(cards: Cards, num_ranks: int, reason: str) -> None:
    if reason:
        assert re.match(reason, cards.why_not(num_ranks))
    else:
        assert cards.why_not(num_ranks) == ""


def test_each_rank_is_a_host_of_its_own_that_speaks_over_sockets() -> None:
    seen = [Cards(1, OLD).environment(rank, 3) for rank in range(3)]
    assert len({each["NCCL_HOSTID"] for each in seen}) == 3
    for each in seen:
        assert (each["NCCL_SOCKET_IFNAME"], each["NCCL_IB_DISABLE"]) == ("lo", "1")
        assert 1 <= int(each["NCCL_MAX_CTAS"]) <= 4


def test_ranks_of_one_host_ask_nccl_for_several_on_a_device() -> None:
    (seen,) = {tuple(Cards(1, NEW, DEVICE_WAY).environment(rank, 2).items()) for rank in range(2)}
    assert dict(seen)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in dict(seen)


def test_ranks_with_cards_of_their_own_set_nothing() -> None:
    assert Cards(2, OLD).environment(1, 2) == {}


def test_on_cpu_the_same_tests_run_with_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLACE, "cpu")
    assert (one_card.place(), one_card.why_not(9), one_card.environment_of(0, 9)) == ("cpu", "", {})
    assert one_card.several_nodes(tmp_path, 3) == {}
    monkeypatch.delenv(PLACE)
    assert one_card.place() == "cuda"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one card of 80 GB, as torch and nvidia-smi show it."""
    monkeypatch.setattr(Cards, "here", lambda: Cards(1, OLD))
    monkeypatch.setattr(one_card, "_memory_mib", lambda: 81_559)
    for name in (PLACE, WAY):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.starts
def test_a_run_finds_a_card_for_each_process_and_each_role_takes_the_one_there_is(
    one_gpu: None, tmp_path: Path
) -> None:
    there = os.environ | one_card.several_nodes(tmp_path, 3)

    def said(*words: str, **variables: str) -> str:
        done = subprocess.run(words, env=there | variables, capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout

    machine = parse_listing(said("nvidia-smi", "-L"))
    machine = parse_memory(machine, said("nvidia-smi", "--query-gpu=uuid,memory.total"))
    assert [round(gpu.memory_gib) for gpu in machine] == [27] * 3
    ask = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('NCCL_HOSTID'))"
    role = ("-m", "rlhpc.roles", "generator", "--replica", "1")
    assert said(sys.executable, "-c", ask, *role, CUDA_VISIBLE_DEVICES="2") == "0 generator-1\n"
    assert said(sys.executable, "-c", ask, CUDA_VISIBLE_DEVICES="2", NCCL_HOSTID="x") == "2 x\n"


def test_the_roles_of_a_run_are_hosts_that_weights_reach_by_nccl() -> None:
    """Named as rlhpc/weights/memory.py names them."""
    devices = {}
    for role, replica in (("trainer", 0), ("generator", 0), ("generator", 1)):
        environment = {"CUDA_VISIBLE_DEVICES": "1"}
        settle(["python", "-m", "rlhpc.roles", role, "--replica", str(replica)], environment)
        devices[f"{role}-{replica}"] = f"GPU-a@{environment['NCCL_HOSTID']}"
        assert environment.items() >= OVER_SOCKETS.items()
    trainer = devices.pop("trainer-0")
    assert choose_transport("nccl", trainer, {name: [device] for name, device in devices.items()}) == "nccl"


def test_a_role_without_a_gpu_is_given_none() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    settle(["python", "-m", "rlhpc.roles", "controller", "--replica", "0"], environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_measurement_over_nccl_is_taken_after_another(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has given this process a name, which is no reason to refuse the second."""
    monkeypatch.setattr(Cards, "here", lambda: Cards(1, OLD, HOSTS, os.environ.get("NCCL_HOSTID", "")))
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    weights.cards_here.cache_clear()
    for num_ranks in (2, 3):
        names = [weights.host_of("nccl", rank, num_ranks)["NCCL_HOSTID"] for rank in range(num_ranks)]
        assert len(set(names)) == num_ranks
        monkeypatch.setenv("NCCL_HOSTID", names[0])
    with pytest.raises(SystemExit, match="nccl: 5 ranks"):
        weights.host_of("nccl", 0, 5)
    weights.cards_here.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_its_tests_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLACE, raising=False)
    assert one_card.why_not(2) == "needs a CUDA device"
