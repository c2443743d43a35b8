"""How a role serves one controller after another, and how it ends."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.files import leave_deleted_directory
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.errors import (
    EXIT_ALONE,
    EXIT_BUG,
    EXIT_CONFIG,
    EXIT_FAULT,
    ChannelFull,
    ChannelTimeout,
    ConfigError,
    EngineError,
    GuardStop,
    RlhpcError,
    RoleFailed,
    StarvedError,
)
from rlhpc.protocol.messages import CONTROL, StopRole
from rlhpc.roles import reward_service
from rlhpc.roles.__main__ import main
from rlhpc.roles.lifecycle import (
    INTERRUPT_PATIENCE_S,
    ControllerSession,
    RoleContext,
    StopRequest,
    first_leaf,
    hello,
    parse_role,
    run_role,
    run_until,
    serve_controllers,
    stop_event,
    unless_stopped,
)
from rlhpc.transport.open import open_server
from rlhpc.transport.security import mint_run_keys
from rlhpc.transport.sessions import order_of
from tests import build
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import small_config

# ----------------------------------------------------------------------------------------------------------------- ends
#
# How a role ends: exit status for programs, the last line of its log for people.


End = Callable[[BaseException | None], tuple[int, list[str]]]


@pytest.fixture
def context(tmp_path: Path) -> RoleContext:
    write_resolved(small_config(), RunLayout(tmp_path), "")
    return parse_role(["generator", "--run-dir", str(tmp_path), "--replica", "2", "--attempt", "1"])


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which is not there any more."""
    here = tmp_path / "gone"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    return here


@pytest.fixture
def end(context: RoleContext, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> End:
    """Lets a role end so; returns its exit status and the lines of its log."""
    monkeypatch.setattr("rlhpc.roles.lifecycle.end_with_parent", lambda number: None)
    monkeypatch.setattr("faulthandler.register", lambda number: None)  # pytest has taken stderr's descriptor

    def ended(error: BaseException | None) -> tuple[int, list[str]]:
        def work(context: RoleContext) -> None:
            if error is not None:
                raise error

        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        root.handlers.clear()  # pytest's own, beside which no other would be made
        try:
            status = run_role(context, work)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
        return status, capsys.readouterr().err.splitlines()

    return ended


def test_a_role_knows_its_name_and_is_a_new_incarnation_each_time(context: RoleContext, tmp_path: Path) -> None:
    again = parse_role(["generator", "--run-dir", str(tmp_path), "--replica", "2", "--attempt", "1"])
    assert context.name == "generator-2"
    assert context.incarnation != again.incarnation
    assert context.resume_step is None
    assert context.config_hash == again.config_hash


def test_a_role_that_is_started_in_a_directory_that_is_gone_works_in_another(gone: Path, tmp_path: Path) -> None:
    """A restart, hours later; MKL: "Cannot load libtorch_cpu.so"."""
    leave_deleted_directory(tmp_path)
    assert Path.cwd() == tmp_path
    leave_deleted_directory(gone)
    assert Path.cwd() == tmp_path


def test_a_role_without_a_run_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        parse_role(["reward", "--run-dir", str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("error", "status", "last_line", "has_traceback"),
    [
        (None, 0, r"INFO ended$", False),
        (ConfigError("data.task='x'"), EXIT_CONFIG, r"ERROR settings: data.task='x'$", False),
        (StarvedError("nothing\n  to learn"), EXIT_CONFIG, r"ERROR StarvedError: nothing; to learn$", False),
        (GuardStop("kl 3.1 is above 1"), EXIT_CONFIG, "GuardStop: kl 3.1 is above 1$", False),
        (ExceptionGroup("g", [GuardStop("kl is above 1")]), EXIT_CONFIG, "GuardStop: kl is above 1$", False),
        (ChannelTimeout("trainer-0 has not"), EXIT_ALONE, r"ERROR ChannelTimeout: trainer-0 has not$", True),
        (ExceptionGroup("g", [ChannelTimeout("late")]), EXIT_ALONE, r"ERROR ChannelTimeout: late$", True),
        (RoleFailed("generator-0 is gone"), EXIT_FAULT, "ERROR RoleFailed: generator-0 is gone$", True),
        (ExceptionGroup("g", [RoleFailed("a\nb")]), EXIT_FAULT, r"ERROR RoleFailed: a; b$", True),
        (ExceptionGroup("g", [ConfigError("c")]), EXIT_CONFIG, r"ERROR ConfigError: c$", True),
        (ExceptionGroup("g", [KeyError("k")]), EXIT_BUG, r"ERROR KeyError: 'k'$", True),
        (KeyError("k"), EXIT_BUG, r"KeyError: 'k'$", True),
    ],
)
def test_the_last_line_is_the_reason_and_only_of_faults_a_traceback_is_written(
    end: End, error: BaseException | None, status: int, last_line: str, has_traceback: bool
) -> None:
    ended, said = end(error)
    assert ended == status
    assert re.search(last_line, said[-1])
    assert any(line.startswith(("Traceback", "  + Exception Group Traceback")) for line in said) == has_traceback


def test_what_a_role_makes_is_writable_for_its_user_alone(end: End, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        end(None)
        (tmp_path / "made").mkdir()
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755


def end_before_a_slow_exit(directory: str, how: str) -> None:
    """A reward service's process, in which a library has more to do at exit than this test has patience."""

    def work(context: RoleContext) -> None:
        atexit.register(time.sleep, 10 * PATIENCE_S)
        if how == "fails":
            raise RoleFailed("this process alone")

    reward_service.run = work
    sys.argv = ["roles", "reward", "--run-dir", directory]
    main()


@pytest.mark.starts
@pytest.mark.parametrize(
    ("how", "status", "last_line"), [("fails", EXIT_FAULT, "RoleFailed: this process alone"), ("ends", 0, "ended")]
)
def test_a_role_that_is_done_waits_for_nothing_at_its_exit(
    context: RoleContext, how: str, status: int, last_line: str
) -> None:
    """torch ends NCCL's groups there, and waits for ranks that wait for this one; vLLM needs seconds after Ctrl-C."""
    program = "import sys; from tests.unit.roles import test_lifecycle as t; t.end_before_a_slow_exit(*sys.argv[1:])"
    command = [sys.executable, "-c", program, str(context.layout.root), how]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert said.splitlines()[-1].endswith(last_line)


@pytest.mark.starts
def test_a_generator_that_still_loads_leaves_at_once(context: RoleContext, tmp_path: Path) -> None:
    """`rlhpc stop` a few seconds after the start took 46 s: the loop that hears signals does not run meanwhile."""
    model = tmp_path / "model"
    model.mkdir()
    os.mkfifo(model / "config.json")  # from which an engine reads, and nobody writes
    write_resolved(build.config(generation={"engine": "scripted"}, model={"path": model}), context.layout, "")
    command = [sys.executable, "-m", "rlhpc.roles", "generator", "--run-dir", str(context.layout.root)]
    process, opened = subprocess.Popen(command, stderr=subprocess.DEVNULL), list[int]()

    def is_loading() -> bool:
        with suppress(OSError):  # it has not opened the other end
            opened.append(os.open(model / "config.json", os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    try:
        assert Deadline(PATIENCE_S).wait_for(is_loading, 0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM  # which its task takes for a good end
    finally:
        process.kill()
        process.wait()
        for descriptor in opened:
            os.close(descriptor)


KEEPS_TMPDIR = """
import os, shutil, sys, tempfile, time
from rlhpc.roles.lifecycle import Guard
Guard(None).start()
tempfile.TemporaryFile().close()
shutil.rmtree(sys.argv[1])
while not os.path.isdir(os.environ["TMPDIR"]): time.sleep(0.02)
tempfile.TemporaryFile().close()
"""


@pytest.mark.starts
def test_a_role_may_make_temporary_files_after_a_cleaner_has_deleted_its_directory(tmp_path: Path) -> None:
    base = tmp_path / "rlhpc-run"
    directory = base / "r0-own"
    directory.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(directory)}
    command = [sys.executable, "-c", KEEPS_TMPDIR, str(base)]
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S)
    assert {place.stat().st_mode & 0o777 for place in (base, directory)} == {0o700}


def test_the_first_error_of_our_own_is_the_reason_however_deep_it_lies() -> None:
    first, second = RoleFailed("first"), StarvedError("second")
    nested = BaseExceptionGroup("all", [ValueError("foreign"), ExceptionGroup("some", [first]), second])
    assert first_leaf(nested) is first
    foreign = ValueError("foreign"), KeyError("other")
    assert first_leaf(ExceptionGroup("all", list(foreign))) is foreign[0]


CALLBACK = """
import asyncio, logging, sys
from rlhpc.roles.lifecycle import end_with_threads, run_loop
from threading import Thread

logging.basicConfig(stream=sys.stderr, level=logging.INFO)

def break_down():
    raise {error}

async def forgotten():
    raise ValueError("nobody asks")

async def work():
    loop = asyncio.get_running_loop()
    asyncio.ensure_future(forgotten())  # what nobody asks for ends nothing
    await asyncio.sleep(0.1)
    {fail}
    await asyncio.sleep(3600)

end_with_threads()
run_loop(work())
"""


@pytest.mark.starts
@pytest.mark.parametrize(
    ("error", "fail", "status", "last_line"),
    [
        ("KeyError('seat')", "loop.call_soon(break_down)", EXIT_BUG, "KeyError: 'seat', in the event loop: "),
        ("MemoryError()", "loop.add_writer(1, break_down)", EXIT_FAULT, "MemoryError, in the event loop: Exception in"),
        ("", "raise KeyError('seat')", 1, "KeyError: 'seat'"),
        ("OSError('dry')", "Thread(target=break_down, name='zap').start()", EXIT_BUG, "OSError: dry, in the thread"),
        ("MemoryError()", "Thread(target=break_down, name='x').start()", EXIT_FAULT, "MemoryError, in the thread 'x'"),
    ],
)
def test_an_exception_that_nobody_waits_for_ends_the_process(
    error: str, fail: str, status: int, last_line: str
) -> None:
    """The loop would go on without what the callback had to do, and heartbeats with it."""
    program = CALLBACK.format(error=error or "AssertionError", fail=fail)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == status, done.stderr
    assert last_line in done.stderr.splitlines()[-1]


async def test_endless_loops_end_when_stop_is_set_and_the_first_failure_is_raised() -> None:
    stop, beats = asyncio.Event(), []

    async def beat() -> None:
        while True:
            beats.append(1)
            await asyncio.sleep(0)
            if len(beats) == 3:
                stop.set()

    await asyncio.wait_for(run_until(stop, beat(), asyncio.Event().wait()), PATIENCE_S)
    assert len(beats) >= 3

    async def fail() -> None:
        raise RoleFailed("gone")

    with pytest.raises(ExceptionGroup) as group:
        await asyncio.wait_for(run_until(asyncio.Event(), asyncio.Event().wait(), fail()), PATIENCE_S)
    assert isinstance(first_leaf(group.value), RlhpcError)


async def test_a_schedulers_notice_asks_to_stop() -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        stop = stop_event()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), PATIENCE_S)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


async def test_what_is_not_done_when_stop_is_set_is_cancelled() -> None:
    stop = asyncio.Event()
    task = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(stop.set)
    assert await unless_stopped(stop, task) is None
    assert task.cancelled()
    assert await unless_stopped(asyncio.Event(), asyncio.ensure_future(asyncio.sleep(0, "done"))) == "done"


@pytest.mark.waits
async def test_a_stop_has_no_limit_until_an_interrupt_sets_one() -> None:
    stop = StopRequest()
    work = asyncio.create_task(asyncio.sleep(60.0))
    waiting = asyncio.create_task(stop.wait_for(work))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.event.wait(), PATIENCE_S)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(waiting, INTERRUPT_PATIENCE_S + PATIENCE_S)
        assert not work.done()
    finally:
        for task in (work, waiting):
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


# --------------------------------------------------------------------------------------- controllers, one after another
#
# Serving one controller after another, over real sockets, with controllers that a test opens and closes.


OTHER_LEARNING_RATE = 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhpc.roles.lifecycle.ADDRESS_LOOK_S", 0.02)


@pytest.fixture
def generator(tmp_path: Path) -> RoleContext:
    return context_of(tmp_path)


def context_of(root: Path, *words: str) -> RoleContext:
    write_resolved(small_config(), RunLayout(root), "")
    mint_run_keys(RunLayout(root).secrets, ["controller-0", "generator-0"])
    patience = ("--meet-timeout-s", str(PATIENCE_S))
    return parse_role(["generator", "--run-dir", str(root), "--incarnation", "7.0.0", *patience, *words])


def controller(of: RoleContext, incarnation: str) -> Any:
    return open_server(
        CONTROL, layout=of.layout, config=of.config.transport, replica=0, incarnation=incarnation,
    )  # fmt: skip


async def serve(session: ControllerSession, *loops: Callable[[], Awaitable[None]]) -> None:
    """What a role does, with no work between hello and farewell."""
    control = await session.connect(CONTROL, timeout_s=None if session.gone else PATIENCE_S)  # the first one is there
    try:
        await control.send(hello(session.context))

        async def hear() -> None:
            session.asked_to_stop(await control.receive())

        await session.until_over(hear(), *(loop() for loop in loops))
    finally:
        await control.close()


def serving(of: RoleContext, *loops: Callable[[], Awaitable[None]]) -> tuple[asyncio.Event, asyncio.Task[None]]:
    stop = asyncio.Event()
    return stop, asyncio.create_task(serve_controllers(of, stop, lambda session: serve(session, *loops)))


async def greeted(server: Any) -> str:
    """Wait for the hello; returns the incarnation."""
    _, message = await server.receive(PATIENCE_S)
    return str(message.incarnation)


async def test_the_next_controller_hears_another_incarnation_of_the_same_start(generator: RoleContext) -> None:
    first = controller(generator, "7.0.0-a")
    _, role = serving(generator)
    incarnations = [await greeted(first)]
    await first.send("generator-0", StopRole("saved", run_is_over=False))
    # It is not met again, though it is still there.
    await asyncio.sleep(0.3)
    second = controller(generator, "7.1.0-a")
    incarnations.append(await greeted(second))
    await second.send("generator-0", StopRole("done"))
    await asyncio.wait_for(role, PATIENCE_S)
    assert incarnations[0] == generator.incarnation
    assert incarnations[0] != incarnations[1]
    assert order_of(incarnations[0]) == order_of(incarnations[1]) == (7, 0, 0)
    for server in (first, second):
        await server.close()


async def test_a_controller_that_says_nothing_is_left_for_its_successor(generator: RoleContext) -> None:
    silent = controller(generator, "7.0.0-a")
    stop, role = serving(generator)
    await greeted(silent)
    successor = controller(generator, "7.0.1-b")  # the address of the silent one is overwritten
    await greeted(successor)
    stop.set()
    await asyncio.wait_for(role, PATIENCE_S)
    for server in (silent, successor):
        await server.close()


async def test_a_channel_that_fails_leads_back_to_the_same_controller(generator: RoleContext) -> None:
    failures = iter([ChannelFull("no message was accepted")])

    async def work() -> None:
        await asyncio.sleep(0.05)
        if (failure := next(failures, None)) is not None:
            raise failure
        await asyncio.Event().wait()

    server = controller(generator, "7.0.0-a")
    stop, role = serving(generator, work)
    assert await greeted(server) != await greeted(server)  # else it would think that nothing was lost
    stop.set()
    await asyncio.wait_for(role, PATIENCE_S)
    await server.close()


async def test_a_failure_that_is_not_a_channels_ends_the_role(generator: RoleContext) -> None:
    async def work() -> None:
        raise EngineError("dead")

    server = controller(generator, "7.0.0-a")
    _, role = serving(generator, work)
    with pytest.raises(ExceptionGroup) as group:
        await asyncio.wait_for(role, PATIENCE_S)
    assert group.group_contains(EngineError)
    await server.close()


async def test_settings_that_changed_end_a_role_that_was_started_with_others(generator: RoleContext) -> None:
    first = controller(generator, "7.0.0-a")
    _, role = serving(generator)
    await greeted(first)
    await first.close()
    changed = generator.config.trainer.model_copy(update={"learning_rate": OTHER_LEARNING_RATE})
    write_resolved(generator.config.model_copy(update={"trainer": changed}), generator.layout, "")
    second = controller(generator, "7.1.0-a")
    with pytest.raises(RoleFailed, match="settings have changed"):
        await asyncio.wait_for(role, PATIENCE_S)
    await second.close()


async def test_settings_that_cannot_be_read_for_a_moment_end_nothing(
    generator: RoleContext, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume has just put another file in their place, and the file server does not know the old one any more."""
    settings = generator.layout.config.read_bytes()
    generator.layout.config.unlink()
    generator.layout.config.mkdir()
    server = controller(generator, "7.0.0-a")
    stop, role = serving(generator)
    async with asyncio.timeout(PATIENCE_S):
        while "config.json" not in caplog.text and not role.done():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    generator.layout.config.rmdir()
    generator.layout.config.write_bytes(settings)
    assert await greeted(server) == generator.incarnation
    stop.set()
    await asyncio.wait_for(role, PATIENCE_S)
    await server.close()


async def test_a_role_that_is_cancelled_while_it_reads_the_settings_leaves_no_socket_behind(
    generator: RoleContext,
) -> None:
    server = controller(generator, "7.0.0-a")
    generator.layout.config.unlink()
    generator.layout.config.mkdir()
    before = num_open()
    connecting = asyncio.create_task(ControllerSession(generator, asyncio.Event()).connect(CONTROL))
    await asyncio.sleep(0.5)
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while num_open() > before:  # noqa: ASYNC110 - the server closes its own ends when it is told
            await asyncio.sleep(0.01)
    await server.close()


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
