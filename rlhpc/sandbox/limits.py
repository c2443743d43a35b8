"""Resource limits of a program, and how it ended.  Python 3.9 and the standard library."""

from __future__ import annotations

import resource
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    cpu_s: float = 4.0  # of processor time, all its threads together
    wall_s: float = 16.0  # on the clock: a program that sleeps, or a node that is busy
    memory_bytes: int = 1024 * MIB  # of address space
    box_bytes: int = 32 * MIB  # of files, which lie in memory
    output_bytes: int = 1 * MIB  # of standard output, and of errors

    def apply(self) -> None:
        """Limit this process and all that it starts."""
        seconds = max(
            1, -(-int(self.cpu_s * 1000) // 1000)
        )  # the kernel counts whole seconds; the rest is checked afterwards
        own = {
            resource.RLIMIT_CPU: (seconds, seconds + 1),
            resource.RLIMIT_AS: (self.memory_bytes, self.memory_bytes),
            resource.RLIMIT_STACK: (min(self.memory_bytes // 4, 256 * MIB),) * 2,
            resource.RLIMIT_FSIZE: (self.box_bytes, self.box_bytes),
            resource.RLIMIT_NOFILE: (64, 64),
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_MEMLOCK: (0, 0),
            resource.RLIMIT_MSGQUEUE: (0, 0),
            resource.RLIMIT_RTPRIO: (0, 0),
            resource.RLIMIT_NICE: (0, 0),
            resource.RLIMIT_SIGPENDING: (64, 64),
        }
        for what, (soft, hard) in own.items():
            highest = resource.getrlimit(what)[1]
            if highest != resource.RLIM_INFINITY:
                soft, hard = min(soft, highest), min(hard, highest)
            resource.setrlimit(what, (soft, hard))


@dataclass(frozen=True)
class Finished:
    """A program that has ended."""

    status: int  # its exit status, negative for a signal
    stopped_for: str  # "": it ended by itself; "time", "output": it was killed for having used more
    stdout: bytes
    stderr: bytes
    cpu_s: float
    wall_s: float
    peak_bytes: int
    results: bytes = b""  # what it wrote to descriptor 4, if that was wanted
