"""The data types of the training loop, in the order in which data flows.

Prompt → Lease → Rollout → ScoredRollout → RolloutGroup → TrainingSample → PackedBatch → WeightManifest.

All are frozen.  Arrays are numpy, C-contiguous, never modified after creation.
Legend: Lp prompt tokens, Lc completion tokens, L = Lp + Lc, T packed tokens, S segments of a packed row.
Entry t of an array over tokens describes token t: its log-probability is that of token t given those before it.

A completion is one or more *rows*: token sequences, each of which follows the same prompt and knows nothing of the
others.  An agent that rewrites its history (compacts it, strips thoughts, asks a sub-agent) goes on in another row.  An
array over the tokens of a completion has all rows, end to end, and row_starts says where each but the first begins.
Rows may begin alike, with the turns that they share.  A sampled token is trained once: in every other row loss_mask is
False where it was copied.  Rows stand in the order in which they ended, so that the last one has the final answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

# Spelt out: since NumPy 2.5 NDArray[np.int32] is a named alias, in which a codec cannot see the dtype.
Int32 = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
UInt8 = np.ndarray[tuple[Any, ...], np.dtype[np.uint8]]
Float32 = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
Bool = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]


def _no_starts() -> Int32:
    return np.empty(0, np.int32)


def row_slices(row_starts: Int32, num_tokens: int) -> list[slice]:
    """The tokens of each row of a completion, at least one row."""
    if not len(row_starts):
        return [slice(0, num_tokens)]
    return [slice(first, end) for first, end in pairwise([0, *row_starts.tolist(), num_tokens])]


def row_fault(row_starts: Int32, num_tokens: int) -> str:
    """Describe what is wrong with the rows of a completion of num_tokens tokens; "": nothing."""
    if len(row_starts) and (np.diff(row_starts, prepend=0, append=num_tokens) < 1).any():
        return f"its rows begin at tokens {[0, *row_starts.tolist()]} of {num_tokens}, and each must have a token"
    return ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenised.  Made by data/."""

    prompt_id: int  # position in the seeded order over all epochs; unique in a run, stable across restarts
    task: str  # name of the reward function that judges answers
    token_ids: Int32  # [Lp]
    reference: str  # the correct answer, in the form that the reward function expects
    tools: str = ""  # digest of the tools of servers of which it tells; "" if there are none

    def is_same(self, other: Prompt) -> bool:
        """True if id and tokens are equal: a chat template that writes the date changes tokens from day to day."""
        return self.prompt_id == other.prompt_id and np.array_equal(self.token_ids, other.token_ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling completions."""

    max_tokens: int  # completion tokens, including a prefix
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's end-of-sequence token
    stop_strings: tuple[str, ...] = ()  # a completion ends with the token that completes one of them in its text
    searched_from: int = 0  # the completion token at which that text begins: those before are of earlier turns


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a completion that another generator has already sampled."""

    token_ids: Int32  # [Lc so far]
    behaviour_logprobs: Float32  # [Lc so far]
    versions: Int32  # [Lc so far] never decreasing within a row
    row_starts: Int32 = field(default_factory=_no_starts)  # first token of each further row, ascending, in (0, Lc)

    @property
    def rows(self) -> list[slice]:
        """The tokens of each row, in the order in which they began."""
        return row_slices(self.row_starts, len(self.token_ids))

    def row(self, tokens: slice) -> Prefix:
        """These tokens of one row, alone."""
        return Prefix(self.token_ids[tokens], self.behaviour_logprobs[tokens], self.versions[tokens])

    def followed_by(self, more: Prefix) -> Prefix:
        """One row, extended."""
        return Prefix(
            np.concatenate([self.token_ids, more.token_ids]),
            np.concatenate([self.behaviour_logprobs, more.behaviour_logprobs]),
            np.concatenate([self.versions, more.versions]),
        )

    @classmethod
    def of_rows(cls, rows: Sequence[Prefix]) -> Prefix:
        """Rows, one or more, as one prefix; those without tokens are left out."""
        rows = [row for row in rows if len(row.token_ids)] or list(rows[:1])
        if len(rows) == 1:
            return rows[0]
        return cls(
            np.concatenate([row.token_ids for row in rows]),
            np.concatenate([row.behaviour_logprobs for row in rows]),
            np.concatenate([row.versions for row in rows]),
            np.cumsum([len(row.token_ids) for row in rows[:-1]], dtype=np.int32),
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to sample some members of one group.  Made by buffer/ledger."""

    group_id: int  # admission number; unique in a run
    attempt: int  # number of the lease within its group, from 0: later grants have higher ones
    prompt: Prompt
    group_size: int
    sample_indices: tuple[int, ...]  # the members still to be sampled, each in [0, group_size)
    sampling: SamplingParams
    admitted_version: int  # policy version live at admission; staleness is counted from here
    prefixes: tuple[Prefix | None, ...] = ()  # empty, or one per sample index


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One member of a lease, as a request to an engine."""

    group_id: int
    sample_index: int
    prompt: Prompt
    sampling: SamplingParams
    prefix: Prefix | None = None
    adapter: int = 1  # of those that the engine holds; 1: the policy's
    row: int = 0  # that is sampled, where rows are sampled side by side, in the order in which they began

    @property
    def request_id(self) -> str:
        """Unique within an engine as long as a lease is not granted to it twice at once."""
        adapter, row = f":{self.adapter}" if self.adapter > 1 else "", f"+{self.row}" if self.row else ""
        return f"{self.group_id}:{self.sample_index}{adapter}{row}"

    @property
    def num_done(self) -> int:
        """Completion tokens already in its prefix."""
        return len(self.prefix.token_ids) if self.prefix is not None else 0


class FinishReason(StrEnum):
    """Reason for the end of a completion's sampling."""

    STOP = "stop"  # the last token is an end-of-sequence or stop token, or completes a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # cut off from outside; never trained on, may be continued as a Prefix


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts that the engine's mixtures chose for the first tokens of prompt and first row.  Made by generation/.

    The last token of a row never is an input of the engine, and so has none.  In memory and on the wire alone:
    journals do not have them, segments only if asked (buffer.keep_routes).
    """

    num_tokens: int
    num_layers: int  # mixtures, in the order of the model
    top_k: int  # experts of a token in each
    packed: UInt8  # models/routes.py


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion.  Made by generation/."""

    group_id: int
    sample_index: int  # (group_id, sample_index) is unique in a run
    prompt_id: int  # of the lease's prompt; whoever needs the rest has the lease, or the group
    token_ids: Int32  # [Lc], at least one
    behaviour_logprobs: Float32  # [Lc] natural log, under the sampling distribution
    versions: Int32  # [Lc] policy version that sampled each token, never decreasing within a row
    loss_mask: Bool  # [Lc] False on tokens the policy did not choose (tool output), or that another row trains
    finish_reason: FinishReason  # of the whole rollout
    routes: Routes | None = None  # None: not asked for, or lost (with a crash of the controller, for instance)
    row_starts: Int32 = field(default_factory=_no_starts)  # first token of each further row, ascending, in (0, Lc)

    @property
    def rows(self) -> list[slice]:
        """The tokens of each row, in the order in which they ended: the last has the final answer."""
        return row_slices(self.row_starts, len(self.token_ids))

    @property
    def row_fault(self) -> str:
        """Describe what is wrong with its rows; "": nothing."""
        return row_fault(self.row_starts, len(self.token_ids))

    @property
    def is_of_one_version(self) -> bool:
        """True if one policy version sampled all tokens."""
        if len(self.row_starts):
            return bool((self.versions == self.versions[0]).all())
        return bool(self.versions.item(0) == self.versions.item(-1))  # they never decrease

    @property
    def num_shared(self) -> list[int]:
        """Number of tokens at the beginning of each row that an earlier row has, too."""
        rows = [self.token_ids[row] for row in self.rows]
        return [max([0, *(_num_alike(row, other) for other in rows[:place])]) for place, row in enumerate(rows)]

    @property
    def num_distinct_tokens(self) -> int:
        """Tokens of its rows, a beginning that rows share counted once."""
        if not len(self.row_starts):
            return len(self.token_ids)
        # In order of their content, so that what a row shares with any before it, it shares with the one before it.
        rows = sorted((self.token_ids[row] for row in self.rows), key=lambda each: each.tobytes())
        return len(self.token_ids) - sum(_num_alike(one, other) for one, other in pairwise(rows))


def _num_alike(one: Int32, other: Int32) -> int:
    """Number of equal tokens at the beginning of both."""
    num = min(len(one), len(other))
    differs = one[:num] != other[:num]
    return int(differs.argmax()) if differs.any() else num


class Verdict(StrEnum):
    """The result of a reward function."""

    CORRECT = "correct"
    WRONG = "wrong"
    VERIFIER_ERROR = "verifier_error"  # raised, died or timed out: no statement about the answer


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's log-probabilities of a completion, natural log at temperature 1.  Made by a [[service]].

    Each row is read by itself, after the prompt; arrays have all rows, end to end, as the rollout's.
    """

    logprobs: Float32  # [Lc] of the completion's own tokens
    flat_top_ids: Int32  # [Lc · k] top_ids, row after row: messages have arrays of one dimension
    flat_top_logprobs: Float32  # [Lc · k] top_logprobs, likewise

    @property
    def top_ids(self) -> Int32:
        """[Lc, k] the teacher's k most likely tokens in each place, most likely first; k: algorithm.teacher_top_k."""
        return self.flat_top_ids.reshape(len(self.logprobs), self.num_top)

    @property
    def top_logprobs(self) -> Float32:
        """[Lc, k] log-probabilities of top_ids."""
        return self.flat_top_logprobs.reshape(len(self.logprobs), self.num_top)

    @property
    def num_top(self) -> int:
        """The k of top_ids; 0: the teacher was not asked for them."""
        return self.flat_top_ids.size // max(1, len(self.logprobs))

    def fault(self, num_tokens: int) -> str:
        """Describe a contradiction to a completion of num_tokens tokens, or a number that is not finite; "": none."""
        lengths = len(self.logprobs), self.flat_top_ids.size, self.flat_top_logprobs.size
        if lengths[0] != num_tokens or lengths[1] != lengths[2] or lengths[1] % max(1, num_tokens):
            return f"its teacher has {lengths[0]} log-probabilities, and {lengths[1]} and {lengths[2]} of likely tokens"
        if not (np.isfinite(self.logprobs).all() and np.isfinite(self.flat_top_logprobs).all()):
            return "a log-probability of its teacher is not finite"
        return ""


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout and its reward.  Made by rewards/."""

    rollout: Rollout
    reward: float  # meaningless when the verdict is VERIFIER_ERROR
    verdict: Verdict
    reward_parts: dict[str, float] = field(default_factory=dict)  # named addends, for metrics
    detail: str = ""  # one line for people: what was extracted, or what went wrong
    token_rewards: dict[int, float] = field(default_factory=dict)  # completion token index → its part of the reward
    failure: str = ""  # of a VERIFIER_ERROR, its kind (rewards/outcomes.py); not kept in segments
    teacher: TeacherScores | None = None  # None: no teacher was asked

    def without_routes(self) -> ScoredRollout:
        """Itself, or a copy without routes, for files that do not keep them."""
        if self.rollout.routes is None:
            return self
        return replace(self, rollout=replace(self.rollout, routes=None))


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All members of one prompt.  Made by buffer/."""

    group_id: int
    prompt: Prompt
    admitted_version: int
    members: tuple[ScoredRollout, ...]  # exactly group_size, ordered by sample_index

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all its samples, one for each row, each with its prompt."""
        rollouts = [each.rollout for each in self.members]
        num_rows = sum(1 + len(rollout.row_starts) for rollout in rollouts)
        return sum(len(rollout.token_ids) for rollout in rollouts) + num_rows * len(self.prompt.token_ids)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """Prompt and one row of a completion, concatenated, with advantages, or rewards in their place.

    Made by algorithms/.
    """

    group_id: int
    sample_index: int
    token_ids: Int32  # [L]
    loss_mask: Bool  # [L] False on the prompt
    behaviour_logprobs: Float32  # [L] 0 where loss_mask is False
    advantages: Float32  # [L] 0 where loss_mask is False
    versions: Int32  # [L] -1 on the prompt
    loss_weight: float = 1.0  # weight of its loss tokens in the loss of the batch (algorithms/samples.py)
    # Of a teacher, where the trainer needs them; k: algorithm.teacher_top_k.  Flat arrays: those of messages are.
    teacher_logprobs: Float32 | None = None  # [L] 0 where loss_mask is False
    teacher_top_ids: Int32 | None = None  # [n · k] of its n loss tokens: the teacher's k most likely in their place
    teacher_top_logprobs: Float32 | None = None  # [n · k] of these
    routes: Routes | None = None  # of its first tokens; the trainer's routers choose for all others
    row: int = 0  # of its rollout


@dataclass(frozen=True, slots=True)
class PackedMicrobatch:
    """Samples concatenated into one row.  Made by packing/.

    A rank with fewer rows than the others gets one-token rows with loss_mask False.
    """

    token_ids: Int32  # [T]
    position_ids: Int32  # [T] from 0 in every segment
    cu_seqlens: Int32  # [S + 1] segment boundaries, from 0 to T
    loss_mask: Bool  # [T] never True on the first token of a segment
    behaviour_logprobs: Float32  # [T]
    advantages: Float32  # [T]
    versions: Int32  # [T] -1 where loss_mask is False
    loss_weights: Float32  # [S] weight of a segment's loss tokens; 1 for a mean over tokens
    teacher_logprobs: Float32 | None = None  # [T] 0 off the loss mask; None: no sample has them, or there is none
    teacher_top_ids: Int32 | None = None  # [n · k] of its n loss tokens
    teacher_top_logprobs: Float32 | None = None  # [n · k]
    routes: tuple[Routes | None, ...] = ()  # [S], or (): no sample has them


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits on metrics, by short name (algorithms/guard.py); outside them all ranks skip the optimiser step."""

    lows: dict[str, float] = field(default_factory=dict)
    highs: dict[str, float] = field(default_factory=dict)
    skip: tuple[int, ...] = ()  # indices of optimiser steps that were skipped when this step was first trained

    @property
    def allow_all(self) -> bool:
        """True if every finite step is applied."""
        return not (self.lows or self.highs or self.skip)


@dataclass(frozen=True, slots=True)
class PackedMinibatch:
    """One optimiser step's work for all data-parallel ranks.  Made by packing/."""

    ranks: tuple[tuple[PackedMicrobatch, ...], ...]  # [dp_size][same number of micro-batches]
    num_loss_tokens: int  # over all ranks; the denominator of the loss
    num_samples: int

    @property
    def rows(self) -> list[PackedMicrobatch]:
        """Rows of all ranks."""
        return [row for rows in self.ranks for row in rows]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The data of one training step: samples in one or more minibatches, each with one or more optimiser steps."""

    step: int  # the step this batch is for; counts from 0
    policy_version: int  # the version being trained: the number of earlier steps that changed the policy
    minibatches: tuple[PackedMinibatch, ...]  # each sample is in exactly one
    order: tuple[int, ...] = (0,)  # minibatch index of every optimiser step
    limits: StepLimits = StepLimits()  # set by the guard
    learning_rate: float = 0.0  # of its optimiser steps
    critic_learning_rate: float = 0.0
    renews_reference: bool = False  # the policy becomes the new reference before this step
    num_parts_before: int = 0  # parts of this step that were trained before this one; their gradients are kept
    is_part: bool = False  # others follow; nothing is applied, and the loss tokens are an estimate for the whole step

    @property
    def rows(self) -> list[PackedMicrobatch]:
        """Rows of all minibatches and ranks, each once."""
        return [row for minibatch in self.minibatches for row in minibatch.rows]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model under its HF name."""

    name: str
    dtype: str  # "float32", "bfloat16", "float16"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """Form of versions whose tensors are LoRA adapters: W + scale · B A in each adapted layer.

    Tensors are named MODULE.lora_A.weight, float32 [rank, in], and MODULE.lora_B.weight, float32 [out, rank].
    """

    rank: int
    scale: float  # not contained in B
    base: str  # digest of the frozen weights that the adapters belong to; "": not known


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Contents of a weight broadcast.  Made by weights/; a pure function of specs and bucket size."""

    policy_version: int
    epoch: int  # membership epoch whose group receives it
    tensors: tuple[TensorSpec, ...]  # in broadcast order
    bucket_ends: tuple[int, ...]  # bucket b holds tensors[bucket_ends[b-1] : bucket_ends[b]]
    adapter: AdapterForm | None = None  # None: tensors are whole weights


@dataclass(frozen=True, slots=True)
class HeldChecksum:
    """Checksum of the parameters that an engine holds, over all its workers.  Made by weights/checksums.py."""

    value: int  # 64 bits
    layout: str  # device, workers, numbers of each dtype: checksums of other layouts are not comparable


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """The members of one membership epoch, and their rendezvous."""

    epoch: int
    transport: str  # "gloo", "nccl", "ipc"
    address: str  # rendezvous of the ranks: "file:///path" or "tcp://host:port"
    members: tuple[str, ...]  # generator names in rank order; the publisher is rank 0
    ranks_per_member: tuple[int, ...]  # engine workers of each member

    @property
    def world_size(self) -> int:
        """Ranks of the group, including the publisher."""
        return 1 + sum(self.ranks_per_member)

    def first_rank(self, member: str) -> int:
        """Rank of the member's worker 0; raises ValueError if it is not a member."""
        index = self.members.index(member)
        return 1 + sum(self.ranks_per_member[:index])
