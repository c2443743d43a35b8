"""Messages between a reward pool and its worker processes, over a pair of pipes.

A frame is a length (4 bytes, little-endian) and a msgspec message.  The worker says Ready once; after that one Replies
answers one JudgeRequest, and one Turn one DialogueRequest, strictly in turn.  Nothing here can run code of the other
side: no pickle.
"""

from __future__ import annotations

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20  # a longer one is a damaged header


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """The worker has imported its reward functions, or has failed to and exits."""

    error: str
    batched: tuple[str, ...] = ()  # of its tasks: those whose function takes many completions at once


class JudgeRequest(msgspec.Struct, array_like=True, frozen=True, tag="judge"):
    """Judge these: several only where the task's function is batched."""

    task: str
    completions: list[str]
    references: list[str]
    memory_limit_bytes: int = 0  # address space of the worker meanwhile; 0: no limit


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The outcome of one completion; if `error` is not empty the rest has no meaning."""

    reward: float = 0.0
    is_correct: bool = False
    parts: dict[str, float] = {}
    detail: str = ""
    answer: str = ""
    rewards_at: dict[int, float] = {}
    costs: dict[str, float] = {}  # names of outcomes.COSTS
    error: str = ""
    failure: str = ""  # where error is not empty: one of outcomes.FAILURES


class Answered(msgspec.Struct, array_like=True, frozen=True):
    """What every answer says of the work on it; if `error` is not empty the rest of it has no meaning."""

    error: str = ""
    failure: str = ""  # as of a Reply, costs too
    num_forked: int = 0  # processes that were left behind, and killed
    costs: dict[str, float] = {}
    traceback: str = ""  # of what was raised, for the log


class Replies(Answered, array_like=True, frozen=True, tag="judged"):
    """One reply for each completion."""

    replies: list[Reply] = []


class DialogueRequest(msgspec.Struct, array_like=True, frozen=True, tag="dialogue"):
    """Take the last of these turns, or begin: an environment's part of a rollout."""

    key: str  # of the rollout
    environment: str
    record: str  # JSON
    turns: list[str]  # of the policy, all so far
    task: str  # whose reward function judges the last turn
    answer: str  # the last turn as that function is to read it
    reference: str
    is_last: bool  # there will be no other turn, whether the environment is done or not
    memory_limit_bytes: int = 0  # as of a JudgeRequest


class Turn(Answered, array_like=True, frozen=True, tag="turn"):
    """What an environment answers."""

    messages: tuple[dict[str, str], ...] = ()
    reward: float = 0.0  # of all turns so far
    is_correct: bool = False
    parts: dict[str, float] = {}
    detail: str = ""
    is_done: bool = False  # the environment is
    is_over: bool = False  # the rewards are final


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
