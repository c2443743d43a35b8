"""Programs in the sandbox: how they run and end, and what hostile ones achieve, seen from outside."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import hostile
import pytest

from rlhpc.protocol.errors import SandboxError
from rlhpc.sandbox import kernel
from rlhpc.sandbox.client import Layers, ProgramLimits, Sandbox, SandboxSettings
from rlhpc.sandbox.cpp import COMPILERS
from tests.patience import PATIENCE_S

LIMITS = ProgramLimits(cpu_s=30.0, wall_s=PATIENCE_S)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as started:
        yield started


@pytest.mark.starts
def test_a_program_reads_its_input_and_prints(sandbox):
    run = sandbox.run(b"import sys\nprint(sum(map(int, sys.stdin)))", b"1\n2\n", LIMITS)
    assert (run.status, run.stdout, run.stderr, run.stopped_for) == (0, b"3\n", b"", "")


@pytest.mark.starts
@pytest.mark.parametrize(
    ("program", "status", "stderr"),
    [
        ("import sys; sys.exit(3)", 3, b""),
        ("import sys; sys.exit('why')", 1, b"why\n"),
        ("raise SystemExit", 0, b""),
        ("1 +", 1, b"SyntaxError"),
        ("def f(): 1 / 0\nf()", 1, b"in f\nZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", -6, b""),
    ],
)
def test_it_ends_as_python_would_end_it(sandbox, program, status, stderr):
    run = sandbox.run(program.encode(), b"", LIMITS)
    assert run.status == status
    assert stderr in run.stderr


@pytest.mark.starts
def test_threads_are_waited_for_and_what_is_registered_is_called(sandbox):
    program = (
        b"import atexit, threading, time\natexit.register(print, 'last')\nprinted = threading.Event()\n"
        b"threading.Thread(target=lambda: (printed.wait(), time.sleep(0.1), print('thread'))).start()\n"
        b"print('main')\nprinted.set()"
    )
    assert sandbox.run(program, b"", LIMITS).stdout == b"main\nthread\nlast\n"


@pytest.mark.starts
def test_random_numbers_differ_from_run_to_run(sandbox):
    program = b"import random; print(random.random())"
    assert len({sandbox.run(program, b"", LIMITS).stdout for _ in range(5)}) == 5


@pytest.mark.starts
def test_a_program_finds_nothing_of_the_one_before(sandbox):
    program = (
        b"import os, math; print(os.listdir('.'), hasattr(math, 'mine')); math.mine = 1; open('left', 'w').write('x')"
    )
    assert {sandbox.run(program, b"", LIMITS).stdout for _ in range(3)} == {b"[] False\n"}


@pytest.mark.starts
def test_some_hundred_runs_leave_no_descriptor_and_no_process(sandbox):
    sandbox.run(b"", b"", LIMITS)

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path(f"/proc/{sandbox.server_pid}/fd").iterdir()))

    gc.collect()  # or what other tests have left open might be closed meanwhile
    before, server = held(), sandbox.server_pid
    for number in range(200):
        assert sandbox.run(b"print(int(input()) + 1)", b"%d" % number, LIMITS).stdout == b"%d\n" % (number + 1)
    assert held() == before
    assert sandbox.server_pid == server
    assert len(Path(f"/proc/{server}/task/{server}/children").read_text().split()) <= 1  # the last, on its way out


@pytest.mark.starts
def test_where_memory_is_used_up_the_kernel_ends_a_program_before_anything_of_the_run(sandbox):
    with ThreadPoolExecutor(1) as one:
        run = one.submit(sandbox.run, b"import sys; sys.stdin.read(); import time; time.sleep(0.5)", b"", LIMITS)
        children = Path(f"/proc/{sandbox.server_pid}/task/{sandbox.server_pid}/children")
        while not (pids := children.read_text().split()):
            assert not run.done()
        assert [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (sandbox.server_pid, *pids)] == ["1000\n"] * 2
        assert run.result().status == 0


@pytest.mark.starts
def test_a_server_that_was_killed_is_said_and_replaced():
    with Sandbox() as sandbox:
        os.kill(sandbox.server_pid, 9)
        with pytest.raises(SandboxError, match="the server is gone"):
            sandbox.run(b"print(1)", b"", LIMITS)
        assert sandbox.run(b"print(1)", b"", LIMITS).stdout == b"1\n"


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.starts
def test_an_init_process_that_was_killed_is_said_and_ends_its_program():
    with Sandbox() as sandbox, ThreadPoolExecutor(1) as thread:
        sandbox.run(b"", b"", LIMITS)
        run = thread.submit(sandbox.run, b"import time\ntime.sleep(600)", b"", LIMITS)
        init, programs, deadline = 0, list[int](), time.monotonic() + PATIENCE_S
        while not programs and time.monotonic() < deadline:
            time.sleep(0.01)
            with contextlib.suppress(OSError, IndexError):  # that of the run before is on its way out
                init = children_of(sandbox.server_pid)[0]
                programs = children_of(init)
        os.kill(init, 9)
        with pytest.raises(SandboxError, match="the server is gone"):
            run.result(PATIENCE_S)
        assert not any(Path(f"/proc/{pid}").exists() for pid in (init, *programs))
        assert sandbox.run(b"print(1)", b"", LIMITS).stdout == b"1\n"


@pytest.mark.starts
@pytest.mark.parametrize("relative", ["", "./"])
def test_an_interpreter_without_a_directory_shows_programs_no_more_than_another(relative, tmp_path, monkeypatch):
    """Without PATH it does not know where it lies and takes "/" for its prefix: all files would be readable."""
    (tmp_path / "secret").write_text("hidden")
    python = Path(sys.executable)
    monkeypatch.setenv("PATH", str(python.parent))
    monkeypatch.chdir(python.parent)
    program = f"import sys; print(sys.prefix); print(open({str(tmp_path / 'secret')!r}).read())"
    with Sandbox(SandboxSettings("none", f"{relative}{python.name}")) as sandbox:
        run = sandbox.run(program.encode(), b"", LIMITS)
    assert sandbox.layers.strength != "none"
    assert Path(run.stdout.decode().strip()).resolve() == Path(sys.prefix).resolve()
    assert b"Error" in run.stderr


@pytest.mark.starts
def test_an_interpreter_that_is_not_there_is_a_sandbox_error_and_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SandboxError, match="/no/python"):
        Sandbox(SandboxSettings("none", "/no/python")).start()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.starts
def test_an_interpreter_that_does_not_start_is_named(tmp_path):
    wrong = tmp_path / "python"
    wrong.write_text("#!/bin/sh\necho no such version >&2\nexit 3\n")
    wrong.chmod(0o755)
    with pytest.raises(SandboxError, match="no such version"):
        Sandbox(SandboxSettings(python=str(wrong))).start()


@pytest.mark.starts
@pytest.mark.parametrize(
    ("missing", "strength"),
    [(set(), "strong"), ({"landlock"}, "strong"), ({"namespaces"}, "basic"), ({"namespaces", "landlock"}, "none"),
     ({"seccomp"}, "none")],
)  # fmt: skip
def test_the_strength_follows_from_the_layers(missing, strength):
    assert (
        Layers({name: "why" * (name in missing) for name in ("namespaces", "landlock", "seccomp")}).strength == strength
    )


# ---------------------------------------------------------------------------------------- What hostile programs achieve

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


@pytest.mark.starts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*hostile.PROGRAMS, "afterwards"])
def test_no_program_gets_out_or_harms_the_node(name: str) -> None:
    assert _strong(as_nobody=False)[name] == ""


@pytest.mark.starts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*hostile.CPP_PROGRAMS, *hostile.TEXTS, "afterwards"])
def test_no_program_in_cpp_gets_out_and_no_text_makes_the_compiler_tell_or_harm(name: str) -> None:
    assert _cpp()[name] == ""


@pytest.mark.starts
@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("name", [*hostile.PROGRAMS, "afterwards"])
def test_nor_does_one_of_a_plain_user(name: str) -> None:
    assert _strong(as_nobody=True)[name] == ""


@pytest.mark.starts
@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("name", [*hostile.PROGRAMS, "afterwards"])
def test_nor_where_namespaces_are_forbidden_and_basic_is_enough(name: str) -> None:
    assert _basic()["strength"] == "basic"
    assert _basic()[name] == ""


@pytest.mark.starts
@pytest.mark.timeout(600)
def test_nor_where_the_service_is_root_of_a_container_and_owns_the_devices() -> None:
    found = _run(["container", *SEEN_WITHOUT, "mode_of_a_device", "times_of_a_device", "closed_outputs"])
    assert found.pop("strength") == "strong"
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.starts
@pytest.mark.timeout(600)
def test_where_namespaces_are_forbidden_landlock_keeps_from_files_and_from_others() -> None:
    if not kernel.landlock_version():
        pytest.skip("this kernel has no Landlock")
    found = _run(["basic", *SEEN_WITHOUT])
    assert found.pop("strength") == "basic"
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.starts
@pytest.mark.timeout(600)
def test_a_node_without_namespaces_is_refused_with_the_remedy() -> None:
    found = _run(["refused"])
    assert found["strength"] == "refused"
    assert "sandbox.require='strong'" in found["refused"]
    assert "user.max_user_namespaces" in found["refused"]


@pytest.mark.starts
@pytest.mark.timeout(600)
def test_the_battery_sees_what_programs_achieve_without_a_sandbox() -> None:
    found = _run(["control", *SEEN_WITHOUT])
    assert [name for name in SEEN_WITHOUT if not found[name]] == []
