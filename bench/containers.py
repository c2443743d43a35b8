"""What task containers cost and withstand: `python -m bench.containers [TASKS] [AT_ONCE]`, 500 and 32 unless told.

First, alone: milliseconds from a warm request to the end of a container's first command, and containers a second, two
at once.  Then tasks from container to reward, so many at once, of which a third is hostile: fork bombs, full disks,
memory, output without end, signals to processes outside, writes to the node, daemons that forge rewards.  Counted are
escapes (a file of the node that has changed, a process of it that has ended, a forged reward) and leftovers (processes,
mounts, files); `node` is how long a program takes to start meanwhile.  The load is printed: times are of that machine.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.sandbox.container import Containers, Root
from rlhpc.sandbox.container_init import ContainerLimits
from rlhpc.sandbox.images import RootCache, copy_programs, open_image

PROGRAMS = ("bash", "cat", "ls", "mkdir", "rm", "sleep", "setsid", "ln", "yes", "mount", "unshare", "chroot", "mknod")
LIMITS = ContainerLimits(processes=32, memory_bytes=128 << 20, disk_bytes=8 << 20)
COMMAND_S, TESTS_S = 4.0, 60.0
FORGE = "while :; do echo 1 > /logs/verifier/reward.txt; done < /dev/null > /dev/null 2>&1 &"
# NODE is a directory of the node, VICTIM a process of it.
HOSTILE = {
    "fork bomb": "b() { b | b & }; b; sleep 1",
    "fork bomb in sessions": "for i in 1 2 3 4 5 6 7 8; do setsid bash -c 'b() { b | b & }; b' & done; sleep 1",
    "full disk": "cat /dev/zero > /a; cat /dev/zero > /tmp/b; while :; do mkdir /d$((i++)) || break; done; ls / > /o",
    "memory": "x=$(yes) & y=$(yes) & z=$(yes) & wait",
    "output": "yes",
    "no end": "while :; do :; done",
    "writes outside": (
        "for d in NODE /proc/1/rootNODE /proc/1/cwd NODE/../.. ../../../..NODE; do "
        "echo x > $d/canary; mkdir -p $d && echo x > $d/left; rm -rf $d; ln -s $d /l; echo x > /l/canary; done; "
        "mount --bind / /tmp; mknod /disk b 254 0 && echo x > /disk; unshare -Urm chroot /; "
        "echo 1 > /proc/sysrq-trigger; echo x > /proc/sys/kernel/core_pattern; echo x > /dev/null; exit 0"
    ),
    "kills by pid": "kill -9 VICTIM 1 -1; for i in {2..400}; do kill -9 $i; kill -9 -$i; done 2> /dev/null; exit 0",
    "daemons": "for i in 1 2 3 4; do setsid bash -c 'trap \"\" HUP TERM; sleep 1000' < /dev/null & done; exit 0",
    "a daemon that forges": FORGE,
    "forged tests": "rm -rf /tests /logs; mkdir /tests; ln -s / /logs; echo 'echo 1 > /reward' > /tests/test.sh",
    "no programs": "rm -rf /bin /lib /lib64 /usr",
}
GOOD = "read -r a b < numbers; echo $((a * b)) > answer; cat answer"


@dataclass
class Tally:
    """Counts of a run of tasks."""

    escapes: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # good tasks without their reward
    node_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Tasks:
    """Many tasks in containers, and what they did to the node."""

    def __init__(self, root: Root, node: Path) -> None:
        """node: an empty directory that commands will try to change."""
        self._root, self._node, self.tally = root, node, Tally()
        self._victim = subprocess.Popen(["sleep", "100000"])
        (node / "canary").write_text("alive")
        (node / "data").write_text("6 7\n")
        (node / "test.sh").write_text(
            "[[ $(cat /answer 2> /dev/null) == 42 ]] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
        )
        self._seen = self._state()
        self._local = threading.local()
        self._opened: list[Containers] = []

    def run(self, num_tasks: int, at_once: int) -> Tally:
        """Run the tasks; a third is hostile."""
        kinds = [(list(HOSTILE) * num_tasks)[number // 3] if number % 3 == 0 else "" for number in range(num_tasks)]
        random.Random(0).shuffle(kinds)
        ended, began = threading.Event(), time.perf_counter()
        with ThreadPoolExecutor(at_once + 1) as threads:
            looking = threads.submit(self._look_at_node, ended)
            try:
                for kind in threads.map(self._one, kinds):
                    self.tally.kinds[kind or "good"] += 1
            finally:
                ended.set()
            looking.result()
        self.tally.seconds = time.perf_counter() - began
        held = [each.server_pid for each in self._opened]
        time.sleep(1.0)  # the last are on their way out
        for pid in held:
            if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                self.tally.leftovers.append(f"{len(children)} containers of server {pid}")
        for each in self._opened:
            each.close()
        time.sleep(0.5)
        self._compare()
        self._victim.kill()
        self._victim.wait()
        return self.tally

    def _one(self, kind: str) -> str:
        if not hasattr(self._local, "containers"):
            self._local.containers = Containers()
            self._opened.append(self._local.containers)
        node, victim = str(self._node), str(self._victim.pid)
        with self._local.containers.open(self._root, LIMITS, ["/tests", "/logs/verifier"]) as opened:
            opened.put("/", {"numbers": self._node / "data"}, is_fresh=False)
            command = HOSTILE[kind].replace("NODE", node).replace("VICTIM", victim) if kind else GOOD
            opened.run(["bash", "-c", command], time_s=COMMAND_S if kind else TESTS_S)
            is_there = opened.put("/tests", {"test.sh": self._node / "test.sh"}) == ""
            is_there = is_there and opened.put("/logs/verifier", {}) == ""
            if is_there:
                opened.run(["bash", "/tests/test.sh"], time_s=TESTS_S)
            (reward,) = opened.read(["/logs/verifier/reward.txt"])
        if kind and is_there and reward not in (None, "0\n"):
            self.tally.escapes.append(f"{kind}: reward {reward!r}")
        if not kind and reward != "1\n":
            self.tally.wrong.append(f"reward {reward!r}")
        return kind

    def _look_at_node(self, ended: threading.Event) -> None:
        while not ended.wait(0.25):
            began = time.perf_counter()
            subprocess.run(["true"], check=True)
            self.tally.node_ms.append((time.perf_counter() - began) * 1000)

    def _state(self) -> dict[str, object]:
        return {
            "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
            "files": sorted(path.name for path in self._node.iterdir()),
            "canary": (self._node / "canary").read_text(),
            "core_pattern": Path("/proc/sys/kernel/core_pattern").read_text(),
            "root": sorted(map(str, Path("/").iterdir())),
        }

    def _compare(self) -> None:
        now = self._state()
        for name, before in self._seen.items():
            if now[name] != before:
                self.tally.escapes.append(f"{name}: {before!r} is now {now[name]!r}")
        if self._victim.poll() is not None:
            self.tally.escapes.append("a process of the node has ended")
        roots = str(self._root.path)
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                try:
                    mounts = (each / "mountinfo").read_text()
                except OSError:
                    continue
                if "overlay" in mounts and roots in mounts:
                    self.tally.leftovers.append(f"process {each.name} with a container's root")


@contextmanager
def a_root() -> Iterator[tuple[Root, Path]]:
    """An unpacked root of this machine's programs, and an empty directory of the node."""
    base = Path(tempfile.mkdtemp(prefix="rlhpc-bench-", dir="/tmp"))
    base.chmod(0o711)
    try:
        copy_programs(PROGRAMS, base / "tree")
        (base / "node").mkdir()
        (base / "node").chmod(0o777)  # a command outside of its root could write there
        yield RootCache(base / "cache").root_of(open_image(base / "tree")), base / "node"
    finally:
        shutil.rmtree(base)


def main(num_tasks: int, at_once: int) -> None:
    """Measure and print."""
    with a_root() as (root, node):
        _time_alone(root)
        _time_both(root)
        tally = Tasks(root, node).run(num_tasks, at_once)
    hostile = sum(tally.kinds.values()) - tally.kinds["good"]
    print(
        f"tasks       {num_tasks}, {hostile} of them hostile, {at_once} at once: {tally.seconds:.0f} s, "
        f"{len(tally.escapes)} escapes, {len(tally.leftovers)} leftovers, {len(tally.wrong)} good ones without their "
        f"reward (load {_load()})"
    )
    worst = statistics.quantiles(tally.node_ms, n=20)[-1]
    print(f"node        a program starts in {statistics.median(tally.node_ms):.0f} ms, 95 % below {worst:.0f} ms")
    for line in (*tally.escapes, *tally.leftovers, *tally.wrong)[:20]:
        print(f"            {line}")


def _time_alone(root: Root) -> None:
    taken = []
    with Containers() as containers:
        _first_command(containers, root)
        for _ in range(100):
            began = time.perf_counter()
            _first_command(containers, root)
            taken.append((time.perf_counter() - began) * 1000)
        way = containers.way
    print(
        f"one         {statistics.median(taken):.0f} ms to the end of the first command, 95 % below "
        f"{statistics.quantiles(taken, n=20)[-1]:.0f} ms, the fastest {min(taken):.0f} ms; {way} (load {_load()})"
    )


def _time_both(root: Root) -> None:
    def many(containers: Containers) -> None:
        for _ in range(100):
            _first_command(containers, root)

    with Containers() as one, Containers() as other, ThreadPoolExecutor(2) as threads:
        began = time.perf_counter()
        list(threads.map(many, (one, other)))
        print(f"two at once {200 / (time.perf_counter() - began):.0f} containers a second (load {_load()})")


def _first_command(containers: Containers, root: Root) -> None:
    with containers.open(root, LIMITS) as opened:
        assert opened.run(["bash", "-c", "echo x"], time_s=60.0).output == b"x\n"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*(numbers + [500, 32][len(numbers) :]))
