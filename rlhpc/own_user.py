"""The user that this process runs as, where neither /etc/passwd nor a directory service has to know the uid.

Input: the uid and HOME.  Output: a name, directories.  Containers, and nodes that have lost their directory service,
run processes of uids without an entry.  Python 3.9 and the standard library.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Mapping
from pathlib import Path


def own_user() -> str:
    """Return the name of the user that this process runs as, whatever the environment says; without one, the uid."""
    return own_name() or str(os.getuid())


def own_name() -> str:
    """Return the name that the system knows this process's uid by; "" if it knows none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def own_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return HOME, or else the home that the system knows; without one, a directory of the uid for temporary files."""
    if home := environment.get("HOME", ""):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path(tempfile.gettempdir(), f"rlhpc-home-{os.getuid()}")
