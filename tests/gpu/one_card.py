"""Several ranks on one card: each is a host of its own to NCCL, so that one card shows what several nodes do.

NCCL refuses two ranks on one GPU.  It takes them for one only if host and GPU are the same, and its name of the host is
NCCL_HOSTID where that is set.  Ranks with names of their own are nodes without InfiniBand: they meet, send and abort
over sockets, here those of the loopback interface.  Their kernels take turns on the card, so models are tiny and ranks
few.

RLHPC_ONE_CARD=cpu runs the same tests on CPU with gloo in NCCL's place; RLHPC_ONE_CARD_WAY=device asks NCCL itself
for several ranks on a device in the place of names of hosts (experimental, since NCCL 2.30), but not in whole runs,
whose controller goes by names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACE, WAY = "RLHPC_ONE_CARD", "RLHPC_ONE_CARD_WAY"
HOSTS, DEVICE_WAY = "hosts", "device"
MAX_RANKS = 4  # of one card: whoever waits for another's kernel keeps it from running
OLDEST_NCCL = {HOSTS: (2, 9), DEVICE_WAY: (2, 30)}
SEVERAL_ON_A_DEVICE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC"}
OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": "2"}
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Cards:
    """What decides whether ranks can share cards here."""

    num_cards: int
    nccl: tuple[int, ...] = ()  # version; (): torch has none
    way: str = HOSTS
    named: str = ""  # NCCL_HOSTID of this process

    @classmethod
    def here(cls) -> Cards:
        """Look at this machine."""
        import torch

        num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        has_nccl = num_cards and torch.distributed.is_nccl_available()
        version = tuple(torch.cuda.nccl.version()) if has_nccl else ()  # type: ignore[no-untyped-call]
        return cls(num_cards, version, os.environ.get(WAY, HOSTS), os.environ.get("NCCL_HOSTID", ""))

    def why_not(self, num_ranks: int) -> str:
        """Return why so many ranks cannot be connected by NCCL here; "" if they can."""
        if not self.num_cards:
            return "needs a CUDA device"
        if not self.nccl:
            return "needs a torch with NCCL"
        if self.num_cards >= num_ranks:
            return ""
        if self.way not in OLDEST_NCCL:
            return f"{WAY}={self.way!r}; legal: {', '.join(OLDEST_NCCL)}"
        oldest = OLDEST_NCCL[self.way]
        if self.nccl < oldest:
            told, wanted = (".".join(map(str, version)) for version in (self.nccl, oldest))
            return f"NCCL {told} refuses two ranks on one card; needs {wanted} for {WAY}={self.way}"
        if num_ranks > MAX_RANKS * self.num_cards:
            return f"{num_ranks} ranks on {self.num_cards} card(s); at most {MAX_RANKS} share one"
        if self.named and self.way == HOSTS:
            return f"NCCL_HOSTID={self.named!r} makes one host of all ranks; unset it"
        return ""

    def environment(self, rank: int, num_ranks: int) -> dict[str, str]:
        """Return what the process of a rank sets before it first uses NCCL; {} where each has a card of its own."""
        if self.num_cards >= num_ranks:
            return {}
        if self.way == DEVICE_WAY:
            return OVER_SOCKETS | SEVERAL_ON_A_DEVICE
        return OVER_SOCKETS | {"NCCL_HOSTID": f"rank-{rank}"}


def place() -> str:
    """Return the device of these tests: "cuda", or "cpu" with gloo in NCCL's place."""
    return "cpu" if os.environ.get(PLACE) == "cpu" else "cuda"


def why_not(num_ranks: int) -> str:
    """Return why tests with so many ranks are skipped; "" if they run."""
    return "" if place() == "cpu" else Cards.here().why_not(num_ranks)


def environment_of(rank: int, num_ranks: int) -> dict[str, str]:
    """Return the variables of a rank's process (Cards.environment)."""
    return {} if place() == "cpu" else Cards.here().environment(rank, num_ranks)


# ------------------------------------------------------------------------------------------------------- whole runs


def several_nodes(directory: Path, num_processes: int) -> dict[str, str]:
    """Return an environment in which `rlhpc run` finds a card for each of its processes: the one of this machine.

    Its nvidia-smi lists the card `num_processes` times; every role takes the first card, under a host name of its own
    (sitecustomize).  Where the cards suffice, or on CPU, nothing is changed.
    """
    if place() == "cpu" or Cards.here().num_cards >= num_processes:
        return {}
    hook = directory / "one-card"
    hook.mkdir(parents=True)
    code = "import os, sys\n\nfrom tests.gpu.one_card import settle\n\nsettle(sys.orig_argv, os.environ)\n"
    (hook / "sitecustomize.py").write_text(code, encoding="utf-8")
    listing = hook / "nvidia-smi"
    listing.write_text(_listing(num_processes, _memory_mib() // num_processes), encoding="utf-8")
    listing.chmod(0o755)
    path = os.environ.get("PATH", os.defpath)
    code_path = [str(hook), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {"PATH": f"{hook}{os.pathsep}{path}", "PYTHONPATH": os.pathsep.join(code_path)}


def settle(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Give a role of a run, told from the words of its command, the first card and a host name of its own."""
    if "rlhpc.roles" not in words or "--replica" not in words:
        return
    role, replica = words[words.index("rlhpc.roles") + 1], words[words.index("--replica") + 1]
    if environment.get("CUDA_VISIBLE_DEVICES"):
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    environment.update(OVER_SOCKETS | {"NCCL_HOSTID": f"{role}-{replica}"})


def _memory_mib() -> int:
    command = [shutil.which("nvidia-smi") or "nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def _listing(num_cards: int, memory_mib: int) -> str:
    names = [f"GPU-00000000-0000-0000-0000-{index:012d}" for index in range(num_cards)]
    cards = "\n".join(f"echo 'GPU {index}: one card (UUID: {name})'" for index, name in enumerate(names))
    memory = "\n".join(f"echo '{name}, {memory_mib}'" for name in names)
    return f'#!/bin/sh\nif [ "$1" = -L ]; then\n{cards}\nelse\n{memory}\nfi\n'
