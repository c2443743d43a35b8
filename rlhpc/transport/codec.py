"""Turn messages into frames and back, strictly: anything malformed is rejected.

Input: any frozen dataclass of types.py or messages.py.  Output: frames for a socket; and the reverse.  Never pickles.

A message is one *head*, then the large arrays.  Little-endian:

    head    crc32 u32 │ schema u16 │ flags u8 │ 0 u8 │ type tag u32 │ header bytes u32 │ sequence u64 │ head bytes u64
            header: the dataclass as msgpack, each array in it replaced by [dtype, length] or by its runs
            small arrays but runs, in field order, each padded to 8 bytes
    arrays  those of 4 KiB and more, in field order, each in separate frames

A message below 64 KiB is all head (flag 1): one frame is then cheaper than several.  No frame exceeds 4 MiB, because
fresh pages for a larger one cost more than the copy; longer parts are cut at multiples of it.
The checksum covers all that follows it, header and frames alike; lengths of all frames follow from the header.
A file (buffer/log.py) has messages in one piece: however long, all head (flag 1), and no array as runs, so that what is
read back may be views of the mapped file.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import types
import typing
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlhpc.base.native import crc32
from rlhpc.protocol.errors import ProtocolError
from rlhpc.protocol.messages import MAX_MESSAGE_BYTES

# ---------------------------------------------------------------------------------------------------- array annotations
#
# Find the arrays of a message type from its annotations, so that its codec knows them before the first message.
#
# Input: a dataclass.  Output: the dtype, one of DTYPES, of every array annotation in it.


DTYPES = {
    np.dtype(kind).str: np.dtype(kind)
    for kind in (np.bool_, np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64)
}
_SCALARS = (int, float, str, bool, types.NoneType)
_CONTAINERS = (tuple, dict, types.UnionType, typing.Union)


def array_annotations(annotation: Any) -> dict[Any, np.dtype[Any]]:
    """Return every array annotation below this one with its dtype.  Raises TypeError for one that cannot be encoded."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        (kind,) = typing.get_args(arguments[1]) or (None,)
        if kind is None or isinstance(kind, typing.TypeVar) or np.dtype(kind).str not in DTYPES:
            raise TypeError(f"arrays of {kind} cannot be sent")
        return {annotation: np.dtype(kind)}
    if annotation is np.ndarray:
        raise TypeError("an array annotation must name its dtype")
    found: dict[Any, np.dtype[Any]] = {}
    if dataclasses.is_dataclass(annotation):
        arguments = tuple(typing.get_type_hints(annotation).values())
    elif origin not in _CONTAINERS and annotation not in _SCALARS and not _is_string_enum(annotation):
        raise TypeError(f"{annotation} cannot be sent")
    for argument in arguments:
        if argument is not ...:
            found |= array_annotations(argument)
    return found


def _is_string_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, StrEnum)


# ---------------------------------------------------------------------------------------------------------- run lengths
#
# Run-length encoding of arrays: versions and mask of a rollout take a number or two, not 20 KB.
#
# Input: a one-dimensional array of integers or booleans.  Output: values and lengths, and the reverse.  If the ends do
# not look like runs, as with token ids, the check costs half a microsecond.


Runs: TypeAlias = tuple[list[Any], list[int]]  # value of each run, length of each run

MIN_BYTES = 1 << 10  # shorter arrays are cheaper to copy than to check
MAX_RUNS = 16
FREE_BYTES = 1 << 20  # that the runs of any message may grow to
MAX_GROWTH = 4  # and for each byte of it besides: a rollout has 8 bytes a token that are no runs, and 5 that may be


class Allowance:
    """Expanded bytes left for the runs of one message: a few bytes on the wire must not fill the memory."""

    def __init__(self, num_sent: int) -> None:
        """num_sent: bytes of the message."""
        self._left = FREE_BYTES + MAX_GROWTH * num_sent

    def covers(self, nbytes: int) -> bool:
        """True if runs that expand to this many bytes are allowed."""
        return nbytes <= self._left

    def sent(self, nbytes: int) -> None:
        """Add bytes of the message."""
        self._left += MAX_GROWTH * nbytes

    def grew(self, nbytes: int) -> None:
        """Subtract bytes of expanded runs."""
        self._left -= nbytes


def find_runs(array: NDArray[Any]) -> Runs | None:
    """Return the runs of an array that has few, or None."""
    if array.nbytes < MIN_BYTES or array.ndim != 1 or array.dtype.kind not in "bi":
        return None
    first, last = array.item(0), array.item(-1)
    if first != array.item(1) or last != array.item(-2):
        return None
    if first == last:
        # Equal to itself shifted by one element: the quickest test for a single run.
        raw = array.tobytes()
        if raw[array.itemsize :] == raw[: -array.itemsize]:
            return [first], [len(array)]
    changes = np.flatnonzero(array[1:] != array[:-1])
    if len(changes) >= MAX_RUNS:
        return None
    starts = [0, *(changes + 1).tolist()]
    ends = [*starts[1:], len(array)]
    return array[starts].tolist(), [end - start for start, end in zip(starts, ends, strict=True)]


def is_runs_form(wire: object) -> bool:
    """True for [dtype, length, values, lengths], as against [dtype, *shape]."""
    return type(wire) is list and len(wire) == 4 and type(wire[2]) is list


def expand_runs(dtype: np.dtype[Any], wire: Any, allowance: Allowance) -> NDArray[Any]:
    """Return the array of [dtype, length, values, lengths].  Raises ValueError if malformed or not allowed."""
    code, num_elements, values, lengths = wire
    if code != dtype.str:
        raise ValueError(f"dtype {code!r} where {dtype.str!r} is expected")
    if type(values) is not list or type(lengths) is not list or not 1 <= len(values) == len(lengths) <= MAX_RUNS:
        raise ValueError("not as many run lengths as values, or too many")
    kind = bool if dtype.kind == "b" else int
    if any(type(value) is not kind for value in values) or any(type(n) is not int or n < 1 for n in lengths):
        raise ValueError("runs of an impossible value or length")
    nbytes = sum(lengths) * dtype.itemsize
    if sum(lengths) != num_elements or nbytes < MIN_BYTES or not allowance.covers(nbytes):
        raise ValueError(f"runs of {sum(lengths)} elements, expected {num_elements!r}, or too many for the message")
    allowance.grew(nbytes)
    if len(values) == 1:
        return np.full(sum(lengths), values[0], dtype)  # OverflowError for a value the dtype has not
    return np.repeat(np.array(values, dtype), lengths)


# ---------------------------------------------------------------------------------------------------------------- codec


SCHEMA = 1
SMALL_MESSAGE_BYTES = 64 << 10  # below this a message is one frame
SMALL_ARRAY_BYTES = 4 << 10  # below this an array is always part of the head
MAX_FRAME_BYTES = 4 << 20

Frame: TypeAlias = bytes | memoryview
Array: TypeAlias = NDArray[Any]

_PREFIX = struct.Struct("<IHBxIIQQ")
_CRC = struct.Struct("<I")
_NO_PREFIX = bytes(_PREFIX.size)
_ALL_INLINE = 1
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PADDING = tuple(bytes(n) for n in range(8))
_MALFORMED = (msgspec.MsgspecError, TypeError, ValueError, LookupError, OverflowError, RecursionError)
_WHERE = re.compile(r"^(?P<why>.*?)(?: - at `\$\.?(?P<field>[^`]*)`)?$", re.DOTALL)


class Codec:
    """Encodes and decodes the given message types and no others.

    One thread uses it.  Decoded arrays share memory with the frames where alignment allows, and may be read-only.
    """

    def __init__(self, message_types: Iterable[type], max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Compile one plan per type.  Raises TypeError for a field that cannot be encoded."""
        self._max_message_bytes = max_message_bytes
        self._arrays: list[Array] = []  # of the message that is being encoded
        self._allowance = Allowance(0)  # of the same message
        self._source = _NOTHING  # of the message that is being decoded
        self._repeated: _Encoded | None = None  # the last long message without arrays
        self._dtypes: dict[Any, np.dtype[Any]] = {}  # annotation → dtype
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._detach)
        self._file_encoder = msgspec.msgpack.Encoder(enc_hook=self._set_apart)
        plans = [self._compile(message_type) for message_type in message_types]
        self._by_type = {plan.message_type: plan for plan in plans}
        self._by_tag = {plan.tag: plan for plan in plans}
        if len(self._by_tag) != len(self._by_type):
            raise TypeError("two message types share a tag; rename one")

    def encode(self, message: object, sequence: int) -> list[Frame]:
        """Return the frames of one message.  The frames may share memory with its arrays.

        A long message without arrays is encoded only once, however often it is sent in a row: a manifest of 18,000
        tensors goes to every generator, and takes 13 ms.

        Raises ProtocolError(peer "") if the type is unknown, a field does not match its annotation, or the message is
        longer than allowed.
        """
        repeated = self._repeated
        if repeated is not None and message is repeated.message:
            return self._lay_out(repeated.plan, repeated.header, [], sequence)
        plan = self._by_type.get(type(message))
        if plan is None:
            raise ProtocolError("", "type", f"{type(message).__name__} is not one of {self._names()}")
        try:
            header = self._encoder.encode(message)
            plan.checker.decode(header)  # a wrong field is reported to the sender, not to the receiver
            arrays = self._arrays
        except _MALFORMED as error:
            raise _explain("", plan, error) from error
        finally:
            self._arrays, self._allowance = [], Allowance(0)
        if not arrays and len(header) >= SMALL_MESSAGE_BYTES:
            self._repeated = _Encoded(message, plan, header)
        return self._lay_out(plan, header, arrays, sequence)

    def decode(self, frames: Sequence[Frame], peer: str) -> tuple[int, Any]:
        """Return (sequence number, message).  Raises ProtocolError and nothing else."""
        head, rest, tag, header_bytes, flags, sequence = self._open(frames, peer)
        plan = self._by_tag.get(tag)
        if plan is None:
            raise ProtocolError(peer, "type", f"tag {tag:#010x} is not one of {self._names()}")
        end = _PREFIX.size + header_bytes
        self._source = source = _Source(head, rest, end, flags == _ALL_INLINE)
        try:
            source.skip_padding()
            message = plan.decoder.decode(memoryview(head)[_PREFIX.size : end])
            source.finish()
        except _MALFORMED as error:
            raise _explain(peer, plan, error) from error
        finally:
            self._source = _NOTHING  # or the codec would keep the frames alive
        return sequence, message

    def encode_whole(self, message: object, sequence: int, head: bytearray) -> tuple[list[Any], int]:
        """Append the head of a message in one piece; return what follows it, and the length of the whole message.

        Its checksum is left 0: whoever keeps it has one of their own.  What follows shares memory with its arrays.
        Fields are not compared with their annotations: messages of files are made here, or were compared when they
        arrived.  Raises ProtocolError(peer "") if a value cannot be encoded.
        """
        plan, start = self._by_type[type(message)], len(head)
        first = start + _PREFIX.size
        try:
            self._file_encoder.encode_into(message, head, first)
            arrays = self._arrays
        except _MALFORMED as error:
            raise _explain("", plan, error) from error
        finally:
            self._arrays = []
        header_bytes = len(head) - first
        head += _PADDING[-header_bytes & 7]
        num_bytes, pieces = len(head) - start, list[Any]()
        for array in arrays:
            nbytes = array.nbytes
            num_bytes += nbytes + 7 & -8
            pieces.append(array)
            if nbytes & 7:
                pieces.append(_PADDING[-nbytes & 7])
        _PREFIX.pack_into(head, start, 0, SCHEMA, _ALL_INLINE, plan.tag, header_bytes, sequence, num_bytes)
        return pieces, num_bytes

    def decode_whole(self, data: memoryview, start: int, end: int) -> tuple[int, Any]:
        """Return (sequence number, message) of encode_whole, whose bytes, at a multiple of 8, are as they were.

        Arrays are views of all data: a slice of it for each message would live as long as they do.
        Raises ProtocolError(peer "") and nothing else.
        """
        _, schema, _, tag, header_bytes, sequence, _ = _PREFIX.unpack_from(data, start)
        plan = self._by_tag.get(tag)
        if schema != SCHEMA:
            raise ProtocolError("", f"schema {schema}", f"this version reads schema {SCHEMA}")
        if plan is None:
            raise ProtocolError("", f"type {tag:#010x}", f"not one of {self._names()}")
        first = start + _PREFIX.size
        self._source = source = _Source(data, (), first + header_bytes, True, own_end=end)
        try:
            source.skip_padding()
            message = plan.decoder.decode(data[first : first + header_bytes])
            source.finish()
        except _MALFORMED as error:
            raise _explain("", plan, error) from error
        finally:
            self._source = _NOTHING
        return sequence, message

    # ------------------------------------------------------------------------------------------------- encoding

    def _lay_out(self, plan: _Plan, header: bytes, arrays: list[Array], sequence: int) -> list[Frame]:
        total = _padded(_PREFIX.size + len(header)) + sum([_padded(array.nbytes) for array in arrays])
        if total > self._max_message_bytes:
            raise ProtocolError("", plan.name, f"{total} bytes, more than the limit of {self._max_message_bytes}")
        is_small = total < SMALL_MESSAGE_BYTES
        parts: list[Any] = [_NO_PREFIX, header, _PADDING[-len(header) % 8]]  # the prefix is a multiple of 8
        own_frames: list[Frame] = []
        for array in arrays:
            if is_small or array.nbytes < SMALL_ARRAY_BYTES:
                parts += (array, _PADDING[-array.nbytes % 8])
            else:
                own_frames += _cut(array.data.cast("B"))
        head = bytearray().join(parts)
        flags = _ALL_INLINE if is_small else 0
        _PREFIX.pack_into(head, 0, 0, SCHEMA, flags, plan.tag, len(header), sequence, len(head))
        view = memoryview(head)
        crc = crc32(view[_CRC.size :])
        for frame in own_frames:
            crc = crc32(frame, crc)
        _CRC.pack_into(head, 0, crc)
        return [view, *own_frames] if len(head) <= MAX_FRAME_BYTES else [*_cut(view), *own_frames]

    def _detach(self, value: object) -> object:
        """Take an array out of the header; what remains is [dtype, length], or runs."""
        if isinstance(value, np.ndarray):
            code = value.dtype.str
            if code not in DTYPES or value.ndim != 1:
                raise ValueError(f"arrays of {value.dtype} with {value.ndim} dimensions cannot be sent")
            if self._allowance.covers(value.nbytes) and (runs := find_runs(value)) is not None:
                self._allowance.grew(value.nbytes)
                return (code, len(value), *runs)
            self._allowance.sent(value.nbytes)
            self._arrays.append(value if value.flags.c_contiguous else np.ascontiguousarray(value))
            return (code, len(value))
        if isinstance(value, np.generic):  # a numpy scalar where the annotation says int or float
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be sent")

    def _set_apart(self, value: object) -> object:
        """Take an array out of the header as _detach does, without runs."""
        if type(value) is np.ndarray and value.ndim == 1 and value.flags.c_contiguous and value.dtype in _CODES:
            self._arrays.append(value)
            return (_CODES[value.dtype], value.size)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be written, or it is an array of another kind, or has gaps")

    # ------------------------------------------------------------------------------------------------- decoding

    def _open(self, frames: Sequence[Frame], peer: str) -> tuple[Frame, Sequence[Frame], int, int, int, int]:
        """Check schema, lengths and checksum; return head, later frames, tag, header length, flags, sequence."""
        if not frames or len(frames[0]) < _PREFIX.size:
            raise ProtocolError(peer, "head", "shorter than its fixed part")
        first = frames[0]
        crc, schema, flags, tag, header_bytes, sequence, head_bytes = _PREFIX.unpack_from(first)
        if schema != SCHEMA:
            raise ProtocolError(peer, "schema", f"{schema}, this end uses {SCHEMA}")
        if sum(map(len, frames)) > self._max_message_bytes:
            raise ProtocolError(peer, "head", f"more than {self._max_message_bytes} bytes")
        actual = crc32(memoryview(first)[_CRC.size :])
        for index in range(1, len(frames)):
            actual = crc32(frames[index], actual)
        if actual != crc or first[7]:
            raise ProtocolError(peer, "crc32", "the message was altered")
        if flags & ~_ALL_INLINE or _padded(_PREFIX.size + header_bytes) > head_bytes:
            raise ProtocolError(peer, "head", "flags or lengths are impossible")
        count = max(1, -(-head_bytes // MAX_FRAME_BYTES))
        _expect_lengths(frames[:count], head_bytes, peer)
        head = first if count == 1 else b"".join(frames[:count])
        return head, frames[count:], tag, header_bytes, flags, sequence

    def _attach(self, annotation: Any, wire: object) -> Array:
        """Put an array back in place of [dtype, length] or [dtype, length, values, lengths]."""
        dtype = self._dtypes[annotation]
        if is_runs_form(wire):
            return expand_runs(dtype, wire, self._source.allowance)
        return self._source.take(dtype, _read_array_form(dtype, wire))

    def _check(self, annotation: Any, wire: Any) -> Array:
        """Used instead of _attach on outgoing messages: the form is correct, the dtype may be wrong."""
        if wire[0] != self._dtypes[annotation].str:
            raise ValueError(f"dtype {wire[0]!r} where {self._dtypes[annotation].str!r} is expected")
        return _NO_DATA

    # ------------------------------------------------------------------------------------------------- compiling

    def _compile(self, message_type: type) -> _Plan:
        if not dataclasses.is_dataclass(message_type):
            raise TypeError(f"{message_type.__name__} is not a dataclass")
        self._dtypes.update(array_annotations(message_type))
        return _Plan(
            message_type,
            crc32(message_type.__name__.encode()),
            msgspec.msgpack.Decoder(message_type, dec_hook=self._attach),
            msgspec.msgpack.Decoder(message_type, dec_hook=self._check),
        )

    def _names(self) -> str:
        return ", ".join(sorted(plan.name for plan in self._by_tag.values())) or "none"


_NO_DATA: Array = np.empty(0, np.uint8)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Encoding of one message type."""

    message_type: type
    tag: int  # crc32 of the type's name: does not depend on the order of tables
    decoder: msgspec.msgpack.Decoder[Any]
    checker: msgspec.msgpack.Decoder[Any]

    @property
    def name(self) -> str:
        return self.message_type.__name__


@dataclasses.dataclass(frozen=True, slots=True)
class _Encoded:
    """A message that may be sent to another peer, too; it is frozen, and kept so that its id() is not reused."""

    message: object
    plan: _Plan
    header: bytes


class _Source:
    """Hands out the arrays of one message in field order."""

    def __init__(
        self, head: Frame, frames: Sequence[Frame], cursor: int, all_inline: bool, *, own_end: int | None = None
    ) -> None:
        """own_end: end of the message in `head`, if our own encoder wrote it; its values are then not checked."""
        self._is_checked, self._end = own_end is not None, len(head) if own_end is None else own_end
        self._head, self._frames, self._cursor, self._all_inline = head, frames, cursor, all_inline
        self._next_frame = 0
        self.allowance = Allowance(len(head) + sum(map(len, frames)))

    def take(self, dtype: np.dtype[Any], length: int) -> Array:
        """Return the next array.  Raises ValueError if bytes are missing."""
        nbytes = length * dtype.itemsize
        if self._all_inline or nbytes < SMALL_ARRAY_BYTES:
            flat = self._from_head(dtype, nbytes)
        else:
            flat = self._from_frames(dtype, nbytes)
        if dtype.kind == "b" and nbytes and not self._is_checked and flat.view(np.uint8).max() > 1:
            raise ValueError("a boolean that is neither 0 nor 1")
        return flat

    def finish(self) -> None:
        """Raise ValueError if anything was not used."""
        if self._cursor != self._end or self._next_frame != len(self._frames):
            raise ValueError("bytes are left over")

    def skip_padding(self) -> None:
        """Go to the next multiple of 8.  Raises ValueError if there is anything but zeros before it."""
        start, self._cursor = self._cursor, _padded(self._cursor)
        if self._head[start : self._cursor] != _PADDING[self._cursor - start]:
            raise ValueError("bytes between arrays that belong to no array")

    def _from_head(self, dtype: np.dtype[Any], nbytes: int) -> Array:
        start = self._cursor
        self._cursor = start + nbytes
        if self._cursor > self._end:
            raise ValueError(f"{nbytes} bytes wanted, {self._end - start} left in the head")
        if nbytes & 7:
            self.skip_padding()
        if nbytes == 0:  # numpy.frombuffer refuses to make an empty array
            return np.empty(0, dtype)
        return _aligned(np.frombuffer(self._head, dtype, nbytes // dtype.itemsize, start))

    def _from_frames(self, dtype: np.dtype[Any], nbytes: int) -> Array:
        count = -(-nbytes // MAX_FRAME_BYTES)
        frames = self._frames[self._next_frame : self._next_frame + count]
        self._next_frame += count
        _expect_lengths(frames, nbytes, "")
        if count == 1:
            return _aligned(np.frombuffer(frames[0], dtype))
        return np.frombuffer(b"".join(frames), dtype)


_NOTHING = _Source(b"", (), 0, False)


def _read_array_form(wanted: np.dtype[Any], wire: object) -> int:
    """Return the length in [dtype, length].  Raises ValueError unless it is exactly that."""
    if type(wire) is not list or len(wire) != 2:
        raise ValueError("not [dtype, length]: arrays have one dimension")
    code, length = wire
    if code != wanted.str:
        raise ValueError(f"dtype {code!r} where {wanted.str!r} is expected")
    if type(length) is not int or length < 0:
        raise ValueError(f"impossible length {length!r}")
    return length


def _expect_lengths(frames: Sequence[Frame], nbytes: int, peer: str) -> None:
    """Raise unless the frames are `nbytes` cut at multiples of MAX_FRAME_BYTES."""
    for frame in frames:
        if len(frame) != min(nbytes, MAX_FRAME_BYTES):
            raise ProtocolError(
                peer, "frames", f"one of {len(frame)} bytes where {min(nbytes, MAX_FRAME_BYTES)} are expected"
            )
        nbytes -= len(frame)
    if nbytes:
        raise ProtocolError(peer, "frames", f"{nbytes} bytes are missing")


def _aligned(array: Array) -> Array:
    return array if array.flags.aligned else array.copy()


def _cut(whole: memoryview) -> list[Frame]:
    return [whole[start : start + MAX_FRAME_BYTES] for start in range(0, len(whole), MAX_FRAME_BYTES)]


def _padded(nbytes: int) -> int:
    return nbytes + 7 & -8


def _explain(peer: str, plan: _Plan, error: Exception) -> ProtocolError:
    """Name the field: msgspec appends its path to the message."""
    if isinstance(error, ProtocolError):
        return ProtocolError(peer, f"{plan.name}.{error.field}", error.why)
    parts = _WHERE.match(str(error))
    field, why = (parts["field"], parts["why"]) if parts else (None, str(error))
    return ProtocolError(peer, f"{plan.name}.{field}" if field else plan.name, why or type(error).__name__)
