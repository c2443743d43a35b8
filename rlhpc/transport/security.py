"""Mint, store and read one CURVE key pair per role instance of a run.

Input: names like ``generator-1``.  Output: ``secrets/NAME.secret`` (0600) and ``secrets/public/NAME.pub`` below a
directory of 0700.  Guarantees: a secret is never readable by others, not even for a moment and under any umask; a key
that exists is never replaced, so names can be added during a run; permissions that are too open are an error, not a
warning.

Not zmq.auth.create_certificates: it writes the secret with the umask's permissions, usually 0644.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import zmq

from rlhpc.base.files import link_new, set_mode
from rlhpc.protocol.errors import RunDirectoryError
from rlhpc.transport.sessions import checked_name, is_name

_KEY_CHARACTERS = 40  # Z85 of 32 bytes
_SECRET, _PUBLIC = ".secret", ".pub"


def mint_run_keys(secrets: Path, names: Iterable[str]) -> None:
    """Create a key pair for every name that has none.

    Raises RunDirectoryError if existing keys are accessible to others, ValueError for an illegal name.
    """
    secrets.parent.mkdir(parents=True, exist_ok=True)
    for directory in (secrets, secrets / "public"):
        _make_private_directory(directory)
    for name in names:
        secret_file = secrets / f"{checked_name(name)}{_SECRET}"
        public, secret = zmq.curve_keypair()
        if not _create(secret_file, secret):
            public = zmq.curve_public(load_secret(secrets, name))
        _create(_public_file(secrets, name), public)


def load_secret(secrets: Path, name: str) -> bytes:
    """Return the secret key of a role instance, Z85.

    Raises RunDirectoryError if it is missing, damaged, another user's, or open to others.
    """
    file = secrets / f"{checked_name(name)}{_SECRET}"
    _refuse_loose(secrets)
    return _read_key(file, is_secret=True)


def public_key(secrets: Path, name: str) -> bytes:
    """Return the public key of a role instance, Z85.  Raises RunDirectoryError if it is missing or damaged."""
    return _read_key(_public_file(secrets, checked_name(name)), is_secret=False)


def allowed_keys(secrets: Path) -> dict[bytes, str]:
    """Return the name for each public key; files with other names are nobody's.

    Raises RunDirectoryError if others could write to the directory, OSError if it cannot be listed.
    """
    _refuse_loose(secrets)
    _refuse_loose(secrets / "public")
    files = os.listdir(secrets / "public")  # noqa: PTH208 - names are enough
    names = [file.removesuffix(_PUBLIC) for file in files if file.endswith(_PUBLIC)]
    return {public_key(secrets, name): name for name in names if is_name(name)}


def refuse_loose_keys(secrets: Path) -> None:
    """Check the modes of all keys.  Raises RunDirectoryError for the first that others can access."""
    for path in (secrets, secrets / "public", *sorted(secrets.glob(f"*{_SECRET}"))):
        _refuse_loose(path)


def _public_file(secrets: Path, name: str) -> Path:
    return secrets / "public" / f"{name}{_PUBLIC}"


def _make_private_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
        set_mode(directory, 0o700)  # mkdir's mode passes through the umask
    except FileExistsError:
        _refuse_loose(directory)


def _create(file: Path, key: bytes) -> bool:
    """Create the file atomically, or return False if it exists.  Two launchers may do it at once."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        set_mode(descriptor, 0o600)  # a umask of 0777 would remove even our own read permission
        os.write(descriptor, key + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        link_new(temporary, file)  # unlike rename it fails if the name is taken
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _read_key(file: Path, *, is_secret: bool) -> bytes:
    try:
        with file.open("rb") as stream:
            if is_secret:
                _refuse_loose_status(file, os.fstat(stream.fileno()))
            key = stream.read(_KEY_CHARACTERS + 2).removesuffix(b"\n")
    except OSError as error:
        raise RunDirectoryError(
            f"key file {file}: {error.strerror}; every start of a run makes new ones: resume it"
        ) from error
    if len(key) != _KEY_CHARACTERS:
        raise RunDirectoryError(f"key file {file} has {len(key)} characters, not {_KEY_CHARACTERS}")
    return key


def _refuse_loose(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise RunDirectoryError(
            f"secrets {path}: {error.strerror}; every start of a run makes them: resume it"
        ) from error
    _refuse_loose_status(path, status)


def _refuse_loose_status(path: Path, status: os.stat_result) -> None:
    """Covers access control lists too: their mask shows in the group bits."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        wanted = 0o700 if stat.S_ISDIR(status.st_mode) else 0o600
        raise RunDirectoryError(
            f"{path} has mode {mode:04o}, others can reach it; legal: {wanted:04o}: `chmod {wanted:o} {path}`, or "
            "resume the run: every start makes new keys"
        )
    if status.st_uid != os.geteuid():
        raise RunDirectoryError(f"{path} belongs to user {status.st_uid}, not to us ({os.geteuid()})")
