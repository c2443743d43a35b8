"""Choose the weight transport from the placement of trainer and engines, never from how many GPUs a process sees.

Input: weights.transport, the device of the trainer's rank 0, the devices of every engine's workers.  Output: gloo,
nccl or ipc.  A device is "" for the CPU, else a unique name: a GPU's UUID, or its index in CUDA_VISIBLE_DEVICES
if all names belong to one machine; behind it "@" and the process's NCCL_HOSTID, where one is set.  NCCL refuses two
ranks only if GPU and host are the same, IPC needs the same GPU whatever NCCL calls its hosts.  Pure, without torch:
launcher and controller both use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhpc.protocol.errors import CheckpointError, ConfigError
from rlhpc.protocol.types import WeightGroup

# ----------------------------------------------------------------------------------------------------------- membership
#
# Membership of weight broadcasts, and the version that each member samples with.
#
# Input: events at the controller (Hello, WeightsLive, silence).  Output: WeightGroup.  Pure: no clock, no sockets, no
# torch.
#
# Rules:
# 1. A membership epoch has a fixed roster.  When a generator joins, leaves or restarts, a new epoch is needed; an
#    existing epoch is never joined or left.
# 2. A member that is lost or fails is no longer waited for, and breaks the epoch.  A failed one is in the next epoch; a
#    lost one is in the next epoch after it has sent Hello again.  A late joiner enters the next epoch.
# 3. Epoch numbers only grow, across restarts of the controller too: state() holds the last one.
# 4. An acknowledgement counts if it is for the current epoch and from one of its members; it then holds until the
#    member is lost or restarts, so that a member need not acknowledge the same version again in a new epoch.


NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Member:
    """A generator that is alive."""

    num_ranks: int
    incarnation: str
    policy_version: int = NO_VERSION  # the newest it has acknowledged


class Membership:
    """The roster of live generators and the epoch formed from it."""

    def __init__(self) -> None:
        """Starts without generators and without an epoch."""
        self._members: dict[str, Member] = {}
        self._last_epoch = 0
        self._group: WeightGroup | None = None
        self._roster: dict[str, str] = {}  # of the current epoch: name → incarnation

    # ------------------------------------------------------------------------------------------- who is here

    def hello(self, name: str, num_ranks: int, incarnation: str) -> None:
        """A generator has registered.  Idempotent for one incarnation; a new one starts without a version.

        Raises ValueError if it has no rank that receives.
        """
        if num_ranks < 1:
            raise ValueError(f"{name}: num_weight_ranks={num_ranks}; legal: 1 or more")
        known = self._members.get(name)
        if known is None or known.incarnation != incarnation or known.num_ranks != num_ranks:
            self._members[name] = Member(num_ranks, incarnation)
            self._roster.pop(name, None)  # so that an epoch of the old incarnation never counts as complete

    def lost(self, name: str) -> None:
        """A generator died or fell silent.  Unknown names are ignored."""
        self._members.pop(name, None)
        self._roster.pop(name, None)  # so that it is not a member of this epoch even if it comes back at once

    def failed(self, name: str, epoch: int) -> None:
        """A generator could not join this epoch or receive in it, but is alive: it tries again in the next one.

        It keeps its version.  Ignored if for another epoch.
        """
        if self._group is not None and self._group.epoch == epoch:
            self._roster.pop(name, None)

    # ---------------------------------------------------------------------------------------------- epochs

    @property
    def candidates(self) -> frozenset[str]:
        """All live generators: the members of the next epoch."""
        return frozenset(self._members)

    @property
    def is_whole(self) -> bool:
        """True if every member of the current epoch is alive: only then can a broadcast succeed."""
        return self._group is not None and all(
            name in self._members and self._roster.get(name) == self._members[name].incarnation
            for name in self._group.members
        )

    @property
    def needs_new_epoch(self) -> bool:
        """True if a generator is alive and the current epoch's roster differs from the live generators."""
        if not self._members:
            return False
        return not self.is_whole or self._roster != {name: m.incarnation for name, m in self._members.items()}

    def next_group(self, transport: str, address: str = "") -> WeightGroup:
        """Form a new epoch of all live generators, sorted by name, and make it the current one.

        Raises ValueError if there is none.
        """
        if not self._members:
            raise ValueError("no generator is alive to form a group with")
        self._last_epoch += 1
        names = tuple(sorted(self._members))
        ranks = tuple(self._members[name].num_ranks for name in names)
        self._group = WeightGroup(self._last_epoch, transport, address, names, ranks)
        self._roster = {name: self._members[name].incarnation for name in names}
        return self._group

    # -------------------------------------------------------------------------------------------- versions

    def acknowledged(self, name: str, epoch: int, policy_version: int) -> bool:
        """A member serves this version.  Returns False, without effect, if rule 4 does not count it."""
        member = self._members.get(name)
        is_present = self._group is not None and self._group.epoch == epoch
        if member is None or not is_present or self._roster.get(name) != member.incarnation:
            return False
        self._members[name] = replace(member, policy_version=policy_version)
        return True

    def waiting_for(self, policy_version: int) -> frozenset[str]:
        """Live members of the current epoch that do not serve this version or a newer one yet."""
        return frozenset(
            name for name in self._roster if name in self._members and not self.serves(name, policy_version)
        )

    def live_members(self, policy_version: int) -> frozenset[str]:
        """Live generators that serve this version or a newer one, in any epoch: these may get leases."""
        return frozenset(name for name in self._members if self.serves(name, policy_version))

    def serves(self, name: str, policy_version: int) -> bool:
        """True for a live generator that serves this version or a newer one."""
        member = self._members.get(name)
        return member is not None and member.policy_version >= policy_version

    # ----------------------------------------------------------------------------------------------- restart

    def state(self) -> dict[str, Any]:
        """JSON for the checkpoint.  Live generators register again; only the counter has to survive."""
        return {"last_epoch": self._last_epoch}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue counting epochs.  Raises CheckpointError if there is no count in it."""
        last_epoch = state.get("last_epoch")
        if not isinstance(last_epoch, int) or last_epoch < 0:
            raise CheckpointError(f"membership: last_epoch={last_epoch!r} is not a count of epochs")
        self._last_epoch = max(self._last_epoch, last_epoch)


# --------------------------------------------------------------------------------------------------------------- choice


TRANSPORTS = ("gloo", "nccl", "ipc")
CPU = ""
MIG = "MIG-"  # prefix of NVIDIA's names for GPU partitions
HOST = "@"  # between a GPU and the host of its process


def choose_transport(
    wish: str,
    trainer: str,
    engines: Mapping[str, Sequence[str]],
    *,
    is_one_host: bool = False,
    is_deterministic: bool = False,
) -> str:
    """Resolve "auto", or check the setting.

    On CUDA nccl between GPUs, ipc within one; on CPU ipc on one host, gloo between hosts.
    engines: name → devices of its workers.  is_one_host: all run on one host, and share its memory.
    is_deterministic: run.deterministic, for which vLLM and the trainer set NCCL's algorithms differently, so that a
    communicator of both would hang in its first collective (vllm.utils.nccl): gloo replaces nccl.
    Raises ConfigError, which names all devices, for a setting that cannot work there, and for "auto" if some engines
    share the trainer's GPU and others do not.
    """
    if wish not in ("auto", *TRANSPORTS):
        raise ConfigError(f"weights.transport={wish!r}; legal: auto, {', '.join(TRANSPORTS)}")
    if wish == "gloo":
        return wish
    if wish == "ipc":
        return _ipc(trainer, engines)
    if wish == "nccl":
        if is_deterministic:
            raise ConfigError(
                "weights.transport='nccl' with run.deterministic=true: vLLM's batch-invariant engine and the trainer "
                "set NCCL differently and would wait for each other; legal: auto, gloo, ipc"
            )
        return _nccl(trainer, engines)
    workers = [device for devices in engines.values() for device in devices]
    if trainer == CPU and all(device == CPU for device in workers):
        return "ipc" if is_one_host else "gloo"
    if trainer == CPU or CPU in workers:
        return "gloo"
    if _gpu(trainer) in map(_gpu, workers):
        return _ipc(trainer, engines)
    # NCCL cannot connect two partitions of one GPU, and we cannot tell whether these belong to one.
    is_by_gloo = is_deterministic or any(device.startswith(MIG) for device in (trainer, *workers))
    return "gloo" if is_by_gloo else _nccl(trainer, engines)


def _ipc(trainer: str, engines: Mapping[str, Sequence[str]]) -> str:
    trainer = _gpu(trainer)
    engines = {name: [_gpu(device) for device in devices] for name, devices in engines.items()}
    near = [name for name, devices in engines.items() if trainer in devices]
    apart = [name for name, devices in engines.items() if any(device != trainer for device in devices)]
    if apart:
        raise ConfigError(
            f"weights cannot travel by ipc to {', '.join(apart)}: {' and '.join(['trainer-0', *near])} on "
            f"{_words([trainer])}, {apart[0]} on {_words(engines[apart[0]])}, and {_legal(trainer, engines)}"
        )
    return "ipc"


def _nccl(trainer: str, engines: Mapping[str, Sequence[str]]) -> str:
    owners = {trainer: "trainer-0"}
    for name, devices in engines.items():
        for device in devices:
            if CPU in (device, trainer):
                who = name if device == CPU else "trainer-0"
                raise ConfigError(f"weights.transport='nccl', and {who} is on CPU; legal: auto, gloo")
            if device in owners:
                raise ConfigError(
                    f"weights cannot travel by nccl: {owners[device]} and {name} are both on {_words([device])}, and "
                    f"{_legal(trainer, engines)}"
                )
            owners[device] = name
    if trainer == CPU:
        raise ConfigError("weights.transport='nccl', and trainer-0 is on CPU; legal: auto, gloo")
    return "nccl"


def _legal(trainer: str, engines: Mapping[str, Sequence[str]]) -> str:
    if all(_gpu(device) == _gpu(trainer) for devices in engines.values() for device in devices):
        return "NCCL wants a GPU for each; legal: weights.transport auto, ipc, gloo"
    return (
        "NCCL wants a GPU for each, ipc the same GPU for all; legal: all engines on the trainer's GPU, or none, or "
        "weights.transport='gloo' (slower, through host memory)"
    )


def _words(devices: Sequence[str]) -> str:
    return ", ".join(f"GPU {device}" if device.isdigit() else _gpu(device) or "the CPU" for device in devices)


def _gpu(device: str) -> str:
    return device.partition(HOST)[0]
