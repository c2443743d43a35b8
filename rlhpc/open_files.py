"""How many files and connections a process may have open.  Standard library."""

from __future__ import annotations

import resource

MAX_OPEN_FILES = 1 << 16


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files as far as allowed, to MAX_OPEN_FILES at most.

    Slurm gives jobs that of the submitting shell, which is usually 1,024.  ZeroMQ accepts whoever connects, and closes
    those without a handshake only after a while, so that as many silent connections would keep a controller from
    opening its own files.  A trainer's rank has a connection to each of the others in every group of gloo.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
