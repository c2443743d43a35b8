"""Landlock: which files a process may use, decided by itself and for good (landlock(7)).

Input: paths that may be read, paths that may be written.  Everything else is refused, whoever owns it, and so are TCP
and, where the kernel knows them, signals to processes outside and their abstract sockets.
Python 3.9 and the standard library.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import Sequence

from rlhpc.sandbox import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 16, 32, 128, 256
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_VERSION_1 = (1 << 13) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE | _REFER
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP, _SIGNALS_AND_ABSTRACT_SOCKETS = 3, 3


def make_rules(readable: Sequence[str], writable: Sequence[str]) -> int:
    """Return the descriptor of a ruleset, for `kernel.restrict_self`.  Raises OSError.

    Paths that are not there are passed over.  A rule holds for what is mounted
    below its path later, and not for what is mounted on it.
    """
    version = kernel.landlock_version()
    handled = _ALL_OF_VERSION_1
    handled |= (
        (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_IOCTL_DEV if version >= 5 else 0)
    )
    network, scopes = (_TCP if version >= 4 else 0), (_SIGNALS_AND_ABSTRACT_SOCKETS if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = kernel.create_ruleset(struct.pack("=QQQ", handled, network, scopes)[:size])
    try:
        for path in readable:
            _allow(ruleset, path, _READ & handled)
        for path in writable:
            _allow(ruleset, path, _OWN & handled)
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            access &= _OF_A_FILE
        kernel.add_path_rule(ruleset, struct.pack("=Qi", access, opened))
    finally:
        os.close(opened)
