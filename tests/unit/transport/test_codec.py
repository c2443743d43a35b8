"""The codec returns what it was given, and refuses what it cannot carry or did not make itself."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hostile.mutants import seal
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ProtocolError
from rlhpc.protocol.messages import BATCHES, CONTROL, TOPOLOGY
from rlhpc.protocol.types import (
    AdapterForm,
    Bool,
    FinishReason,
    Float32,
    Int32,
    Lease,
    PackedBatch,
    PackedMicrobatch,
    PackedMinibatch,
    Prefix,
    Prompt,
    Rollout,
    SamplingParams,
    ScoredRollout,
    TensorSpec,
    Verdict,
    WeightManifest,
)
from rlhpc.transport.codec import (
    FREE_BYTES,
    MAX_FRAME_BYTES,
    MAX_GROWTH,
    MAX_RUNS,
    SMALL_MESSAGE_BYTES,
    Allowance,
    Codec,
    expand_runs,
    find_runs,
)
from tests import build
from tests.engines.memory_channel import MemoryServer

# ------------------------------------------------------------------------------------------------------------- messages
#
# The codec returns what it was given, and says which field is wrong where it cannot.


TYPES = tuple({t for spec in TOPOLOGY.values() for t in spec.to_server + spec.to_client})


class CountedNumber(np.int64):
    """An integer in a message, which knows how often the codec has turned it into bytes."""

    reads = 0

    def item(self) -> int:  # type: ignore[override]
        """What the codec asks a numpy scalar for."""
        self.reads += 1
        return int(self)


def prompt(length: int = 5) -> Prompt:
    return build.prompt(3, range(length), task="math", reference="π = 3")


def scored(length: int) -> ScoredRollout:
    rng = np.random.default_rng(length)
    rollout = Rollout(
        7,
        1,
        3,
        rng.integers(0, 100_000, length, dtype=np.int32),
        -rng.random(length, dtype=np.float32),
        np.arange(length, dtype=np.int32),
        rng.random(length) < 0.5,
        FinishReason.LENGTH,
        row_starts=np.arange(1, length, 900, dtype=np.int32),
    )
    return ScoredRollout(rollout, 0.5, Verdict.CORRECT, {"format": 0.25, "answer": 0.25}, "42")


def lease() -> Lease:
    sampling = SamplingParams(64, stop_token_ids=(1, 2))
    return Lease(9, 1, prompt(), 4, (0, 2), sampling, 11, (None, build.prefix(3, 1)))


def batch(num_tokens: int) -> m.BatchRows:
    ints = np.arange(num_tokens, dtype=np.int32)
    floats = ints.astype(np.float32)
    row = PackedMicrobatch(ints, ints, np.array([0, num_tokens], np.int32), ints > 0, floats, floats, ints, floats[:1])
    minibatch = PackedMinibatch(((row, row), (row, row)), 4 * (num_tokens - 1), 4)
    return m.BatchRows(4, (minibatch, minibatch))


MESSAGES = [
    m.Delivery(7, 3, "outbox", 0, 1 << 31, scored(1)),
    m.Delivery(7, 3, "outbox", 0, 1 << 31, scored(4096)),
    m.Delivery(7, 3, "outbox", 2, 0, scored(40_000)),
    lease(),
    m.TrainBatch(4, PackedBatch(4, 4, (), (0, 1, 1, 0))),
    batch(64),
    batch(30_000),
    batch(1_100_000),  # arrays of 4.2 MiB: two frames each
    m.Hello("generator", 0, "abc", "hash", 123, "node-1", 2),
    m.Heartbeat("running", "", 3, 64, {"tokens_per_s": 1e4, "nan": float("inf")}),
    m.ScoreBatch(4),
    m.ScoreReport(4, 7, 1.5),
    m.StepReport(1, 2, True, {}),
    m.PartReport(1, 2),
    m.LeaseReturn(1, (0, 1), (None, lease().prefixes[1]), "draining", 0),
    m.LeaseReturn(1, (0,), (Prefix.of_rows([build.prefix(3, 1), build.prefix(2, 4)]),), "draining", 0),
    m.RewardRequest(1 << 40, "math", "x" * 5_000_000, ""),  # a head of more than one frame
    m.ReceiveWeights(WeightManifest(1, 2, (TensorSpec("w", "bfloat16", (2, 3)),), (1,))),
    m.ReceiveWeights(WeightManifest(1, 2, (TensorSpec("w", "float32", (2, 3)),), (1,), AdapterForm(8, 0.5, "ab"))),
    m.SaveReport(step=2, seconds=0.5),
]


def same(left: object, right: object) -> bool:
    """Equality that looks into arrays, and insists on types."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        return left.dtype == right.dtype and left.shape == right.shape and bool(np.array_equal(left, right))
    if isinstance(left, tuple):
        assert isinstance(right, tuple)
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__)
    return left == right


def over_the_wire(frames: list[bytes | memoryview]) -> list[bytes | memoryview]:
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_decoded_is_what_was_encoded(message: object):
    codec = Codec(TYPES)
    sequence, decoded = codec.decode(over_the_wire(codec.encode(message, 12345678901)), "peer")
    assert sequence == 12345678901
    assert same(decoded, message)


def test_a_small_message_is_one_frame_and_no_frame_exceeds_the_limit():
    codec = Codec(TYPES)
    for message in MESSAGES:
        frames = codec.encode(message, 0)
        total = sum(map(len, frames))
        assert (len(frames) == 1) == (total < SMALL_MESSAGE_BYTES)
        assert max(map(len, frames)) <= MAX_FRAME_BYTES


@pytest.mark.parametrize("length", [4096, 40_000])
def test_decoded_arrays_share_memory_with_the_frames(length: int):
    codec = Codec([ScoredRollout])
    frames = over_the_wire(codec.encode(scored(length), 0))
    token_ids = codec.decode(frames, "peer")[1].rollout.token_ids
    assert any(np.shares_memory(token_ids, np.frombuffer(frame, np.uint8)) for frame in frames)
    assert not token_ids.flags.writeable


def test_arrays_are_aligned_even_if_the_frame_is_not():
    codec = Codec([ScoredRollout])
    (frame,) = codec.encode(scored(100), 0)
    shifted = memoryview(b"x" + bytes(frame))[1:]
    rollout = codec.decode([shifted], "peer")[1].rollout
    assert rollout.token_ids.flags.aligned
    assert rollout.behaviour_logprobs.flags.aligned
    assert same(rollout, scored(100).rollout)


def test_a_long_message_to_many_is_turned_into_bytes_once():
    versions = [CountedNumber(version) for version in (7, 8)]
    specs = tuple(TensorSpec(f"model.layers.0.mlp.experts.{i}.weight", "bfloat16", (2, 3)) for i in range(3_000))
    first, second = (m.ReceiveWeights(WeightManifest(version, 2, specs, (1,))) for version in versions)
    sender, receiver = Codec(TYPES), Codec(TYPES)
    for sequence, message in enumerate([first, first, MESSAGES[0], first, second, second]):
        frames = over_the_wire(sender.encode(message, sequence))
        assert sum(map(len, frames)) > SMALL_MESSAGE_BYTES or message is MESSAGES[0]
        number, decoded = receiver.decode(frames, "peer")
        assert number == sequence
        if message is not MESSAGES[0]:
            assert decoded == message
    assert [version.reads for version in versions] == [1, 1]


@dataclass(frozen=True)
class Arrays:
    numbers: Float32
    flags: Bool
    ids: tuple[Int32, ...] = ()


def test_empty_and_strided_arrays_and_numpy_scalars_travel():
    message = Arrays(np.empty(0, np.float32), np.zeros(2_000, np.bool_), (np.empty(0, np.int32),))
    assert same(Codec([Arrays]).decode(over_the_wire(Codec([Arrays]).encode(message, 0)), "peer")[1], message)
    strided, codec = np.arange(20, dtype=np.int32)[::2], Codec(TYPES)
    decoded = codec.decode(codec.encode(replace(lease(), prompt=replace(prompt(), token_ids=strided)), 0), "peer")[1]
    assert np.array_equal(decoded.prompt.token_ids, strided)
    metrics = {"loss": np.float32(0.5), "grad_norm": np.float64(2.0)}
    found = codec.decode(codec.encode(m.StepReport(0, 1, True, metrics), 0), "peer")[1].metrics
    assert found == {"loss": 0.5, "grad_norm": 2.0}
    assert {type(value) for value in found.values()} == {float}


def test_arrays_have_one_dimension_at_both_ends():
    codec, square = Codec([Arrays]), np.eye(2, dtype=np.float32)
    with pytest.raises(ProtocolError, match="2 dimensions cannot be sent"):
        codec.encode(Arrays(square, np.zeros(3, np.bool_)), 0)
    (frame,) = codec.encode(Arrays(square.reshape(-1), np.zeros(3, np.bool_)), 0)
    one, two = b"\x92\xa3<f4\x04", b"\x93\xa3<f4\x02\x02"
    assert one in bytes(frame)
    forged = bytes(frame)[:12] + struct.pack("<I", struct.unpack_from("<I", frame, 12)[0] + 1) + bytes(frame)[16:]
    num_header = struct.unpack_from("<I", forged, 12)[0]
    header = forged[32 : 32 + num_header - 1].replace(one, two)
    arrays = bytes(frame)[32 + (num_header - 1 + 7 & -8) :]
    body = header + bytes(-len(header) % 8) + arrays
    head = forged[4:24] + struct.pack("<Q", 32 + len(body)) + body
    with pytest.raises(ProtocolError, match="one dimension"):
        codec.decode([struct.pack("<I", zlib.crc32(head)) + head], "insider")


def test_runs_that_grow_beyond_their_message_are_sent_in_full_instead():
    """A member could else fill the memory of others with a few bytes; what a sender of ours sends is always taken."""
    longest = FREE_BYTES // 4
    rows = tuple(np.full(longest // 2, number, np.int32) for number in range(5))
    message = Arrays(np.empty(0, np.float32), np.zeros(3, np.bool_), rows)
    frames = Codec([Arrays]).encode(message, 0)
    assert sum(map(len, frames)) > rows[0].nbytes  # at least one of them travels as it is
    assert same(Codec([Arrays]).decode(over_the_wire(frames), "peer")[1], message)


# ------------------------------------------------------------------------------------------------------- refusals


def test_the_sender_learns_which_field_is_wrong():
    codec = Codec(TYPES)
    wrong = replace(scored(4), rollout=replace(scored(4).rollout, token_ids=np.arange(4, dtype=np.int64)))
    with pytest.raises(ProtocolError) as error:
        codec.encode(m.Delivery(1, 1, "", 0, 0, wrong), 0)
    assert error.value.field == "Delivery.scored.rollout.token_ids"
    assert "<i8" in error.value.why
    assert "<i4" in error.value.why


@pytest.mark.parametrize(
    "message",
    [
        m.CancelGroup(1.5),  # type: ignore[arg-type]
        m.CancelGroup(True),
        m.CancelGroup(1 << 70),
        m.StopRole(None),  # type: ignore[arg-type]
        m.StopRole(b"x"),  # type: ignore[arg-type]
        m.StepReport(0, 0, True, {"loss": "high"}),  # type: ignore[dict-item]
        m.StepReport(0, 0, 1, {}),  # type: ignore[arg-type]
        m.StopRole(...),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_field_of_another_type_is_refused_by_the_sender(message: object):
    with pytest.raises(ProtocolError):
        Codec(TYPES).encode(message, 0)


def test_a_type_that_is_not_on_the_list_is_refused_at_both_ends():
    with pytest.raises(ProtocolError, match="StopRole is not one of CancelGroup"):
        Codec([m.CancelGroup]).encode(m.StopRole("x"), 0)
    frames = Codec([m.StopRole]).encode(m.StopRole("x"), 0)
    with pytest.raises(ProtocolError, match="is not one of CancelGroup") as error:
        Codec([m.CancelGroup]).decode(frames, "generator-0")
    assert error.value.peer == "generator-0"


def test_a_message_over_the_limit_is_refused_at_both_ends():
    message = m.StopRole("x" * 2000)
    with pytest.raises(ProtocolError, match="more than the limit of 1000"):
        Codec([m.StopRole], max_message_bytes=1000).encode(message, 0)
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        Codec([m.StopRole], max_message_bytes=1000).decode(Codec([m.StopRole]).encode(message, 0), "peer")


async def test_a_server_sends_what_its_row_of_the_table_allows_and_a_batch_may_be_of_any_size():
    message = m.StopRole("x" * 2000)
    server = MemoryServer(replace(CONTROL, max_bytes_to_client=1000))
    server.connect("generator-0")
    with pytest.raises(ProtocolError, match="more than the limit of 1000"):
        await server.send("generator-0", message)
    assert CONTROL.max_bytes_to_client == 1 << 30
    assert BATCHES.max_bytes_to_client > 1024 * 64 * 32_768 * 21  # 1,024 groups of 64 of 32k, bytes a token


@pytest.mark.parametrize("annotation", [np.ndarray, set[int], object, complex])
def test_a_message_type_that_cannot_travel_is_refused_when_the_codec_is_made(annotation: object):
    with pytest.raises(TypeError):
        Codec([make_dataclass("Odd", [("value", annotation)], frozen=True)])


# ------------------------------------------------------------------------------------------------------ versions


def old_report() -> type:
    return make_dataclass("Report", [("step", int)], frozen=True)


def new_report() -> type:
    fields = [("step", int), ("note", str, field(default="")), ("parts", dict[str, float], field(default_factory=dict))]
    return make_dataclass("Report", fields, frozen=True)


def test_a_sender_without_the_newest_fields_is_understood():
    old, new = old_report(), new_report()
    decoded = Codec([new]).decode(Codec([old]).encode(old(5), 0), "peer")[1]
    assert decoded == new(5, "", {})


def test_another_schema_is_named_as_the_reason():
    (frame,) = Codec(TYPES).encode(m.CancelGroup(1), 0)
    altered = bytearray(frame)
    altered[4] += 1
    with pytest.raises(ProtocolError, match="this end uses 1"):
        Codec(TYPES).decode([altered], "peer")


# ----------------------------------------------------------------------------------------------------------- codec fuzz
#
# No altered message is accepted, and no message whatever raises anything but ProtocolError.


NUM_MUTATIONS = 8_000
CODEC = Codec(TYPES)


def originals() -> list[list[bytes]]:
    messages = [MESSAGES[0], m.Delivery(3, 2, "outbox", 1, 5, scored(6_000)), lease()]
    messages += [m.Heartbeat("running", "", 1), m.StepReport(1, 1, True, {"x": 2.0})]
    return [[bytes(frame) for frame in CODEC.encode(message, 77)] for message in messages]


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """Flip, cut, grow, swap, drop, double, or move a byte from one frame to the next."""
    frames = list(frames)
    where = rng.randrange(len(frames))
    frame = bytearray(frames[where])
    kind = rng.randrange(8)
    if kind < 3 and frame:  # most often in the head, which is the shortest part
        at = rng.randrange(min(len(frame), 200 if kind == 0 else len(frame)))
        frame[at] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del frame[rng.randrange(len(frame)) :]
    elif kind == 4:
        frame += rng.randbytes(rng.randint(1, 16))
    elif kind == 5:
        frames.insert(where, frames[rng.randrange(len(frames))])
        return frames
    elif kind == 6:
        del frames[where]
        return frames
    elif len(frames) > 1:
        other = (where + 1) % len(frames)
        frames[other] = bytes(frame[-1:]) + frames[other]
        del frame[-1:]
    else:
        frame = bytearray(rng.randbytes(rng.randrange(200)))
    frames[where] = bytes(frame)
    return frames


def test_no_altered_message_is_accepted():
    rng = random.Random(1)
    sources = originals()
    refused = tried = 0
    while tried < NUM_MUTATIONS:
        source = rng.choice(sources)
        altered = mutate(source, rng)
        if altered == source:
            continue
        tried += 1
        try:
            CODEC.decode(altered, "stranger")
        except ProtocolError:
            refused += 1
    assert refused == tried == NUM_MUTATIONS


def test_altered_messages_with_a_fitting_checksum_raise_nothing_but_protocol_errors():
    rng = random.Random(2)
    sources = originals()
    for _ in range(NUM_MUTATIONS):
        altered = seal(mutate(rng.choice(sources), rng))
        try:
            _, message = CODEC.decode(altered, "insider")
        except ProtocolError:
            continue
        if isinstance(message, m.Delivery):  # accepted: then at least every type is right
            assert message.scored.rollout.token_ids.dtype == np.int32
            assert isinstance(message.scored.verdict, Verdict)


@given(st.lists(st.binary(max_size=300), max_size=4))
@settings(max_examples=300, deadline=None)
def test_noise_raises_nothing_but_protocol_errors(frames: list[bytes]):
    for attempt in (frames, seal(frames)):
        try:
            CODEC.decode(attempt, "noise")
        except ProtocolError:
            continue


def refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        CODEC.decode(seal(frames), "insider")


def test_headers_made_for_harm_are_refused():
    """Huge, negative and many-dimensional shapes, deep nesting, numbers that overflow: all with a fitting checksum."""
    tag = zlib.crc32(b"CancelGroup")
    deep, group = b"\x91" * 5_000, b"\x81\xa8group_id"
    shape = group + b"\x93\xa3<i4\xcf" + b"\xff" * 8 + b"\x01"
    for header in (deep, group + deep, group + b"\xcf" + b"\xff" * 8 + b"x", shape, b"\xdf\xff\xff\xff\xff", b""):
        padded = header + bytes(-len(header) % 8)
        refused([struct.pack("<IHBxIIQQ", 0, 1, 1, tag, len(header), 0, 32 + len(padded)) + padded])
    for num_header, num_bytes in ((1 << 31, 1 << 62), (0, 0), (8, 1 << 62)):
        refused([struct.pack("<IHBxIIQQ", 0, 1, 0, tag, num_header, 0, num_bytes) + bytes(8)])


def test_shapes_that_do_not_fit_the_bytes_are_refused():
    (frame,) = CODEC.encode(build.lease(prompt=build.prompt(1, range(100))), 0)
    good = b"\x92\xa3<i4\x64"
    assert good in bytes(frame)
    for bad in (b"\x92\xa3<i4\x63", b"\x92\xa3<i4\x65", b"\x92\xa3<i4\xff", b"\x92\xa3<f4\x64", b"\x92\xa3|O8\x64",
                b"\x92\xa3<i4\xc3", b"\x92\xa3<i4\xc0"):  # fmt: skip
        refused([bytes(frame).replace(good, bad)])


# ---------------------------------------------------------------------------------------------------------- run lengths
#
# Arrays of long runs travel as their runs.


@given(
    st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(2, 900)), min_size=1, max_size=MAX_RUNS),
    st.sampled_from(["<i4", "<i8"]),
)
def test_what_is_found_expands_to_the_same_array(runs: list[tuple[int, int]], code: str) -> None:
    array = np.repeat(np.array([value for value, _ in runs], code), [length for _, length in runs])
    found = find_runs(array)
    if array.nbytes < 1024:
        assert found is None
        return
    assert found is not None
    again = expand_runs(array.dtype, [code, len(array), *found], Allowance(0))
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def test_a_mask_is_one_run() -> None:
    mask = np.ones(4096, np.bool_)
    assert find_runs(mask) == ([True], [4096])
    assert expand_runs(mask.dtype, ["|b1", 4096, [True], [4096]], Allowance(0)).all()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4096, dtype=np.int32),
        np.zeros(4096, np.float32),
        np.zeros((64, 64), np.int32),
        np.zeros(8, np.int32),
        np.r_[[0, 0], np.arange(4096), [1, 1]].astype(np.int32),
    ],
    ids=["token ids", "floats", "two dimensions", "short", "runs at both ends only"],
)
def test_other_arrays_have_none(array: np.ndarray) -> None:
    assert find_runs(array) is None


@pytest.mark.parametrize(
    "wire",
    [
        ["<i8", 4096, [1], [4096]],
        ["<i4", 4096, [1], [4095]],
        ["<i4", 4096, [1, 2], [4096]],
        ["<i4", 4096, [1, 2], [4097, -1]],
        ["<i4", 4096, [1.0], [4096]],
        ["<i4", 4096, [True], [4096]],
        ["<i4", 4096, [], []],
        ["<i4", 8, [1], [8]],
        ["<i4", 1 << 40, [1], [1 << 40]],
        ["<i4", 4096, [1], [4096.0]],
        ["<i4", 4096, list(range(17)), [*([1] * 16), 4080]],
    ],
)
def test_anything_else_is_refused(wire: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"dtype|run"):
        expand_runs(np.dtype(np.int32), wire, Allowance(0))


def test_a_value_that_the_dtype_has_not_is_refused() -> None:
    with pytest.raises(OverflowError):
        expand_runs(np.dtype(np.int32), ["<i4", 4096, [2**31], [4096]], Allowance(0))


def test_the_runs_of_a_message_together_grow_to_no_more_than_its_bytes_allow() -> None:
    quarter, num_sent = FREE_BYTES // 16, 1_000  # elements of a quarter of what any message may grow to
    allowance = Allowance(num_sent)
    for _ in range(4):
        expand_runs(np.dtype(np.int32), ["<i4", quarter, [1], [quarter]], allowance)
    left = MAX_GROWTH * num_sent // 4
    with pytest.raises(ValueError, match="too many for the message"):
        expand_runs(np.dtype(np.int32), ["<i4", left + 1, [1], [left + 1]], allowance)
    expand_runs(np.dtype(np.int32), ["<i4", left, [1], [left]], allowance)
