"""Where a process listens, as the kernel has it."""

from __future__ import annotations

import socket
from pathlib import Path

_LISTENING = "0A"  # proc(5), /proc/net/tcp: st


def listening_addresses(pid: int) -> set[str]:
    """IPv4 addresses that sockets of a process listen at; 0.0.0.0 is all of them."""
    return {host for host, _ in listening_endpoints(pid)}


def listening_endpoints(pid: int) -> set[tuple[str, int]]:
    """The same, each with its port: two sockets at one address are two."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:  # closed meanwhile, as the descriptor of this very listing is
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                address, port = fields[1].split(":")
                last_word = address[-8:]  # of an IPv6 address it is the IPv4 address, if it has one
                found.add((socket.inet_ntoa(bytes.fromhex(last_word)[::-1]), int(port, 16)))
    return found
