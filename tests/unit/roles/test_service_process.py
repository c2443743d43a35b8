"""The process of a service: how it starts, reports, is asked to stop, dies, and is started again.  Scripted engine."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlhpc.config.file import write_resolved
from rlhpc.protocol.contracts import ServerChannel
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_FAULT
from rlhpc.protocol.messages import CONTROL, Heartbeat, Hello, StopRole
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.transport.open import open_server
from rlhpc.transport.security import mint_run_keys
from rlhpc.transport.service_address import ServiceAddress, addresses_of
from tests.patience import PATIENCE_S
from tests.unit.roles.test_service import CHAT, context_of, make_model

pytestmark = [pytest.mark.starts, pytest.mark.waits]


@dataclass
class Run:
    """A run directory, and the controller of the processes that are started in it."""

    context: RoleContext
    control: ServerChannel

    async def start(self, number: int, *more: str) -> asyncio.subprocess.Process:
        """Start the process again, as its supervisor does."""
        command = [sys.executable, "-m", "rlhpc.roles", "service", "--run-dir", str(self.context.layout.root)]
        incarnation = ["--incarnation", f"7.0.{number}", "--meet-timeout-s", str(PATIENCE_S)]
        words = more or ("--service", "helper")
        return await asyncio.create_subprocess_exec(
            *command, *incarnation, *words, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )

    async def next(self, kind: type) -> Any:
        """The next message of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                name, message = await self.control.receive(PATIENCE_S)
                assert name == "service-0"
                if isinstance(message, kind):
                    return message

    async def address(self, number: int) -> ServiceAddress:
        """What this start of the process has published."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for found in addresses_of(self.context.layout.rendezvous, "helper"):
                    if found.incarnation.startswith(f"7.0.{number}-"):
                        return found
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(tmp_path: Path, kind: str, **script: Any) -> AsyncIterator[Run]:
    make_model(tmp_path / "model", **script)
    context = context_of(tmp_path, kind)
    context.layout.root.mkdir()
    context = replace(context, config=context.config.model_copy(update={"transport": _quick(context)}))
    write_resolved(context.config, context.layout, "")
    mint_run_keys(context.layout.secrets, ["controller-0", "service-0"])
    control = open_server(
        CONTROL, layout=context.layout, config=context.config.transport, replica=0, incarnation="7.0.0-c"
    )
    try:
        yield Run(context, control)
    finally:
        await control.close()


def _quick(context: RoleContext) -> Any:
    return context.config.transport.model_copy(update={"heartbeat_s": 0.1})


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Its exit status and the last line of its log; whatever happens, it is gone afterwards."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode().splitlines()[-1]


async def ask(address: ServiceAddress, **more: Any) -> int:
    headers = {"Authorization": f"Bearer {address.key}"}
    async with aiohttp.ClientSession() as http:
        body = {"messages": CHAT, **more}
        async with http.post(f"{address.url}/chat/completions", json=body, headers=headers) as reply:
            await reply.read()
            return reply.status


async def test_a_service_answers_what_it_has_begun_when_it_is_terminated(tmp_path: Path) -> None:
    async with running(tmp_path, "judge", token_s=0.02, stop_probability=0.0) as run:
        process = await run.start(0)
        try:
            hello: Hello = await run.next(Hello)
            assert (hello.role, hello.replica, hello.num_weight_ranks) == ("service", 0, 0)
            address = await run.address(0)
            assert (address.pid, address.replica, address.model) == (process.pid, 0, "helper")
            assert (await run.next(Heartbeat)).waits_for == "requests"
            asking = asyncio.create_task(ask(address, max_tokens=50))
            while not (await run.next(Heartbeat)).metrics["running"]:
                pass
            process.send_signal(signal.SIGTERM)
            assert await asking == 200
        finally:
            status, last = await ended(process)
        assert (status, last.endswith("INFO ended")) == (0, True)
        assert addresses_of(run.context.layout.rendezvous, "helper") == []


async def test_a_service_that_was_killed_is_found_at_its_next_address_alone(tmp_path: Path) -> None:
    async with running(tmp_path, "judge", reply="7") as run:
        first = await run.start(0)
        try:
            old = await run.address(0)
            await run.next(Hello)
            first.kill()
        finally:
            assert (await ended(first))[0] == -signal.SIGKILL
        second = await run.start(1)
        try:
            new = await run.address(1)
            assert new.key != old.key
            assert await ask(new) == 200
            with pytest.raises(aiohttp.ClientError):
                await ask(old)
            await run.next(Hello)
            await run.control.send("service-0", StopRole("the run is over"))
        finally:
            status, _ = await ended(second)
        assert status == 0
        assert addresses_of(run.context.layout.rendezvous, "helper") == []


async def test_an_engine_that_dies_ends_the_process_with_a_fault(tmp_path: Path) -> None:
    async with running(tmp_path, "judge", die_after_tokens=5, stop_probability=0.0) as run:
        process = await run.start(0)
        try:
            assert await ask(await run.address(0)) == 503
        finally:
            status, last = await ended(process)
        assert status == EXIT_FAULT
        assert "EngineError: the generation engine is dead: scripted to die" in last
        assert addresses_of(run.context.layout.rendezvous, "helper") == []


async def test_a_process_of_no_service_says_which_there_are(tmp_path: Path) -> None:
    async with running(tmp_path, "judge") as run:
        status, last = await ended(await run.start(0, "--service", "other"))
    assert status == EXIT_CONFIG
    assert "--service 'other': this run starts no such service; legal: helper" in last
