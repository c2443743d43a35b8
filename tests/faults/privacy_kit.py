"""A whole run that is watched: what its processes unpickle, and what another user of the machine gets at."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from rlhpc.protocol import messages as m
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.codec import Codec
from rlhpc.transport.sessions import Greeting, Session

NOBODY = 65534
HANDSHAKE_S = 1.5
HELLO = m.Hello("generator", 0, "inc", "hash", 1, "host")
CODEC = Codec((*CONTROL.to_server, Greeting))  # nobody cannot compile one where code is not readable
LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
"host".encode("idna")  # loads what another user may not be able to read

# Begun with every process of a run: notes each class that is unpickled, with who asked for it.
WATCH = """
import os, sys, threading

_directory, _noting = os.environ.get("RLHPC_TEST_WATCH"), threading.local()


def _note(event, arguments):
    if event != "pickle.find_class" or getattr(_noting, "is_on", False):
        return
    _noting.is_on = True
    try:
        frame, stack = sys._getframe(1), []
        while frame is not None:
            stack.append(frame.f_code.co_filename + ":" + frame.f_code.co_name)
            frame = frame.f_back
        line = "\\t".join([".".join(map(str, arguments[:2])), " ".join(sys.argv[:4]), *stack])
        with open(os.path.join(_directory, str(os.getpid())), "a") as file:
            file.write(line + "\\n")
    finally:
        _noting.is_on = False


if _directory:
    with open(os.path.join(_directory, str(os.getpid())), "a") as file:
        file.write("watched\\n")
    sys.addaudithook(_note)
"""


def as_nobody(probe: Callable[[], str]) -> str:
    """Run a probe in a child that is another user; returns what it got, "" if nothing.  Needs root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        got = "the probe itself failed"
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            try:
                got = probe()
            except OSError:  # refused: what a probe is to find
                got = ""
            except BaseException:  # noqa: BLE001  the parent is to see it, and this child must end here
                got = traceback.format_exc()
        finally:
            with contextlib.suppress(OSError):
                os.write(writer, got.encode()[:4000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        got = stream.read()
    os.waitpid(child, 0)
    return got


# ----------------------------------------------------------------------------------- probes: what they get, "": nothing


def handshake(address: str, keys: tuple[bytes, bytes, bytes] | None) -> str:
    """Connect and talk.  keys: public, secret, the server's public; None: without."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndtimeo = int(HANDSHAKE_S * 1e3)  # who is refused before it has sent has nowhere to send to, for ever
    dealer.routing_id = Session.open("generator-0", "x").routing_id
    if keys is not None:
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = keys
    events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(address)
    with contextlib.suppress(zmq.Again):
        dealer.send_multipart(CODEC.encode(HELLO, 0))
    got = f"handshake: {recv_monitor_message(events)}" if events.poll(HANDSHAKE_S * 1e3) else ""
    got += "an answer" if dealer.poll(0) else ""
    context.destroy(linger=0)
    return got


def unix_socket(address: str) -> str:
    """address: a path, or an abstract name that begins with a zero byte."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(address)
    return f"connected to {address!r}"


def any_of(probe: Callable[[str], str], targets: Iterable[str]) -> str:
    """What a probe gets of any of them."""
    for target in targets:
        with contextlib.suppress(OSError):
            if got := probe(target):
                return got
    return ""


def content(path: str) -> str:
    """Read a file, or list a directory."""
    if os.path.isdir(path):  # noqa: PTH112  is_dir() raises where this is to say no
        return f"{path} holds {os.listdir(path)}"  # noqa: PTH208
    with open(path, "rb") as file:  # noqa: PTH123
        return f"{path} begins with {file.read(16)!r}"


def new_file(path: str) -> str:
    """Create one."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    return f"{path} was created"


def links(path: str) -> str:
    """Follow the links of a directory of /proc."""
    return any_of(lambda name: f"{name} is {os.readlink(f'{path}/{name}')}", os.listdir(path))  # noqa: PTH115, PTH208


def traced(pid: str) -> str:
    """Attach as a debugger does."""
    if LIBC.ptrace(PTRACE_ATTACH, int(pid), None, None) != 0:
        return ""
    os.waitpid(int(pid), 0)
    LIBC.ptrace(PTRACE_DETACH, int(pid), None, None)
    return f"{pid} was traced"


def signalled(pid: str) -> str:
    """Ask whether it could be."""
    os.kill(int(pid), signal.SIGCONT)
    return f"{pid} was signalled"


def noise(port: str) -> str:
    """Talk nonsense to a port of this machine; what that does to the run, its end shows."""
    host, _, number = port.rpartition(":")
    for tail in (b"", b"\0" * 64, os.urandom(400), b"\xff" * 4096):
        with socket.create_connection((host, int(number)), timeout=1.0) as connection:
            connection.sendall(tail)
    return ""


# ------------------------------------------------------------------------------------------ what the kernel knows of it


def sockets_of(pids: Iterable[int]) -> set[str]:
    """Inodes of the sockets that these processes have open."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    name = str(link.readlink())
                    if name.startswith("socket:["):
                        inodes.add(name[8:-1])
    return inodes


def tcp_ports(inodes: set[str]) -> list[str]:
    """host:port of those that listen, IPv4."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            host, _, port = fields[1].partition(":")
            address = socket.inet_ntoa(bytes.fromhex(host)[::-1])
            found.append(f"{'127.0.0.1' if address == '0.0.0.0' else address}:{int(port, 16)}")
    return found


def unix_addresses(inodes: set[str]) -> list[str]:
    """Paths and abstract names of those that listen."""
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        is_listening = int(fields[3], 16) & 0x10000
        if is_listening and fields[6] in inodes and len(fields) > 7:
            name = fields[7]
            found.append("\0" + name[1:] if name.startswith("@") else name)
    return found


def endpoints(rendezvous: Path) -> dict[str, str]:
    """Address of each channel's servers, by the name of its file."""
    return {path.stem: json.loads(path.read_bytes())["address"] for path in rendezvous.glob("*.json")}
