"""What hostile programs achieve, seen from outside: battery.py runs them all in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import hostile
import hostile_cpp
import pytest

from rlhpc.sandbox import kernel
from rlhpc.sandbox.cpp import COMPILERS

pytestmark = [pytest.mark.starts, pytest.mark.timeout(600)]
BATTERY = Path(__file__).parent / "battery.py"
# A child of it that runs the same interpreter once more, which may lie in a home directory.
RUNS_ITSELF = "import enum, subprocess, sys; enum.StrEnum; subprocess.run([sys.executable, '-c', ''], check=True)"
SEEN_WITHOUT = [
    *("udp", "tcp", "abstract_socket", "unix_socket", "read_file", "change_file", "change_mode", "change_times"),
    *("write_file", "hard_link", "own_environment", "user_namespace", "fork", "stop_victim"),
]


def _run(words: list[str], *, as_nobody: bool = False) -> dict[str, str]:
    python = sys.executable
    prefix: list[str] = []
    if as_nobody:
        prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("another user needs root and setpriv")
        candidates = [python, "/usr/bin/python3"]
        ready = [path for path in candidates if _can_run([*prefix, path, "-c", RUNS_ITSELF])]
        if not ready:
            pytest.skip("no interpreter that another user may execute")
        python = ready[0]
    done = subprocess.run([*prefix, python, str(BATTERY), *words], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return {**report["found"], "strength": report["strength"]}


def _can_run(words: list[str]) -> bool:
    try:
        return subprocess.run(words, capture_output=True, cwd="/").returncode == 0
    except OSError:
        return False


@cache
def _strong(as_nobody: bool) -> dict[str, str]:
    return _run(["strong"], as_nobody=as_nobody)


@cache
def _cpp() -> dict[str, str]:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"no compiler of C++ ({', '.join(COMPILERS)})")
    return _run(["cpp"])


@cache
def _basic() -> dict[str, str]:
    if not kernel.landlock_version():
        pytest.skip("this kernel has no Landlock")
    return _run(["basic"])


@pytest.mark.parametrize("name", [*hostile.PROGRAMS, "afterwards"])
def test_no_program_gets_out_or_harms_the_node(name: str) -> None:
    assert _strong(as_nobody=False)[name] == ""


@pytest.mark.parametrize("name", [*hostile_cpp.PROGRAMS, *hostile_cpp.TEXTS, "afterwards"])
def test_no_program_in_cpp_gets_out_and_no_text_makes_the_compiler_tell_or_harm(name: str) -> None:
    assert _cpp()[name] == ""


@pytest.mark.long
@pytest.mark.parametrize("name", [*hostile.PROGRAMS, "afterwards"])
def test_nor_does_one_of_a_plain_user(name: str) -> None:
    assert _strong(as_nobody=True)[name] == ""


@pytest.mark.long
@pytest.mark.parametrize("name", [*hostile.PROGRAMS, "afterwards"])
def test_nor_where_namespaces_are_forbidden_and_basic_is_enough(name: str) -> None:
    assert _basic()["strength"] == "basic"
    assert _basic()[name] == ""


def test_nor_where_the_service_is_root_of_a_container_and_owns_the_devices() -> None:
    found = _run(["container", *SEEN_WITHOUT, "mode_of_a_device", "times_of_a_device", "closed_outputs"])
    assert found.pop("strength") == "strong"
    assert {name: said for name, said in found.items() if said} == {}


def test_where_namespaces_are_forbidden_landlock_keeps_from_files_and_from_others() -> None:
    if not kernel.landlock_version():
        pytest.skip("this kernel has no Landlock")
    found = _run(["basic", *SEEN_WITHOUT])
    assert found.pop("strength") == "basic"
    assert {name: said for name, said in found.items() if said} == {}


def test_a_node_without_namespaces_is_refused_with_the_remedy() -> None:
    found = _run(["refused"])
    assert found["strength"] == "refused"
    assert "sandbox.require='strong'" in found["refused"]
    assert "user.max_user_namespaces" in found["refused"]


def test_the_battery_sees_what_programs_achieve_without_a_sandbox() -> None:
    found = _run(["control", *SEEN_WITHOUT])
    assert [name for name in SEEN_WITHOUT if not found[name]] == []
