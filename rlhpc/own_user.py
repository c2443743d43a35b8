"""The user that this process runs as, where neither /etc/passwd nor a directory service has to know the uid.

Input: the uid and HOME.  Output: a name, a home, and both for libraries.  Containers, and nodes whose directory service
does not answer, run processes of uids without an entry.  Python 3.9 and the standard library.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
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
    """Return HOME, or else the home that the system knows; without one, a private directory for temporary files."""
    if home := environment.get("HOME", ""):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return _made_up_home()


def name_nameless_user(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give libraries a name and a home in the environment, if the system knows none for the uid of this process.

    getpass.getuser, which torch's compiler calls, and Path.home raise otherwise, and expanduser leaves "~" as it is.
    """
    if own_name():
        return
    for variable in ("USER", "LOGNAME"):
        environment.setdefault(variable, own_user())
    environment["HOME"] = str(own_home(environment))


def _made_up_home() -> Path:
    """One for each uid; another if somebody else has made that, since Python runs what lies in a home."""
    home = Path(tempfile.gettempdir(), f"rlhpc-home-{os.getuid()}")
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="rlhpc-home-"))
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return home if is_own else Path(tempfile.mkdtemp(prefix="rlhpc-home-"))
