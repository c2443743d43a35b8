"""Damage to encoded messages: by chance (`altered`), and by a member of the run that knows how (`forged`).

An altered message has the checksum that it had.  A forged one has a checksum that fits: it shows a member that lies,
and only types, lengths and limits can stop it.  Where they do not, it is a message that this member could have sent
anyway.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.hostile.specimens import Specimen

Frames = list[bytes]
PREFIX_BYTES = 32  # docs/design.md, Frames
SEQUENCE = slice(16, 24)
_PREFIX_FIELDS = ((0, 4), (4, 2), (6, 1), (7, 1), (8, 4), (12, 4), (16, 8), (24, 8))  # offset, bytes
_EDGES = (0, 1, 7, 8, 31, 32, 33, 1 << 12, 1 << 16, 1 << 22, (1 << 22) + 1, 1 << 30, 1 << 31, 1 << 32, 1 << 62)
_FORGERIES_SHARE = 0.25
_LARGE_SHARE = 0.01
_CUT_SHARE = 0.02  # of the large ones: a message of 4.5 MB


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is sent instead of a message."""

    kind: str
    frames: Frames
    is_forged: bool


class Breeder:
    """An endless supply of mutants, the same for a seed."""

    def __init__(self, small: Sequence[Specimen], large: Sequence[Specimen], seed: int) -> None:
        self._small, self._large, self._chance = small, large, random.Random(seed)
        self._originals = {without_sequence(list(each.frames)) for each in (*small, *large)}

    def next(self, sequence: int) -> Mutant:
        """Make a mutant of a message with this number: of frames that are those of no message."""
        chance = self._chance

        def pick() -> Frames:
            return with_sequence(list(self._pick().frames), sequence)

        while True:
            source = pick()
            is_forged = chance.random() < _FORGERIES_SHARE
            ways = _ALTERATIONS if not is_forged or chance.random() < 0.4 else _FORGERIES
            kind, alter = chance.choice(ways)
            frames = alter(source, chance, pick)
            if without_sequence(frames) in self._originals:  # two halves of one message, for example
                continue
            return Mutant(kind, seal(frames) if is_forged else frames, is_forged)

    def honest(self, sequence: int) -> Frames:
        """A message as it was, with this number."""
        return with_sequence(list(self._chance.choice(self._small).frames), sequence)

    def _pick(self) -> Specimen:
        if self._chance.random() >= _LARGE_SHARE:
            return self._chance.choice(self._small)
        return self._large[1 if self._chance.random() < _CUT_SHARE else 0]


def seal(frames: Frames) -> Frames:
    """Give frames a checksum that fits, where there is room for one."""
    if not frames or len(frames[0]) < 4:
        return frames
    crc = zlib.crc32(frames[0][4:])
    for frame in frames[1:]:
        crc = zlib.crc32(frame, crc)
    return [struct.pack("<I", crc) + frames[0][4:], *frames[1:]]


def with_sequence(frames: Frames, sequence: int) -> Frames:
    """The same message with another sequence number, sealed; unchanged where there is no room for one."""
    if not frames or len(frames[0]) < PREFIX_BYTES:
        return frames
    head = bytearray(frames[0])
    head[SEQUENCE] = struct.pack("<Q", sequence)
    return seal([bytes(head), *frames[1:]])


def without_sequence(frames: Frames) -> tuple[bytes, ...]:
    """Frames but for checksum and number: equal for two copies of a message."""
    if not frames or len(frames[0]) < PREFIX_BYTES:
        return tuple(frames)
    return (frames[0][4 : SEQUENCE.start] + frames[0][SEQUENCE.stop :], *frames[1:])


# ------------------------------------------------------------------------------------------------------- alterations

Pick = Callable[[], Frames]
Way = Callable[[Frames, random.Random, Pick], Frames]


def _flip(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    where = chance.randrange(len(frames))
    frame = bytearray(frames[where])
    reach = len(frame) if chance.random() < 0.5 else min(len(frame), 200)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        frame[chance.randrange(reach)] ^= 1 << chance.randrange(8)
    return [*frames[:where], bytes(frame), *frames[where + 1 :]]


def _burst(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    where = chance.randrange(len(frames))
    frame = bytearray(frames[where])
    at = chance.randrange(len(frame))
    noise = chance.randbytes(min(chance.randint(1, 64), len(frame) - at))
    frame[at : at + len(noise)] = noise
    return [*frames[:where], bytes(frame), *frames[where + 1 :]]


def _truncate(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    where = chance.randrange(len(frames))
    return [*frames[:where], frames[where][: chance.randrange(len(frames[where]))], *frames[where + 1 :]]


def _grow(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    where = chance.randrange(len(frames))
    tail = chance.choice((bytes(8), chance.randbytes(chance.randint(1, 200))))
    return [*frames[:where], frames[where] + tail, *frames[where + 1 :]]


def _lose_frame(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    """One frame less; an empty one where it was the only one, since there is no message without any."""
    where = chance.randrange(len(frames))
    return [*frames[:where], *frames[where + 1 :]] or [b""]


def _add_frames(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    """A frame twice, or empty ones: these leave the checksum as it is."""
    where = chance.randint(0, len(frames))
    added = [chance.choice(frames)] if chance.random() < 0.5 else [b""] * chance.choice((1, 1, 2, 300))
    return [*frames[:where], *added, *frames[where:]]


def _recut(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    """The same bytes in other frames: the checksum fits still."""
    where = chance.randrange(len(frames))
    at = chance.randint(0, len(frames[where]))
    if chance.random() < 0.5 and where + 1 < len(frames):
        joined = frames[where] + frames[where + 1]
        return [*frames[:where], joined, *frames[where + 2 :]]
    return [*frames[:where], frames[where][:at], frames[where][at:], *frames[where + 1 :]]


def _splice(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    """The beginning of one message and the end of another one."""
    other = pick()
    if chance.random() < 0.3:
        return [*frames[: chance.randint(0, len(frames))], *other[chance.randrange(len(other)) :]]
    at, after = chance.randrange(len(frames[0])), chance.randrange(len(other[0]))
    return [frames[0][:at] + other[0][after:], *chance.choice((frames, other))[1:]]


def _prefix(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    """Another checksum, schema, flag, type, length or sequence number."""
    offset, size = chance.choice(_PREFIX_FIELDS)
    now = int.from_bytes(frames[0][offset : offset + size], "little")
    value = chance.choice((*_EDGES, now + 1, now - 1, -1, chance.getrandbits(8 * size)))
    if offset == 8 and chance.random() < 0.7:  # the tag of another type
        value = int.from_bytes(pick()[0][8:12], "little")
    head = bytearray(frames[0])
    head[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return [bytes(head), *frames[1:]]


def _noise(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
    whole = [chance.randbytes(chance.choice((0, 1, 31, 32, 40, 200, 3_000))) for _ in range(chance.randint(1, 4))]
    if chance.random() < 0.5:  # behind a head that begins well
        whole[0] = frames[0][: chance.choice((8, 12, 24, PREFIX_BYTES))] + whole[0]
    return whole


# --------------------------------------------------------------------------------------------------------- forgeries


Value = Callable[[random.Random, Any], Any]  # what stands in the place of a value


def _forge(value: Value, *, arrays_only: bool = False) -> Way:
    """Replace one value somewhere in the header, with lengths that fit."""

    def alter(frames: Frames, chance: random.Random, pick: Pick) -> Frames:
        prefix = bytearray(frames[0][:PREFIX_BYTES])
        (num_header,) = struct.unpack_from("<I", prefix, 12)
        header = frames[0][PREFIX_BYTES : PREFIX_BYTES + num_header]
        arrays = frames[0][PREFIX_BYTES + (num_header + 7 & -8) :]
        forged = _with_one_replaced(msgspec.msgpack.decode(header), value, chance, arrays_only=arrays_only)
        body = forged + bytes(-len(forged) % 8) + arrays
        struct.pack_into("<I", prefix, 12, len(forged))
        struct.pack_into("<Q", prefix, 24, PREFIX_BYTES + len(body))
        return [bytes(prefix) + body, *frames[1:]]

    return alter


def _with_one_replaced(tree: Any, value: Value, chance: random.Random, *, arrays_only: bool) -> bytes:
    """Encode a header in which one value, chosen by chance, is another; raw bytes stand for themselves."""
    places = [place for place in _places(tree) if not arrays_only or _is_array(place[0][place[1]])]
    root: Any = [tree]
    container, key = chance.choice(places) if places and chance.random() < 0.9 else (root, 0)
    container[key] = value(chance, container[key])
    if not isinstance(container[key], bytes):
        return msgspec.msgpack.encode(root[0])
    raw, container[key] = container[key], "\x00here\x00"
    return msgspec.msgpack.encode(root[0]).replace(msgspec.msgpack.encode("\x00here\x00"), raw)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a tree of maps and lists."""
    keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in _places(tree[key])]


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and value[0] in _CODES


def _scalar(chance: random.Random, was: Any) -> Any:
    return chance.choice(
        (None, True, -1, 0, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), float("nan"), float("inf"), -0.0, 1e308, "",
         "\0", "generator-0", "x" * 70_000, "é" * 100, [], {}, [[]], {"": 0.0}, [None] * 3_000)
    )  # fmt: skip


def _deep(chance: random.Random, was: Any) -> Any:
    """Nested further than a recursive reader can follow, in as many bytes."""
    depth = chance.choice((10, 900, 1_100, 30_000))
    return chance.choice((b"\x91" * depth + b"\xc0", b"\x81\xa1x" * depth + b"\xc0", b"\x91" * depth))


def _announced(chance: random.Random, was: Any) -> Any:
    """Containers that announce more than there is; extension types; text that is none."""
    huge = b"\xff" * 4
    return chance.choice(
        (b"\xdd" + huge, b"\xdf" + huge, b"\xdb" + huge + b"x", b"\xc6" + huge, b"\xc9" + huge + b"\x01", b"\xc1",
         b"\xd6\xff" + bytes(4), b"\x81\xa8group_id\xdd" + huge, b"\x82\xa1\xff\x01\xa1\xff\x01", b"")
    )  # fmt: skip


def _shape(chance: random.Random, was: Any) -> Any:
    """[dtype, *shape] of more than was sent, of several dimensions, or of none."""
    code = was[0] if _is_array(was) and chance.random() < 0.8 else chance.choice((*_CODES, "|O8", "<U9", "i4", ""))
    if _is_array(was) and type(was[1]) is int and chance.random() < 0.3:  # as many numbers in another shape
        return [code, *chance.choice(([1, was[1]], [was[1], 1, 1], [was[1] // 2, 2]))]
    sizes = (0, 1, 2, 3, 4, 8, 9, 20, 24, 64, 300, -1, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1, True, None, 1.0)
    return [code, *(chance.choice(sizes) for _ in range(chance.choice((0, 1, 1, 2, 3, 4, 5, 64))))]


def _runs(chance: random.Random, was: Any) -> Any:
    """[dtype, length, values, lengths]: few bytes that claim to be many numbers."""
    code, length = was[0] if _is_array(was) else "<i4", 1 << chance.randint(8, 40)
    value: Any = chance.choice((code == "|b1" or 5, code == "|b1" or 5, 1, True, 1 << 40, None))
    lengths = chance.choice(([length], [length], [length - 1, 1], [length, 0], [-length, 2 * length], [1] * 17, []))
    return [code, sum(lengths), [value] * chance.choice((len(lengths), len(lengths), 1)), lengths]


_CODES = ("<i4", "<f4", "|u1", "|b1", "<i8")
_ALTERATIONS: tuple[tuple[str, Way], ...] = (
    ("bits flipped", _flip), ("bytes overwritten", _burst), ("cut short", _truncate), ("grown", _grow),
    ("frame lost", _lose_frame), ("frames added", _add_frames), ("cut into other frames", _recut),
    ("two messages spliced", _splice), ("field of the head", _prefix), ("noise", _noise),
)  # fmt: skip
_FORGERIES: tuple[tuple[str, Way], ...] = (
    ("value in the header", _forge(_scalar)), ("nested deeply", _forge(_deep)),
    ("huge announcements", _forge(_announced)), ("shapes of arrays", _forge(_shape, arrays_only=True)),
    ("lengths of runs", _forge(_runs, arrays_only=True)),
)  # fmt: skip
