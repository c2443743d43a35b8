"""One message of every type that travels, and some in other sizes: what mutants are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlhpc.protocol import messages as m
from rlhpc.protocol.messages import TOPOLOGY, ChannelSpec
from rlhpc.protocol.types import (
    FinishReason,
    Lease,
    PackedBatch,
    PackedMicrobatch,
    PackedMinibatch,
    Prefix,
    Prompt,
    Rollout,
    Routes,
    SamplingParams,
    ScoredRollout,
    StepLimits,
    TeacherScores,
    TensorSpec,
    Verdict,
    WeightGroup,
    WeightManifest,
)
from rlhpc.transport.codec import Codec
from rlhpc.transport.sessions import Greeting

SEVERAL_FRAMES_TOKENS = 6_000  # arrays of 24 KB, each in a frame of its own
CUT_FRAME_BYTES = 4_500_000  # one array in two frames


@dataclass(frozen=True, slots=True)
class Specimen:
    """An encoded message, its sequence number 0."""

    name: str
    frames: tuple[bytes, ...]


def all_codec() -> Codec:
    """A codec of every type of every channel, both ways."""
    return Codec({*(t for spec in TOPOLOGY.values() for t in (*spec.to_server, *spec.to_client)), Greeting})


def server_codec(spec: ChannelSpec) -> Codec:
    """What the server of a channel decodes with."""
    return Codec((*spec.to_server, Greeting))


def make_specimens(codec: Codec) -> tuple[list[Specimen], list[Specimen]]:
    """Return (small ones: at least one of each type of `codec`, large ones: of several frames)."""
    small = [*_of_control(), *_of_leases(), *_of_batches(), *_of_rewards(), Greeting()]
    large = [_delivery(SEVERAL_FRAMES_TOKENS), m.LeaseProgress(np.arange(CUT_FRAME_BYTES, dtype=np.uint8), 1, 1)]
    wanted = {t for spec in TOPOLOGY.values() for t in (*spec.to_server, *spec.to_client)}
    if missing := wanted - {type(each) for each in small}:
        raise TypeError(f"no specimen of {', '.join(sorted(t.__name__ for t in missing))}")
    return [_encoded(codec, each) for each in small], [_encoded(codec, each) for each in large]


def _encoded(codec: Codec, message: object) -> Specimen:
    return Specimen(type(message).__name__, tuple(bytes(frame) for frame in codec.encode(message, 0)))


def _of_control() -> list[object]:
    return [
        m.Hello("generator", 1, "4711.0-1", "0123abcd", 4711, "host", 2, ("GPU-0", "")),
        m.Heartbeat("running", "prompts", 7, 64, {"tokens_per_s": 1234.5, "kv_used": 0.25}, "1.0.0-first"),
        m.WeightsLive(3, 7, 0.25, 0.125, "bucket 3 is torn"),
        m.SaveReport(8, 1.5, ""),
        m.StopRole("the run is over", run_is_over=False),
        m.Reregister(),
        m.JoinGroup(_group(), 1),
        m.ReceiveWeights(_manifest()),
        m.TakeCanary(3, np.arange(40, dtype=np.int32)),
        m.CanaryTaken(3, 7, np.full(40, -0.5, np.float32)),
        m.Quarantine(5, must_restart=False, reason="its canary differs"),
    ]


def _of_leases() -> list[object]:
    prefix = Prefix(np.arange(9, dtype=np.int32), np.full(9, -0.5, np.float32), np.full(9, 2, np.int32))
    lease = Lease(12, 0, _prompt(), 4, (0, 2), SamplingParams(64, 1.0, (2, 3)), 7, (None, prefix))
    return [
        _delivery(24),
        _delivery(25),  # with a teacher
        _delivery(1_500),  # its versions and its mask travel as runs
        m.LeaseReturn(12, (0, 2), (None, Prefix.of_rows([prefix, prefix])), "draining", 1),
        m.LeaseProgress(np.arange(300, dtype=np.uint8), 900, 1),
        lease,
        m.CancelGroup(12),
        m.Delivered(31, "a1b2c3"),
        m.ShowWhole(((12, 0), (12, 2))),
    ]


def _of_batches() -> list[object]:
    ints = np.arange(64, dtype=np.int32)
    floats = ints.astype(np.float32)
    row = PackedMicrobatch(ints, ints, np.array([0, 30, 64], np.int32), ints > 3, floats, floats, ints, floats[:2])
    taught = replace(row, teacher_logprobs=-floats, teacher_top_ids=ints, teacher_top_logprobs=-floats)
    routed = replace(row, routes=(Routes(29, 2, 4, np.arange(90, dtype=np.uint8)), None))
    minibatch = PackedMinibatch(((row, row), (row,)), 120, 8)
    return [
        m.TrainerReady(7, _manifest(), "GPU-0"),
        m.StepReport(7, 8, applied=True, metrics={"loss": 0.5, "grad_norm": 1.25}, refused="kl"),
        m.PartReport(7, 1),
        m.ScoreReport(5, 300, 412.5, {"preference_accuracy": 0.75}),
        m.GroupOpened(_group(), ""),
        m.PublishReport(3, 7, 0.5, ""),
        m.SnapshotTaken(8, 0.25),
        m.BatchRows(4, (minibatch, minibatch)),
        m.BatchRows(5, (PackedMinibatch(((taught, routed),), 61, 2),)),
        m.TrainBatch(
            4,
            PackedBatch(7, 7, (), (0, 1, 1, 0), StepLimits({"ess": 0.5}, {"kl": 1.0}, (2,)), 1e-6, 1e-5, True, 2, True),
        ),
        m.ScoreBatch(5),
        m.FormGroup(_group()),
        m.PublishWeights(3, 7),
        m.SaveCheckpoint(8, "checkpoints/step-8.part"),
    ]


def _of_rewards() -> list[object]:
    return [
        m.RewardRequest(5, "math", "the answer is 42", "42"),
        m.RewardReply(5, 1.0, "correct", {"format": 0.5}, "42"),
        m.TurnRequest(6, "12:2", "tools", '{"question": "6 · 7?"}', ("<tool_call>", "42"), "math", "42", "42", False),
        m.TurnReply(6, ({"role": "tool", "content": "42"},), 1.0, "correct", {"calls": 1.0}, "42", False, False),
        m.StillWaiting((5, 6)),
    ]


def _prompt() -> Prompt:
    return Prompt(3, "math", np.arange(20, dtype=np.int32), "42")


def _delivery(num_tokens: int) -> m.Delivery:
    ids = np.arange(num_tokens, dtype=np.int32)
    logprobs, versions = -ids.astype(np.float32), np.full(num_tokens, 7, np.int32)
    routes = Routes(num_tokens, 2, 4, np.arange(num_tokens, dtype=np.uint8)) if num_tokens % 3 else None
    mask = np.ones(num_tokens, np.bool_)
    row_starts = np.array([3, 11] if num_tokens % 2 else [], np.int32)
    rollout = Rollout(12, 2, 3, ids, logprobs, versions, mask, FinishReason.STOP, routes, row_starts)
    teacher = TeacherScores(logprobs, np.repeat(ids, 2), np.repeat(logprobs, 2)) if num_tokens % 2 else None
    scored = ScoredRollout(rollout, 1.0, Verdict.CORRECT, {"format": 0.5}, "42", teacher=teacher)
    return m.Delivery(31, 29, "a1b2c3", 1, 0xC0FFEE, scored)


def _group() -> WeightGroup:
    return WeightGroup(3, "gloo", "tcp://host:1234", ("generator-0", "generator-1"), (1, 2))


def _manifest() -> WeightManifest:
    tensors = (TensorSpec("lm_head.weight", "bfloat16", (64, 32)), TensorSpec("norm.weight", "float32", (32,)))
    return WeightManifest(7, 3, tensors, (1, 2))
