"""A role without an event loop hears its signals while it waits for a message."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.messages import BATCHES
from rlhpc.transport.open import open_server
from rlhpc.transport.security import mint_run_keys
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

# The signal reaches a thread that is not the one that waits, so it interrupts no system call: just like a signal that
# arrives between Python's last look for signals and the call.
WAITER = """
import os, signal, sys, threading, time
from pathlib import Path
from rlhpc.config.tables import TransportConfig
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.messages import BATCHES
from rlhpc.transport.open import connect_blocking

def leave(number, frame):  # an exception would be lost wherever Python runs a destructor
    os.write(1, b"heard\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
channel = connect_blocking(BATCHES, layout=RunLayout(Path(sys.argv[1])), config=TransportConfig(kind="ipc"),
                           role="trainer", replica=0, incarnation="0.0.0-t", timeout_s=60)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("waiting", flush=True)
channel.receive()
"""


async def test_a_signal_that_interrupts_no_system_call_is_heard_all_the_same(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    mint_run_keys(layout.secrets, ["controller-0", "trainer-0"])
    server = open_server(BATCHES, layout=layout, config=TransportConfig(kind="ipc"), replica=0, incarnation="0.0.0-c")
    waiter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAITER, tmp_path, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert waiter.stdout is not None
        assert await waiter.stdout.readline() == b"waiting\n"
        waiter.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await waiter.stdout.read() == b"heard\n"
            assert await waiter.wait() == 0
    finally:
        if waiter.returncode is None:
            waiter.kill()
            await waiter.wait()
        await server.close()
