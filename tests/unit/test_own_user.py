"""A uid that the system has no name for, as in containers and where a directory service does not answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.base.processes import name_nameless_user, own_home, own_user
from tests.ring.run_kit import Lab, command_environment, make_lab

UID = 54321
_STRANGER = ["unshare", "--user", f"--map-user={UID}", f"--map-group={UID}"]


def as_stranger(*words: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """A process of such a uid, without HOME, USER and LOGNAME."""
    hidden = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "RLHPC_CACHE")
    environment = {name: value for name, value in command_environment().items() if name not in hidden}
    environment["TMPDIR"] = str(temporary)
    done = subprocess.run([*_STRANGER, *words], env=environment, capture_output=True, text=True, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"nobody can be a stranger here: {done.stderr}")
    return done


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return make_lab(tmp_path)


def test_a_user_with_a_name_has_it_and_the_environment_is_left_alone() -> None:
    environment: dict[str, str] = {}
    name_nameless_user(environment)
    assert environment == {}
    assert own_home({"HOME": "/h"}) == Path("/h")
    assert own_user()


@pytest.mark.starts
def test_libraries_find_a_name_and_a_private_home(tmp_path: Path) -> None:
    looks = (
        "import getpass, os; from pathlib import Path; from rlhpc.base.processes import *; name_nameless_user(); "
        "print(own_user(), getpass.getuser(), Path.home(), os.path.expanduser('~'), oct(Path.home().stat().st_mode))"
    )
    home = tmp_path / f"rlhpc-home-{UID}"
    expected = f"{UID} {UID} {home} {home} 0o40700\n"
    assert as_stranger(sys.executable, "-c", looks, temporary=tmp_path).stdout == expected
    home.chmod(0o777)  # somebody else's, perhaps: Python runs what lies in a home
    other = as_stranger(sys.executable, "-c", looks, temporary=tmp_path).stdout.split()[2]
    assert other != str(home)
    assert Path(other).stat().st_mode & 0o777 == 0o700


@pytest.mark.ring
@pytest.mark.starts
@pytest.mark.timeout(600)
def test_a_run_needs_neither_a_name_of_its_user_nor_a_home(lab: Lab) -> None:
    short = Path("/tmp", f"rlhpc-stranger-{os.getpid()}")  # unix sockets are below it
    short.mkdir()
    try:
        run_file = str(lab.run_file("stranger"))
        for command in ("check", "run"):
            done = as_stranger(sys.executable, "-m", "launch.cli", command, run_file, temporary=short)
            assert done.returncode == 0, done.stdout + done.stderr
        assert lab.layout("stranger").summary.exists()
    finally:
        shutil.rmtree(short)


@pytest.mark.starts
def test_the_doctor_says_what_is_wrong_also_to_a_nameless_user(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n')
    words = ("-m", "launch.cli", "doctor", str(site), "--quick", "--report", str(tmp_path / "report.txt"))
    done = as_stranger(sys.executable, *words, temporary=tmp_path)
    assert "Traceback" not in done.stderr
    assert (tmp_path / "report.txt").exists(), done.stderr
