"""No altered message is accepted, and no message whatever raises anything but ProtocolError."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hostile.mutants import seal
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ProtocolError
from rlhpc.protocol.messages import LEASES, TOPOLOGY
from rlhpc.protocol.types import FinishReason, Lease, Prefix, Prompt, Rollout, SamplingParams, ScoredRollout, Verdict
from rlhpc.transport.codec import Codec

NUM_MUTATIONS = 24_000
CODEC = Codec({t for spec in TOPOLOGY.values() for t in spec.to_server + spec.to_client})


def originals() -> list[list[bytes]]:
    def delivery(length: int) -> m.Delivery:
        ints = np.arange(length, dtype=np.int32)
        floats = ints.astype(np.float32)
        prompt = Prompt(1, "math", ints[:5], "42")
        rollout = Rollout(1, 2, prompt, ints, floats, ints, ints > 3, FinishReason.STOP)
        return m.Delivery(3, 2, "outbox", 1, ScoredRollout(rollout, 1.0, Verdict.CORRECT, {"a": 1.0}, "x"))

    prefix = Prefix(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.ones(3, np.int32))
    lease = Lease(1, 0, delivery(8).scored.rollout.prompt, 2, (0, 1), SamplingParams(5), 1, (None, prefix))
    beat, report = m.Heartbeat("running", "", 1), m.StepReport(1, 1, True, {"x": 2.0})
    messages = [delivery(8), delivery(6_000), lease, beat, report]
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


def test_headers_made_for_harm_are_refused():
    """Huge, negative and many-dimensional shapes, deep nesting, numbers that overflow: all with a fitting checksum."""
    tag = zlib.crc32(b"CancelGroup")
    deep, group = b"\x91" * 5_000, b"\x81\xa8group_id"
    shape = group + b"\x93\xa3<i4\xcf" + b"\xff" * 8 + b"\x01"
    for header in (deep, group + deep, group + b"\xcf" + b"\xff" * 8 + b"x", shape, b"\xdf\xff\xff\xff\xff", b""):
        padded = header + bytes(-len(header) % 8)
        head = struct.pack("<IHBxIIQQ", 0, 1, 1, tag, len(header), 0, 32 + len(padded)) + padded
        try:
            CODEC.decode(seal([head]), "insider")
        except ProtocolError:
            continue
        raise AssertionError(header)
    for lengths in ((1 << 31, 1 << 62), (0, 0), (8, 1 << 62)):
        head = struct.pack("<IHBxIIQQ", 0, 1, 0, tag, *(lengths[0], 0, lengths[1])) + bytes(8)
        try:
            CODEC.decode(seal([head]), "insider")
        except ProtocolError:
            continue
        raise AssertionError(lengths)


def test_shapes_that_do_not_fit_the_bytes_are_refused():
    codec = Codec(LEASES.to_client)
    message = Lease(1, 0, Prompt(1, "t", np.arange(100, dtype=np.int32), ""), 1, (0,), SamplingParams(1), 0)
    (frame,) = codec.encode(message, 0)
    good = b"\x92\xa3<i4\x64"
    assert good in bytes(frame)
    for bad in (b"\x92\xa3<i4\x63", b"\x92\xa3<i4\x65", b"\x92\xa3<i4\xff", b"\x92\xa3<f4\x64", b"\x92\xa3|O8\x64",
                b"\x92\xa3<i4\xc3", b"\x92\xa3<i4\xc0"):  # fmt: skip
        altered = bytes(frame).replace(good, bad)
        try:
            codec.decode(seal([altered]), "insider")
        except ProtocolError:
            continue
        raise AssertionError(bad)
