"""Messages between roles, besides the data types themselves.  Sent over the channels below them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhpc.protocol.types import (
    Float32,
    HeldChecksum,
    Int32,
    Lease,
    PackedBatch,
    PackedMinibatch,
    Prefix,
    ScoredRollout,
    UInt8,
    WeightGroup,
    WeightManifest,
)

# ------------------------------------------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of every role to the controller."""

    role: str
    replica: int
    incarnation: str  # unique for each start of a process; older ones are fenced
    config_hash: str
    pid: int
    host: str
    num_weight_ranks: int = 0  # engine workers that receive weights; 0 for roles that receive none
    weight_devices: tuple[str, ...] = ()  # of these workers, as weights/memory.py calls them; "" for the CPU
    code: str = ""  # digest of the package that this process runs (user_code.py); "": not known
    service: str = ""  # of a process of a [[service]], its name


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent by every role at a fixed interval."""

    state: str  # one word: "starting", "running", "draining", ...
    waits_for: str  # "" when it is not waiting
    policy_version: int  # -1 where it has none
    capacity_samples: int = 0  # generators: rollouts it is willing to hold at once (its credit window)
    metrics: dict[str, float] = field(default_factory=dict)
    incarnation: str = ""  # generators: as in their Hello, which may have been lost with a connection


@dataclass(frozen=True, slots=True)
class StopRole:
    """Finish what must not be lost, then exit."""

    reason: str
    run_is_over: bool = True  # False: another controller follows; supervised roles wait for it


@dataclass(frozen=True, slots=True)
class CancelGroup:
    """The group was dropped: abort its rollouts."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """Generator → controller: a rollout, which the generator keeps until the controller has it on disk."""

    number: int  # of this generator's deliveries, from 1; a resent delivery keeps its number
    oldest: int  # deliveries below this number need no answer
    outbox: str  # identifies the numbering; new at each start of the process
    timeline: int  # of the weights that sampled it (JoinGroup)
    prompt_checksum: int  # of the tokens of its lease's prompt (buffer/prefixes.py)
    scored: ScoredRollout


@dataclass(frozen=True, slots=True)
class Delivered:
    """Controller → generator: all deliveries up to this number are on disk."""

    number: int
    outbox: str


@dataclass(frozen=True, slots=True)
class LeaseReturn:
    """A generator hands back members of a lease, with the tokens it has generated."""

    group_id: int
    sample_indices: tuple[int, ...]
    prefixes: tuple[Prefix | None, ...]
    reason: str
    timeline: int  # of the weights that sampled them (JoinGroup)


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """Generator → controller: tokens of running rollouts since the last report, kept in case the generator dies."""

    pieces: UInt8  # buffer/prefixes.py
    num_bytes: int  # size of these before compression
    timeline: int  # of the weights that sample them (JoinGroup)


@dataclass(frozen=True, slots=True)
class ShowWhole:
    """Controller → generator: the beginning of these rollouts is missing; report them from their first token on."""

    members: tuple[tuple[int, int], ...]  # (group, sample index)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """Score one completion.  Idempotent: a second request gives the same reply."""

    request_id: int
    task: str
    completion: str
    reference: str


@dataclass(frozen=True, slots=True)
class RewardReply:
    """The verdict on one completion."""

    request_id: int
    reward: float
    verdict: str  # a types.Verdict
    reward_parts: dict[str, float]
    detail: str
    rewards_at: dict[int, float] = field(default_factory=dict)  # characters of the completion → reward
    failure: str = ""  # of a verifier_error, its kind (rewards/outcomes.py)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Have an environment take the last turn of a dialogue, or begin one.  Idempotent: it includes all turns so far."""

    request_id: int
    dialogue: str  # its id, so that the worker that took its earlier turns can continue
    environment: str
    record: str  # of the dataset, JSON
    turns: tuple[str, ...]  # of the policy, all so far
    task: str  # whose reward function judges the last turn
    answer: str  # the last turn as that function is to read it
    reference: str
    is_last: bool  # a limit ends the dialogue with this turn
    tools: str = ""  # Prompt.tools


@dataclass(frozen=True, slots=True)
class TurnReply:
    """An environment's reply to the last turn."""

    request_id: int
    messages: tuple[dict[str, str], ...]  # for the chat template
    reward: float  # of all turns so far
    verdict: str  # a types.Verdict; final once the dialogue is over
    reward_parts: dict[str, float]
    detail: str
    is_done: bool  # the environment is done
    is_over: bool  # no more turns
    failure: str = ""  # as of a RewardReply


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """Reward service → generator: it makes progress, perhaps for others; these requests of yours are still queued."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Controller → every trainer rank: the rows of its replica, usually sent while the previous step is trained."""

    number: int  # of the rows, increasing; skipped numbers are never trained
    minibatches: tuple[PackedMinibatch, ...]  # without the rows of other replicas


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Controller → trainer: train the rows with this number, which were sent to every rank before."""

    rows: int
    batch: PackedBatch  # without its minibatches


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Controller → trainer: score the rows with this number, which were sent to every rank before; train nothing."""

    rows: int


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Trainer → controller: loss of the current policy on those rows, summed over the loss tokens of all replicas."""

    rows: int
    num_loss_tokens: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Controller → trainer: open the rendezvous of a new membership epoch."""

    group: WeightGroup  # its address is filled in by the trainer's reply


@dataclass(frozen=True, slots=True)
class GroupOpened:
    """Trainer → controller: the rendezvous is open."""

    group: WeightGroup
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reregister:
    """Controller → generator, reward service: send Hello again.  Sent only to a process that is evidently alive."""


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Controller → generator: take part in this membership epoch."""

    group: WeightGroup
    timeline: int  # of the weights to come; if it changes, tokens sampled with the earlier weights are discarded


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Controller → trainer: broadcast the current weights to this epoch's group."""

    epoch: int
    policy_version: int
    canary: Int32 | None = None  # int32 [T]: report the log-probabilities of this row under these weights


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Trainer → controller: the broadcast ended."""

    epoch: int
    policy_version: int
    seconds: float
    error: str = ""
    canary: Float32 | None = None  # float32 [T] natural log, at temperature 1; None: not requested
    sent_share: float = 1.0  # bytes sent / bytes of the weights; below 1: as a delta


@dataclass(frozen=True, slots=True)
class ReceiveWeights:
    """Controller → generator: the trainer is about to broadcast this version."""

    manifest: WeightManifest


@dataclass(frozen=True, slots=True)
class WeightsLive:
    """Generator → controller: new tokens are sampled with this version from now on, or it failed."""

    epoch: int
    policy_version: int
    receive_s: float
    pause_s: float  # time during which no token could be generated
    error: str = ""
    held: HeldChecksum | None = None  # of the parameters that the engine now holds; None: it cannot compute it


@dataclass(frozen=True, slots=True)
class TakeCanary:
    """Controller → generator: score this row with the current weights."""

    number: int  # of the publication being checked
    token_ids: Int32  # [T]


@dataclass(frozen=True, slots=True)
class CanaryTaken:
    """Generator → controller: the answer to TakeCanary."""

    number: int
    policy_version: int  # version that scored the row; -1: the weights changed meanwhile
    logprobs: Float32  # [T] natural log, at temperature 1; 0 on the first token


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Controller → generator: its weights are wrong.  Hand back every running rollout without the tokens they sampled.

    It receives leases again once a later canary agrees with the trainer.
    """

    newest_good: int  # version of its last canary that agreed: tokens up to this version are kept; -1: none
    must_restart: bool  # new weights did not help: exit, so that the process is restarted
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """Trainer → controller, once: the model is loaded."""

    policy_version: int
    manifest: WeightManifest  # of future broadcasts; epoch 0
    device: str  # of the rank that broadcasts: its GPU's UUID, "" for the CPU
    replicas: tuple[int, ...] = (0,)  # data-parallel replica of every rank


@dataclass(frozen=True, slots=True)
class StepReport:
    """Trainer → controller: a batch was trained."""

    step: int
    policy_version: int  # after the step
    applied: bool  # False: every optimiser step was non-finite on some rank, or refused, and so skipped on all
    metrics: dict[str, float]
    refused: str = ""  # figures outside the limits of the batch; "": none, or not finite
    skipped: tuple[int, ...] = ()  # places of optimiser steps that were refused, all of them or some


@dataclass(frozen=True, slots=True)
class PartReport:
    """Trainer → controller: a part of a batch was trained; nothing is applied before the last one."""

    step: int
    part: int  # from 0


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Controller → trainer: copy the current state, and write it to this directory while training continues."""

    step: int
    directory: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """Trainer → controller: the state is copied; later changes are not in the checkpoint."""

    step: int
    seconds: float  # during which training was blocked


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Trainer → controller, after SnapshotTaken: the copy is on disk, or could not be written."""

    step: int
    seconds: float  # since the command
    error: str = ""


# ------------------------------------------------------------------------------------------------------------- topology
#
# The table of channels: who connects to whom, and which messages they may send.
#
# Every channel is a ROUTER/DEALER pair (or its in-memory twin).  The server end binds, publishes its address in the
# rendezvous directory, and accepts from a client only the messages listed here.


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
    "control", "controller", ("generator", "reward", "service", "trainer"),
    (Hello, Heartbeat, WeightsLive, CanaryTaken, SaveReport),
    (StopRole, Reregister, JoinGroup, ReceiveWeights, TakeCanary, Quarantine),
    1_000,
)  # fmt: skip
LEASES = ChannelSpec(
    "leases", "controller", ("generator",),
    (Delivery, LeaseReturn, LeaseProgress),
    (Lease, CancelGroup, Delivered, ShowWhole),
    10_000,
)  # fmt: skip
BATCHES = ChannelSpec(
    "batches", "controller", ("trainer",),
    (TrainerReady, StepReport, PartReport, ScoreReport, GroupOpened, PublishReport, SnapshotTaken),
    (BatchRows, TrainBatch, ScoreBatch, FormGroup, PublishWeights, SaveCheckpoint, StopRole),
    8,
    MAX_BATCH_BYTES,
)  # fmt: skip
REWARDS = ChannelSpec(
    "rewards", "reward", ("generator",),
    (RewardRequest, TurnRequest),
    (RewardReply, TurnReply, StillWaiting),
    10_000,
)  # fmt: skip

TOPOLOGY: dict[str, ChannelSpec] = {spec.name: spec for spec in (CONTROL, LEASES, BATCHES, REWARDS)}
