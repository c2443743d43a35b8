"""Sessions of peers: identify the sender of a message, check that it may send, and detect lost messages.

A *session* is one opened client channel: peer name, incarnation of its process, a random number.  Its text is the
ROUTER's routing id, so every message identifies its session.  The random number keeps others from taking over a session
(routing ids are claimed, not proved), and lets a reopened channel start from sequence 0.

Guarantees: only a peer's newest session is accepted; an incarnation that was replaced by another is fenced permanently,
and so is any from an earlier start than the latest known of that name, even when first seen: a node
that was cut off must not take over from its replacement.  Per session and direction, sequence numbers count from 0, so
that losses are counted and duplicates rejected.
"""

from __future__ import annotations

import re
import secrets
import uuid
from dataclasses import dataclass, field

from rlhpc.protocol.contracts import ChannelStatistics
from rlhpc.protocol.errors import PeerUnreachable, ProtocolError

# ---------------------------------------------------------------------------------------------------------- incarnation
#
# Order the starts of a process: which of two is the later one.
#
# Input: incarnation texts: "JOB.RESTART.START-UUID", as a supervisor counts starts (a local run: "0.ATTEMPT.0-UUID").
# Any other text has no order.  Does not rely on clocks: nodes of a cluster disagree on the time, not on counts.


_ORDERED = re.compile(r"([0-9]{1,18})\.([0-9]{1,9})\.([0-9]{1,9})-.+")

Order = tuple[int, int, int]  # job, its restart, start within it


def order_of(incarnation: str) -> Order | None:
    """Return the sort key of a start, or None for a text without order."""
    parts = _ORDERED.fullmatch(incarnation)
    if parts is None:
        return None
    job, restart, start = map(int, parts.groups())
    return job, restart, start


def is_earlier(incarnation: str, other: str) -> bool:
    """True if it was started before the other.  False if one of them has no order, or both have the same."""
    order, other_order = order_of(incarnation), order_of(other)
    return order is not None and other_order is not None and order < other_order


def is_same_start(incarnation: str, other: str) -> bool:
    """True if both belong to one process, which started over without being restarted (another_of)."""
    return order_of(incarnation) is not None and order_of(incarnation) == order_of(other)


def another_of(incarnation: str) -> str:
    """Return a new incarnation of the same order, for a process that starts over without being restarted."""
    return f"{incarnation.split('-', 1)[0]}-{uuid.uuid4().hex[:12]}"


# ------------------------------------------------------------------------------------------------------------- sessions


_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}-[0-9]{1,9}")
_SESSION = re.compile(rb"([a-z][a-z0-9_]{0,40}-[0-9]{1,9})/([!-.0-~]{1,120})/([0-9a-f]{16})")


def peer_name(role: str, replica: int) -> str:
    """Name of a role instance, e.g. ``generator-1``.  Raises ValueError for one that cannot be a name."""
    return checked_name(f"{role}-{replica}")


def checked_name(name: str) -> str:
    """Return the name.  Raises ValueError unless it is ``role-replica``; it becomes part of file names."""
    if not is_name(name):
        raise ValueError(f"{name!r} is not the name of a role instance; legal: like 'generator-0'")
    return name


def is_name(text: str) -> bool:
    """True for a name of the form ``role-replica``."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Greeting:
    """First message of every session: announces the peer to the server.  Never delivered."""


@dataclass(frozen=True, slots=True)
class Session:
    """One opened client channel."""

    name: str
    incarnation: str
    nonce: str

    @classmethod
    def open(cls, name: str, incarnation: str) -> Session:
        """Make a new one.  Raises ValueError for an illegal name or incarnation."""
        session = cls(checked_name(name), incarnation, secrets.token_hex(8))
        if not _SESSION.fullmatch(session.routing_id):
            raise ValueError(f"incarnation {incarnation!r} is not 1 to 120 printable ASCII characters without '/'")
        return session

    @classmethod
    def parse(cls, routing_id: bytes) -> Session:
        """Read a routing id.  Raises ProtocolError."""
        parts = _SESSION.fullmatch(routing_id)
        if parts is None:
            raise ProtocolError("", "routing id", f"{routing_id[:60]!r} is not a session")
        return cls(*(part.decode() for part in parts.groups()))

    @property
    def routing_id(self) -> bytes:
        """The routing id of this session."""
        return f"{self.name}/{self.incarnation}/{self.nonce}".encode()


@dataclass(slots=True)
class SequenceCheck:
    """Checks the sequence numbers of one direction of one session."""

    expected: int = 0
    lost: int = 0

    def accept(self, sequence: int, peer: str) -> None:
        """Count what is missing before this number.  Raises ProtocolError for a duplicate or a late message."""
        if sequence < self.expected:
            raise ProtocolError(peer, "sequence", f"{sequence} is a duplicate or late; {self.expected} is next")
        self.lost += sequence - self.expected
        self.expected = sequence + 1


@dataclass(slots=True)
class Peer:
    """A peer's current session, as the server sees it."""

    session: Session
    routing_id: bytes
    received: SequenceCheck = field(default_factory=SequenceCheck)
    next_sent: int = 0


class PeerBook:
    """All peers of one server."""

    def __init__(self) -> None:
        self._by_name: dict[str, Peer] = {}
        self._by_routing_id: dict[bytes, Peer] = {}
        self._fenced: set[tuple[str, str]] = set()  # (name, incarnation)
        self._latest: dict[str, str] = {}  # name → incarnation of the latest start, of those that have an order
        self._over: set[bytes] = set()  # routing ids of sessions that were replaced
        self._lost_before = 0

    @property
    def names(self) -> frozenset[str]:
        """Every peer ever heard."""
        return frozenset(self._by_name)

    @property
    def lost(self) -> int:
        """Messages that were sent to this server and never arrived."""
        return self._lost_before + sum(peer.received.lost for peer in self._by_name.values())

    def find(self, name: str) -> Peer:
        """Return the peer.  Raises PeerUnreachable."""
        peer = self._by_name.get(name)
        if peer is None:
            known = ", ".join(sorted(self._by_name)) or "no peer"
            raise PeerUnreachable(f"{name} is not connected; {known} is")
        return peer

    def name_of(self, routing_id: bytes, user_id: str | None) -> str:
        """Return the name of this session's peer.

        user_id: owner of its key, None without CURVE.  Raises ProtocolError if the session claims another name or was
        fenced.
        """
        known = self._by_routing_id.get(routing_id)
        session = known.session if known is not None else Session.parse(routing_id)
        if user_id is not None and user_id != session.name:
            raise ProtocolError(user_id, "routing id", f"claims to be {session.name}")
        if known is None and (routing_id in self._over or self._is_fenced(session)):
            raise ProtocolError(session.name, "session", "a newer one has replaced it")
        return session.name

    def accept(self, routing_id: bytes, sequence: int) -> None:
        """Record a decoded message.  A session not seen before replaces the peer's older one.

        Raises ProtocolError for a duplicate.
        """
        peer = self._by_routing_id.get(routing_id)
        if peer is None:
            peer = self._begin(Session.parse(routing_id), routing_id)
        peer.received.accept(sequence, peer.session.name)

    def _is_fenced(self, session: Session) -> bool:
        is_outlived = is_earlier(session.incarnation, self._latest.get(session.name, ""))
        return is_outlived or (session.name, session.incarnation) in self._fenced

    def _begin(self, session: Session, routing_id: bytes) -> Peer:
        older = self._by_name.get(session.name)
        if older is not None:
            self._lost_before += older.received.lost
            self._over.add(older.routing_id)
            del self._by_routing_id[older.routing_id]
            if older.session.incarnation != session.incarnation:
                self._fenced.add((session.name, older.session.incarnation))
        if order_of(session.incarnation) is not None:
            self._latest[session.name] = session.incarnation
        peer = Peer(session, routing_id)
        self._by_name[session.name] = self._by_routing_id[routing_id] = peer
        return peer


@dataclass(slots=True)
class Counters:
    """Counters of a channel end while it is open."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_rejected: int = 0

    def sent(self, nbytes: int) -> None:
        """Count a sent message."""
        self.messages_sent += 1
        self.bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        """Count an accepted message."""
        self.messages_received += 1
        self.bytes_received += nbytes

    def snapshot(self, *, received: int, lost: int = 0, denied: int = 0) -> ChannelStatistics:
        """Freeze them, adding the queue depth and counts from elsewhere."""
        return ChannelStatistics(
            self.messages_sent,
            self.messages_received,
            self.bytes_sent,
            self.bytes_received,
            self.messages_rejected,
            lost,
            denied,
            receive_queue_depth=received,
        )
