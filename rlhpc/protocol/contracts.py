"""Every interface of the ring, on one page.

Contracts of user code have a short example beside them, and a page: RewardFunction (docs/rewards.md, Your own reward
function), AdvantageEstimator and PolicyLoss (docs/algorithms.md); environments have rlhpc/protocol/environment.py.

ABC where we own implementations with a life cycle, Protocol for plain callables.  Each method says what it raises and
what state it leaves.  One suite per contract (tests/contracts/) runs against all implementations, third-party ones too.
Async in controller, generator and reward service; blocking in the trainer and in engine workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import (
    AdapterForm,
    Float32,
    HeldChecksum,
    Int32,
    PackedMicrobatch,
    Prefix,
    Prompt,
    Rollout,
    RolloutRequest,
    TensorSpec,
    WeightGroup,
    WeightManifest,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# ---------------------------------------------------------------------------------------------------------- channels


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counters of a channel end since it was opened."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_rejected: int = 0  # did not decode, out of sequence, or from someone else's key
    messages_lost: int = 0  # sent by the other end but never received, because a connection broke
    connections_denied: int = 0  # handshakes with a key that does not belong to this run
    receive_queue_depth: int = 0


class ServerChannel(ABC):
    """The end that binds; it addresses each connected peer by name.

    Messages from one peer arrive in the order sent.  A message may be lost when an end dies; none is ever duplicated,
    truncated, or silently dropped.  A message that does not decode is counted, never delivered.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """The address that clients connect to, e.g. ``ipc:///…`` or ``tcp://host:port``; the port is never fixed."""

    @abstractmethod
    async def receive(self, timeout_s: float | None = None) -> tuple[str, Any]:
        """Return (peer name, message).  Raises ChannelTimeout, ChannelClosed; neither consumes a message."""

    @abstractmethod
    async def send(self, peer: str, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message to one peer.  Raises PeerUnreachable, ChannelFull, ChannelClosed; none has any effect."""

    @property
    @abstractmethod
    def peers(self) -> frozenset[str]:
        """Names of peers that have sent at least one valid message; they may have died since."""

    @property
    @abstractmethod
    def statistics(self) -> ChannelStatistics:
        """Counters since opening."""

    @abstractmethod
    async def close(self) -> None:
        """Refuse further calls; wakes a waiting receive with ChannelClosed.  Idempotent."""


class ClientChannel(ABC):
    """The end that connects, in an asyncio role.  Same guarantees as ServerChannel."""

    @abstractmethod
    async def send(self, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message to the server.  Raises ChannelFull, ChannelClosed; neither leaves an effect."""

    @abstractmethod
    async def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message.  Raises ChannelTimeout, ChannelClosed, ProtocolError (the message is consumed)."""

    @property
    @abstractmethod
    def statistics(self) -> ChannelStatistics:
        """Counters since opening."""

    @abstractmethod
    async def close(self) -> None:
        """Flush what was queued for at most a second, then refuse further calls.  Idempotent."""


class BlockingClientChannel(ABC):
    """ClientChannel for a role without an event loop (the trainer).  One thread uses it."""

    @abstractmethod
    def send(self, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message to the server.  Raises ChannelFull, ChannelClosed; neither leaves an effect."""

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message.  Raises ChannelTimeout, ChannelClosed, ProtocolError (the message is consumed)."""

    @property
    @abstractmethod
    def statistics(self) -> ChannelStatistics:
        """Counters since opening."""

    @abstractmethod
    def close(self) -> None:
        """Flush what was queued for at most a second, then refuse further calls.  Idempotent."""


# ------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class RecordName:
    """A record of the datasets of a run."""

    key: str  # its place in the dataset, with several datasets after the dataset's own: "17", "1:17"
    source: str = ""  # its file and line, for people

    def __str__(self) -> str:
        """Return the record's name for people."""
        return f"record {self.key} ({self.source})" if self.source else f"record {self.key}"


class PromptSource(ABC):
    """A seeded, endless, resumable order of prompts."""

    @abstractmethod
    def draw(self, live_version: int) -> Prompt:
        """Return the next prompt and advance.  Never ends: a new epoch is a new order.

        Prompts may be skipped based on what was learnt from groups admitted before live_version, and only those, so
        that a run in lockstep draws the same prompts whichever group finishes first.
        """

    @abstractmethod
    def num_rollouts(self, prompt_id: int) -> int:
        """Number of rollouts for the prompt drawn last, if more than admission.group_size; else 0.

        Based on the same groups as `draw`.
        """

    @abstractmethod
    def draw_again(self, prompt_id: int | None) -> Prompt:
        """Return a prompt that was drawn before the run was interrupted, and continue after it.

        None: its number is lost; return the next in order.  Raises CheckpointError if it cannot have been drawn here.
        """

    @abstractmethod
    def learn(self, group_id: int, admitted_version: int, prompt_id: int, pass_rate: float) -> None:
        """A group is finished; pass_rate: share of its members whose verdict is correct."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Metrics about the prompts, by name."""

    @abstractmethod
    def peek(self, prompt_id: int) -> Prompt:
        """Return prompt number prompt_id of the order, without effect."""

    @abstractmethod
    def record_of(self, prompt_id: int) -> RecordName:
        """Name the record behind a prompt: the same in every epoch, attempt and resume, and of no other record."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return JSON for load_state, including the position of the next draw."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of state().  Raises CheckpointError if it belongs to another dataset or seed."""


# ------------------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Load of an engine, and its work so far."""

    num_running: int  # requests being decoded
    num_waiting: int  # requests accepted, not yet started
    tokens_generated: int  # since start
    busy_s: float  # seconds since start with at least one active request, pauses excluded
    kv_usage: float = 0.0  # share of KV cache blocks in use, 0–1; 0 where unknown
    num_preemptions: int = 0
    decoding_s: float = 0.0  # of busy_s, counted for each request that is decoded


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens in each place of a row, most likely first; 0 in the first place."""

    token_ids: Int32  # [T, k]
    logprobs: Float32  # [T, k] natural log, at temperature 1


@dataclass(frozen=True, slots=True)
class RowScore:
    """Log-probabilities of a given row of tokens."""

    policy_version: int  # version that computed all of them; -1: the weights changed meanwhile
    logprobs: Float32  # [T] natural log, at temperature 1; 0 on the first token
    ranks: Int32  # [T] number of tokens that are as likely as this one or likelier, itself included; 0 on the first
    top: TopTokens | None = None  # those asked for


class GenerationEngine(ABC):
    """Samples completions with continuous batching, under weights that may change while it does."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version that currently samples new tokens."""

    @property
    @abstractmethod
    def capacity_samples(self) -> int:
        """Requests worth holding at once, by KV cache and max_num_seqs.  May change with the lengths seen."""

    @property
    @abstractmethod
    def weight_devices(self) -> tuple[str, ...]:
        """Devices of the workers in a weight group, by rank, as weights/memory.py calls them; "" for the CPU."""

    @abstractmethod
    async def generate(self, request: RolloutRequest) -> Rollout:
        """Sample one completion, continuing its prefix if it has one.

        An aborted request returns normally with FinishReason.ABORT and the tokens so far (perhaps none).
        Raises EngineError if the engine died; cancelling the call aborts the request.
        """

    async def load_adapter(self, number: int, directory: Path, scale: float, base: str) -> None:
        """Load a PEFT adapter directory as one of the engine's adapters, of which no request is under way.

        number: from 1, RolloutRequest.adapter.  base: name of the weights that it is for; "": not known.
        Raises GroupFailed if it does not fit, and nothing has changed; EngineError.
        """
        raise GroupFailed("this engine holds no adapters")

    @abstractmethod
    async def score(self, token_ids: Int32, top_k: int = 0) -> RowScore:
        """Log-probabilities of int32 [T], T ≥ 2, from the sampling kernels; does not queue behind waiting requests.

        top_k: how many of the most likely tokens in each place are returned, too.  Rows are scored side by side.
        Raises EngineError if the engine died; cancelling the call aborts it.
        """

    def num_sampled(self, request_id: str) -> int:
        """Number of tokens that `progress` would return, or more if called later; cheap.  0: none, or unknown."""
        return 0

    def progress(self, request_id: str, start: int = 0) -> Prefix | None:
        """The completion so far from token `start` on, counting its prefix; None: nothing, or unknown."""
        return None

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End one request early; unknown ids are ignored."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop decoding; requests are kept.  Idempotent."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume decoding.  Idempotent."""

    @abstractmethod
    async def join_weights(self, group: WeightGroup, member: str) -> None:
        """Join a membership epoch, leaving the previous one first.  After GroupFailed it is a member of none."""

    @abstractmethod
    async def receive_weights(self, manifest: WeightManifest) -> WeightTiming:
        """Receive everything, verify it, then load it between two decoding steps and adopt its version.

        Requests in flight are kept and continue with the new weights.  Raises EngineError: the engine is dead.
        Raises TornWeights: the old version stays live or, where weights are loaded as they arrive, no token is sampled
        (policy_version −1, capacity_samples 0) until a whole version has been received.
        """

    @abstractmethod
    async def leave_weights(self) -> None:
        """Leave the membership epoch.  Idempotent."""

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """Current figures."""

    @abstractmethod
    async def close(self) -> None:
        """Abort everything and end every process the engine started.  Idempotent."""


class PoolingEngine(ABC):
    """Scores rows of tokens with a classifier, many at once.

    Its methods raise ValueError for a row that it has no room for, and EngineError if the engine died; cancelling a
    call aborts it.
    """

    @abstractmethod
    async def classify(self, token_ids: Int32, *, use_activation: bool = False) -> Float32:
        """Return the classifier's numbers for a row, int32 [T] → float32 [C].

        use_activation: apply the model's own function, a sigmoid or a softmax.
        """

    @abstractmethod
    async def classify_tokens(self, token_ids: Int32, *, use_activation: bool = False) -> Float32:
        """Return the numbers in each place of a row, int32 [T] → float32 [T, C]."""

    @abstractmethod
    async def close(self) -> None:
        """End every process the engine started.  Idempotent."""


@dataclass(frozen=True, slots=True)
class WeightTiming:
    """Duration of a weight update on a generator, and the engine's checksum after it."""

    receive_s: float  # from the call until the pause; decoding continues meanwhile
    pause_s: float  # in which no token could be sampled
    held: HeldChecksum | None = None  # None: this engine cannot compute it


# Index of a bucket and the device it arrives on → contiguous uint8 of the bucket's size.  Raises GroupFailed: no room.
Allocate = Callable[[int, "torch.device"], "Tensor"]


class WeightReceiver(ABC):
    """The receiving end of weight broadcasts, inside an engine worker.  Blocking."""

    @abstractmethod
    def join(self, group: WeightGroup, rank: int) -> None:
        """Join the group.  Raises GroupFailed after its timeout; it is then a member of none."""

    @abstractmethod
    def receive(
        self, manifest: WeightManifest, allocate: Allocate, held: int | None = None
    ) -> Generator[Tensor, None, None]:
        """Yield every bucket, in order, in the memory that `allocate` returned for it; at most one is received ahead.

        held: identity of the version already in that memory, to which a delta may be applied; 0: none yet; None: the
        memory is not kept until the next version.
        Serve nothing before the iterator is exhausted: only then have all checksums been verified.  If closed early, it
        skips the rest and tells the publisher that this member does not have the version.
        Raises TornWeights, GroupFailed; exceptions of `allocate` propagate, and reach the publisher as a refusal.
        """

    def lost(self) -> str:
        """Reason why no more buckets will arrive, "" if none is known; for use between two buckets.  Never blocks."""
        return ""

    def identity(self) -> int:
        """Identifies the bytes of the version that `receive` has just yielded in full; 0: no delta is based on it."""
        return 0

    @abstractmethod
    def leave(self) -> None:
        """Forget the group.  Idempotent."""


class WeightPublisher(ABC):
    """The sending end of weight broadcasts, on rank 0 of the trainer.  Blocking."""

    sent_share = 1.0  # bytes sent for the last version / its size

    @abstractmethod
    def open(self, group: WeightGroup) -> WeightGroup:
        """Open a rendezvous for this epoch and return the group with its address.  Dissolves the previous one."""

    @abstractmethod
    def form(self) -> None:
        """Wait until every rank has joined.  Raises GroupFailed after its timeout; then dissolve."""

    @abstractmethod
    def publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Broadcast bucket by bucket, then the checksums.  Raises GroupFailed; then dissolve.

        `weights` yields the manifest's tensors in its order; always exhausted, so that no collective export hangs.
        """

    @abstractmethod
    def dissolve(self) -> None:
        """Forget the group and remove its rendezvous.  Idempotent."""


# ---------------------------------------------------------------------------------------------------------- rewards


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """The result of a reward function that returns more than a number.

    RewardOutcome(1.1, is_correct=True, parts={"answer": 1.0, "brevity": 0.1}, answer="42")
    """

    reward: float  # finite, within ±1e30; whatever its parts add up to
    is_correct: bool  # for pass rates and curricula, never for training
    parts: dict[str, float] = field(default_factory=dict)  # name → number, plotted as reward_part/NAME
    detail: str = ""  # one line for people
    answer: str = ""  # extracted answer, for majority votes in evaluations; "": none, or not reported
    rewards_at: dict[int, float] = field(default_factory=dict)  # n → part of `reward` earned by the first n characters


class RewardFunction(Protocol):
    """Scores one completion.  Pure: the same arguments give the same outcome.  Runs in a process that may be killed.

        def judge(completion: str, reference: str) -> float:  # data.task = "my_rewards:judge"
            marked = re.findall(r"#### (.+)", completion)
            return float(bool(marked) and marked[-1].strip() == reference)

    Called with both by position, texts.  A second parameter named `record` gets the record instead of the reference,
    with data.reference_field = "*"; a parameter named `completions` makes it batched (docs/rewards.md).
    """

    def __call__(self, completion: str, reference: str, /) -> object:
        """Return a RewardOutcome, a number, a bool or a dict with a reward (rewards/outcomes.py).

        An exception is a verifier error, never a reward of zero: raise what cannot be judged.
        """


class AdvantageEstimator(Protocol):
    """Turns the rewards of one group into advantages.  Pure.

        def centred(rewards, lengths):  # algorithm.advantage = "my_advantages:centred"
            spread = rewards.std()
            return (rewards - rewards.mean()) / spread if spread > 1e-6 else np.zeros_like(rewards)

    docs/algorithms.md, An advantage of your own, has the rules.
    """

    def __call__(self, rewards: Float32, lengths: Int32, /) -> Float32:
        """Return float32 [G], finite, all zero where all rewards are equal.  Leaves its arguments as they are.

        rewards: float32 [G], G ≥ 2.  lengths: int32 [G], loss tokens, 0 of a truncated completion that is masked.
        """


# --------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Inputs of a loss for a packed row of T tokens in S sequences, besides the current log-probabilities."""

    behaviour: Tensor  # float32 [T] log-probability by the policy that sampled the token
    proximal: Tensor  # float32 [T] as passed to TrainerBackend.step; behaviour if none was passed
    reference: Tensor  # float32 [T] log-probability by a frozen model
    entropy: Tensor  # float32 [T] entropy of the current policy's distribution at the token
    advantages: Tensor  # float32 [T]
    loss_mask: Tensor  # bool [T] tokens that count; other fields are undefined where it is False
    versions: Tensor  # int32 [T] policy version that sampled the token; −1 off the mask
    weights: Tensor  # float32 [T] share of the token in the loss of the batch; 1 for a mean over tokens
    sequence: Tensor  # int64 [T] 0 … S − 1, non-decreasing
    num_sequences: int
    # float32 [T] KL of the teacher from the current policy over the teacher's most likely tokens, with a gradient
    teacher_divergence: Tensor | None = None  # None: there is no teacher, or no sample in the row


class PolicyLoss(Protocol):
    """A loss over packed tokens.  Tensors in, never batches; log-probabilities, never logits.

        def loss(current, row):  # algorithm.loss = "my_losses:loss"; off the mask may stand anything, nan too
            logprobs, then, gains = (
                torch.where(row.loss_mask, each, 0.0) for each in (current, row.behaviour, row.advantages)
            )
            ratio = (logprobs - then).clamp(-20, 20).exp()
            return -(row.weights * gains * ratio)[row.loss_mask].sum(), {"ratio": ratio.detach()[row.loss_mask].sum()}

    docs/algorithms.md, A loss of your own, has the rules; examples/own_loss.py is a longer one.
    """

    def __call__(self, current: Tensor, row: TokenRow, /) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss *summed* over loss tokens, each times its weight, and metrics summed over loss tokens.

        current: float32 [T], carries the gradient, as the loss does, also where no token is on the loss mask (it is 0
        then).  Tokens off the loss mask do not count; a loss token that is not finite makes the loss so.  Metrics are
        detached scalars.  The caller divides both by the global number of loss tokens.  Leaves its arguments as they
        are.
        """


# Metrics, summed over micro-batches and ranks, and gradient norm before clipping → whether a step may be applied.
StepGate = Callable[[Mapping[str, float], float], bool]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimiser step.  The same on every rank."""

    applied: bool  # False: not finite on some rank, or rejected by may_apply; parameters bitwise unchanged on all
    grad_norm: float  # before clipping; nan or inf if it, or the loss, is the reason for not applying the step
    metrics: dict[str, float]  # summed over micro-batches and ranks, not divided


class TrainerBackend(ABC):
    """A model, its optimiser, and a layout over ranks.  Independent of ZeroMQ, vLLM and policy versions.

    Every method is a collective: all ranks call it in the same order with the same arguments, micro-batches apart.
    It sums over micro-batches and ranks and never averages; the caller sets the denominator, the learning rate and the
    weight decay.  A critic's backend has a head with one output: in place of a token's log-probability it returns the
    value of the tokens before it, and the entropy is 0.
    """

    @property
    @abstractmethod
    def dp_rank(self) -> int:
        """Index of this process in PackedBatch.ranks."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""

    @property
    @abstractmethod
    def device(self) -> str:
        """ "cpu" or "cuda": where weights() yields its tensors."""

    @property
    @abstractmethod
    def num_steps_applied(self) -> int:
        """Optimiser steps applied to this model, including those before a load; the policy version."""

    @property
    @abstractmethod
    def is_rank_zero(self) -> bool:
        """True on the one rank on which weights() yields and which talks to the controller."""

    @property
    def adapter_form(self) -> AdapterForm | None:
        """Form of the LoRA adapters that weights() yields; None: it yields whole weights."""
        return None

    @abstractmethod
    def hold_reference(self, memory: str) -> None:
        """Keep a frozen copy of the current parameters, with the same sharding and dtype.

        memory: "device" (that of the parameters) or "host".  Another call replaces the copy.  Of adapters that do
        nothing yet there is no copy: the reference is the model without them.
        """

    @abstractmethod
    def hold_average(self, memory: str) -> None:
        """Start a moving average at the current float32 weights, saved and loaded with the state; memory: as above.

        load() of a state without an average starts it at the loaded weights.
        """

    @abstractmethod
    def move_average(self, decay: float) -> None:
        """Set the average to decay · average + (1 − decay) · weights.  Asserts that there is one."""

    @abstractmethod
    def logprobs(
        self, microbatches: Sequence[PackedMicrobatch], *, temperature: float | None = None, of_reference: bool = False
    ) -> list[Tensor]:
        """Log-probability of every token under the current parameters, without gradient.

        Routes of rows are obeyed here and in accumulate and step, if algorithm.routing_replay is set, but not by the
        reference: its routers choose.

        temperature: None for that of the run.  of_reference: under the copy of hold_reference, which is swapped with
        the parameters meanwhile; they are bitwise unchanged afterwards, even if this raises.
        float32 [T] per micro-batch, 0 on the first token of a segment; on the device of the model.
        """

    @abstractmethod
    def accumulate(
        self,
        microbatches: Sequence[PackedMicrobatch],
        loss: PolicyLoss,
        *,
        proximal: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None = None,
        has_entropy_gradient: bool = False,
        num_loss_tokens: int,
        is_first: bool,
    ) -> None:
        """Forward and backward for a part of a step whose other micro-batches are not there yet; applies nothing.

        Gradients and metrics are kept for the next `step`, whose micro-batches are the last part.
        num_loss_tokens: an estimate for the whole step, the same in every part; gradients are scaled to the true number
        that `step` is given.  is_first: drops what an abandoned step has accumulated.
        weights(), logprobs(), hold_reference(), move_average() and save() may come in between; a save does not contain
        what is accumulated.  Does not raise for non-finite numbers: the step is not applied then.
        """

    @abstractmethod
    def step(
        self,
        microbatches: Sequence[PackedMicrobatch],
        loss: PolicyLoss,
        *,
        proximal: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None = None,
        has_entropy_gradient: bool = False,
        num_loss_tokens: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        may_apply: StepGate | None = None,
    ) -> StepResult:
        """Forward, backward, vote, clip, optimiser step.

        After calls of `accumulate`: the step's last part.  Gradient, metrics, norm, vote and gate are those of all
        parts together; afterwards nothing is accumulated, whether the step was applied or not.
        `num_loss_tokens`: of the whole step.
        `proximal`, `reference`: float32 [T] per micro-batch, passed to the loss unchanged; None: the behaviour
        log-probabilities.  `has_entropy_gradient`: whether TokenRow.entropy carries one; else it is only a metric.
        Does not raise for non-finite numbers: every rank skips and reports the step, as when `may_apply` is False.
        """

    @abstractmethod
    def sum_over_replicas(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Sum metrics over data-parallel replicas; all ranks of one replica pass the same values."""

    @abstractmethod
    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """HF names, shapes and dtypes in the order of weights().  The same on every rank; no communication."""

    @abstractmethod
    def weights(self, *, of_reference: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Stream (HF name, full tensor) on rank 0, of the parameters or hold_reference's copy; nothing on other ranks.

        A tensor is valid until the next one is requested.  Memory: one bucket and the largest tensor, never the model.
        Every rank runs the iterator to its end; rank 0 may close it early.
        """

    @abstractmethod
    def save(self, directory: Path) -> Future[dict[str, int]]:
        """Write the full state (HF-named fp32 weights, Adam moments, optimiser step count, RNG) into `directory`.

        Returns once the current state has been copied; it is written in the background.  The future resolves to
        {file name: bytes} on rank 0 and {} on other ranks, or raises CheckpointError; files may then remain.
        A second call waits for the first one's end.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Continue from save(), whatever layout wrote it.  Raises CheckpointError before anything is changed."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and leave process groups.  Idempotent."""


Clock = Callable[[], float]  # monotonic seconds; passed in wherever time matters
