"""The table of channels: who connects to whom, and which messages they may send.

Every channel is a ROUTER/DEALER pair (or its in-memory twin).  The server end binds, publishes its address in the
rendezvous directory, and accepts from a client only the messages listed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc import messages as m
from rlhpc.types import Lease

MAX_MESSAGE_BYTES = 1 << 30  # anything longer is a bug or an attack
MAX_BATCH_BYTES = 1 << 40  # rows of a batch, from the trusted controller: about 20 bytes per token


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """One row of the table."""

    name: str
    server: str  # role that binds
    clients: tuple[str, ...]  # roles that connect
    to_server: tuple[type, ...]  # messages clients send
    to_client: tuple[type, ...]  # messages the server sends
    capacity_messages: int  # queued per peer and direction before send waits
    max_bytes_to_client: int = MAX_MESSAGE_BYTES

    @property
    def from_server(self) -> tuple[tuple[type, ...], int]:
        """Arguments for a codec of this direction: the messages, and the maximum bytes of one."""
        return self.to_client, self.max_bytes_to_client


CONTROL = ChannelSpec(
    "control", "controller", ("generator", "reward", "trainer"),
    (m.Hello, m.Heartbeat, m.WeightsLive, m.CanaryTaken, m.SaveReport),
    (m.StopRole, m.Reregister, m.JoinGroup, m.ReceiveWeights, m.TakeCanary, m.Quarantine),
    1_000,
)  # fmt: skip
LEASES = ChannelSpec(
    "leases", "controller", ("generator",),
    (m.Delivery, m.LeaseReturn, m.LeaseProgress),
    (Lease, m.CancelGroup, m.Delivered, m.ShowWhole),
    10_000,
)  # fmt: skip
BATCHES = ChannelSpec(
    "batches", "controller", ("trainer",),
    (m.TrainerReady, m.StepReport, m.PartReport, m.GroupOpened, m.PublishReport, m.SnapshotTaken),
    (m.BatchRows, m.TrainBatch, m.FormGroup, m.PublishWeights, m.SaveCheckpoint, m.StopRole),
    8,
    MAX_BATCH_BYTES,
)  # fmt: skip
REWARDS = ChannelSpec(
    "rewards", "reward", ("generator",),
    (m.RewardRequest, m.TurnRequest),
    (m.RewardReply, m.TurnReply, m.StillWaiting),
    10_000,
)  # fmt: skip

TOPOLOGY: dict[str, ChannelSpec] = {spec.name: spec for spec in (CONTROL, LEASES, BATCHES, REWARDS)}
