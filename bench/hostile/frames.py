"""Mutated messages: to the codec, and through the real sockets of a server from a member whose key is admitted."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from bench.hostile.conformity import conforms
from bench.hostile.mutants import Breeder, Frames, Mutant
from bench.hostile.specimens import all_codec, make_specimens, server_codec
from bench.hostile.victim_link import STALLED_S, Victim
from rlhpc.base.native import crc32
from rlhpc.protocol.errors import ProtocolError
from rlhpc.protocol.messages import TOPOLOGY, ChannelSpec
from rlhpc.transport.codec import MAX_FRAME_BYTES, Codec
from rlhpc.transport.security import load_secret, public_key
from rlhpc.transport.sessions import Greeting, SequenceCheck, Session

SESSION_MUTANTS = 2_000  # then another session: a forged sequence number may have ended this one
LAST_SEQUENCE = (1 << 64) - 1
HONEST_EVERY = 50
SEND_MS = 60_000


@dataclass(slots=True)
class Tally:
    """What became of mutants."""

    sent: Counter[str] = field(default_factory=Counter)  # kind → mutants
    accepted: Counter[str] = field(default_factory=Counter)  # "altered kind" or "forged kind" → those that decoded
    num_sent: int = 0  # through sockets, too
    num_altered: int = 0
    num_altered_delivered: int = 0
    num_forged: int = 0
    num_forged_valid: int = 0  # what their sender could have said honestly
    violations: list[str] = field(default_factory=list)


def attack(victim: Victim, tally: Tally, num_mutants: int, seed: int) -> None:
    """Send so many mutants, in sessions of SESSION_MUTANTS, to one channel after the other."""
    codec = all_codec()
    breeder = Breeder(*make_specimens(codec), seed)
    channels = itertools.cycle(TOPOLOGY.values())
    for begin in range(0, num_mutants, SESSION_MUTANTS):
        with Traitor(victim, next(channels)) as traitor:
            for number in range(min(SESSION_MUTANTS, num_mutants - begin)):
                mutant = breeder.next(traitor.next_sequence)
                judge(codec, mutant, tally)
                traitor.send(mutant)
                if number % HONEST_EVERY == 0:
                    traitor.send_honestly(breeder.honest(traitor.next_sequence))
            tally.violations += traitor.accounts()
            tally.num_sent += traitor.num_mutants


def judge(codec: Codec, mutant: Mutant, tally: Tally) -> None:
    """Decode one mutant: an altered one must be refused, a forged one refused or exactly what its type says."""
    tally.sent[mutant.kind] += 1
    tally.num_altered += not mutant.is_forged
    tally.num_forged += mutant.is_forged
    try:
        sequence, message = codec.decode(mutant.frames, "hostile")
    except ProtocolError:
        return
    except BaseException as error:  # noqa: BLE001 - that there is none is what is shown
        tally.violations.append(f"{mutant.kind}: {error!r} escaped the codec")
        return
    if not mutant.is_forged:
        tally.num_altered_delivered += 1
        tally.violations.append(f"{mutant.kind}: accepted, though altered: {str(message)[:200]}")
        return
    tally.num_forged_valid += 1
    tally.accepted[mutant.kind] += 1
    if why := _is_no_honest_message(codec, sequence, message):
        tally.violations.append(f"{mutant.kind}: {why}: {str(message)[:200]}")


def _is_no_honest_message(codec: Codec, sequence: int, message: Any) -> str:
    """Why no honest encoder could have sent this; "" if it could: it does so here, and the same message arrives."""
    if not conforms(message, type(message)):
        return "not what its type says"
    frames = codec.encode(message, sequence)
    again = codec.encode(codec.decode(frames, "")[1], sequence)
    return "" if b"".join(again) == b"".join(frames) else "another message after encoding and decoding"


class Traitor:
    """A member of the run that sends mutants.  Knows what the server must make of them."""

    def __init__(self, victim: Victim, spec: ChannelSpec) -> None:
        self._victim, self._spec, self._codec = victim, spec, server_codec(spec)
        self._name = "trainer-0" if "trainer" in spec.clients and "generator" not in spec.clients else "generator-1"
        before = victim.report()
        self._before = before["statistics"][spec.name]
        self._expected = SequenceCheck()
        self._num_delivered, self._checksum = before["tallies"].get(self._key, [0, 0])
        self._num_delivered_before = self._num_delivered
        self.num_mutants = self._num_rejected = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _dealer(self._context, victim.secrets, self._name, f"{spec.server}-0")
        self._socket.routing_id = Session.open(self._name, "traitor").routing_id
        self._socket.connect(victim.addresses[spec.name])
        self._send(self._codec.encode(Greeting(), 0), is_altered=False)

    def __enter__(self) -> Traitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    @property
    def _key(self) -> str:
        return f"{self._spec.name}/{self._name}"

    @property
    def next_sequence(self) -> int:
        """The number that the server expects of the next message."""
        return min(self._expected.expected, LAST_SEQUENCE)

    def send(self, mutant: Mutant) -> None:
        """Send a mutant, unless a frame of it is so long that it ends the connection (see strangers.py)."""
        if max(map(len, mutant.frames)) <= MAX_FRAME_BYTES:
            self._send(mutant.frames, is_altered=not mutant.is_forged)
            self.num_mutants += 1

    def send_honestly(self, frames: Frames) -> None:
        """Send a message between mutants, which must arrive if it is one that clients may send."""
        self._send(frames, is_altered=False)

    def accounts(self, patience_s: float = STALLED_S) -> list[str]:
        """Wait until the server has judged all; returns what it delivered or refused and should not have."""
        wanted = (self._num_delivered - self._num_delivered_before, self._num_rejected)
        report = self._victim.wait(lambda report: sum(self._counted(report)) >= sum(wanted), patience_s)
        found, trouble = self._counted(report), list(report["escaped"])
        if found != wanted:
            reasons = Counter(report["statistics"][self._spec.name]["reasons"])
            reasons.subtract(self._before["reasons"])
            trouble.append(f"{self._key}: delivered and refused {found}, expected {wanted}; refused: {dict(reasons)}")
        self._victim.wait(lambda report: report["tallies"].get(self._key, [0, 0])[0] >= self._num_delivered, patience_s)
        tally = self._victim.report()["tallies"].get(self._key, [0, 0])
        if tally != [self._num_delivered, self._checksum]:
            trouble.append(f"{self._key}: {tally} arrived, {[self._num_delivered, self._checksum]} should have")
        return trouble

    def _counted(self, report: dict[str, Any]) -> tuple[int, int]:
        now = report["statistics"][self._spec.name]
        mine = report["tallies"].get(self._key, [0, 0])[0] - self._num_delivered_before
        return mine, now["rejected"] - self._before["rejected"]

    def _send(self, frames: Frames | list[Any], *, is_altered: bool) -> None:
        self.expect(frames, is_altered=is_altered)
        self._socket.send_multipart(frames)

    def expect(self, frames: Frames | list[Any], *, is_altered: bool) -> None:
        """Take down what must become of a message: an altered one is refused, whatever the codec here thinks of it."""
        message = None if is_altered else self._heard(frames)
        if message is None:
            self._num_rejected += 1
        elif not isinstance(message, Greeting):
            self._num_delivered += 1
            for frame in self._codec.encode(message, 0):
                self._checksum = crc32(frame, self._checksum)

    def _heard(self, frames: Frames | list[Any]) -> Any:
        """The message that the server hears, or None."""
        try:
            sequence, message = self._codec.decode(frames, "")
            self._expected.accept(sequence, "")
        except ProtocolError:
            return None
        return message


def _dealer(context: zmq.Context[zmq.Socket[bytes]], secrets: Path, name: str, server: str) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.sndtimeo = SEND_MS
    secret = load_secret(secrets, name)
    dealer.curve_secretkey, dealer.curve_publickey = secret, zmq.curve_public(secret)
    dealer.curve_serverkey = public_key(secrets, server)
    return dealer
