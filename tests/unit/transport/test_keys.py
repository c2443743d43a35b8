from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rlhpc.protocol.errors import RunDirectoryError
from rlhpc.transport.security import allowed_keys, load_secret, mint_run_keys, public_key
from rlhpc.transport.sockets import REREAD_AFTER_S, AllowList

NAMES = ["controller-0", "generator-0", "generator-1"]


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_nobody_else_can_read_a_secret_under_any_umask(tmp_path: Path):
    secrets = tmp_path / "secrets"
    mint_run_keys(secrets, NAMES)
    assert mode(secrets) == mode(secrets / "public") == 0o700
    assert {mode(file) for file in secrets.glob("*.secret")} == {0o600}
    assert len(list(secrets.glob("*.secret"))) == 3
    assert not list(secrets.glob(".*"))  # no temporary file is left
    assert load_secret(secrets, "generator-1")


def test_public_and_secret_keys_belong_together(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    for name in NAMES:
        public = public_key(tmp_path / "secrets", name)
        assert zmq.curve_public(load_secret(tmp_path / "secrets", name)) == public
        assert allowed_keys(tmp_path / "secrets")[public] == name
    assert len(allowed_keys(tmp_path / "secrets")) == 3


def test_names_can_be_added_and_keys_that_exist_stay(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    before = allowed_keys(tmp_path / "secrets")
    mint_run_keys(tmp_path / "secrets", [*NAMES, "generator-7"])
    after = allowed_keys(tmp_path / "secrets")
    assert before.items() < after.items()
    assert set(after.values()) == {*NAMES, "generator-7"}


def test_a_public_key_that_was_not_written_any_more_is_written_again(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    before = public_key(tmp_path / "secrets", "generator-0")
    (tmp_path / "secrets" / "public" / "generator-0.pub").unlink()  # killed between the two files
    mint_run_keys(tmp_path / "secrets", NAMES)
    assert public_key(tmp_path / "secrets", "generator-0") == before


@pytest.mark.parametrize(("which", "loosened"), [("file", 0o640), ("file", 0o604), ("directory", 0o750)])
def test_loosened_permissions_are_refused_by_name_and_mode(tmp_path: Path, which: str, loosened: int):
    secrets = tmp_path / "secrets"
    mint_run_keys(secrets, NAMES)
    path = secrets / "generator-0.secret" if which == "file" else secrets
    path.chmod(loosened)
    with pytest.raises(RunDirectoryError, match=f"{path} has mode {loosened:04o}"):
        load_secret(secrets, "generator-0")


def test_keys_are_not_admitted_from_a_directory_that_others_can_write(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    (tmp_path / "secrets" / "public").chmod(0o777)
    with pytest.raises(RunDirectoryError, match="mode 0777"):
        allowed_keys(tmp_path / "secrets")


def test_a_missing_and_a_cut_key_are_named(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    with pytest.raises(RunDirectoryError, match=r"generator-9\.secret: No such file"):
        load_secret(tmp_path / "secrets", "generator-9")
    (tmp_path / "secrets" / "public" / "generator-0.pub").write_bytes(b"short")
    with pytest.raises(RunDirectoryError, match="has 5 characters, not 40"):
        public_key(tmp_path / "secrets", "generator-0")
    with pytest.raises(RunDirectoryError, match="No such file"):
        allowed_keys(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../etc/passwd-0", "generator", "", "Generator-0", "generator-0/x", "a-1\n"])
def test_what_is_no_name_becomes_no_file(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="is not the name of a role instance"):
        mint_run_keys(tmp_path / "secrets", [name])


# ------------------------------------------------------------------------------------------------------- allow-list


def test_a_key_that_is_minted_later_is_admitted(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", ["controller-0"])
    now = 0.0
    allowed = AllowList(lambda: allowed_keys(tmp_path / "secrets"), lambda: now)
    mint_run_keys(tmp_path / "secrets", ["generator-3"])
    joiner = public_key(tmp_path / "secrets", "generator-3")
    assert allowed.name_of(joiner) is None  # too early to read again
    now = REREAD_AFTER_S
    assert allowed.name_of(joiner) == "generator-3"


def test_strangers_do_not_make_it_read_the_directory_over_and_over():
    reads = 0

    def read() -> dict[bytes, str]:
        nonlocal reads
        reads += 1
        return {b"known": "generator-0"}

    now = 0.0
    allowed = AllowList(read, lambda: now)
    for tick in range(100):
        now = tick * REREAD_AFTER_S / 10
        assert allowed.name_of(f"stranger {tick}".encode()) is None
        assert allowed.name_of(b"known") == "generator-0"
    assert reads <= 11


def test_loosened_permissions_keep_newcomers_out_and_members_in(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    member = public_key(tmp_path / "secrets", "generator-0")
    now = 0.0
    allowed = AllowList(lambda: allowed_keys(tmp_path / "secrets"), lambda: now)
    (tmp_path / "secrets").chmod(0o755)
    now = 10.0
    assert allowed.name_of(b"x" * 40) is None
    assert allowed.name_of(member) == "generator-0"


def test_a_file_that_is_nobodys_key_keeps_nobody_out(tmp_path: Path):
    secrets = tmp_path / "secrets"
    mint_run_keys(secrets, ["controller-0"])
    (secrets / "public" / "copy of controller-0.pub").write_text("x")
    now = 0.0
    allowed = AllowList(lambda: allowed_keys(secrets), lambda: now)
    mint_run_keys(secrets, ["generator-3"])
    now = REREAD_AFTER_S
    assert allowed.name_of(public_key(secrets, "generator-3")) == "generator-3"


def test_a_filesystem_that_fails_once_keeps_newcomers_out_until_it_answers():
    """An error would end the thread that admits, and with it nobody could ever connect again."""
    answers = iter([{b"known": "generator-0"}, OSError(errno.ESTALE, "Stale file handle"), {b"new": "generator-1"}])

    def read() -> dict[bytes, str]:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    now = 0.0
    allowed = AllowList(read, lambda: now)
    now = REREAD_AFTER_S
    assert allowed.name_of(b"new") is None
    assert allowed.name_of(b"known") == "generator-0"
    now = 2 * REREAD_AFTER_S
    assert allowed.name_of(b"new") == "generator-1"
