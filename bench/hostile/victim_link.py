"""Start the victim, ask it, and talk to it as an honest member of the run does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.hostile.victim import FRIEND
from rlhpc.base.patience import Deadline
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ChannelError
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.channel import ZmqBlockingClient
from rlhpc.transport.security import mint_run_keys

ROOT = Path(__file__).parents[2]
MEMBERS = ("controller-0", "reward-0", FRIEND, "generator-1", "trainer-0")
STALLED_S = 60.0  # so long nothing may stand still
FRIEND_EVERY_S, ASK_EVERY_S = 0.01, 0.01
CLEAR_PEAK = "5"  # proc(5), clear_refs: VmHWM begins anew


class Victim:
    """The process of victim.py.  Use as a context manager."""

    def __init__(self, directory: Path, num_files: int | None = None) -> None:
        """num_files: soft limit of open files that the process is started with; None: ours."""
        self.secrets = directory / "secrets"
        mint_run_keys(self.secrets, MEMBERS)
        self._process = subprocess.Popen(
            [*limited(num_files), sys.executable, "-m", "bench.hostile.victim", str(self.secrets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            text=True,
        )
        self.addresses: dict[str, str] = self._answer()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate("end\n")

    def report(self) -> dict[str, Any]:
        """What it counts now.  Raises OSError or ValueError if it does not live."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write("report\n")
            self._process.stdin.flush()
            return self._answer()

    def wait(self, is_so: Callable[[dict[str, Any]], bool], patience_s: float) -> dict[str, Any]:
        """Ask until it is so, or until so much time has passed; returns the last report."""
        for _ in Deadline(patience_s).polls(ASK_EVERY_S):
            report = self.report()
            if is_so(report):
                break
        return report

    def forget_peak(self) -> None:
        """Begin the measurement of the largest size anew."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text(CLEAR_PEAK, encoding="ascii")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def limited(num_files: int | None) -> list[str]:
    """Words before a command that shall have this soft limit of open files."""
    return [] if num_files is None else ["sh", "-c", 'ulimit -Sn "$0" && exec "$@"', str(num_files)]


class Friend:
    """An honest member that asks and is answered, endlessly, in a thread.  Use as a context manager."""

    def __init__(self, victim: Victim) -> None:
        self.latencies_s: list[float] = []
        self.trouble = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._converse, args=(victim,), name="friend")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def quantile_s(self, share: float) -> float:
        """The latency below which this share of all answers came; inf without any."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")

    def _converse(self, victim: Victim) -> None:
        client = ZmqBlockingClient(
            CONTROL,
            victim.addresses[CONTROL.name],
            name=FRIEND,
            incarnation="honest",
            server_name="controller-0",
            config=TransportConfig(kind="tcp"),
            secrets=victim.secrets,
        )
        try:
            number = 0
            while not self._over.is_set():
                began = time.monotonic()
                client.send(m.Heartbeat("running", "", number), STALLED_S)
                if (answer := client.receive(STALLED_S)) != m.StopRole(str(number)):
                    self.trouble = f"asked {number}, was answered {answer}"
                    return
                self.latencies_s.append(time.monotonic() - began)
                number += 1
                self._over.wait(FRIEND_EVERY_S)
        except ChannelError as error:
            self.trouble = str(error)
        finally:
            client.close()
