"""Thousands of programs through the warm pool of a reward service, good and bad ones, and what is left of them.

Ten thousand with RLHPC_TEST_PROGRAMS=10000, as `make soak-sandbox` has it; in the suite a tenth.
"""

import asyncio
import json
import os
import random
import time
from pathlib import Path

import pytest

from rlhpc.config.tables_services import SandboxConfig
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.code_place import environment_of
from rlhpc.rewards.pool import Judgement, RewardPool
from rlhpc.sandbox.server import USERS, first_user
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.long, pytest.mark.starts, pytest.mark.timeout(600)]  # for each part

NUM_RUNS = int(os.environ.get("RLHPC_TEST_PROGRAMS", "1000"))
NUM_PARTS, NUM_WARMING = NUM_RUNS // 500, 400
REFERENCE = json.dumps([{"input": "21\n", "output": "42"}])
LIMITS = SandboxConfig(wall_s=10.0, cpu_s=1.0, memory_bytes=256 << 20)
RIGHT = "print(int(input()) * 2)"
# By program: how many of them in ten thousand, and what is said of them; None: it is right, ...: any reason will do.
ENDLESS = {
    "while True: pass": (10, "too much time"),
    "import time\ntime.sleep(600)": (6, "too much time"),
    "while True: print('x' * 10000)": (40, "too much output"),
}
BAD = {
    "print(41)": (600, "another output"),
    "1 +": (300, "SyntaxError"),
    "raise ValueError('no')": (300, "ValueError: no"),
    "import sys; sys.exit(3)": (300, "exit status 3"),
    "import os; os.abort()": (200, "signal 6"),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (200, "signal 9"),
    "import ctypes; ctypes.string_at(1)": (200, "signal 11"),
    "import os\nwhile True: os.fork()": (300, "PermissionError"),
    "import subprocess; subprocess.Popen(['/bin/sleep', '600'])": (200, "PermissionError"),
    "import threading, time\nfor _ in range(500): threading.Thread(target=time.sleep, args=(600,)).start()": (60, ...),
    "held = []\nwhile True: held.append(bytearray(8 << 20))": (100, "MemoryError"),
    "f = open('full', 'wb')\nwhile True: f.write(bytes(1 << 20))": (100, ...),
    "held = []\nwhile True: held.append(open(f'file{len(held)}', 'w'))": (100, ...),
    "import os\nfor n in range(10 ** 6): os.link('a', f'{n}') if n else open('a', 'w').write('x')": (60, ...),
}
GOOD = {
    f"{RIGHT}\nimport threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()": 200,
    f"import os\nos.mkdir('d')\nopen('d/left', 'w').write('x')\n{RIGHT}": 200,
    f"import os\npipes = [os.pipe() for _ in range(20)]\n{RIGHT}": 200,
}


def _mix() -> list[tuple[str, object]]:
    """Programs and what shall be said of them, in an order that is the same every time."""
    mix: list[tuple[str, object]] = []
    for program, (times, said) in (ENDLESS | BAD).items():
        mix += [(program, said)] * _share(times)
    for program, times in GOOD.items():
        mix += [(program, None)] * _share(times)
    mix += [(RIGHT, None)] * (NUM_RUNS - len(mix))
    random.Random(13).shuffle(mix)
    return mix


def _share(times: int) -> int:
    return max(1, times * NUM_RUNS // 10_000)


async def _judge(pool: RewardPool, program: str) -> Judgement:
    return await pool.judge("code_stdin", f"```python\n{program}\n```", REFERENCE)


async def _judge_all(pool: RewardPool, mix: list[tuple[str, object]]) -> list[str]:
    """What was judged otherwise than it should be."""
    wrong: list[str] = []
    rest = iter(mix)

    async def keep_busy() -> None:
        for program, said in rest:
            judgement = await _judge(pool, program)
            wanted = Verdict.CORRECT if said is None else Verdict.WRONG
            if judgement.verdict is not wanted or (isinstance(said, str) and said not in judgement.detail):
                wrong.append(f"{program!r}: {judgement}")

    await asyncio.gather(*(keep_busy() for _ in range(4)))
    return wrong


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _processes_of(worker: int, server: int) -> set[int]:
    """Whoever descends from the worker, is in its session, or has a user id of its server's programs."""
    users = range(first_user(server), first_user(server) + USERS)
    found = {worker}
    for directory in Path("/proc").iterdir():
        try:
            pid = int(directory.name)
            is_its_program = directory.stat().st_uid in users
            if is_its_program or int(_stat(pid)[3]) == worker or int(_stat(pid)[1]) in (worker, server):
                found.add(pid)
        except (ValueError, FileNotFoundError, ProcessLookupError):
            continue
    return found


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _held(worker: int, server: int) -> dict[str, object]:
    """All that programs could have left; of the last one, which is on its way out, nothing."""
    deadline = time.monotonic() + PATIENCE_S
    while _children(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "processes": _processes_of(worker, server),
        "descriptors": {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (worker, server)},
        "files": sorted(map(str, Path(f"/proc/{server}/root/box").rglob("*"))),
        "mounts": len(Path(f"/proc/{server}/mountinfo").read_text().splitlines()),
        "cgroups": [Path(f"/proc/{pid}/cgroup").read_text() for pid in (worker, server)],
    }


class Service:
    """A pool of two workers, what they held when they were warm, and how many programs they have run since."""

    def __init__(self, directory: Path) -> None:
        self.mix, self.num_runs, self._runner = _mix(), 0, asyncio.Runner()
        environment = environment_of(LIMITS) | {"TMPDIR": str(directory)}
        self.pool = RewardPool(2, PATIENCE_S, preload_tasks=["code_stdin"], environment=environment)
        self._runner.run(self.pool.start())
        assert self.judge([each for each in self.mix if each[0] not in ENDLESS][:NUM_WARMING]) == []
        self.pairs = [(worker, server) for worker in self.pool.worker_pids for server in _children(worker)]
        assert len(self.pairs) == 2, "each worker has its sandbox"
        self.before, self.memory = self.held(), self.anonymous_bytes()

    def judge(self, mix: list[tuple[str, object]]) -> list[str]:
        return self._runner.run(_judge_all(self.pool, mix))

    def held(self) -> list[dict[str, object]]:
        return [_held(*pair) for pair in self.pairs]

    def anonymous_bytes(self) -> list[int]:
        return [_anonymous_bytes(pid) for pair in self.pairs for pid in pair]

    def close(self) -> None:
        self._runner.run(self.pool.close())
        self._runner.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def service(directory):
    started = Service(directory)
    yield started
    started.close()


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_hundreds_of_programs_leave_no_process_file_descriptor_or_mount_behind(service, part):
    mix = service.mix[part::NUM_PARTS]
    assert service.judge(mix) == []
    service.num_runs += len(mix)
    assert service.held() == service.before
    assert service.pool.num_restarts == 0


def test_thousands_of_programs_leave_no_memory_and_no_file_behind(service, directory):
    if service.num_runs < NUM_RUNS:
        pytest.skip(f"only {service.num_runs} of them were run")
    grown = [now - then for now, then in zip(service.anonymous_bytes(), service.memory, strict=True)]
    # An allocator keeps a megabyte or two; a leak of 4 KiB in each of a worker's 1,250 programs would be five.
    assert max(grown) < 4 << 20, f"worker, server, worker, server have grown by {grown} bytes"
    assert list(directory.iterdir()) == []
    print(f"grown by {grown} bytes")
