"""Serving one controller after another, over real sockets, with controllers that a test opens and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.errors import ChannelFull, ChannelTimeout, EngineError, RoleFailed
from rlhpc.protocol.messages import CONTROL, StopRole
from rlhpc.roles.lifecycle import ControllerSession, RoleContext, hello, parse_role, serve_controllers
from rlhpc.transport.open import open_server
from rlhpc.transport.security import mint_run_keys
from rlhpc.transport.sessions import order_of
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import small_config

OTHER_LEARNING_RATE = 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhpc.roles.lifecycle.ADDRESS_LOOK_S", 0.02)


@pytest.fixture
def generator(tmp_path: Path) -> RoleContext:
    return context(tmp_path)


def context(root: Path, *words: str) -> RoleContext:
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


async def test_when_no_controller_comes_the_role_says_so(generator: RoleContext, tmp_path: Path) -> None:
    impatient = context(tmp_path, "--meet-timeout-s", "1")
    server = controller(impatient, "7.0.0-a")
    _, role = serving(impatient)
    await greeted(server)
    await server.send("generator-0", StopRole("saved", run_is_over=False))
    with pytest.raises(ChannelTimeout, match=r"controller-0 has not opened channel 'control' after 1 s"):
        await asyncio.wait_for(role, PATIENCE_S)
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
