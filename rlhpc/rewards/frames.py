"""What a reward pool and its worker processes say to each other, over a pair of pipes.

A frame is a length (4 bytes, little-endian) and a msgspec message.  The worker says Ready once; after that one Reply
answers one Request, strictly in turn.  Nothing here can run code of the other side: no pickle.
"""

from __future__ import annotations

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20  # a longer one is a damaged header


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """The worker has imported its reward functions, or has failed to and exits."""

    error: str


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Judge this."""

    task: str
    completion: str
    reference: str
    memory_limit_bytes: int = 0  # address space of the worker meanwhile; 0: no limit


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The outcome; if `error` is not empty the rest has no meaning."""

    reward: float
    is_correct: bool
    parts: dict[str, float]
    detail: str
    error: str
    answer: str = ""
    rewards_at: dict[int, float] = {}
    failure: str = ""  # where error is not empty: one of failures.FAILURES
    num_forked: int = 0  # processes that were left behind, and killed
    costs: dict[str, float] = {}  # names of failures.COSTS


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return header and message.  Raises ValueError if it is too long or its text is not valid Unicode."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"message of {len(body)} bytes; the longest is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_length(header: bytes) -> int:
    """Return the length that a header announces.  Raises ValueError if it is absurd."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes; the longest is {MAX_FRAME_BYTES}")
    return length
