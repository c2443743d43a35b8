"""What roles say to each other besides the data itself.  Sent over the channels of topology.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhpc.types import (
    Float32,
    HeldChecksum,
    Int32,
    PackedBatch,
    PackedMinibatch,
    Prefix,
    ScoredRollout,
    UInt8,
    WeightGroup,
    WeightManifest,
)


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of every role to the controller."""

    role: str
    replica: int
    incarnation: str  # unique for each start of a process; an older one is fenced
    config_hash: str
    pid: int
    host: str
    num_weight_ranks: int = 0  # engine workers that receive weights; 0 for roles that receive none
    weight_devices: tuple[str, ...] = ()  # of these workers: UUIDs of GPUs, "" for the CPU


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent by every role at a fixed interval."""

    state: str  # one word: "starting", "running", "draining", ...
    waits_for: str  # "" when it does not wait
    policy_version: int  # -1 where it has none
    capacity_samples: int = 0  # generators: rollouts it is willing to hold at once (its credit window)
    metrics: dict[str, float] = field(default_factory=dict)
    incarnation: str = ""  # generators: as in their Hello, which may have been lost with a connection


@dataclass(frozen=True, slots=True)
class StopRole:
    """Finish what must not be lost, then leave."""

    reason: str
    run_is_over: bool = True  # False: another controller follows; supervised roles wait for it


@dataclass(frozen=True, slots=True)
class CancelGroup:
    """The group was dropped: abort its rollouts."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """Generator → controller: a rollout, which the generator keeps until the controller has it on disk."""

    number: int  # of this generator's deliveries, from 1; a delivery that is sent again keeps its number
    oldest: int  # all below it need no answer any more
    outbox: str  # which counts them: another one after each start of the process
    timeline: int  # of the weights that sampled it (JoinGroup)
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
    """Generator → controller: what was sampled of running rollouts since the last report, in case of a death."""

    pieces: UInt8  # buffer/partial_codec.py
    num_bytes: int  # of these, before they were deflated
    timeline: int  # of the weights that sample them (JoinGroup)


@dataclass(frozen=True, slots=True)
class ShowWhole:
    """Controller → generator: the beginning of these is not known here; report them from their first token on."""

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


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Have an environment take the last turn of a dialogue, or begin it.  Idempotent: it comes with all its turns."""

    request_id: int
    dialogue: str  # which one, so that who has taken its other turns can go on
    environment: str
    record: str  # of the dataset, JSON
    turns: tuple[str, ...]  # of the policy, all so far
    task: str  # whose reward function judges the last turn
    answer: str  # the last turn as that function is to read it
    reference: str
    is_last: bool  # a limit ends the dialogue with this turn


@dataclass(frozen=True, slots=True)
class TurnReply:
    """What an environment says to the last turn."""

    request_id: int
    messages: tuple[dict[str, str], ...]  # for the chat template
    reward: float  # of all turns so far
    verdict: str  # a types.Verdict; final once the dialogue is over
    reward_parts: dict[str, float]
    detail: str
    is_done: bool  # the environment is
    is_over: bool  # no more turns


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """Reward service → generator: verdicts go on, whoever's they are, and these requests of yours wait for theirs."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Controller → every rank of the trainer: the rows of its replica, as a rule while the step before is trained."""

    number: int  # of the rows, rising; those that are passed over are trained by nobody
    minibatches: tuple[PackedMinibatch, ...]  # without the rows of other replicas


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Controller → trainer: train the rows of this number, which every rank has been sent before."""

    rows: int
    batch: PackedBatch  # without its minibatches


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
    """Controller → generator: send Hello again.  That this can be sent shows that the generator's process is alive."""


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Controller → generator: take part in this membership epoch."""

    group: WeightGroup
    timeline: int  # of the weights to come: if it is not that of those before, what these have sampled does not count


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
    canary: Float32 | None = None  # float32 [T] natural log, at temperature 1; None: not asked for
    sent_share: float = 1.0  # bytes that were sent, for each of the weights; below 1: by delta


@dataclass(frozen=True, slots=True)
class ReceiveWeights:
    """Controller → generator: the trainer is about to broadcast this."""

    manifest: WeightManifest


@dataclass(frozen=True, slots=True)
class WeightsLive:
    """Generator → controller: new tokens are sampled with this version from now on, or it failed."""

    epoch: int
    policy_version: int
    receive_s: float
    pause_s: float  # time in which no token could be generated
    error: str = ""
    held: HeldChecksum | None = None  # of what the engine holds now; None: it cannot tell


@dataclass(frozen=True, slots=True)
class TakeCanary:
    """Controller → generator: score this row with the weights that sample now."""

    number: int  # of the publication that it is about
    token_ids: Int32  # [T]


@dataclass(frozen=True, slots=True)
class CanaryTaken:
    """Generator → controller: the answer to TakeCanary."""

    number: int
    policy_version: int  # that scored the row; -1: the weights changed meanwhile
    logprobs: Float32  # [T] natural log, at temperature 1; 0 on the first token


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Controller → generator: its weights are wrong.  Hand back every running rollout without what they have sampled.

    Leases come again when a later canary agrees with the trainer.
    """

    newest_good: int  # version of its last canary that agreed: tokens up to this version are kept; -1: none
    must_restart: bool  # new weights have not helped: end, so that the process is started again
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """Trainer → controller, once: the model is loaded."""

    policy_version: int
    manifest: WeightManifest  # of the coming broadcasts; epoch 0
    device: str  # of the rank that broadcasts: the UUID of its GPU, "" for the CPU
    replicas: tuple[int, ...] = (0,)  # of every rank, which data-parallel replica it is part of


@dataclass(frozen=True, slots=True)
class StepReport:
    """Trainer → controller: a batch was trained."""

    step: int
    policy_version: int  # after the step
    applied: bool  # False: every optimiser step was not finite on some rank, or refused; skipped on all
    metrics: dict[str, float]
    refused: str = ""  # figures outside the limits of the batch; "": none, or not finite
    skipped: tuple[int, ...] = ()  # places of optimiser steps that were refused, all of them or some


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Controller → trainer: copy the state as it is now, and write it into this directory while training goes on."""

    step: int
    directory: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """Trainer → controller: the state is copied; later changes are not in the checkpoint."""

    step: int
    seconds: float  # in which training was blocked


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Trainer → controller, some time after SnapshotTaken: the copy is on disk, or could not be written."""

    step: int
    seconds: float  # since the command
    error: str = ""
