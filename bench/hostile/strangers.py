"""Hostile connections to a server: of strangers, and of a member that breaks the rules of sockets."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from bench.hostile.specimens import server_codec
from bench.hostile.victim_link import Victim
from rlhpc.protocol import messages as m
from rlhpc.protocol.messages import TOPOLOGY
from rlhpc.transport.codec import MAX_FRAME_BYTES
from rlhpc.transport.security import load_secret, public_key
from rlhpc.transport.sessions import Session

WAVE = 50  # connections that are made at once
CONNECT_S = 30.0
HANDSHAKES_S = 0.1  # for ZeroMQ's own; what comes later does not matter
HANDSHAKE_S = 10.0  # sockets.HANDSHAKE_MS
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
HELLO_BYTES = 200  # of CURVE's first command, RFC 26
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


def greeting(mechanism: bytes = b"CURVE", *, minor: int = 1, is_server: bool = False) -> bytes:
    """The 64 bytes that a connection of ZMTP 3 begins with (RFC 37)."""
    return SIGNATURE + bytes((3, minor)) + mechanism.ljust(20, b"\0") + bytes((is_server,)) + bytes(31)


@dataclass(slots=True)
class Visits:
    """Connections that were made."""

    made: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    most_at_once: int = 0


class Stranger:
    """Makes connections of every kind, in an order that a seed decides."""

    def __init__(self, victim: Victim, seed: int) -> None:
        self._victim, self._chance = victim, random.Random(seed)
        hosts = (address.removeprefix("tcp://").split(":") for address in victim.addresses.values())
        self._targets = itertools.cycle([(host, int(port)) for host, port in hosts])
        self._channels = itertools.cycle(TOPOLOGY)
        self._cut = itertools.cycle(range(64))
        self.raw: dict[str, Callable[[], bytes]] = {
            "nothing is said": lambda: b"",
            "noise": lambda: self._chance.randbytes(self._chance.randint(1, 400)),
            "another protocol": lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "greeting cut at each byte": lambda: greeting()[: next(self._cut)],
            "old ZMTP, then a message": self._old_protocol,
            "no security, then a message": lambda: greeting(b"NULL") + _command(b"\x05READY") + self._message(),
            "PLAIN": lambda: greeting(b"PLAIN") + _command(b"\x05HELLO" + b"\x01a\x01b") + self._message(),
            "CURVE, as a server": lambda: greeting(is_server=True) + _command(self._chance.randbytes(HELLO_BYTES)),
            "CURVE, false HELLO": self._false_hello,
            "CURVE, a message instead": lambda: greeting() + self._message(),
            "a frame of 2^63 bytes": lambda: greeting() + b"\x02" + struct.pack(">Q", 1 << 63),
            "a command of 4 MiB": lambda: greeting() + b"\x06" + struct.pack(">Q", MAX_FRAME_BYTES) + bytes(1 << 16),
        }

    def visit(self, visits: Visits, num: int) -> None:
        """Make so many connections from plain sockets, a wave at a time; a third end by RST, the rest in order."""
        kinds = list(self.raw)
        for begin in range(0, num, WAVE):
            wave = []
            for number in range(begin, min(num, begin + WAVE)):
                kind = kinds[number % len(kinds)]
                visits.made[kind] += 1
                connection = socket.create_connection(next(self._targets), timeout=CONNECT_S)
                wave.append(connection)
                with suppress(OSError):  # it may have been refused already
                    connection.sendall(self.raw[kind]())
            for number, connection in enumerate(wave):
                if number % 3 == 0:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.close()

    def linger(self, visits: Visits, num: int) -> None:
        """Hold so many connections at once, silent or in the middle of a greeting, until the server has closed all."""
        held: list[socket.socket] = []
        num_before = self._victim.report()["num_fds"]
        for number in range(num):
            visits.made["held open, in silence"] += 1
            connection = socket.create_connection(next(self._targets), timeout=CONNECT_S)
            with suppress(OSError):
                connection.sendall(greeting()[: number % 65])
            held.append(connection)
        visits.most_at_once = max(visits.most_at_once, self._victim.report()["num_fds"] - num_before)
        deadline = time.monotonic() + 6 * HANDSHAKE_S
        left = self._victim.report()["num_fds"]
        while left > num_before + 8 and time.monotonic() < deadline:
            time.sleep(0.5)
            left = self._victim.report()["num_fds"]
        if left > num_before + 8:  # the friend's and the traitor's connections may have come and gone
            visits.violations.append(f"{left - num_before} of {num} silent connections are still open")
        for connection in held:
            connection.close()

    def knock(self, visits: Visits, num: int) -> None:
        """Come with ZeroMQ's own sockets: without CURVE, with unknown keys, with the key of another server."""
        ways: list[tuple[str, Callable[[zmq.Socket[bytes], str], None]]] = [
            ("ZeroMQ without CURVE", lambda dealer, server: None),
            ("ZeroMQ with PLAIN", _plain),
            ("unknown client key", lambda dealer, server: self._curve(dealer, zmq.curve_keypair(), server)),
            ("another server's key", lambda dealer, server: self._curve(dealer, zmq.curve_keypair(), "generator-0")),
        ]
        for begin in range(0, num, WAVE):
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            for number in range(begin, min(num, begin + WAVE)):
                kind, secure = ways[number % len(ways)]
                channel = next(self._channels)
                visits.made[kind] += 1
                dealer = _dealer(context, Session.open("generator-1", "stranger").routing_id)
                secure(dealer, f"{TOPOLOGY[channel].server}-0")
                dealer.connect(self._victim.addresses[channel])
                with suppress(zmq.Again):  # the server has refused this protocol already
                    dealer.send_multipart([self._payload(channel)], zmq.NOBLOCK)
            time.sleep(HANDSHAKES_S)
            context.destroy(linger=0)

    def break_rules(self, visits: Visits, num: int) -> None:
        """As a member: frames that are too long, another member's name, no session's name."""
        secret = load_secret(self._victim.secrets, "generator-1")
        ways = (
            ("member: a frame too long", Session.open("generator-1", "x"), bytes(MAX_FRAME_BYTES + (1 << 16))),
            ("member: another's name", Session.open("generator-0", "honest"), self._payload("control")),
            ("member: no session", None, self._payload("control")),
        )
        for number in range(num):
            kind, session, payload = ways[number % len(ways)]
            visits.made[kind] += 1
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            dealer = _dealer(context, session.routing_id if session is not None else b"generator-0")
            self._curve(dealer, (zmq.curve_public(secret), secret), "controller-0")
            dealer.connect(self._victim.addresses["control"])
            dealer.send(payload)
            time.sleep(HANDSHAKES_S)
            context.destroy(linger=0)

    def _curve(self, dealer: zmq.Socket[bytes], pair: tuple[bytes, bytes], server: str) -> None:
        dealer.curve_publickey, dealer.curve_secretkey = pair
        dealer.curve_serverkey = public_key(self._victim.secrets, server)

    def _payload(self, channel: str) -> bytes:
        """A whole message that clients of the channel may send."""
        return next(iter(_valid_messages(channel)))

    def _message(self) -> bytes:
        payload = self._payload(next(self._channels))
        return b"\x02" + struct.pack(">Q", len(payload)) + payload

    def _old_protocol(self) -> bytes:
        """ZMTP 1 and 2 knew no security."""
        payload = self._payload("control")
        if self._chance.random() < 0.5:
            return bytes((8,)) + b"\0" + b"stolen!" + bytes((len(payload) + 1,))[:1] + b"\0" + payload
        return SIGNATURE + b"\x01\x05" + b"\0\x05guess" + b"\0" + bytes((len(payload) % 256,)) + payload

    def _false_hello(self) -> bytes:
        """A first command of the right length; sometimes a second one as well."""
        body = b"\x05HELLO\x01\0" + bytes(72) + self._chance.randbytes(HELLO_BYTES - 80)
        second = _command(b"\x08INITIATE" + self._chance.randbytes(300)) if self._chance.random() < 0.5 else b""
        return greeting() + _command(body) + second


def _dealer(context: zmq.Context[zmq.Socket[bytes]], routing_id: bytes) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0  # also when it is collected as garbage
    dealer.routing_id = routing_id
    return dealer


def _plain(dealer: zmq.Socket[bytes], server: str) -> None:
    dealer.plain_username, dealer.plain_password = b"generator-1", b"guess"


def _command(body: bytes) -> bytes:
    return b"\x04" + bytes((len(body),)) + body if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body)) + body


def _valid_messages(channel: str) -> Iterable[bytes]:
    messages: dict[str, Any] = {
        "control": m.Heartbeat("running", "", 1),
        "leases": m.LeaseReturn(1, (0,), (None,), "", 1),
        "batches": m.SnapshotTaken(1, 0.5),
        "rewards": m.RewardRequest(1, "math", "42", "42"),
    }
    yield bytes(server_codec(TOPOLOGY[channel]).encode(messages[channel], 0)[0])
